"""How a step's rows are cut: into rounds as they arrive, mini-batches (one optimizer update each), micro-batches. Pure.

Two mini-batches a pass, two passes, four rounds:

    rounds arrive     0 and 3 are trained as they come, 1 and 2 are kept ......... the last one is there
    updates           0 3 | 1 2 | 1 3 | 0 2                                        every pass is assigned anew

Rounds are assigned to mini-batches at random, from a seed and without a look at their rows: short responses arrive
first, so mini-batches that followed arrival would be updates by length.

The first update comes after the last round: until then nothing has changed, and a step that is stopped leaves no trace;
from then on the step needs nothing from the queue. An algorithm that looks at the whole step keeps all rounds, and
trains none as it comes.

A round is cut into micro-batches by number (runs of `micro_batch_size` rows with all their samples) or, at the borders
of samples, by tokens (as few as fit a budget). Samples with the same prompt, as a group's are, stay together where they
fit the budget, so that it is computed once; else it is computed once for each part:

    budget 20, prompt 8, responses 2 9 4 3      one part would have 26 tokens: (2 4) with 14, (9 3) with 20

Under `tq.policy: token-budget` a round has no more tokens than a micro-batch may have; longer groups alone are cut.
Neither changes the gradient: the loss is a sum over tokens, and scaled once for the whole update.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from tq.columns import PackedBatch
from workers.rows.micro_batches import MiniBatchAssigner
from workers.settings.engines import ActorConfig


@dataclass(frozen=True)
class Round:
    """One rank's part of a round, with all columns.

    Attributes:
        batch: the samples of its rows; none where the rank got none.
        micro_batches: positions of samples; as many on all ranks, so the last ones of some are empty.
        total_rows: of all ranks; rows, not samples.
        drawn_by: versions that drew tokens of it, on any rank; only with `actor.tri_model`.
    """

    batch: PackedBatch
    micro_batches: Sequence[Sequence[int]]
    total_rows: int
    drawn_by: Sequence[int] = ()


class StepRounds:
    """The rounds of one step, on one rank."""

    def __init__(self, config: ActorConfig, *, step_rows: int, seed: str, streams: bool = True) -> None:
        """Args:
        config: how many updates.
        step_rows: rows of the step on all ranks.
        seed: of the step; says which rounds make which update.
        streams: rounds are trained as they come; else after the last one.
        """
        self._num_passes = config.ppo_epochs
        self._num_mini_batches = config.num_mini_batches
        self._streams = streams
        self._keeps = config.num_updates > 1 or not streams
        self._size = step_rows // config.num_mini_batches
        self._seed = seed
        self._kept: list[Round] = []
        self._arriving = self._assigner(0)

    def add(self, arrived: Round) -> bool:
        """Take in a round; returns whether it is of the first mini-batch and is trained at once."""
        if self._keeps:
            self._kept.append(arrived)
        return self._arriving.assign(arrived.total_rows) == 0 and self._streams

    def mini_batches(self, normalize: Callable[[list[PackedBatch]], list[PackedBatch]]) -> Iterator[Sequence[Round]]:
        """Yield, for every update of the step, the rounds that are still to be trained; the last round has arrived.

        Args:
            normalize: is given the batches of all rounds, where they do not stream, and returns them changed.
        """
        if not self._streams:
            batches = normalize([one.batch for one in self._kept])
            self._kept = [replace(one, batch=batch) for one, batch in zip(self._kept, batches, strict=True)]
        for pass_number in range(self._num_passes if self._keeps else 1):
            first, *others = self._assigned(pass_number)
            yield () if pass_number == 0 and self._streams else first
            yield from others

    def _assigned(self, pass_number: int) -> list[list[Round]]:
        assigner = self._assigner(pass_number)
        assigned: list[list[Round]] = [[] for _ in range(self._num_mini_batches)]
        for one in self._kept:
            assigned[assigner.assign(one.total_rows)].append(one)
        return assigned

    def _assigner(self, pass_number: int) -> MiniBatchAssigner:
        return MiniBatchAssigner(
            num_mini_batches=self._num_mini_batches, size=self._size, seed=f"{self._seed}/{pass_number}"
        )
