"""Engines whose ranks receive by themselves: all load one version, of which each keeps a share. Ranks of a divided copy
receive between two computations."""

import itertools
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
from echo_peers import SECRET, credentials
from rank_peers import NUM_RANKS, Ranks, shared_rank
from torch.distributed import TCPStore
from waiting import wait_until
from weight_run import WeightRun, ask, ask_all, steps

from asyncflow.clock import HostClock
from asyncflow.errors import EngineFailed, WeightsLate
from asyncflow.job import Job
from weightsync.receiver import RanksReceiver
from weightsync.version import Version

DEADLINE_S = 3.0
SLACK_S = 15.0


class Said:
    """The spans of the ranks: (name, version, rank)."""

    def __init__(self) -> None:
        self.spans: set[tuple[str, object, object]] = set()

    def span(self, name: str, **attributes: int | float | str) -> AbstractContextManager[None]:
        return nullcontext()

    def record_span(self, name: str, seconds: float, **attributes: int | float | str) -> None:
        self.spans.add((name, attributes["version"], attributes["rank"]))


class User:
    """What uses the engine, in this process."""

    def __init__(
        self, run: WeightRun, store: TCPStore, run_dir: Path, *, lead: str = "weights-0", on_device: bool = False
    ) -> None:
        self.engine = Ranks(run._start, run.setup, store.port)
        self.said, self.arrived = Said(), threading.Event()
        job = Job(
            "127.0.0.1", store.port, SECRET.hex(), os.getpid(), (), 0, "", 100, time.time(), HostClock.from_wall_clock()
        )
        job.save(run_dir)
        self.receiver = RanksReceiver(
            credentials(store.port), "weights-0", "rollout-0", self.engine, run_dir=run_dir, lead=lead,
            arrived=self.arrived.set, takes_turns=True, timeout_s=DEADLINE_S, on_device=on_device, timeline=self.said,
        )  # fmt: skip
        self.held: Version | None = None

    def load(self, version: Version) -> None:
        """Load as soon as this version is at hand."""
        self.receiver.wait_for(version.step, lineage=version.lineage, timeout_s=60)
        while self.held is None or self.held < version:
            self.held = (
                self.receiver.load(lambda _: self.engine.load_held(), newer_than=self.held, wait_s=30) or self.held
            )


@pytest.fixture(name="open_user")
def _open_user(weight_run: WeightRun, store: TCPStore, tmp_path: Path) -> Iterator[Callable[[], User]]:
    weight_run.configure(broadcast=True, timeout_s=DEADLINE_S)
    users: list[User] = []

    def open_one() -> User:
        users.append(User(weight_run, store, tmp_path))
        return users[-1]

    yield open_one
    for user in users:
        user.engine.closed.set()
        for rank in user.engine.ranks:
            rank.kill()
        user.receiver.close()
    wait_until(
        lambda: all(thread.name != "weight-ranks" for thread in threading.enumerate()),
        "threads are left",
        deadline_s=60,
    )


def broadcast_until_all_take_part(run: WeightRun, user: User, versions: Any) -> Version:
    """Publish and load until a version came to every rank by broadcast; returns it."""
    for version in versions:
        run.publish(version, wait=False)
        user.load(version)
        if {("receive weights", version.step, rank) for rank in range(NUM_RANKS)} <= user.said.spans:
            return Version(*version)
    raise AssertionError("no version was broadcast to all ranks")


def test_ranks_load_one_version_of_which_each_keeps_a_share(
    weight_run: WeightRun, open_user: Callable[[], User]
) -> None:
    weight_run.configure(wide=100, bucket_bytes=2**14)
    weight_run.start_node()
    user = open_user()
    versions = iter(steps(1, 30))
    newest = broadcast_until_all_take_part(weight_run, user, versions)
    for version in itertools.islice(versions, 4):
        weight_run.publish(version, wait=False)
        user.load(version)
        newest = version
    assert user.receiver.newest == user.held == newest
    assert newest in user.engine.pauses, "versions are broadcast to several ranks in pauses alone"
    assert weight_run.status().holders == {}
    copies = ask_all(user.engine.ranks, "copies")
    assert all(each and max(each) < weight_run.plan().region_bytes for each in copies), copies
    assert ask_all(user.engine.ranks, "end") == ["closed"] * NUM_RANKS
    user.receiver.close()


