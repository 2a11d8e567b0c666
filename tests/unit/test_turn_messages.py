"""The devices' turn between a run's processes: what gangs say in the job store, and what follows from it."""

import math
import queue
import threading
from collections.abc import Callable, Iterator

import pytest

from asyncflow.job import GangSpec
from asyncflow.sealed_store import SealedStore, connect_store
from launcher.process.device_turn import DeviceTurn, TurnAsked, TurnEvent, TurnGiven, TurnLost
from launcher.process.job_store import TIMEOUT, JobStore, TurnMessages
from weightsync.version import Version
from workers.rank.device_turn import INBOX, TurnHolder, TurnMessage, Word, YieldRule

SECRET = "5e"
DEADLINE_S = 20
GANGS = [GangSpec("rollout-0", "rollout", 0, 1, ("cpu",)), GangSpec("actor", "actor", 0, 2, ("cpu", "cpu"))]


class Job:
    """A launcher's store and turn; `pass_turn` is its main thread."""

    def __init__(self) -> None:
        self.store = JobStore(SECRET)
        self.events: queue.SimpleQueue[TurnEvent] = queue.SimpleQueue()
        self.messages = TurnMessages(self.store, GANGS, self.events.put)
        self.turn = DeviceTurn({gang.name: gang.role for gang in GANGS})

    def client(self) -> SealedStore:
        return SealedStore(connect_store(self.store.host, self.store.port, TIMEOUT), bytes.fromhex(SECRET))

    def holder(
        self, gang: str, rank: int = 0, *, attempt: int = 0, meet: Callable[[], object] = lambda: None
    ) -> TurnHolder:
        news = threading.Event()
        return TurnHolder(self.client(), self.client(), gang=gang, attempt=attempt, rank=rank, news=news, meet=meet)

    def pass_turn(self, event: TurnEvent | None = None) -> TurnEvent:
        event = event or self.events.get(timeout=DEADLINE_S)
        for instruction in self.turn.handle(event):
            self.messages.send(instruction)
        return event


@pytest.fixture(name="job")
def _job() -> Iterator[Job]:
    job = Job()
    yield job
    job.messages.close()
    assert not job.messages._thread.is_alive()


def until(holder: TurnHolder, condition: Callable[[TurnHolder], bool]) -> None:
    """Wait until the holder has heard something."""
    while not condition(holder):
        assert holder._news.wait(DEADLINE_S)
        holder._news.clear()


def test_the_turn_goes_from_side_to_side(job: Job) -> None:
    actors = [job.holder("actor", rank) for rank in range(2)]
    rollout = job.holder("rollout-0")
    for actor in actors:
        actor.ask()
    assert job.pass_turn() == TurnAsked("actor"), "rank 0 speaks for the gang, once"
    assert all(actor.wait() for actor in actors)
    rollout.ask()
    rollout.ask()
    assert job.pass_turn() == TurnAsked("rollout-0")
    for actor in actors:
        until(actor, lambda one: one.wanted)
    stop = threading.Event()
    stop.set()
    assert not rollout.wait(stop), "a wait ends when the run stops"
    for actor in reversed(actors):
        actor.give(Version(0, 3))
        assert not actor.held and not actor.wanted
    assert job.pass_turn() == TurnGiven("actor", version=(0, 3))
    assert rollout.wait() and rollout.version == Version(0, 3)
    assert job.events.empty()


def test_rank_0_gives_once_all_ranks_have_freed_their_memory(job: Job) -> None:
    meeting = threading.Barrier(2)
    actors = [job.holder("actor", rank, meet=lambda: meeting.wait(DEADLINE_S)) for rank in range(2)]
    for actor in actors:
        actor.ask()
    job.pass_turn()
    assert all(actor.wait() for actor in actors)
    first = threading.Thread(target=actors[0].give, daemon=True)
    first.start()
    assert job.events.empty() and first.is_alive()
    actors[1].give()
    first.join(DEADLINE_S)
    assert job.pass_turn() == TurnGiven("actor")


def test_a_gang_that_died_between_asking_and_its_grant_hangs_nobody(job: Job) -> None:
    actor, rollout = job.holder("actor"), job.holder("rollout-0")
    actor.ask()
    job.pass_turn()
    rollout.ask()
    actor.ask()
    assert actor.wait()
    # The rollout dies, and what it said arrives after its exit was noticed.
    late = job.events.get(timeout=DEADLINE_S)
    job.pass_turn(TurnLost("rollout-0"))
    job.pass_turn(late)
    assert job.turn.waiting == ()
    job.turn.start_attempt("rollout-0", 1)
    again = job.holder("rollout-0", attempt=1)
    again.ask()
    assert job.pass_turn() == TurnAsked("rollout-0", attempt=1)
    actor.give()
    job.pass_turn()
    assert again.wait() and not rollout.held


def test_messages_count_once_and_only_those_of_the_job(job: Job) -> None:
    said = TurnMessage(Word.ASKED, "actor", 0, 0).to_json()
    store = job.client()
    store.queue_push(INBOX, said)
    store.queue_push(INBOX, said)  # as a stranger repeats it
    connect_store(job.store.host, job.store.port, TIMEOUT).queue_push(INBOX, b"x" * 100)
    store.queue_push(INBOX, TurnMessage(Word.GIVEN, "actor", 0, 1, (0, 2)).to_json())
    assert job.pass_turn() == TurnAsked("actor")
    assert job.pass_turn() == TurnGiven("actor", version=(0, 2))
    assert job.events.empty()


def test_a_trainer_keeps_the_devices_while_rows_may_come() -> None:
    def yields(*said: tuple[bool, float, bool]) -> bool:
        return YieldRule(said).should_yield

    parked, soon = YieldRule.PARKED_S, YieldRule.PARKED_S / 2
    assert not yields((False, parked, False), (False, parked, False)), "the other side has not asked for the devices"
    assert yields((False, parked, True), (False, 9.0, False))
    assert not yields((False, soon, True), (False, 9.0, True)), "an answer may be on its way"
    assert not yields((False, 0.0, True)), "it reads rows"
    assert not yields((True, 0.0, True), (False, parked, True)), "a part of a round is here: the rest comes"
    assert yields((True, 0.0, True), (False, YieldRule.SKEW_S, True)), "its unit died: the rest is generated again"
    assert YieldRule([(True, 0.0, True), (True, 0.0, True)]).all_have_rounds and not yields((True, 0.0, True))


def test_ranks_that_get_another_ones_rounds_have_no_say_in_yielding() -> None:
    """Of a replica of several ranks, one asks the queue. The others are silent, or, where rows go from device to
    device, ready for whatever comes."""
    parked, soon, follows = YieldRule.PARKED_S, YieldRule.PARKED_S / 2, math.inf
    for ready in (False, True):
        follower = (ready, follows, True)
        assert YieldRule([(False, parked, True), follower]).should_yield
        assert not YieldRule([(False, soon, True), follower]).should_yield
        assert not YieldRule([(True, 0.0, True), follower]).should_yield, "its round is on the way"
        stuck = (False, YieldRule.SKEW_S, True)
        assert not YieldRule([(True, 0.0, True), follower, (False, parked, True), follower]).should_yield
        assert YieldRule([(True, 0.0, True), follower, stuck, follower]).should_yield
