"""What the end-to-end benchmark counts, apart from the runs."""

import json
from pathlib import Path

import pytest
from end_to_end_parts.part_floor import PROMPT_TOKENS, update_flops
from end_to_end_parts.runs import Lab, ratio_of_medians
from end_to_end_parts.workload import ANSWERS, TOKENS, Workload, our_config, write_prompts
from transformers import LlamaConfig, LlamaForCausalLM

from workers.config import RunConfig


def test_floor_counts_every_weight_that_a_token_meets(tmp_path: Path) -> None:
    config = LlamaConfig(
        vocab_size=50, hidden_size=24, intermediate_size=40, num_hidden_layers=3, num_attention_heads=6,
        num_key_value_heads=2, tie_word_embeddings=False,
    )  # fmt: skip
    config.save_pretrained(tmp_path)
    weights = {name: weight.numel() for name, weight in LlamaForCausalLM(config).named_parameters() if weight.dim() > 1}
    logits, layers = weights.pop("lm_head.weight"), sum(weights.values()) - weights["model.embed_tokens.weight"]
    answers = ANSWERS * TOKENS
    expected = (2 + 6) * (layers * (PROMPT_TOKENS + answers) + logits * answers)
    assert update_flops(tmp_path) == expected


def test_rate_is_of_the_steps_that_count() -> None:
    lab = Lab(model=Path(), directory=Path(), skipped=2)
    assert lab._rate([10.0, 20.0, 22.0, 26.0], [999, 999, 30, 90]) == 20.0
    assert ratio_of_medians([1.0, 4.0, 9.0], [2.0, 1.0, 100.0]) == 2.0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_our_recipe_is_a_valid_run_with_one_prompt_an_update(tmp_path: Path, dtype: str) -> None:
    prompts = tmp_path / "prompts.jsonl"
    write_prompts(prompts)
    assert len({json.loads(line)["prompt"] for line in prompts.read_text().splitlines()}) > 50
    workload = Workload(tmp_path, prompts, dtype, steps=4, threads=2)
    config = RunConfig.model_validate(our_config(workload, engine="hf", settings={"rollout.on_swap": "keep"}))
    assert config.rollout.on_swap == "keep" and config.model.dtype == config.actor.autocast == dtype
    assert config.schedule.rollout_batch_size == config.actor.num_updates == 1
