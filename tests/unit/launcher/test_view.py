"""`asyncflow view` and report.html: what the page gets, who gets it, and that samples stay text."""

import asyncio
import base64
import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import launcher.view.report_page
from asyncflow.errors import ConfigError
from asyncflow.job import GangSpec
from asyncflow.process import PAUSE_SIGNAL, RESUME_SIGNAL, SAVE_SIGNAL
from launcher.cli.commands import main
from launcher.process.progress import Status
from launcher.run.status import RunEnd, RunStatus
from launcher.run.supervisor import RestartLog
from launcher.view.failure_stack import FailureStack
from launcher.view.queue_depths import QueueDepths
from launcher.view.report_page import script_json, write_report
from launcher.view.run_reader import MOST_POINTS, Have, RunReader
from tests.support.logged_runs import add_steps, append, go_back, make_run

EVIL = "</script><script>alert(1)</script><!-- <b onclick=x> \x1b[31m \u202e & \u2028"


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return make_run(tmp_path / "run", "[]")


class Page:
    """What the script of the page keeps of a run."""

    def __init__(self, run: RunReader) -> None:
        self.run = run
        self.have = Have()
        self.steps: list[int] = []
        self.values: dict[str, list[Any]] = {}
        self.evaluations: list[dict[str, Any]] = []
        self.last_size = 0

    def update(self) -> dict[str, Any]:
        state = self.run.state(self.have)
        curves = state["curves"]
        if (curves["generation"], curves["stride"]) != (self.have.generation, self.have.stride):
            self.steps, self.values = [], {}
        start = curves["from"]
        self.steps = self.steps[:start] + curves["steps"]
        for name, values in curves["values"].items():
            old = self.values.get(name, [])
            self.values[name] = (old + [None] * start)[:start] + values
        if state["evaluations"] is not None:
            self.evaluations = state["evaluations"]
        self.have = Have(curves["generation"], curves["stride"], len(self.steps), len(self.evaluations))
        self.last_size = len(curves["steps"])
        return state


def test_a_page_that_asks_again_gets_only_what_is_new(run_dir: Path) -> None:
    page = Page(RunReader(run_dir, "run"))
    assert page.update()["step"] == 0
    for last in (2, 3, 40):
        add_steps(run_dir, len(page.steps) + 1, last, reward=last / 100)
        append(run_dir / "evaluation.jsonl", {"step": last, "lineage": 0, "accuracy": 0.5})
        before = len(page.steps)
        page.update()
        assert page.last_size <= last - before + 1
    assert page.steps == list(range(1, 41))
    assert page.values["reward_mean"] == [0.02, 0.02, 0.03] + [0.4] * 37
    assert page.values["idle_fraction/actor"] == [0.25] * 40
    assert "loss" not in page.values, "null is no number"
    assert [one["step"] for one in page.evaluations] == [2, 3, 40]
    assert page.update()["evaluations"] is None


def test_a_long_run_is_averaged_and_an_update_of_it_is_small(run_dir: Path) -> None:
    lines = [json.dumps({"step": step, "lineage": 0, "reward_mean": step % 2}) for step in range(1, 4 * MOST_POINTS)]
    path = run_dir / "metrics.jsonl"
    path.write_text("\n".join(lines[:2500]) + "\n")
    page, sizes = Page(RunReader(run_dir, "run")), []
    page.update()
    for first in range(2500, len(lines), 7):
        with path.open("a") as file:
            file.write("".join(f"{line}\n" for line in lines[first : first + 7]))
        page.update()
        sizes.append(page.last_size)
    whole = Page(RunReader(run_dir, "run"))
    whole.update()
    assert (page.steps, page.values) == (whole.steps, whole.values)
    assert len(page.steps) <= MOST_POINTS and page.steps[-1] == len(lines)
    assert set(page.values["reward_mean"][:-1]) == {0.5}
    assert max(sizes) <= 4


def test_rollouts_have_the_gaps_of_their_tokens_where_it_is_known_which_drawing_was_trained(run_dir: Path) -> None:
    (run_dir / "trace").mkdir()
    for index in range(3):
        row = {"step": 1, "group": 0, "index": index, "log_probs": [-1.0, None, -2.0], "tokens": ["a", "b", "c"]}
        append(run_dir / "samples" / "rollout-0.jsonl", row)
        append(run_dir / "samples" / "evaluate-0.jsonl", row)
    run = RunReader(run_dir, "run")
    rows = run.samples()["rows"]
    assert len(rows) == 6 and not any("gaps" in row for row in rows), "none was trained yet"
    for index in range(3):
        append(run_dir / "trace" / "trained-0.jsonl", {"index": index, "step": 1, "log_probs": [-1.5, -1.0, -2.25]})
    append(run_dir / "samples" / "rollout-1.jsonl", {"step": 1, "group": 0, "index": 1, "log_probs": [-1.0]})
    append(run_dir / "trace" / "trained-1.jsonl", {"index": 2, "step": 2, "log_probs": [-1.5]})
    gaps = {(row["file"], row["index"]): row["gaps"] for row in run.samples()["rows"] if "gaps" in row}
    assert gaps == {("rollout-0", 0): [0.5, None, 0.25]}, "row 1 was drawn twice, row 2 was trained twice"


