"""The batch job of one `asyncflow sbatch` command: everything that can be checked before it runs, then its script.

    BatchRequest --accept_job()--> BatchJob --script_text--> #SBATCH lines, settings of this run, `relaunch.sh`

`launcher.slurm.sbatch_command` prints or submits the script. `relaunch.sh` is the part that all batch scripts share,
including the templates in `configs/slurm`: it launches, passes Slurm's signals on, and requeues the job.
"""

import math
import os
import re
import shlex
import shutil
import sys
from dataclasses import dataclass, fields, replace
from pathlib import Path

from asyncflow.errors import ConfigError
from asyncflow.run_files import CONFIG_FILE
from asyncflow.vendors import vendors
from launcher.checks.preflight import Cluster
from launcher.config.paths import PACKAGED, user_path
from launcher.request.request import Accepted, Request
from launcher.request.stop_time import StopSave
from workers.settings.run import LauncherConfig

COMMAND = "asyncflow-launch"
_EARLY_S = 60
"""Slurm may send the signal this much earlier than asked (man sbatch, --signal; s)."""
_LEAVE_S = 10
"""Time for what a launcher does after its processes are gone: its last lines, the step's end (s)."""
UNLIMITED = ("infinite", "unlimited")
_TIME_LIMIT = re.compile(r"(?:(?P<days>\d+)-)?(?P<first>\d+)(?::(?P<second>\d+))?(?::(?P<third>\d+))?", re.ASCII)
_WORD = re.compile(r"[^\s\"'\\#]+")


@dataclass(frozen=True, kw_only=True)
class SlurmOptions:
    """Options for Slurm.

    Attributes:
        nodes: each gets one launcher.
        partition, account, gres: "" leaves the choice to the cluster.
        cpus_per_task: cores of each launcher and its workers; 0: whole nodes, with all cores and memory.
        signal_s: how long before the time limit the run is stopped (s).
        sbatch_args: further options of sbatch; they override those above.
        container_image, container_mounts: of pyxis (enroot), for the launchers; "": they run on the nodes themselves.
    """

    nodes: int
    time_limit: str
    partition: str = ""
    account: str = ""
    gres: str = ""
    cpus_per_task: int = 0
    signal_s: int = 120
    max_requeues: int = 20
    sbatch_args: tuple[str, ...] = ()
    container_image: str = ""
    container_mounts: str = ""