@pytest.mark.parametrize("on_device", [pytest.param(False, marks=pytest.mark.gate), True])
def test_ranks_load_what_is_not_broadcast_out_of_the_agents_memory(
    weight_run: WeightRun, store: TCPStore, tmp_path: Path, on_device: bool
) -> None:
    """Tensor by tensor, or bucket by bucket where they take turns with the trainer on devices that share no memory."""
    weight_run.start_node()
    user = User(weight_run, store, tmp_path, lead="", on_device=on_device)
    for version in steps(1, 3):
        weight_run.publish(version)
        user.load(version)
    held, *newer = steps(4, 8)
    weight_run.publish(held)
    user.receiver.wait_for(held.step, timeout_s=60)
    assert user.engine.hold(held)
    weight_run.publish(*newer)
    assert held in weight_run.status().holders["rollout-0-0"], "it is not written again before it is let go"
    user.engine.load_held()
    user.load(newer[-1])
    assert ask_all(user.engine.ranks, "copies") == [[]] * NUM_RANKS
    assert ask_all(user.engine.ranks, "end") == ["closed"] * NUM_RANKS
    user.receiver.close()


def test_nothing_is_loaded_while_one_rank_lags(weight_run: WeightRun, open_user: Callable[[], User]) -> None:
    weight_run.start_node()
    user = open_user()
    versions = iter(steps(1, 30))
    former = broadcast_until_all_take_part(weight_run, user, versions)
    user.engine.ranks[1].signal(signal.SIGSTOP)
    newest = next(versions)
    weight_run.publish(newest)
    from_agent = ("check weights", newest.step, 0)  # the broadcast was called off
    wait_until(lambda: from_agent in user.said.spans, "the other rank has no newer version", deadline_s=60)
    assert user.receiver.newest == former
    assert user.receiver.load(lambda _: pytest.fail("torn"), newer_than=None) is None
    with pytest.raises(WeightsLate, match=f"the engine's ranks have {newest}, {former}; see their log"):
        user.receiver.wait_for(newest.step, timeout_s=0.1)
    user.engine.ranks[1].signal(signal.SIGCONT)
    user.load(newest)
    assert not user.engine.hold(former)


def test_engine_whose_rank_is_killed_in_a_broadcast_fails_and_its_successor_goes_on(
    weight_run: WeightRun, open_user: Callable[[], User]
) -> None:
    weight_run.configure(wide=4000, bucket_bytes=2**18)
    weight_run.start_node()
    user, versions = open_user(), iter(steps(1, 40))
    former = broadcast_until_all_take_part(weight_run, user, versions)
    doomed = user.engine.ranks[1]
    assert ask(doomed, "stop_in_broadcast") == "will stop"
    newest = next(versions)
    for trainer in weight_run.trainers:
        trainer.tell(("publish", newest))
    assert doomed.hear() == "midway"
    doomed.kill()
    user.engine.ranks[0].kill()  # as an engine ends when a rank does
    with pytest.raises(EngineFailed, match="ranks have ended"):
        user.receiver.wait_for(newest.step, timeout_s=60)
    assert user.receiver.newest == former
    assert all(max(trainer.hear()) < 2 * DEADLINE_S + SLACK_S for trainer in weight_run.trainers)
    successor = open_user()
    successor.load(newest)
    broadcast_until_all_take_part(weight_run, successor, versions)


@pytest.fixture(name="start_copy")
def _start_copy(weight_run: WeightRun) -> Callable[..., list[Any]]:
    weight_run.configure(broadcast=True, timeout_s=DEADLINE_S, wide=100, bucket_bytes=2**12)

    def start(*, every: int = 1, life: int = 0) -> list[Any]:
        ranks = [weight_run._start(shared_rank, rank, weight_run.setup, every, life) for rank in range(NUM_RANKS)]
        assert [rank.hear() for rank in ranks] == ["ready"] * NUM_RANKS
        return ranks

    return start


def broadcast_until_all_received(run: WeightRun, ranks: list[Any], generator: Any, versions: Any) -> Version:
    """Publish until the copy's ranks took part in as many transfers as before and one more."""
    before = [len(noted["broadcasts"]) for noted in ask_all(ranks, "noted")]
    for version in versions:
        run.publish(version, wait=False)
        assert ask(generator, "load_from", version) == (version, True)
        assert ask_all(ranks, "load", version.step) == [(version, True)] * NUM_RANKS
        if all(len(noted["broadcasts"]) > was for noted, was in zip(ask_all(ranks, "noted"), before, strict=True)):
            return Version(*version)
    raise AssertionError("no version was broadcast to all ranks")


