"""Spans of a process, also when they cannot be written."""

import json
from pathlib import Path

import pytest

from asyncflow.timeline import Timeline


def test_spans_are_lines_with_their_attributes(tmp_path: Path) -> None:
    timeline = Timeline(tmp_path / "a.jsonl")
    with timeline.span("wait for rows", step=3):
        assert timeline.waiting_s >= 0
    timeline.close()
    timeline.close()
    (line,) = [json.loads(text) for text in (tmp_path / "a.jsonl").read_text().splitlines()]
    assert (line["name"], line["step"]) == ("wait for rows", 3)
    assert line["end"] - line["start"] == pytest.approx(timeline.waiting_s, abs=1e-5)


def test_full_disk_costs_the_spans_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    timeline = Timeline(Path("/dev/full"))
    for _ in range(2):
        with timeline.span("train"):
            pass
        timeline.flush()
    timeline.close()
    assert [record.message for record in caplog.records] == [
        "timeline: [Errno 28] No space left on device; this process records no more spans"
    ]
