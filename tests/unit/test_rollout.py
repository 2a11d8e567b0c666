"""The rollout loop with a queue and weights in memory, and the engine that sleeps."""

import itertools
import threading
from collections import deque
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import workers.rollout.loop as rollout
from asyncflow.errors import TrainingDiverged, WeightsLate, WeightSyncError
from asyncflow.timeline import NoTimeline
from tq.client.lease import Lease
from tq.columns import Column, PackedBatch
from tq.messages import LeaseGrant
from weightsync.version import Version
from workers.engines.sim.decode_times import SimLengths
from workers.engines.sim.engine import SimGenerateEngine
from workers.engines.weight_path import HeldWeights
from workers.rollout.loop import RolloutLoop
from workers.rollout.outbox import RolloutLease
from workers.rollout.rollouts import SingleTurn
from workers.rows.finished import RolloutRequest
from workers.settings.schedule import ScheduleMode
from workers.settings.sim import SimConfig

DEADLINE_S = 20


class Feed:
    """Leases that the test gives; stands in for `Feeder`."""

    def __init__(self) -> None:
        self.leases: deque[RolloutLease] = deque()
        self.stopped = False
        self.wanted: list[tuple[int, Version]] = []
        self.is_parked = True
        self.needed: Version | None = None

    def take_leases(self) -> list[RolloutLease]:
        return [self.leases.popleft() for _ in range(len(self.leases))]

    def want_rows(self, num_rows: int, *, version: Version) -> None:
        self.wanted.append((num_rows, version))

    def needed_version(self) -> Version | None:
        return self.needed


class Weights:
    """Newer weights, once the test says so; refuses as many turns as it is told."""

    adopts = True

    def __init__(self) -> None:
        self.newest: Version | None = Version(0, 0)
        self.refusals = 0

    def load(self, apply: Any, *, newer_than: Version | None, wait_s: float) -> Version | None:
        if self.newest is None or (newer_than is not None and self.newest <= newer_than):
            return None
        if self.refusals:
            self.refusals -= 1
            return None
        apply({"w": torch.zeros(1)})
        return self.newest

    def wait_for(self, step: int, **_: Any) -> bool:
        return True


class Put(list[tuple[RolloutLease, Any]]):
    """What came out; stands in for `Outbox`."""

    def add_rollout(self, lease: RolloutLease, generation: Any) -> None:
        self.append((lease, generation))

    def check(self) -> None: ...

    def abandon_unsent(self) -> None:
        self.clear()


NO_CALLS: Any = None


def lease(step: int, *rows: int) -> RolloutLease:
    granted = LeaseGrant("actor_rollout", step, step, list(rows), [0] * len(rows), ["storage-0"] * len(rows))
    columns = {
        "prompts": Column.of_rows([torch.tensor([1])] * len(rows)),
        "ground_truth": Column.of_texts(["-"] * len(rows)),
    }
    return RolloutLease(Lease(NO_CALLS, granted), PackedBatch(tuple(rows), columns, (0,) * len(rows)))


def make(mode: ScheduleMode = ScheduleMode.ASYNC, *, timeout_s: float = DEADLINE_S) -> Any:
    """A rollout without processes; responses are instant unless a test says otherwise."""
    sim = SimConfig(lengths="constant", mean_tokens=4, decode_s_per_token=0.0)
    made: Any = object.__new__(RolloutLoop)
    made._config = SimpleNamespace(
        schedule=SimpleNamespace(mode=mode, n_samples_per_prompt=4),
        rollout=SimpleNamespace(is_own=False, engine="sim"),
        roles_text="rollout+actor:1",
        weightsync=SimpleNamespace(timeout_s=timeout_s),
        seed=0,
        deterministic=False,
    )
    made._context = SimpleNamespace(
        timeline=NoTimeline(),
        stopping=threading.Event(),
        report_state=lambda *_, **__: None,
        report_progress=lambda: None,
        config=made._config,
    )
    lengths = SimLengths(sim, samples_per_step=8, seed=0)
    made._engine = SimGenerateEngine(sim, lengths, num_slots=4, max_response_tokens=9)
    made._rollouts = SingleTurn(made._engine)
    made._wake = threading.Event()
    made._receiver, made._feeder, made._outbox = Weights(), Feed(), Put()
    made._weights = HeldWeights(made._context, made._receiver, made._engine.load_weights, loaded=made._loaded)
    made._waiting, made._running = deque(), {}
    made._tickets, made._step, made._noted, made._lineage = itertools.count(), 0, None, 0
    made._draining = False
    made._busy = rollout.ExitStack()
    made._turn, made._awake, made._noted_asleep = None, True, ""
    return made


