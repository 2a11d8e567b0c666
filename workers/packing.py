"""From queue columns to the engines' packed sequences. Called by the actor and the reference; never pads or sorts."""

from tq.batch import PackedBatch
from workers.engines.base import Sequences


def sequences_of(batch: PackedBatch) -> Sequences:
    """Join `prompts` and `responses` of each row: prompt then answer, one row after another, no padding.

    Args:
        batch: columns `prompts` and `responses`, int64, N >= 1 rows.
    """
    return Sequences.of(list(batch["prompts"].rows()), list(batch["responses"].rows()))
