"""What the user reads while a run goes on."""

import fcntl
import io
import json
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from asyncflow.job import GangSpec
from launcher.process.progress import (
    Output,
    Progress,
    Screen,
    Status,
    draw_screen,
    evaluation_line,
    failures_line,
    final_lines,
    fit,
    pause_text,
    print_line,
    role_rows,
    sparkline,
    step_heading,
    step_line,
)

NOW = 1000.0
ROLLOUTS = tuple(GangSpec(f"rollout-{index}", "rollout", index, 1, ("cpu",)) for index in range(3))
ACTOR = GangSpec("actor", "actor", 0, 2, ("cpu", "cpu"))
STEP = {
    "step": 7,
    "lineage": 0,
    "reward_mean": 0.71234,
    "accuracy": 0.5,
    "staleness_mean": 0.875,
    "staleness_max": 1,
    "train_tokens_per_s": 12345.6,
    "step_time_s": 0.4211,
}


def status(state: str, detail: str = "", *, version: int = 12, at: float = NOW) -> Status:
    return Status(state, detail, step=13, version=version, time=at, pid=1)


def test_role_line_counts_states_most_frequent_first() -> None:
    statuses = {
        ("rollout-0", 0): status("waiting for weights"),
        ("rollout-1", 0): status("generating", version=11),
        ("rollout-2", 0): status("generating"),
    }
    assert role_rows(ROLLOUTS, statuses, NOW) == [("rollout", "3", "2 generating, 1 waiting for weights", "v11-12")]


def test_role_line_shows_a_detail_that_all_ranks_share() -> None:
    statuses = {("actor", rank): status("training", "micro-batch 3/8") for rank in (0, 1)}
    assert role_rows([ACTOR], statuses, NOW) == [("actor", "2", "training micro-batch 3/8", "v12")]


def test_ranks_without_a_status_are_starting() -> None:
    assert role_rows([ACTOR], {}, NOW) == [("actor", "2", "starting", "")]
    assert role_rows([ACTOR], {("actor", 0): status("training")}, NOW)[0][2] == "1 training, 1 starting"


def test_silent_ranks_are_noticed() -> None:
    statuses = {("actor", 0): status("training", at=NOW - 42.4), ("actor", 1): status("training")}
    assert role_rows([ACTOR], statuses, NOW)[0][2] == "training (no news for 42 s)"


def test_roles_come_in_the_order_of_the_dataflow_and_services_last() -> None:
    gangs = [GangSpec(role, role, 0, 1, ("cpu",)) for role in ("storage", "odd", "ref", "actor", "rollout")]
    assert [row[0] for row in role_rows(gangs, {}, NOW)] == ["rollout", "actor", "ref", "storage", "odd"]


def test_services_show_no_version() -> None:
    gang = GangSpec("storage-0", "storage", 0, 1, ("cpu",))
    assert role_rows([gang], {("storage-0", 0): status("serving")}, NOW) == [("storage", "1", "serving", "")]


FULL = {**STEP, "loss": -0.0123, "kl": 0.00456, "response_tokens_mean": 5.25, "idle_fraction": {"actor": 0.254}}


def screen_text(screen: Screen, width: int = 80, **options: Any) -> list[str]:
    return [line.plain.rstrip() for line in draw_screen(screen, width, **options)]


def test_screen_shows_progress_time_left_figures_roles_and_the_newest_sample() -> None:
    screen = Screen([ACTOR], 60, now=NOW, elapsed_s=65.0, evaluation=EVALUATION)
    for step in range(1, 8):
        screen = screen.with_step({**FULL, "step": step, "reward_mean": step / 10, "step_time_s": 2.0})
    busy = {("actor", rank): status("training", "step 8, 64 responses") for rank in (0, 1)}
    sample = {"index": 12, "reward": 1.0, "prompt": "1+1=", "response": "2"}
    screen = Screen(**{**vars(screen), "statuses": busy, "sample": sample, "num_warnings": 1, "warning": "lost a rank"})
    lines = screen_text(screen)
    assert lines[0].startswith("step 7/60 ━━━━") and lines[0].endswith(" 1:05, about 1:46 left")
    assert lines[1:] == [
        "reward 0.700 ▁▂▃▅▆▇█  accuracy 0.500  held out 0.950 (step 10)",
        "kl 0.0046  length 5.2  staleness 0.88 (max 1)  12,346 tokens/s",
        "actor  2  training step 8, 64 responses".ljust(63) + "  v12  idle  25 %",
        "row 12, reward 1: 1+1= -> 2",
        "1 warning: lost a rank",
    ]
    assert screen_text(Screen([], 60, elapsed_s=5.0))[0].endswith(" 0:05")