@dataclass(frozen=True, kw_only=True)
class BatchJob(SlurmOptions):
    """A checked batch job.

    Attributes:
        gather_s: how long the other launchers may take after the first one has gone (s).
        workdir: absolute; relative paths in `launch` start here.
        run_dir: absolute; the same for all restarts, and the place of Slurm's log.
        launch: the launcher's command without `--run-dir`, split into the script's lines.
        setup: bash lines to run before the launch, e.g. `module load ...`.
        notes: lines for the user about what could not be checked.
    """

    name: str
    gather_s: int
    workdir: Path
    run_dir: Path
    launch: tuple[tuple[str, ...], ...]
    setup: str = ""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class BatchRequest(SlurmOptions):
    """The arguments of `asyncflow sbatch`; see its `--help`."""

    request: Request
    setup: str | None = None
    device: str = ""
    """Kind of the nodes' devices; "": `launcher.device`, or what `gres` names if that is `auto`."""

    def accept_job(self) -> BatchJob:
        """Check the run as `asyncflow-launch` will on the nodes: with their devices, not with those of this machine.
        Writes nothing.

        Raises:
            ConfigError: the first thing that is wrong.
        """
        for option in ("partition", "account", "gres"):
            _check_word(f"--{option}", getattr(self, option))
        for argument in self.sbatch_args:
            _check_argument(argument)
        mounts = self._check_container()
        setup = _read(self.setup) if self.setup is not None else ""
        cluster = self._cluster()
        request = replace(self.request, cluster=cluster)
        if self.device:
            request = replace(request, overrides=(*request.overrides, f"launcher.device={self.device}"))
        accepted = request.accept_run()
        config = accepted.checked.config
        stop_s = _longest_stop_s(config.launcher, accepted.save)
        self._check_times(stop_s, accepted.save)
        for what, text in (
            ("name", config.name),
            ("--run-dir", accepted.run_dir),
            ("the working directory", Path.cwd()),
        ):
            _check_quotable(what, str(text))
        if self.container_image:
            self._check_inside(accepted, mounts)
        options = {each.name: getattr(self, each.name) for each in fields(SlurmOptions)}
        return BatchJob(
            **options,
            name=config.name,
            gather_s=stop_s,
            workdir=Path.cwd(),
            run_dir=accepted.run_dir,
            launch=_launch(request, accepted, in_container=bool(self.container_image)),
            setup=setup,
            notes=_notes(accepted, cluster),
        )

    def _cluster(self) -> Cluster:
        if self.device and self.device not in vendors():
            raise ConfigError(f"--device: {self.device!r} is no kind of device; use one of {', '.join(vendors())}")
        asked = [self.gres]
        asked += [argument.partition("=")[2] for argument in self.sbatch_args if argument.startswith("--gres=")]
        asked += [f"gpu:{argument.partition('=')[2]}" for argument in self.sbatch_args if argument.startswith(_GPUS)]
        named, count = next(filter(None, (_devices_asked_for(text) for text in reversed(asked))), ("", 0))
        if not named and any(argument.startswith(_GPUS_OF_JOB) for argument in self.sbatch_args):
            named = "gpu"  # Slurm decides how many of them each node has
        return Cluster(self.nodes, auto=_NAMED.get(named, "cpu"), devices_per_node=count)

    def _check_container(self) -> list["_Mount"]:
        for argument in self.sbatch_args:
            if argument.startswith("--container-"):
                raise ConfigError(
                    f"--sbatch-arg: {argument} would put the batch script itself into the container, where there is no "
                    f"srun; give it to this command: --container-image, --container-mounts"
                )
        for option in ("container_image", "container_mounts"):
            value = getattr(self, option)
            if not value.isprintable():
                raise ConfigError(
                    f"--{option.replace('_', '-')}: {value!r} has characters that cannot be printed; remove them"
                )
        if self.container_mounts and not self.container_image:
            raise ConfigError("--container-mounts: there is no container; give --container-image, too")
        return [_Mount.parse(text) for text in self.container_mounts.split(",")] if self.container_mounts else []

    def _check_inside(self, accepted: Accepted, mounts: list["_Mount"]) -> None:
        """Refuse a container that does not show what the launchers read and write, under the same paths."""
        needed = {"the run directory": accepted.run_dir, "the working directory": Path.cwd()}
        if accepted.source.parent != PACKAGED:
            needed["CONFIG"] = accepted.source
        for what, path in needed.items():
            # As in a table of mounts, a later one hides what lies below it.
            shown = next((one for one in reversed(mounts) if path.is_relative_to(one.target)), None)
            if shown is None or shown.source != shown.target:
                there = path.parent if what == "CONFIG" else path
                raise ConfigError(
                    f"--container-mounts: {what} {path} is not in the container; add {there}:{there}, or a directory "
                    f"above it, under its own path"
                )
            if shown.read_only and path == accepted.run_dir:
                raise ConfigError(
                    f"--container-mounts: the run directory {path} is read-only in the container; leave its :ro out"
                )

    def _check_times(self, stop_s: int, save: StopSave) -> None:
        if self.signal_s < stop_s:
            saving = f"; the save: {save}" if save.seconds else ""
            raise ConfigError(
                f"--signal-s: {self.signal_s} s are too short to stop and save, which may take {stop_s} s "
                f"(twice launcher.stop_timeout_s and {_LEAVE_S}{saving}); set it to {stop_s} or more"
            )
        if time_limit_s(self.time_limit) <= self.signal_s + _EARLY_S:
            raise ConfigError(
                f"--time: {self.time_limit!r} leaves no time to train: Slurm's signal comes {self.signal_s} s "
                f"(--signal-s) ahead of the limit, or up to {_EARLY_S} s earlier; raise it"
            )


def time_limit_s(text: str) -> float:
    """Return the seconds that `--time TEXT` means to sbatch; infinity for no limit.

    Args:
        text: `minutes`, `minutes:seconds`, `hours:minutes:seconds`, `days-hours`, `days-hours:minutes`,
            `days-hours:minutes:seconds`, or one of `UNLIMITED`.

    Raises:
        ConfigError: the text has another form, or means zero.
    """
    if text.lower() in UNLIMITED:
        return float("inf")
    match = _TIME_LIMIT.fullmatch(text)
    if match is None:
        raise ConfigError(f"--time: {text!r} is no time limit; give hours:minutes:seconds or days-hours, e.g. 24:00:00")
    numbers = [int(number) for number in match.group("first", "second", "third") if number is not None]
    first_is_hours = match["days"] is not None or len(numbers) == 3
    units_s = (3600, 60, 1) if first_is_hours else (60, 1)
    seconds = int(match["days"] or 0) * 86_400
    seconds += sum(number * unit_s for number, unit_s in zip(numbers, units_s, strict=False))
    if seconds == 0:
        raise ConfigError(f"--time: {text!r} must be greater than zero; give hours:minutes:seconds, e.g. 24:00:00")
    return float(seconds)


