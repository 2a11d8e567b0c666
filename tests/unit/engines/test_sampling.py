"""Inverse-CDF sampling."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from workers.engines.hf.engine import draw_from_kept, draw_tokens
from workers.settings.rollout import SamplingConfig


def config(**changes: float) -> SamplingConfig:
    return SamplingConfig.model_validate({"max_response_tokens": 1} | changes)


def test_frequencies_follow_the_tempered_distribution() -> None:
    logits = torch.tensor([0.0, 1.0, -1.0, 2.0])
    uniform = (torch.arange(20_000) + 0.5) / 20_000
    tokens, log_probs = draw_tokens(logits.expand(20_000, 4), uniform, config(temperature=0.5))
    expected = (logits / 0.5).softmax(-1)
    torch.testing.assert_close(tokens.bincount(minlength=4) / 20_000, expected, rtol=0, atol=2e-4)
    torch.testing.assert_close(log_probs.exp(), expected[tokens])


def test_filters_keep_the_likeliest_tokens_and_unfiltered_log_probs() -> None:
    logits = torch.tensor([0.1, 0.4, 0.2, 0.3]).log()
    uniform = (torch.arange(1000) + 0.5) / 1000
    for changes, kept in (({"top_k": 2}, {1, 3}), ({"top_p": 0.65}, {1, 3}), ({"top_p": 0.75}, {1, 2, 3})):
        tokens, log_probs = draw_tokens(logits.expand(1000, 4), uniform, config(**changes))
        assert set(tokens.tolist()) == kept
        torch.testing.assert_close(log_probs, logits[tokens])


def test_temperature_0_takes_the_likeliest_token_whatever_is_drawn() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0], [2.0, 1.9, -1.0]]).repeat(50, 1)
    for changes in ({}, {"top_k": 2}, {"top_p": 0.1}):
        tokens, log_probs = draw_tokens(logits, torch.rand(100), config(temperature=0.0, **changes))
        assert tokens.tolist() == [1, 0] * 50
        torch.testing.assert_close(log_probs, logits.log_softmax(-1).max(-1).values)


def test_tiny_top_p_is_greedy() -> None:
    tokens, _ = draw_tokens(
        torch.tensor([[0.0, 3.0, 1.0]]).expand(9, 3), torch.linspace(0, 0.99, 9), config(top_p=1e-6)
    )
    assert tokens.tolist() == [1] * 9


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.floats(-50, 50, width=32), min_size=2, max_size=20),
    st.sampled_from([0.0, 2**-24, 0.5, 1 - 2**-23, 1 - 2**-24]),
    st.integers(0, 5),
    st.sampled_from([0.1, 0.9, 1.0]),
)
def test_token_of_probability_zero_is_never_drawn(
    logits: list[float], uniform: float, top_k: int, top_p: float
) -> None:
    row = torch.tensor([[*logits, float("-inf")]])
    token, log_prob = draw_tokens(row, torch.tensor([uniform]), config(top_k=top_k, top_p=top_p))
    assert 0 <= int(token) < len(logits) and bool(log_prob.isfinite())


@pytest.mark.parametrize("changes", [{}, {"top_k": 2}, {"top_p": 0.5}, {"temperature": 0.0}])
def test_row_without_probabilities_gets_a_token_and_says_so(changes: dict[str, float]) -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0], [0.0, torch.nan, 2.0], [0.0, torch.inf, 2.0]])
    tokens, log_probs = draw_tokens(logits, torch.full((3,), 0.7), config(**changes))
    assert tokens.lt(3).all()
    assert log_probs.isfinite().tolist() == [True, False, False]


@pytest.mark.parametrize("changes", [{}, {"top_k": 2}, {"top_p": 0.7}, {"top_k": 3, "top_p": 0.9}])
def test_no_prefix_sum_is_of_floats(changes: dict[str, float], monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA refuses it where kernels must be deterministic, and its parallel sum may rise at a weight of zero."""
    cumsum = torch.Tensor.cumsum

    def as_on_cuda(self: torch.Tensor, dim: int) -> torch.Tensor:
        assert not self.is_floating_point(), "cumsum_cuda_kernel does not have a deterministic implementation"
        return cumsum(self, dim)

    monkeypatch.setattr(torch.Tensor, "cumsum", as_on_cuda)
    draw_tokens(torch.randn(8, 5), torch.linspace(0, 0.99, 8), config(**changes))


@pytest.mark.parametrize("changes", [{"top_k": 2}, {"top_p": 0.7}, {"top_k": 3, "top_p": 0.6}, {"temperature": 0.5}])
def test_kept_tokens_are_those_that_can_be_drawn(changes: dict[str, float]) -> None:
    """The draws are the same; the log-probabilities are of what is left, and add up to 1."""
    given = config(**({"top_k": 4} | changes))
    logits = torch.randn(5, 11, generator=torch.Generator().manual_seed(0))
    uniform = (torch.arange(5000) + 0.5) / 5000
    for row in logits:
        tokens, log_probs, kept = draw_from_kept(row.expand(5000, 11), uniform, given)
        expected, whole = draw_tokens(row.expand(5000, 11), uniform, given)
        assert tokens.equal(expected)
        assert all(ids.equal(kept[0]) and ids.dtype == torch.int32 for ids in kept)
        assert set(kept[0].tolist()) == set(tokens.tolist())
        mass = (row / given.temperature).softmax(-1)[kept[0].long()].sum()
        torch.testing.assert_close(log_probs, whole - mass.log())
        torch.testing.assert_close(tokens.bincount(minlength=11)[tokens] / 5000, log_probs.exp(), rtol=0, atol=1e-3)
