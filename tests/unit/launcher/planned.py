"""Runs to plan: a 7B model of which there is a config.json alone, and one of `sim` engines."""

import json
from pathlib import Path
from typing import Any

from launcher.config.load_config import load_config
from launcher.config.paths import find_recipe
from launcher.plan.cost_model import CostModel
from launcher.plan.plan_report import open_planner
from launcher.plan.scenario import Work
from workers.settings.run import RunConfig

QWEN_7B = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18944,
    "num_attention_heads": 28, "num_key_value_heads": 4, "num_hidden_layers": 28, "vocab_size": 152064,
    "tie_word_embeddings": False, "max_position_embeddings": 131072, "rms_norm_eps": 1e-6, "rope_theta": 1e6,
}  # fmt: skip


def qwen_run(tmp_path: Path) -> RunConfig:
    """The 7B recipe with a config.json and no weights, and with a layout of its own."""
    (tmp_path / "config.json").write_text(json.dumps(QWEN_7B))
    data = find_recipe("quickstart").parent / "quickstart" / "train.jsonl"
    overrides = [f"model.path={tmp_path}", f"data.path={data}", "sim.mean_tokens=1000"]
    layout = ["roles={rollout: 10, actor: 4, ref: 2}", "actor.megatron={tensor_parallel: 4}", "sim.sigma=0.5"]
    recipe = find_recipe("qwen2.5-7b-grpo-deepscaler-npu")
    return load_config(recipe, overrides=[*overrides, *layout, "schedule.rollout_batch_size=16"])


def changed(config: RunConfig, *, megatron: dict[str, int] | None = None, **actor: object) -> RunConfig:
    """Return it with another actor."""
    layout = config.actor.megatron.model_copy(update=megatron or {})
    return config.model_copy(update={"actor": config.actor.model_copy(update={**actor, "megatron": layout})})


def changed_vllm(config: RunConfig, **settings: object) -> RunConfig:
    return config.model_copy(update={"vllm": config.vllm.model_copy(update=settings)})


def sim_run(**times: Any) -> RunConfig:
    quickstart = find_recipe("quickstart").parent / "quickstart"
    values: dict[str, Any] = {
        "steps": 8,
        "roles": {"rollout": 2, "actor": 2, "ref": 1},
        "model": {"path": str(quickstart / "model")},
        "data": {"path": str(quickstart / "train.jsonl"), "max_prompt_tokens": 8},
        "schedule": {"max_staleness": 1, "rollout_batch_size": 12, "n_samples_per_prompt": 4},
        "rollout": {"engine": "sim", "batch_size": 8, "max_response_tokens": 4000},
        "actor": {"engine": "sim", "micro_batch_size": 4},
        "ref": {"engine": "sim", "micro_batch_size": 4},
        "algorithm": {"kl_coef": 0.001},
        "sim": {"mean_tokens": 100, "decode_s_per_token": 0.01, **times},
    }
    return RunConfig.model_validate(values)


def cost_model(config: RunConfig) -> CostModel:
    costs = open_planner(config, devices=64, device="h100").costs
    assert costs is not None
    return costs


def train_work(config: RunConfig, role: str = "actor") -> Work:
    return cost_model(config).estimate_times().train[role]
