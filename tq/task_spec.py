"""A task of a queue as controllers know it. Made from configs when the queue starts; plain data."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from tq.policies import Fifo, Policy


@dataclass(frozen=True)
class StepSpec:
    """Steps of a training gang that are not its partitions: each takes rows of several ones.

    Attributes:
        num_rows: of each step.
        lateness: a row is handed out at most so many steps after its partition.
    """

    num_rows: int
    lateness: int


@dataclass(frozen=True)
class TaskSpec:
    """What a controller must know of a task.

    Attributes:
        name: unique.
        inputs: columns that must be written before a row is ready.
        outputs: columns that the task writes for every row; what it writes beside them is learnt.
        whole_groups: a group is handed out only when all its rows are ready, and never split.
        max_staleness: rows of step s go only to consumers whose weights are of a version v with
            (s - 1) - v <= max_staleness; None: weights do not matter.
        version_interval: consumers compute with weights of every so many steps (0, N, 2N, ...); those between are of no
            use to them. With `max_staleness` N - 1 a row goes to those of the last such step before its own.
        barrier: rows of a partition are handed out only when all of them are ready (`sync`).
        in_order: rows go out in ascending order, as many as asked for or the partition's rest; a fetch waits for
            the next ones. So which rows go out together does not depend on when they became ready.
        keeps_leases: leases survive a lost channel; they end only with the whole gang (the trainer).
        max_deliveries: a row that comes back so often makes its group a dead letter; 0: never.
        policy: which ready rows make a lease, and how a round is shared.
        steps: of a gang whose rounds come from several partitions; None: a partition is a step.
    """

    name: str
    inputs: frozenset[str]
    outputs: frozenset[str] = frozenset()
    whole_groups: bool = False
    max_staleness: int | None = None
    version_interval: int = 1
    barrier: bool = False
    in_order: bool = False
    keeps_leases: bool = False
    max_deliveries: int = 0
    policy: Policy = field(default_factory=Fifo)
    steps: StepSpec | None = None

    def usable_version(self, newest: int) -> int:
        """Return the newest weights, up to some, that consumers of the task can compute with."""
        return newest // self.version_interval * self.version_interval


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


def choose(spec: StepSpec, step: int, num_assigned: int, offers: Sequence[Offer], full: int) -> Offer | None:
    """Return from where the next round of a step is taken, and how much, if a step trains what is finished first.

    A step takes `spec.num_rows` rows, the oldest partition first that has a full round ready. Rows of a partition that
    may not become later (`lateness`) are due: once they are all that the step has room for, nothing else is taken.

        lateness 1, step 4      3: 8 rows left, 4 ready     4: 16 left, 4 ready     5: 16 left, 12 ready
        rounds of 8, room 16    due: 8                      not full                -> a round of 5, then wait for 3

    Partitions up to a step have at least as many rows left as the step has room for, so it never needs later ones and
    can always be completed. What is due fits into it: all older partitions are assigned, a partition is a step large.

    Args:
        spec: of the steps.
        step: number.
        num_assigned: rows that it has already.
        offers: partitions of which rows are left, oldest first.
        full: rows of a full round.

    Returns:
        The offer, with as many rows ready as may be taken, or None: nothing may be taken now.
    """
    room = spec.num_rows - num_assigned
    newest_due = step - spec.lateness
    due = sum(offer.num_left for offer in offers if offer.partition <= newest_due)
    for offer in offers:
        size = min(full, room if offer.partition <= newest_due else room - due)
        is_rest = offer.num_ready == offer.num_left
        if size > 0 and offer.num_ready and (offer.num_ready >= size or is_rest):
            return Offer(offer.partition, min(size, offer.num_ready), offer.num_left)
    return None