def _longest_stop_s(launcher: LauncherConfig, save: StopSave) -> int:
    """Return how long a launcher may take from the signal to its end (s)."""
    # Before and after the save, workers may take `stop_timeout_s` each.
    return math.ceil(2 * launcher.stop_timeout_s + save.seconds) + _LEAVE_S


def _notes(accepted: Accepted, cluster: Cluster) -> tuple[str, ...]:
    kind, config = accepted.checked.devices.kind, accepted.checked.config
    if kind == "cpu" or cluster.devices_per_node or config.launcher.devices_per_node:
        return ()
    return (
        f"how many {kind} devices a node has is not known here, so the nodes check the placement; --gres or "
        f"launcher.devices_per_node would say it",
    )


def _launch(request: Request, accepted: Accepted, *, in_container: bool) -> tuple[tuple[str, ...], ...]:
    """Return the launcher's command, one line per option."""
    # Absolute paths, since the batch shell may have another environment than this one. A container has its own.
    beside_python = Path(sys.executable).with_name(COMMAND)
    command = str(beside_python) if beside_python.is_file() else shutil.which(COMMAND) or COMMAND
    source = str(accepted.source)
    if in_container:
        command = COMMAND
        source = accepted.source.stem if accepted.source.parent == PACKAGED else source
    is_run_s_own = accepted.source == accepted.run_dir / CONFIG_FILE
    lines: list[tuple[str, ...]] = [(command,) if is_run_s_own else (command, source)]
    if request.roles is not None:
        lines.append(("--roles", request.roles))
    lines += [("--set", override) for override in request.overrides]
    if request.steps is not None:
        lines.append(("--steps", str(request.steps)))
    if request.resume is not None:
        lines.append(("--resume", request.resume))
    return tuple(lines)


def _read(text: str) -> str:
    path = user_path(text, "--setup")
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--setup: {path} cannot be read ({error}); name a file of bash lines") from error


_GPUS = ("--gpus-per-node=", "--gpus-per-task=")  # there is one task on each node
_GPUS_OF_JOB = ("--gpus=", "-G")
_NAMED = {"gpu": "cuda", "npu": "npu"}
"""What sites call their devices -> what PyTorch calls them."""
_GRES = re.compile(r"(?P<name>gpu|npu)(?::[^:,=\d][^:,=]*)?(?:[:=](?P<count>\d+))?", re.ASCII)


def _devices_asked_for(text: str) -> tuple[str, int] | None:
    """Return name and number of the devices in a `--gres` (`gpu:8`, `gpu:h100:8,nvme:1`); None: it asks for none."""
    found = next(filter(None, map(_GRES.fullmatch, text.split(","))), None)
    return None if found is None else (found["name"], int(found["count"] or 1))


@dataclass(frozen=True)
class _Mount:
    """One of pyxis' mounts: SRC[:DST[:FLAG+FLAG...]]."""

    source: str
    target: str
    read_only: bool

    @staticmethod
    def parse(text: str) -> "_Mount":
        source, *rest = text.split(":", 2)
        target = rest[0] if rest else source
        if not (source.startswith((".", "/")) or source in ("tmpfs", "umount")) or not target.startswith((".", "/")):
            raise ConfigError(
                f"--container-mounts: {text!r} is no mount; give SRC:DST, both of them paths, and commas between "
                f"mounts, e.g. /home:/home,/scratch:/scratch:ro"
            )
        flags = rest[1].split("+") if len(rest) > 1 else []
        return _Mount(os.path.normpath(source), os.path.normpath(target), "ro" in flags)


def _check_word(option: str, value: str) -> None:
    if value and _WORD.fullmatch(value) is None:
        raise ConfigError(f"{option}: {value!r} cannot stand in an #SBATCH line; leave out blanks, quotes, \\ and #")


def _check_argument(argument: str) -> None:
    if not argument.startswith("-") or not argument.isprintable():
        raise ConfigError(
            f"--sbatch-arg: {argument!r} is not an option of sbatch; give one, e.g. --sbatch-arg '--qos=long'"
        )


def _check_quotable(what: str, text: str) -> None:
    if not text.isprintable() or any(char in text for char in '"\\'):
        raise ConfigError(f"{what}: {text!r} cannot stand in an #SBATCH line; choose another, without quotes and \\")


