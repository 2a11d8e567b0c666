"""Weights between real processes: two senders, two receivers, versions, deaths."""

import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from peers import CPU, MEMBERS, Credentials, shards, weight_receiver, weight_sender

from asyncflow.errors import PlanError, WeightSyncError
from weightsync.bucket import bucket_buffer, seal, values_of
from weightsync.groups import Membership, agree_on_plan, connect_receiver, connect_sender, read_plan
from weightsync.plan import ShardSpec
from weightsync.receiver import WeightReceiver
from weightsync.sender import WeightSender
from weightsync.version import Version

Start = Callable[..., Any]


@pytest.fixture(name="parties")
def _parties(start: Start) -> tuple[list[Any], list[Any]]:
    senders = [start(weight_sender, rank) for rank in range(2)]
    receivers = [start(weight_receiver, name) for name in MEMBERS.receivers]
    for child in (*senders, *receivers):
        assert child.hear() == "ready"
    return senders, receivers


Parties = tuple[list[Any], list[Any]]


def test_every_receiver_holds_every_version_bitwise_and_all_leave_cleanly(parties: Parties) -> None:
    senders, receivers = parties
    for step in range(4):
        for child in (*senders, *receivers):
            child.tell(step)
        assert [sender.hear() for sender in senders] == ["sent", "sent"]
        assert [receiver.hear() for receiver in receivers] == [(Version(0, step), True)] * 2
    for child in (*senders, *receivers):
        child.tell(None)
    assert [sender.hear() for sender in senders] == ["closed", "closed"]
    assert [receiver.hear() for receiver in receivers] == [[], []]
    assert [child.end() for child in (*senders, *receivers)] == [0] * 4


def test_killed_receiver_is_an_error_at_every_sender_within_seconds(parties: Parties) -> None:
    senders, receivers = parties
    receivers[0].signal(signal.SIGKILL)
    receivers[0].end_by_signal()
    began = time.monotonic()
    for sender in senders:
        sender.tell(1)
    errors = [sender.hear(10) for sender in senders]
    assert [type(error) for error in errors] == [WeightSyncError, WeightSyncError]
    assert "a receiver is gone" in str(errors[0])
    receivers[1].tell(1)
    assert isinstance(receivers[1].hear(10), WeightSyncError), "the other receiver waits for the rest"
    assert time.monotonic() - began < 8
    for child in (*senders, receivers[1]):
        child.tell(None)
    assert [child.end() for child in (*senders, receivers[1])] == [0] * 3


def test_killed_sender_is_an_error_at_the_receivers_and_their_old_version_stays(parties: Parties) -> None:
    senders, receivers = parties
    for child in (*senders, *receivers):
        child.tell(1)
    assert [child.hear() for child in (*senders, *receivers)][2:] == [(Version(0, 1), True)] * 2
    senders[0].tell(2)
    senders[1].signal(signal.SIGKILL)
    began = time.monotonic()
    for receiver in receivers:
        receiver.tell(2)
    for receiver in receivers:
        error = receiver.hear(10)
        assert isinstance(error, WeightSyncError)
        assert "step 2 will not come" in str(error)
        receiver.tell(1)
        assert receiver.hear() == (Version(0, 1), True)
    assert time.monotonic() - began < 8


@pytest.fixture(name="pair")
def _pair(credentials: Credentials) -> Any:
    """One sender's group and one receiver in this process."""
    members = Membership("pair", 1, ("rollout-0",))
    store = credentials.own_store()
    held = [ShardSpec(run.name, run.shape, run.start, run.values.numel()) for run in whole(0)]
    plan = agree_on_plan(store, members, 0, held, bucket_bytes=1024, dtype="float32")
    met: list[Any] = []
    receiving = threading.Thread(
        target=lambda: met.extend(connect_receiver(credentials.own_store(), members, "rollout-0", CPU))
    )
    receiving.start()
    group = connect_sender(store, members, 0, CPU)
    receiving.join(20)
    receiver = WeightReceiver(met, plan, CPU)
    yield plan, group, receiver
    receiver.join(timeout_s=0.1)
    assert not receiver._thread.is_alive()