def test_a_resumed_run_begins_with_the_step_that_it_continues_from() -> None:
    progress = Progress([ACTOR], last_step=60, first_step=30, started_at=0.0, console=Console(file=io.StringIO()))
    assert progress.last_finished_step == 30
    progress.step({**FULL, "step": 31})
    assert progress.last_finished_step == 31
    assert screen_text(Screen([], 60, first_step=30))[0].startswith("step 30/60 ━━━━")


def test_a_pause_is_shown_as_far_as_it_is_and_no_time_is_left_in_it() -> None:
    lead = replace(status("serving"), pause="pausing until step 9 is trained, which was given out before")
    assert pause_text(False, lead) == ""
    assert pause_text(True, None) == pause_text(True, status("serving")) == "pausing", "it has not heard of it"
    assert pause_text(True, lead) == "pausing until step 9 is trained, which was given out before"
    text = "paused after step 9"
    assert pause_text(True, replace(lead, pause=text)) == text
    screen = Screen([], 60, elapsed_s=65.0).with_step({**FULL, "step": 9, "step_time_s": 2.0})
    lines = screen_text(Screen(**{**vars(screen), "pause": text}))
    assert lines[0].endswith(" 1:05") and lines[-1] == text


@pytest.mark.parametrize("width", [20, 40, 60, 80, 200])
@pytest.mark.parametrize("unicode", [False, True])
def test_no_line_of_the_screen_is_wider_than_the_terminal(width: int, unicode: bool) -> None:
    """A line that wraps would make the block jump: the terminal is told to clear fewer rows than there are."""
    busy = {("actor", 0): status("w" * 80), ("actor", 1): status("training")}
    wide = {"index": 1, "reward": None, "prompt": "漢字" * 80, "response": "a\nb" * 80}
    screen = Screen(
        [ACTOR], 10**6, now=NOW, statuses=busy, sample=wide, num_warnings=2, warning="x" * 300, note="n" * 300
    ).with_step({**FULL, "step": 999_999})
    drawn = draw_screen(screen, width, unicode=unicode)
    assert all(line.cell_len <= width and "\n" not in line.plain for line in drawn)
    assert len(drawn) == 7
    if not unicode:
        assert all(line.plain.isascii() for line in drawn[:4] + drawn[5:]), "all but the sample"


def test_samples_cannot_command_the_terminal() -> None:
    evil = {"index": 1, "reward": 0.0, "prompt": "\x1b[2Jclear", "response": "\u202eesrever\x9b31m\x07"}
    (*_, line) = screen_text(Screen([], 1, sample=evil), 200)
    assert line == "row 1, reward 0: \\x1b[2Jclear -> \\u202eesrever\\x9b31m\\x07"


def test_sparkline_spans_its_values() -> None:
    assert sparkline([0.0, 1.0, 0.5]) == "▁█▅"
    assert sparkline([3.0, 3.0], unicode=False) == "__"


@pytest.mark.parametrize("last_step", [7, 60, 10**6 - 1])
def test_step_lines_have_aligned_columns_and_fit_80(last_step: int) -> None:
    heading = step_heading(last_step)
    ends = [match.end() for match in re.finditer(r"\S+", heading)][1:]
    for metrics in (FULL, {"step": 1}, {**FULL, "reward_mean": -123456.0, "train_tokens_per_s": 1.234e9, "loss": 1e-9}):
        line = step_line(metrics, last_step)
        assert [match.end() for match in re.finditer(r"\S+", line)][2:] == ends
        assert len(line) <= 80


def test_step_line() -> None:
    assert step_heading(60) == "step       reward   acc   loss     kl  length stale  tokens/s       s"
    assert step_line(FULL, 60) == "step 7/60   0.712 0.500 -0.012 0.0046     5.2  0.88    12,346    0.42"


