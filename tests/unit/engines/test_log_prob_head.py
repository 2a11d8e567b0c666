"""Log-probabilities through the head in tiles are those of whole logits; so are the gradients."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, GraniteConfig, GraniteForCausalLM, LlamaConfig

from asyncflow.vendors import Vendor
from workers.engines import packed_forward as log_prob_head
from workers.engines.packed_attention import PACKED_ATTENTION
from workers.engines.packed_forward import (
    HeadRequest,
    OtherTokens,
    PackedInputs,
    head_log_probs,
    head_results,
    head_top_log_probs,
    note_gradients,
    response_log_probs,
    response_results,
    response_top_log_probs,
    use_float32_logits,
)
from workers.rows.packed_rows import Sequences, TokenSets

A, D, V = 21, 16, 150
TEMPERATURE = 0.7


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Five tiles of 32 rows; the last one has fewer."""
    monkeypatch.setattr(log_prob_head, "TILE", A * 40)
    monkeypatch.setattr(log_prob_head, "_ALIGNED", 32)


@pytest.fixture(autouse=True)
def strictly_deterministic() -> Iterator[None]:
    """It also fills memory that nothing has written with NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def inputs(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Hidden states, weight, bias (leaves with gradient) and targets; some tokens are all but certain."""
    generator = torch.Generator().manual_seed(0)
    hidden = 2 * torch.randn(A, D, generator=generator)
    weight, bias = torch.randn(V, D, generator=generator), torch.randn(V, generator=generator)
    targets = torch.randint(V, (A,), generator=generator)
    targets[:3] = torch.tensor([0, V - 1, 32])  # of the first, the last, and the first row of a tile
    leaves = [tensor.to(dtype).requires_grad_() for tensor in (hidden, weight, bias)]
    return leaves[0], leaves[1], leaves[2], targets


def whole(hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor) -> tuple[Tensor, Tensor]:
    log_probs = (torch.nn.functional.linear(hidden, weight, bias) / TEMPERATURE).log_softmax(-1)
    return log_probs.gather(-1, targets[:, None])[:, 0], -(log_probs.exp() * log_probs).sum(-1)


def backward(log_probs: Tensor, entropy: Tensor | None = None) -> None:
    total = (log_probs * torch.linspace(-1, 1, A, dtype=log_probs.dtype)).sum()
    if entropy is not None:
        total = total + (entropy * torch.linspace(2, -1, A, dtype=log_probs.dtype)).sum()
    total.backward()  # type: ignore[no-untyped-call]


@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float64, 1e-11), (torch.float32, 1e-5), (torch.bfloat16, 0.05)])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("with_entropy", [False, True])
def test_results_and_gradients_are_those_of_whole_logits(
    dtype: torch.dtype, rtol: float, has_bias: bool, with_entropy: bool
) -> None:
    *leaves, targets = inputs(dtype)
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    bias, exact_bias = (leaves[2], exact[2]) if has_bias else (None, None)
    expected = whole(exact[0], exact[1], exact_bias, targets)
    found = head_log_probs(leaves[0], leaves[1], bias, HeadRequest(targets, TEMPERATURE, entropy=True))
    backward(*expected[: 1 + with_entropy])
    backward(*found[: 1 + with_entropy])
    assert found[0].dtype == found[1].dtype == torch.promote_types(dtype, torch.float32)
    for ours, theirs in zip(found, expected, strict=True):
        assert float((ours - theirs).detach().norm() / theirs.detach().norm()) < rtol
    for leaf, other in zip(leaves[: 2 + has_bias], exact, strict=False):
        assert leaf.grad is not None and other.grad is not None and leaf.grad.dtype == dtype
        assert float((leaf.grad - other.grad).norm() / other.grad.norm()) < rtol


def test_entropy_alone_has_a_gradient_and_what_is_not_wanted_has_none() -> None:
    hidden, weight, _, targets = inputs(torch.float64)
    other, same = (leaf.detach().clone().requires_grad_() for leaf in (hidden, weight))
    whole(other, same, None, targets)[1].sum().backward()  # type: ignore[no-untyped-call]
    head_log_probs(hidden, weight, None, HeadRequest(targets, TEMPERATURE, entropy=True))[1].sum().backward()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(hidden.grad, other.grad)
    torch.testing.assert_close(weight.grad, same.grad)
    assert not head_log_probs(hidden, weight, None, HeadRequest(targets, TEMPERATURE, entropy=False))[1].requires_grad


