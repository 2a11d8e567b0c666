"""Services of a queue of its own that are stopped, or die together."""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import tq

CONFIG = tq.QueueConfig(request_timeout_s=20, lease_timeout_s=4, unit_timeout_s=1, unit_grace_s=0.5)
WAIT_S = 60.0


@pytest.fixture(name="stopped")
def _stopped() -> Iterator[list[int]]:
    """Processes that go on again whatever happens, so that they can end."""
    pids: list[int] = []
    yield pids
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def until(holds: Callable[[], bool]) -> None:
    deadline, pause = time.monotonic() + WAIT_S, threading.Event()
    while not holds():
        assert time.monotonic() < deadline, "it never came to be"
        pause.wait(0.05)


def kill(queue: tq.LocalQueue, service: str) -> int:
    """Return the pid that it had."""
    pid = queue.pids()[service]
    os.kill(pid, signal.SIGKILL)
    return pid


def until_back(queue: tq.LocalQueue, service: str, pid: int) -> None:
    until(lambda: queue.pids().get(service, pid) != pid)
    queue.wait_until_up(WAIT_S)


def unit_of(queue: tq.LocalQueue, client: tq.QueueClient, task: str) -> str:
    granted = client.fetch(task, num_rows=1, timeout_s=WAIT_S)
    assert isinstance(granted, tq.Lease)
    granted.release()
    return granted.units[0]


def finish(client: tq.QueueClient, task: str, number: int) -> list[int]:
    """Ack so many rows; some may come a moment later, behind the fence of a lease that went with their unit."""
    rows: list[int] = []
    while len(rows) < number:
        granted = client.fetch(task, num_rows=number, timeout_s=WAIT_S)
        assert isinstance(granted, tq.Lease)
        granted.ack()
        rows += granted.rows
    return sorted(rows)


def test_stopped_unit_is_passed_over_and_its_rows_come_back_elsewhere(tmp_path: Path, stopped: list[int]) -> None:
    with tq.start({"work": ["x"]}, num_units=2, config=CONFIG, log_dir=tmp_path) as queue:
        client = queue.client("me")
        client.put_rows({"x": tq.column(["a"])}, rows=[1])
        unit = unit_of(queue, client, "work")
        stopped.append(queue.pids()[unit])
        os.kill(stopped[0], signal.SIGSTOP)
        for row in (2, 3):  # one of them would go to the stopped unit
            client.put_rows({"x": tq.column(["b"])}, rows=[row])
        lost = client.lost_rows(timeout_s=WAIT_S)
        assert lost is not None and 1 in lost.rows
        client.put_rows({"x": tq.column(["a"] * len(lost.rows))}, rows=lost.rows)
        assert unit not in client.unit_stats()
        os.kill(stopped[0], signal.SIGCONT)
        until(lambda: unit in client.unit_stats())
        assert finish(client, "work", 3) == [1, 2, 3]
        until(lambda: not any(stats.num_rows for stats in client.unit_stats().values()))


def test_losses_of_a_unit_that_died_with_the_lead_are_told_by_the_other_controller(tmp_path: Path) -> None:
    tasks = {"look": ["x"], "work": ["x"]}
    with tq.start(tasks, num_units=2, num_controllers=2, config=CONFIG, log_dir=tmp_path) as queue:
        client = queue.client("me")
        client.put_rows({"x": tq.column(["a", "b"])}, rows=[1, 2])
        unit = unit_of(queue, client, "work")
        look = client.fetch("look", num_rows=1, timeout_s=WAIT_S)
        assert isinstance(look, tq.Lease)
        look.ack()
        for name, pid in {name: kill(queue, name) for name in ("controller-0", unit)}.items():
            until_back(queue, name, pid)
        lost = client.lost_rows(timeout_s=WAIT_S)
        assert lost is not None and lost.rows == [1, 2]
        client.put_rows({"x": tq.column(["a", "b"])}, rows=[1, 2])
        left = [row for row in (1, 2) if row not in look.rows]
        for task, rows in (("work", [1, 2]), ("look", left)):
            assert finish(client, task, len(rows)) == rows
        until(lambda: not any(stats.live_rows for stats in client.stats()))


