"""Deaths and stops in the middle of a transfer: the others go on, and an agent that comes back catches up."""

import signal

import pytest
from weight_run import WeightRun, ask, ask_all, steps

from asyncflow.errors import WeightSyncError
from weightsync.version import Version


def test_receivers_that_die_with_slots_in_their_hands_hold_nobody_up(weight_run: WeightRun) -> None:
    weight_run.start_node()
    survivor = weight_run.start_receivers("survivor")[0]
    for step in range(1, 13, 3):
        weight_run.publish(Version(0, step))
        doomed = weight_run.start_receivers(f"doomed-{step}")[0]
        doomed.tell(("load_slowly", step))
        assert doomed.hear() == "inside"
        doomed.kill()
        weight_run.publish(*steps(step + 1, step + 2))
        assert ask(survivor, "load", step + 2) == (Version(0, step + 2), True)


@pytest.mark.gate
def test_rank_that_dies_while_it_writes_leaves_the_older_version(weight_run: WeightRun) -> None:
    receiver = weight_run.start_node("rollout-0")[0]
    weight_run.publish(Version(0, 1))
    first, second = weight_run.trainers
    first.tell(("publish", Version(0, 2)))
    second.tell(("publish_slowly", Version(0, 2)))
    assert len(first.hear()) == 1
    assert second.hear() == "midway"
    second.kill()
    assert ask(receiver, "load", 1) == (Version(0, 1), True)
    assert ask(weight_run.start_receivers("late")[0], "load", 0) == (Version(0, 1), True)
    first.kill()
    weight_run.configure(epoch="1")
    weight_run.start_trainers()
    weight_run.publish(*steps(1, 6, lineage=1))
    assert ask(receiver, "load_from", Version(1, 6)) == (Version(1, 6), True)


@pytest.mark.gate
def test_agent_that_dies_in_the_middle_gets_everything_again(weight_run: WeightRun) -> None:
    receiver = weight_run.start_node("rollout-0")[0]
    weight_run.publish(Version(0, 1))
    assert ask(receiver, "load", 1) == (Version(0, 1), True)
    first, second = weight_run.trainers
    first.tell(("publish", Version(0, 2)))
    second.tell(("publish_slowly", Version(0, 2)))
    assert len(first.hear()) == 1
    assert second.hear() == "midway"
    weight_run.agent.kill()
    assert ask(receiver, "load_again") == (Version(0, 1), True)
    second.tell("go on")
    assert len(second.hear()) == 1
    weight_run.agent = weight_run.start_agent()
    assert ask_all(weight_run.trainers, "wait") == ["delivered"] * 2
    late = weight_run.start_receivers("late")[0]
    assert ask_all([receiver, late], "load", 2) == [(Version(0, 2), True)] * 2
    weight_run.publish(*steps(3, 8))
    assert ask_all([receiver, late], "load", 8) == [(Version(0, 8), True)] * 2


def test_trainer_goes_on_without_an_agent_and_delivers_its_last_version_to_the_next_one(weight_run: WeightRun) -> None:
    receiver = weight_run.start_node("rollout-0")[0]
    weight_run.publish(Version(0, 1))
    assert ask(receiver, "load", 1) == (Version(0, 1), True)
    for last in (9, 15):
        weight_run.agent.kill()
        weight_run.publish(*steps(last - 5, last), wait=False)
        weight_run.agent = weight_run.start_agent()
        weight_run.publish(wait=True)
        assert ask(receiver, "load", last) == (Version(0, last), True)
        assert ask(weight_run.start_receivers(f"late-{last}")[0], "load", last) == (Version(0, last), True)


def test_stopped_receiver_costs_the_trainer_at_most_its_deadline_and_catches_up(weight_run: WeightRun) -> None:
    weight_run.configure(timeout_s=4.0)
    stopped, other = weight_run.start_node("stopped", "other")
    weight_run.publish(Version(0, 1))
    assert ask_all([stopped, other], "load", 1) == [(Version(0, 1), True)] * 2
    stopped.signal(signal.SIGSTOP)
    for version in steps(2, 9):
        weight_run.publish(version)
        assert ask(other, "load", version.step) == (version, True)
    stopped.signal(signal.SIGCONT)
    assert ask(stopped, "load", 9) == (Version(0, 9), True)


