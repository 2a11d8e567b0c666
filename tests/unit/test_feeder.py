"""The feeder leases what there is room for, and no more."""

import queue
import threading
from typing import Any

import pytest
import torch

from asyncflow.errors import LeaseFenced, TransportError
from tq.client.lease import Lease
from tq.columns import Column, PackedBatch
from tq.messages import LeaseGrant, NoRows, NoRowsReason
from weightsync.version import Version
from workers.rollout.loop import Feeder
from workers.settings.schedule import ScheduleMode

DEADLINE_S = 20


class Queue:
    """Answers fetches as the test says; stands in for `QueueClient`."""

    def __init__(self) -> None:
        self.asked: queue.Queue[tuple[int, Version]] = queue.Queue()
        self.answers: queue.Queue[Any] = queue.Queue()
        self.void: set[int] = set()
        self.released: list[list[int]] = []
        self.unreadable: list[TransportError] = []

    def fetch(self, task: str, *, num_rows: int, version: int, lineage: int) -> Any:
        assert task == "actor_rollout"
        self.asked.put((num_rows, Version(lineage, version)))
        answer = self.answers.get(timeout=DEADLINE_S)
        if isinstance(answer, Exception):
            raise answer
        return Lease(self, answer) if isinstance(answer, LeaseGrant) else answer  # type: ignore[arg-type]

    def get(self, granted: LeaseGrant, names: list[str]) -> PackedBatch:
        if self.unreadable:
            raise self.unreadable.pop()
        if granted.token in self.void:
            raise LeaseFenced("the lease is void")
        columns = {name: Column.of_rows([torch.tensor([1])] * len(granted.rows)) for name in names}
        return PackedBatch(tuple(granted.rows), columns, tuple(granted.groups))

    def release_rows(self, granted: LeaseGrant, rows: list[int]) -> None:
        self.released.append(rows)


def granted_void(client: Queue, *rows: int) -> LeaseGrant:
    """Of a lease that went with its unit."""
    lost = LeaseGrant("actor_rollout", 9, 1, list(rows), [0] * len(rows), ["storage-0"] * len(rows))
    client.void.add(lost.token)
    return lost


def granted(*rows: int) -> LeaseGrant:
    return LeaseGrant("actor_rollout", 7, 1, list(rows), [0] * len(rows), ["storage-0"] * len(rows))


def no_rows(reason: NoRowsReason, newest_version: int = 0, lineage: int = 0) -> NoRows:
    return NoRows(reason, newest_version, lineage=lineage)


def start() -> tuple[Queue, Feeder, threading.Event]:
    client, wake = Queue(), threading.Event()
    return client, Feeder(client, columns=("prompts", "ground_truth"), wake=wake), wake  # type: ignore[arg-type]


def wait_for(wake: threading.Event) -> None:
    assert wake.wait(DEADLINE_S)
    wake.clear()


def test_it_asks_for_the_free_places_and_counts_what_came() -> None:
    client, feeder, wake = start()
    feeder.want_rows(3, version=Version(0, 2))
    assert client.asked.get(timeout=DEADLINE_S) == (3, Version(0, 2))
    client.answers.put(granted(5, 6))
    wait_for(wake)
    assert client.asked.empty(), "what room is left is for the instance to say"
    feeder.want_rows(3, version=Version(0, 2))  # two of them are for what was not taken yet
    assert client.asked.get(timeout=DEADLINE_S) == (1, Version(0, 2))
    (lease,) = feeder.take_leases()
    assert lease.batch.indices == (5, 6)
    client.answers.put(granted(7))
    wait_for(wake)
    assert len(feeder.take_leases()) == 1
    feeder.want_rows(0, version=Version(0, 2))
    feeder.close()
    assert client.asked.empty()


def test_newer_weights_are_asked_for_and_then_prompts_again() -> None:
    client, feeder, wake = start()
    feeder.want_rows(1, version=Version(0, 2))
    client.asked.get(timeout=DEADLINE_S)
    client.answers.put(no_rows(NoRowsReason.NEWER_VERSION, 4))
    wait_for(wake)
    assert feeder.needed_version() == Version(0, 4)
    feeder.want_rows(1, version=Version(0, 3))
    assert feeder.needed_version() == Version(0, 4)
    feeder.want_rows(1, version=Version(0, 4))
    assert feeder.needed_version() is None
    assert client.asked.get(timeout=DEADLINE_S) == (1, Version(0, 4))
    client.answers.put(no_rows(NoRowsReason.STOP))
    wait_for(wake)
    assert feeder.stopped


