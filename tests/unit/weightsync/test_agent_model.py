"""A weight agent under random events: clients, agents and trainers come and go, buckets are damaged, answers are late.

After every event the invariants of `agent_model` hold; in the end, with everybody doing what it is asked, every
receiver has the newest version, and nobody waits for anything else.
"""

from agent_clients import NUM_SENDERS, Memory, Peer, Rank, Receiver, Session, plan_for
from agent_model import AgentModel
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from weightsync.version import Version

INDEX = st.integers(0, 5)


class AgentMachine(AgentModel, RuleBasedStateMachine):
    """Up to three trainer ranks of this node, the others of two other nodes; three receivers."""

    @initialize(
        num_slots=st.integers(2, 4),
        max_updating=st.sampled_from([None, 1, 2]),
        local_ranks=st.sampled_from([(0, 1, 2), (0, 1), (0, 1), (1,), ()]),
    )
    def start(self, num_slots: int, max_updating: int | None, local_ranks: tuple[int, ...]) -> None:
        self.set_up(num_slots=num_slots, max_updating=max_updating, local_ranks=local_ranks)
        self.peer_watches = [self.call(Session("peer"), "done")]
        self.peer_watches[0].answered = True

    # Trainer ranks

    def rank(self, index: int) -> Rank:
        return self.ranks[sorted(self.ranks)[index % len(self.ranks)]]

    @precondition(lambda self: self.ranks)
    @rule(index=INDEX, gap=st.sampled_from([0, 0, 0, 1]), abandons=st.booleans())
    def take_slot(self, index: int, gap: int, abandons: bool) -> None:
        rank = self.rank(index)
        if rank.session is None:
            self.connect(rank)
        if (rank.writing is not None and not abandons) or rank.open_takes > 1:
            return
        step = max(rank.step, -1 if rank.asked is None else rank.asked.step) + 1 + gap
        if step <= min(each.step for each in self.ranks.values()) + 2:
            self.take(rank, Version(self.lineage, step))

    @rule()
    def publish(self) -> None:
        """Every rank that is free writes the next version."""
        free = [rank for rank in self.ranks.values() if rank.writing is None and not rank.open_takes]
        step = 1 + max([self.newest_step(), *(rank.step for rank in self.ranks.values())])
        for rank in free:
            if rank.session is None:
                self.connect(rank)
            self.take(rank, Version(self.lineage, step))
        for rank in free:
            if rank.writing is not None:
                self.seal(rank, 9)
        self.help(self.peers["p0"], Version(self.lineage, step))

    @precondition(lambda self: self.ranks)
    @rule(index=INDEX)
    def take_again(self, index: int) -> None:
        rank = self.rank(index)
        if rank.session is None:
            self.connect(rank)
        if rank.staged is not None and rank.asked in (None, rank.staged[0]):
            self.take(rank, rank.staged[0])

    @precondition(lambda self: any(rank.writing for rank in self.ranks.values()))
    @rule(index=INDEX, num_buckets=st.integers(1, 2))
    def seal_buckets(self, index: int, num_buckets: int) -> None:
        writing = [rank for rank in self.ranks.values() if rank.writing]
        self.seal(writing[index % len(writing)], num_buckets)

    @precondition(lambda self: self.ranks)
    @rule(index=INDEX)
    def await_repair(self, index: int) -> None:
        self.wait_for_repair(self.rank(index))

    @precondition(lambda self: any(rank.repair for rank in self.ranks.values()))
    @rule(able=st.sampled_from([True, True, False]))
    def repair(self, able: bool) -> None:
        self.mend(next(rank for rank in self.ranks.values() if rank.repair), able=able)

    @precondition(lambda self: any(rank.session for rank in self.ranks.values()))
    @rule(index=INDEX, late=st.booleans())
    def break_channel(self, index: int, late: bool) -> None:
        rank = self.rank(index)
        if rank.session is not None:
            self.disconnect(rank, late=late)

    @precondition(lambda self: self.leaving)
    @rule()
    def notice_broken_channels(self) -> None:
        self.notice()

    @rule(late=st.booleans())
    def trainer_restarts(self, late: bool) -> None:
        for rank in self.ranks.values():
            if rank.session is not None:
                self.disconnect(rank, late=late)
            rank.staged, rank.step = None, -1
        self.lineage += 1

    @rule(now=st.sampled_from([0.0, 0.0, 2.0]))
    def time_passes(self, now: float) -> None:
        self.late = True
        self.apply(self.state.tick(now))
        self.late = False

    # Receivers

    def receiver(self, index: int) -> Receiver:
        receiver = self.receivers[f"r{index % 3}"]
        receiver.session = receiver.session or Session(receiver.name)
        return receiver

    @rule(index=INDEX)
    def watch(self, index: int) -> None:
        self.wait_for_news(self.receiver(index))

    @precondition(lambda self: any(receiver.held for receiver in self.receivers.values()))
    @rule(index=INDEX)
    def release_oldest(self, index: int) -> None:
        receiver = self.receiver(index)
        if receiver.held and receiver.reporting is None:
            self.release(receiver, min(receiver.held))

    @precondition(lambda self: any(self.damage_seen(receiver) for receiver in self.receivers.values()))
    @rule(index=INDEX)
    def report_damage(self, index: int) -> None:
        receiver = self.receiver(index)
        for version, bucket in self.damage_seen(receiver)[:1]:
            self.report(receiver, version, bucket)

    @rule(index=INDEX, bucket=INDEX)
    def damage_what_is_read(self, index: int, bucket: int) -> None:
        receiver = self.receiver(index)
        for version, memory in receiver.held.items():
            if not receiver.watching and receiver.reporting is None and bucket in memory.checked:
                memory.damaged.add(bucket)
                self.report(receiver, version, bucket)

    @rule(index=INDEX)
    def receiver_dies(self, index: int) -> None:
        receiver = self.receiver(index)
        self.leave(receiver)

    @rule(index=INDEX, deadline=st.sampled_from([None, 1.0]))
    def ask_swap(self, index: int, deadline: float | None) -> None:
        receiver = self.receiver(index)
        if not receiver.swap:
            receiver.swap = "waiting"
            self.apply(self.state.ask_swap(self.call(receiver.session, "swap"), receiver.session, deadline))

    @rule(index=INDEX)
    def end_swap(self, index: int) -> None:
        receiver = self.receiver(index)
        if receiver.swap == "swapping":
            receiver.swap = ""
            self.apply(self.state.end_swap(receiver.session))

    # Memory

    @rule(index=INDEX, bucket=INDEX)
    def damage(self, index: int, bucket: int) -> None:
        memory: Memory = self.memories[index % len(self.memories)]
        if bucket in memory.checked:
            memory.damaged.add(bucket)

    # Other agents

    @rule(name=st.sampled_from(["p0", "p1"]), sender=st.integers(0, NUM_SENDERS - 1), ahead=st.integers(0, 2))
    def peer_grows(self, name: str, sender: int, ahead: int) -> None:
        version = Version(self.lineage, self.newest_step() + ahead)
        buckets = {bucket.index for bucket in plan_for(version).of_sender(sender)}
        if version.step >= 0 and (sender in self.remote or all((version, each) in self.sealed for each in buckets)):
            self.peers[name].has.setdefault(version, set()).update(buckets)

    @rule(name=st.sampled_from(["p0", "p1"]))
    def peer_forgets_oldest(self, name: str) -> None:
        peer = self.peers[name]
        if peer.has:
            del peer.has[min(peer.has)]

    @rule(name=st.sampled_from(["p0", "p1"]))
    def peer_tells(self, name: str) -> None:
        self.tell(self.peers[name])

    @precondition(lambda self: any(peer.pulls for peer in self.peers.values()))
    @rule(good=st.sampled_from([True, True, True, False]))
    def bucket_comes(self, good: bool) -> None:
        self.deliver(next(peer for peer in self.peers.values() if peer.pulls), good=good)

    @precondition(lambda self: any(peer.linked for peer in self.peers.values()))
    @rule(name=st.sampled_from(["p0", "p1"]))
    def peer_is_lost(self, name: str) -> None:
        if self.peers[name].linked:
            self.lose(self.peers[name])

    @rule(index=INDEX)
    def peer_reads(self, index: int) -> None:
        held = [each.version for each in self.state.held() if each.checksums]
        if held:
            self.lend(held[index % len(held)])

    @precondition(lambda self: self.borrowed)
    @rule()
    def peer_has_read(self) -> None:
        self.give_back()

    @rule(revision=st.integers(0, 3))
    def peer_watches_us(self, revision: int) -> None:
        if self.peer_watches[-1].answered:
            call = self.call(self.peer_watches[-1].session, "watch peer")
            self.peer_watches.append(call)
            self.apply(self.state.watch_peer(call, call.session, revision))

    def newest_step(self) -> int:
        return max([-1, *(held.version.step for held in self.state.held() if held.version.lineage == self.lineage)])

    # The end

    def teardown(self) -> None:
        """Everybody does what it is asked; the trainer publishes one more version."""
        if not hasattr(self, "state"):
            return
        self.notice()
        while self.borrowed:
            self.give_back()
        asked = [rank.asked.step for rank in self.ranks.values() if rank.asked is not None]
        known = [each.version for each in self.state.held()] + [
            each for peer in self.peers.values() for each in peer.has
        ]
        steps = [version.step for version in known if version.lineage == self.lineage]
        target = Version(self.lineage, max([0, *asked, *steps]) + 1)
        for _ in range(30):
            for rank in self.ranks.values():
                self.work(rank, target)
            for peer in self.peers.values():
                self.help(peer, target)
            for receiver in self.receivers.values():
                self.read(receiver)
        assert self.state.newest == target, list(self.state._slots)
        assert [receiver.seen for receiver in self.receivers.values()] == [target] * 3
        waiting = {call.about for call in self.calls if not call.answered and not call.session.closed}
        assert waiting <= {"watch", "watch peer", "await repair"}, waiting

    def work(self, rank: Rank, target: Version) -> None:
        """A trainer rank finishes what it does, then writes the target."""
        if rank.session is None:
            self.connect(rank)
        self.wait_for_repair(rank)
        if rank.repair is not None:
            self.mend(rank, able=True)
        if rank.writing is not None:
            self.seal(rank, 9)
        elif rank.asked != target and not rank.open_takes:
            self.take(rank, Version(self.lineage, rank.asked.step + 1) if rank.asked else target)

    def help(self, peer: Peer, target: Version) -> None:
        """The ranks of other nodes have written what those of this one have, and the target."""
        for version in {target, *(held.version for held in self.state.held() if held.version.lineage == self.lineage)}:
            plan = plan_for(version)
            there = {bucket.index for rank in self.remote for bucket in plan.of_sender(rank)}
            peer.has.setdefault(version, set()).update(there)
        self.tell(peer)
        while peer.pulls:
            self.deliver(peer, good=True)

    def read(self, receiver: Receiver) -> None:
        """A receiver checks what it holds, goes on to the newest and swaps."""
        receiver.session = receiver.session or Session(receiver.name)
        if receiver.swap == "swapping":
            receiver.swap = ""
            self.apply(self.state.end_swap(receiver.session))
        for version, bucket in self.damage_seen(receiver)[:1]:
            self.report(receiver, version, bucket)
        while len(receiver.held) > 1 and receiver.reporting is None:
            self.release(receiver, min(receiver.held))
        self.wait_for_news(receiver)


AgentMachine.TestCase.settings = settings(
    max_examples=settings.default.max_examples,
    stateful_step_count=50,
    deadline=None,
    derandomize=True,
    phases=[Phase.generate],
)
test_random_events = AgentMachine.TestCase