class Turn:
    """The devices' turn, as the test says; stands in for `TurnHolder`."""

    def __init__(self) -> None:
        self.held = self.asked = self.wanted = self.wanted_at_once = False
        self.version: Version | None = None

    def ask(self) -> None:
        self.asked = True

    def give(self) -> None:
        self.held = self.wanted = False

    def grant(self, version: Version | None = None) -> None:
        self.held, self.asked, self.wanted, self.version = True, False, False, version


def make_sharing(mode: ScheduleMode = ScheduleMode.ASYNC) -> Any:
    """A rollout that shares its devices and sleeps, as after its start; its responses never end by themselves."""
    loop = make(mode)
    loop._context.job, loop._context.start_step = SimpleNamespace(lineage=0), 0
    slow = SimConfig(lengths="constant", mean_tokens=4, decode_s_per_token=1e3)
    lengths = SimLengths(slow, samples_per_step=8, seed=0)
    loop._engine = SimGenerateEngine(slow, lengths, num_slots=4, max_response_tokens=9)
    loop._engine.sleep()
    loop._rollouts = SingleTurn(loop._engine)
    loop._weights = HeldWeights(loop._context, loop._receiver, loop._engine.load_weights, loaded=loop._loaded)
    loop._turn, loop._awake = Turn(), False
    loop._wake.set()  # nothing waits
    return loop


def look(loop: Any) -> bool:
    """Begin a turn of the loop; returns whether it may draw."""
    loop._take_leases()
    loop._wake.set()
    stays: bool = loop._stays_awake(loop._turn)
    return stays


def turn(loop: Any) -> None:
    """One turn of the loop."""
    loop._take_leases()
    loop._swap_if_due()
    loop._fill()
    loop._generate()


def versions(put: Put) -> dict[int, list[int]]:
    return {generation.index: generation.versions_A.tolist() for _, generation in put}


def test_row_that_is_leased_again_while_it_runs_is_answered_for_both_leases() -> None:
    loop = make()
    first, again = lease(1, 5), lease(2, 5)
    loop._feeder.leases.extend([first, again])
    turn(loop)
    assert [one for one, _ in loop._outbox] == [first, again], "the queue knows which of them is void"
    assert not loop._running


def test_async_takes_newer_weights_before_it_begins_a_step() -> None:
    loop = make()
    turn(loop)
    loop._feeder.leases.append(lease(1, 0))
    turn(loop)
    loop._rollouts.begin([RolloutRequest(7, 99, 0, torch.tensor([1]))])  # one that still runs
    loop._running[99] = lease(1, 7)
    loop._receiver.newest = Version(0, 1)
    loop._feeder.leases.append(lease(1, 1))
    loop._swap_if_due()
    assert loop._weights.version == Version(0, 0), "not inside a step"
    loop._feeder.leases.append(lease(2, 8))
    turn(loop)
    assert loop._weights.version == Version(0, 1)
    assert versions(loop._outbox)[8] == [1] * 4


def test_substep_takes_newer_weights_at_once() -> None:
    loop = make(ScheduleMode.SUBSTEP)
    turn(loop)
    loop._rollouts.begin([RolloutRequest(7, 99, 0, torch.tensor([1]))])
    loop._receiver.newest = Version(0, 1)
    loop._swap_if_due()
    assert loop._weights.version == Version(0, 1)


def test_engine_that_cannot_be_interrupted_gets_nothing_new_until_it_took_the_weights() -> None:
    loop = make()
    loop._engine.interruptible = False
    loop._weights.load_newest()
    loop._feeder.leases.append(lease(1, 0))
    loop._take_leases()
    loop._fill()
    loop._receiver.newest = Version(0, 1)
    loop._feeder.leases.append(lease(2, 8))
    loop._take_leases()
    loop._swap_if_due()
    loop._fill()
    assert (loop._engine.num_running, len(loop._waiting)) == (1, 1)
    loop._generate()
    loop._swap_if_due()
    loop._fill()
    loop._generate()
    assert versions(loop._outbox) == {0: [0] * 4, 8: [1] * 4}


def test_turn_that_was_refused_is_asked_for_again_soon() -> None:
    loop = make(ScheduleMode.SUBSTEP)
    loop._receiver.refusals = 1
    loop._swap_if_due()
    assert loop._weights.version is None
    assert loop._wake.wait(DEADLINE_S)
    loop._swap_if_due()
    assert loop._weights.version == Version(0, 0)