@pytest.mark.parametrize("with_entropy", [False, True])
def test_a_joined_result_has_the_entropys_gradient_where_a_loss_uses_it(with_entropy: bool) -> None:
    """A loss without it does not pay for it: its gradient would be one of zeros."""
    hidden, weight, _, targets = inputs(torch.float64)
    other = hidden.detach().clone().requires_grad_()
    request = HeadRequest(targets, TEMPERATURE, entropy=True)
    found = torch.stack(head_log_probs(hidden, weight, None, request), dim=-1).unbind(-1)
    note_gradients(request, found[1])
    backward(*found[: 1 + with_entropy])
    assert request.trains_entropy is with_entropy
    backward(*whole(other, weight.detach(), None, targets)[: 1 + with_entropy])
    torch.testing.assert_close(hidden.grad, other.grad)


@pytest.mark.parametrize("with_others", [False, True])
def test_a_joined_result_has_the_gradient_of_other_tokens_where_a_loss_uses_it(with_others: bool) -> None:
    hidden, weight, _, targets = inputs(torch.float64)
    other = hidden.detach().clone().requires_grad_()
    device, requests = torch.device("cpu"), []
    for leaf in (hidden, other):
        requests.append(HeadRequest(targets, TEMPERATURE, entropy=False, others=OtherTokens.of(token_sets(), device)))
        log_probs, entropy, others = head_results(leaf, weight.detach(), None, requests[-1])
        if leaf is hidden:  # as one tensor, from which the parts are cut
            joined = torch.cat([log_probs, others])
            log_probs, others = joined[: len(log_probs)], joined[len(log_probs) :]
            note_gradients(requests[-1], entropy, others)
        (log_probs.sum() + (others.square().sum() if with_others else 0.0)).backward()
    assert requests[0].trains_others is with_others
    torch.testing.assert_close(hidden.grad, other.grad)


def test_results_do_not_depend_on_gradients_and_entropy() -> None:
    """The ratio of the policy to its copy is 1 to the last bit."""
    hidden, weight, bias, targets = inputs(torch.float32)
    trained, _ = head_log_probs(hidden, weight, bias, HeadRequest(targets, TEMPERATURE, entropy=True))
    with torch.no_grad():
        plain, none = head_log_probs(hidden, weight, bias, HeadRequest(targets, TEMPERATURE, entropy=False))
    assert plain.equal(trained) and not plain.requires_grad
    assert none.tolist() == [0.0] * A


class Largest(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the size of the largest tensor that an operation returns, and the products that are computed."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.size, self.products = 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if isinstance(found, Tensor):
            self.size = max(self.size, found.untyped_storage().nbytes() // found.element_size())
        self.products += func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.addmm_)
        return found


def test_no_tensor_is_larger_than_a_tile_or_the_gradient() -> None:
    hidden, weight, _, targets = inputs(torch.float32)
    with Largest() as seen:
        log_probs, _ = head_log_probs(hidden, weight, None, HeadRequest(targets, TEMPERATURE, entropy=True))
        assert seen.products == 5
        backward(log_probs)
    assert seen.size == V * D < A * V
    assert seen.products == 5 + 3 * 5  # logits again, and both gradients


def token_sets() -> TokenSets:
    """Ragged sets, one empty and one of the whole vocabulary; a drawn token may be in its own set."""
    generator = torch.Generator().manual_seed(1)
    counts = torch.randint(1, 9, (A,), generator=generator)
    counts[4], counts[5] = 0, V
    sets = [torch.randperm(V, generator=generator)[:count] for count in counts.tolist()]
    return TokenSets(torch.cat(sets).int(), counts.int())


@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float64, 1e-11), (torch.float32, 1e-5), (torch.bfloat16, 0.05)])
@pytest.mark.parametrize("with_all", [False, True])
def test_other_tokens_and_their_gradients_are_those_of_whole_logits(
    dtype: torch.dtype, rtol: float, with_all: bool
) -> None:
    hidden, weight, bias, targets = inputs(dtype)
    exact = [leaf.detach().double().requires_grad_() for leaf in (hidden, weight, bias)]
    sets = token_sets()
    logits = torch.nn.functional.linear(*exact) / TEMPERATURE
    place = torch.arange(A).repeat_interleave(sets.counts_A)
    theirs = logits.log_softmax(-1)[place, sets.ids_P]
    request = HeadRequest(targets, TEMPERATURE, entropy=True, others=OtherTokens.of(sets, torch.device("cpu")))
    *both, ours = head_results(hidden, weight, bias, request)
    assert float((ours - theirs).detach().norm() / theirs.detach().norm()) < rtol
    factor = torch.linspace(-1, 2, len(place), dtype=torch.float64)
    expected = whole(*exact, targets)
    total = (theirs * factor).sum() + with_all * ((expected[0] * 0.3).sum() - (expected[1] * 0.7).sum())
    found = (ours * factor).sum() + with_all * ((both[0] * 0.3).sum() - (both[1] * 0.7).sum())
    total.backward()
    found.backward()
    for leaf, other in zip((hidden, weight, bias), exact, strict=True):
        assert leaf.grad is not None and other.grad is not None
        assert float((leaf.grad - other.grad).norm() / other.grad.norm()) < rtol
    plain = head_log_probs(hidden, weight, bias, HeadRequest(targets, TEMPERATURE, entropy=True))
    assert all(one.equal(other) for one, other in zip(both, plain, strict=True)), "other tokens changed the drawn ones'"