def test_a_sample_of_the_wrong_form_is_shown_as_damaged(run_dir: Path) -> None:
    sample(run_dir, 9, 7, 0.5, versions=[1])
    (damaged,) = RunReader(run_dir, "run").samples()["rows"]
    assert damaged["index"] == 7 and damaged["response"].startswith("this line is damaged: Expected `array`")


def test_a_row_that_was_drawn_again_after_the_run_went_back_counts_as_it_was_drawn_last(run_dir: Path) -> None:
    run = RunReader(run_dir, "run")
    for index, lineage in ((0, 0), (1, 0), (2, 0), (1, 1), (2, 1), (2, 1), (3, 1)):
        sample(run_dir, 5, index, lineage, lineage=lineage)
    append(run_dir / "samples" / "evaluate-0.jsonl", {"step": 9, "index": 1, "lineage": 0})
    found = run.samples(order="newest")["rows"]
    drawn = [(row["index"], row["lineage"]) for row in found if row["file"] == "rollout-0"]
    assert drawn == [(0, 0), (1, 1), (2, 1), (2, 1), (3, 1)], "of two in one lineage either may be trained"
    assert sum(row["file"] == "evaluate-0" for row in found) == 1
    assert [row["reward"] for row in run.samples(order="worst", number=2)["rows"]] == [0, 1]


def test_the_timeline_has_the_last_seconds_of_every_process(run_dir: Path) -> None:
    run = RunReader(run_dir, "run")
    assert run.timeline(10.0) == {"why": "no spans yet"}
    (run_dir / "timeline").mkdir()
    for second in range(30):
        append(run_dir / "timeline" / "ref-0-0.jsonl", {"name": "wait for rows", "start": second, "end": second + 1})
        append(run_dir / "timeline" / "rollout-0-0.jsonl", {"name": "turn", "start": second, "end": second + 1})
    append(run_dir / "timeline" / "rollout-0-0.jsonl", {"name": "generate", "start": 5, "end": 28, "rows": 3})
    with (run_dir / "timeline" / "ref-0-0.jsonl").open("a") as file:
        file.write('{"name": "torn')
    found = run.timeline(10.0)
    assert (found["origin"], found["end"]) == (20.0, 10.0)
    rollout, ref = found["processes"]
    assert rollout == {"name": "rollout-0-0", "spans": [[0.0, 8.0, "generate", 0, "rows 3"]]}
    waits = found["categories"].index("waiting for data")
    assert ref["spans"][1:] == [[float(n), 1.0, "wait for rows", waits, ""] for n in range(10)]
    assert ref["spans"][0][:2] == [0.0, 0.0], "it ended as the window began"


def follow_a_row(run_dir: Path) -> None:
    """Write what a run leaves of row 7, which step 2 trained after a resume: its clock began at 1000 s (unix time)."""
    for folder in ("trace", "timeline"):
        (run_dir / folder).mkdir()
    for step, lineage, time_s in ((1, 0, 50.0), (2, 1, 9.5)):
        append(run_dir / "metrics.jsonl", {"step": step, "lineage": lineage, "reward_mean": 0.5, "time_s": time_s})
        span = {"name": "publish weights", "start": 900.0, "end": 50.0 if step == 1 else 1009.5, "step": step}
        append(run_dir / "timeline" / "actor-0.jsonl", span | {"start": span["end"] - 0.25})  # type: ignore[operator]
    leases = run_dir / "trace" / "leases-controller-0.jsonl"
    lease = {"task": "actor_rollout", "token": 1, "step": 2, "rows": [7], "to": "rollout-1/0@0.abc", "time_s": 40.0}
    append(leases, lease | {"lineage": 0})
    append(leases, lease | {"lineage": 1, "time_s": 3.0})
    append(leases, {"task": "actor_rollout", "token": 1, "rows": [7], "ended": "released", "lineage": 1, "time_s": 4.0})
    append(leases, lease | {"lineage": 1, "time_s": 4.5, "token": 2, "to": "rollout-0/0@0.abc"})
    line = {"step": 2, "group": 1, "lineage": 1, "indices": [7], "versions": [0, 0], "time_s": 9.0}
    append(run_dir / "ledger.jsonl", line | {"admitted_step": 1, "epoch": 0, "staleness": 0})
    for gang, start, end in (("rollout-1", 1003.0, 1004.0), ("rollout-0", 1004.5, 1008.0), ("ref-0", 1200.0, 1201.0)):
        append(run_dir / "timeline" / f"{gang}-0.jsonl", {"name": "generate", "start": start, "end": end, "rows": 1})


