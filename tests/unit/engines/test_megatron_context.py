"""How a micro-batch's tokens are divided over ranks; the exchange around the attention is tested with the engine."""

import pytest
import torch

from workers.engines.megatron.megatron_context import TokenShare
from workers.engines.packed_forward import ALONE, PackedInputs
from workers.rows.packed_rows import Sequences

CPU = torch.device("cpu")
PROMPT = torch.tensor([3, 4, 5, 6, 7, 8])
BATCH = Sequences.from_turns(
    [PROMPT, PROMPT, torch.tensor([9])], [torch.tensor(response) for response in ([1, 2], [2], [4, 5, 6])]
)
INPUTS = PackedInputs.from_batch(BATCH, CPU, shared_prompt=True)
NUM_TOKENS = INPUTS.tokens_T.numel()


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7, 20])
def test_shares_of_all_ranks_are_the_batch(size: int) -> None:
    shares = [TokenShare.from_inputs(INPUTS, rank, size, CPU) for rank in range(size)]
    assert len({share.tokens_t.numel() for share in shares}) == 1
    assert torch.cat([share.tokens_t for share in shares])[:NUM_TOKENS].equal(INPUTS.tokens_T)
    assert torch.cat([share.positions_t for share in shares])[:NUM_TOKENS].equal(INPUTS.positions_T)
    [layout] = {share.layout for share in shares}
    assert sum(layout.lengths) == sum(share.tokens_t.numel() for share in shares)
    assert layout.lengths[: len(INPUTS.layout.lengths)] == INPUTS.layout.lengths
    assert set(layout.prompts[len(INPUTS.layout.prompts) :]) <= {ALONE}


@pytest.mark.parametrize("size", [1, 2, 3, 7, 20])
def test_every_response_token_is_predicted_by_one_rank_at_its_place(size: int) -> None:
    """Ranks without any compute one that does not count: no kernel sees an empty tensor."""
    values_A = torch.arange(1.0, INPUTS.targets_A.numel() + 1)
    total_A, gradients_A = torch.zeros_like(values_A), torch.zeros_like(values_A)
    for rank in range(size):
        share = TokenShare.from_inputs(INPUTS, rank, size, CPU)
        assert 0 < share.predictors_a.numel() == share.targets_a.numel() == share.select_own(values_A).numel()
        assert share.num_drawn == values_A.numel()
        fed = share.tokens_t[share.predictors_a[: share.drawn_a.numel()]]
        assert fed.equal(INPUTS.tokens_T[INPUTS.predictors_A[share.drawn_a]])
        assert share.targets_a[: share.drawn_a.numel()].equal(INPUTS.targets_A[share.drawn_a])
        own_a = share.select_own(values_A)
        total_A += share.spread_values(torch.where(own_a > 0, own_a, 99))
        gradients_A += share.spread_values(own_a)
        if not share.drawn_a.numel():
            assert own_a.tolist() == [0], "its gradient is nothing"
    assert total_A.equal(values_A) and gradients_A.equal(values_A)


@pytest.mark.parametrize("size", [1, 2])
def test_samples_whose_responses_are_empty_have_a_share(size: int) -> None:
    inputs = PackedInputs.from_batch(Sequences.from_turns([PROMPT], [PROMPT[:0]]), CPU)
    for rank in range(size):
        share = TokenShare.from_inputs(inputs, rank, size, CPU)
        assert share.num_drawn == 0
        assert share.targets_a.tolist() == share.select_own(inputs.targets_A).tolist() == [0]
        assert share.spread_values(torch.ones(1)).numel() == 0