def test_weights_of_an_earlier_lineage_are_no_good_however_new() -> None:
    client, feeder, wake = start()
    feeder.want_rows(1, version=Version(0, 9))
    client.answers.put(no_rows(NoRowsReason.NEWER_VERSION, 4, lineage=1))
    wait_for(wake)
    assert feeder.needed_version() == Version(1, 4)
    client.answers.put(no_rows(NoRowsReason.STOP))
    feeder.want_rows(1, version=Version(1, 4))
    wait_for(wake)
    assert [client.asked.get(timeout=DEADLINE_S)[1] for _ in range(2)] == [Version(0, 9), Version(1, 4)]


def test_lease_whose_unit_is_gone_is_released_and_asked_for_again() -> None:
    client, feeder, wake = start()
    feeder.want_rows(2, version=Version(0, 0))
    client.unreadable.append(TransportError("storage-0: the peer is gone"))
    client.answers.put(granted(5))
    client.answers.put(granted(6))
    wait_for(wake)
    assert client.released == [[5]]
    assert [lease.batch.indices for lease in feeder.take_leases()] == [(6,)]


def test_lease_that_is_void_before_it_was_read_is_passed_over() -> None:
    client, feeder, wake = start()
    feeder.want_rows(2, version=Version(0, 0))
    client.answers.put(granted_void(client, 5))
    assert [client.asked.get(timeout=DEADLINE_S) for _ in range(2)] == [(2, Version(0, 0))] * 2
    assert client.released == [[5]]
    client.answers.put(granted(5))
    wait_for(wake)
    assert len(feeder.take_leases()) == 1


def test_what_goes_wrong_is_raised() -> None:
    client, feeder, wake = start()
    feeder.want_rows(1, version=Version(0, 0))
    client.answers.put(TransportError("the controller is gone"))
    wait_for(wake)
    with pytest.raises(TransportError, match="the controller is gone"):
        feeder.want_rows(1, version=Version(0, 0))


@pytest.mark.parametrize(
    ("mode", "interruptible", "num_running", "boundary", "expected"),
    [
        ("async", False, 0, False, True),
        ("async", False, 3, True, False),
        ("async", True, 3, False, False),
        ("async", True, 3, True, True),
        ("substep", True, 3, False, True),
        ("substep", False, 3, False, False),
        ("periodic", True, 0, False, True),
    ],
)
def test_when_weights_are_swapped(
    mode: str, interruptible: bool, num_running: int, boundary: bool, expected: bool
) -> None:
    swaps = ScheduleMode(mode).may_swap(interruptible=interruptible, num_running=num_running, boundary=boundary)
    assert swaps == expected


def test_it_is_parked_when_rows_that_were_asked_for_do_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    client, feeder, wake = start()
    now = [100.0]
    monkeypatch.setattr("workers.rollout.loop.time.monotonic", lambda: now[0])
    assert not feeder.is_parked, "nothing was asked for"
    feeder.want_rows(2, version=Version(0, 2))
    client.asked.get(timeout=DEADLINE_S)
    assert not feeder.is_parked
    now[0] += 1
    assert feeder.is_parked
    feeder.want_rows(2, version=Version(0, 3))
    assert not feeder.is_parked, "other weights: perhaps there are rows for these"
    now[0] += 1
    client.answers.put(granted(5, 6))
    wait_for(wake)
    assert not feeder.is_parked
    feeder.take_leases()
    feeder.want_rows(1, version=Version(0, 3))
    client.asked.get(timeout=DEADLINE_S)
    client.answers.put(no_rows(NoRowsReason.NEWER_VERSION, 4))
    wait_for(wake)
    assert feeder.is_parked
    feeder.want_rows(1, version=Version(0, 4))
    client.asked.get(timeout=DEADLINE_S)
    assert not feeder.is_parked
    client.answers.put(no_rows(NoRowsReason.STOP))
    wait_for(wake)
    assert feeder.is_parked
