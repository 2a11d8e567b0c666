"""One thing that `asyncflow verify` looked at, and what is wrong with it. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass

_SHOWN = 12


@dataclass(frozen=True)
class Check:
    """The outcome of one check.

    Attributes:
        name: of the check.
        says: what was found, in words, if there are no problems.
        problems: what is wrong: file:line, step, group.
        notes: what was not checked, or is worth knowing.
    """

    name: str
    says: str
    problems: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not self.problems

    @property
    def outcome(self) -> str:
        """What was found; of a check that failed only how much is wrong, since `says` tells what should hold."""
        number = len(self.problems)
        return self.says if self.ok else f"{number} problem{'s' if number > 1 else ''}"

    def as_lines(self) -> list[str]:
        """Return it for a person; many problems are cut short."""
        hidden = len(self.problems) - _SHOWN
        rest = [f"      ... and {hidden} more"] if hidden > 0 else []
        return [
            f"{'ok   ' if self.ok else 'WRONG'} {self.name}: {self.outcome}",
            *(f"      {problem}" for problem in self.problems[:_SHOWN]),
            *rest,
            *(f"      note: {note}" for note in self.notes),
        ]


def named(numbers: Iterable[int]) -> str:
    """Return numbers as text, neighbours as a range: `1-3, 7`."""
    parts: list[str] = []
    ordered = sorted(set(numbers))
    for number in ordered:
        if parts and number - 1 == int(parts[-1].rpartition("-")[2]):
            parts[-1] = f"{parts[-1].partition('-')[0]}-{number}"
        else:
            parts.append(str(number))
    shown = ", ".join(parts[:_SHOWN])
    return f"{shown}, ... ({len(ordered)} in all)" if len(parts) > _SHOWN else shown
