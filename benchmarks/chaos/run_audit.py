"""What a finished run's own files say about exactly-once, counted here and nowhere else: pure."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

LAST_STEPS = 5
Lines = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Audit:
    """Counts over the surviving lines.

    Attributes:
        skipped: groups below the newest trained one that were neither trained nor put among the dead letters.
        twice: groups that were trained more than once.
        updates_missing: steps of the ledger without the optimizer update that trained them.
        updates_twice: optimizer updates that were made more than once for a step.
    """

    skipped: int
    twice: int
    updates_missing: int
    updates_twice: int


def audit(ledger: Lines, updates: Lines) -> Audit:
    """Count.

    Args:
        ledger: lines of `ledger.jsonl`.
        updates: lines of `updates.jsonl`, which the optimizer's own count stands behind.
    """
    own = [line for line in ledger if not line.get("dead_letter")]
    trained = Counter(line["group"] for line in own)
    given_up = {line["group"] for line in ledger if line.get("dead_letter")}
    newest = max(trained, default=-1)
    made = Counter((line["step"], line["update"]) for line in updates)
    steps = {line["step"] for line in own}
    return Audit(
        skipped=sum(group not in trained and group not in given_up for group in range(newest)),
        twice=sum(count > 1 for count in trained.values()),
        updates_missing=len(steps - {step for step, _ in made}),
        updates_twice=sum(count > 1 for count in made.values()),
    )


def final_accuracy(metrics: Lines) -> float:
    """Return the mean accuracy of the last steps."""
    return fmean(line["accuracy"] for line in metrics[-LAST_STEPS:])
