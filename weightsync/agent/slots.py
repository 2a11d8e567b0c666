"""The agent's few slots: versions, their writers and their readers. Pure.

    empty -> being filled (writers, pulls) -> complete (readers) -> replaced, the oldest first

One rule keeps every reader's bytes whole: *memory is written again only when every session that got it said that it is
done*. Else the slot gets new memory (`stained`), and the old one goes with the last mapping of it: when a session that
may still touch it vanished, when a version that was given up is still read, when a reader is too slow.
"""

from collections.abc import Container, Iterator
from dataclasses import dataclass, field

from weightsync.messages import Held
from weightsync.plan import TransferPlan
from weightsync.version import Version


@dataclass
class Slot:
    """One version's place.

    Attributes:
        number: which memory.
        version: whose weights; None: the slot is empty.
        plan, digest: under which it is written.
        checksums: by bucket index, of those that are there.
        writers: by trainer rank: the session that is writing its part, or damaged buckets of it again.
        readers: sessions that hold it.
        best_effort: sessions that hold it, but for which no writer waits.
        left: readers have been too slow: they keep the memory when the slot is needed.
        pulling: by bucket index: the agent that it is being fetched from.
        delivered: a rank of this node has delivered buckets of it.
        dropped: damaged or overtaken; it is not offered.
        stained: a session that may still touch the memory is gone.
    """

    number: int
    version: Version | None = None
    plan: TransferPlan | None = None
    digest: str = ""
    checksums: dict[int, int] = field(default_factory=dict)
    writers: dict[int, object] = field(default_factory=dict)
    readers: set[object] = field(default_factory=set)
    best_effort: set[object] = field(default_factory=set)
    left: bool = False
    pulling: dict[int, str] = field(default_factory=dict)
    delivered: bool = False
    dropped: bool = False
    stained: bool = False

    @property
    def complete(self) -> bool:
        """Whether every bucket is there and the version is not given up."""
        return self.plan is not None and len(self.checksums) == len(self.plan.buckets) and not self.dropped

    def let_write(self, rank: int, session: object) -> None:
        """A trainer rank writes here until it says that it is done."""
        if self.writers.get(rank, session) != session:
            self.stained = True
        self.writers[rank] = session

    def lose(self, session: object) -> None:
        """A client is gone. What it delivered stays, for it may come back with the rest."""
        ranks = [rank for rank, writer in self.writers.items() if writer == session]
        if ranks or session in self.readers | self.best_effort:
            self.stained = True
        for rank in ranks:
            del self.writers[rank]
        self.release(session)

    def release(self, session: object) -> None:
        """A session does not read it any more."""
        self.readers.discard(session)
        self.best_effort.discard(session)

    def empty(self) -> None:
        """Forget the version."""
        if self.writers or self.readers or self.best_effort or self.pulling:
            self.stained = True
        self.version = self.plan = None
        self.checksums, self.writers, self.readers, self.best_effort, self.pulling = {}, {}, set(), set(), {}
        self.delivered = self.dropped = self.left = False


class Slots:
    """All slots of an agent."""

    def __init__(self, number: int) -> None:
        self._slots = [Slot(k) for k in range(number)]

    def __iter__(self) -> Iterator[Slot]:
        return iter(self._slots)

    def of(self, version: Version) -> Slot | None:
        """Return where a version is or is being written; one that was dropped is nowhere."""
        return next((slot for slot in self._slots if slot.version == version and not slot.dropped), None)

    @property
    def newest(self) -> Slot | None:
        """The slot of the newest complete version."""
        complete = [slot for slot in self._slots if slot.complete]
        return max(complete, key=lambda slot: slot.version or (), default=None)

    def held(self) -> list[Held]:
        """Return what other agents may know of."""
        return [
            Held(slot.version, slot.digest, dict(slot.checksums))
            for slot in self._slots
            if slot.version is not None and not slot.dropped
        ]

    def holders(self) -> dict[object, list[Version]]:
        """Return, by session, the versions that it reads or may read."""
        holders: dict[object, list[Version]] = {}
        for slot in self._slots:
            if slot.version is not None:
                for session in slot.readers | slot.best_effort:
                    holders.setdefault(session, []).append(slot.version)
        return holders

    def parts(self) -> list[Slot]:
        """Return the slots of versions that are not complete yet, oldest first."""
        parts = [slot for slot in self._slots if slot.version is not None and not slot.complete and not slot.dropped]
        return sorted(parts, key=lambda slot: slot.version or ())

    def take(self, version: Version, plan: TransferPlan, digest: str, *, dispensable: Container[int]) -> Slot | None:
        """Make room for a version; None: every slot is in use.

        An unused slot goes first, then parts that give way, then the oldest complete one, except the newest,
        that is not being repaired and that only best-effort readers and readers left behind hold. A dropped version
        that is still read goes last: its readers keep the memory, perhaps until there is a newer version.

        Args:
            version, plan, digest: what will be written.
            dispensable: numbers of slots with parts that give way to it; those of an older lineage do so anyway.
        """
        free = (slot for slot in self._slots if self._free_for(slot, version, dispensable))
        slot = min(free, key=_reuse_order, default=None)
        if slot is not None:
            slot.empty()
            slot.version, slot.plan, slot.digest = version, plan, digest
        return slot

    def abandon_parts(self, before: Version, rank: int, session: object) -> None:
        """A trainer rank goes on to another version: it writes no more to those that it left unfinished."""
        for slot in self.parts():
            if slot.version is not None and slot.version < before and slot.writers.get(rank) == session:
                del slot.writers[rank]

    def drop_older_parts(self, newest: Version) -> None:
        """Give up versions before `newest` that were never completed."""
        for slot in self.parts():
            if slot.version is not None and slot.version < newest:
                slot.dropped = True

    def leave_readers(self) -> None:
        """A writer has waited long enough for the readers of older versions."""
        for slot in self._slots:
            slot.left = slot.complete and slot is not self.newest

    def usage(self) -> str:
        """Return the users of the slots, for a message."""
        used = []
        for slot in self._slots:
            readers = " ".join(sorted(str(getattr(reader, "client", reader)) for reader in slot.readers))
            use = f"read by {readers}" if readers else "complete" if slot.complete else "being written"
            used.append(f"{slot.version} ({use})")
        return f"{', '.join(used)}; raise weightsync.num_slots"

    def _free_for(self, slot: Slot, version: Version, dispensable: Container[int]) -> bool:
        if slot.version is None or slot.dropped:
            return True
        if slot is self.newest or (slot.readers and not slot.left):
            return False
        if slot.complete:
            return not slot.writers and not slot.pulling
        return slot.number in dispensable or slot.version.lineage < version.lineage


def _reuse_order(slot: Slot) -> tuple[bool, bool, bool, tuple[int, ...]]:
    return (
        bool(slot.readers or slot.best_effort),
        slot.version is not None and not slot.dropped,
        slot.complete,
        slot.version or (),
    )