def leased_over_restarts(queue: tq.LocalQueue) -> tuple[tq.QueueClient, tq.Lease]:
    """Return a consumer with rows 1 and 2, whose unit started empty, while the next controller is still waiting."""
    client, late = queue.client("me"), queue.client("late")
    client.put_rows({"x": tq.column(["a", "b"])}, rows=[1, 2])
    granted = client.fetch("work", num_rows=2, timeout_s=WAIT_S)
    assert isinstance(granted, tq.Lease) and granted.rows == [1, 2]
    late.fetch("work", num_rows=1, timeout_s=0.1)
    until_back(queue, "storage-0", kill(queue, "storage-0"))
    kill(queue, "controller-0")
    late.close()  # the next controller waits for it
    client.stats()  # it is joined
    return client, granted


def test_consumer_that_dropped_its_work_while_the_controller_recovers_keeps_no_lease(tmp_path: Path) -> None:
    """It told of its lease when it joined, then heard from the unit, which started empty, that the lease is void."""
    recovering = CONFIG.model_copy(update={"lease_timeout_s": 15})  # long enough for all that happens meanwhile
    with tq.start({"work": ["x"]}, num_units=1, config=recovering, log_dir=tmp_path) as queue:
        client, granted = leased_over_restarts(queue)
        assert not granted.put({"y": [1.0, 2.0]})
        client.put_rows({"x": tq.column(["a", "b"])}, rows=[1, 2])
        assert finish(queue.client("other"), "work", 2) == [1, 2]


def test_ack_while_the_controller_recovers_counts_though_the_unit_started_empty(tmp_path: Path) -> None:
    with tq.start({"work": ["x"]}, num_units=1, config=CONFIG, log_dir=tmp_path) as queue:
        client, granted = leased_over_restarts(queue)
        granted.ack()
        assert client.stats()[0].live_rows == 0


@pytest.mark.parametrize("num_controllers", [1, 2])
def test_rows_of_a_unit_that_died_with_all_controllers_are_told_as_lost(num_controllers: int, tmp_path: Path) -> None:
    """Each of 6 rows is waiting, done or told as lost afterwards, and no task does again what it was done with."""
    tasks = {"look": ["x"], "work": ["x"]}
    with (
        tq.start(tasks, num_units=2, num_controllers=num_controllers, config=CONFIG, log_dir=tmp_path) as queue,
        queue.client("me") as client,
    ):
        for row in range(6):
            client.put_rows({"x": [str(row)]}, rows=[row], groups=[row // 2], group_size=2, partition=row // 2)
        unit_of_row = {row.index: row.unit for row in client.list_rows()}
        unit = unit_of_row[0]
        there = [row for row in unit_of_row if unit_of_row[row] == unit]
        looked = client.fetch("look", num_rows=2, timeout_s=WAIT_S)
        worked = client.fetch("work", num_rows=1, timeout_s=WAIT_S)
        assert isinstance(looked, tq.Lease) and isinstance(worked, tq.Lease)
        looked.ack()
        worked.ack()  # row 0 is finished
        services = [unit, *(f"controller-{k}" for k in range(num_controllers))]
        for name, pid in {name: kill(queue, name) for name in services}.items():
            until_back(queue, name, pid)
        gone = [row for row in there if row != 0]
        lost = client.lost_rows(timeout_s=WAIT_S)
        assert lost is not None and lost.rows == gone
        assert (lost.groups, lost.partitions) == ([row // 2 for row in gone],) * 2
        until(lambda: all(stats.live_rows == 5 for stats in client.stats()))
        assert client.stats()[0].lost_rows == len(gone)
        for row in [0, *gone]:  # row 0 was done, and stays so
            client.put_rows({"x": [str(row)]}, rows=[row], groups=[row // 2], group_size=2, partition=row // 2)
        assert finish(client, "look", 4) == [2, 3, 4, 5]
        assert finish(client, "work", 5) == [1, 2, 3, 4, 5]
        until(lambda: not any(stats.live_rows for stats in client.stats()))
