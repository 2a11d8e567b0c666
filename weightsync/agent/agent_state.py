"""A weight agent's decisions: which slots writers get, what readers are offered, what is fetched from other agents.

Pure. Every event returns the instructions that follow from it, in order. `call` is what the shell replies to; `session`
identifies a client.
"""

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from weightsync.agent.swap_turns import SwapTurns
from weightsync.agent.trainer_ranks import Ranks, Repairs, Taker
from weightsync.messages import DeviceCopy, Done, HeldVersion, NoRoom, PeerHas, Repair, Reply, SwapTurn, Unneeded
from weightsync.plan import Bucket, TransferPlan
from weightsync.version import Version

# What `AgentState` tells its shell to do.


@dataclass(frozen=True)
class AnswerCall:
    call: object
    reply: Reply


@dataclass(frozen=True)
class RefuseCall:
    call: object
    reason: str


@dataclass(frozen=True)
class Renew:
    """Give the slot new memory, because a process may still touch the old memory."""

    slot: int


@dataclass(frozen=True)
class Grant:
    call: object
    version: Version
    slot: int
    plan: TransferPlan


@dataclass(frozen=True)
class OfferVersion:
    call: object
    version: Version
    slot: int
    plan: TransferPlan
    checksums: tuple[int, ...]


@dataclass(frozen=True)
class Pull:
    """Fetch a bucket from another agent into a slot, then report it with `end_pull`."""

    peer: str
    version: Version
    bucket: int
    slot: int
    checksum: int
    base: Version | None
    plan: TransferPlan


@dataclass(frozen=True)
class LacksPlan:
    """Another agent has versions under an unknown plan: fetch the plan, then call `open_plan` and `peer_has` again."""

    peer: str
    plan: str


Instruction = AnswerCall | RefuseCall | Renew | Grant | OfferVersion | Pull | LacksPlan


# What the agents of other nodes have, and which of them a bucket is fetched from. Pure.
#
# Indexed by bucket, so that news of one bucket needs no search through all agents: there may be a thousand, and each of
# them announces every bucket.


