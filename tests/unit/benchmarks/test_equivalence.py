"""Streaming a step changes its gradient by rounding only."""

import torch
from ablation_parts.equivalence import max_relative_difference


def test_gradients_agree_whatever_the_order_of_arrival_and_the_micro_batches() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        assert max_relative_difference(num_groups=8, orders=3) <= 1e-6
    finally:
        torch.set_num_threads(before)
