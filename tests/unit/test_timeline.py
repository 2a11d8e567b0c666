"""Spans of a process: on one clock, counted, also when they cannot be written."""

import json
from pathlib import Path
from typing import Any

import pytest

from asyncflow.clock import HostClock
from asyncflow.timeline import Timeline, measure_span_cost

CLOCK = HostClock.from_wall_clock()


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(text) for text in path.read_text().splitlines()]


def test_spans_are_lines_with_their_attributes(tmp_path: Path) -> None:
    timeline = Timeline(tmp_path / "a.jsonl", CLOCK)
    with timeline.span("wait for rows", step=3):
        assert timeline.waiting_s >= 0
    timeline.close()
    timeline.close()
    line, _ = lines(tmp_path / "a.jsonl")
    assert (line["name"], line["step"]) == ("wait for rows", 3)
    assert line["end"] - line["start"] == pytest.approx(timeline.waiting_s, abs=1e-5)


def test_last_line_says_how_much_was_recorded(tmp_path: Path) -> None:
    timeline = Timeline(tmp_path / "rollout-0-0.jsonl", CLOCK)
    for _ in range(100):
        with timeline.span("generate"):
            pass
    timeline.flush()
    timeline.close()
    *spans, told = lines(tmp_path / "rollout-0-0.jsonl")
    assert (told["process"], told["spans"], len(spans)) == ("rollout-0-0", 100, 100)
    assert told["cpu_s"] > 0


def test_span_that_fails_is_recorded(tmp_path: Path) -> None:
    timeline = Timeline(tmp_path / "a.jsonl", CLOCK)
    with pytest.raises(ValueError, match="no"), timeline.span("train"):
        raise ValueError("no")
    timeline.close()
    assert [line.get("name") for line in lines(tmp_path / "a.jsonl")] == ["train", None]


def test_spans_of_a_host_are_aligned_although_its_wall_clock_was_set_between_two_starts(tmp_path: Path) -> None:
    launcher = HostClock.from_wall_clock(wall=lambda: 10_000.0)
    outer = Timeline(tmp_path / "outer.jsonl", HostClock.of_this_host([launcher], wall=lambda: 10_001.0))
    inner = Timeline(tmp_path / "inner.jsonl", HostClock.of_this_host([launcher], wall=lambda: 10_002.0 + 3600))
    with outer.span("outer"), inner.span("inner"):
        pass
    outer.close()
    inner.close()
    (around, *_), (inside, *_) = lines(tmp_path / "outer.jsonl"), lines(tmp_path / "inner.jsonl")
    assert 10_000 <= around["start"] <= inside["start"] <= inside["end"] <= around["end"]


def test_process_on_another_host_aligns_its_own_clock() -> None:
    launcher = HostClock(host="another", offset_s=-1e9)
    there = HostClock.of_this_host([launcher], wall=lambda: 10_000.0)
    assert there.now() == pytest.approx(10_000, abs=60)
    assert HostClock.of_this_host([launcher, there], wall=lambda: 0.0) == there


def test_span_costs_microseconds() -> None:
    assert 0 < measure_span_cost() < 100e-6


def test_directory_that_was_removed_is_made_again_or_costs_the_spans_alone(tmp_path: Path) -> None:
    """A rank that starts again in a live run whose user made room."""
    for directory in (tmp_path / "timeline", tmp_path / "gone" / "timeline"):
        timeline = Timeline(directory / "a.jsonl", CLOCK)
        with timeline.span("wait for rows"):
            pass
        timeline.close()
        assert timeline.waiting_s > 0
    assert (tmp_path / "timeline" / "a.jsonl").is_file()
    assert not (tmp_path / "gone").exists()


def test_full_disk_costs_the_spans_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    timeline = Timeline(Path("/dev/full"), CLOCK)
    for _ in range(2):
        with timeline.span("train"):
            pass
        timeline.flush()
    timeline.close()
    assert [record.message for record in caplog.records] == [
        "timeline: [Errno 28] No space left on device; this process records no more spans"
    ]
