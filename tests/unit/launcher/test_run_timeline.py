"""A run's timeline: read, accounted for, and written as a trace."""

import json
import math
from pathlib import Path

import pytest
from click.testing import CliRunner

from launcher.cli.commands import main
from launcher.timeline.gantt_chart import GanttChart
from launcher.timeline.run_timeline import (
    CATEGORIES,
    RunTimeline,
    Span,
    account,
    account_text,
    chrome_trace,
    end_of_step,
    recording_text,
    spans_between,
)

SPANS = {
    "actor-0": [
        {"name": "publish weights", "start": 99.0, "end": 100.0, "step": 0},
        {"name": "wait for rows", "start": 100.0, "end": 103.0, "step": 1},
        {"name": "forward_backward", "start": 103.0, "end": 107.0, "step": 1},
        {"name": "wait for peers", "start": 107.0, "end": 108.0, "step": 1},
        {"name": "publish weights", "start": 109.0, "end": 110.0, "step": 1},
        {"name": "copy weights", "start": 105.0, "end": 112.0, "bucket": 0},
    ],
    "rollout-0-0": [
        {"name": "wait for weights", "start": 98.0, "end": 101.0, "step": 0},
        {"name": "generate", "start": 101.0, "end": 108.0, "step": 1, "version": 0},
        {"name": "load weights", "start": 104.0, "end": 105.0},
        {"name": "wait for prompts", "start": 108.0, "end": 120.0},
    ],
    "weights-0-0": [{"name": "seal weights", "start": 100.0, "end": 101.0}],
    "storage-0-0": [],
}


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    (tmp_path / "timeline").mkdir()
    for process, spans in SPANS.items():
        text = "".join(json.dumps(span) + "\n" for span in spans)
        (tmp_path / "timeline" / f"{process}.jsonl").write_text(text)
    with (tmp_path / "timeline" / "actor-0.jsonl").open("a") as file:
        file.write('[1]\n{"name": "x", "start": "a", "end": {}}\n{"name": "publish weights", "start": 1, "end": 2}\n')
        file.write('{"process": "actor-0", "cpu_s": 2.0, "spans": 1000}\n')
        file.write('{"name": "forward_b')  # killed while it wrote
    with (tmp_path / "timeline" / "rollout-0-0.jsonl").open("a") as file:
        file.write('{"process": "rollout-0-0", "cpu_s": 8.0, "spans": 3000}\n')
        file.write('{"process": "rollout-0-0", "cpu_s": 2.0, "spans": 7000}\n')  # started twice
    (tmp_path / "timeline" / "storage-1-0.jsonl").write_text('{"process": "storage-1-0", "cpu_s": 0.0, "spans": 0}\n')
    (tmp_path / "timeline" / "broken-0.jsonl").write_bytes(b"\xff\xfe\n")
    return tmp_path


def test_idle_time_is_accounted_for(run_dir: Path) -> None:
    timeline = RunTimeline.read(run_dir)
    assert timeline.window == (100.0, 110.0)
    assert timeline.step_ends == {0: 100.0, 1: 110.0}
    found = timeline.account_by_role()
    assert found.keys() == {"actor", "rollout"}, "background threads are no process's time"
    assert found["actor"] == pytest.approx(
        {
            "busy": 0.5, "waiting for data": 0.3, "waiting for peers": 0.1, "other": 0.1,
            "waiting for admission": 0, "waiting for weights": 0, "waiting for disk": 0, "waiting for devices": 0,
            "paused": 0,
        }
    )  # fmt: skip
    assert found["rollout"]["busy"] == pytest.approx(0.7)
    assert found["rollout"]["waiting for weights"] == pytest.approx(0.1)
    assert found["rollout"]["waiting for admission"] == pytest.approx(0.2)
    for shares in found.values():
        assert sum(shares.values()) == pytest.approx(1.0)
        assert tuple(shares) == CATEGORIES
    lines = account_text(found).splitlines()
    assert lines[1].split()[:4] == ["%", "of", "time", "busy"] and lines[2].split()[0] == "rollout"
    assert max(map(len, lines)) <= 80


