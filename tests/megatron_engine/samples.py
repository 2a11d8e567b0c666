"""What the ranks train on, and the reference too."""

import torch
from torch import Tensor

NUM_SAMPLES, TEMPERATURE = 8, 0.7
_FIRST, _LAST = 0, 13
"""The padding token, 0, is one of them."""


def make_sample(row: int) -> tuple[Tensor, Tensor]:
    """Return a prompt, which pairs of rows share, and a response."""
    return _tokens(2 + row // 2 % 2, 100 + row // 2), _tokens(1 + row % 5, row)


def _tokens(count: int, seed: int) -> Tensor:
    return torch.randint(_FIRST, _LAST, (count,), generator=torch.Generator().manual_seed(seed))
