"""The committed quickstart model is what its script makes, and does what the quickstart needs."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers import AutoTokenizer, Qwen2ForCausalLM

import configs
from workers.data.model_files import check_model_dir
from workers.data.prompt_dataset import PromptDataset
from workers.data.prompt_rows import read_prompt_rows
from workers.rewards.base import Response
from workers.rewards.load_reward import load_reward
from workers.settings.data import DataConfig
from workers.settings.run import RunConfig

CONFIGS = Path(configs.__path__[0])
QUICKSTART = CONFIGS / "quickstart"
ROUNDING = 1e-3
"""Largest difference of a weight between machines; another instruction set was measured to change them by 4e-5."""


def make(target: Path, *arguments: str, name: str = "make_model.py") -> None:
    script = str(QUICKSTART / name)
    environment = {**os.environ, "PYTHONPATH": str(CONFIGS.parent)}
    subprocess.run(
        [sys.executable, "-P", script, "--target", str(target), *arguments],
        check=True, timeout=250, env=environment, capture_output=True,
    )  # fmt: skip


@pytest.mark.slow
def test_script_still_makes_the_committed_files(tmp_path: Path) -> None:
    make(tmp_path)
    for name in ("train.jsonl", "held_out.jsonl", "model/tokenizer.json"):
        assert (tmp_path / name).read_bytes() == (QUICKSTART / name).read_bytes(), name
    made, committed = (load_file(folder / "model" / "model.safetensors") for folder in (tmp_path, QUICKSTART))
    assert made.keys() == committed.keys()
    for name, weight in committed.items():
        torch.testing.assert_close(made[name], weight, rtol=0, atol=ROUNDING)
    shapes = [json.loads((folder / "model" / "config.json").read_text()) for folder in (tmp_path, QUICKSTART)]
    for config in shapes:
        config.pop("transformers_version")
    assert shapes[0] == shapes[1]


@pytest.mark.slow
def test_same_seed_makes_the_same_bytes(tmp_path: Path) -> None:
    for name, seed in (("a", "1"), ("b", "1"), ("c", "2")):
        make(tmp_path / name, "--steps", "2", "--seed", seed)
    a, b, c = ((tmp_path / name / "model" / "model.safetensors").read_bytes() for name in "abc")
    assert a == b
    assert a != c


@pytest.mark.slow
def test_script_of_the_reward_model_makes_one_like_the_committed_one(tmp_path: Path) -> None:
    """What the committed one has learnt is looked at in `tests/unit/columns/test_rewards.py`."""
    make(tmp_path, "--steps", "1", name="make_reward_model.py")
    folders = (tmp_path / "reward_model", QUICKSTART / "reward_model")
    assert len({(folder / "tokenizer.json").read_bytes() for folder in (*folders, QUICKSTART / "model")}) == 1
    made, committed = (load_file(folder / "model.safetensors") for folder in folders)
    assert {name: weight.shape for name, weight in made.items()} == {
        name: weight.shape for name, weight in committed.items()
    }
    shapes = [json.loads((folder / "config.json").read_text()) for folder in folders]
    for config in shapes:
        config.pop("transformers_version")
    assert shapes[0] == shapes[1]


def test_folder_is_small_and_complete() -> None:
    assert sum(file.stat().st_size for file in QUICKSTART.rglob("*") if file.is_file()) < 1_000_000
    check_model_dir(QUICKSTART / "model")


def test_tokenizer_has_one_token_per_character() -> None:
    tokenizer = AutoTokenizer.from_pretrained(QUICKSTART / "model")
    text = "12+34-567890="
    tokens = tokenizer(text)["input_ids"]
    assert tokenizer.convert_ids_to_tokens(tokens) == list(text)
    assert Tokenizer.from_file(str(QUICKSTART / "model" / "tokenizer.json")).encode(text).ids == tokens
    assert tokenizer.decode([*tokens, tokenizer.eos_token_id], skip_special_tokens=True) == text
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id, len(tokenizer)) == (0, 1, 16)


def test_model_is_right_about_one_sum_in_three() -> None:
    model: Any = Qwen2ForCausalLM.from_pretrained(QUICKSTART / "model")
    tokenizer = AutoTokenizer.from_pretrained(QUICKSTART / "model")
    config = RunConfig.model_validate(yaml.safe_load((CONFIGS / "quickstart.yaml").read_text()))
    rows = read_prompt_rows(CONFIGS / config.data.path, config.data)
    data = PromptDataset(rows, config.data, model_dir=CONFIGS / config.model.path, seed=config.seed)
    prompts = [data.prompt_of_group(group) for group in range(len(data))]
    torch.manual_seed(0)
    output = model.generate(
        torch.stack([prompt.tokens for prompt in prompts]).repeat(20, 1),
        do_sample=True, top_k=0, max_new_tokens=config.rollout.max_response_tokens,
    )  # fmt: skip
    responses = tokenizer.batch_decode(output[:, prompts[0].tokens.numel() :], skip_special_tokens=True)
    score = load_reward(config.reward)
    correct = [score(Response(p.text, r, p.ground_truth)).correct for p, r in zip(prompts * 20, responses, strict=True)]
    assert 0.2 < sum(correct) / len(correct) < 0.4


@pytest.mark.parametrize(
    "name",
    [
        "quickstart", "smollm2-arithmetic-cpu", "smollm2-two-digit-sums-cpu", "smollm2-gsm8k-cpu", "smollm2-tools-cpu",
        "reasoning-gym-cpu",
    ],
)  # fmt: skip
def test_recipes_are_valid_and_their_batches_divide(name: str) -> None:
    config = RunConfig.model_validate(yaml.safe_load((CONFIGS / f"{name}.yaml").read_text()))
    num_samples = config.schedule.rollout_batch_size * config.schedule.n_samples_per_prompt
    assert config.actor.micro_batch_size % config.schedule.n_samples_per_prompt == 0
    assert all(num_samples % (ranks * config.actor.micro_batch_size) == 0 for ranks in (1, 2, 4))
    assert config.algorithm.kl_coef > 0, "the default roles include ref"


def test_arithmetic_prompts_are_what_their_script_makes(tmp_path: Path) -> None:
    script = CONFIGS / "data" / "make_arithmetic.py"
    subprocess.run([sys.executable, script, "--target", tmp_path], check=True, timeout=60, capture_output=True)
    names = sorted(path.name for path in (CONFIGS / "data").glob("*.jsonl"))
    assert names == sorted(path.name for path in tmp_path.iterdir())
    for name in names:
        assert (tmp_path / name).read_bytes() == (CONFIGS / "data" / name).read_bytes(), name


@pytest.mark.parametrize(
    ("train", "held_out", "num_held_out"),
    [
        ("quickstart/train.jsonl", "quickstart/held_out.jsonl", 20),
        ("data/arithmetic.jsonl", "data/arithmetic_held_out.jsonl", 64),
        ("data/two_digit_sums.jsonl", "data/two_digit_sums_held_out.jsonl", 400),
    ],
)
def test_held_out_prompts_are_not_trained_on(train: str, held_out: str, num_held_out: int) -> None:
    trained, evaluated = (
        {row.prompt for row in read_prompt_rows(CONFIGS / name, DataConfig(path=name))} for name in (train, held_out)
    )
    assert len(evaluated) == num_held_out
    assert not trained & evaluated