def test_of_spans_inside_each_other_the_innermost_counts() -> None:
    spans = [Span("generate", 0, 10, {}), Span("wait for weights", 2, 5, {}), Span("load weights", 3, 4, {})]
    shares = account(spans, 0, 10)
    assert shares["waiting for weights"] == pytest.approx(0.2)
    assert shares["busy"] == pytest.approx(0.8)


def test_waits_in_a_pause_are_its_own_but_work_is_work() -> None:
    spans = [Span("wait for rows", 0, 8, {}), Span("paused", 2, 9, {}), Span("evaluate", 8, 10, {})]
    shares = account(spans, 0, 10)
    assert {name: share for name, share in shares.items() if share} == pytest.approx(
        {"waiting for data": 0.2, "paused": 0.6, "busy": 0.2}
    )
    assert "paused" in account_text({"actor": shares}) and "paused" not in account_text({"actor": account([], 0, 1)})
    everything = dict.fromkeys(CATEGORIES, 0.1)
    assert max(map(len, account_text({"actor": everything}).splitlines())) <= 80


def test_of_spans_that_begin_together_the_inner_one_counts() -> None:
    shares = account([Span("wait for weights", 0, 4, {}), Span("generate", 0, 10, {})], 0, 10)
    assert shares["waiting for weights"] == pytest.approx(0.4)


def test_of_a_resumed_run_the_last_start_counts(tmp_path: Path) -> None:
    (tmp_path / "timeline").mkdir()
    published = [(0, 10.0), (1, 11.0), (2, 12.0), (1, 5000.0), (2, 5001.0), (3, 5002.0)]
    lines = [json.dumps({"name": "publish weights", "start": end, "end": end, "step": step}) for step, end in published]
    (tmp_path / "timeline" / "actor-0.jsonl").write_text("\n".join(lines))
    timeline = RunTimeline.read(tmp_path)
    assert timeline.window == (5000.0, 5002.0)
    assert list(timeline.step_ends) == [1, 2, 3]


def test_processes_of_earlier_starts_are_in_no_account(tmp_path: Path) -> None:
    (tmp_path / "timeline").mkdir()
    published = [(1, 10.0), (2, 12.0), (2, 5000.0), (3, 5004.0)]
    lines = [json.dumps({"name": "publish weights", "start": end, "end": end, "step": step}) for step, end in published]
    (tmp_path / "timeline" / "actor-0.jsonl").write_text("\n".join(lines))
    for name, start, end in (("rollout-0-0", 5000.0, 5002.0), ("rollout-1-0", 10.0, 12.0)):
        (tmp_path / "timeline" / f"{name}.jsonl").write_text(
            json.dumps({"name": "generate", "start": start, "end": end})
        )
    assert RunTimeline.read(tmp_path).account_by_role()["rollout"]["busy"] == 0.5


def test_trace_has_every_span_and_the_threads_beside(run_dir: Path) -> None:
    events = json.loads(chrome_trace(RunTimeline.read(run_dir)))["traceEvents"]
    shown = [event for event in events if event["ph"] == "X"]
    assert len(shown) == 1 + sum(map(len, SPANS.values()))
    assert {event["name"] for event in shown if event["tid"] == 1} == {"copy weights", "seal weights"}
    generate = next(event for event in shown if event["name"] == "generate")
    assert (generate["ts"], generate["dur"]) == (1e6, 7e6)


def test_rollouts_at_the_same_time_have_lanes_of_their_own_and_are_in_no_account() -> None:
    def span(name: str, number: int, start: float, end: float) -> Span:
        return Span(name, start, end, {"id": number})

    rollouts = [span("rollout", 1, 0, 6), span("turn", 1, 1, 2), span("rollout", 2, 3, 8), span("rollout", 3, 6, 9)]
    busy = Span("generate", 0, 10, {})
    timeline = RunTimeline({"rollout-0-0": [busy, *rollouts]}, {}, {})
    events = [event for event in json.loads(chrome_trace(timeline))["traceEvents"] if event["ph"] == "X"]
    assert [event["tid"] for event in events] == [0, 2, 2, 3, 2]
    assert account([busy, *rollouts], 0, 10)["busy"] == 1.0
    chart = GanttChart.from_timeline(timeline, {}, title="")
    assert [len(row.bars) + len(row.beside) for row in chart.rows] == [1]


