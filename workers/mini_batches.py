"""Which rounds of a step make which optimizer update. Pure.

Two mini-batches a pass, two passes, four rounds:

    rounds arrive     0 1 are trained as they come, 2 3 are kept ......... the last one is there
    updates           0 1 | 2 3 | 3 0 | 1 2                                later passes go in an order of their own

So the first update comes after the last round: until then nothing has changed, and a step that is stopped leaves no
trace; from then on the step needs nobody any more. An algorithm that looks at the whole step keeps all rounds, and
trains none as it comes.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from tq.batch import PackedBatch
from tq.client.dataloader import order_of_pass
from workers.config import ActorConfig


@dataclass(frozen=True)
class Round:
    """One rank's share of a round, with all columns.

    Attributes:
        batch: its rows; none where the rank got none.
        micro_batches: positions of rows; as many on all ranks, so the last ones of some are empty.
        total_rows: of all ranks.
        drawn_by: versions that drew tokens of it, on any rank; only where somebody asks.
    """

    batch: PackedBatch
    micro_batches: Sequence[Sequence[int]]
    total_rows: int
    drawn_by: Sequence[int] = ()


def mini_batches(round_rows: Sequence[int], *, size: int) -> list[range]:
    """Cut a pass into mini-batches; the same on all ranks, since all see the same rounds.

    Mini-batch k ends with the round with which the pass has k x `size` rows or more. No round is larger than `size`, so
    none is empty.

    Args:
        round_rows: rows of all ranks in each round, in order.
        size: rows of a mini-batch.
    Returns:
        Positions of rounds, every one once.
    """
    cuts: list[range] = []
    start = rows = 0
    for position, count in enumerate(round_rows):
        rows += count
        if rows >= size * (len(cuts) + 1):
            cuts.append(range(start, position + 1))
            start = position + 1
    return [*cuts, range(start, len(round_rows))] if start < len(round_rows) else cuts


class StepRounds:
    """The rounds of one step, on one rank."""

    def __init__(self, config: ActorConfig, *, step_rows: int, streams: bool = True) -> None:
        """Args:
        config: how many updates.
        step_rows: rows of the step on all ranks.
        streams: rounds are trained as they come; else after `settle`.
        """
        self._num_passes = config.ppo_epochs
        self._streams = streams
        self._keeps = config.num_updates > 1 or not streams
        self._size = step_rows // config.num_updates_per_step
        self._kept: list[Round] = []
        self._num_rows = 0

    def add(self, arrived: Round) -> bool:
        """Take in a round; returns whether it is of the first mini-batch, and so trained at once."""
        first = self._num_rows < self._size
        self._num_rows += arrived.total_rows
        if self._keeps:
            self._kept.append(arrived)
        return first and self._streams

    def settle(self, change: Callable[[list[PackedBatch]], list[PackedBatch]]) -> Sequence[Round]:
        """All rounds are here: change their batches, and return the first mini-batch, where rounds do not stream."""
        if self._streams:
            return ()
        batches = change([one.batch for one in self._kept])
        self._kept = [replace(one, batch=batch) for one, batch in zip(self._kept, batches, strict=True)]
        first = mini_batches([one.total_rows for one in self._kept], size=self._size)[0]
        return self._kept[first.start : first.stop]

    def later_mini_batches(self, *, seed: int, step: int) -> Iterator[Sequence[Round]]:
        """Yield the other mini-batches of the first pass, and all of later ones.

        Args:
            seed: of the run; with the step it gives the order of later passes.
            step: that all rounds are here of.
        """
        for number in range(self._num_passes if self._keeps else 0):
            order = order_of_pass(len(self._kept), seed=seed, partition=step, number=number)
            rounds = [self._kept[position] for position in order]
            cuts = mini_batches([one.total_rows for one in rounds], size=self._size)
            for cut in cuts if number else cuts[1:]:
                yield rounds[cut.start : cut.stop]
