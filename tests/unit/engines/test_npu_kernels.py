"""Ascend's fused kernels in transformers' layers, by operators of the same signatures: results, gradients, families."""

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from tests.support.fake_npu import MovedBytes, fake_torch_npu
from workers.engines.megatron.megatron_model import norm_on
from workers.engines.npu_kernels import fuse_layers, has_fused_adamw

SIZES: dict[str, Any] = {
    "vocab_size": 32, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "initializer_range": 0.2, "pad_token_id": 0,
}  # fmt: skip
MODELS = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES)),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**SIZES, head_dim=8)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=8)),
}
TOKENS = torch.randint(0, 32, (1, 24), generator=torch.Generator().manual_seed(0))


def computed(model: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor], MovedBytes]:
    """Return the loss, the gradients, and what was moved."""
    model.zero_grad()
    with MovedBytes() as moved:
        loss = model(TOKENS).logits.float().log_softmax(-1)[0, :, 3].sum()
        loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}, moved


@pytest.mark.parametrize("family", MODELS)
def test_fused_layers_give_the_gradients_of_transformers(family: str) -> None:
    torch.manual_seed(0)
    plain = MODELS[family]()
    fused = copy.deepcopy(plain)
    expected, gradients, moved = computed(plain)
    with fake_torch_npu():
        norms = 9 if family == "qwen3" else 5
        assert fuse_layers(fused) == norms + 2 * 2, "beside norms, an MLP and an attention per layer"
        found, ours, less = computed(fused)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert ours.keys() == gradients.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(ours[name], gradient, rtol=1e-4, atol=1e-5, msg=name)
    assert less.kernels < moved.kernels and less.total < moved.total
    after, _, again = computed(plain)
    assert after.equal(expected) and again.kernels == moved.kernels, "other models are as they were"


def test_layers_that_compute_something_else_stay_as_they_are() -> None:
    gemma = Gemma2ForCausalLM(Gemma2Config(**SIZES, head_dim=8))
    assert fuse_layers(gemma) == 0
    gelu = LlamaForCausalLM(LlamaConfig(**SIZES, hidden_act="gelu"))
    before = [module.forward for module in gelu.modules() if type(module).__name__ == "LlamaMLP"]
    with fake_torch_npu():
        fuse_layers(gelu)
    assert [module.forward for module in gelu.modules() if type(module).__name__ == "LlamaMLP"] == before


def test_adamw_is_fused_where_there_is_a_kernel() -> None:
    assert has_fused_adamw(torch.device("cpu"))
    assert has_fused_adamw(torch.device("cuda"))
    assert not has_fused_adamw(torch.device("meta"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_megatrons_norms_use_the_kernel_on_an_npu_alone(dtype: torch.dtype) -> None:
    config = SimpleNamespace(sequence_parallel=True)
    plain, fused = (norm_on(kind)(config, 32, eps=1e-5).to(dtype) for kind in ("cuda", "npu"))
    hidden = torch.randn(6, 1, 32, generator=torch.Generator().manual_seed(0)).to(dtype)
    scale = torch.rand(32, generator=torch.Generator().manual_seed(1)).to(dtype)
    found = []
    with fake_torch_npu():
        for norm in (plain, fused):
            weight: Any = norm.weight
            weight.data.copy_(scale)
            given = hidden.clone().requires_grad_()
            norm(given).square().sum().backward()
            assert given.grad is not None and weight.grad is not None and weight.sequence_parallel
            found.append((norm(given).detach(), given.grad, weight.grad))
    near = 1e-4 if dtype is torch.float32 else 3e-2
    for expected, ours in zip(*found, strict=True):
        torch.testing.assert_close(ours, expected, rtol=near, atol=near)
    plain(hidden)
    with pytest.raises(ModuleNotFoundError, match="torch_npu"):
        fused(hidden)