def test_a_row_has_its_moments_on_the_timeline_by_the_clock_of_the_start_that_trained_it(run_dir: Path) -> None:
    run = RunReader(run_dir, "run")
    follow_a_row(run_dir)
    sample(run_dir, 2, 8, 0.5)
    sample(run_dir, 2, 7, 0.5, lineage=0, time_s=44.0)
    sample(run_dir, 2, 7, 0.5, lineage=1, time_s=8.25)
    assert run.trace(7)["moments"] == [], "its times are not known before the metrics are read"
    run.state()
    found = run.trace(7)
    assert "again: the one before ended" in found["text"]
    assert found["moments"] == [
        [1003.0, "actor_rollout: leased to rollout-1/0@0.abc", "rollout-1-0"],
        [1004.0, "actor_rollout: released by its consumer", "rollout-1-0"],
        [1004.5, "actor_rollout: leased to rollout-0/0@0.abc", "rollout-0-0"],
        [1008.25, "drawn and scored by rollout-0", "rollout-0-0"],
        [1009.0, "trained in step 2", "actor-0"],
        [1009.5, "the weights of step 2 exist", "actor-0"],
    ]
    assert run.trace(8)["moments"] == [] and "why" in run.trace(9)
    shown = run.timeline(60.0, (1002.0, 1005.0))
    assert (shown["origin"], shown["end"]) == (1002.0, 3.0)
    assert [(one["name"], one["spans"][0][:2]) for one in shown["processes"]] == [
        ("rollout-0-0", [2.5, 3.5]),
        ("rollout-1-0", [1.0, 1.0]),
    ]
    assert run.timeline(60.0, (1.0, 2.0)) == {"why": "no process has a span then"}
    assert run.timeline(60.0)["processes"][0]["name"] == "ref-0-0"


def test_steps_that_a_run_repeats_replace_the_first_ones(run_dir: Path) -> None:
    page = Page(RunReader(run_dir, "run"))
    add_steps(run_dir, 1, 9, reward=0.25)
    append(run_dir / "evaluation.jsonl", {"step": 8, "lineage": 0, "accuracy": 0.5})
    page.update()
    go_back(run_dir, 4)
    add_steps(run_dir, 5, 30, lineage=1, reward=0.75)  # longer than what was read
    page.update()
    assert page.steps == list(range(1, 31))
    assert page.values["reward_mean"] == [0.25] * 4 + [0.75] * 26
    assert page.evaluations == []


def test_a_file_that_was_cut_in_place_and_grew_beyond_the_cursor_is_read_anew(run_dir: Path) -> None:
    path, page = run_dir / "metrics.jsonl", Page(RunReader(run_dir, "run"))
    add_steps(run_dir, 1, 6, reward=0.25)
    page.update()
    os.truncate(path, len(b"".join(path.read_bytes().splitlines(keepends=True)[:2])))
    add_steps(run_dir, 3, 20, lineage=1, reward=0.75)
    page.update()
    assert page.steps == list(range(1, 21))
    assert page.values["reward_mean"] == [0.25] * 2 + [0.75] * 18


def test_a_damaged_line_costs_its_step_and_is_named(run_dir: Path) -> None:
    add_steps(run_dir, 1, 2)
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write("{damaged\n")
    add_steps(run_dir, 4, 4)
    page = Page(RunReader(run_dir, "run"))
    state = page.update()
    assert page.steps == [1, 2, 4]
    assert "metrics.jsonl:3" in state["problems"][0]
    for number in range(5, 12):
        append(run_dir / "metrics.jsonl", {"step": str(number)})
    append(run_dir / "evaluation.jsonl", {"step": None})
    (run_dir / "config.yaml").write_text("steps: [1")
    state = page.update()
    assert page.steps == [1, 2, 4]
    config, *of_metrics, more, evaluation = state["problems"]
    assert config.startswith(f"{run_dir / 'config.yaml'}:1: YAML syntax") and "evaluation.jsonl:1" in evaluation
    assert [one.partition("metrics.jsonl:")[2][:1] for one in of_metrics] == ["3", "5", "6", "7"]
    assert more == "and 4 more lines of that file" and of_metrics[1].endswith("step '5' is not a whole number")
    assert state["state"] == "killed" and state["end"]["lines"]


def sample(run_dir: Path, step: int, index: int, reward: float | None, **more: object) -> None:
    line = {"step": step, "group": step, "index": index, "prompt": "p", "response": "r", "reward": reward} | more
    append(run_dir / "samples" / "rollout-0.jsonl", line)


def test_samples_are_found_by_step_text_and_reward(run_dir: Path) -> None:
    run = RunReader(run_dir, "run")
    assert run.samples() == {"steps": None, "unreadable": 0, "total": 0, "rows": []}
    sample(run_dir, 1, 0, 0.5, response="ÄPFEL")
    sample(run_dir, 2, 1, None)
    with (run_dir / "samples" / "rollout-0.jsonl").open("a") as file:
        file.write('{damaged\n{"step": 2, "index": 99999999999999999999}\n')
    found = run.samples()
    assert (found["total"], found["unreadable"]) == (2, 2)
    sample(run_dir, 2, 2, -1.0)
    sample(run_dir, 3, 3, 2.0, conversations=[[{"role": "tool", "content": '"eight" \näpfel'}]])

    def rows(**choice: Any) -> list[int]:
        return [row["index"] for row in run.samples(**choice)["rows"]]

    assert rows() == [3, 1, 2, 0]
    assert rows(order="best") == [3, 0, 2, 1]
    assert rows(order="worst", number=2) == [2, 0]
    assert rows(order="worst", skip=2) == [3, 1]
    assert rows(search="äpfel") == [3, 0]
    assert rows(search='"eight" \n') == [3] and rows(search="tool") == [], "as it is shown, not as JSON"
    assert rows(steps=(2, 2)) == [1, 2]
    assert [(run.samples(search="äpfel", number=1, skip=skip)["total"], rows(search="äpfel", number=1, skip=skip))
            for skip in (0, 1, 2)] == [(2, [3]), (2, [0]), (2, [])]  # fmt: skip
    append(run_dir / "samples" / "evaluate-0.jsonl", {"step": 4, "group": 0, "index": 4, "prompt": "p"})
    assert [(row["index"], row["file"]) for row in run.samples(number=2)["rows"]] == [
        (4, "evaluate-0"),
        (3, "rollout-0"),
    ]
    path = run_dir / "samples" / "rollout-0.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:2]))
    assert rows() == [4, 1, 0], "a file that was cut is read anew"