def test_agent_that_is_gone_for_good_does_not_stop_trainer_or_receivers(weight_run: WeightRun) -> None:
    receiver = weight_run.start_node("rollout-0")[0]
    weight_run.publish(Version(0, 1))
    assert ask(receiver, "load", 1) == (Version(0, 1), True)
    weight_run.agent.kill()
    weight_run.publish(*steps(2, 4), wait=False)
    assert isinstance(ask(receiver, "load", 4, 0.5), WeightSyncError)
    assert ask(receiver, "load_again") == (Version(0, 1), True)
    assert ask_all(weight_run.trainers, "end", 0.2) == [[], []]
    weight_run.end(receiver)


def test_version_that_is_overwritten_while_the_agent_comes_back_is_never_delivered_torn(weight_run: WeightRun) -> None:
    weight_run.configure(num_ranks=1)
    weight_run.start_node()
    trainer = weight_run.trainers[0]
    weight_run.publish(Version(0, 1))
    weight_run.agent.kill()
    weight_run.publish(Version(0, 2), wait=False)
    trainer.tell(("publish_slowly", Version(0, 3)))
    assert trainer.hear() == "midway"
    weight_run.start_agent()
    receiver = weight_run.start_receivers("rollout-0")[0]
    seen = ask(receiver, "load", 0, 1.5)  # whole, if it lay in the former agent's memory
    assert isinstance(seen, WeightSyncError) or seen == (Version(0, 2), True)
    trainer.tell("go on")
    assert len(trainer.hear()) == 1
    assert ask(receiver, "load", 3) == (Version(0, 3), True)


def test_stopped_agent_holds_up_no_swap(weight_run: WeightRun) -> None:
    weight_run.configure(takes_turns=False)
    receiver = weight_run.start_node("rollout-0")[0]
    weight_run.publish(Version(0, 1))
    assert ask(receiver, "load", 1) == (Version(0, 1), True)
    weight_run.agent.signal(signal.SIGSTOP)
    assert ask(receiver, "load_again") == (Version(0, 1), True)
    weight_run.agent.signal(signal.SIGCONT)
    weight_run.publish(Version(0, 2))
    assert ask(receiver, "load", 2) == (Version(0, 2), True)


def test_receiver_that_is_killed_leaves_no_copy_of_the_model_with_the_others(weight_run: WeightRun) -> None:
    """Its slot gets new memory; a mapping of the old one anywhere would keep that for good."""
    weight_run.configure(wide=512)
    survivor, doomed = weight_run.start_node("survivor", "doomed")
    everybody = [survivor, *weight_run.trainers]
    weight_run.publish(*steps(1, 4))
    assert ask(survivor, "load", 4) == (Version(0, 4), True)
    doomed.tell(("load_slowly", 4))
    assert doomed.hear() == "inside"
    doomed.kill()
    for step in range(5, 13):
        weight_run.publish(Version(0, step))
        assert ask(survivor, "load", step) == (Version(0, step), True)
    live = {path.stat().st_ino for path in weight_run.slot_paths()}
    assert 2 <= len(live) <= weight_run.setup.num_slots
    assert all(weight_run.mapped(child).keys() <= live for child in everybody)


def test_slots_stay_mapped_however_many_there_are(weight_run: WeightRun) -> None:
    weight_run.configure(num_slots=6, wide=512)
    receiver = weight_run.start_node("rollout-0", delta=True)[0]  # otherwise two slots suffice
    for step in range(1, 13):
        weight_run.publish(Version(0, step))
        assert ask(receiver, "load", step) == (Version(0, step), True)
        if step == 6:
            mapped = weight_run.mapped(receiver)
    assert len(mapped) == 6
    assert weight_run.mapped(receiver) == mapped
