"""Random kill -9 during a put/get storm: every row is acked exactly once per task, whichever process dies."""

from pathlib import Path

import pytest
from transferqueue_parts.storm import storm


@pytest.mark.parametrize(
    ("kills", "num_controllers", "declares_outputs"),
    [pytest.param(4, 2, False, marks=pytest.mark.gate), (12, 1, False), (12, 2, False), (12, 2, True)],
)
def test_rows_are_acked_exactly_once_though_processes_die(
    tmp_path: Path, kills: int, num_controllers: int, declares_outputs: bool
) -> None:
    report = storm(
        tmp_path,
        kills=kills,
        seed=num_controllers,
        num_controllers=num_controllers,
        declares_outputs=declares_outputs,
    )
    assert report.faultless, report
    faults = {kind: count for kind, count in report.kills.items() if kind != "gave up"}  # a client of services away
    assert sum(faults.values()) == kills
    assert report.verdict.rows > 8 * kills