def test_a_log_is_followed_and_no_link_leads_out_of_the_run(run_dir: Path, tmp_path: Path) -> None:
    (run_dir / "logs" / "rollout").mkdir()
    log = run_dir / "logs" / "rollout" / "0.log"
    log.write_text("one\ntw")
    secret = tmp_path / "secret.log"
    secret.write_text("secret\n")
    (run_dir / "logs" / "out.log").symlink_to(secret)
    (run_dir / "samples" / "rollout-9.jsonl").symlink_to(secret)
    run = RunReader(run_dir, "run")
    assert [one.label for one in run.logs()] == ["rollout/0"]
    assert run.log_tail("out") is None and run.log_tail("../../secret") is None
    tail = run.log_tail("rollout/0")
    assert tail is not None and tail["text"] == "one\ntw", "the last words of a process have no line's end"
    log.write_text("one\ntwo\n")
    assert run.log_tail("rollout/0", tail["position"]) == {"text": "o\n", "position": 8, "follows": True}
    log.write_bytes("one\nä".encode()[:-1])
    assert run.log_tail("rollout/0") == {"text": "one\n", "position": 4, "follows": False}, "half a character waits"
    log.write_text("\rloading" * 20_000)
    bar = run.log_tail("rollout/0")
    assert bar is not None and len(bar["text"]) == 64 * 1024, "a progress bar has no line's end either"
    log.write_text("\n".join(map(str, range(100_000))) + "\n")
    long = run.log_tail("rollout/0", 8)
    assert long is not None and not long["follows"]
    assert long["text"].endswith("99999\n") and len(long["text"]) <= 64 * 1024
    assert run.samples()["total"] == 0


def test_the_history_of_a_queue_is_bounded_and_a_page_gets_only_what_is_new_of_it() -> None:
    depths = QueueDepths(8)
    assert depths.news(0, 0) == {"since": None, "stride": 1, "from": 0, "times": [], "values": {}}
    for second in (0, 0, 1, 2):
        depths.add(1000.0 + second, {"actor": 2.0 * second} | ({"ref": 5.0} if second else {}))
    assert depths.news(1, 1) == {
        "since": 1000.0, "stride": 1, "from": 1, "times": [1001.0, 1002.0],
        "values": {"actor": [2.0, 4.0], "ref": [5.0, 5.0]},
    }  # fmt: skip
    for second in range(3, 11):
        depths.add(1000.0 + second, {"actor": 2.0 * second})
    assert depths.news(1, 3) == {
        "since": 1000.0, "stride": 2, "from": 0, "times": [1001.0, 1003.0, 1005.0, 1007.0, 1009.0],
        "values": {"actor": [1.0, 5.0, 9.0, 13.0, 17.0], "ref": [5.0, 5.0, None, None, None]},
    }  # fmt: skip
    for second in range(11, 1000):
        depths.add(1000.0 + second, {"actor": 0.0})
    found = depths.news(2, 5)
    assert len(found["times"]) < 8 and found["times"] == sorted(found["times"])