@pytest.mark.parametrize(
    ("failed", "words"),
    [
        ({"reward_failures": 356, "samples": 512}, "step 7: 356 rewards failed of 512"),
        ({"rollout_failures": 3, "samples": 512}, "step 7: 3 rollouts failed of 512"),
        ({"dead_letter_groups": 2}, "step 7: 2 groups failed and were replaced"),
        ({"reward_failures": 0, "rollout_failures": 0, "dead_letter_groups": 0, "samples": 8}, ""),
    ],
)
def test_what_failed_is_told_since_the_figures_leave_it_out(
    failed: dict[str, int], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert failures_line({**STEP, **failed}) == words
    with Progress([ACTOR], last_step=60, started_at=0.0, console=Console(force_terminal=False)) as progress:
        progress.step({**STEP, **failed})
    assert capsys.readouterr().out.splitlines()[2:] == ([words] if words else [])
    held_out = evaluation_line({**EVALUATION, "num_samples": 512, **failed}, 60)
    assert ("356 rewards failed" in held_out) == ("356" in words)


EVALUATION = {
    "step": 10, "lineage": 0, "accuracy": 0.95, "accuracy_low": 0.7639, "accuracy_high": 0.9911, "reward_mean": 0.9625,
    "num_prompts": 20, "seconds": 0.04,
}  # fmt: skip


def test_evaluations_are_told_and_the_newest_one_stays(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress([ACTOR], last_step=60, started_at=0.0, console=Console(force_terminal=False)) as progress:
        progress.report_evaluation(EVALUATION)
        progress.report_evaluation({**EVALUATION, "step": 5})  # another instance was slower
    first = "held out, step 10/60: accuracy 0.950 (0.764 to 0.991), reward 0.963"
    assert capsys.readouterr().out.splitlines()[0] == first
    assert progress.last_evaluation == EVALUATION
    assert len(evaluation_line({**EVALUATION, "step": 10**6}, 10**6)) <= 80
    lines = final_lines(
        0, "done", step=60, last_step=60, elapsed_s=1.0, run_dir=Path("x"), resumable=True, evaluation=EVALUATION
    )
    assert "held-out accuracy: 0.950 (0.764 to 0.991) at step 10" in lines


@pytest.mark.parametrize(
    ("code", "message", "last"),
    [
        (0, "done", "done (step 7/60, 1:05)"),
        (75, "stopped", "stopped (step 7/60, 1:05)"),
        (75, "actor: killed", "stopped (step 7/60, 1:05): actor: killed"),
        (
            1,
            "rollout rank 3 failed: ended by SIGKILL",
            "failed (step 7/60, 1:05): rollout rank 3 failed: ended by SIGKILL",
        ),
    ],
)
def test_last_line_says_how_it_ended(code: int, message: str, last: str) -> None:
    run_dir = Path("runs/x")
    lines = final_lines(code, message, step=7, last_step=60, elapsed_s=65.0, run_dir=run_dir, resumable=True)
    assert lines[0] == "run directory: runs/x"
    assert lines[-1] == last
    assert ("resume with: asyncflow-launch --resume runs/x" in lines) == (code != 0)


def test_what_resuming_means_without_a_checkpoint() -> None:
    lines = final_lines(75, "stopped", step=0, last_step=60, elapsed_s=1.0, run_dir=Path("x"), resumable=False)
    assert lines == [
        "run directory: x",
        "resume with: asyncflow-launch --resume x",
        "there is no checkpoint yet: resumed, it starts again from step 1",
        "stopped (step 0/60, 0:01)",
    ]


@pytest.mark.parametrize("code", [0, 1, 75])
def test_what_trains_nothing_has_no_steps_and_is_not_told_to_be_resumed(code: int) -> None:
    lines = final_lines(code, "stopped", step=0, last_step=0, elapsed_s=1.0, run_dir=Path("x"), resumable=False)
    assert not [line for line in lines if "resume" in line or "step" in line]


def test_a_terminal_without_columns_gets_plain_lines(capsys: pytest.CaptureFixture[str]) -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=0, _environ={"TERM": "xterm"})
    with Progress([ACTOR], last_step=60, started_at=NOW, console=console) as progress:
        progress.print_event("started 2 workers")
    assert capsys.readouterr().out == "started 2 workers\n"


def test_a_failure_without_a_checkpoint_is_not_told_to_be_resumed() -> None:
    lines = final_lines(1, "no", step=0, last_step=60, elapsed_s=1.0, run_dir=Path("x"), resumable=False)
    assert lines == ["run directory: x", "logs: x/logs", "failed (step 0/60, 0:01): no"]


def test_resume_line_can_be_pasted_into_a_shell() -> None:
    lines = final_lines(75, "stopped", step=1, last_step=2, elapsed_s=1.0, run_dir=Path("my runs/x"), resumable=True)
    assert "resume with: asyncflow-launch --resume 'my runs/x'" in lines


def test_status_takes_what_it_knows() -> None:
    assert Status.from_json({"state": "training", "step": 3, "color": "red"}) == Status("training", step=3)
    assert not Status("starting").at_work
    assert Status("training").at_work


def test_the_end_says_where_the_model_is_and_what_to_type() -> None:
    ended: dict[str, Any] = {"step": 7, "last_step": 7, "elapsed_s": 1.0, "run_dir": Path("my runs/x")}
    model = Path("my runs/x/checkpoints/step_000007/hf")
    lines = final_lines(0, "done", resumable=True, model=model, **ended)
    assert lines[1:3] == [f"model: {model}", "look at it: asyncflow view 'my runs/x'"]
    assert "model: asyncflow export 'my runs/x'" in final_lines(75, "stopped", resumable=True, **ended)
    assert not any("model" in line for line in final_lines(1, "no", resumable=False, **ended))


def test_without_a_terminal_there_is_one_line_per_step(capsys: pytest.CaptureFixture[str]) -> None:
    console = Console(force_terminal=False)
    with Progress([ACTOR], last_step=60, started_at=0.0, console=console) as progress:
        progress.update({("actor", 0): status("training")})
        for step in range(1, 22):
            progress.step({**STEP, "step": step})
    lines = capsys.readouterr().out.splitlines()
    assert [line.startswith("step ") for line in lines] == [True] * 23, "the heading comes again after 20 steps"
    assert lines[0] == lines[21] == step_heading(60)
    assert lines[7] == step_line(STEP, 60)
    assert progress.last_finished_step == 21


def test_quiet_and_json_lines(capsys: pytest.CaptureFixture[str]) -> None:
    for output in (Output.QUIET, Output.JSON):
        output.say("reading")
        with Progress([ACTOR], last_step=60, started_at=0.0, output=output) as progress:
            progress.ready(2)
            progress.step(STEP)
            progress.report_evaluation(EVALUATION)
            progress.print_warning("warning: \x1b[31mred")
        shown = capsys.readouterr()
        if output is Output.QUIET:
            assert (shown.out, shown.err) == ("warning: \\x1b[31mred\n", "")
        else:
            assert [json.loads(line) for line in shown.out.splitlines()] == [STEP]
            assert len(shown.err.splitlines()) == 4


def test_long_events_break_between_words_and_paths_stay_whole() -> None:
    path = "/a/" + "b" * 90
    lines = fit(f"warning: {'word ' * 30}{path}", 80)
    assert lines[-1].strip() == path
    assert all(len(line) <= 80 for line in lines[:-1])
    assert " ".join(line.strip() for line in lines) == f"warning: {'word ' * 30}{path}"


def test_dumb_terminal_gets_plain_lines(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    with Progress([ACTOR], last_step=60, started_at=0.0, console=Console(force_terminal=True)) as progress:
        progress.step(STEP)
        progress.update({("actor", 0): status("training")})
        assert capsys.readouterr().out == f"{step_heading(60)}\n{step_line(STEP, 60)}\n"


@pytest.mark.parametrize("terminal", [True, False])
def test_a_line_before_the_run_breaks_between_words_in_a_terminal_only(
    monkeypatch: pytest.MonkeyPatch, *, terminal: bool
) -> None:
    shown = io.StringIO()
    monkeypatch.setattr(shown, "isatty", lambda: terminal)
    monkeypatch.setattr("sys.stdout", shown)
    monkeypatch.setenv("COLUMNS", "40")
    line = "note: without effect: algorithm.eps_clip, algorithm.dual_clip (with one update a step)"
    print_line(line)
    said = shown.getvalue().splitlines()
    assert " ".join(" ".join(said).split()) == line
    assert (len(said) > 1, max(map(len, said)) <= 40) == (terminal, terminal)


# In a real terminal.

SHOWN = """
import sys, time
from launcher.process.progress import *
from asyncflow.job import GangSpec
actor = GangSpec("actor", "actor", 0, 1, ("cpu",))
with Progress([actor], last_step=9, started_at=time.time()) as progress:
    for step in range(1, 4):
        sys.stdin.readline()
        progress.step({"step": step, "reward_mean": step / 4, "step_time_s": 1.0})
        progress.print_warning("warning: " + "word " * 30)
        progress.update({("actor", 0): Status("training", f"step {step}", time=time.time(), version=step)})
    sys.stdin.readline()
print_line("done")
"""


def _without_a_size() -> dict[str, str]:
    """Return the environment without the width that pytest-xdist puts there, which counts more than the terminal's."""
    return {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}


class Terminal:
    """A pseudo terminal with a program in it, and what the program has written."""

    def __init__(self, columns: int, rows: int = 24) -> None:
        self.master, slave = pty.openpty()
        self.resize(columns, rows)
        self.process = subprocess.Popen(
            [sys.executable, "-W", "error", "-c", SHOWN], stdin=subprocess.PIPE, stdout=slave, stderr=subprocess.STDOUT,
            env=_without_a_size() | {"TERM": "xterm", "PYTHONPATH": str(Path(__file__).parents[3])},
            text=True, bufsize=1,
        )  # fmt: skip
        os.close(slave)
        self.written = ""

    def resize(self, columns: int, rows: int = 24) -> None:
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def next_step(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")

    def read_until(self, text: str) -> str:
        """Return what was written up to a text."""
        while text not in self.written:
            self.written += os.read(self.master, 65536).decode()
        before, _, self.written = self.written.partition(text)
        return before + text


@contextmanager
def terminal(columns: int) -> Iterator[Terminal]:
    shown = Terminal(columns)
    try:
        yield shown
    finally:
        shown.process.kill()
        shown.process.wait()
        assert shown.process.stdin is not None
        shown.process.stdin.close()


def lines_in(written: str) -> list[str]:
    """Return the rows that were written, without their commands for the cursor."""
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", written).replace("\r", "\n").split("\n")


@pytest.mark.gate
def test_region_follows_the_size_of_its_terminal_and_leaves_the_lines_of_steps() -> None:
    with terminal(80) as shown:
        shown.next_step()
        first = shown.read_until("training step 1") + shown.read_until("v1")
        assert max(map(len, lines_in(first))) <= 80
        shown.resize(70)
        shown.next_step()
        second = shown.read_until("training step 2") + shown.read_until("v2")
        region = lines_in(second.rpartition("step 2/9 ")[2])
        assert max(map(len, region)) <= 70
        for _ in range(2):
            shown.next_step()
        last = shown.read_until("done")
        assert "\x1b[?25h" in last, "the cursor is back"
        everything = lines_in(first + second + last)
        assert [line for line in everything if line.startswith("step 2/9  ")] == [step_line(_made(2), 9)]
        assert shown.process.wait(30) == 0


def _made(step: int) -> dict[str, float]:
    return {"step": step, "reward_mean": step / 4, "step_time_s": 1.0}


@pytest.mark.gate
def test_a_terminal_that_is_closed_does_not_disturb_the_run() -> None:
    with terminal(80) as shown:
        shown.next_step()
        shown.read_until("training step 1")
        os.close(shown.master)
        for _ in range(3):
            shown.next_step()
        assert shown.process.wait(30) == 0


@pytest.mark.parametrize("terminal", [False, True])
def test_run_goes_on_when_nobody_reads_the_output(
    terminal: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (tmp_path / "out").open("w") as out:
        monkeypatch.setattr("sys.stdout", out)
        with Progress([ACTOR], last_step=60, started_at=0.0, console=Console(force_terminal=terminal)) as progress:
            with Path("/dev/full").open("w") as full:
                os.dup2(full.fileno(), out.fileno())
            progress.step(STEP)
            progress.update({("actor", 0): status("training")})
            progress.show_note("stopping")
        print_line("done")
        assert Path(f"/proc/self/fd/{out.fileno()}").readlink() == Path(os.devnull)
