"""Scores of packed responses, against transformers' model in float64, which sees one sample after another."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoModelForSequenceClassification,
    BertConfig,
    BertForSequenceClassification,
    LlamaForSequenceClassification,
    Qwen2ForSequenceClassification,
    Qwen3ForSequenceClassification,
)

from asyncflow.errors import BadRequest, ConfigError
from workers.engines.hf.frozen import RewardModel
from workers.rows.packed_rows import Sequences

CPU = torch.device("cpu")
CLASSES: dict[str, Any] = {
    "qwen2": Qwen2ForSequenceClassification,
    "qwen3": Qwen3ForSequenceClassification,
    "llama": LlamaForSequenceClassification,
}
EXACT = 1e-6
"""Norms of transformers compute in float32, whatever the model is."""
MakeDir = Callable[..., Path]


@pytest.fixture(name="make_reward_dir")
def _make_reward_dir(make_model_dir: MakeDir, tmp_path: Path) -> MakeDir:
    """Return a function that saves a random model with a head; arguments as those of `make_model_dir`."""

    def make(family: str = "qwen2", **changes: Any) -> Path:
        config = json.loads((make_model_dir(family, **changes) / "config.json").read_text())
        model_class = CLASSES[family]
        torch.manual_seed(1)
        model = model_class(model_class.config_class(**(config | {"num_labels": 1})))
        path = tmp_path / f"reward-{family}"
        model.save_pretrained(path)
        return path

    return make


def rows_of(batch: Sequences) -> list[Tensor]:
    return list(batch.tokens_T.split(batch.lengths_N.tolist()))


@torch.no_grad()
def one_by_one(path: Path, rows: list[Tensor]) -> Tensor:
    """Return float64 [N]: what transformers says to each sample alone."""
    model = AutoModelForSequenceClassification.from_pretrained(
        path, dtype=torch.float64, attn_implementation="eager", num_labels=1
    )
    return torch.stack([model(row.unsqueeze(0)).logits[0, 0] for row in rows])


def close(actual: Tensor, expected: Tensor, limit: float) -> bool:
    return float((actual.double() - expected).abs().max()) < limit


def test_only_the_language_models_head_may_be_left_over(make_reward_dir: MakeDir) -> None:
    path = make_reward_dir()
    weights = load_file(path / "model.safetensors") | {"lm_head.weight": torch.ones(13, 32)}
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    RewardModel(path, dtype=torch.float32, device=CPU)
    save_file(weights | {"score.bias": torch.ones(1)}, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"^reward.model.path: .* holds score.bias, for which Qwen2ForSequence"):
        RewardModel(path, dtype=torch.float32, device=CPU)


@pytest.mark.parametrize("family", CLASSES)
@pytest.mark.parametrize("mixed", ["batch", "groups"])
def test_packed_scores_are_those_of_each_sample_alone(
    make_reward_dir: MakeDir, family: str, mixed: str, request: pytest.FixtureRequest
) -> None:
    samples: Sequences = request.getfixturevalue(mixed)
    path = make_reward_dir(family)
    expected = one_by_one(path, rows_of(samples))
    assert float(expected.std()) > 0.1
    exact = RewardModel(path, dtype=torch.float64, device=CPU).score_samples(samples)
    assert exact.dtype == torch.float64 and close(exact, expected, EXACT)
    scores = RewardModel(path, dtype=torch.float32, device=CPU).score_samples(samples)
    assert scores.dtype == torch.float32 and close(scores, expected, 1e-4)
    rough = RewardModel(path, dtype=torch.bfloat16, device=CPU).score_samples(samples)
    assert rough.dtype == torch.float32 and close(rough, expected, 0.5) and not close(rough, expected, 1e-5)


@pytest.mark.parametrize("padding", [None, 0, 1])
def test_score_is_read_at_the_last_token_that_is_not_padding(make_reward_dir: MakeDir, padding: int | None) -> None:
    """Also where the end of a response is the padding token, which many tokenizers have no other for."""
    path = make_reward_dir(pad_token_id=padding)
    responses = [[5, 1], [1], [5, 0, 0], [0, 1], [1, 7], []]
    prompt = [3, 4]
    samples = Sequences.from_turns(
        [torch.tensor(prompt)] * len(responses), [torch.tensor(response, dtype=torch.int64) for response in responses]
    )
    scores = RewardModel(path, dtype=torch.float64, device=CPU).score_samples(samples)
    assert close(scores, one_by_one(path, rows_of(samples)), EXACT)
    ended, empty = scores[1], scores[5]
    assert bool(ended == empty) == (padding == 1)


def test_score_does_not_depend_on_what_is_scored_with_it(make_reward_dir: MakeDir, groups: Sequences) -> None:
    model = RewardModel(make_reward_dir(), dtype=torch.float64, device=CPU)
    together = model.score_samples(groups)
    alone = [
        model.score_samples(Sequences.from_turns([row[:prompt]], [row[prompt:]]))
        for row, prompt in zip(rows_of(groups), groups.prompt_lengths, strict=True)
    ]
    assert close(together, torch.cat(alone), EXACT)


def test_tokens_that_only_the_policy_has_count_as_the_last_one(make_reward_dir: MakeDir) -> None:
    model = RewardModel(make_reward_dir(), dtype=torch.float32, device=CPU)
    prompt = torch.tensor([3, 4])
    padded, last = (model.score_samples(Sequences.from_turns([prompt], [torch.tensor([token])])) for token in (99, 12))
    assert padded == last


def test_bad_batches_are_refused(make_reward_dir: MakeDir) -> None:
    model = RewardModel(make_reward_dir(), dtype=torch.float32, device=CPU)
    with pytest.raises(BadRequest, match="begins with a drawn token"):
        model.score_samples(Sequences.from_turns([torch.tensor([], dtype=torch.int64)], [torch.tensor([3])]))


def test_models_without_such_a_head_are_refused(make_reward_dir: MakeDir, tmp_path: Path) -> None:
    path = make_reward_dir()
    weights = load_file(path / "model.safetensors")
    save_file({name: weights[name] for name in weights if name != "score.weight"}, path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"lacks the weight score\.weight"):
        RewardModel(path, dtype=torch.float32, device=CPU)
    bert = BertConfig(vocab_size=13, hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8)
    BertForSequenceClassification(bert).save_pretrained(tmp_path / "bert")
    with pytest.raises(ConfigError, match=r"is of a BertForSequenceClassification, which has no head 'score'"):
        RewardModel(tmp_path / "bert", dtype=torch.float32, device=CPU)
    with pytest.raises(ConfigError, match=r"reward\.model\.path: .* has no config\.json"):
        (tmp_path / "bert" / "config.json").unlink()
        RewardModel(tmp_path / "bert", dtype=torch.float32, device=CPU)