def test_stop_ends_the_wait_for_a_turn() -> None:
    loop = make()
    loop._receiver.refusals = 10**9
    loop._context.stopping.set()
    loop._weights.wait_for(Version(0, 0))
    assert loop._weights.version is None


def test_turn_that_never_comes_is_an_error() -> None:
    loop = make(timeout_s=0.0)
    loop._receiver.refusals = 10**9
    with pytest.raises(WeightSyncError, match="no turn to load them came within 0 s"):
        loop._weights.wait_for(Version(0, 0))


def test_no_more_is_wanted_than_there_is_room_for() -> None:
    loop = make()
    loop._engine = SimGenerateEngine(
        SimConfig(lengths="constant", mean_tokens=4, decode_s_per_token=1e3),
        SimLengths(SimConfig(lengths="constant", mean_tokens=4), samples_per_step=8, seed=0),
        num_slots=4,
        max_response_tokens=9,
    )
    loop._weights.load_newest()
    loop._feeder.leases.append(lease(1, 0, 1, 2))
    loop._take_leases()
    loop._fill()
    assert loop._feeder.wanted[-1][0] == 1
    loop._feeder.leases.append(lease(1, 3, 4))
    loop._take_leases()
    loop._fill()
    assert loop._feeder.wanted[-1][0] == -1, "one waits"


@pytest.mark.parametrize(("deterministic", "room"), [(False, 2), (True, 0)])
def test_free_places_are_filled_while_others_run_unless_the_run_is_deterministic(
    deterministic: bool, room: int
) -> None:
    loop = make()
    loop._config.deterministic = deterministic
    slow = SimConfig(lengths="constant", mean_tokens=4, decode_s_per_token=1e3)
    lengths = SimLengths(slow, samples_per_step=8, seed=0)
    loop._engine = SimGenerateEngine(slow, lengths, num_slots=4, max_response_tokens=9)
    loop._rollouts = SingleTurn(loop._engine)
    loop._weights.load_newest()
    loop._feeder.leases.append(lease(1, 0, 1))
    loop._take_leases()
    loop._fill()
    assert loop._feeder.wanted[-1][0] == room
    loop._feeder.leases.append(lease(1, 2))
    loop._take_leases()
    loop._fill()
    assert loop._engine.num_running == (2 if deterministic else 3)


def test_responses_are_abandoned_when_the_trainer_went_back_to_a_checkpoint() -> None:
    loop = make()
    loop._receiver.newest = Version(0, 9)
    turn(loop)
    loop._rollouts.begin([RolloutRequest(7, 99, 0, torch.tensor([1]))])
    loop._running[99] = lease(10, 7)
    loop._waiting.append((lease(10, 8), RolloutRequest(8, 98, 0, torch.tensor([1]))))
    loop._feeder.leases.append(lease(10, 6))
    loop._receiver.newest = Version(1, 4)
    loop._swap_if_due()
    assert loop._weights.version == Version(1, 4)
    assert not loop._running
    assert not loop._waiting
    assert loop._engine.num_running == 0
    loop._feeder.leases.append(lease(5, 7))
    turn(loop)
    assert versions(loop._outbox) == {7: [4] * 4}


def test_responses_that_a_later_lineage_overtook_while_it_was_loaded_are_abandoned() -> None:
    loop = make(ScheduleMode.SUBSTEP)
    turn(loop)
    loop._rollouts.begin([RolloutRequest(7, 99, 0, torch.tensor([1]))])
    loop._running[99] = lease(1, 7)
    loop._receiver.newest = Version(1, 0)
    loop._weights.load_newest()
    assert loop._engine.num_running == 0
    assert not loop._running


def test_weights_that_are_no_numbers_end_the_run() -> None:
    loop = make()
    loop._weights.load_newest()
    loop._feeder.leases.append(lease(1, 0))
    step = loop._engine.step

    def diverged(wake: threading.Event) -> list[Any]:
        return [replace(one, log_probs_R=one.log_probs_R * float("nan")) for one in step(wake)]

    loop._engine.step = diverged
    with pytest.raises(TrainingDiverged, match="weights of step 0"):
        turn(loop)
    assert not loop._outbox


def test_a_sleeping_rollout_asks_once_there_are_weights_and_wakes_with_the_newest() -> None:
    loop = make_sharing()
    loop._receiver.newest = None
    assert not look(loop) and not loop._turn.asked, "nothing to draw with"
    loop._receiver.newest = Version(0, 0)
    assert not look(loop) and loop._turn.asked
    loop._turn.grant(Version(0, 0))
    assert not look(loop), "look again, since much may have happened meanwhile"
    assert look(loop) and loop._weights.version == Version(0, 0)
    assert loop._feeder.wanted[-1] == (4, Version(0, 0))


