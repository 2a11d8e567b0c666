"""What the user reads while a run goes on."""

import os
import time
from pathlib import Path

import pytest
from rich.console import Console

from asyncflow.job import GangSpec
from launcher.process.progress import (
    Progress,
    Status,
    evaluation_line,
    final_lines,
    headline,
    print_line,
    role_rows,
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


def test_headline_says_what_was_learned_and_how_fast() -> None:
    full = {**STEP, "loss": -0.0123, "kl": 0.00456, "response_tokens_mean": 5.25}
    assert headline(full, 60, 3665.9, EVALUATION) == (
        "step 7/60 · 1:01:05 · reward 0.712 · accuracy 0.500 · loss -0.012 · kl 0.0046 · length 5.2",
        "staleness 0.88 (max 1) · 12,346 tokens/s · held out 0.950 (step 10)",
    )
    assert headline(None, 60, 5.0) == ("step 0/60 · 0:05",)


def test_block_keeps_its_height_in_a_narrow_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    """A line that wraps would make the block jump: the terminal is told to clear fewer rows than there are."""
    console = Console(force_terminal=True, width=60, color_system=None)
    full = {**STEP, "loss": -0.0123, "kl": 0.00456, "response_tokens_mean": 5.25}
    busy = {("actor", 0): status("training", at=time.time()), ("actor", 1): status("w" * 80, at=time.time())}
    with Progress([ACTOR], last_step=60, started_at=0.0, console=console) as progress:
        progress.step(full)
        capsys.readouterr()
        progress.update(busy)
        block = capsys.readouterr().out.split("\x1b[2K")[-1].splitlines()
    assert len(block) == 3, "two lines of figures and one of the only role"
    assert all(len(line) <= 60 for line in block)


def test_step_line() -> None:
    expected = "step 7/60  reward 0.712  accuracy 0.500  staleness 0.88 (max 1)  12,346 tokens/s  0.42 s"
    assert step_line(STEP, 60) == expected


@pytest.mark.parametrize(
    ("failed", "words"),
    [
        ({"reward_failures": 356, "samples": 512}, "accuracy 0.500  356 rewards failed of 512  staleness"),
        ({"rollout_failures": 3, "samples": 512}, "accuracy 0.500  3 rollouts failed of 512  staleness"),
        ({"dead_letter_groups": 2}, "accuracy 0.500  2 groups failed and were replaced  staleness"),
        ({"reward_failures": 0, "rollout_failures": 0, "dead_letter_groups": 0, "samples": 8}, "0.500  staleness"),
    ],
)
def test_what_failed_stands_beside_the_figures_that_leave_it_out(failed: dict[str, int], words: str) -> None:
    assert words in step_line({**STEP, **failed}, 60)
    held_out = evaluation_line({**EVALUATION, "num_samples": 512, **failed}, 60)
    assert ("356 rewards failed of 512" in held_out) == ("356" in words)


EVALUATION = {
    "step": 10, "lineage": 0, "accuracy": 0.95, "accuracy_low": 0.7639, "accuracy_high": 0.9911, "reward_mean": 0.9625,
    "num_prompts": 20, "seconds": 0.04,
}  # fmt: skip


def test_evaluations_are_told_and_the_newest_one_stays(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress([ACTOR], last_step=60, started_at=0.0, console=Console(force_terminal=False)) as progress:
        progress.report_evaluation(EVALUATION)
        progress.report_evaluation({**EVALUATION, "step": 5})  # another instance was slower
    first = "held out, step 10/60  reward 0.963  accuracy 0.950 (0.764 to 0.991)  20 prompts  0.04 s"
    assert capsys.readouterr().out.splitlines()[0] == first
    assert progress.last_evaluation == EVALUATION
    assert headline(None, 60, 5.0, EVALUATION)[1] == "held out 0.950 (step 10)"
    lines = final_lines(
        0, "done", step=60, last_step=60, elapsed_s=1.0, run_dir=Path("x"), resumable=True, evaluation=EVALUATION
    )
    assert "held-out accuracy: 0.950 (0.764 to 0.991) at step 10" in lines


def test_missing_figures_are_left_out() -> None:
    assert step_line({"step": 1, "accuracy": None}, 2) == "step 1/2  "


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


def test_without_a_terminal_there_is_one_line_per_step(capsys: pytest.CaptureFixture[str]) -> None:
    console = Console(force_terminal=False)
    with Progress([ACTOR], last_step=60, started_at=0.0, console=console) as progress:
        progress.update({("actor", 0): status("training")})
        progress.step(STEP)
    assert capsys.readouterr().out == step_line(STEP, 60) + "\n"
    assert progress.last_finished_step == 7


def test_terminal_shows_headline_and_roles(capsys: pytest.CaptureFixture[str]) -> None:
    console = Console(force_terminal=True, width=100, color_system=None)
    with Progress([ACTOR], last_step=60, started_at=0.0, console=console) as progress:
        progress.step(STEP)
        progress.show_note("stopping: ...")
        progress.update({("actor", rank): status("training", at=time.time()) for rank in (0, 1)})
    shown = capsys.readouterr().out
    assert step_line(STEP, 60) in shown, "finished steps stay above the table"
    assert "reward 0.712 · accuracy 0.500\n" in shown
    assert "actor  2  training  v12" in shown
    assert "stopping: ..." in shown


def test_dumb_terminal_gets_plain_lines(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    with Progress([ACTOR], last_step=60, started_at=0.0, console=Console(force_terminal=True)) as progress:
        progress.step(STEP)
        progress.update({("actor", 0): status("training")})
        assert capsys.readouterr().out == step_line(STEP, 60) + "\n"


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
