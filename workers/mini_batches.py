"""Which rounds of a step make which optimizer update. Pure.

Two mini-batches a pass, two passes, four rounds:

    rounds arrive     0 and 3 are trained as they come, 1 and 2 are kept ......... the last one is there
    updates           0 3 | 1 2 | 1 3 | 0 2                                        every pass is dealt anew

Rounds are dealt to mini-batches at random, from a seed and without a look at their rows: short answers arrive first, so
mini-batches that followed arrival would be updates by length.

The first update comes after the last round: until then nothing has changed, and a step that is stopped leaves no
trace; from then on the step needs nobody any more. An algorithm that looks at the whole step keeps all rounds, and
trains none as it comes.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from tq.batch import PackedBatch
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


class Deal:
    """Deals the rounds of one pass to mini-batches; the same on all ranks, since all see the same rounds.

    With rounds of one size every order is equally likely. Others go where there is room, so a mini-batch differs from
    `size` by less than the largest round; if that is no larger than `size`, none stays empty.
    """

    def __init__(self, *, num_mini_batches: int, size: int, seed: str) -> None:
        """Args:
        num_mini_batches: of the pass.
        size: rows of a mini-batch.
        seed: gives the order.
        """
        self._room = [size] * num_mini_batches
        self._chance = random.Random(seed)

    def next(self, num_rows: int) -> int:
        """Return the mini-batch of the next round.

        Args:
            num_rows: of the round, on all ranks.
        """
        fitting = [room if room >= num_rows else 0 for room in self._room]
        if any(fitting):
            (number,) = self._chance.choices(range(len(fitting)), fitting)
        else:
            number = self._room.index(max(self._room))
        self._room[number] -= num_rows
        return number


class StepRounds:
    """The rounds of one step, on one rank."""

    def __init__(self, config: ActorConfig, *, step_rows: int, seed: str, streams: bool = True) -> None:
        """Args:
        config: how many updates.
        step_rows: rows of the step on all ranks.
        seed: of the step; says which rounds make which update.
        streams: rounds are trained as they come; else after `settle`.
        """
        self._num_passes = config.ppo_epochs
        self._num_mini_batches = config.num_updates_per_step
        self._streams = streams
        self._keeps = config.num_updates > 1 or not streams
        self._size = step_rows // config.num_updates_per_step
        self._seed = seed
        self._kept: list[Round] = []
        self._arriving = self._deal_of(0)

    def add(self, arrived: Round) -> bool:
        """Take in a round; returns whether it is of the first mini-batch, and so trained at once."""
        if self._keeps:
            self._kept.append(arrived)
        return self._arriving.next(arrived.total_rows) == 0 and self._streams

    def settle(self, change: Callable[[list[PackedBatch]], list[PackedBatch]]) -> Sequence[Round]:
        """All rounds are here: change their batches, and return the first mini-batch, where rounds do not stream."""
        if self._streams:
            return ()
        batches = change([one.batch for one in self._kept])
        self._kept = [replace(one, batch=batch) for one, batch in zip(self._kept, batches, strict=True)]
        return self._mini_batches(0)[0]

    def later_mini_batches(self) -> Iterator[Sequence[Round]]:
        """All rounds are here: yield the other mini-batches of the first pass, and all of later ones."""
        for pass_number in range(self._num_passes if self._keeps else 0):
            mini_batches = self._mini_batches(pass_number)
            yield from mini_batches if pass_number else mini_batches[1:]

    def _mini_batches(self, pass_number: int) -> list[list[Round]]:
        deal = self._deal_of(pass_number)
        dealt: list[list[Round]] = [[] for _ in range(self._num_mini_batches)]
        for one in self._kept:
            dealt[deal.next(one.total_rows)].append(one)
        return dealt

    def _deal_of(self, pass_number: int) -> Deal:
        return Deal(num_mini_batches=self._num_mini_batches, size=self._size, seed=f"{self._seed}/{pass_number}")
