"""What a run left in its directory: how far it came, and whether every group was trained once."""

from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

from asyncflow.json_lines import LineReader


class LedgerFaults(NamedTuple):
    """What a ledger lacks or has too much; groups."""

    skipped: int
    twice: int


def lines(path: Path) -> list[dict[str, Any]]:
    """Return the complete JSON lines of a file; none when it does not exist."""
    return LineReader(path).read()


def last_step(run_dir: Path) -> int:
    """Return the last finished step of a run; 0 before the first."""
    metrics = lines(run_dir / "metrics.jsonl")
    return int(metrics[-1]["step"]) if metrics else 0


def ledger_faults(run_dir: Path, *, groups_per_step: int, last: int) -> LedgerFaults:
    """Compare the ledger with what steps 1 to `last` must have trained, schedules without `first_ready` only.

    Admission counts groups without a gap and gives them to steps in order, so group g belongs to step
    g // groups_per_step + 1 and has its own rows.
    """
    ledger = lines(run_dir / "ledger.jsonl")
    trained = Counter((int(line["step"]), int(line["group"])) for line in ledger)
    expected = {(group // groups_per_step + 1, group) for group in range(groups_per_step * last)}
    rows = Counter(index for line in ledger for index in line["indices"])
    twice = sum(count - 1 for count in trained.values()) + sum(1 for group in trained if group not in expected)
    return LedgerFaults(
        skipped=len(expected - trained.keys()), twice=max(twice, sum(count - 1 for count in rows.values()))
    )
