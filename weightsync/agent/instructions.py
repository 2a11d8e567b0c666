"""What `AgentState` has its shell do."""

from dataclasses import dataclass

from weightsync.messages import Reply
from weightsync.plan import TransferPlan
from weightsync.version import Version


@dataclass(frozen=True)
class Answer:
    """Reply to a call."""

    call: object
    reply: Reply


@dataclass(frozen=True)
class Refuse:
    """Reply to a call that it cannot be done."""

    call: object
    reason: str


@dataclass(frozen=True)
class Renew:
    """Give a slot new memory: a process may still touch the old one."""

    slot: int


@dataclass(frozen=True)
class Grant:
    """Reply with a slot to write a version into."""

    call: object
    version: Version
    slot: int
    plan: TransferPlan


@dataclass(frozen=True)
class Offer:
    """Reply with a complete version to read."""

    call: object
    version: Version
    slot: int
    plan: TransferPlan
    checksums: tuple[int, ...]


@dataclass(frozen=True)
class Pull:
    """Fetch a bucket from another agent into a slot; then say `pulled`."""

    peer: str
    version: Version
    bucket: int
    slot: int
    checksum: int
    base: Version | None
    plan: TransferPlan


@dataclass(frozen=True)
class LacksPlan:
    """Another agent has versions of an unknown plan: ask it for that, then say `open_plan` and `peer_has` again."""

    peer: str
    plan: str


Instruction = Answer | Refuse | Renew | Grant | Offer | Pull | LacksPlan