def test_the_server_watches_the_queue_of_a_live_run_while_no_page_asks(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = {"task": "actor", "waiting": 1, "leased": 0, "acked": 0, "rows_per_s": 0.0}
    room = {"live_rows": 8, "row_limit": 0, "live_bytes": 0, "waiting_puts": 0, "lost_rows": 0}
    controllers = [room | {"tasks": [task | {"controller": f"controller-{k}", "ready": 3 + k}]} for k in range(2)]
    monkeypatch.setattr("launcher.view.run_reader.is_live", lambda path: True)
    watched = threading.Event()

    def read(path: Path) -> RunStatus:
        watched.set()
        return RunStatus(path, 7.0, (), {}, controllers)

    monkeypatch.setattr(RunStatus, "read", read)

    async def question(client: Any, token: str) -> None:
        assert await asyncio.to_thread(watched.wait, 30)
        monkeypatch.setattr("launcher.view.run_reader.is_live", lambda path: False)
        [run] = (await (await client.get(f"/{token}/api/state")).json())["runs"]
        assert run["live"] is None
        assert run["queue_depths"] == {"since": 7.0, "stride": 1, "from": 0, "times": [7.0], "values": {"actor": [7.0]}}

    serve([run_dir], question)


# Failures


def trace_of(error: str, frame: str = "train") -> str:
    return f'Traceback (most recent call last):\n  File "a.py", line 1, in {frame}\n    {frame}()\n{error}\n'


LOGGED = "2026-11-27 04:20:25,880 INFO workers.rank step 3\n"
CHAINED = "\nDuring handling of the above exception, another exception occurred:\n\n"
GROUP = (
    '  + Exception Group Traceback (most recent call last):\n  |   File "a.py", line 1, in main\n'
    "  | ExceptionGroup: two (1 sub-exception)\n  +-+---------------- 1 ----------------\n"
    "    | Traceback (most recent call last):\n    |   File \"a.py\", line 2\n    | KeyError: 'x'\n"
)
CRASH = (
    'Fatal Python error: Segmentation fault\n\nThread 0x00007f1 (most recent call first):\n  File "a.py", line 1 in f\n'
    '\nCurrent thread 0x00007f2 (most recent call first):\n  File "b.py", line 2 in g\n'
)


@pytest.mark.parametrize(
    ("text", "stack", "what", "at_end"),
    [
        (trace_of("KeyError: 'x'"), trace_of("KeyError: 'x'"), "KeyError: 'x'", True),
        (f"{trace_of('OSError: old')}{LOGGED}{trace_of('KeyError: 1')}{LOGGED}", trace_of("KeyError: 1"), "KeyError: 1",
         False),
        (trace_of("OSError: 1") + trace_of("OSError: 2"), trace_of("OSError: 2"), "OSError: 2", True),
        (trace_of("A: 1") + CHAINED + trace_of("B: 2\n  more of it"), trace_of("A: 1") + CHAINED
         + trace_of("B: 2\n  more of it"), "B: 2", True),
        (LOGGED + GROUP, GROUP, "ExceptionGroup: two (1 sub-exception)", True),
        (CRASH, CRASH, "Fatal Python error: Segmentation fault", True),
        (CRASH.partition("\n\n")[2] + LOGGED, CRASH.partition("\n\n")[2], "stacks of its threads", False),
        (json.dumps({"time": "2026-11-27T04:20:25.123Z", "error": trace_of("OSError: 1")}) + "\n",
         trace_of("OSError: 1"), "OSError: 1", False),
        ("x" * 300_000 + "\n" + trace_of("KeyError: 'ä'"), trace_of("KeyError: 'ä'"), "KeyError: 'ä'", True),
    ],
)  # fmt: skip
def test_the_newest_stack_of_a_log_is_found(tmp_path: Path, text: str, stack: str, what: str, at_end: bool) -> None:
    log = tmp_path / "0.log"
    log.write_text(text, encoding="utf-8")
    found = FailureStack.newest(log)
    assert found is not None and (found.text, found.what, found.at_end) == (stack.rstrip(), what, at_end)


def test_a_stack_is_bounded_and_one_beyond_the_end_of_a_log_is_not_looked_for(tmp_path: Path) -> None:
    log = tmp_path / "0.log"
    log.write_text(LOGGED + trace_of("ValueError: " + "y" * 100_000 + "z"))
    found = FailureStack.newest(log)
    assert found is not None and len(found.text) < 12_100 and found.text.endswith("yz") and "in train" in found.text
    assert (len(found.what), found.after) == (300, "2026-11-27 04:20:25")
    log.write_text(trace_of("KeyError: 1") + LOGGED * 10_000)
    assert FailureStack.newest(log) is None and FailureStack.newest(tmp_path / "none.log") is None


def test_the_stacks_of_a_run_are_those_of_what_failed(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add_steps(run_dir, 1, 1)
    for name in ("actor/0", "actor/1", "rollout/0", "rollout/1", "ref/0", "launcher"):
        log = run_dir / "logs" / f"{name}.log"
        log.parent.mkdir(exist_ok=True)
        log.write_text(LOGGED + trace_of(f"ValueError: {name}") + LOGGED)
    run = RunReader(run_dir, "run")

    def stacks() -> list[tuple[str, str]]:
        return [(one["log"], one["what"]) for one in run.stacks()["stacks"]]

    RunEnd(run_dir, ["done (step 1/1)"], 0, 0.0).write()
    assert stacks() == [], "what a process logs and survives is no failure"
    RunEnd(run_dir, ["done (step 1/1)"], 0, 0.0, RestartLog(gangs=Counter({"rollout-0": 2}))).write()
    assert stacks() == [("rollout/0", "ValueError: rollout/0"), ("rollout/1", "ValueError: rollout/1")]
    RunEnd(run_dir, ["failed (step 1): actor rank 1 failed"], 1, 0.0).write()
    (run_dir / "logs" / "actor" / "1.error.json").write_text("{}")
    with (run_dir / "logs" / "ref" / "0.log").open("a") as file:
        file.write(CRASH)
    assert stacks() == [("actor/1", "ValueError: actor/1"), ("ref/0", "Fatal Python error: Segmentation fault")]
    data = json.loads(
        next(text for _, own, text in elements(write_report(run_dir).read_text()) if own.get("id") == "data")
    )
    assert data["stacks"] == run.stacks()
    monkeypatch.setattr("launcher.view.run_reader.is_live", lambda path: True)
    gang = GangSpec("rollout-1", "rollout", 1, 2, ("cpu", "cpu"))
    live = RunStatus(
        run_dir,
        1.0,
        (gang,),
        {("rollout-1", 1): Status("starting")},
        restarts=RestartLog(gangs=Counter({"rollout-1": 1})),
    )
    monkeypatch.setattr(RunStatus, "read", lambda path: live)
    assert [log for log, _ in stacks()] == ["actor/1", "rollout/0", "rollout/1"]
    assert [rank["log"] for rank in run.state()["live"]["ranks"]] == ["rollout/3"]


def test_a_configuration_that_is_a_link_out_of_the_run_is_not_shown(run_dir: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret.yaml"
    secret.write_text("password: 1\n")
    (run_dir / "config.yaml").unlink()
    (run_dir / "config.yaml").symlink_to(secret)
    assert RunReader(run_dir, "run").settings_text() == "config.yaml is a link out of the run's directory"
    add_steps(run_dir, 1, 1)
    assert "password" not in write_report(run_dir).read_text()


def test_a_report_replaces_a_link_in_its_place_and_leaves_what_it_names(run_dir: Path, tmp_path: Path) -> None:
    add_steps(run_dir, 1, 1)
    mine = tmp_path / "mine"
    mine.write_text("mine")
    (run_dir / "report.html").symlink_to(mine)
    written = write_report(run_dir)
    assert mine.read_text() == "mine" and not written.is_symlink() and "<html" in written.read_text()


def test_a_resumed_run_counts_the_time_of_all_its_starts_and_shows_its_new_last_step(run_dir: Path) -> None:
    run = RunReader(run_dir, "run")
    assert run.state()["time_s"] is None
    # The second start counts anew; its trainer then starts again within it, as lineage 2.
    for lineage, step, at in ((0, 1, 60.0), (0, 2, 90.0), (1, 3, 100.0), (2, 4, 160.0), (2, 5, 190.0)):
        line = {"step": step, "lineage": lineage, "reward_mean": 0.5, "time_s": at, "step_time_s": 30.0}
        append(run_dir / "metrics.jsonl", line)
    assert run.state()["time_s"] == 90 + 190
    assert "4.7 minutes for 5 steps" in write_report(run_dir).read_text()
    config = run_dir / "config.yaml"
    config.write_text(config.read_text().replace("\nsteps: 60\n", "\nsteps: 120\n"))
    assert run.state()["steps"] == 120
    config.write_text("steps: 60\nroles: {evaluate: 2}\n")
    assert run.state()["steps"] is None, "an evaluation trains nothing"


def test_a_live_run_of_another_version_costs_its_panel_only(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add_steps(run_dir, 1, 2)
    monkeypatch.setattr("launcher.view.run_reader.is_live", lambda path: True)
    old = RunStatus(run_dir, 1.0, (), {}, [{"tasks": [{"task": "actor"}]}])
    monkeypatch.setattr(RunStatus, "read", lambda path: old)
    state = RunReader(run_dir, "run").state()
    assert (state["state"], state["step"], state["live"]) == ("running", 2, None)


def test_a_plan_that_is_a_link_out_of_the_run_is_not_shown(run_dir: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret.json"
    secret.write_text('{"password": "1234"}')
    (run_dir / "plan.json").symlink_to(secret)
    add_steps(run_dir, 1, 1)
    assert "1234" not in write_report(run_dir).read_text()
    (run_dir / "plan.json").unlink()
    plan = {"step_s": 2.5, "roles": {"rollout": 2, "actor": 1}}
    (run_dir / "plan.json").write_text(json.dumps(plan))
    (run_dir / "config.yaml").write_text("roles: {rollout: 2, actor: 1}\n")
    assert RunReader(run_dir, "run").state()["plan"] == plan
    (run_dir / "config.yaml").write_text("roles: {rollout: 3, actor: 1}\n")
    assert RunReader(run_dir, "run").state()["plan"] == {}, "it went on with other roles"


def test_a_report_has_the_launcher_s_log_and_one_of_each_role_however_many_there_are(run_dir: Path) -> None:
    add_steps(run_dir, 1, 1)
    logs = run_dir / "logs"
    for name in ("launcher", *(f"{role}/{rank}" for role in ("actor", "rollout") for rank in range(30))):
        (logs / name).parent.mkdir(parents=True, exist_ok=True)
        (logs / f"{name}.log").write_text(f"said by {name}\n")
    text = write_report(run_dir).read_text()
    assert all(f"said by {name}" in text for name in ("launcher", "actor/0", "rollout/0"))
    assert "said by rollout/29" not in text and "rollout/29" in text


# The server


def serve(runs: list[Path], question: Callable[[Any, str], Awaitable[None]], **options: Any) -> None:
    """Ask a server with the token `right`; `question` gets aiohttp's client and the token."""
    from aiohttp.test_utils import TestClient, TestServer

    from launcher.view.server import ViewServer

    async def ask() -> None:
        server = ViewServer(runs, token="right", **options)
        async with TestClient(TestServer(server.app())) as client:
            await question(client, server.token)

    asyncio.run(ask())


ADDRESSES = ("", "view.js", "view.css", "uPlot.iife.min.js", "uPlot.min.css", "api/state", "api/samples", "api/log",
             "api/stacks", "api/account", "api/settings")  # fmt: skip


def test_nothing_answers_without_the_token_or_to_a_foreign_name(run_dir: Path) -> None:
    add_steps(run_dir, 1, 1)

    async def question(client: Any, token: str) -> None:
        for address in ADDRESSES:
            assert (await client.get(f"/{token}/{address}")).status == 200, address
            for wrong in (f"/{address}", f"/righ/{address}", f"/right2/{address}", f"/RIGHT/{address}"):
                response = await client.get(wrong)
                assert (response.status, await response.text()) == (404, "404: Not Found"), wrong
            assert (await client.get(f"/{token}/{address}", headers={"Host": "evil.example"})).status == 404
            assert (await client.post(f"/{token}/{address}")).status == 405, "read-only"
        assert (await client.get("/r%C3%AFght/")).status == 404
        reader, writer = await asyncio.open_connection(client.server.host, client.server.port)
        writer.write(b"OPTIONS * HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert await reader.readline() == b"HTTP/1.1 404 Not Found\r\n"
        writer.close()

    serve([run_dir], question)


def test_no_address_names_a_file(run_dir: Path) -> None:
    add_steps(run_dir, 1, 1)

    async def question(client: Any, token: str) -> None:
        from yarl import URL

        for path in (
            "../server.py",
            "%2e%2e/server.py",
            "..%2fserver.py",
            "page/view.js",
            "report.html.jinja",
            "config.yaml",
        ):
            response = await client.get(URL(f"/{token}/{path}", encoded=True))
            assert response.status == 404, path
        for query in ("log=../config", "log=/etc/passwd", "run=1&log=x", "log=launcher%00"):
            assert (await client.get(URL(f"/{token}/api/log?{query}", encoded=True))).status == 404, query
        for query in ("run=-1", "skip=-1", "skip=x", "order=path", "run=%C2%B2", "step=abc", "step=-3", "step=3-"):
            assert (await client.get(URL(f"/{token}/api/samples?{query}", encoded=True))).status == 400, query

    serve([run_dir], question)


def test_the_live_page_runs_its_own_scripts_only(run_dir: Path) -> None:
    async def question(client: Any, token: str) -> None:
        response = await client.get(f"/{token}/")
        policy = response.headers["Content-Security-Policy"]
        assert policy.startswith("default-src 'self'") and "unsafe" not in policy
        assert response.headers["Referrer-Policy"] == "no-referrer"
        tags = list(elements(await response.text()))
        assert {name: own["src"] for name, own, _ in tags if name == "script"} == {"script": "view.js"}
        assert not any(text.strip() for name, _, text in tags if name in ("script", "style"))
        assert not any(key == "style" or key.startswith("on") for _, own, _ in tags for key in own)

    serve([run_dir], question)


def test_the_page_gets_several_runs_and_how_they_differ(run_dir: Path, tmp_path: Path) -> None:
    other = make_run(tmp_path / "other", "[]")
    config = other / "config.yaml"
    config.write_text(config.read_text().replace("seed: ", "seed: 1 # "))
    add_steps(run_dir, 1, 3)
    add_steps(other, 1, 2)

    async def question(client: Any, token: str) -> None:
        runs = (await (await client.get(f"/{token}/api/state")).json())["runs"]
        assert [(run["name"], run["step"]) for run in runs] == [("run", 3), ("other", 2)]
        again = (await (await client.get(f"/{token}/api/state?have=0.1.3.0.0.0,junk")).json())["runs"]
        assert [run["curves"]["steps"] for run in again] == [[3], [1, 2]]
        differences = (await (await client.get(f"/{token}/api/settings")).json())["differences"]
        assert "seed" in [key for key, _ in differences]
        rows = (await (await client.get(f"/{token}/api/samples?run=1&number=3&step=2")).json())["rows"]
        assert [row["step"] for row in rows] == [2, 2]

    serve([run_dir, other], question)


def test_a_run_is_controlled_only_by_a_page_with_control(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    got: list[int] = []
    signals = {
        "stop": signal.SIGTERM, "save": SAVE_SIGNAL, "pause": PAUSE_SIGNAL, "resume": RESUME_SIGNAL,
    }  # fmt: skip
    before = {number: signal.signal(number, lambda number, frame: got.append(number)) for number in signals.values()}
    launcher: list[int | None] = [os.getpid()]
    monkeypatch.setattr("launcher.view.server.running_launcher", lambda path: launcher[0])
    control = {"X-AsyncFlow": "control"}

    async def without(client: Any, token: str) -> None:
        for what in signals:
            assert (await client.post(f"/{token}/api/{what}", headers=control)).status in (404, 405)

    async def with_control(client: Any, token: str) -> None:
        foreign = {**control, "Origin": "http://example.org"}
        for what in signals:
            assert (await client.post(f"/wrong/api/{what}", headers=control)).status == 404
            assert (await client.post(f"/{token}/api/{what}")).status == 403
            assert (await client.post(f"/{token}/api/{what}", headers=foreign)).status == 403
            assert (await client.get(f"/{token}/api/{what}", headers=control)).status == 405
        assert got == []
        own = {**control, "Origin": f"http://{client.server.host}:{client.server.port}"}
        for what in ("save", "pause", "resume"):
            assert (await client.post(f"/{token}/api/{what}", headers=own)).status == 200
        assert (await client.post(f"/{token}/api/kill", headers=own)).status in (404, 405)
        assert (await client.post(f"/{token}/api/stop", headers=control)).status == 200
        launcher[0] = None
        assert (await client.post(f"/{token}/api/stop", headers=control)).status == 409

    try:
        serve([run_dir], without)
        serve([run_dir], with_control, control=True)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert got == [SAVE_SIGNAL, PAUSE_SIGNAL, RESUME_SIGNAL, signal.SIGTERM]


def test_without_a_run_one_line_says_so(tmp_path: Path) -> None:
    refused = CliRunner().invoke(main, ["view", str(tmp_path)])
    assert refused.exit_code == 2 and "is not a run directory" in refused.output


# report.html


def elements(page: str) -> Iterator[tuple[str, dict[str, str], str]]:
    """Yield (tag, attributes, text directly inside) of a page's elements."""
    found: list[tuple[str, dict[str, str], str]] = []

    class Reader(HTMLParser):
        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            found.append((tag, {name: value or "" for name, value in attrs}, ""))

        def handle_endtag(self, tag: str) -> None:
            found.append((f"/{tag}", {}, ""))

        def handle_data(self, data: str) -> None:
            if found:
                tag, own, text = found[-1]
                found[-1] = (tag, own, text + data)

    Reader().feed(page)
    return iter(found)


def test_the_report_is_one_file_with_the_run_inside(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "<run>", "[]")
    add_steps(run_dir, 1, 2)
    add_steps(run_dir, 3, 3, reward=0.75)
    accuracy = {"accuracy": 0.125, "accuracy_low": 0.1, "accuracy_high": 0.2}
    append(run_dir / "evaluation.jsonl", {"step": 2, "lineage": 0, **accuracy})
    sample(run_dir, 3, 7, 9.0, response=EVIL)
    (run_dir / "checkpoints" / "step_000003" / "hf").mkdir(parents=True)
    page = write_report(run_dir).read_text()
    tags = list(elements(page))
    data = next(json.loads(text) for tag, own, text in tags if own.get("id") == "data")
    [run] = data["state"]["runs"]
    assert run["curves"]["values"]["reward_mean"] == [0.5, 0.5, 0.75]
    assert EVIL in [row["response"] for row in data["samples"]["rows"]]
    assert len(data["samples"]["rows"]) == 7, "each once, whether new, best or worst"
    assert "max_staleness" in data["settings"]["text"][0]
    assert "no spans yet" in data["account"]["why"]
    # Nothing from elsewhere, and the policy allows exactly these scripts and styles.
    assert not [own for _, own, _ in tags if own.keys() & {"src", "href", "style", "onclick"}]
    policy = next(own["content"] for tag, own, _ in tags if tag == "meta" and "http-equiv" in own)
    inline = [text for tag, own, text in tags if tag in ("script", "style") and own.get("id") != "data"]
    digests = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in inline]
    assert len(inline) == 4
    assert sorted(f"'sha256-{one}'" for one in digests) == sorted(
        w for w in policy.replace(";", "").split() if "sha" in w
    )
    assert "unsafe" not in policy and policy.startswith("default-src 'none'")
    # The summary says it without JavaScript.
    assert "&lt;run&gt;: 3 steps" in page
    assert "0.125 (0.100 to 0.200), 95 % interval, at step 2" in page
    assert "0.5833 ± 0.36 (last 3 steps)" in page  # 4.30 x 0.1443 / sqrt(3)
    assert "step_000003/hf" in page


def test_the_summary_has_the_loss_of_fine_tuning_and_no_character_that_turns_text(run_dir: Path) -> None:
    for step, loss in ((1, 3.0), (2, 1.0)):
        append(run_dir / "metrics.jsonl", {"step": step, "lineage": 0, "cross_entropy": loss})
    RunEnd(run_dir, ["failed (step 2): \u202eseirt"], 1, 0.0).write()
    summary = write_report(run_dir).read_text().partition("</section>")[0]
    assert "cross entropy (nats)</th><td>2 ± 13 (last 2 steps)" in summary
    assert "\\u202eseirt" in summary and "\u202e" not in summary


def test_the_report_is_utf8_whatever_the_locale(run_dir: Path) -> None:
    add_steps(run_dir, 1, 2)
    child = "import sys, pathlib; from launcher.view.report_page import write_report as w; w(pathlib.Path(sys.argv[1]))"
    environment = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    subprocess.run([sys.executable, "-c", child, str(run_dir)], env=environment, check=True, timeout=60)
    script = (Path(launcher.view.report_page.__file__).parent / "page" / "view.js").read_text(encoding="utf-8")
    assert not script.isascii()
    assert script in (run_dir / "report.html").read_text(encoding="utf-8")


def test_no_text_ends_the_script_that_holds_the_data() -> None:
    text = script_json({"text": EVIL})
    assert json.loads(text) == {"text": EVIL}
    assert not set("<>&\u2028\u202e") & set(text)


def test_a_run_without_a_finished_step_has_no_report(run_dir: Path) -> None:
    with pytest.raises(ConfigError, match="has no finished step"):
        write_report(run_dir)
