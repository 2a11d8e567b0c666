"""The collective path: whole versions, deaths that cost a deadline at most, one group for as long as nobody changes."""

import itertools
import signal

import pytest
from weight_run import WeightRun, ask, ask_all, steps

from weightsync.version import Version

DEADLINE_S = 3.0
SLACK_S = 15.0
"""For a machine that is busy: what a wait that should have ended may take longer."""


@pytest.fixture(autouse=True)
def _by_broadcast(weight_run: WeightRun) -> None:
    weight_run.configure(broadcast=True, timeout_s=DEADLINE_S)


def broadcast_to(run: WeightRun, version: Version, *receivers: object) -> float:
    """Publish a version and see it loaded; returns the longest time that a rank was held up (s)."""
    held_up = [max(each) for each in ask_all(run.trainers, "publish", version)]
    assert ask_all(receivers, "load_from", version) == [(version, True)] * len(receivers)
    return max(held_up)


@pytest.mark.parametrize(
    ("cut", "dtype"), [("rows", "bfloat16"), pytest.param("columns", "float32", marks=pytest.mark.gate)]
)
def test_every_version_that_is_broadcast_is_whole_and_what_it_claims(
    weight_run: WeightRun, cut: str, dtype: str
) -> None:
    weight_run.configure(cut=cut, dtype=dtype)
    receivers = weight_run.start_node("a", "b", dtype=dtype)
    last = Version(0, 30)
    for child in receivers:
        child.tell(("follow", last))
    for version in steps(0, 30):  # as a trainer does: no rank begins a step before the others
        weight_run.publish(version, wait=False)
    for child in receivers:
        loads = child.hear()
        assert all(whole for _, whole in loads)
        assert loads[-1] == (last, True)
    assert ask_all(weight_run.trainers, "wait") == ["delivered"] * 2
    assert weight_run.status().newest == last
    weight_run.end(*weight_run.trainers, *receivers, weight_run.agent)


def test_group_is_built_once_for_as_long_as_the_members_are_the_same(weight_run: WeightRun) -> None:
    receivers = weight_run.start_node("a", "b")
    versions = (Version(0, step) for step in itertools.count(1))
    while min(ask_all(receivers, "groups_built")) == 0:  # each joins when it is ready
        broadcast_to(weight_run, next(versions), *receivers)
    built = ask_all(weight_run.trainers, "groups_built")
    for _ in range(4):
        newest = next(versions)
        broadcast_to(weight_run, newest, *receivers)
    assert ask_all(weight_run.trainers, "groups_built") == built
    late = weight_run.start_receivers("late")[0]
    assert ask(late, "load", newest.step) == (newest, True), "from the agent"
    while ask(late, "groups_built") == 0:
        broadcast_to(weight_run, next(versions), *receivers, late)
    for _ in range(2):
        broadcast_to(weight_run, next(versions), *receivers, late)
    assert ask(late, "groups_built") == 1, "one per sender"
    assert ask_all(weight_run.trainers, "groups_built") == [number + 1 for number in built]


@pytest.mark.gate
def test_receiver_that_was_killed_before_a_broadcast_is_left_out(weight_run: WeightRun) -> None:
    doomed, other = weight_run.start_node("doomed", "other")
    for version in steps(1, 2):
        broadcast_to(weight_run, version, doomed, other)
    doomed.kill()
    assert broadcast_to(weight_run, Version(0, 3), other) < DEADLINE_S + SLACK_S
    for version in steps(4, 6):
        assert broadcast_to(weight_run, version, other) < DEADLINE_S
    assert ask(weight_run.start_receivers("doomed")[0], "load", 6) == (Version(0, 6), True)


