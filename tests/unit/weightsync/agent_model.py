"""A weight agent's memory as random tests see it: who may touch which memory, and which calls are open.

What holds after every event:

- Memory: nobody is given memory to write a version into (`Grant`, `Pull`) while anybody may still touch it for another
  version: a writer that did not say that it is done, a reader that did not release it, a bucket under way from another
  agent, whichever of these vanished. `Renew` gives fresh memory. A bucket that its rank is writing is not pulled.
- Offers: every bucket was sealed or pulled into exactly this memory with the checksum that is offered; the version is
  the newest complete one, newer than what the watcher has, and never has other checksums than before.
- Calls: each is answered once at most, and none after its session ended. A rank is granted only what it asked for last.
- Swaps: never more than `max_updating` at once.
- Wake-ups: nothing that could be answered or fetched is left lying.
"""

from collections.abc import Iterator, Sequence

from agent_clients import NUM_SENDERS, PLANS, Call, Memory, Peer, Rank, Receiver, Session, Touch, checksum_of, plan_for

from weightsync.agent.agent_state import (
    AgentState,
    AnswerCall,
    Grant,
    Instruction,
    LacksPlan,
    OfferVersion,
    Pull,
    RefuseCall,
    Renew,
)
from weightsync.messages import Done, HeldVersion, PeerHas, Repair, SwapTurn, Unneeded
from weightsync.plan import TransferPlan
from weightsync.version import Version


