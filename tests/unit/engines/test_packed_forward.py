"""A packed forward equals one forward per sample."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from asyncflow.errors import ConfigError
from workers.engines.hf.frozen import FrozenModel
from workers.engines.packed_attention import PACKED_ATTENTION, packed_attention
from workers.engines.packed_forward import PackedInputs, PackedLayout, response_log_probs
from workers.rows.packed_rows import Sequences
from workers.settings.run import ModelConfig

CPU = torch.device("cpu")


def one_by_one(model: torch.nn.Module, batch: Sequences, temperature: float) -> Tensor:
    """Drawn tokens' log-probabilities from transformers' own forward of each sample."""
    parts, sizes = [], batch.lengths_N.tolist()
    for tokens, mask in zip(batch.tokens_T.split(sizes), batch.response_mask_T.split(sizes), strict=True):
        logits = model(tokens.unsqueeze(0)).logits[0, :-1] / temperature
        parts.append(logits.log_softmax(-1).gather(-1, tokens[1:, None]).squeeze(-1)[mask[1:].bool()])
    return torch.cat(parts)


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize(
    ("given", "shared_prompt"), [("batch", False), ("groups", True), ("turns", False), ("turns", True)]
)
def test_log_probs_and_gradients_equal_those_of_single_samples(
    make_model_dir: Callable[..., Path],
    request: pytest.FixtureRequest,
    family: str,
    temperature: float,
    given: str,
    shared_prompt: bool,
) -> None:
    path = make_model_dir(family)
    samples: Sequences = request.getfixturevalue(given)
    plain = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64, attn_implementation="sdpa")
    packed = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64, attn_implementation=PACKED_ATTENTION)

    expected = one_by_one(plain, samples, temperature)
    inputs = PackedInputs.from_batch(samples, CPU, shared_prompt=shared_prompt)
    actual, entropy = response_log_probs(packed, inputs, temperature, entropy=True)
    weights = torch.linspace(-1, 1, len(expected), dtype=torch.float64)
    (expected * weights).sum().backward()
    (actual * weights).sum().backward()

    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-9)
    assert entropy.shape == expected.shape and bool((entropy > 0).all())
    for (name, left), right in zip(packed.named_parameters(), plain.parameters(), strict=True):
        assert left.grad is not None and right.grad is not None, name
        # transformers' RMSNorm works in float32, so other batches round otherwise.
        torch.testing.assert_close(left.grad, right.grad, rtol=1e-6, atol=1e-6 * float(right.grad.abs().max()))


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama"])
def test_gradients_of_a_shared_prompt_equal_those_of_single_samples_in_float32(
    make_model_dir: Callable[..., Path], groups: Sequences, family: str
) -> None:
    path = make_model_dir(family, initializer_range=0.05)
    plain = AutoModelForCausalLM.from_pretrained(path, attn_implementation="sdpa")
    packed = AutoModelForCausalLM.from_pretrained(path, attn_implementation=PACKED_ATTENTION)
    one_by_one(plain, groups, 1.0).mean().backward()
    response_log_probs(packed, PackedInputs.from_batch(groups, CPU, shared_prompt=True), 1.0)[0].mean().backward()
    expected, actual = (torch.cat([p.grad.flatten() for p in m.parameters()]) for m in (plain, packed))
    assert float((actual - expected).norm() / expected.norm()) < 1e-6


def test_a_prompt_is_computed_once_and_positions_go_on_after_it(groups: Sequences) -> None:
    inputs = PackedInputs.from_batch(groups, CPU, shared_prompt=True)
    # The second prompt, the first one, the sample alone; then responses without their last tokens.
    assert inputs.layout.lengths == (3, 5, 6, 1, 3, 2, 2, 4)
    assert inputs.layout.prompts == (-1, -1, -1, 0, 0, 1, 1, 1)
    assert inputs.positions_T.tolist() == [0, 1, 2, *range(5), *range(6), 3, 3, 4, 5, 5, 6, 5, 6, 5, 6, 7, 8]
    first_predictors = [inputs.predictors_A[place].item() for place in (0, 3, 4, 9)]
    assert first_predictors == [7, 2, 7, 11]  # the last tokens of the prompts
    assert inputs.tokens_T[:3].equal(groups.tokens_T[8:11])


@pytest.mark.parametrize("shared_prompt", [False, True])
def test_sliding_window_is_kept(make_model_dir: Callable[..., Path], groups: Sequences, shared_prompt: bool) -> None:
    path = make_model_dir("qwen2", use_sliding_window=True, sliding_window=3, max_window_layers=1)
    plain = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager")
    packed = AutoModelForCausalLM.from_pretrained(path, attn_implementation=PACKED_ATTENTION)
    with torch.no_grad():
        actual, _ = response_log_probs(packed, PackedInputs.from_batch(groups, CPU, shared_prompt=shared_prompt), 1.0)
        torch.testing.assert_close(actual, one_by_one(plain, groups, 1.0), rtol=1e-5, atol=1e-5)


def test_samples_are_sorted_by_length_and_responses_are_not(batch: Sequences) -> None:
    inputs = PackedInputs.from_batch(batch, CPU)
    assert inputs.layout.lengths == (4, 5, 6, 6, 6)  # without the last token of each response
    assert inputs.positions_T[:9].tolist() == [0, 1, 2, 3, 0, 1, 2, 3, 4]
    first_response = batch.tokens_T[3:7]
    assert inputs.targets_A[:4].equal(first_response)
    assert inputs.tokens_T[inputs.predictors_A[:3] + 1].equal(first_response[:3])


def test_frozen_model_reads_its_directory(model_dir: Path, batch: Sequences) -> None:
    frozen = FrozenModel(model_dir, ModelConfig(path=str(model_dir)), temperature=0.5, device=CPU)
    plain = AutoModelForCausalLM.from_pretrained(model_dir)
    with torch.no_grad():
        expected = one_by_one(plain, batch, 0.5)
    actual = frozen.log_probs(batch)
    assert actual.dtype == torch.float32 and not actual.requires_grad
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=2e-5)


def test_frozen_bfloat16_model_returns_float32(model_dir: Path, batch: Sequences) -> None:
    config = ModelConfig(path=str(model_dir), dtype="bfloat16")
    actual = FrozenModel(model_dir, config, temperature=1.0, device=CPU).log_probs(batch)
    assert actual.dtype == torch.float32 and bool(actual.isfinite().all())


def test_frozen_model_with_tied_weights(make_model_dir: Callable[..., Path], batch: Sequences) -> None:
    path = make_model_dir("llama", tie_word_embeddings=True)
    frozen = FrozenModel(path, ModelConfig(path=str(path)), temperature=1.0, device=CPU)
    with torch.no_grad():
        expected = one_by_one(AutoModelForCausalLM.from_pretrained(path), batch, 1.0)
    torch.testing.assert_close(frozen.log_probs(batch), expected, rtol=1e-5, atol=2e-5)


def test_capped_scores_are_refused() -> None:
    heads = torch.zeros(1, 1, 2, 8)
    with pytest.raises(ConfigError, match="capped scores"):
        packed_attention(
            torch.nn.Identity(), heads, heads, heads, None, packed_layout=PackedLayout((2,), (-1,)), softcap=30.0
        )


def test_missing_weight_is_named(model_dir: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    weights = load_file(model_dir / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, model_dir / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"lacks the weight model\.norm\.weight"):
        FrozenModel(model_dir, ModelConfig(path=str(model_dir)), temperature=1.0, device=CPU)


def test_directory_without_weights_or_config_is_refused(tmp_path: Path, model_dir: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(ConfigError, match=r"no \*\.safetensors"):
        FrozenModel(empty, ModelConfig(path=str(empty)), temperature=1.0, device=CPU)
    (model_dir / "config.json").unlink()
    with pytest.raises(ConfigError, match=r"no config\.json"):
        FrozenModel(model_dir, ModelConfig(path=str(model_dir)), temperature=1.0, device=CPU)
