"""Cuts by lengths and numbers alone: rounds into mini-batches, samples into micro-batches. Pure and torch-free.

`workers.trainer.batching` applies them to batches and gives the reasons; the planner simulates with the same code.
"""

import itertools
import random
from collections.abc import Hashable, Sequence

from tq.policies import split_by_tokens


class MiniBatchAssigner:
    """Assigns the rounds of one pass to mini-batches of `size` rows; the same on all ranks, since all see the same
    rounds.

    If all rounds have the same size, every order is equally likely. Otherwise they go where there is room, so a
    mini-batch differs from `size` by less than the largest round; if that is no larger than `size`, none stays empty.
    """

    def __init__(self, *, num_mini_batches: int, size: int, seed: str) -> None:
        self._room = [size] * num_mini_batches
        self._chance = random.Random(seed)

    def assign_round(self, num_rows: int) -> int:
        """Return the number of the mini-batch for the next round, which has `num_rows` rows over all ranks."""
        fitting = [room if room >= num_rows else 0 for room in self._room]
        if any(fitting):
            # Weighted by room, which makes every order of equal rounds equally likely.
            (number,) = self._chance.choices(range(len(fitting)), fitting)
        else:
            # It fits nowhere: overfill the emptiest one.
            number = self._room.index(max(self._room))
        self._room[number] -= num_rows
        return number


def cut_by_rows(begins: Sequence[int], num_samples: int, micro_batch_size: int) -> list[Sequence[int]]:
    """Return the positions of samples in each micro-batch: runs of `micro_batch_size` rows with all their samples.
    `begins`: ascending positions of the samples that begin a row."""
    borders = [*begins[::micro_batch_size], num_samples]
    return [range(start, end) for start, end in itertools.pairwise(borders)]


def cut_by_tokens(prompts: Sequence[Hashable], lengths: Sequence[tuple[int, int]], budget: int) -> list[list[int]]:
    """Put whole groups, or parts of those that do not fit `budget` tokens, into micro-batches; returns positions of
    samples.

    Args:
        prompts: of each sample; equal ones are computed once per micro-batch.
        lengths: (prompt, rest) of each sample (tokens).
    """
    groups: dict[Hashable, list[int]] = {}
    for position, prompt in enumerate(prompts):
        groups.setdefault(prompt, []).append(position)
    parts, tokens = [], []
    for rows in groups.values():
        prompt_tokens = lengths[rows[0]][0]
        responses = [lengths[row][1] for row in rows]
        whole = prompt_tokens + sum(responses) <= budget
        cuts = [list(range(len(rows)))] if whole else split_by_tokens(responses, max(1, budget - prompt_tokens))
        for cut in cuts:
            parts.append([rows[place] for place in cut])
            tokens.append(prompt_tokens + sum(responses[place] for place in cut))
    return [sorted(row for part in together for row in parts[part]) for together in split_by_tokens(tokens, budget)]
