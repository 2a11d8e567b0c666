"""A task of a queue as controllers know it. Made from configs when the queue starts; plain data."""

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
    barrier: bool = False
    in_order: bool = False
    keeps_leases: bool = False
    max_deliveries: int = 0
    policy: Policy = field(default_factory=Fifo)
    steps: StepSpec | None = None
