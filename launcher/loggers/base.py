"""What a logger is: it takes the figures of a run to a place where people look. Torch-free."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Histogram = Mapping[float, int]
"""Value, to two digits -> how many of a step's responses have it; ascending."""

COLUMNS = ("step", "group", "prompt", "response", "ground_truth", "reward", "response_tokens", "truncated")
"""Fields of a sample."""


@dataclass(frozen=True)
class LoggedRun:
    """The run that a logger is made for.

    Attributes:
        directory: of the run; what a logger writes on this machine is in `loggers/` there.
        project: `name` of the configuration.
        config: the resolved configuration, as JSON has it.
        id: of the logger's own run that an earlier start began; "": there is none.
    """

    directory: Path
    project: str
    config: Mapping[str, Any]
    id: str = ""


class Logger:
    """Made in a process of its own as `Class(run, **options)`. Whatever it raises ends that process, and no more.

    A `Config` of the class, derived from `asyncflow.settings.Settings`, checks the options before a run starts.

    Attributes:
        id: of its run there; the next start's `LoggedRun` has it.
    """

    id: str

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take the figures of a step, or those of an evaluation (`evaluation/...`) of an earlier step's weights."""
        raise NotImplementedError

    def show(self, step: int, rows: Sequence[Mapping[str, Any]], histograms: Mapping[str, Histogram]) -> None:
        """Take samples (`COLUMNS`) of steps up to the one last logged, and that one's histograms; once a minute."""

    def rewind(self, step: int) -> bool:
        """Forget this step and later ones: the run does them again. False: what is there stays."""
        return False

    def close(self) -> None:
        """Send what is left."""
