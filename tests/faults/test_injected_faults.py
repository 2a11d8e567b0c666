"""A few of the faults of `python benchmarks/faults.py`, the quickest: each ends as it should, and nobody hangs."""

import pytest

from benchmarks.chaos.faults import inject_faults

SHORT = (
    "poison_prompt_kills_the_rollout",
    "loss_is_not_finite",
    "users_task_raises",
    "storage_unit_is_stopped",
    "log_file_cannot_be_opened",
    "run_directory_is_removed",
    "data_file_is_changed",
    "too_few_file_handles_from_the_start",
)


@pytest.mark.parametrize("name", SHORT)
def test_fault_ends_in_recovery_or_by_name(name: str) -> None:
    report = inject_faults(seed=0, only=[name])
    (one,) = report["each"]
    assert one["seen"] == one["expected"], one["detail"]
    assert report["hangs"] == 0