def test_it_gives_the_devices_away_when_they_are_wanted_and_nothing_is_to_be_drawn() -> None:
    loop = make_sharing()
    loop._turn.grant()
    look(loop)
    assert look(loop), "nobody wants them"
    loop._turn.wanted, loop._feeder.is_parked = True, False
    assert look(loop), "prompts may be on their way"
    loop._feeder.leases.append(lease(1, 0))
    loop._feeder.is_parked = True
    assert look(loop)
    loop._fill()
    assert look(loop), "a response runs"
    loop._engine.abort()
    loop._running.clear()
    assert not look(loop) and not loop._turn.held
    assert not look(loop) and not loop._turn.asked
    assert loop._feeder.wanted[-1] == (4, Version(0, 0)), "asleep, it goes on leasing"
    loop._feeder.leases.append(lease(2, 1))
    assert not look(loop) and loop._turn.asked


def test_it_asks_when_the_weights_that_its_next_prompts_need_are_there() -> None:
    loop = make_sharing()
    loop._turn.grant()
    look(loop)
    loop._turn.wanted = True
    assert not look(loop)
    loop._feeder.needed = Version(0, 2)
    loop._receiver.newest = Version(0, 1)
    assert not look(loop) and not loop._turn.asked
    loop._receiver.newest = Version(0, 2)
    assert not look(loop) and loop._turn.asked


def test_colocate_async_interrupts_responses_which_go_on_with_newer_weights() -> None:
    loop = make_sharing(ScheduleMode.COLOCATE_ASYNC)
    loop._turn.grant()
    look(loop)
    loop._feeder.leases.append(lease(1, 0, 1))
    assert look(loop)
    loop._fill()
    loop._turn.wanted = True
    assert not look(loop) and not loop._turn.held
    assert loop._engine.num_running == 2 and len(loop._running) == 2, "nothing is lost"
    assert not look(loop) and loop._turn.asked, "they want to go on"
    loop._receiver.newest = Version(0, 1)
    loop._turn.grant(Version(0, 1))
    look(loop)
    assert look(loop) and loop._weights.version == Version(0, 1) and loop._engine.num_running == 2


def test_a_rollout_that_wakes_loads_the_weights_that_it_had_if_there_are_no_newer_ones() -> None:
    loop = make_sharing()
    loaded: list[Version] = []
    loop._weights._loaded = loaded.append
    for _ in range(2):
        loop._turn.grant(Version(0, 0))
        look(loop)
        assert look(loop)
        loop._turn.wanted = True
        assert not look(loop)
    assert loaded == [Version(0, 0), Version(0, 0)]


def test_it_does_not_wait_for_published_weights_while_the_actor_wants_the_devices_back() -> None:
    loop = make_sharing()
    loop._turn.grant(Version(0, 3))  # published, but not here yet
    loop._turn.wanted = True
    look(loop)
    assert loop._weights.version == Version(0, 0)
    loop._turn.grant(Version(0, 3))
    loop._receiver.newest, loop._turn.wanted = None, True
    loop._fall_asleep(loop._turn)
    loop._turn.grant(Version(0, 3))
    loop._turn.wanted = True
    assert not look(loop) and not loop._turn.held, "without weights it sleeps on"


def test_published_weights_that_never_arrive_are_an_error() -> None:
    loop = make_sharing()
    loop._config.weightsync.timeout_s = 0.0
    loop._turn.grant(Version(0, 3))  # damaged on their way, say, and given up
    with pytest.raises(WeightsLate, match="weights of .* were published, but did not arrive within 0 s"):
        look(loop)


def test_what_a_trainer_that_starts_again_made_void_is_interrupted_in_every_mode() -> None:
    loop = make_sharing()
    loop._turn.grant()
    look(loop)
    loop._feeder.leases.append(lease(1, 0))
    assert look(loop)
    loop._fill()
    loop._turn.wanted = True
    assert look(loop)
    loop._turn.wanted_at_once = True
    assert not look(loop) and not loop._turn.held


def test_responses_of_an_abandoned_lineage_are_dropped_asleep() -> None:
    loop = make_sharing(ScheduleMode.COLOCATE_ASYNC)
    loop._turn.grant()
    look(loop)
    loop._feeder.leases.append(lease(1, 0))
    look(loop)
    loop._fill()
    loop._turn.wanted = True
    look(loop)
    loop._receiver.newest = Version(1, 0)
    assert not look(loop)
    assert loop._engine.num_running == 0 and not loop._running
