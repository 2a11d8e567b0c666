"""Cuts a step's rows into rounds (as they arrive), mini-batches (one optimizer update each) and micro-batches. Pure.

Two mini-batches per pass, two passes, four rounds:

    rounds arrive     0 and 3 are trained on arrival, 1 and 2 are kept ......... last round has arrived
    updates           0 3 | 1 2 | 1 3 | 0 2                                      every pass is assigned anew

Rounds are assigned to mini-batches at random, from a seed and without looking at their rows. Short responses arrive
first, so mini-batches in arrival order would sort the updates by response length.

The first update comes after the last round. Until then nothing has changed, so a stopped step leaves no trace; from
then on the step needs nothing from the queue. An algorithm that normalizes over the whole step keeps all rounds and
trains none on arrival.

A round is cut into micro-batches either by count (runs of `micro_batch_size` rows with all their samples) or, at sample
borders, by tokens (as few micro-batches as fit a budget). Samples that share a prompt, such as a group's, stay together
if they fit the budget, so that the prompt is computed once; otherwise it is computed once per part:

    budget 20, prompt 8, responses 2 9 4 3      one part would have 26 tokens: (2 4) with 14, (9 3) with 20

With `tq.policy: token-budget`, a round has no more tokens than a micro-batch may have, so only longer groups are cut.
Neither way changes the gradient: the loss is a sum over tokens, scaled once for the whole update.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from tq.columns import PackedBatch
from workers.rows.micro_batches import MiniBatchAssigner
from workers.settings.engines import ActorConfig


@dataclass(frozen=True)
class RankRound:
    """One rank's part of a round, with all columns."""

    batch: PackedBatch  # The samples of this rank's rows; empty if the rank got no rows
    # Positions of samples. All ranks have equally many, so the last ones may be empty.
    micro_batches: Sequence[Sequence[int]]
    total_rows: int  # Rows (not samples) over all ranks
    drawn_by: Sequence[int] = ()  # Policy versions that drew its tokens, on any rank; only with `actor.tri_model`


class StepRounds:
    """The rounds of one step, of `step_rows` rows over all ranks, on one rank. The seed determines which rounds form
    which update. `streams`: train the first mini-batch's rounds on arrival; otherwise nothing before the last round."""

    def __init__(self, config: ActorConfig, *, step_rows: int, seed: str, streams: bool = True) -> None:
        self._num_passes = config.ppo_epochs
        self._num_mini_batches = config.num_mini_batches
        self._streams = streams
        self._keeps = config.num_updates > 1 or not streams
        self._size = step_rows // config.num_mini_batches
        self._seed = seed
        self._kept: list[RankRound] = []
        self._arriving = self._make_assigner(0)

    def add_round(self, arrived: RankRound) -> bool:
        """Add a round; returns whether to train it on arrival because it belongs to the first mini-batch."""
        if self._keeps:
            self._kept.append(arrived)
        return self._arriving.assign_round(arrived.total_rows) == 0 and self._streams

    def mini_batches(
        self, normalize: Callable[[list[PackedBatch]], list[PackedBatch]]
    ) -> Iterator[Sequence[RankRound]]:
        """Yield the rounds that each update still has to train, after the last round has arrived. Without streaming,
        `normalize` maps the batches of all rounds to normalized ones."""
        if not self._streams:
            batches = normalize([one.batch for one in self._kept])
            self._kept = [replace(one, batch=batch) for one, batch in zip(self._kept, batches, strict=True)]
        for pass_number in range(self._num_passes if self._keeps else 1):
            first, *others = self._assign_rounds(pass_number)
            # The first mini-batch of the first pass was trained as its rounds arrived.
            yield () if pass_number == 0 and self._streams else first
            yield from others

    def _assign_rounds(self, pass_number: int) -> list[list[RankRound]]:
        assigner = self._make_assigner(pass_number)
        assigned: list[list[RankRound]] = [[] for _ in range(self._num_mini_batches)]
        for one in self._kept:
            assigned[assigner.assign_round(one.total_rows)].append(one)
        return assigned

    def _make_assigner(self, pass_number: int) -> MiniBatchAssigner:
        return MiniBatchAssigner(
            num_mini_batches=self._num_mini_batches, size=self._size, seed=f"{self._seed}/{pass_number}"
        )