RELAUNCH = Path(__file__).with_name("relaunch.sh")
EARLY_TRAP = """\
# A signal that comes early would end bash; it is kept until there is something to stop.
stopping=
trap 'stopping=yes' USR1 TERM
"""
"""First lines after Slurm's options; `relaunch.sh` needs them."""
_PLAIN = re.compile(r"[\w./:@%+=,-]+", re.ASCII)


def script_text(job: BatchJob) -> str:
    parts = (_title(job), _resources(job), _restarts(job), _setup(job), _settings(job), RELAUNCH.read_text())
    return "\n".join(parts)


def _title(job: BatchJob) -> str:
    nodes = f"{job.nodes} nodes, one launcher on each" if job.nodes > 1 else "1 node"
    return f"""\
#!/bin/bash
# AsyncFlow run {job.name!r} on {nodes}. Written by `asyncflow sbatch`; change it as you like.
#
#   sbatch SCRIPT                    starts it; after its time limit or a preemption, it continues by itself
#   sbatch SCRIPT --resume latest    continues it after it gave up, failed or was cancelled
#   scancel JOB                      ends it for good
"""


def _resources(job: BatchJob) -> str:
    lines = [_sbatch("job-name", job.name)]
    lines += [_sbatch(key, value) for key, value in (("partition", job.partition), ("account", job.account)) if value]
    lines += [_sbatch("nodes", job.nodes), _sbatch("ntasks-per-node", 1)]
    if job.cpus_per_task:
        lines.append(_sbatch("cpus-per-task", job.cpus_per_task))
    else:
        lines += [
            "# Whole nodes: without this the launcher and all its workers would share one core.",
            "#SBATCH --exclusive",
        ]
        lines.append(_sbatch("mem", 0))
    if job.gres:
        lines.append(_sbatch("gres", job.gres))
    lines.append(_sbatch("time", job.time_limit))
    return "\n".join((*lines, ""))


def _restarts(job: BatchJob) -> str:
    """Return the options that stop the job in time, and restart it with the same directory and log."""
    # `%` begins a pattern in a name of Slurm's log.
    output = str(job.run_dir).replace("%", "%%") + "/slurm-%j.out"
    lines = [
        f"# {job.signal_s} s before the time limit Slurm sends USR1, to this script alone (B:), which does the rest.",
        _sbatch("signal", f"B:USR1@{job.signal_s}"),
        "#SBATCH --requeue",
        "#SBATCH --open-mode=append",
        _sbatch("output", output),
        _sbatch("chdir", str(job.workdir)),
        *(f"#SBATCH {argument}" for argument in job.sbatch_args),
    ]
    return "\n".join((*lines, ""))


def _setup(job: BatchJob) -> str:
    lines = [
        EARLY_TRAP,
        "# Every channel between two processes takes file descriptors: as many as the site allows.",
        'ulimit -n "$(ulimit -Hn)"',
    ]
    if job.setup:
        lines += ["", job.setup.strip("\n")]
    return "\n".join((*lines, ""))


def _settings(job: BatchJob) -> str:
    srun_options = ["--cpu-bind=none"]
    if job.container_image:
        # Options of srun, not of sbatch: the batch script stays outside, where Slurm's commands are.
        srun_options.append(_word(f"--container-image={job.container_image}"))
        if job.container_mounts:
            srun_options.append(_word(f"--container-mounts={job.container_mounts}"))
        srun_options.append(_word(f"--container-workdir={job.workdir}"))
    if job.cpus_per_task:
        srun_options.append(f"--cpus-per-task={job.cpus_per_task}")
    if job.nodes > 1:
        srun_options.append("--label")
    lines = [
        f"run_dir={_word(str(job.run_dir))}",
        f"max_requeues={job.max_requeues}",
        f"gather_s={job.gather_s}",
        f"srun_options=({' '.join(srun_options)})",
        "launch=(",
        *(f"    {' '.join(_word(word) for word in words)}" for words in job.launch),
        '    --run-dir "$run_dir"',
        ")",
    ]
    return "\n".join((*lines, ""))


def _sbatch(option: str, value: str | int) -> str:
    text = str(value)
    return f"#SBATCH --{option}={text}" if _PLAIN.fullmatch(text) else f'#SBATCH --{option}="{text}"'


def _word(text: str) -> str:
    """Quote for bash. Commas are quoted, too: in an array they look like a mistake."""
    if _PLAIN.fullmatch(text):
        return f"'{text}'" if "," in text else text
    return shlex.quote(text)