@pytest.mark.gate
def test_ranks_of_a_divided_copy_receive_their_parts_between_two_computations(
    weight_run: WeightRun, start_copy: Callable[..., list[Any]]
) -> None:
    (generator,) = weight_run.start_node("rollout-0")
    ranks, versions = start_copy(), iter(steps(1, 40))
    broadcast_until_all_received(weight_run, ranks, generator, versions)
    first = ask_all(ranks, "noted")
    for version in itertools.islice(versions, 3):
        weight_run.publish(version, wait=False)
        assert ask_all(ranks, "load", version.step) == [(version, True)] * NUM_RANKS
    noted = ask_all(ranks, "noted")
    assert noted[0]["broadcasts"] == noted[1]["broadcasts"], "all ranks receive after the same computation"
    assert all(began == ended for began, ended in noted[0]["broadcasts"]), "and compute nothing meanwhile"
    assert noted[0]["computed"] > first[0]["computed"] > 0
    assert all(0 < max(each["copies"]) < 0.6 * weight_run.plan().region_bytes for each in noted)
    assert ask_all(ranks, "end") == ["closed"] * NUM_RANKS
    weight_run.end(generator)


def test_a_copy_that_takes_every_third_version_is_waited_for_at_these_alone(
    weight_run: WeightRun, start_copy: Callable[..., list[Any]]
) -> None:
    (generator,) = weight_run.start_node("rollout-0")
    ranks = start_copy(every=3)
    for version in steps(1, 18):
        weight_run.publish(version, wait=False)
        assert ask(generator, "load_from", version) == (version, True)
        if version.step % 3 == 0:
            assert ask_all(ranks, "load", version.step) == [(version, True)] * NUM_RANKS
    noted = ask_all(ranks, "noted")
    assert 3 <= len(noted[0]["broadcasts"]) <= 6
    assert noted[0]["broadcasts"] == noted[1]["broadcasts"]
    # The generator alone, and with the ranks; before, each of them may have come by itself.
    assert ask(generator, "groups_built") <= 4
    assert ask_all(ranks, "end") == ["closed"] * NUM_RANKS


def test_a_rank_of_a_copy_that_is_killed_in_a_broadcast_costs_a_deadline_and_its_successors_take_part(
    weight_run: WeightRun, start_copy: Callable[..., list[Any]]
) -> None:
    weight_run.configure(wide=4000, bucket_bytes=2**18)
    (generator,) = weight_run.start_node("rollout-0")
    ranks, versions = start_copy(), iter(steps(1, 60))
    broadcast_until_all_received(weight_run, ranks, generator, versions)
    assert ask(ranks[1], "stop_in_broadcast") == "will stop"
    newest = next(versions)
    for trainer in weight_run.trainers:
        trainer.tell(("publish", newest))
    assert ranks[1].hear() == "midway"
    ranks[1].kill()
    assert all(max(trainer.hear()) < 2 * DEADLINE_S + SLACK_S for trainer in weight_run.trainers)
    assert ask(generator, "load_from", newest) == (newest, True)
    # The other rank is alone, and nobody waits for it.
    for newest in itertools.islice(versions, 2):
        held_up = [max(each) for each in ask_all(weight_run.trainers, "publish", newest)]
        assert ask(generator, "load_from", newest) == (newest, True)
    assert max(held_up) < DEADLINE_S
    ranks[0].kill()
    successors = start_copy(life=1)
    assert ask_all(successors, "load", newest.step) == [(newest, True)] * NUM_RANKS, "from the agent"
    broadcast_until_all_received(weight_run, successors, generator, versions)


def test_ranks_of_which_one_computes_too_long_take_the_version_from_their_agent(
    weight_run: WeightRun, start_copy: Callable[..., list[Any]]
) -> None:
    (generator,) = weight_run.start_node("rollout-0")
    ranks, versions = start_copy(), iter(steps(1, 40))
    broadcast_until_all_received(weight_run, ranks, generator, versions)
    ranks[1].signal(signal.SIGSTOP)
    newest = next(versions)
    held_up = [max(each) for each in ask_all(weight_run.trainers, "publish", newest)]
    assert max(held_up) < 2 * DEADLINE_S + SLACK_S
    assert ask(generator, "load_from", newest) == (newest, True)
    assert ask(ranks[0], "load", newest.step) == (newest, True)
    ranks[1].signal(signal.SIGCONT)
    assert ask(ranks[1], "load", newest.step) == (newest, True)
    broadcast_until_all_received(weight_run, ranks, generator, versions)
