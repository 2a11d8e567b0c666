"""Random kill -9 during a put/get storm: every row is acked exactly once per task, whichever process dies."""

from pathlib import Path

import pytest

from benchmarks.transferqueue.storm import storm


@pytest.mark.parametrize(
    ("kills", "num_controllers", "declares_outputs"),
    [pytest.param(2, 2, False, marks=pytest.mark.gate), (12, 1, False), (12, 2, False), (12, 2, True)],
)
def test_rows_are_acked_exactly_once_though_processes_die(
    tmp_path: Path, kills: int, num_controllers: int, declares_outputs: bool
) -> None:
    report = storm(
        tmp_path,
        kills=kills,
        seed=num_controllers,
        num_units=2,
        num_controllers=num_controllers,
        declares_outputs=declares_outputs,
        one_by_one=True,
        pause_s=0.5,
    )
    assert report.faultless, report
    faults = {kind: count for kind, count in report.kills.items() if kind != "gave up"}  # a client of services away
    assert sum(faults.values()) == kills
    assert report.verdict.rows > 8 * kills


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("kills", "num_controllers", "pause_s"), [(24, 2, 1.5), (8, 1, 6.0)])
def test_no_confirmed_row_is_missing_though_services_die_faster_than_they_start_again(
    tmp_path: Path, kills: int, num_controllers: int, pause_s: float
) -> None:
    """All controllers at once among them, and all controllers with a unit; slow consumers let rows gather."""
    report = storm(
        tmp_path,
        kills=kills,
        seed=num_controllers,
        num_controllers=num_controllers,
        pause_s=pause_s,
        put_every_s=0.1,
        work_s=1.0,
    )
    assert (report.untold, report.miscounted) == (0, 0), report
    assert report.faultless, report
    assert report.verdict.rows > kills
