"""Samples, losses and settings that every engine gets. Used on both sides.

Legend of shapes: A response tokens of a batch.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from workers.rows.packed_rows import Sequences
from workers.settings.engines import ActorConfig

TEMPERATURE, SCALE, UPDATES = 0.8, 1 / 16, 3
# With the usual tiny eps AdamW would hide a wrong factor on the gradients, and amplify rounding errors.
ACTOR = ActorConfig(lr=1e-2, eps=0.05, weight_decay=0.1, grad_clip=4.0, lr_warmup_steps=2)


def samples() -> list[tuple[Tensor, Tensor]]:
    """Return eight samples (prompt, response): two prompts with three responses, two with one; one response is
    empty.
    """
    chance = torch.Generator().manual_seed(6)
    first, second, third, fourth = (torch.randint(2, 13, (n,), generator=chance) for n in (5, 3, 1, 4))
    # The models' padding token: nothing is padded here, so it must work like any other token.
    first[1] = 0
    prompts = [first, second, first, third, second, first, fourth, second]
    return [
        (prompt, torch.randint(2, 13, (length,), generator=chance))
        for prompt, length in zip(prompts, (3, 4, 1, 6, 0, 5, 2, 4), strict=True)
    ]


def sequences(rows: Sequence[int]) -> Sequences | None:
    if not rows:
        return None
    chosen = [samples()[row] for row in rows]
    return Sequences.from_turns([prompt for prompt, _ in chosen], [response for _, response in chosen])


def loss(log_probs_A: Tensor, _entropy: Tensor) -> Tensor:
    """Nonlinear, so that each token's gradient depends on its own value."""
    return (log_probs_A + 1).square().sum()


def micro_batches(update: int, replica: int, num_replicas: int) -> list[list[int]]:
    """Return the rows of one replica's micro-batches. In the second update the first replica has them all."""
    if update == 2:
        return [[0, 1, 2, 3], [4, 5, 6, 7]] if replica == 0 else [[], []]
    return [list(range(replica, 8, num_replicas))]
