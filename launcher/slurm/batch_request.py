"""One `asyncflow sbatch` command from its arguments to a batch job; all that can be checked before it runs is.

BatchRequest --accept()--> BatchJob --script_text--> printed, or submitted (`launcher.slurm.command`)
"""

import math
import re
import shutil
import sys
from dataclasses import dataclass, replace
from pathlib import Path

from asyncflow.errors import ConfigError
from asyncflow.run_files import CONFIG_FILE
from launcher.cli.request import Accepted, Request
from launcher.config.paths import user_path
from launcher.slurm.script import BatchJob
from workers.config import LauncherConfig

COMMAND = "asyncflow-launch"
_EARLY_S = 60
"""Slurm may send the signal so much earlier than it was asked to (man sbatch, --signal)."""
_LEAVE_S = 10
"""For what a launcher does after its processes are gone: its last lines, the step's end (s)."""
UNLIMITED = ("infinite", "unlimited")
_TIME_LIMIT = re.compile(r"(?:(?P<days>\d+)-)?(?P<first>\d+)(?::(?P<second>\d+))?(?::(?P<third>\d+))?", re.ASCII)
_WORD = re.compile(r"[^\s\"'\\#]+")


@dataclass(frozen=True)
class BatchRequest:
    """The arguments of `asyncflow sbatch`; see its `--help`."""

    request: Request
    nodes: int
    time_limit: str
    partition: str = ""
    account: str = ""
    gres: str = ""
    cpus_per_task: int = 0
    signal_s: int = 120
    max_requeues: int = 20
    sbatch_args: tuple[str, ...] = ()
    setup: str | None = None

    def accept(self) -> BatchJob:
        """Check the run as `asyncflow-launch` will, but for devices, which are the nodes' own; write nothing.

        Raises:
            ConfigError: the first thing that does not hold.
        """
        for option in ("partition", "account", "gres"):
            _check_word(f"--{option}", getattr(self, option))
        for argument in self.sbatch_args:
            _check_argument(argument)
        setup = _read(self.setup) if self.setup is not None else ""
        request = self.request
        accepted = replace(request, overrides=(*request.overrides, "launcher.device=cpu")).accept()
        config = accepted.checked.config
        stop_s = _longest_stop_s(config.launcher)
        self._check_times(stop_s)
        for what, text in (
            ("name", config.name),
            ("--run-dir", accepted.run_dir),
            ("the working directory", Path.cwd()),
        ):
            _check_quotable(what, str(text))
        return BatchJob(
            name=config.name,
            nodes=self.nodes,
            time_limit=self.time_limit,
            signal_s=self.signal_s,
            max_requeues=self.max_requeues,
            gather_s=stop_s,
            workdir=Path.cwd(),
            run_dir=accepted.run_dir,
            launch=_launch(request, accepted),
            partition=self.partition,
            account=self.account,
            gres=self.gres,
            cpus_per_task=self.cpus_per_task,
            sbatch_args=self.sbatch_args,
            setup=setup,
        )

    def _check_times(self, stop_s: int) -> None:
        if self.signal_s < stop_s:
            raise ConfigError(
                f"--signal-s: {self.signal_s} s are too short to stop and save, which may take {stop_s} s "
                f"(twice launcher.stop_timeout_s and {_LEAVE_S}); set it to {stop_s} or more"
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
            `days-hours:minutes:seconds`, or `UNLIMITED`.
    Raises:
        ConfigError: it is none of them, or nothing at all.
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
        raise ConfigError(f"--time: {text!r} is no time at all; give hours:minutes:seconds, e.g. 24:00:00")
    return float(seconds)


def _longest_stop_s(launcher: LauncherConfig) -> int:
    """Return how long a launcher may take from the signal to its end (s): saving, leaving, and its own last lines."""
    return math.ceil(2 * launcher.stop_timeout_s) + _LEAVE_S


def _launch(request: Request, accepted: Accepted) -> tuple[tuple[str, ...], ...]:
    """Return the launcher's command, one line per option, with paths that do not depend on the environment."""
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
            f"--sbatch-arg: {argument!r} is no option of sbatch; give one, e.g. --sbatch-arg '--qos=long'"
        )


def _check_quotable(what: str, text: str) -> None:
    if not text.isprintable() or any(char in text for char in '"\\'):
        raise ConfigError(f"{what}: {text!r} cannot stand in an #SBATCH line; choose another, without quotes and \\")