def whole(step: int) -> list[Any]:
    """Return the model as one rank holds it."""
    halves = zip(shards(step, 0), shards(step, 1), strict=True)
    return [type(a)(a.name, a.shape, 0, torch.cat([a.values, b.values])) for a, b in halves]


def test_tampered_bucket_is_never_offered(pair: Any) -> None:
    plan, group, receiver = pair
    bucket = plan.buckets[0]
    buffer = bucket_buffer(bucket, torch.float32)
    values_of(buffer, torch.float32).zero_()
    seal(buffer, bucket, Version(0, 1))
    buffer[5] ^= 1
    group.broadcast([buffer]).wait()
    with pytest.raises(WeightSyncError, match="checksum does not match"):
        receiver.wait_for(1, timeout_s=10)
    assert receiver.newest is None


def test_buckets_of_two_versions_are_never_mixed(pair: Any) -> None:
    plan, group, receiver = pair
    for step, bucket in enumerate(plan.buckets[:2], start=1):
        buffer = bucket_buffer(bucket, torch.float32)
        values_of(buffer, torch.float32).zero_()
        seal(buffer, bucket, Version(0, step))
        group.broadcast([buffer]).wait()
    with pytest.raises(WeightSyncError, match="carries"):
        receiver.wait_for(1, timeout_s=10)
    assert receiver.newest is None


def test_newest_version_wins_and_is_loaded_once(pair: Any) -> None:
    plan, group, receiver = pair
    sender = WeightSender(group, plan, 0, CPU)
    for version in (Version(0, 5), Version(1, 2), Version(0, 6)):
        sender.publish(version, whole(version.step), timeout_s=10)
    sender.close()
    receiver.join(10)
    assert receiver.newest == Version(1, 2)
    assert receiver.load(lambda views: None, newer_than=Version(0, 9)) == Version(1, 2)
    assert receiver.load(lambda views: None, newer_than=Version(1, 2)) is None
    with pytest.raises(WeightSyncError, match="the trainer ended"):
        receiver.wait_for(7, timeout_s=10)


def test_close_sends_the_version_in_progress_to_its_end(pair: Any) -> None:
    plan, group, receiver = pair
    sender = WeightSender(group, plan, 0, CPU)
    sender.publish(Version(0, 1), whole(1), timeout_s=10)
    sender.close()
    sender.close()
    receiver.join(10)
    assert receiver.newest == Version(0, 1)
    with pytest.raises(WeightSyncError, match="closed"):
        sender.publish(Version(0, 2), whole(2), timeout_s=10)


def test_close_does_not_wait_for_a_receiver_that_does_not_receive(credentials: Credentials) -> None:
    members = Membership("deaf", 1, ("rollout-0",))
    held = [ShardSpec(run.name, run.shape, run.start, run.values.numel()) for run in whole(0)]
    plan = agree_on_plan(credentials.own_store(), members, 0, held, bucket_bytes=1024, dtype="float32")
    deaf: list[Any] = []
    meeting = threading.Thread(
        target=lambda: deaf.extend(connect_receiver(credentials.own_store(), members, "rollout-0", CPU))
    )
    meeting.start()
    group = connect_sender(credentials.own_store(), members, 0, CPU)
    meeting.join(10)
    sender = WeightSender(group, plan, 0, CPU)
    sender.publish(Version(0, 1), whole(1), timeout_s=10)
    with pytest.raises(WeightSyncError, match=r"within 0\.1 s"):
        sender.wait(0.1)
    stop = threading.Event()
    stop.set()
    with pytest.raises(WeightSyncError, match="when the stop came"):
        sender.publish(Version(0, 2), whole(2), timeout_s=60, stop=stop)
    began = time.monotonic()
    sender.close(timeout_s=0.2)
    assert time.monotonic() - began < 3
    assert not sender._thread.is_alive()


def test_plan_that_cannot_be_made_is_an_error_at_every_party(credentials: Credentials) -> None:
    store = credentials.own_store()
    members = Membership("bad", 1, ("rollout-0",))
    with pytest.raises(PlanError, match=r"w\.gap"):
        agree_on_plan(store, members, 0, [ShardSpec("w.gap", (4,), 1, 3)], bucket_bytes=1024, dtype="float32")
    with pytest.raises(PlanError, match=r"w\.gap"):
        read_plan(store, members)
