"""From queue columns to the engines' packed sequences. Called by the actor and the reference; never pads or sorts."""

import torch

from tq.batch import PackedBatch
from workers.engines.base import Sequences


def sequences_of(batch: PackedBatch) -> Sequences:
    """Join `prompts` and `responses` of each row: prompt then answer, one row after another, no padding.

    Args:
        batch: columns `prompts` and `responses`, int64, N >= 1 rows.
    """
    prompts, responses = batch["prompts"], batch["responses"]
    pieces = [piece for pair in zip(prompts.rows(), responses.rows(), strict=True) for piece in pair]
    return Sequences(torch.cat(pieces), prompts.lengths + responses.lengths, prompts.lengths)
