"""What a part of the benchmark is given and what it returns."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Settings:
    """Of one run of the benchmark.

    Attributes:
        quick: fewer rounds and smaller cases, to see that everything works.
        peer_python: interpreter of the environment with the peer; None: its part is skipped.
        faults: how often to kill in the fault part.
        directory: for logs and ledgers; exists.
        say: prints progress.
        before: tree of an earlier version, for parts that compare with one.
    """

    quick: bool
    peer_python: Path | None
    faults: int
    directory: Path
    say: Callable[[str], None]
    before: Path | None = None

    def rounds(self, full: int) -> int:
        """Return how many rounds to run where a full pass takes `full`."""
        return min(full, 2) if self.quick else full


@dataclass
class Result:
    """Figures are the issue's keys; details explain them."""

    figures: dict[str, float] = field(default_factory=dict)
    details: dict[str, Any] = field(default_factory=dict)