class PeerCatalog:
    """What every other agent last said that it has.

    Args:
        pulls_per_peer: buckets in flight from one agent.
    """

    def __init__(self, pulls_per_peer: int = 2) -> None:
        self._pulls_per_peer = pulls_per_peer
        # Agent -> (version, plan) -> bucket -> checksum.
        self._held: dict[str, Mapping[tuple[Version, str], Mapping[int, int]]] = {}
        # The inverse, (version, plan) -> bucket -> agent -> checksum, without fetches that failed since.
        self._holders: dict[tuple[Version, str], dict[int, dict[str, int]]] = {}
        self._pulls: dict[str, set[tuple[Version, int]]] = {}
        # Agent -> versions that it was fetching.
        self._fetching: dict[str, set[Version]] = {}

    def update_held(self, peer: str, held: Sequence[HeldVersion]) -> None:
        """An agent announced everything that it now has."""
        now = {(each.version, each.plan): each.checksums for each in held}
        before = self._held.get(peer, {})
        for key in before.keys() - now.keys():
            self._forget_buckets(peer, key, before[key])
        for key, checksums in now.items():
            if not checksums:
                continue
            self._forget_buckets(peer, key, before.get(key, {}).keys() - checksums.keys())
            buckets = self._holders.setdefault(key, {})
            for bucket, checksum in checksums.items():
                buckets.setdefault(bucket, {})[peer] = checksum
        self._held[peer] = now
        self._fetching[peer] = {each.version for each in held if each.is_fetched}
        self._pulls.setdefault(peer, set())

    def lost(self, peer: str) -> None:
        for key, checksums in self._held.pop(peer, {}).items():
            self._forget_buckets(peer, key, checksums)
        self._pulls.pop(peer, None)
        self._fetching.pop(peer, None)

    def is_fetched(self, version: Version | None) -> bool:
        """Return whether any agent was still fetching a version when it last told."""
        return any(version in versions for versions in self._fetching.values())

    def list_offered(self, newer_than: Version | None) -> dict[Version, str]:
        """Return versions newer than `newer_than`, newest first, each with its plan's digest."""
        news = {version: plan for version, plan in self._holders if newer_than is None or version > newer_than}
        return dict(sorted(news.items(), reverse=True))

    def is_held(self, version: Version, plan: str, bucket: int) -> bool:
        return bucket in self._holders.get((version, plan), ())

    def is_newer_held(self, version: Version, plan: str, bucket: int) -> bool:
        """Return whether any agent has a newer version of the bucket: then its trainer rank has moved on."""
        return any(
            other > version and digest == plan and bucket in buckets
            for (other, digest), buckets in self._holders.items()
        )

    def choose_source(self, version: Version, plan: str, bucket: int, *, busy_too: bool = False) -> str | None:
        """Return the least busy agent that has the bucket and may be asked now, or None.

        An agent still busy with this very bucket (for memory that was given up since) is not asked again: its two
        answers could not be told apart.

        Args:
            plan: digest of the plan.
            busy_too: also consider agents that already have `pulls_per_peer` fetches in flight.
        """
        able = [
            peer
            for peer in self._holders.get((version, plan), {}).get(bucket, ())
            if (version, bucket) not in self._pulls[peer]
            and (busy_too or len(self._pulls[peer]) < self._pulls_per_peer)
        ]
        return min(able, key=lambda peer: (len(self._pulls[peer]), peer), default=None)

    def start(self, peer: str, version: Version, plan: str, bucket: int) -> int:
        """Note that the fetch began; return the checksum that the agent announced."""
        self._pulls[peer].add((version, bucket))
        return self._holders[version, plan][bucket][peer]

    def end(self, peer: str, version: Version, bucket: int, *, came: bool) -> None:
        """Note that a fetch ended. After a failure, wait for a new announcement before asking this agent again."""
        if peer not in self._held:
            return
        self._pulls[peer].discard((version, bucket))
        for key in self._held[peer] if not came else ():
            if key[0] == version:
                self._forget_buckets(peer, key, [bucket])

    def _forget_buckets(self, peer: str, key: tuple[Version, str], buckets: Iterable[int]) -> None:
        table = self._holders.get(key)
        if table is None:
            return
        for bucket in buckets:
            peers = table.get(bucket, {})
            peers.pop(peer, None)
            if not peers:
                table.pop(bucket, None)
        if not table:
            del self._holders[key]


# The agent's slots: a few versions, with their writers and readers. Pure.
#
#     empty -> being filled (writers, pulls) -> complete (readers) -> replaced, the oldest first
#
# One rule keeps every reader's bytes intact: *memory is written again only after every session that got it has said
# that it is done*. Otherwise the slot gets new memory (`stained`), and the old memory goes away with its last mapping.
# This happens when a session that may still touch the memory vanished, when an abandoned version is still being read,
# and when a reader is too slow.


@dataclass
class Slot:
    """The place of one version."""

    number: int  # which memory
    fresh: bool = True  # never used, so its memory has no pages yet
    version: Version | None = None  # None: the slot is empty
    plan: TransferPlan | None = None
    digest: str = ""
    checksums: dict[int, int] = field(default_factory=dict)  # by bucket index, for the buckets that have arrived
    # By trainer rank: the session that is writing its part, or rewriting damaged buckets of it.
    writers: dict[int, object] = field(default_factory=dict)
    readers: set[object] = field(default_factory=set)  # sessions that hold it; a writer waits for them
    best_effort: set[object] = field(default_factory=set)  # sessions that hold it but that no writer waits for
    left: bool = False  # its readers were too slow: they keep the memory when the slot is needed
    # By bucket index: the agent that the bucket is being fetched from.
    pulling: dict[int, str] = field(default_factory=dict)
    delivered: bool = False  # a rank of this node has delivered buckets of it
    dropped: bool = False  # damaged or overtaken; not offered any more
    stained: bool = False  # a session that may still touch the memory is gone

    @property
    def complete(self) -> bool:
        """Whether all buckets have arrived and the version was not dropped."""
        return self.plan is not None and len(self.checksums) == len(self.plan.buckets) and not self.dropped

    def let_write(self, rank: int, session: object) -> None:
        """Let a trainer rank write here until it says that it is done."""
        if self.writers.get(rank, session) != session:
            self.stained = True
        self.writers[rank] = session

    def lose(self, session: object) -> None:
        """A client is gone. Keep what it delivered: it may come back with the rest."""
        ranks = [rank for rank, writer in self.writers.items() if writer == session]
        if ranks or session in self.readers | self.best_effort:
            self.stained = True
        for rank in ranks:
            del self.writers[rank]
        self.release_reader(session)

    def release_reader(self, session: object) -> None:
        self.readers.discard(session)
        self.best_effort.discard(session)

    def empty(self) -> None:
        if self.writers or self.readers or self.best_effort or self.pulling:
            self.stained = True
        self.version = self.plan = None
        self.checksums, self.writers, self.readers, self.best_effort, self.pulling = {}, {}, set(), set(), {}
        self.delivered = self.dropped = self.left = False


