"""Whole runs that train an adapter: two ranks, whose reference is their base, stopped and resumed."""

import shutil
from pathlib import Path

from safetensors.torch import load_file

from launcher.config.load_config import load_config
from launcher.config.paths import find_recipe
from workers.engines.hf.export import SavedTensors

from . import command

ADAPTER = (
    "--roles", "rollout:2,actor:2", "--set", "lora={rank: 4, alpha: 8}", "--set", "weightsync.lora=merged",
    "--set", "schedule.rollout_batch_size=8", "--set", "algorithm.kl_coef=0.01", "--set", "deterministic=true",
    "--set", "schedule.mode=periodic", "--set", "checkpoint.interval=0",
)  # fmt: skip


def test_adapter_of_a_resumed_run_is_that_of_one_that_was_never_stopped(tmp_path: Path) -> None:
    for name, steps in (("whole", "4"), ("parts", "2")):
        done = command.run("--run-dir", name, "--steps", steps, *ADAPTER, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    shutil.copytree(tmp_path / "parts", tmp_path / "other")
    refused = command.run("--resume", "other", "--steps", "4", "--set", "lora.rank=8", cwd=tmp_path)
    assert refused.returncode == 2 and "lora.rank: rank 8 is not what" in refused.stderr
    done = command.run("--resume", "parts", "--steps", "4", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    whole, parts = (command.lines(tmp_path / name / "metrics.jsonl") for name in ("whole", "parts"))
    for one, other in zip(whole, parts, strict=True):
        assert [one[key] for key in ("loss", "kl", "grad_norm")] == [other[key] for key in ("loss", "kl", "grad_norm")]
    assert 0 <= whole[0]["kl"] < 1e-9 < whole[-1]["kl"], "the base is the policy before its first update"
    base = load_file(Path(load_config(find_recipe("quickstart")).model.path) / "model.safetensors")
    for file in ("model.safetensors", "adapter/adapter_model.safetensors"):
        found = [tmp_path / name / "checkpoints" / "step_000004" / "hf" / file for name in ("whole", "parts")]
        assert found[0].read_bytes() == found[1].read_bytes()
    merged = load_file(tmp_path / "whole/checkpoints/step_000004/hf/model.safetensors")
    changed = {name for name, value in merged.items() if not value.equal(base[name])}
    assert changed == {name for name in base if name.endswith("_proj.weight")}
    saved = SavedTensors(tmp_path / "whole/checkpoints/step_000004/dcp")
    assert {name.rpartition(".lora_")[0] + ".weight" for name in saved.shapes_below("model.")} == changed
