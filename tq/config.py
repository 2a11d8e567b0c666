"""Settings of the queue and of the schedule that its admission enforces."""

from enum import StrEnum
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, model_validator

from asyncflow.registry import Registry
from asyncflow.settings import Settings
from tq.policies import TaskSpec, load_policy, resolve_policy

# Settings of the place where storage units keep values. No torch here.

BACKENDS = Registry(
    "asyncflow.backends",
    {
        "memory": "tq.backends.backend:MemoryBackend",
        "redis": "tq.backends.backend:RedisBackend",
        "mooncake": "tq.backends.backend:MooncakeBackend",
    },
)
"""Where storage units may keep values; each class is made with a `BackendConfig` and the prefix of its keys."""


class BackendConfig(Settings):
    """Where storage units keep values."""

    kind: Annotated[str, AfterValidator(BACKENDS.resolve_name)] = "memory"
    """`memory`: in the unit's own memory. `redis`: a Redis server. `mooncake`: a Mooncake Store. Or your own class,
    `module:Class` (docs/transferqueue.md)."""
    address: str = ""
    """`redis`: a URL such as `redis://127.0.0.1:6379/0`. `mooncake`: HOST:PORT of its master. Your own class defines
    its own form."""
    options: Annotated[dict[str, Any], AfterValidator(BACKENDS.options)] = Field({})
    """Settings of your own class, checked by its `Config` if it has one."""
    timeout_s: float = Field(30.0, gt=0)
    """Deadline of one operation (s)."""
    local_host: str = "127.0.0.1"
    """`mooncake`: this machine's name or address as other machines reach it."""
    metadata: str = "P2PHANDSHAKE"
    """`mooncake`: metadata service; the default needs none."""
    protocol: Literal["tcp", "rdma"] = "tcp"
    """`mooncake`: how values travel."""
    devices: str = ""
    """`mooncake`: RDMA devices, separated by commas."""
    segment_bytes: int = Field(2**30, ge=2**24)
    """`mooncake`: memory that each storage unit gives to the store."""
    buffer_bytes: int = Field(2**28, ge=2**24)
    """`mooncake`: staging memory of each storage unit; bounds the largest part of a block."""

    @model_validator(mode="after")
    def _check_backend(self) -> "BackendConfig":
        if self.kind in ("redis", "mooncake") and not self.address:
            raise ValueError(f"storage backend {self.kind} needs an address; set it beside `kind`")
        if self.kind == "redis" and not _is_redis_url(self.address):
            raise ValueError(f"address {self.address!r} is not a Redis URL; write redis://HOST:PORT/DB")
        return self


def _is_redis_url(address: str) -> bool:
    try:
        return urlsplit(address).scheme in ("redis", "rediss", "unix") and urlsplit(address).port != 0
    except ValueError:  # the port is not a number
        return False


class ReplicaFetch(StrEnum):
    """Which ranks of a data-parallel replica (TP and PP ranks that train on the same rows) talk to the queue."""

    BROADCAST = "broadcast"
    EACH = "each"
    STAGE = "stage"


class ReplicaBroadcast(StrEnum):
    """What carries rows from the rank that fetches them to the others."""

    HOST = "host"
    DEVICE = "device"


