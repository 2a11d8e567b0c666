"""Kinds of models that the engines compute rightly, and those that they do not: told by a small one's numbers."""

from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.version import Version
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, __version__

from workers.engines import model_proof
from workers.engines.hf.frozen import FrozenModel
from workers.engines.model_proof import GENERATES, SCORES, prove_model, saved_names
from workers.rows.packed_rows import Sequences
from workers.settings.run import ModelConfig

SIZES = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 48, "max_position_embeddings": 64, "eos_token_id": 2, "bos_token_id": 1,
    "pad_token_id": 0,
}  # fmt: skip
GPT2 = {
    "model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 48, "n_positions": 64,
    "eos_token_id": 2, "bos_token_id": 1,
}  # fmt: skip
NEOX = SIZES | {"model_type": "gpt_neox"}
HYBRID = SIZES | {"model_type": "lfm2", "layer_types": ["conv", "full_attention"], "block_multiple_of": 16}
WINDOWS = SIZES | {
    "model_type": "gemma3_text", "head_dim": 16, "sliding_window": 5,
    "layer_types": ["sliding_attention", "full_attention"],
}  # fmt: skip


def packed(config: dict[str, Any]) -> str | None:
    return prove_model(config, ["packed"])["packed"]


def test_every_part_of_a_common_model_is_right() -> None:
    assert prove_model(SIZES | {"model_type": "qwen2"}, GENERATES) == dict.fromkeys(GENERATES)


def test_gpt2_is_right_and_so_are_layers_of_which_some_have_windows() -> None:
    assert packed(GPT2) is None
    assert packed(WINDOWS) is None


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (HYBRID, r"Lfm2ShortConv \(conv, model\.layers\.0\.conv\) mixes the samples of a packed batch"),
        (
            {"model_type": "bloom", "hidden_size": 32, "n_layer": 2, "n_head": 4, "vocab_size": 48},
            r"BloomAttention \(transformer\.h\.0\.self_attention\) mixes the samples",
        ),
        (
            {"model_type": "mamba", "hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 48},
            r"MambaMixer \(.*backbone\.layers\.0\.mixer\) mixes the samples",
        ),
        (
            {"model_type": "gpt_neo", "hidden_size": 32, "num_layers": 1, "num_heads": 4, "vocab_size": 48}
            | {"attention_types": [[["global"], 1]], "max_position_embeddings": 64},
            r"has an attention of its own \(GPTNeoAttention\)",
        ),
        (SIZES | {"model_type": "gemma2", "head_dim": 16}, r"capped scores .* \(Gemma2Attention\)"),
        (SIZES | {"model_type": "bert"}, r"BertSelfAttention .* gives other numbers"),
        (
            {"model_type": "ours", "auto_map": {"AutoModelForCausalLM": "modeling_ours.Ours"}},
            r"has code of its own \(auto_map in config\.json\)",
        ),
        ({"model_type": "llama9"}, r"has a model_type 'llama9' that transformers .* does not know"),
        (SIZES | {"model_type": "t5"}, r"for which transformers has no class of a causal language model"),
    ],
    ids=lambda value: value["model_type"] if isinstance(value, dict) else "",
)
def test_what_would_be_computed_wrongly_is_named_by_its_layer(config: dict[str, Any], expected: str) -> None:
    problem = packed(config)
    assert problem is not None
    assert "\n" not in problem
    assert __import__("re").search(expected, problem), problem