class AgentModel:
    """An `AgentState` with memories and simulated clients."""

    def set_up(self, *, num_slots: int, max_updating: int | None, local_ranks: Sequence[int]) -> None:
        """Begin with nothing."""
        self.state = AgentState(num_slots=num_slots, max_updating=max_updating)
        self.max_updating = max_updating
        self.lineage = 0
        self.memories = [Memory() for _ in range(num_slots)]
        self.ranks = {rank: Rank(rank) for rank in local_ranks}
        self.remote = [rank for rank in range(NUM_SENDERS) if rank not in local_ranks]
        self.receivers = {name: Receiver(name) for name in ("r0", "r1", "r2")}
        self.peers = {name: Peer(name) for name in ("p0", "p1")}
        self.calls: list[Call] = []
        self.leaving: list[Session] = []
        self.borrowed: list[tuple[object, Version, Memory]] = []
        self.sealed: set[tuple[Version, int]] = set()
        self.offered: dict[Version, tuple[int, ...]] = {}
        self.lacking: list[tuple[str, str]] = []
        self.late = False

    # What the agent decides

    def apply(self, instructions: Sequence[Instruction]) -> None:
        """Carry out what was decided, and look for what was forgotten."""
        for instruction in instructions:
            self._carry_out(instruction)
        forgotten = [*self.state._serve_takers(), *self.state._schedule_pulls(), *self.state._serve_watchers()]
        assert not forgotten, f"nobody was told: {forgotten}"
        while self.lacking:
            peer, plan = self.lacking.pop()
            self.state.open_plan(next(each for each in PLANS if each.digest() == plan))
            self.tell(self.peers[peer])

    def _carry_out(self, instruction: Instruction) -> None:
        match instruction:
            case AnswerCall(call, reply):
                self._answer(call, reply)
            case RefuseCall(call, reason):
                self._answer(call, reason)
            case Renew(slot):
                self.memories[slot] = Memory()
            case Grant(call, version, slot, plan):
                self._grant(call, version, self.memories[slot], plan)
            case OfferVersion() as offer:
                self._offer(offer)
            case Pull() as pull:
                self._pull(pull)
            case LacksPlan(peer, plan):
                self.lacking.append((peer, plan))

    def _grant(self, call: Call, version: Version, memory: Memory, plan: TransferPlan) -> None:
        self._close(call)
        rank = self.ranks[call.rank]
        own = [bucket.index for bucket in plan.of_sender(rank.rank)]
        assert plan == plan_for(version)
        memory.occupy(version)
        assert not [each for each in memory.touches if each.how == "pull" and each.part in own]
        memory.touches.add(Touch("write", call.session, version, rank.rank))
        for bucket in own:
            memory.checked.pop(bucket, None)
        if call.session in self.leaving:
            return
        assert rank.asked == version
        rank.open_takes -= 1
        rank.step, rank.writing, rank.staged = version.step, (version, memory, own), (version, memory)

    def _offer(self, offer: OfferVersion) -> None:
        call, version, memory = offer.call, offer.version, self.memories[offer.slot]
        assert isinstance(call, Call)
        self._close(call)
        receiver = self._receiver(call.session)
        receiver.watching = False
        assert receiver.seen is None or version > receiver.seen
        assert memory.version == version
        assert offer.plan == plan_for(version)
        assert memory.checked == dict(enumerate(offer.checksums))
        assert self.offered.setdefault(version, offer.checksums) == offer.checksums
        assert version == max(self._complete())
        memory.touches.add(Touch("read", call.session, version))
        receiver.seen, receiver.held[version] = version, memory

    def _pull(self, pull: Pull) -> None:
        memory = self.memories[pull.slot]
        memory.occupy(pull.version)
        rank = pull.plan.buckets[pull.bucket].sender
        assert pull.checksum == checksum_of(pull.version, pull.bucket)
        assert not [each for each in memory.touches if each.how == "pull" and each.part == pull.bucket]
        assert not [each for each in memory.touches if each.how == "write" and each.part == rank and self._alive(each)]
        assert pull.base is None or pull.base in self._complete()
        memory.touches.add(Touch("pull", pull.peer, pull.version, pull.bucket))
        self.peers[pull.peer].pulls.append((pull, memory))

    def _answer(self, call: object, reply: object) -> None:
        assert isinstance(call, Call)
        self._close(call)
        if call.session in self.leaving:
            return
        match call.about, reply:
            case "take", Unneeded(version):
                rank = self.ranks[call.rank]
                rank.open_takes -= 1
                rank.step = max(rank.step, version.step if version.lineage == self.lineage else -1)
            case "await repair", Repair(version, _):
                rank = self.ranks[call.rank]
                rank.repair, rank.waits_for_repair = reply, False
                if rank.staged is not None and rank.staged[0] == version:
                    rank.staged[1].touches.add(Touch("mend", call.session, version, rank.rank))
            case "corrupt", _:
                self._told(self._receiver(call.session), reply)
            case "swap", SwapTurn(granted):
                self._receiver(call.session).swap = "swapping" if granted else ""
                swapping = [each for each in self.receivers.values() if each.swap == "swapping"]
                assert self.max_updating is None or len(swapping) <= self.max_updating
            case "watch peer", PeerHas(_, held):
                assert all(len(each.checksums) <= len(plan_for(each.version).buckets) for each in held)
            case "take", str() if self.late:
                self.ranks[call.rank].open_takes -= 1
            case "take" | "seal", str():
                raise AssertionError(f"{call.about} of rank {call.rank}: {reply}")

    def _told(self, receiver: Receiver, reply: object) -> None:
        """A report of a damaged bucket is answered: it is whole again, or its version is given up."""
        assert receiver.reporting is not None
        (version, bucket), receiver.reporting = receiver.reporting, None
        assert isinstance(reply, Done | str)
        if isinstance(reply, Done):
            assert bucket not in receiver.held[version].damaged

    def _close(self, call: object) -> None:
        assert isinstance(call, Call) and not call.answered, "answered twice"
        assert not call.session.closed, f"{call.about} of {call.session} is answered"
        call.answered = True

    def _alive(self, touch: Touch) -> bool:
        return isinstance(touch.who, Session) and not touch.who.closed and touch.who not in self.leaving

    def _complete(self) -> Iterator[Version]:
        return (
            held.version for held in self.state.held() if len(held.checksums) == len(plan_for(held.version).buckets)
        )

    def _receiver(self, session: Session) -> Receiver:
        return next(each for each in self.receivers.values() if each.session is session)

    # What clients do

    def call(self, session: Session, about: str, rank: int = -1) -> Call:
        """Return a new request."""
        self.calls.append(Call(session, about, rank))
        return self.calls[-1]

    def connect(self, rank: Rank) -> None:
        """A trainer rank opens its channel."""
        rank.session = Session(f"rank{rank.rank}")
        self.state.open_plan(plan_for(Version(self.lineage, 0)))
        self.wait_for_repair(rank)

    def disconnect(self, rank: Rank, *, late: bool) -> None:
        """A trainer rank's channel breaks; `late`: that is noticed some time later."""
        assert rank.session is not None
        session, rank.session = rank.session, None
        rank.writing, rank.asked, rank.open_takes = None, None, 0
        rank.waits_for_repair, rank.repair = False, None
        self.leaving.append(session)
        if not late:
            self.notice()

    def notice(self) -> None:
        """The agent notices that channels broke."""
        while self.leaving:
            session = self.leaving.pop()
            session.closed = True
            self.apply(self.state.closed(session))

    def take(self, rank: Rank, version: Version, deadline: float = 1.0) -> None:
        """A trainer rank wants a slot: it gives up what it was writing."""
        assert rank.session is not None
        if rank.writing is not None:
            rank.writing[1].touches.discard(Touch("write", rank.session, rank.writing[0], rank.rank))
            rank.writing = None
        rank.asked = version
        rank.open_takes += 1
        call, plan = self.call(rank.session, "take", rank.rank), plan_for(version).digest()
        instructions = self.state.take_slot(
            call, rank.session, rank=rank.rank, version=version, plan=plan, deadline=deadline
        )
        self.apply(instructions)

    def seal(self, rank: Rank, num_buckets: int) -> None:
        """A trainer rank seals the next buckets that it has written."""
        assert rank.session is not None and rank.writing is not None
        version, memory, left = rank.writing
        now, left[:] = left[:num_buckets], left[num_buckets:]
        for bucket in now:
            memory.fill(bucket, version)
            self.sealed.add((version, bucket))
        if not left:
            memory.touches.discard(Touch("write", rank.session, version, rank.rank))
            rank.writing = None
        self._say_sealed(rank, version, now)

    def mend(self, rank: Rank, *, able: bool) -> None:
        """A trainer rank does what it was asked to repair, or says that it cannot."""
        assert rank.session is not None and rank.repair is not None
        (version, buckets), rank.repair = (rank.repair.version, rank.repair.buckets), None
        staged = rank.staged
        touch = Touch("mend", rank.session, version, rank.rank)
        if staged is not None and staged[0] == version:
            staged[1].touches.discard(touch)
        if not able or staged is None or staged[0] != version:
            self.apply(self.state.no_repair(version))
            return
        for bucket in buckets:
            staged[1].fill(bucket, version)
        self._say_sealed(rank, version, buckets)

    def _say_sealed(self, rank: Rank, version: Version, buckets: Sequence[int]) -> None:
        assert rank.session is not None
        checksums = {bucket: checksum_of(version, bucket) for bucket in buckets}
        call = self.call(rank.session, "seal", rank.rank)
        self.apply(self.state.seal_buckets(call, rank.session, rank=rank.rank, version=version, checksums=checksums))

    def report(self, receiver: Receiver, version: Version, bucket: int) -> None:
        """A receiver found a damaged bucket; the agent looks at its own copy first."""
        assert receiver.session is not None
        receiver.reporting = (version, bucket)
        call, token = self.call(receiver.session, "corrupt"), object()
        borrowed = self.state.borrow_version(token, version)
        if borrowed is not None:
            self.apply(self.state.release_version(token, version))
            if bucket not in self.memories[borrowed[0]].damaged:
                call.answered, receiver.reporting = True, None
                return
        self.apply(self.state.report_corrupt(call, receiver.session, version, bucket))

    def release(self, receiver: Receiver, version: Version) -> None:
        """A receiver reads a version no more."""
        receiver.held.pop(version).touches.discard(Touch("read", receiver.session, version))
        self.apply(self.state.release_version(receiver.session, version))

    def leave(self, receiver: Receiver) -> None:
        """A receiver dies; what it held may still be read."""
        assert receiver.session is not None
        session = receiver.session
        self.receivers[receiver.name] = Receiver(receiver.name)
        session.closed = True
        self.apply(self.state.closed(session))

    def tell(self, peer: Peer) -> None:
        """Another agent says what it has."""
        peer.linked = True
        held = [
            HeldVersion(
                version, plan_for(version).digest(), {bucket: checksum_of(version, bucket) for bucket in buckets}
            )
            for version, buckets in peer.has.items()
        ]
        self.apply(self.state.peer_has(peer.name, held))

    def deliver(self, peer: Peer, *, good: bool) -> None:
        """The first bucket that another agent was asked for comes, or does not."""
        pull, memory = peer.pulls.pop(0)
        memory.touches.discard(Touch("pull", peer.name, pull.version, pull.bucket))
        if good:
            memory.fill(pull.bucket, pull.version)
        else:
            memory.damaged.add(pull.bucket)
        self.apply(self.state.end_pull(peer.name, pull.version, pull.bucket, pull.checksum if good else None))

    def lose(self, peer: Peer) -> None:
        """The channel to another agent breaks."""
        peer.linked = False
        self.apply(self.state.peer_lost(peer.name))
        while peer.pulls:
            self.deliver(peer, good=False)

    def wait_for_repair(self, rank: Rank) -> None:
        """A trainer rank says that it can be asked, unless it has something to repair."""
        if rank.session is not None and not rank.waits_for_repair and rank.repair is None:
            rank.waits_for_repair = True
            call = self.call(rank.session, "await repair", rank.rank)
            self.apply(self.state.await_repair(call, rank.session, rank=rank.rank))

    def wait_for_news(self, receiver: Receiver) -> None:
        """A receiver that is not busy wants a newer version."""
        if not receiver.watching and receiver.reporting is None:
            assert receiver.session is not None
            receiver.watching = True
            self.apply(self.state.watch(self.call(receiver.session, "watch"), receiver.session, receiver.seen))

    def damage_seen(self, receiver: Receiver) -> list[tuple[Version, int]]:
        """Return the damaged buckets that a receiver could report now."""
        if receiver.watching or receiver.reporting is not None:
            return []
        return [(version, bucket) for version, memory in receiver.held.items() for bucket in sorted(memory.damaged)]

    def lend(self, version: Version) -> None:
        """The agent reads a version itself, for another agent."""
        token = object()
        borrowed = self.state.borrow_version(token, version)
        assert borrowed is not None
        memory = self.memories[borrowed[0]]
        assert memory.version == version
        memory.touches.add(Touch("read", token, version))
        self.borrowed.append((token, version, memory))

    def give_back(self) -> None:
        """It has read the oldest of those."""
        token, version, memory = self.borrowed.pop(0)
        memory.touches.discard(Touch("read", token, version))
        self.apply(self.state.release_version(token, version))