class Slots:
    """All slots of an agent.

    Args:
        keeps_base: the version before the newest one is needed, too, while the next one is written.
    """

    def __init__(self, number: int, *, keeps_base: bool = False) -> None:
        self._slots = [Slot(k) for k in range(number)]
        self._keeps_base = keeps_base

    def __iter__(self) -> Iterator[Slot]:
        return iter(self._slots)

    def find_slot(self, version: Version) -> Slot | None:
        """Return the slot that holds or is receiving a version; None for a dropped one."""
        return next((slot for slot in self._slots if slot.version == version and not slot.dropped), None)

    @property
    def newest(self) -> Slot | None:
        complete = [slot for slot in self._slots if slot.complete]
        return max(complete, key=lambda slot: slot.version or (), default=None)

    def held(self) -> list[HeldVersion]:
        return [
            HeldVersion(slot.version, slot.digest, dict(slot.checksums), bool(slot.pulling))
            for slot in self._slots
            if slot.version is not None and not slot.dropped
        ]

    def list_holders(self) -> dict[object, list[Version]]:
        holders: dict[object, list[Version]] = {}
        for slot in self._slots:
            if slot.version is not None:
                for session in slot.readers | slot.best_effort:
                    holders.setdefault(session, []).append(slot.version)
        return holders

    def incomplete_slots(self) -> list[Slot]:
        """Return the slots of incomplete versions, oldest first."""
        parts = [slot for slot in self._slots if slot.version is not None and not slot.complete and not slot.dropped]
        return sorted(parts, key=lambda slot: slot.version or ())

    def take_slot(
        self,
        version: Version,
        plan: TransferPlan,
        digest: str,
        *,
        dispensable: Container[int],
        lagging: Container[int] = (),
    ) -> Slot | None:
        """Make room for a version; None: every slot is in use.

        Empty slots go first, then parts that give way, then the oldest complete version. A complete version qualifies
        only if it is not the newest, is not being repaired, and has only best-effort readers or readers left behind. A
        slot that was never used costs memory, so it waits until all others are in use somewhere. A dropped version that
        is still being read goes last: its readers keep its memory, perhaps until a newer version exists.

        Args:
            dispensable: numbers of slots whose parts give way to this version; parts of an older lineage always do.
            lagging: numbers of slots that other agents still fetch from.
        """
        free = (slot for slot in self._slots if self._free_for(slot, version, dispensable))
        slot = min(free, key=lambda each: self._reuse_order(each, lagging), default=None)
        if slot is not None:
            slot.empty()
            slot.fresh = False
            slot.version, slot.plan, slot.digest = version, plan, digest
        return slot

    def is_worth_waiting(self, version: Version, dispensable: Container[int], lagging: Container[int]) -> bool:
        """Return whether only a slot that was never used is free, but another one is about to be; see `take_slot`."""
        used = [slot for slot in self._slots if not slot.fresh]
        if self._keeps_base or len(used) < 2 or len(used) == len(self._slots):
            return False
        # All but the newest will be free, once their readers have gone, or once a version that lacks another rank's
        # part is complete, so that the one before it is not the newest any more.
        return not any(self._free_for(slot, version, dispensable) and slot.number not in lagging for slot in used)

    def abandon_parts(self, before: Version, rank: int, session: object) -> None:
        """A trainer rank moved on to another version: it will not finish its earlier ones."""
        for slot in self.incomplete_slots():
            if slot.version is not None and slot.version < before and slot.writers.get(rank) == session:
                del slot.writers[rank]

    def drop_older_parts(self, newest: Version) -> None:
        for slot in self.incomplete_slots():
            if slot.version is not None and slot.version < newest:
                slot.dropped = True

    def leave_readers(self) -> None:
        """Leave behind the readers of older versions: a writer has waited for them long enough."""
        for slot in self._slots:
            slot.left = slot.complete and slot is not self.newest

    def usage(self) -> str:
        """Describe who uses the slots, for an error message."""
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

    def _reuse_order(self, slot: Slot, lagging: Container[int]) -> tuple[bool, bool, bool, bool, bool, tuple[int, ...]]:
        return (
            bool(slot.readers or slot.best_effort),
            slot.number in lagging,
            slot.fresh and not self._keeps_base,
            slot.version is not None and not slot.dropped,
            slot.complete,
            slot.version or (),
        )


