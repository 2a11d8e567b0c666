"""What a check says: one line, how bad it is, and what to do about it."""

from dataclasses import dataclass
from enum import StrEnum

_LONGEST_REASON = 200


class Level(StrEnum):
    """How bad a finding is."""

    OK = "ok"
    WARNING = "warning"
    ERROR = "error"


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Attributes:
        check: which one found it.
        level: an error is what a run would fail of; a warning what may cost speed, or hurt later.
        text: what was found.
        remedy: what to do, a command where possible; empty if and only if all is well.
    """

    check: str
    level: Level
    text: str
    remedy: str = ""

    def __post_init__(self) -> None:
        assert bool(self.remedy) == (self.level is not Level.OK), self

    @staticmethod
    def ok(check: str, text: str) -> "Finding":
        """All is well."""
        return Finding(check, Level.OK, text)

    @staticmethod
    def warning(check: str, text: str, remedy: str) -> "Finding":
        """May cost speed, or hurt later."""
        return Finding(check, Level.WARNING, text, remedy)

    @staticmethod
    def error(check: str, text: str, remedy: str) -> "Finding":
        """A run would fail of it."""
        return Finding(check, Level.ERROR, text, remedy)


def reason(error: BaseException) -> str:
    """Return an exception in one line of bearable length."""
    known = error.strerror if isinstance(error, OSError) else None  # without the path, which the finding names
    text = " ".join(str(known or error).split())
    text = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return text if len(text) <= _LONGEST_REASON else f"{text[:_LONGEST_REASON]} ..."
