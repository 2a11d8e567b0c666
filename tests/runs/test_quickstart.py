"""The main job, as a user runs it: one command, then a look at the run directory."""

from pathlib import Path

import psutil
import pytest
import yaml

from . import command

METRICS = {
    "step", "lineage", "time_s", "step_time_s", "reward_mean", "reward_std", "accuracy", "response_tokens_mean",
    "response_tokens_std", "samples", "train_tokens", "train_tokens_per_s", "train_tokens_per_s_per_device", "loss",
    "kl", "entropy", "grad_norm", "lr", "staleness_mean", "staleness_max", "sync_exposed_s", "sync_bytes",
    "first_micro_batch_wait_s", "idle_fraction",
}  # fmt: skip


@pytest.fixture(scope="module")
def quickstart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One run of the packaged quickstart from an empty directory, watched while it goes on."""
    cwd = tmp_path_factory.mktemp("anywhere")
    run_dir = cwd / "run"
    with command.started("--run-dir", "run", cwd=cwd) as process:
        command.wait_until(lambda: command.last_step(run_dir) >= 2, "the second step")
        family = [psutil.Process(process.pid), *command.descendants(process.pid)]
        listening = [
            connection.laddr.ip
            for one in family
            for connection in one.net_connections(kind="inet")
            if connection.status == psutil.CONN_LISTEN
        ]
        out, err = process.communicate(timeout=command.DEADLINE_S)
        assert process.returncode == 0, err
        assert listening
        assert set(listening) <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}
        command.wait_until(lambda: not any(one.is_running() for one in family), "the end of all processes")
    (cwd / "out.txt").write_text(out)
    return run_dir


def test_grpo_makes_the_model_near_perfect(quickstart: Path) -> None:
    accuracy = [line["accuracy"] for line in command.lines(quickstart / "metrics.jsonl")]
    assert accuracy[0] < 0.5
    assert max(accuracy[:60]) >= 0.95
    assert sum(accuracy[-5:]) / 5 >= 0.95


def test_every_step_has_a_metrics_line_and_a_plain_line_of_output(quickstart: Path) -> None:
    metrics = command.lines(quickstart / "metrics.jsonl")
    assert [line["step"] for line in metrics] == list(range(1, 61))
    assert set(metrics[-1]) >= METRICS
    assert set(metrics[-1]["idle_fraction"]) == {"actor", "rollout", "ref"}
    assert all(line["samples"] == 512 and line["staleness_max"] <= 1 for line in metrics)
    out = (quickstart.parent / "out.txt").read_text()
    assert "step 60/60" in out
    assert "\x1b" not in out


def test_every_group_is_trained_once_in_its_step(quickstart: Path) -> None:
    command.check_ledger(quickstart, groups_per_step=32, last=60)
    ledger = command.lines(quickstart / "ledger.jsonl")
    assert all(0 <= line["staleness"] <= 1 for line in ledger)
    # 80 prompts: group 80 starts the second epoch in the middle of step 3
    epochs = {line["group"]: line["epoch"] for line in ledger}  # in the order in which a step's groups were trained
    assert (epochs[79], epochs[80], epochs[160]) == (0, 1, 2)


def test_streaming_trains_before_the_steps_last_sample_exists(tmp_path: Path) -> None:
    """In some step after the first, whose responses may all be there before the reference model is loaded."""
    small_leases = ("--set", "rollout.batch_size=32")  # a step is 16 of them, so that it takes a while
    one_by_one = ("--set", "schedule.mode=periodic")  # a step's responses are generated when the one before is trained
    done = command.run("--run-dir", "run", "--steps", "4", *small_leases, *one_by_one, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    timeline = tmp_path / "run" / "timeline"
    spans = [span for file in timeline.glob("*.jsonl") for span in command.lines(file)]
    ahead = []
    for step in (2, 3, 4):
        of_step = [span for span in spans if span.get("step") == step]
        first_trained = min(span["start"] for span in of_step if span["name"] == "forward_backward")
        last_generated = max(span["end"] for span in of_step if span["name"] == "generate")
        ahead.append(last_generated - first_trained)
    assert max(ahead) > 0


def test_run_directory_is_complete(quickstart: Path) -> None:
    names = {path.name for path in quickstart.iterdir()}
    wanted = {
        "config.yaml",
        "metrics.jsonl",
        "ledger.jsonl",
        "updates.jsonl",
        "logs",
        "timeline",
        "samples",
        "trace",
        "checkpoints",
        "report.html",
        "end.json",
    }
    assert names == wanted  # job.json, which holds the secret, is gone
    assert yaml.safe_load((quickstart / "config.yaml").read_text())["schedule"]["max_staleness"] == 1
    assert {path.name for path in (quickstart / "logs").iterdir()} >= {"actor", "rollout", "ref", "storage"}
    samples = command.lines(quickstart / "samples" / "rollout-0.jsonl")
    assert {"prompt", "response", "ground_truth", "reward", "correct", "step", "version"} <= set(samples[0])


def test_exported_checkpoint_loads_in_transformers_and_answers(quickstart: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    export = quickstart / "checkpoints" / "step_000060" / "hf"
    model = AutoModelForCausalLM.from_pretrained(export)
    tokenizer = AutoTokenizer.from_pretrained(export)
    prompt = tokenizer("3+5=", return_tensors="pt", add_special_tokens=False)
    response = model.generate(**prompt, max_new_tokens=4, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert tokenizer.decode(response, skip_special_tokens=True).strip() == "8"


def test_old_checkpoints_are_removed(quickstart: Path) -> None:
    assert sorted(path.name for path in (quickstart / "checkpoints").iterdir()) == ["step_000040", "step_000060"]
