"""All kernels compute the same attention, forwards and backwards.

Those of accelerators run with fakes that compute what the vendors document, and have their signatures (that of Ascend
as `tests/vendor` records it).
"""

import inspect
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import varlen
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from workers.engines.packed_attention import (
    Kernel,
    cpu_attention,
    kernel_of,
    npu_attention,
    sdpa_attention,
    varlen_attention,
)
from workers.engines.packed_forward import PackedLayout

LAYOUTS = {
    "alone": PackedLayout((2, 3, 3, 3, 7), (-1,) * 5),
    "one": PackedLayout((1,), (-1,)),
    "shared": PackedLayout((3, 5, 6, 1, 3, 2, 2, 4), (-1, -1, -1, 0, 0, 1, 1, 1)),
    "long": PackedLayout((300, 40, 40), (-1, 0, 0)),
}
HEADS, KV_HEADS, SIZE = 6, 2, 8


def masked_attention(query: Tensor, key: Tensor, value: Tensor, layout: PackedLayout, scale: float) -> Tensor:
    """The definition: one dense mask."""
    document = torch.repeat_interleave(torch.arange(len(layout.lengths)), torch.tensor(layout.lengths))
    prompt = torch.tensor(layout.prompts)[document]
    position = torch.arange(len(document))
    own = (document[:, None] == document[None, :]) & (position[:, None] >= position[None, :])
    mask = own | (prompt[:, None] == document[None, :])
    out = scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale, enable_gqa=True)
    return out.transpose(0, 1)


def lower_right(
    query: Tensor, key: Tensor, value: Tensor, ends: Sequence[int], key_ends: Sequence[int], scale: float
) -> Tensor:
    """What both vendors document: document after document [T, H, D], causal from the last query and key backwards."""
    outputs, start, key_start = [], 0, 0
    for end, key_end in zip(ends, key_ends, strict=True):
        q_HLD, k_HMD, v_HMD = (
            query[start:end].transpose(0, 1),
            key[key_start:key_end].transpose(0, 1),
            value[key_start:key_end].transpose(0, 1),
        )
        mask = torch.ones(end - start, key_end - key_start, dtype=torch.bool).tril(key_end - key_start - end + start)
        out = scaled_dot_product_attention(q_HLD, k_HMD, v_HMD, attn_mask=mask, scale=scale, enable_gqa=True)
        outputs.append(out.transpose(0, 1))
        start, key_start = end, key_end
    return torch.cat(outputs)


