"""Which partition the next round of a step comes from, when a step trains what is finished first. Pure.

A step takes `num_rows` rows, the oldest partition first that has a full round ready. Rows of a partition that may not
become later (`lateness`) are due: once they are all that the step has room for, nothing else is taken.

    lateness 1, step 4      3: 8 rows left, 4 ready     4: 16 left, 4 ready     5: 16 left, 12 ready
    rounds of 8, room 16    due: 8                      not full                -> a round of 5, then wait for 3

Partitions up to a step have at least as many rows left as the step has room for, so it never needs later ones and can
always be completed. What is due fits into it: all older partitions are dealt, and a partition is a step large.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from tq.task_spec import StepSpec


@dataclass(frozen=True)
class Offer:
    """What a partition has to give.

    Attributes:
        partition: number.
        num_ready: rows that may be handed out now.
        num_left: rows that were not handed out yet, ready or not.
    """

    partition: int
    num_ready: int
    num_left: int


class StepFill:
    """The rule; it remembers nothing."""

    def __init__(self, spec: StepSpec) -> None:
        self._spec = spec

    def choose(self, step: int, num_dealt: int, offers: Sequence[Offer], full: int) -> Offer | None:
        """Return from where the next round of a step is taken, and how much.

        Args:
            step: number.
            num_dealt: rows that it has already.
            offers: partitions of which rows are left, oldest first.
            full: rows of a full round.

        Returns:
            The offer, with as many rows ready as may be taken, or None: nothing may be taken now.
        """
        room = self._spec.num_rows - num_dealt
        newest_due = step - self._spec.lateness
        due = sum(offer.num_left for offer in offers if offer.partition <= newest_due)
        for offer in offers:
            size = min(full, room if offer.partition <= newest_due else room - due)
            is_rest = offer.num_ready == offer.num_left
            if size > 0 and offer.num_ready and (offer.num_ready >= size or is_rest):
                return Offer(offer.partition, min(size, offer.num_ready), offer.num_left)
        return None
