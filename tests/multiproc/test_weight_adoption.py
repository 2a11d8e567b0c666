"""Engines that compute with what they are given: it stays as it is until they have loaded the next version."""

import pytest
from waiting import wait_until
from weight_model import weights
from weight_run import WeightRun, ask, ask_all

from weightsync.version import Version


@pytest.fixture(params=["staged", "broadcast"])
def adopting(weight_run: WeightRun, request: pytest.FixtureRequest) -> WeightRun:
    weight_run.configure(adopts=True, broadcast=request.param == "broadcast", timeout_s=5.0)
    return weight_run


@pytest.mark.gate
def test_weights_in_use_stay_whole_whatever_comes_meanwhile(adopting: WeightRun) -> None:
    receivers = adopting.start_node("a", "b")
    for step in range(1, 13):
        version = Version(0, step)
        adopting.publish(version)
        if step > 1:
            assert ask_all(receivers, "still_whole") == [True] * 2
        if step % 4 in (0, 1):
            assert ask_all(receivers, "load", step) == [(version, True)] * 2
            assert ask_all(receivers, "still_whole") == [True] * 2
    wait_until(lambda: adopting.status().holders == {}, "they have copies: the slots are free", deadline_s=60)
    adopting.end(*adopting.trainers, *receivers, adopting.agent)


def test_slot_that_is_damaged_after_it_was_loaded_harms_nobody(weight_run: WeightRun) -> None:
    weight_run.configure(adopts=True)
    receiver = weight_run.start_node("rollout-0")[0]
    version = Version(0, 1)
    weight_run.publish(version)
    assert ask(receiver, "load", 1) == (version, True)
    weight_run.damage(version, "head", weights(version)["head"].numpy().tobytes())
    assert ask(receiver, "still_whole")
    late = weight_run.start_receivers("late")[0]
    assert ask(late, "load", 1) == (version, True), "written again by the trainer"
    assert ask_all([receiver, late], "still_whole") == [True] * 2
