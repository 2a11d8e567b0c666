"""What the Slurm cycles call exact: every group once, in its step, with rows of its own."""

import json
from pathlib import Path

from tests.support.run_files import LedgerFaults, last_step, ledger_faults

Line = tuple[int, int]


def faults(run_dir: Path, *lines: Line, last: int = 2, rows: dict[int, int] | None = None) -> LedgerFaults:
    """Write a ledger of (step, group) with two groups a step; return its faults."""
    text = "".join(
        json.dumps({"step": step, "group": group, "indices": [(rows or {}).get(group, group)]}) + "\n"
        for step, group in lines
    )
    (run_dir / "ledger.jsonl").write_text(text)
    return ledger_faults(run_dir, groups_per_step=2, last=last)


def test_every_group_once_is_exact_in_any_order(tmp_path: Path) -> None:
    assert faults(tmp_path, (1, 1), (1, 0), (2, 2), (2, 3)) == (0, 0)


def test_missing_repeated_and_foreign_groups_are_counted(tmp_path: Path) -> None:
    assert faults(tmp_path, (1, 0), (2, 2), (2, 3)) == (1, 0)
    assert faults(tmp_path, (1, 0), (1, 1), (1, 1), (2, 2), (2, 3)) == (0, 1)
    assert faults(tmp_path, (1, 0), (1, 1), (2, 2), (2, 3), (3, 4)) == (0, 1)
    assert faults(tmp_path, (1, 0), (1, 2), (2, 1), (2, 3)) == (2, 2)


def test_rows_of_another_group_are_counted(tmp_path: Path) -> None:
    assert faults(tmp_path, (1, 0), (1, 1), (2, 2), (2, 3), rows={3: 0}) == (0, 1)


def test_run_that_has_not_begun_is_at_step_0(tmp_path: Path) -> None:
    assert last_step(tmp_path) == 0
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n{"ste')
    assert last_step(tmp_path) == 2