class QueueConfig(Settings):
    """TransferQueue."""

    num_storage_units: int = Field(2, ge=1)
    """Storage processes; rows are spread over them by load."""
    num_controllers: int = Field(1, ge=1)
    """Controller processes; the tasks are divided among them."""
    request_timeout_s: float = Field(60.0, gt=0)
    """Deadline of one request to a storage unit, and how long a fetch parks before it is repeated (s)."""
    lease_timeout_s: float = Field(30.0, gt=0)
    """A consumer that is silent for this long loses its leases (s); heartbeats are sent four times as often."""
    unit_timeout_s: float = Field(5.0, gt=0)
    """A storage unit that is silent for this long counts as away (s), as if its process had died; heartbeats are sent
    four times as often."""
    unit_grace_s: float = Field(10.0, ge=0)
    """How long the rows of a storage unit that vanished wait for its return before they count as lost (s)."""
    max_deliveries: int = Field(3, ge=0)
    """A row that comes back this often makes its group a dead letter; 0: never. Rows of a training gang never do. The
    last try is made with nothing else in hand, so that no innocent row is blamed. With a value above
    `launcher.max_restarts`, a row that kills processes makes everything start again before it gets there.
    """
    max_live_rows: int = Field(0, ge=0)
    """Rows that some task is not done with; new rows beyond this wait. 0: as many as the schedule admits."""
    max_live_bytes: int = Field(0, ge=0)
    """The same in bytes; 0: no limit."""
    policy: Annotated[str, AfterValidator(resolve_policy)] = "fifo"
    """How rounds of a training gang are made and shared among its ranks: a name of `tq.policies.POLICIES` or
    `module:Class`. In a run `token-budget` fills `actor.max_tokens_per_micro_batch` (in role critic: the critic's)."""
    replica_fetch: ReplicaFetch = ReplicaFetch.BROADCAST
    """How ranks that share rows get them: those of a trainer's replica (`megatron`), and of a copy of `ref`,
    `actor_fwd` or a reward model. `broadcast`: rank 0 fetches, and broadcasts one packed buffer per round.
    `stage`: the first rank of every pipeline stage fetches, and broadcasts inside its stage. `each`: every rank fetches
    for itself, with its own columns if it likes."""
    replica_broadcast: ReplicaBroadcast = ReplicaBroadcast.HOST
    """What carries that buffer. `host`: Gloo, in a thread that reads ahead, beside the computation. `device`: NCCL or
    HCCL, in the groups in which the ranks compute, between two micro-batches; faster only where ranks of a replica are
    on several nodes, and the network between hosts is slow (docs/transferqueue.md)."""
    max_message_bytes: int = Field(2**31, ge=2**20)
    """Largest message that a process accepts (bytes); a larger one is refused and its channel closed."""
    max_clients: int = Field(1024, ge=1)
    """Channels that one service accepts at the same time."""
    shared_memory: bool = True
    """Payloads between processes of one host go through shared memory; False: everything goes over the wire."""
    token_columns: tuple[str, ...] = ("tokens",)
    """Columns whose lengths are a row's tokens: what token budgets and balanced policies count."""
    retain_until_checkpoint: bool = False
    """Keep rows that every task is done with until a checkpoint covers their step."""
    spill_directory: str = ""
    """Where rows that only wait for a checkpoint go when they take much memory; "": they stay in memory."""
    spill_after_bytes: int = Field(2**30, ge=0)
    """Beyond this many bytes per storage unit such rows spill, and an early checkpoint is requested."""
    backend: BackendConfig = BackendConfig()
    """Where storage units keep values."""

    @property
    def controllers(self) -> tuple[str, ...]:
        """Service names of the controllers; the first one is the lead."""
        return tuple(f"controller-{k}" for k in range(self.num_controllers))


class TaskConfig(Settings):
    """A task of a queue that runs alone."""

    name: str
    """Unique."""
    inputs: tuple[str, ...]
    """Columns that must be written before a row is ready."""
    outputs: tuple[str, ...] = ()
    """Columns that the task writes for every row; any others are learned."""
    whole_groups: bool = False
    """Hand out whole groups only."""
    barrier: bool = False
    """Hand out rows of a partition only when all of them are ready."""
    in_order: bool = False
    """Hand out rows in ascending order, as many as requested or the partition's rest."""
    keeps_leases: bool = False
    """Leases survive a lost channel (a training gang)."""
    max_deliveries: int | None = Field(None, ge=0)
    """A row that comes back this often makes its group a dead letter; 0: never. None: the queue's value, but never for
    a task that keeps its leases."""
    policy: str | None = None
    """A name of `tq.policies.POLICIES` or `module:Class`. None: fifo, or the queue's if the task keeps its leases."""

    def spec(self, queue: QueueConfig) -> TaskSpec:
        deliveries = 0 if self.keeps_leases else queue.max_deliveries
        policy = queue.policy if self.keeps_leases else "fifo"
        return TaskSpec(
            name=self.name,
            inputs=frozenset(self.inputs),
            outputs=frozenset(self.outputs),
            whole_groups=self.whole_groups,
            barrier=self.barrier,
            in_order=self.in_order,
            keeps_leases=self.keeps_leases,
            max_deliveries=deliveries if self.max_deliveries is None else self.max_deliveries,
            policy=load_policy(self.policy or policy),
        )