def test_a_model_that_sees_later_tokens_by_itself_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As an encoder's attention does: packed and alone agree, and both look ahead."""
    from transformers.models.llama.modeling_llama import LlamaModel

    forward = LlamaModel.forward

    def looking_ahead(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = forward(self, *args, **kwargs)
        output.last_hidden_state = output.last_hidden_state + kwargs["input_ids"].float().mean()
        return output

    monkeypatch.setattr(LlamaModel, "forward", looking_ahead)
    assert packed(SIZES | {"model_type": "llama"}) is not None


def test_names_in_files_are_those_that_transformers_knows() -> None:
    names = saved_names(GPT2)
    without_prefix = [name.removeprefix("transformer.") for name in names]
    assert prove_model(GPT2, ["names"], names=names)["names"] is None
    assert prove_model(GPT2, ["names"], names=without_prefix)["names"] is None
    other = [name.replace("ln_f", "last_norm") for name in names]
    problem = prove_model(GPT2, ["names"], names=other)["names"]
    assert problem is not None
    assert problem.startswith("lacks the weight transformer.ln_f.weight")


def test_names_that_no_weight_has_are_refused_and_old_masks_are_not() -> None:
    names = saved_names(GPT2)
    masks = [f"h.{layer}.attn.bias" for layer in range(2)]
    assert prove_model(GPT2, ["names"], names=[*names, *masks])["names"] is None
    problem = prove_model(GPT2, ["names"], names=[*names, "transformer.h.0.attn.q_norm.weight"])["names"]
    assert problem is not None
    assert problem.startswith("holds transformer.h.*.attn.q_norm.weight, for which GPT2LMHeadModel has no weight")


@pytest.mark.parametrize("place", ["_build_model", "_prove_packed"])
@pytest.mark.parametrize("error", [OSError(28, "No space left"), MemoryError(), SafetensorError("No space left")])
def test_a_failure_of_the_machine_is_no_verdict(place: str, error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise error

    monkeypatch.setattr(model_proof._Proof, place, fails)
    with pytest.raises(type(error)):
        packed(GPT2)


OLD = Version(__version__) < Version("5.16")


@pytest.mark.skipif(OLD, reason="this transformers renames none of these weights")
def test_weights_of_another_name_in_memory_are_not_sent_to_servers() -> None:
    found = prove_model(NEOX, ["names", "export"])
    assert found["names"] is None
    assert found["export"] is not None
    assert "lm_head.weight" in found["export"]


@pytest.mark.parametrize("config", [GPT2, NEOX], ids=["gpt2", "gpt_neox"])
def test_files_as_they_are_on_the_hub_are_loaded(config: dict[str, Any], tmp_path: Path, batch: Sequences) -> None:
    torch.manual_seed(0)
    made = AutoConfig.for_model(**config)
    AutoModelForCausalLM.from_config(made).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    weights = {name.removeprefix("transformer."): value for name, value in load_file(file).items()}
    assert weights.keys() & {"wte.weight", "embed_out.weight"}
    save_file(weights, file, metadata={"format": "pt"})

    frozen = FrozenModel(tmp_path, ModelConfig(path=str(tmp_path)), temperature=1.0, device=torch.device("cpu"))
    plain = AutoModelForCausalLM.from_pretrained(tmp_path)
    sizes = batch.lengths_N.tolist()
    expected = []
    for tokens, mask in zip(batch.tokens_T.long().split(sizes), batch.response_mask_T.split(sizes), strict=True):
        with torch.no_grad():
            logits = plain(tokens.unsqueeze(0)).logits[0, :-1]
        drawn = logits.log_softmax(-1).gather(-1, tokens[1:, None]).squeeze(-1)
        expected.append(drawn[mask[1:].bool()])
    torch.testing.assert_close(frozen.log_probs(batch), torch.cat(expected), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["phi", "codegen"])
def test_a_critic_begins_with_a_policy_whose_head_has_a_bias(kind: str) -> None:
    if OLD and kind == "codegen":
        pytest.skip("this transformers' codegen is refused: it has no packed attention")
    sizes = GPT2 | {"rotary_dim": 4, "bos_token_id": 1} if kind == "codegen" else SIZES
    found = prove_model(sizes | {"model_type": kind}, ["critic"])
    assert any(name.startswith("lm_head.bias") for name in saved_names(sizes | {"model_type": kind}))
    assert found == {"critic": None}


def test_a_reward_model_is_proven_by_its_scores() -> None:
    assert prove_model(SIZES | {"model_type": "qwen2"}, SCORES) == {"score": None}
    problem = prove_model(HYBRID | {"model_type": "bloom", "n_head": 4}, SCORES)["score"]
    assert problem is not None
