"""The job store takes values of 8 MiB at most. What a queue keeps there stays far below, however many rows it lost."""

import os
import signal
import threading
import time
from collections.abc import Iterator

import pytest
import torch

import tq
from tq.directory import QueueAddress

NUM_ROWS, ROWS_PER_PUT = 100_000, 10_000
ROWS = range(2**40, 2**40 + NUM_ROWS)
LARGEST_VALUE = 2**20
CONFIG = tq.QueueConfig(lease_timeout_s=2, unit_grace_s=0.1)
DEADLINE_S = 120.0


@pytest.fixture(name="queue")
def _queue() -> Iterator[tq.LocalQueue]:
    with tq.start({"train": ["x"]}, num_units=1, config=CONFIG) as queue:
        yield queue


def put_all(client: tq.QueueClient) -> None:
    for first in range(0, NUM_ROWS, ROWS_PER_PUT):
        client.put_rows({"x": tq.column(torch.ones(ROWS_PER_PUT))}, rows=ROWS[first : first + ROWS_PER_PUT])


def kill_and_wait(queue: tq.LocalQueue, service: str) -> None:
    """Kill a service, and wait until its successor serves."""
    pid, deadline, pause = queue.pids()[service], time.monotonic() + DEADLINE_S, threading.Event()
    os.kill(pid, signal.SIGKILL)
    while queue.pids().get(service, pid) == pid:
        assert time.monotonic() < deadline, f"{service} is not back"
        pause.wait(0.05)
    queue.wait_until_up(DEADLINE_S)


def largest_value(queue: tq.LocalQueue) -> int:
    """Return the bytes of the largest value in the queue's store."""
    store = QueueAddress.load(queue.address).connect_store().group_store()
    return max(len(store.get(key)) for key in store.list_keys())


def test_rows_lost_with_a_unit_are_asked_for_by_the_next_controller_too(queue: tq.LocalQueue) -> None:
    client = queue.client("me")
    put_all(client)
    kill_and_wait(queue, "storage-0")
    for victim in (None, "controller-0"):
        if victim is not None:
            kill_and_wait(queue, victim)
        lost = queue.client("watcher").lost_rows(timeout_s=DEADLINE_S)
        assert lost is not None and lost.rows == list(ROWS)
        assert largest_value(queue) < LARGEST_VALUE
    put_all(client)
    left = NUM_ROWS
    while left:
        granted = client.fetch("train", num_rows=ROWS_PER_PUT, timeout_s=DEADLINE_S)
        assert isinstance(granted, tq.Lease)
        granted.ack()
        left -= len(granted.rows)
    assert client.stats()[0].live_rows == 0