class AgentState:
    """One agent's slots, readers, writers and peers.

    Args:
        num_slots: versions that are kept or being written.
        max_updating: receivers that may swap at once; None: any number.
        pulls_per_peer: buckets in flight from one other agent.
        has_deltas: other agents get deltas, against the version before the newest.
    """

    def __init__(
        self, *, num_slots: int, max_updating: int | None = None, pulls_per_peer: int = 2, has_deltas: bool = False
    ) -> None:
        self._slots = Slots(num_slots, keeps_base=has_deltas)
        self._turns = SwapTurns(max_updating)
        self._plans: dict[str, TransferPlan] = {}
        self._ranks = Ranks()
        self._watchers: dict[object, tuple[object, Version | None, bool]] = {}
        # Receivers, waiting or not. A node without any fetches nothing.
        self._followers: set[object] = set()
        self._now = 0.0  # of the last tick
        self._repairs = Repairs()
        self._peers = PeerCatalog(pulls_per_peer)
        self._peer_watchers: dict[object, object] = {}
        # Peers start with 0, so their first watch is answered at once.
        self._revision = 1
        # By trainer rank of this node: its session, the digest of its plan, and what it has on its device.
        self._device_copies: dict[int, tuple[object, str, DeviceCopy]] = {}
        # By session: the version that it computes with.
        self.serving: dict[object, Version] = {}

    @property
    def newest(self) -> Version | None:
        slot = self._slots.newest
        return None if slot is None else slot.version

    def plan(self, digest: str) -> TransferPlan | None:
        return self._plans.get(digest)

    def get_checksum(self, version: Version, bucket: int) -> int | None:
        """Return the checksum of a bucket that is here, else None."""
        slot = self._slots.find_slot(version)
        return None if slot is None else slot.checksums.get(bucket)

    def held(self) -> list[HeldVersion]:
        return self._slots.held()

    def list_holders(self) -> dict[object, list[Version]]:
        return self._slots.list_holders()

    def open_plan(self, plan: TransferPlan) -> None:
        self._plans.setdefault(plan.digest(), plan)

    def note_device_copy(self, session: object, plan: str, copy: DeviceCopy) -> None:
        """A trainer rank keeps what it publishes under a plan (digest) on its device; forgotten with its session."""
        self._device_copies[copy.rank] = session, plan, copy

    def list_device_copies(self, plan: str) -> list[DeviceCopy]:
        return [copy for _, (_, digest, copy) in sorted(self._device_copies.items()) if digest == plan]

    def take_slot(
        self,
        call: object,
        session: object,
        *,
        rank: int,
        version: Version,
        plan: str,
        deadline: float,
        patient_until: float = 0.0,
    ) -> list[Instruction]:
        """A trainer rank wants to write its part of a version. It waits until a slot is free, or until `deadline`.

        By asking, it gives up older versions, finished or not.

        Args:
            patient_until: the earliest time (of `tick`) at which a slot that was never used is taken while another one
                is only waiting for its readers.
        """
        if plan not in self._plans:
            return [RefuseCall(call, f"weights of {version}: the plan {plan} is not known here; open it first")]
        self._ranks.add_taker(Taker(call, session, rank, version, plan, deadline, patient_until))
        self._slots.abandon_parts(version, rank, session)
        return self._make_use_of_room()

    def seal_buckets(
        self, call: object, session: object, *, rank: int, version: Version, checksums: Mapping[int, int]
    ) -> list[Instruction]:
        """A trainer rank has written buckets; with its last one it is done with the slot."""
        slot = self._slots.find_slot(version)
        if slot is None or slot.plan is None:
            return [AnswerCall(call, Done())]  # dropped meanwhile: a newer version is here or on its way
        own = {bucket.index for bucket in slot.plan.of_sender(rank)}
        if not checksums.keys() <= own:
            return [RefuseCall(call, f"weights of {version}: rank {rank} sealed buckets that are not its own")]
        if not all(0 <= checksum < 2**64 for checksum in checksums.values()):
            return [RefuseCall(call, f"weights of {version}: rank {rank} sealed with a value that is not a checksum")]
        # Only a session that holds the grant may seal: memory may have been granted to another one since.
        if slot.writers.get(rank) != session:
            return [RefuseCall(call, f"weights of {version}: rank {rank} was not granted a slot for it")]
        # The version was complete, so this is a repair. The rank stays a writer until all its repairs are in.
        if slot.complete:
            instructions = self._end_repairs(slot, checksums)
            if not self._repairs.wants_rewrite(version, rank):
                del slot.writers[rank]
            return [AnswerCall(call, Done()), *instructions, *self._make_use_of_room()]
        slot.checksums.update(checksums)
        slot.delivered = True
        if own <= slot.checksums.keys():
            del slot.writers[rank]
        return [AnswerCall(call, Done()), *self._announce_arrived(slot)]

    def await_repair(self, call: object, session: object, *, rank: int) -> list[Instruction]:
        wanted = self._repairs.ready(rank, session, call)
        for version in wanted:
            slot = self._slots.find_slot(version)
            assert slot is not None
            slot.let_write(rank, session)
        return [AnswerCall(call, Repair(version, sorted(buckets))) for version, buckets in list(wanted.items())[:1]]

    def no_repair(self, version: Version) -> list[Instruction]:
        """A trainer rank cannot rewrite a version: it has newer weights by now."""
        slot = self._slots.find_slot(version)
        return self._give_up(slot) if slot is not None and self._repairs.wants_rewrite(version) else []

    def watch(
        self, call: object, session: object, newer_than: Version | None, *, best_effort: bool = False
    ) -> list[Instruction]:
        """A receiver wants the newest version, and waits for one newer than what it has.

        No writer waits for a best-effort reader. Such a reader keeps its memory when the slot is needed.
        """
        self._watchers[session] = (call, newer_than, best_effort)
        first = not self._followers
        self._followers.add(session)
        return self._serve_watchers() + (self._schedule_pulls() if first else [])

    def borrow_version(self, session: object, version: Version) -> tuple[int, TransferPlan] | None:
        """Hold a version, complete or not, until `release_version`. Return its slot and plan; None: it is not here."""
        slot = self._slots.find_slot(version)
        if slot is None or slot.plan is None:
            return None
        slot.readers.add(session)
        return slot.number, slot.plan

    def release_version(self, session: object, version: Version) -> list[Instruction]:
        for slot in self._slots:
            if slot.version == version:
                slot.release_reader(session)
        return self._make_use_of_room()

    def ask_swap(self, call: object, session: object, deadline: float | None) -> list[Instruction]:
        """A receiver wants to swap; without a deadline it is refused at once if it is not its turn."""
        granted = self._turns.ask(call, session, deadline)
        return [] if granted is None else [AnswerCall(call, SwapTurn(granted))]

    def end_swap(self, session: object) -> list[Instruction]:
        return [AnswerCall(call, SwapTurn(True)) for call in self._turns.end(session)]

    def report_corrupt(self, call: object, session: object, version: Version, bucket: int) -> list[Instruction]:
        slot = self._slots.find_slot(version)
        if slot is None or not slot.complete or bucket not in slot.checksums:
            return [RefuseCall(call, f"weights of {version}: bucket {bucket} is damaged, and the version is given up")]
        return self._repair_bucket(slot, bucket) if self._repairs.add_repair(version, bucket, call, session) else []

    def peer_has(self, peer: str, held: Sequence[HeldVersion]) -> list[Instruction]:
        self._peers.update_held(peer, held)
        lacking = {each.plan for each in held if each.plan not in self._plans and self._is_news(each.version)}
        return [LacksPlan(peer, plan) for plan in sorted(lacking)] + self._make_use_of_room()

    def end_pull(self, peer: str, version: Version, bucket: int, checksum: int | None) -> list[Instruction]:
        """A fetch ended; `checksum` is None if the bucket did not come or does not match."""
        self._peers.end(peer, version, bucket, came=checksum is not None)
        slot = self._slots.find_slot(version)
        if slot is None or slot.pulling.get(bucket) != peer:
            return self._make_use_of_room()  # the memory it was meant for was given up meanwhile
        del slot.pulling[bucket]
        if self._repairs.pending(version, bucket):
            mended = (
                self._repair_bucket(slot, bucket) if checksum is None else self._end_repairs(slot, {bucket: checksum})
            )
            return mended + self._make_use_of_room()
        if checksum is None:
            return self._make_use_of_room()
        slot.checksums[bucket] = checksum
        return self._announce_arrived(slot)

    def peer_lost(self, peer: str) -> list[Instruction]:
        """The channel to another agent broke; its fetches are reported as failed after this."""
        self._peers.lost(peer)
        return self._make_use_of_room()

    def watch_peer(self, call: object, session: object, revision: int) -> list[Instruction]:
        """Another agent wants to know what is here, as soon as that differs from `revision`."""
        if revision != self._revision:
            return [AnswerCall(call, PeerHas(self._revision, self.held()))]
        self._peer_watchers[session] = call
        return []

    def closed(self, session: object) -> list[Instruction]:
        """A client's channel ended, by goodbye or by death: it may still touch the memory that it was given."""
        self._ranks.closed(session)
        self._watchers.pop(session, None)
        self._followers.discard(session)
        self._peer_watchers.pop(session, None)
        self.serving.pop(session, None)
        # A process that ended takes its memory with it, so what it had is offered no more.
        self._device_copies = {rank: one for rank, one in self._device_copies.items() if one[0] != session}
        for slot in self._slots:
            slot.lose(session)
        instructions: list[Instruction] = []
        for version in self._repairs.closed(session):
            if (damaged := self._slots.find_slot(version)) is not None:
                instructions += self._give_up(damaged)
        return instructions + self.end_swap(session) + self._make_use_of_room()

    def tick(self, now: float) -> list[Instruction]:
        """Time passed: end overdue waits. Slow readers are left behind before a trainer rank is refused a slot."""
        self._now = now
        instructions: list[Instruction] = [AnswerCall(call, SwapTurn(False)) for call in self._turns.take_overdue(now)]
        instructions += self._serve_takers()
        if self._ranks.are_overdue(now):
            self._slots.leave_readers()
            instructions += self._serve_takers()
        for late in self._ranks.take_overdue(now):
            reason = f"weights of {late.version}: no slot became free in time ({self._slots.usage()})"
            instructions.append(AnswerCall(late.call, NoRoom(reason)))
        return instructions

    def _serve_takers(self) -> list[Instruction]:
        instructions: list[Instruction] = []
        for taker in self._ranks.list_waiting():
            if answer := self._serve_taker(taker):
                self._ranks.remove_taker(taker)
                instructions += answer
        return instructions

    def _serve_taker(self, taker: Taker) -> list[Instruction]:
        """Answer a trainer rank that wants a slot; empty: it waits."""
        version, newest = taker.version, self.newest
        if newest is not None and version <= newest:
            return [AnswerCall(taker.call, Unneeded(newest))]
        slot = self._slots.find_slot(version)
        if slot is not None and slot.digest != taker.plan:
            return [RefuseCall(taker.call, f"weights of {version}: other ranks write them under another plan")]
        own = {bucket.index for bucket in self._plans[taker.plan].of_sender(taker.rank)}
        there = set() if slot is None else own & slot.checksums.keys()
        if own == there or self._ranks.is_overtaken(taker, is_begun=slot is not None):
            return [AnswerCall(taker.call, Unneeded(version))]
        # Wait for these fetches: a bucket must not have two writers.
        if slot is not None and own & slot.pulling.keys():
            return []
        dispensable = self._list_dispensable(version)
        patient = slot is None and self._now < taker.patient_until
        if patient and self._slots.is_worth_waiting(version, dispensable, self._list_lagging()):
            return []
        slot, renewed = self._slot_for(version, taker.plan, dispensable=dispensable)
        if slot is None:
            return []
        for bucket in there:
            del slot.checksums[bucket]  # about to be overwritten
        slot.let_write(taker.rank, taker.session)
        return [*renewed, Grant(taker.call, version, slot.number, self._plans[taker.plan])]

    def _slot_for(
        self, version: Version, plan: str, *, dispensable: Container[int]
    ) -> tuple[Slot | None, list[Instruction]]:
        slot = self._slots.find_slot(version)
        if slot is not None:
            return slot, []
        slot = self._slots.take_slot(
            version, self._plans[plan], plan, dispensable=dispensable, lagging=self._list_lagging()
        )
        if slot is None or not slot.stained:
            return slot, []
        # Whoever may still touch the old memory keeps it; the slot starts afresh.
        slot.stained = False
        return slot, [Renew(slot.number)]

    def _list_lagging(self) -> set[int]:
        """Return the numbers of slots whose version another agent is still fetching."""
        return {slot.number for slot in self._slots if self._peers.is_fetched(slot.version)}

    def _list_dispensable(self, version: Version) -> set[int]:
        """Return the numbers of slots whose parts give way to `version`."""
        return {slot.number for slot in self._slots.incomplete_slots() if self._gives_way(slot, version)}

    def _gives_way(self, slot: Slot, version: Version) -> bool:
        """Whether a slot may be reclaimed: nobody writes it, and it can be fetched again or will never be complete."""
        if slot.writers or slot.version is None or slot.plan is None:
            return False
        fetched_ahead = slot.version > version and not slot.delivered
        return (
            fetched_ahead
            or self._is_outdated(slot)
            or any(self._never_comes(slot, bucket) for bucket in slot.plan.buckets)
        )

    def _is_outdated(self, slot: Slot) -> bool:
        """Whether a part is kept only for other nodes, and a newer one of this node's ranks has followed."""
        assert slot.version is not None
        return not self._followers and any(
            other.version > slot.version and other.delivered and not other.writers
            for other in self._slots.incomplete_slots()
            if other.version is not None
        )

    def _never_comes(self, slot: Slot, bucket: Bucket) -> bool:
        assert slot.version is not None
        here = bucket.index in slot.checksums or bucket.index in slot.pulling
        if here or self._peers.is_held(slot.version, slot.digest, bucket.index):
            return False
        asked = self._ranks.newest_asked(bucket.sender)
        if asked is not None:
            return asked > slot.version
        if slot.delivered:  # by ranks of this node, so those of other nodes will follow
            return self._peers.is_newer_held(slot.version, slot.digest, bucket.index)
        return True

    def _announce_arrived(self, slot: Slot) -> list[Instruction]:
        """Buckets arrived: tell other agents, and if the version is now complete, all receivers."""
        instructions = self._announce_held()
        if slot.complete and slot.version is not None and slot.version == self.newest:
            self._slots.drop_older_parts(slot.version)
            instructions += self._serve_watchers()
        return instructions + self._make_use_of_room()

    def _announce_held(self) -> list[Instruction]:
        self._revision += 1
        calls, self._peer_watchers = list(self._peer_watchers.values()), {}
        return [AnswerCall(call, PeerHas(self._revision, self.held())) for call in calls]

    def _serve_watchers(self) -> list[Instruction]:
        slot = self._slots.newest
        if slot is None or slot.version is None or slot.plan is None:
            return []
        instructions: list[Instruction] = []
        for session, (call, newer_than, best_effort) in list(self._watchers.items()):
            if newer_than is None or slot.version > newer_than:
                del self._watchers[session]
                (slot.best_effort if best_effort else slot.readers).add(session)
                checksums = tuple(slot.checksums[bucket.index] for bucket in slot.plan.buckets)
                instructions.append(OfferVersion(call, slot.version, slot.number, slot.plan, checksums))
        return instructions

    def _make_use_of_room(self) -> list[Instruction]:
        return self._serve_takers() + self._schedule_pulls()

    def _is_news(self, version: Version) -> bool:
        newest = self.newest
        return newest is None or version > newest

    def _schedule_pulls(self) -> list[Instruction]:
        """Fetch what other agents have and this one lacks, if anybody on this node reads it.

        First finish what was begun: otherwise a node slower than the trainer would never complete any version. Then
        take the newest version that can be had whole, skipping those in between; then whatever exists of the newest.
        """
        if not self._followers:
            return []
        offered = {
            version: plan for version, plan in self._peers.list_offered(self.newest).items() if plan in self._plans
        }
        begun = [slot.version for slot in self._slots.incomplete_slots() if slot.version in offered]
        whole = next((version for version, plan in offered.items() if self._can_be_whole(version, plan)), None)
        instructions: list[Instruction] = []
        for version in dict.fromkeys([*begun, whole, *list(offered)[:1]]):
            if version is None:
                continue
            dispensable = self._list_dispensable(version) if version == whole else ()
            slot, renewed = self._slot_for(version, offered[version], dispensable=dispensable)
            instructions += renewed
            if slot is not None:
                instructions += self._pull_missing(slot)
                if slot.pulling:
                    break
        return instructions

    def _can_be_whole(self, version: Version, plan: str) -> bool:
        slot = self._slots.find_slot(version)
        here = slot.checksums if slot is not None and slot.digest == plan else {}
        buckets = range(len(self._plans[plan].buckets))
        return all(bucket in here or self._peers.is_held(version, plan, bucket) for bucket in buckets)

    def _pull_missing(self, slot: Slot) -> list[Instruction]:
        assert slot.version is not None and slot.plan is not None
        instructions: list[Instruction] = []
        for bucket in slot.plan.buckets:
            k = bucket.index
            # A rank that is writing here delivers its own buckets.
            if k not in slot.checksums and k not in slot.pulling and bucket.sender not in slot.writers:
                source = self._peers.choose_source(slot.version, slot.digest, k)
                if source is not None:
                    instructions.append(self._start_pull(slot, k, source))
        return instructions

    def _start_pull(self, slot: Slot, bucket: int, peer: str) -> Pull:
        assert slot.version is not None and slot.plan is not None
        slot.pulling[bucket] = peer
        checksum = self._peers.start(peer, slot.version, slot.digest, bucket)
        # The newest complete version serves as the base of a delta, if it has the same layout.
        base = self._slots.newest
        usable = base is not None and base is not slot and base.digest == slot.digest
        base_version = base.version if base is not None and usable else None
        return Pull(peer, slot.version, bucket, slot.number, checksum, base_version, slot.plan)

    def _repair_bucket(self, slot: Slot, bucket: int) -> list[Instruction]:
        """Get a damaged bucket again: from another agent, else from the rank that sent it."""
        assert slot.version is not None and slot.plan is not None
        # A busy agent will do: receivers are waiting for this bucket.
        source = self._peers.choose_source(slot.version, slot.digest, bucket, busy_too=True)
        if source is not None:
            return [self._start_pull(slot, bucket, source)]
        rank = slot.plan.buckets[bucket].sender
        asked = self._repairs.ask(rank, slot.version, bucket)
        if asked is None:
            return self._give_up(slot)
        session, call = asked
        slot.let_write(rank, session)
        return [] if call is None else [AnswerCall(call, Repair(slot.version, [bucket]))]

    def _end_repairs(self, slot: Slot, checksums: Mapping[int, int]) -> list[Instruction]:
        """Damaged buckets were rewritten. If a checksum differs from the first one, drop the version."""
        assert slot.version is not None
        instructions: list[Instruction] = []
        for bucket, checksum in checksums.items():
            if not self._repairs.pending(slot.version, bucket):
                continue
            if checksum != slot.checksums[bucket]:
                return instructions + self._give_up(slot)
            waiting = self._repairs.end(slot.version, bucket)
            instructions += [AnswerCall(call, Done()) for calls in waiting.values() for call in calls]
        return instructions

    def _give_up(self, slot: Slot) -> list[Instruction]:
        """A damaged bucket has no good copy left: drop the version."""
        assert slot.version is not None
        slot.dropped = True
        reason = f"weights of {slot.version}: bucket %d does not match its checksum, and no other copy exists"
        waiting = self._repairs.end(slot.version)
        instructions: list[Instruction] = [
            RefuseCall(call, reason % bucket) for bucket, calls in waiting.items() for call in calls
        ]
        return instructions + self._announce_held() + self._make_use_of_room()
