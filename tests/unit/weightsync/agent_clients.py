"""Who a modelled weight agent deals with: memories, trainer ranks, receivers and other agents."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from weightsync.agent.agent_state import Pull
from weightsync.messages import Repair
from weightsync.plan import Bucket, TransferPlan
from weightsync.version import Version

NUM_SENDERS = 3


def plan_of(senders: Sequence[int]) -> TransferPlan:
    """Return a plan whose bucket k is sent by `senders[k]`."""
    return TransferPlan(NUM_SENDERS, {}, tuple(Bucket(k, rank, 4, ()) for k, rank in enumerate(senders)))


PLANS = (plan_of([0, 1, 2, 0]), plan_of([0, 1, 2]))


def plan_for(version: Version) -> TransferPlan:
    """Return the plan of a version: a restarted trainer may have another one."""
    return PLANS[version.lineage % 2]


def checksum_of(version: Version, bucket: int) -> int:
    """Return what a good copy has."""
    return hash((version, bucket)) % 2**64


@dataclass(eq=False)
class Session:
    """One client's channel."""

    client: str
    closed: bool = False

    def __repr__(self) -> str:
        return f"{self.client}{' (gone)' if self.closed else ''}"


@dataclass(eq=False)
class Call:
    """One request. `about`: what it is."""

    session: Session
    about: object
    rank: int = -1
    answered: bool = False


@dataclass(frozen=True)
class Touch:
    """Somebody may touch a memory for a version. `how`: write, mend, read or pull; `part`: rank or bucket."""

    how: str
    who: object
    version: Version
    part: int = -1


class Memory:
    """One memory of a slot: it is fresh after `Renew`."""

    def __init__(self) -> None:
        self.version: Version | None = None
        self.touches: set[Touch] = set()
        self.checked: dict[int, int] = {}
        self.damaged: set[int] = set()

    def occupy(self, version: Version) -> None:
        """Give it to a version."""
        others = [touch for touch in self.touches if touch.version != version]
        assert not others, f"memory is given to {version}, but {others}"
        if self.version != version:
            self.version = version
            self.checked.clear()
            self.damaged.clear()

    def fill(self, bucket: int, version: Version) -> None:
        """Write a good copy of a bucket."""
        assert self.version == version, f"{version} is written over {self.version}"
        self.checked[bucket] = checksum_of(version, bucket)
        self.damaged.discard(bucket)


@dataclass
class Rank:
    """A trainer rank, as `WeightSender` behaves. `writing`: with the buckets that it has to seal."""

    rank: int
    session: Session | None = None
    step: int = -1
    asked: Version | None = None
    open_takes: int = 0
    writing: tuple[Version, Memory, list[int]] | None = None
    staged: tuple[Version, Memory] | None = None
    waits_for_repair: bool = False
    repair: Repair | None = None


@dataclass
class Receiver:
    """A receiver, as `WeightReceiver` behaves: it holds a version and the next one while it checks it."""

    name: str
    session: Session | None = None
    seen: Version | None = None
    held: dict[Version, Memory] = field(default_factory=dict)
    watching: bool = False
    reporting: tuple[Version, int] | None = None
    swap: str = ""


@dataclass
class Peer:
    """Another agent: what it has, and what it was asked for."""

    name: str
    linked: bool = False
    has: dict[Version, set[int]] = field(default_factory=dict)
    pulls: list[tuple[Pull, Memory]] = field(default_factory=list)
