"""Task `rewards` with a reward model: how its scores and those of the function become rewards."""

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification

from asyncflow.errors import UserCodeFailed
from launcher.config.load_config import load_config
from launcher.config.paths import find_recipe
from tq.columns import Column, PackedBatch
from workers.data.tokenizer import load_tokenizer
from workers.rows.packed_rows import sample_columns
from workers.settings.run import RunConfig
from workers.tasks.column_tasks import Rewards

CPU = torch.device("cpu")
ROWS = [("1+2=", "3", "3"), ("1+2=", "4", "3"), ("4+8=", "12", "12"), ("4+8=", "1", "12"), ("4+8=", "=7", "12")]
"""Prompt, response, ground truth."""


def configure(*settings: str) -> RunConfig:
    return load_config(find_recipe("quickstart-reward-model-cpu"), overrides=settings)


def open_task(config: RunConfig, failures: list[str] | None = None) -> Rewards:
    failures = [] if failures is None else failures
    context: Any = SimpleNamespace(
        config=config, device=CPU, rank=0, reward_failed=failures.append,
        load_tokenizer=lambda: load_tokenizer(Path(config.model.path)), report_state=lambda *_: None,
    )  # fmt: skip
    return Rewards(context)


@pytest.fixture(name="task")
def _task() -> Iterator[Rewards]:
    task = open_task(configure("reward.model.micro_batch_size=3"))
    yield task
    task.close()


def batch_of(config: RunConfig) -> PackedBatch:
    tokenizer = load_tokenizer(Path(config.model.path))
    prompts, responses = (
        [torch.tensor(tokenizer(row[k] + end)["input_ids"]) for row in ROWS] for k, end in ((0, ""), (1, "<eos>"))
    )
    columns = {
        "prompts": Column.of_rows(prompts),
        **sample_columns(prompts, responses),
        "ground_truth": Column.of_texts([row[2] for row in ROWS]),
        "truncated": Column.of_scalars(torch.zeros(len(ROWS), dtype=torch.bool)),
    }
    return PackedBatch(tuple(range(len(ROWS))), columns)


@torch.no_grad()
def model_scores(config: RunConfig) -> list[float]:
    """What transformers says, one response after another."""
    assert config.reward.model is not None
    model = AutoModelForSequenceClassification.from_pretrained(config.reward.model.path)
    tokenizer = load_tokenizer(Path(config.model.path))
    texts = (f"{prompt}{response}<eos>" for prompt, response, _ in ROWS)
    return [float(model(torch.tensor([tokenizer(text)["input_ids"]])).logits) for text in texts]


def test_reward_is_the_model_s_score_and_right_is_what_the_function_says(task: Rewards) -> None:
    config = configure()
    columns = task.compute_columns(batch_of(config), 1)
    assert task.num_rows == 3
    assert columns["rewards"].values.tolist() == pytest.approx(model_scores(config), abs=1e-4)
    assert columns["rewards"].values.dtype == torch.float32
    assert columns["correct"].values.tolist() == [True, False, True, False, False]


def test_function_s_reward_is_added_with_its_weight() -> None:
    config = configure("reward.function=digits", "reward.model.weight=-0.5", "reward.model.function_weight=2")
    task = open_task(config)
    columns = task.compute_columns(batch_of(config), 1)
    task.close()
    function = [1.0, 0.0, 1.0, 0.25, 0.0]
    expected = [-0.5 * score + 2 * own for score, own in zip(model_scores(config), function, strict=True)]
    assert columns["rewards"].values.tolist() == pytest.approx(expected, abs=1e-4)
    assert columns["correct"].values.tolist() == [True, False, True, False, False]


def test_committed_model_prefers_right_sums_of_the_training_data() -> None:
    """To every other number, and to what is none."""
    config = configure()
    task = open_task(config)
    tokenizer = load_tokenizer(Path(config.model.path))
    for line in config.data.file.read_text().splitlines():
        row = json.loads(line)
        others = [*(str(number) for number in range(19)), "", "123", f"0{row['answer']}", "9999", "=+"]
        texts = [row["answer"], *(text for text in others if text != row["answer"])]
        responses = [torch.tensor(tokenizer(f"{text}<eos>")["input_ids"][:4]) for text in texts]
        prompts = [torch.tensor(tokenizer(row["prompt"])["input_ids"])] * len(texts)
        columns = {
            "prompts": Column.of_rows(prompts),
            **sample_columns(prompts, responses),
            "ground_truth": Column.of_texts([row["answer"]] * len(texts)),
            "truncated": Column.of_scalars(torch.zeros(len(texts), dtype=torch.bool)),
        }
        batch = PackedBatch(tuple(range(len(texts))), columns)
        rewards = task.compute_columns(batch, 1)["rewards"].values
        assert float(rewards[0]) > float(rewards[1:].max()) + 1, row["prompt"]
    task.close()


def test_score_that_is_no_number_ends_the_run_by_name(tmp_path: Path) -> None:
    config = configure()
    assert config.reward.model is not None
    for file in Path(config.reward.model.path).iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = load_file(tmp_path / "model.safetensors")
    weights["score.weight"][0, 0] = float("nan")
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    broken = configure(f"reward.model.path={tmp_path}")
    task = open_task(broken)
    with pytest.raises(UserCodeFailed, match=r"reward\.model: .* scored the response '3' with nan") as caught:
        task.compute_columns(batch_of(broken), 1)
    assert caught.value.final
    task.close()
