"""What a fault is, and what counts as its good end.

A fault is a function of a `Lab`: it starts a run, hurts it, and returns what it saw. Good ends are

    recovered   the run reached its last step, and `asyncflow verify` finds nothing wrong
    named       an exit code that is not 0 within 30 s of the fault, and a last line that names who and why

Everything else is not: nobody may hang, and nobody may fail without a name.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from benchmarks.chaos.faulty_run import Ended, FaultyRun, Setup
from benchmarks.chaos.small_disk import SmallDisks
from launcher.verify.verify_report import verify_run

NAMED_WITHIN_S = 30.0
"""A run that cannot go on says so within so long (s)."""
RECOVERED_WITHIN_S = 120.0
"""A run that goes on is through with its last step within so long, on a busy machine (s)."""


class Outcome(StrEnum):
    """How a run under a fault ended."""

    RECOVERED = "recovered"
    NAMED = "named"
    HUNG = "hung"
    WRONG = "wrong"


@dataclass(frozen=True)
class Seen:
    """What became of a run: `detail` is one line."""

    outcome: Outcome
    detail: str


@dataclass(frozen=True)
class Lab:
    """Where a fault happens.

    Attributes:
        directory: empty; the working directory of the run, which is in `run` below it.
        random: what is left to chance.
    """

    directory: Path
    random: random.Random

    @property
    def run_dir(self) -> Path:
        """Of the run."""
        return self.directory / "run"

    def run(self, **setup: Any) -> FaultyRun:
        """Return a run that is not started yet; see `Setup`."""
        return FaultyRun(self.run_dir, Setup(**setup), cwd=self.directory)

    def run_on(self, disks: SmallDisks, *, below: str = "", **setup: Any) -> FaultyRun:
        """Return a run among small disks, in a directory `below` this one."""
        run_dir = self.directory / below / "run"
        return FaultyRun(run_dir, Setup(prefix=disks.prefix, root=disks.root, **setup), cwd=self.directory)

    def module(self, name: str, source: str) -> None:
        """Write a module of the user's beside the run."""
        (self.directory / f"{name}.py").write_text(source)


@dataclass(frozen=True)
class Fault:
    """One thing that can go wrong.

    Attributes:
        expected: its good end.
        inject: does it.
    """

    expected: Outcome
    inject: Callable[[Lab], Seen]

    @property
    def name(self) -> str:
        """What it is called."""
        return self.inject.__name__

    @property
    def what(self) -> str:
        """What happens, and what is expected, in one line."""
        return " ".join((self.inject.__doc__ or "").split()).rstrip(".")


def recovers(inject: Callable[[Lab], Seen]) -> Fault:
    """Mark a fault that a run survives."""
    return Fault(Outcome.RECOVERED, inject)


def is_named(inject: Callable[[Lab], Seen]) -> Fault:
    """Mark a fault that a run dies of, with a good reason."""
    return Fault(Outcome.NAMED, inject)


def went_on(run: FaultyRun, *, steps: int = 40, says: str = "", within_s: float = RECOVERED_WITHIN_S) -> Seen:
    """Wait for the end of a run that should reach its last step.

    Args:
        run: it.
        steps: number of its last step.
        says: what must be in its output.
        within_s: so long it may take from now on.
    """
    ended = run.end(within_s=within_s)
    if ended.code is None or ended.left:
        return Seen(Outcome.HUNG, str(ended))
    if ended.code != 0:
        return Seen(Outcome.WRONG, str(ended))
    if says not in ended.output:
        return Seen(Outcome.WRONG, f"it did not say {says!r}: {ended}")
    report = verify_run(run.run_dir)
    if not report.ok or report.last_step != steps:
        return Seen(Outcome.WRONG, " ".join(report.as_text().split()))
    return Seen(Outcome.RECOVERED, str(ended))


def gave_up(run: FaultyRun, *words: str, code: int = 1, within_s: float = NAMED_WITHIN_S) -> Seen:
    """Wait for the end of a run that cannot go on: `words` are in its last line."""
    ended = run.end(within_s=within_s + 5.0)
    return judge_named(ended, *words, code=code, within_s=within_s)


def judge_named(ended: Ended, *words: str, code: int = 1, within_s: float = NAMED_WITHIN_S) -> Seen:
    """Say whether a command failed as it should, and soon enough."""
    if ended.code is None or ended.left:
        return Seen(Outcome.HUNG, str(ended))
    missing = [word for word in words if word not in ended.last_line]
    if ended.code != code or missing or ended.seconds > within_s:
        return Seen(Outcome.WRONG, f"wanted exit {code} and {', '.join(words)} in the last line: {ended}")
    return Seen(Outcome.NAMED, str(ended))