@pytest.mark.parametrize("k", [1, 7, V, V + 5])
@pytest.mark.parametrize("known", [V, V - 9])
def test_most_likely_tokens_are_those_of_whole_logits(k: int, known: int) -> None:
    """Also if the embeddings are padded: to more tokens than are `known` where the numbers are used."""
    hidden, weight, bias, _ = inputs(torch.float64)
    whole = (torch.nn.functional.linear(hidden, weight, bias) / TEMPERATURE).log_softmax(-1)
    expected = whole[:, :known].topk(min(k, known))
    ids, log_probs = head_top_log_probs(hidden, weight, bias, temperature=TEMPERATURE, k=k, num_tokens=known)
    torch.testing.assert_close((ids, log_probs), (expected.indices, expected.values.detach()))


def test_no_tensor_of_other_or_most_likely_tokens_is_larger_than_a_tile() -> None:
    hidden, weight, _, targets = inputs(torch.float32)
    sets = TokenSets(torch.arange(4).repeat(A).int(), torch.full((A,), 4, dtype=torch.int32))
    with Largest() as seen:
        request = HeadRequest(targets, TEMPERATURE, entropy=False, others=OtherTokens.of(sets, torch.device("cpu")))
        head_results(hidden, weight, None, request)[2].sum().backward()  # type: ignore[no-untyped-call]
        head_top_log_probs(hidden, weight, None, temperature=TEMPERATURE, k=4, num_tokens=V)
    assert seen.size == V * D < A * V


class Float32Products(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Products that return their float32 sums: PyTorch has them on CUDA alone."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.mm.dtype, torch.ops.aten.mm.dtype_out):
            found = args[0].to(args[2]) @ args[1].to(args[2])
        elif func is torch.ops.aten.addmm.dtype_out:
            found = args[0] + args[1].to(args[3]) @ args[2].to(args[3])
        else:
            return func(*args, **(kwargs or {}))
        return kwargs["out"].copy_(found) if kwargs else found


@pytest.fixture
def unrounded(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(log_prob_head, "vendor_of", lambda _: Vendor("cpu", "gloo", has_float32_products=True))
    with Float32Products():
        yield


@pytest.mark.usefixtures("unrounded")
def test_half_precision_logits_are_not_rounded_where_the_device_can_return_their_sums() -> None:
    hidden, weight, _, targets = inputs(torch.bfloat16)
    others = [tensor.detach().float().requires_grad_() for tensor in (hidden, weight)]
    found = head_log_probs(hidden, weight, None, HeadRequest(targets, TEMPERATURE, entropy=True))
    expected = whole(*others, None, targets)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)  # 0.05 if they were rounded
    backward(*found)
    backward(*expected)
    for leaf, other in zip((hidden, weight), others, strict=True):
        torch.testing.assert_close(leaf.grad, other.grad, rtol=2e-2, atol=2e-2, check_dtype=False)


@pytest.mark.usefixtures("unrounded")
def test_engine_draws_from_logits_that_are_not_rounded() -> None:
    config = LlamaConfig(vocab_size=V, hidden_size=D, num_attention_heads=2, num_hidden_layers=1, intermediate_size=D)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    hidden = torch.randn(1, 3, D).bfloat16()
    use_float32_logits(model)
    logits = model.get_output_embeddings()(hidden)
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, hidden.float() @ model.lm_head.weight.float().T)


