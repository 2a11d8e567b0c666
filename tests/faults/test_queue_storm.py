"""Random kill -9 during a put/get storm: every row is acked exactly once per task, whoever dies."""

from pathlib import Path

from transferqueue_parts.storm import storm


def test_rows_are_acked_exactly_once_though_processes_die(tmp_path: Path) -> None:
    report = storm(tmp_path, kills=12, seed=1)
    assert report.faultless, report
    assert sum(report.kills.values()) == 12
    assert report.verdict.rows > 100
