"""The batch job of one `asyncflow sbatch` command: everything that can be checked before it runs, then its script.

    BatchRequest --accept()--> BatchJob --script_text--> #SBATCH lines, settings of this run, `relaunch.sh`

`launcher.slurm.sbatch_command` prints or submits the script. `relaunch.sh` is the part that all batch scripts share,
including the templates in `configs/slurm`: it launches, passes Slurm's signals on, and requeues the job.
"""

import math
import re
import shlex
import shutil
import sys
from dataclasses import dataclass, fields, replace
from pathlib import Path

from asyncflow.errors import ConfigError
from asyncflow.run_files import CONFIG_FILE
from launcher.config.paths import user_path
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


@dataclass(frozen=True, kw_only=True)
class BatchJob(SlurmOptions):
    """A checked batch job.

    Attributes:
        gather_s: how long the other launchers may take after the first one has gone (s).
        workdir: absolute; relative paths in `launch` start here.
        run_dir: absolute; the same for all restarts, and the place of Slurm's log.
        launch: the launcher's command without `--run-dir`, split into the script's lines.
        setup: bash lines to run before the launch, e.g. `module load ...`.
    """

    name: str
    gather_s: int
    workdir: Path
    run_dir: Path
    launch: tuple[tuple[str, ...], ...]
    setup: str = ""


@dataclass(frozen=True)
class BatchRequest(SlurmOptions):
    """The arguments of `asyncflow sbatch`; see its `--help`."""

    request: Request
    setup: str | None = None

    def accept_job(self) -> BatchJob:
        """Check the run as `asyncflow-launch` will, except for devices, which only the nodes know. Writes nothing.

        Raises:
            ConfigError: the first thing that is wrong.
        """
        for option in ("partition", "account", "gres"):
            _check_word(f"--{option}", getattr(self, option))
        for argument in self.sbatch_args:
            _check_argument(argument)
        setup = _read(self.setup) if self.setup is not None else ""
        request = self.request
        # The submitting machine may have other devices than the nodes, so devices are not checked here.
        accepted = replace(request, overrides=(*request.overrides, "launcher.device=cpu")).accept_run()
        config = accepted.checked.config
        stop_s = _longest_stop_s(config.launcher, accepted.save)
        self._check_times(stop_s, accepted.save)
        for what, text in (
            ("name", config.name),
            ("--run-dir", accepted.run_dir),
            ("the working directory", Path.cwd()),
        ):
            _check_quotable(what, str(text))
        options = {each.name: getattr(self, each.name) for each in fields(SlurmOptions)}
        return BatchJob(
            **options,
            name=config.name,
            gather_s=stop_s,
            workdir=Path.cwd(),
            run_dir=accepted.run_dir,
            launch=_launch(request, accepted),
            setup=setup,
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


def _launch(request: Request, accepted: Accepted) -> tuple[tuple[str, ...], ...]:
    """Return the launcher's command, one line per option."""
    # Absolute paths, since the batch shell may have another environment than this one.
    beside_python = Path(sys.executable).with_name(COMMAND)
    command = str(beside_python) if beside_python.is_file() else shutil.which(COMMAND) or COMMAND
    is_run_s_own = accepted.source == accepted.run_dir / CONFIG_FILE
    lines: list[tuple[str, ...]] = [(command,) if is_run_s_own else (command, str(accepted.source))]
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
