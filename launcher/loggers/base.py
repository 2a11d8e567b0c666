"""What a logger is: it takes the figures of a run to a place where people look. Torch-free.

`launcher.loggers.backends` has those that come with AsyncFlow; one of the user's is another class with these methods.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Histogram = Mapping[float, int]
"""Value, to two digits -> how many of the step's responses have it; ascending."""

COLUMNS = ("step", "group", "prompt", "response", "answer", "reward", "response_tokens", "truncated")
"""Of a table of samples."""


@dataclass(frozen=True)
class LoggedRun:
    """The run that a logger is made for.

    Attributes:
        directory: of the run; a logger writes into `loggers/` there, or nowhere on this machine.
        name: of the run's directory.
        project: `name` of the configuration.
        config: the resolved configuration, as JSON has it.
        id: of the logger's own run that an earlier start began; "": there is none.
    """

    directory: Path
    name: str
    project: str
    config: Mapping[str, Any]
    id: str = ""


class Logger:
    """Made in a process of its own as `Class(run, **options)`. Whatever it raises ends that process, and no more.

    Attributes:
        id: of its run there; the next start's `LoggedRun` has it.
    """

    id: str

    def log(self, step: int, metrics: Mapping[str, float], histograms: Mapping[str, Histogram]) -> None:
        """Take the figures of a step, or those of an evaluation (`evaluation/...`) of an earlier step's weights."""
        raise NotImplementedError

    def table(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Take some samples with the fields `COLUMNS`, of steps up to this one."""

    def rewind(self, step: int) -> bool:
        """Forget this step and later ones: the run went back and does them again. False: what is there stays, and
        these steps are not logged a second time."""
        return False

    def close(self) -> None:
        """Send what is left."""
