"""Weights on two nodes: what the second node's receivers get, and what travels to them."""

import signal
from typing import Any

import pytest
from weight_run import WeightRun, ask, ask_all, steps

from weightsync.version import Version


def start_two_nodes(run: WeightRun, **settings: Any) -> Any:
    """Start the trainer's node and another one; returns the latter's agent."""
    run.start_node(nodes=2, **settings)
    return run.start_agent(1, nodes=2, **settings)


@pytest.mark.parametrize("on_wire", [False, pytest.param(True, marks=pytest.mark.gate)])
def test_every_bucket_travels_once_whatever_the_number_of_receivers(weight_run: WeightRun, on_wire: bool) -> None:
    other = start_two_nodes(weight_run, on_wire=on_wire)
    far = weight_run.start_receivers("far-0", "far-1", "far-2", node=1)
    num_bytes = weight_run.plan().num_bytes
    for version in steps(1, 6):
        weight_run.publish(version)
        assert ask_all(far, "load", version.step) == [(version, True)] * 3
        assert weight_run.status(other).fetched_bytes == version.step * num_bytes
    assert weight_run.status().fetched_bytes == 0


def test_node_that_is_slower_than_the_trainer_skips_versions(weight_run: WeightRun) -> None:
    weight_run.configure(cut="columns")
    start_two_nodes(weight_run, on_wire=True)
    far = weight_run.start_receivers("far-0", "far-1", node=1)
    last = Version(0, 40)
    for child in (*far, *weight_run.trainers):
        child.tell(("follow", last) if child in far else ("publish", *steps(0, 40)))
    for trainer in weight_run.trainers:
        assert len(trainer.hear()) == 41
    for child in far:
        loads = child.hear()
        assert all(whole for _, whole in loads)
        assert loads[-1] == (last, True)


@pytest.mark.parametrize("on_wire", [False, True])
def test_deltas_take_less_and_lose_nothing(weight_run: WeightRun, on_wire: bool) -> None:
    weight_run.configure(wide=100, bucket_bytes=2**14)
    other = start_two_nodes(weight_run, delta=True, on_wire=on_wire)
    far = weight_run.start_receivers("far", node=1)[0]
    weight_run.publish(Version(0, 1))
    assert ask(far, "load", 1) == (Version(0, 1), True)
    num_bytes, before = weight_run.plan().num_bytes, weight_run.status(other).fetched_bytes
    assert before == num_bytes
    for version in steps(2, 7):
        weight_run.publish(version)
        assert ask(far, "load", version.step) == (version, True)
    assert weight_run.status(other).fetched_bytes - before < 6 * num_bytes / 5


@pytest.mark.gate
def test_second_node_that_restarts_is_filled_by_the_first(weight_run: WeightRun) -> None:
    other = start_two_nodes(weight_run)
    far = weight_run.start_receivers("far", node=1)[0]
    weight_run.publish(*steps(1, 3))
    assert ask(far, "load", 3) == (Version(0, 3), True)
    other.kill()
    weight_run.publish(*steps(4, 6))
    assert ask(far, "load_again") == (Version(0, 3), True)
    weight_run.start_agent(1, nodes=2)
    late = weight_run.start_receivers("late", node=1)[0]
    assert ask_all([far, late], "load", 6) == [(Version(0, 6), True)] * 2


def test_first_node_that_restarts_is_filled_by_the_second_when_the_trainer_is_gone(weight_run: WeightRun) -> None:
    start_two_nodes(weight_run)
    far = weight_run.start_receivers("far", node=1)[0]
    weight_run.publish(*steps(1, 3))
    assert ask(far, "load", 3) == (Version(0, 3), True)
    weight_run.end(*weight_run.trainers)
    weight_run.agent.kill()
    weight_run.start_agent(nodes=2)
    assert ask(weight_run.start_receivers("near")[0], "load", 3) == (Version(0, 3), True)


@pytest.mark.parametrize("on_wire", [False, True])
def test_version_is_completed_from_others_when_an_agent_dies_in_the_middle(
    weight_run: WeightRun, on_wire: bool
) -> None:
    weight_run.configure(wide=400, bucket_bytes=2**14)
    weight_run.start_node(nodes=3, on_wire=on_wire)
    dying = weight_run.start_agent(1, nodes=3, on_wire=on_wire, dies_after=2)
    version = Version(0, 1)
    weight_run.publish(version)
    assert ask(weight_run.start_receivers("mid", node=1)[0], "load", 1) == (version, True)
    weight_run.start_agent(2, nodes=3, on_wire=on_wire)
    assert ask(weight_run.start_receivers("far", node=2)[0], "load", 1) == (version, True)
    dying.process.join(60)
    assert dying.process.exitcode == -signal.SIGKILL


def test_node_gets_versions_only_while_somebody_reads_there(weight_run: WeightRun) -> None:
    other = start_two_nodes(weight_run, on_wire=True)
    num_bytes = weight_run.plan().num_bytes
    weight_run.publish(Version(0, 1), Version(0, 2))
    far = weight_run.start_receivers("far", node=1)[0]
    assert ask(far, "load", 2) == (Version(0, 2), True)
    assert weight_run.status(other).fetched_bytes == num_bytes, "version 1 came though nobody wanted it"
    weight_run.end(far)
    weight_run.publish(Version(0, 3))
    far = weight_run.start_receivers("late", node=1)[0]
    assert ask(far, "load", 3) == (Version(0, 3), True)
    assert weight_run.status(other).fetched_bytes == 2 * num_bytes


def test_two_versions_are_kept_where_nobody_lags_and_older_ones_are_freed(weight_run: WeightRun) -> None:
    other = start_two_nodes(weight_run, on_wire=True)
    far, near = weight_run.start_receivers("far", node=1)[0], weight_run.start_receivers("near")[0]
    for version in steps(1, 6):
        weight_run.publish(version)
        assert ask_all([far, near], "load", version.step) == [(version, True)] * 2
    region_bytes = weight_run.plan().region_bytes
    assert [weight_run.status(agent).slot_bytes for agent in (weight_run.agent, other)] == [2 * region_bytes] * 2


def test_stopped_node_holds_up_neither_the_trainer_nor_its_own_catching_up(weight_run: WeightRun) -> None:
    weight_run.configure(timeout_s=4.0)
    other = start_two_nodes(weight_run)
    far = weight_run.start_receivers("far", node=1)[0]
    near = weight_run.start_receivers("near")[0]
    weight_run.publish(Version(0, 1))
    assert ask(far, "load", 1) == (Version(0, 1), True)
    other.signal(signal.SIGSTOP)
    for version in steps(2, 8):
        weight_run.publish(version)
        assert ask(near, "load", version.step) == (version, True)
    other.signal(signal.SIGCONT)
    assert ask(far, "load", 8) == (Version(0, 8), True)
