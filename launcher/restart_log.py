"""What failed in a run so far, and what was done about it: for `asyncflow status`. Torch-free."""

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass
class RestartLog:
    """Counts of one start of the command.

    Attributes:
        gangs: how often each was started again.
        lineage: of the weights now.
        restores: how often the run went back to a checkpoint.
        last_error: what failed last, and what follows from it; "" when nothing did.
        last_error_at: when (unix time, s).
    """

    gangs: Counter[str] = field(default_factory=Counter)
    lineage: int = 0
    restores: int = 0
    last_error: str = ""
    last_error_at: float = 0.0

    def started_again(self, gang: str) -> None:
        """A gang starts another time."""
        self.gangs[gang] += 1

    def restored(self, lineage: int) -> None:
        """The run went back to a checkpoint."""
        self.restores += 1
        self.lineage = lineage

    def failed(self, text: str) -> None:
        """Something failed; `text` says it in one line."""
        self.last_error, self.last_error_at = text, time.time()

    @staticmethod
    def from_summary(fields: Mapping[str, Any]) -> "RestartLog":
        """Read what `summary` returned."""
        return RestartLog(**{**fields, "gangs": Counter(fields["gangs"])})

    def summary(self) -> dict[str, Any]:
        """Return it as JSON."""
        return {**vars(self), "gangs": dict(self.gangs)}
