"""Damaged weights are noticed before anybody computes with them, and mended where a good copy exists."""

import re
import signal

import pytest
from weight_model import weights
from weight_run import WeightRun, ask, ask_all

from asyncflow.errors import WeightSyncError
from weightsync.version import Version

HEAD = "head"


def head_bytes(version: Version) -> bytes:
    return weights(version)[HEAD].numpy().tobytes()


@pytest.mark.gate
def test_damaged_slot_is_written_again_by_the_trainer_rank(weight_run: WeightRun) -> None:
    weight_run.start_node()
    version = Version(0, 1)
    weight_run.publish(version)
    weight_run.damage(version, HEAD, head_bytes(version))
    receivers = weight_run.start_receivers("a", "b")
    assert ask_all(receivers, "load", 1) == [(version, True)] * 2
    weight_run.damage(version, HEAD, head_bytes(version))
    late = weight_run.start_receivers("late")[0]
    assert ask(late, "load", 1) == (version, True)
    weight_run.publish(Version(0, 2))
    assert ask_all([*receivers, late], "load", 2) == [(Version(0, 2), True)] * 3


def test_damage_that_nobody_can_mend_is_an_error_and_the_next_version_works(weight_run: WeightRun) -> None:
    receiver = weight_run.start_node("rollout-0")[0]
    old, damaged, good = (Version(0, step) for step in (1, 2, 3))
    weight_run.publish(old)
    assert ask(receiver, "load", 1) == (old, True)
    receiver.signal(signal.SIGSTOP)
    weight_run.publish(damaged)
    weight_run.damage(damaged, HEAD, head_bytes(damaged))
    assert ask_all(weight_run.trainers, "update", good) == ["updated"] * 2
    receiver.signal(signal.SIGCONT)
    error = ask(receiver, "load", 2, 3.0)
    assert isinstance(error, WeightSyncError)
    assert re.search(r"step 2 did not come .* bucket \d+ does not match its checksum", str(error))
    assert ask(receiver, "load_again") == (old, True)
    late = weight_run.start_receivers("late")[0]
    assert ask(late, "load", 1) == (old, True)
    weight_run.publish(good)
    assert ask_all([receiver, late], "load", 3) == [(good, True)] * 2


def test_damage_is_mended_from_another_node(weight_run: WeightRun) -> None:
    weight_run.start_node(nodes=2)
    other = weight_run.start_agent(1, nodes=2)
    version = Version(0, 1)
    weight_run.publish(version)
    far = weight_run.start_receivers("far", node=1)[0]
    assert ask(far, "load", 1) == (version, True)
    assert ask_all(weight_run.trainers, "update", Version(0, 2)) == ["updated"] * 2
    weight_run.damage(version, HEAD, head_bytes(version))
    assert ask(weight_run.start_receivers("near")[0], "load", 1) == (version, True)
    assert weight_run.status().fetched_bytes > 0
    weight_run.damage(version, HEAD, head_bytes(version), other)
    assert ask(weight_run.start_receivers("far-too", node=1)[0], "load", 1) == (version, True)


def test_damaged_transfer_between_agents_is_fetched_again(weight_run: WeightRun) -> None:
    weight_run.start_node(nodes=2, lies=1)
    other = weight_run.start_agent(1, nodes=2)
    far = weight_run.start_receivers("far", node=1)[0]
    weight_run.publish(Version(0, 1))
    assert ask(far, "load", 1) == (Version(0, 1), True)
    assert ask(weight_run.agent, "lies_left") == 0
    assert weight_run.status(other).newest == Version(0, 1)


@pytest.mark.parametrize("adopts", [False, True])
def test_late_receiver_takes_the_older_version_when_the_newest_cannot_be_mended(
    weight_run: WeightRun, adopts: bool
) -> None:
    weight_run.configure(adopts=False)
    near = weight_run.start_node("near")[0]
    old, damaged = Version(0, 1), Version(0, 2)
    weight_run.publish(old)
    assert ask(near, "load", 1) == (old, True)
    near.signal(signal.SIGSTOP)  # it holds the older version, whose slot would be used again
    weight_run.publish(damaged)
    weight_run.configure(adopts=adopts)
    weight_run.damage(damaged, HEAD, head_bytes(damaged))
    for child in weight_run.trainers:
        child.kill()
    late = weight_run.start_receivers("late")[0]
    assert ask(late, "load", 1) == (old, True)