def test_receiver_that_is_killed_in_a_broadcast_costs_a_deadline_once(weight_run: WeightRun) -> None:
    weight_run.configure(wide=4000, bucket_bytes=2**18)  # more than sockets hold
    doomed, other = weight_run.start_node("doomed", "other")
    for version in steps(1, 2):
        broadcast_to(weight_run, version, doomed, other)
    assert ask(doomed, "stop_in_broadcast") == "will stop"
    for trainer in weight_run.trainers:
        trainer.tell(("publish", Version(0, 3)))
    assert doomed.hear() == "midway"
    doomed.kill()
    assert all(max(trainer.hear()) < 2 * DEADLINE_S + SLACK_S for trainer in weight_run.trainers)
    assert ask(other, "load", 3) == (Version(0, 3), True)
    for version in steps(4, 6):
        assert broadcast_to(weight_run, version, other) < DEADLINE_S


def test_stopped_receiver_costs_a_deadline_and_catches_up(weight_run: WeightRun) -> None:
    stopped, other = weight_run.start_node("stopped", "other")
    for version in steps(1, 2):
        broadcast_to(weight_run, version, stopped, other)
    stopped.signal(signal.SIGSTOP)
    for version in steps(3, 6):
        assert broadcast_to(weight_run, version, other) < 2 * DEADLINE_S + SLACK_S
    stopped.signal(signal.SIGCONT)
    assert ask(stopped, "load", 6) == (Version(0, 6), True)
    for version in steps(7, 8):
        broadcast_to(weight_run, version, stopped, other)


@pytest.mark.gate
def test_damaged_message_is_caught_and_the_agent_has_the_version(weight_run: WeightRun) -> None:
    weight_run.configure(tampers=1)
    receivers = weight_run.start_node("a", "b")
    for version in steps(1, 5):
        broadcast_to(weight_run, version, *receivers)
    assert ask_all(weight_run.trainers, "tampers_left") == [0, 0]


def test_trainer_that_comes_back_broadcasts_to_the_same_receivers(weight_run: WeightRun) -> None:
    receivers = weight_run.start_node("a", "b")
    for version in steps(1, 2):
        broadcast_to(weight_run, version, *receivers)
    for trainer in weight_run.trainers:
        trainer.kill()
    assert ask_all(receivers, "load_again") == [(Version(0, 2), True)] * 2
    weight_run.configure(epoch="1")
    weight_run.start_trainers()
    for version in steps(3, 5, lineage=1):
        broadcast_to(weight_run, version, *receivers)


def test_agent_that_is_gone_leaves_the_trainer_to_itself(weight_run: WeightRun) -> None:
    receivers = weight_run.start_node("a", "b")
    for version in steps(1, 2):
        broadcast_to(weight_run, version, *receivers)
    weight_run.agent.kill()
    for held_up in ask_all(weight_run.trainers, "publish", Version(0, 3)):
        assert max(held_up) < 2 * DEADLINE_S + SLACK_S
    weight_run.start_agent()
    assert ask_all(receivers, "load", 3) == [(Version(0, 3), True)] * 2
    for version in steps(4, 6):
        broadcast_to(weight_run, version, *receivers)


def test_stop_ends_a_broadcast_that_waits_for_a_stopped_receiver(weight_run: WeightRun) -> None:
    weight_run.configure(timeout_s=60.0)
    stopped, other = weight_run.start_node("stopped", "other")
    for version in steps(1, 2):
        broadcast_to(weight_run, version, stopped, other)
    stopped.signal(signal.SIGSTOP)
    for child in weight_run.trainers:
        child.tell(("publish_until_stopped", Version(0, 3)))
        assert child.hear() == "publishing"
    for child in weight_run.trainers:
        child.tell("stop")
    for child in weight_run.trainers:
        (after_s,) = child.hear()
        assert after_s < SLACK_S
    assert ask_all(weight_run.trainers, "wait") == ["delivered"] * 2
    assert ask(other, "load", 3) == (Version(0, 3), True)
    stopped.signal(signal.SIGCONT)
    assert ask(stopped, "load", 3) == (Version(0, 3), True)