def test_recording_is_reckoned_by_the_process_that_it_costs_most(run_dir: Path) -> None:
    timeline = RunTimeline.read(run_dir)
    assert {process: (own.num_spans, own.cpu_s) for process, own in timeline.recorded.items()} == {
        "actor-0": (1000, 2.0),
        "rollout-0-0": (10_000, 10.0),
    }
    assert timeline.recording_overhead(2e-6) == pytest.approx(0.002)
    assert recording_text(timeline, 2e-6) == "recording: 0.20 % of a process's CPU time at most (2.0 us a span)"


def test_recording_of_killed_processes_is_not_known(tmp_path: Path) -> None:
    (tmp_path / "timeline").mkdir()
    (tmp_path / "timeline" / "actor-0.jsonl").write_text('{"name": "train", "start": 1, "end": 2}\n')
    timeline = RunTimeline.read(tmp_path)
    assert math.isnan(timeline.recording_overhead(2e-6))
    assert "no process has reported" in recording_text(timeline, 2e-6)


def test_command_writes_a_trace_and_a_page_and_prints_the_account(run_dir: Path) -> None:
    (run_dir / "config.yaml").write_text("")
    done = CliRunner().invoke(main, ["timeline", str(run_dir)])
    assert done.exit_code == 0, done.output
    written = {path.name for path in (run_dir / "timeline").iterdir() if path.suffix != ".jsonl"}
    assert written == {"trace.json", "gantt.html"}
    assert "% of time" in done.output
    assert "recording: " in done.output


def test_command_refuses_what_is_no_run(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("")
    refused = CliRunner().invoke(main, ["timeline", str(tmp_path)])
    assert refused.exit_code == 2
    assert "has no timeline" in refused.output


def test_a_stretch_is_found_in_the_middle_of_a_long_file(tmp_path: Path) -> None:
    (tmp_path / "timeline").mkdir()
    spans = [{"name": f"n{k}", "start": k / 10, "end": k / 10 + 0.05, "note": "x" * (k % 50)} for k in range(20_000)]
    spans.insert(10_000, {"name": "long", "start": 3.0, "end": 1000.0})
    spans.insert(10_000, {"name": "copy weights", "start": 999.0, "end": 1000.0})
    lines = [json.dumps(one) for one in spans]
    lines.insert(5_000, '{"torn')
    (tmp_path / "timeline" / "actor-0.jsonl").write_text("\n".join(lines) + "\n")
    (tmp_path / "timeline" / "storage-0-0.jsonl").write_text('{"process": "storage-0-0", "spans": 0, "cpu_s": 1.0}\n')

    def names(start: float, end: float) -> list[str]:
        return [span.name for span in spans_between(tmp_path, start, end).get("actor-0", [])]

    assert names(500.0, 500.2) == ["long", "n5000", "n5001", "n5002"]
    assert names(0.0, 0.1) == ["n0", "n1"] and names(-5.0, -1.0) == [] and names(3000.0, 3001.0) == []
    assert names(1999.86, 2001.0) == ["n19999"]
    assert len(names(0.0, 2000.0)) < 20_000, "a long one is cut"


def test_the_end_of_a_step_is_that_of_the_last_time_that_it_was_trained(tmp_path: Path) -> None:
    assert end_of_step(tmp_path, 1) is None
    (tmp_path / "timeline").mkdir()
    lines = [{"name": "publish weights", "start": at, "end": at + 1.0, "step": step} for at, step in
             ((1.0, 1), (2.0, 2), (9.0, 1), (10.0, 2))]  # fmt: skip
    text = "".join(
        f"{json.dumps(line)}\n" for line in [*lines, {"name": "optimizer", "start": 20, "end": 21, "step": 1}]
    )
    (tmp_path / "timeline" / "actor-0.jsonl").write_text(text)
    assert (end_of_step(tmp_path, 1), end_of_step(tmp_path, 3)) == (10.0, None)