def test_gradient_of_a_megatron_weight_is_added_to_main_grad() -> None:
    hidden, weight, _, targets = inputs(torch.bfloat16)
    other = weight.detach().clone().requires_grad_()
    main_grad: Any = torch.ones(V, D)
    weight.main_grad = main_grad  # type: ignore[attr-defined]
    for each in (weight, other):
        backward(head_log_probs(hidden, each, None, HeadRequest(targets, TEMPERATURE, entropy=False))[0])
    assert weight.grad is None and other.grad is not None
    torch.testing.assert_close(main_grad - 1, other.grad.float(), rtol=1e-2, atol=1e-3)


def test_ranks_with_parts_of_the_vocabulary_compute_what_one_does() -> None:
    """The third of three ranks has padding only, the second one some."""
    hidden, weight, _, targets = inputs(torch.float64)
    expected = head_log_probs(hidden, weight, None, HeadRequest(targets, TEMPERATURE, entropy=True))
    backward(*expected)
    share, store = 80, dist.HashStore()

    def rank(number: int) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        group: Any = dist.ProcessGroupGloo(store, number, 3, timedelta(seconds=60))
        own_hidden = hidden.detach().clone().requires_grad_()
        rows = torch.full((share, D), torch.nan, dtype=torch.float64)
        held = weight.detach()[number * share : (number + 1) * share]
        rows[: len(held)] = held
        rows.requires_grad_()
        first = number * share
        request = HeadRequest(targets, TEMPERATURE, entropy=True, first=first, num_rows=len(held), group=group)
        log_probs, entropy = head_log_probs(own_hidden, rows, None, request)
        backward(log_probs, entropy)
        return log_probs, entropy, own_hidden.grad, rows.grad

    with ThreadPoolExecutor(3) as pool:
        ranks = list(pool.map(rank, range(3), timeout=60))
    assert hidden.grad is not None and weight.grad is not None
    for log_probs, entropy, hidden_grad, _ in ranks:
        torch.testing.assert_close((log_probs, entropy), expected)
        torch.testing.assert_close(hidden_grad, hidden.grad)
    gradients = torch.cat([found for *_, found in ranks if found is not None])
    torch.testing.assert_close(gradients[:V], weight.grad)
    assert not gradients[V:].any()


def test_a_model_that_changes_its_logits_is_computed_as_a_whole(tmp_path: Path, batch: Sequences) -> None:
    """Granite divides them; what the head returned in their place would be divided, too."""
    torch.manual_seed(0)
    config = GraniteConfig(
        vocab_size=13, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, logits_scaling=4.0, initializer_range=0.3,
    )  # fmt: skip
    GraniteForCausalLM(config).save_pretrained(tmp_path)
    packed = PackedInputs.from_batch(batch, torch.device("cpu"))
    model = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation=PACKED_ATTENTION)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    sizes, expected = batch.lengths_N.tolist(), []
    with torch.no_grad():
        parts = (torch.split(tensor, sizes) for tensor in (batch.tokens_T, batch.response_mask_T))
        for tokens, mask in zip(*parts, strict=True):
            log_probs = plain(tokens[None]).logits[0, :-1].log_softmax(-1)
            expected.append(log_probs.gather(-1, tokens[1:, None])[:, 0][mask[1:].bool()])
    drawn = batch.num_drawn
    every = TokenSets(torch.arange(13).repeat(drawn).int(), torch.full((drawn,), 13, dtype=torch.int32))
    packed = replace(packed, others=OtherTokens.of(every, torch.device("cpu")))
    for ask in range(2):  # asked, and known
        log_prob_head._whole_logits.clear()
        found, _ = response_log_probs(model, packed, 1.0)
        torch.testing.assert_close(found.detach(), torch.cat(expected), rtol=1e-5, atol=1e-5)
        if not ask:
            log_prob_head._whole_logits.clear()
        others = response_results(model, packed, 1.0).others_P.view(drawn, 13)
        torch.testing.assert_close(others.gather(1, packed.targets_A[:, None])[:, 0], found)
        ids, best = response_top_log_probs(model, packed, 1.0, 3, 13)
        torch.testing.assert_close(best, others.topk(3).values.detach())
        torch.testing.assert_close(others.gather(1, ids.long()).detach(), best)
