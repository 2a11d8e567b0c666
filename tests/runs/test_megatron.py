"""A whole run with the `megatron` engine: ranks of a replica share rows, groups are trained once, a resume goes on."""

import importlib.util
import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

from launcher.config.load_config import load_config
from launcher.config.paths import find_recipe
from workers.engines.hf.export import SavedTensors

from . import command

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="needs megatron-core"),
]
DEADLINE_S = 800
ROLES = (
    "--roles",
    "rollout:1,actor:4,ref:2",
    "--set",
    "ref.engine=megatron",
    "--set",
    "ref.megatron.tensor_parallel=2",
)
SMALL = (
    "--set", "actor.engine=megatron", "--set", "actor.megatron.tensor_parallel=2", "--set", "actor.micro_batch_size=8",
    "--set", "schedule.rollout_batch_size=4", "--set", "schedule.n_samples_per_prompt=4",
    "--set", "schedule.mode=periodic", "--set", "schedule.max_staleness=0",
)  # fmt: skip


@pytest.fixture(autouse=True)
def with_shim(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1] / "megatron_engine" / "site"), prepend=":")


def test_replicas_of_two_ranks_train_every_group_once_and_fewer_go_on(tmp_path: Path) -> None:
    first = command.run(*ROLES, *SMALL, "--run-dir", "run", "--steps", "2", cwd=tmp_path, deadline_s=DEADLINE_S)
    assert first.returncode == 0, first.stderr
    run_dir = tmp_path / "run"
    command.check_ledger(run_dir, groups_per_step=4, last=2)
    metrics = command.lines(run_dir / "metrics.jsonl")
    assert [line["samples"] for line in metrics] == [16, 16]  # rows count once, though two ranks train on each
    assert all(abs(line["old_policy_kl"]) < 1e-3 for line in metrics)  # generator and trainer hold the same weights
    meta = json.loads((run_dir / "checkpoints" / "step_000002" / "meta.json").read_text())
    assert meta["num_ranks"] == 4
    assert (metrics[0]["kl"], metrics[1]["kl"] > 0) == (pytest.approx(0, abs=1e-6), True), "two ranks are the reference"
    fewer = ("--roles", "rollout:1,actor:2,ref:2")
    second = command.run("--resume", "run", *fewer, "--steps", "3", cwd=tmp_path, deadline_s=DEADLINE_S)
    assert second.returncode == 0, second.stderr
    command.check_ledger(run_dir, groups_per_step=4, last=3)


def test_reference_in_the_actors_layout_and_a_critic_of_fsdp(tmp_path: Path) -> None:
    two = ("--run-dir", "run", "--roles", "rollout:1,actor:2,critic:2", "--steps", "2")
    ppo = (
        "--set",
        "actor.tri_model=true",
        "--set",
        "critic.num_critic_only_steps=0",
        "--set",
        "critic.micro_batch_size=8",
    )
    finished = command.run("quickstart-ppo-cpu", *two, *SMALL, *ppo, cwd=tmp_path, deadline_s=DEADLINE_S)
    assert finished.returncode == 0, finished.stderr
    first, second = command.lines(tmp_path / "run" / "metrics.jsonl")
    assert first["kl"] == 0.0 < second["kl"], "equal weights give equal log-probabilities to the last bit"
    assert [line["critic_num_updates"] for line in (first, second)] == [1, 1]
    command.check_ledger(tmp_path / "run", groups_per_step=4, last=2)


def test_every_stage_fetches_rows_that_go_over_the_engines_own_groups(tmp_path: Path) -> None:
    """Actor and reference have two stages; CPU ranks stand in for devices."""
    rows = (
        "--set", "tq.replica_fetch=stage", "--set", "tq.replica_broadcast=device",
        "--set", "actor.megatron.pipeline_parallel=2",
        "--roles", "rollout:1,actor:4,ref:4", "--set", "ref.engine=megatron",
        "--set", "ref.megatron.tensor_parallel=2", "--set", "ref.megatron.pipeline_parallel=2",
    )  # fmt: skip
    finished = command.run(*rows, *SMALL, "--run-dir", "run", "--steps", "2", cwd=tmp_path, deadline_s=DEADLINE_S)
    assert finished.returncode == 0, finished.stderr
    command.check_ledger(tmp_path / "run", groups_per_step=4, last=2)
    metrics = command.lines(tmp_path / "run" / "metrics.jsonl")
    assert [line["samples"] for line in metrics] == [16, 16]
    assert all(abs(line["old_policy_kl"]) < 1e-3 for line in metrics)
    assert (metrics[0]["kl"], metrics[1]["kl"] > 0) == (pytest.approx(0, abs=1e-6), True)


def test_adapter_over_stages_and_tensor_parallel_ranks_arrives_and_is_resumed(tmp_path: Path) -> None:
    """Versions are adapters; the reference is the base; fewer ranks, divided otherwise, go on with it."""
    ours = ("--set", "lora={rank: 4, alpha: 8}", "--set", "algorithm.kl_coef=0.01", "--set", "weightsync.lora=adapter")
    stages = ("--roles", "rollout:1,actor:4", "--set", "actor.megatron.pipeline_parallel=2")
    first = command.run(*ours, *SMALL, *stages, "--run-dir", "run", "--steps", "2", cwd=tmp_path, deadline_s=DEADLINE_S)
    assert first.returncode == 0, first.stderr
    one = ("--roles", "rollout:1,actor:2", "--set", "actor.megatron.pipeline_parallel=1")
    second = command.run("--resume", "run", *one, "--steps", "3", cwd=tmp_path, deadline_s=DEADLINE_S)
    assert second.returncode == 0, second.stderr
    metrics = command.lines(tmp_path / "run" / "metrics.jsonl")
    assert [line["samples"] for line in metrics] == [16] * 3
    assert all(abs(line["old_policy_kl"]) < 1e-3 for line in metrics)  # generator and trainer hold the same adapter
    assert 0 <= metrics[0]["kl"] < 1e-9 < metrics[-1]["kl"], "the base is the policy before its first update"
    command.check_ledger(tmp_path / "run", groups_per_step=4, last=3)
    base = load_file(Path(load_config(find_recipe("quickstart")).model.path) / "model.safetensors")
    exported = tmp_path / "run/checkpoints/step_000003/hf"
    changed = {name for name, value in load_file(exported / "model.safetensors").items() if not value.equal(base[name])}
    assert changed == {name for name in base if name.endswith("_proj.weight")}
    adapter = load_file(exported / "adapter/adapter_model.safetensors")
    assert len(adapter) == 2 * len(changed)
    saved = SavedTensors(tmp_path / "run/checkpoints/step_000003/dcp")
    assert {name.rpartition(".lora_")[0] + ".weight" for name in saved.shapes_below("model.")} == changed
