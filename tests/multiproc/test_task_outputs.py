"""Tasks that are declared by their inputs only: what they wrote and lost with a unit, they write again, once."""

import os
import signal
import threading
from pathlib import Path

import pytest
import torch

import tq
from asyncflow.errors import PeerRefused
from tq.messages import LostRows, NoRows

SHORT_FORM = {"first": ["x"], "second": ["x", "h"]}
FAST = tq.QueueConfig(request_timeout_s=20, lease_timeout_s=3, unit_grace_s=0.5)
DEADLINE_S = 30.0


def values(*numbers: float) -> tq.Column:
    return tq.column(torch.tensor(numbers))


def take(client: tq.QueueClient, task: str, num_rows: int) -> tq.Lease:
    """Fetch so many rows, whatever a restart in between answers; fails after the deadline."""
    for _ in range(int(DEADLINE_S)):
        answer = client.fetch(task, num_rows=num_rows, timeout_s=1)
        if isinstance(answer, tq.Lease):
            return answer
    raise AssertionError(f"nothing was ready for {task}")


def nothing_for(client: tq.QueueClient, task: str) -> bool:
    return isinstance(client.fetch(task, num_rows=1, timeout_s=0.2), NoRows)


def kill_and_wait(queue: tq.LocalQueue, *services: str) -> None:
    """Kill services, one after the other; wait each time until a successor serves."""
    paused = threading.Event()
    for service in services:
        pid = queue.pids()[service]
        os.kill(pid, signal.SIGKILL)
        for _ in range(int(DEADLINE_S / 0.05)):
            if queue.pids().get(service, pid) != pid:
                break
            paused.wait(0.05)
        queue.wait_until_up(DEADLINE_S)


def lost(client: tq.QueueClient) -> LostRows:
    found = client.lost_rows(timeout_s=DEADLINE_S)
    assert found is not None, "no row is reported lost"
    return found


def first_writes(client: tq.QueueClient, rows: list[int]) -> None:
    lease = take(client, "first", len(rows))
    assert sorted(lease.rows) == rows
    lease.put({"h": values(*(10.0 * row for row in lease.rows))})


@pytest.mark.parametrize("num_controllers", [1, 2])
@pytest.mark.parametrize("then_dies", ["", "controller-0"])
def test_a_column_that_died_with_its_unit_is_written_again(num_controllers: int, then_dies: str) -> None:
    with tq.start(SHORT_FORM, num_units=1, num_controllers=num_controllers, config=FAST) as queue:
        client = queue.client("me")
        client.put_rows({"x": values(0, 1, 2)}, rows=range(3))
        first_writes(client, [0, 1, 2])
        kill_and_wait(queue, "storage-0")
        assert sorted(lost(client).rows) == [0, 1, 2]
        if then_dies:
            kill_and_wait(queue, then_dies)
        client.put_rows({"x": values(0, 1, 2)}, rows=range(3))
        first_writes(client, [0, 1, 2])
        lease = take(client, "second", 3)
        assert lease["h"].values.tolist() == [10.0 * row for row in lease.rows]
        lease.ack()
        assert nothing_for(client, "first") and nothing_for(client, "second")
        assert client.stats()[0].live_rows == 0


def producers_become(client: tq.QueueClient, *, alive: bool) -> bool:
    """Fetch until the task's controller says so; False: not within the deadline."""
    for _ in range(int(DEADLINE_S / 0.5)):
        answer = client.fetch("second", num_rows=1, timeout_s=0.5)
        assert isinstance(answer, NoRows)
        if answer.producers_alive == alive:
            return True
    return False


def test_a_client_that_has_written_nothing_yet_but_will_is_known_to_all_controllers() -> None:
    """`first` and `second` have a controller each; the writer asks for nothing of `second`."""
    with tq.start(SHORT_FORM, num_units=1, num_controllers=2, config=FAST) as queue:
        reader, writer = queue.client("reader"), queue.client("writer")
        reader.put_rows({"x": values(0)}, rows=[0])
        assert producers_become(reader, alive=False)
        writer.declare_outputs(["h"])
        assert producers_become(reader, alive=True)
        writer.close()
        assert producers_become(reader, alive=False)


def test_a_task_that_acked_a_row_without_writing_stays_done_with_it() -> None:
    """`first` writes `h` for one row and skips the other; `look` never writes anything."""
    with tq.start({"first": ["x"], "look": ["x"], "last": ["x"]}, num_units=1, config=FAST) as queue:
        client = queue.client("me")
        client.put_rows({"x": values(0, 1)}, rows=[0, 1])
        lease = take(client, "first", 2)
        lease.put({"h": values(1)}, [0])
        lease.ack([1])
        take(client, "look", 2).ack()
        kill_and_wait(queue, "storage-0")
        client.put_rows({"x": values(0, 1)}, rows=lost(client).rows)
        first_writes(client, [0])
        assert nothing_for(client, "look")
        assert sorted(take(client, "last", 2).rows) == [0, 1]


def test_a_task_whose_put_was_refused_and_that_acked_stays_done_with_the_row() -> None:
    with tq.start({**SHORT_FORM, "last": ["h"]}, num_units=1, config=FAST) as queue:
        client = queue.client("me")
        client.put_rows({"x": values(0)}, rows=[0])
        first_writes(client, [0])
        lease = take(client, "second", 1)
        with pytest.raises(PeerRefused, match="second put h already"):
            lease.put({"h": values(1)}, [0])
        lease.ack()
        kill_and_wait(queue, "storage-0")
        client.put_rows({"x": values(0)}, rows=lost(client).rows)
        first_writes(client, [0])
        take(client, "last", 1)
        assert nothing_for(client, "second")


def test_a_restored_queue_knows_what_its_tasks_wrote(tmp_path: Path) -> None:
    with tq.start(SHORT_FORM, num_units=1, config=FAST) as queue:
        client = queue.client("me")
        client.put_rows({"x": values(0, 1)}, rows=[0, 1])
        first_writes(client, [0, 1])
        client.snapshot(tmp_path / "snapshot")
    with tq.start(SHORT_FORM, num_units=1, config=FAST) as queue:
        client = queue.client("me")
        client.restore(tmp_path / "snapshot")
        kill_and_wait(queue, "storage-0")
        client.put_rows({"x": values(0, 1)}, rows=lost(client).rows)
        first_writes(client, [0, 1])
        assert sorted(take(client, "second", 2).rows) == [0, 1]