def inputs(layout: PackedLayout, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """As a model gives them: [1, T, H, D], seen as [H, T, D]."""
    generator = torch.Generator().manual_seed(5)
    tokens = sum(layout.lengths)
    shapes = [(1, tokens, heads, SIZE) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    made = [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]
    return [each.transpose(1, 2)[0].requires_grad_() for each in made]


def results(kernel: Kernel, layout: PackedLayout, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """The output and the gradients."""
    query, key, value = inputs(layout, dtype)
    out = kernel(query, key, value, layout, 0.3)
    assert out.shape == (sum(layout.lengths), HEADS, SIZE)
    weights = torch.linspace(-1, 1, out.numel(), dtype=dtype).view_as(out)
    return [out.detach(), *torch.autograd.grad((out * weights).sum(), [query, key, value])]


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("kernel", [cpu_attention, sdpa_attention])
def test_kernel_equals_a_dense_mask(name: str, kernel: Kernel) -> None:
    layout = LAYOUTS[name]
    for actual, expected in zip(results(kernel, layout), results(masked_attention, layout), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", LAYOUTS)
def test_bfloat16_on_the_cpu_rounds_as_sdpa_does(name: str) -> None:
    layout = LAYOUTS[name]
    exact = results(masked_attention, layout)
    for actual, expected in zip(results(cpu_attention, layout, torch.bfloat16), exact, strict=True):
        assert actual.dtype == torch.bfloat16
        largest = max(float(expected.abs().max()), 1e-12)  # a token that sees itself alone has no gradients but noise
        torch.testing.assert_close(actual.double(), expected, rtol=0.02, atol=0.02 * largest)


VARLEN = "query key value cu_seq_q cu_seq_k max_q max_k"
# The signatures of `varlen_attn`, from the wheels; torch 2.12 is like 2.13.
SIGNATURES = {
    "2.10": f"{VARLEN} is_causal return_aux",
    "2.11": f"{VARLEN} return_aux scale window_size",
    "installed": " ".join(inspect.signature(varlen.varlen_attn).parameters),
}


@pytest.fixture(params=SIGNATURES)
def fake_varlen(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    either = inspect.Parameter.POSITIONAL_OR_KEYWORD
    names = SIGNATURES[request.param].split()
    signature = inspect.Signature([inspect.Parameter(name, either, default=None) for name in names])

    def fake(*args: object, **named: object) -> Tensor:
        bound = signature.bind(*args, **named)
        bound.apply_defaults()
        query, key, value, cu_seq_q, cu_seq_k, max_q, max_k = (bound.arguments[name] for name in VARLEN.split())
        assert bound.arguments.get("is_causal", bound.arguments.get("window_size") == (-1, 0))
        assert bound.arguments.get("enable_gqa", True)
        assert max_q == int(cu_seq_q.diff().max()) and max_k == int(cu_seq_k.diff().max())
        assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32
        scale = bound.arguments.get("scale", query.shape[-1] ** -0.5)
        return lower_right(query, key, value, cu_seq_q[1:].tolist(), cu_seq_k[1:].tolist(), scale)

    fake.__signature__ = signature  # type: ignore[attr-defined]
    monkeypatch.setattr(varlen, "varlen_attn", fake)


@pytest.fixture
def fake_npu(monkeypatch: pytest.MonkeyPatch) -> None:
    record = json.loads((Path(__file__).parents[2] / "vendor" / "torch_npu.json").read_text())
    parameters = record["names"]["torch_npu.npu_fusion_attention"]["parameters"]

    def npu_fusion_attention(*arguments: Any, **named: Any) -> tuple[Tensor, ...]:
        assert named.keys() <= set(parameters[len(arguments) :])
        given = dict(zip(parameters, arguments, strict=False)) | named
        assert (given["input_layout"], given["head_num"], given["sparse_mode"]) == ("TND", HEADS, 3)
        assert given["atten_mask"].equal(torch.ones(2048, 2048, dtype=torch.bool).triu(1))
        lengths = given["actual_seq_qlen"], given["actual_seq_kvlen"]
        return (lower_right(given["query"], given["key"], given["value"], *lengths, given["scale"]),)

    monkeypatch.setitem(sys.modules, "torch_npu", SimpleNamespace(npu_fusion_attention=npu_fusion_attention))


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.usefixtures("fake_varlen")
def test_cuda_call_says_what_each_document_sees(name: str) -> None:
    layout = LAYOUTS[name]
    for actual, expected in zip(results(varlen_attention, layout), results(masked_attention, layout), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.usefixtures("fake_npu")
def test_npu_call_says_what_each_document_sees(name: str) -> None:
    layout = LAYOUTS[name]
    for actual, expected in zip(results(npu_attention, layout), results(masked_attention, layout), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-12)


def test_fake_kernels_align_their_mask_as_torch_says() -> None:
    query, key, value = (torch.randn(n, 2, SIZE, dtype=torch.float64) for n in (2, 5, 5))
    expected = scaled_dot_product_attention(
        query.transpose(0, 1), key.transpose(0, 1), value.transpose(0, 1), causal_lower_right(2, 5)._materialize("cpu")
    )
    actual = lower_right(query, key, value, [2], [5], SIZE**-0.5)
    torch.testing.assert_close(actual, expected.transpose(0, 1))


@pytest.mark.parametrize(
    ("device", "dtype", "kernel"),
    [
        ("cpu", torch.float32, cpu_attention),
        ("cpu", torch.bfloat16, cpu_attention),
        ("cuda", torch.bfloat16, varlen_attention),
        ("cuda", torch.float32, sdpa_attention),
        ("npu", torch.float16, npu_attention),
        ("mps", torch.float16, sdpa_attention),
    ],
)
def test_kernel_is_chosen_by_device(device: str, dtype: torch.dtype, kernel: Kernel) -> None:
    query: object = SimpleNamespace(device=SimpleNamespace(type=device), dtype=dtype)
    choose: Callable[[object], Kernel] = kernel_of  # type: ignore[assignment]
    assert choose(query) is kernel
