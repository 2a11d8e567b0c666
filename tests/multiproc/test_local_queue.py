"""A queue of its own, with real service processes: use, recovery from kill -9, several controllers, added units."""

import json
import os
import shutil
import signal
import stat
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from peers import sleeper

import tq
from asyncflow.errors import (
    ConfigError,
    DeadlineExceeded,
    PeerRefused,
    QueueFull,
    RowsExist,
    TransportError,
)
from asyncflow.transport.server import Connection
from tq.directory import QueueAddress
from tq.messages import (
    CONTROLLER_REPLIES,
    FetchRound,
    FetchRows,
    Heartbeat,
    Join,
    NoRows,
    NoRowsReason,
)

TASKS = {"score": ("prompt",), "train": ("prompt", "score")}
FAST = tq.QueueConfig(request_timeout_s=20, lease_timeout_s=3, unit_grace_s=0.5)
DEADLINE_S = 30.0


@pytest.fixture(scope="module")
def queue(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tq.LocalQueue]:
    """One queue for the tests that harm nobody; each uses partitions of its own and clears them."""
    with tq.start(TASKS, config=FAST, log_dir=tmp_path_factory.mktemp("logs")) as queue:
        yield queue


def prompts(*texts: str) -> dict[str, tq.Column]:
    return {"prompt": tq.column(list(texts))}


def take(client: tq.QueueClient, task: str, num_rows: int) -> tq.Lease:
    """Fetch, whatever a restart in between answers; fails after the deadline."""
    for _ in range(int(DEADLINE_S)):
        answer = client.fetch(task, num_rows=num_rows, timeout_s=1)
        if isinstance(answer, tq.Lease):
            return answer
    raise AssertionError(f"nothing was ready for {task}")


def wait_for(condition: Callable[[], bool], what: str) -> None:
    paused = threading.Event()
    for _ in range(int(DEADLINE_S / 0.05)):
        if condition():
            return
        paused.wait(0.05)
    raise AssertionError(f"no {what} within {DEADLINE_S:g} s")


def kill_and_wait(queue: tq.LocalQueue, service: str) -> None:
    """Kill a service, and wait until its successor serves."""
    pid = queue.pids()[service]
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: queue.pids().get(service, pid) != pid, service)
    queue.wait_until_up(DEADLINE_S)


@pytest.mark.gate
def test_ten_lines_put_score_and_train(queue: tq.LocalQueue) -> None:
    client = queue.client("me")
    rows = client.put_rows(prompts("1 + 1 =", "2 + 2 =", "3 + 3 ="))
    lease = take(client, "score", 3)
    batch = lease.read(["prompt"])
    assert batch["prompt"].texts() == ["1 + 1 =", "2 + 2 =", "3 + 3 ="]
    lease.put({"score": tq.column(torch.tensor([1.0, 2.0, 3.0]))})
    lease = take(client, "train", 3)
    batch = lease.read(["prompt", "score"])
    assert batch.indices == rows
    assert batch["score"].values.tolist() == [1.0, 2.0, 3.0]
    lease.ack()
    wait_for(lambda: client.stats()[0].live_rows == 0, "empty queue")


@pytest.mark.parametrize("num_controllers", [pytest.param(1, marks=pytest.mark.gate), 2])
def test_who_waits_for_a_small_put_gets_its_values_with_the_lease(num_controllers: int) -> None:
    with tq.start(TASKS, num_controllers=num_controllers, config=FAST) as queue:
        producer, scorer = queue.client("producer"), queue.client("scorer")

        def waiting() -> bool:
            return any(task.parked_requests for part in producer.stats() for task in part.tasks)

        for texts, num_gets in ((["a", "bc"], 0), (["a" * 4096, "b"], 1)):  # the second put is not small
            with ThreadPoolExecutor(1) as threads:
                taken = threads.submit(take, scorer, "score", 2)
                wait_for(waiting, "fetch that waits")
                producer.put_rows(prompts(*texts))
                assert taken.result(DEADLINE_S)["prompt"].texts() == texts
            assert sum(unit.gets for unit in producer.unit_stats().values()) == num_gets


def test_rows_are_listed_read_and_cleared_without_a_lease(queue: tq.LocalQueue) -> None:
    with queue.client("operator") as client:
        rows = [client.put_rows({"prompt": [text]}, partition=3)[0] for text in "abc"]
        lease = take(client, "score", 1)
        lease.put({"score": torch.ones(1)})
        listed = client.list_rows(partition=3)
        assert [row.index for row in listed] == sorted(rows)
        assert {row.unit for row in listed} == {"storage-0", "storage-1"}
        assert [(row.columns, row.done) for row in listed if row.index in lease.rows] == [
            (("prompt", "score"), ("score",))
        ]
        assert list(client.read_rows(rows[::-1], ["prompt"])["prompt"]) == ["c", "b", "a"]
        assert client.clear_rows([rows[0], rows[2], 10**9]) == sorted([rows[0], rows[2]])
        with pytest.raises(PeerRefused, match="not in the queue"):
            client.read_rows(rows, ["prompt"])
        assert [row.index for row in client.list_rows(partition=3)] == [rows[1]]
        assert client.stats()[0].live_rows == 1
        client.put_rows({"prompt": ["a"]}, partition=3, rows=[rows[0]])
        assert client.read_rows([rows[0]], ["prompt"])["prompt"][0] == "a"
        client.clear_partition(3)


def test_streams_end_when_the_queue_is_closed_for_writing_though_controllers_restart() -> None:
    with tq.start(TASKS, num_controllers=2, config=FAST) as queue, queue.client("me") as client:
        client.put_rows({"prompt": ["a", "bb", "ccc"]})
        client.close_writing()
        with pytest.raises(PeerRefused, match="closed for writing"):
            client.put_rows({"prompt": ["d"]})
        for service in ("controller-0", "controller-1"):
            kill_and_wait(queue, service)
        for lease in client.stream("score", ["prompt"], num_rows=2):
            assert lease.put({"score": [len(prompt) for prompt in lease["prompt"]]})
        trained: dict[str, int] = {}
        for lease in client.stream("train", ["prompt", "score"]):
            trained |= zip(lease["prompt"], lease["score"], strict=True)
            lease.ack()
        assert trained == {"a": 1, "bb": 2, "ccc": 3}


@pytest.mark.gate
def test_the_address_is_for_this_user_only_and_another_process_may_connect(queue: tq.LocalQueue) -> None:
    assert stat.S_IMODE(queue.address.stat().st_mode) == 0o600
    other = tq.connect(queue.address, "other")
    assert other.stats()[0].tasks
    other.close()
    with pytest.raises(ConfigError, match=r"nowhere\.json does not exist"):
        tq.connect(Path("/tmp/nowhere.json"), "other")


@pytest.mark.parametrize("text", [None, "", "{", "{}", "[]", '{"host": 1, "port": "x", "secret": 3}'])
def test_a_file_that_is_no_address_is_refused(tmp_path: Path, text: str | None) -> None:
    path = tmp_path / "queue.json"
    if text is None:
        path.mkdir()
    else:
        path.write_text(text)
    with pytest.raises(ConfigError, match=r"queue\.json (is not a queue's address|cannot be read)"):
        tq.connect(str(path), "other")


def test_rows_that_were_put_by_index_are_not_taken_for_new_ones() -> None:
    with tq.start({"train": ["prompt"]}, num_units=1, config=FAST) as queue:
        client = queue.client("me")
        client.put_rows(prompts(*"abcd"), rows=range(4))
        for other in (client, queue.client("other")):
            assert not set(other.put_rows(prompts(*"abcd"))) & set(range(4))
        assert client.stats()[0].live_rows == 12


def test_stopped_services_are_killed_together() -> None:
    with tq.start(TASKS, config=FAST) as queue:
        pids = queue.pids()
        for name in ("storage-0", "storage-1"):
            os.kill(pids[name], signal.SIGSTOP)
        began = time.monotonic()
        queue.close()
        assert time.monotonic() - began < 15
        assert not [pid for pid in pids.values() if psutil.pid_exists(pid)]


def test_services_listen_on_loopback_only(queue: tq.LocalQueue) -> None:
    port = json.loads(queue.address.read_text())["port"]
    here = [c for c in psutil.Process().net_connections("inet") if c.laddr.port == port and not c.raddr]
    assert [connection.laddr.ip for connection in here] == ["127.0.0.1"]
    for pid in queue.pids().values():
        listening = [c for c in psutil.Process(pid).net_connections("inet") if c.status == psutil.CONN_LISTEN]
        assert all(connection.laddr.ip in ("127.0.0.1", "::1") for connection in listening)


def test_rows_spread_over_units_by_load(queue: tq.LocalQueue) -> None:
    client = queue.client("producer")
    client.put_rows(prompts("x" * 100_000), partition=7)
    for _ in range(8):
        client.put_rows(prompts("y" * 10_000), partition=7)
    held = [unit.num_bytes for unit in client.unit_stats().values()]
    assert max(held) < 2 * min(held), held
    client.clear_partition(7)


def test_a_row_that_exists_is_refused_and_nothing_is_lost(queue: tq.LocalQueue) -> None:
    client = queue.client("producer")
    (row,) = client.put_rows(prompts("first"), partition=8)
    for _ in range(4):  # whichever unit is asked
        with pytest.raises(RowsExist):
            client.put_rows(prompts("again"), partition=8, rows=[row])
    assert take(client, "score", 1)["prompt"].texts() == ["first"]
    client.clear_partition(8)


def test_clearing_a_partition_supersedes_work_on_it(queue: tq.LocalQueue) -> None:
    client = queue.client("worker")
    client.put_rows(prompts("a", "b"), partition=9)
    lease = take(client, "score", 2)
    client.clear_partition(9)
    assert not lease.put({"score": torch.zeros(2)})
    assert client.stats()[0].live_rows == 0


def test_an_unknown_task_is_refused_by_name(queue: tq.LocalQueue) -> None:
    with pytest.raises(ConfigError, match="'judge'.*score"):
        queue.client("me").fetch("judge", num_rows=1)


def test_a_full_queue_says_what_it_waits_for() -> None:
    with tq.start({"train": ["prompt"]}, num_units=1, config=FAST.model_copy(update={"max_live_rows": 2})) as queue:
        client = queue.client("producer")
        client.put_rows(prompts("a", "b"))
        with pytest.raises(QueueFull, match=r"2 of 2.*train"):
            client.put_rows(prompts("c"), timeout_s=0.2)
        waiting = threading.Thread(target=lambda: client.put_rows(prompts("d")))
        waiting.start()
        wait_for(lambda: client.stats()[0].waiting_puts == 1, "waiting put")
        take(client, "train", 2).ack()
        waiting.join(DEADLINE_S)
        assert take(client, "train", 2)["prompt"].texts() == ["d"]


def test_each_of_two_controllers_serves_its_tasks_and_survives_kill_9() -> None:
    with tq.start(TASKS, num_controllers=2, config=FAST) as queue:
        client = queue.client("me")
        client.put_rows(prompts("a", "b", "c", "d"))
        held = take(client, "score", 2)
        done = take(client, "score", 1)
        done.put({"score": tq.column(torch.ones(1))})
        for name in ("controller-0", "controller-1"):
            os.kill(queue.pids()[name], signal.SIGKILL)
        held.put({"score": tq.column(torch.zeros(2))})
        rest = take(client, "score", 4)
        assert sorted(rest.rows) == [3]
        rest.put({"score": tq.column(torch.zeros(1))})
        trained: list[int] = []
        while len(trained) < 4:
            lease = take(client, "train", 4)
            trained += lease.rows
            lease.ack()
        assert sorted(trained) == [0, 1, 2, 3]
        served = [[task.task for task in stats.tasks] for stats in client.stats()]
        assert served == [["score"], ["train"]]


@pytest.mark.gate
def test_rows_lost_with_a_unit_come_back_only_to_tasks_that_had_not_acked_them() -> None:
    with tq.start({"look": ["prompt"], "train": ["prompt"]}, config=FAST) as queue:
        client = queue.client("me")
        rows = [client.put_rows(prompts(text))[0] for text in "abcd"]
        seen = take(client, "look", 4)
        seen.ack()
        victim = seen.units[0]
        gone = {row for row, unit in zip(seen.rows, seen.units, strict=True) if unit == victim}
        os.kill(queue.pids()[victim], signal.SIGKILL)
        lost = client.lost_rows(timeout_s=DEADLINE_S)
        assert lost is not None
        assert set(lost.rows) == gone
        text_of = dict(zip(rows, "abcd", strict=True))
        client.put_rows(prompts(*(text_of[row] for row in lost.rows)), rows=lost.rows, groups=lost.groups)
        trained: dict[int, str] = {}
        while len(trained) < 4:
            lease = take(client, "train", 4)
            trained |= zip(lease.rows, lease["prompt"].texts(), strict=True)
            lease.ack()
        assert trained == text_of
        assert isinstance(client.fetch("look", num_rows=1, timeout_s=0.2), NoRows)


def test_an_ack_of_rows_in_hand_counts_though_their_unit_died() -> None:
    with tq.start({"train": ["prompt"]}, num_units=1, config=FAST) as queue:
        client = queue.client("me")
        client.put_rows(prompts("a"))
        lease = take(client, "train", 1)
        os.kill(queue.pids()["storage-0"], signal.SIGKILL)
        assert lease.ack()
        assert lease.ack(lease.rows)
        queue.wait_until_up(DEADLINE_S)
        assert client.lost_rows(timeout_s=1) is None
        assert client.stats()[0].live_rows == 0


@pytest.mark.parametrize("victims", [["storage-0"], ["storage-0", "controller-0"]])
def test_finished_rows_that_are_put_again_are_not_worked_on_again(victims: list[str]) -> None:
    """A producer that died before it heard that a put was in has a successor that repeats it; the unit forgot it."""
    with tq.start({"train": ["prompt"]}, num_units=1, config=FAST) as queue:
        client = queue.client("me")
        rows = client.put_rows(prompts("a", "b"))
        take(client, "train", 2).ack()
        for victim in victims:
            kill_and_wait(queue, victim)
        client.put_rows(prompts("a", "b"), rows=rows)
        (newer,) = client.put_rows(prompts("c"))
        assert take(client, "train", 9).rows == [newer]


def test_rows_that_a_checkpoint_covers_stay_done_though_units_forget_them() -> None:
    config = FAST.model_copy(update={"retain_until_checkpoint": True})
    with tq.start({"train": ["prompt"]}, num_units=1, config=config) as queue:
        client = queue.client("me")
        rows = client.put_rows(prompts("a", "b"), partition=1)
        take(client, "train", 2).ack()
        client.release_checkpointed(1)
        kill_and_wait(queue, "controller-0")
        client.put_rows(prompts("a", "b"), rows=rows, partition=1)
        (newer,) = client.put_rows(prompts("c"), partition=2)
        assert take(client, "train", 9).rows == [newer]


def test_cleared_partition_begins_anew_though_a_controller_was_away() -> None:
    config = FAST.model_copy(update={"num_controllers": 2})
    with tq.start({"score": ["prompt"], "train": ["prompt"]}, num_units=1, config=config) as queue:
        client = queue.client("me")
        rows = client.put_rows(prompts("a", "b"), partition=1)
        for task in ("score", "train"):
            take(client, task, 2).ack()
        kill_and_wait(queue, "storage-0")  # now the controllers alone know of finished rows
        os.kill(queue.pids()["controller-1"], signal.SIGKILL)
        client.clear_partition(1)
        queue.wait_until_up(DEADLINE_S)
        client.put_rows(prompts("a", "b"), rows=rows, partition=1)
        assert [list(take(client, task, 2).rows) for task in ("score", "train")] == [list(rows)] * 2


def test_client_of_a_full_service_hears_what_to_raise_at_once() -> None:
    few = FAST.model_copy(update={"max_clients": 4})
    refused = pytest.raises(PeerRefused, match="controller-0 is full: 4 clients; raise max_clients")
    with tq.start({"train": ["prompt"]}, num_units=1, config=few) as queue, refused:
        for k in range(5):
            queue.client(f"client {k}").stats()


def test_service_that_cannot_be_started_again_is_named(tmp_path: Path) -> None:
    logs = tmp_path / "made" / "logs"
    impatient = FAST.model_copy(update={"request_timeout_s": 5})
    with tq.start({"train": ["prompt"]}, num_units=1, config=impatient, log_dir=logs) as queue:
        client = queue.client("me")
        client.put_rows(prompts("a"))
        assert "storage-0: registered with controller-0" in (logs / "storage-0.log").read_text()
        shutil.rmtree(logs)
        os.kill(queue.pids()["storage-0"], signal.SIGKILL)
        refusals: list[str] = []

        def is_refused() -> bool:
            try:
                queue.client("late").close()
            except TransportError as error:
                refusals.append(str(error))
            return bool(refusals)

        wait_for(is_refused, "refusal")
        assert "keep-storage-0 died: storage-0 failed 3 times in a row, the last time it could not" in refusals[0]
        with pytest.raises(TransportError) as refused:
            client.put_rows(prompts("c"), timeout_s=10 * DEADLINE_S)
        assert not isinstance(refused.value, DeadlineExceeded), "nobody waits for what does not come back"


def test_a_unit_may_be_added_while_the_queue_runs() -> None:
    with tq.start({"train": ["prompt"]}, num_units=1, config=FAST) as queue:
        client = queue.client("me")
        client.put_rows(prompts("x" * 100_000))
        name = queue.add_unit()
        queue.wait_until_up(DEADLINE_S)
        wait_for(lambda: name in client.unit_stats(), "new unit")
        client.put_rows(prompts("y"))
        assert client.unit_stats()[name].num_rows == 1


def test_a_stopped_consumer_loses_its_leases_and_its_late_put_is_fenced(start: Callable[..., Any]) -> None:
    with tq.start(TASKS, config=FAST) as queue:
        client = queue.client("healthy")
        client.put_rows(prompts("a"))
        stopped = start(sleeper, str(queue.address))
        assert stopped.hear() == [0]
        stopped.signal(signal.SIGSTOP)
        lease = take(client, "score", 1)
        lease.put({"score": tq.column(torch.tensor([2.0]))})
        stopped.signal(signal.SIGCONT)
        stopped.tell("put")
        assert stopped.hear() is False
        assert take(client, "train", 1)["score"].values.tolist() == [2.0]


def test_a_stopped_unit_delays_no_rows_of_another_one() -> None:
    patient = FAST.model_copy(update={"request_timeout_s": 10 * DEADLINE_S, "unit_grace_s": 10 * DEADLINE_S})
    with tq.start({"score": ["prompt"]}, config=patient) as queue:
        client, holder = queue.client("me"), queue.client("holder")
        while not all(unit.num_rows for unit in client.unit_stats().values()):
            client.put_rows(prompts("x" * 10_000))
        lease = take(holder, "score", 99)
        assert set(lease.units) == {"storage-0", "storage-1"}
        os.kill(queue.pids()["storage-0"], signal.SIGSTOP)
        holder.close()
        again = take(client, "score", 99)
        assert again.rows == [row for row, unit in zip(lease.rows, lease.units, strict=True) if unit == "storage-1"]


def test_ranks_of_a_gang_keep_their_rounds_over_a_controller_restart() -> None:
    train = tq.TaskConfig(name="train", inputs=("prompt",), keeps_leases=True)
    recovering = FAST.model_copy(update={"lease_timeout_s": 15})  # long enough for both to come back
    with tq.start({"train": train}, config=recovering) as queue:
        first, second = queue.client("actor/0"), queue.client("actor/1")
        first.open_partition(1, 4)
        first.put_rows(prompts("a", "b", "c", "d"), partition=1)
        ask = lambda client, rank, index: client.fetch_round(  # noqa: E731
            FetchRound("train", "", 1, index, 1, rank, 2, DEADLINE_S)
        )
        mine = ask(first, 0, 0)
        os.kill(queue.pids()["controller-0"], signal.SIGKILL)
        shares = [mine.rows, ask(second, 1, 0).rows, ask(first, 0, 1).rows, ask(second, 1, 1).rows]
        assert sorted(row for share in shares for row in share) == [0, 1, 2, 3]
        assert ask(first, 0, 0).rows == mine.rows
        over = ask(first, 0, 2)
        assert isinstance(over, NoRows)
        assert over.reason is NoRowsReason.PARTITION_DONE


def test_a_snapshot_taken_under_traffic_restores_into_another_number_of_units(tmp_path: Path) -> None:
    whole = tmp_path / "snapshot"
    with tq.start(TASKS, num_units=3, config=FAST) as queue:
        client = queue.client("me")
        client.put_rows(prompts(*"abcdefgh"))
        lease = take(client, "score", 4)
        lease.put({"score": tq.column(torch.arange(4.0))})
        busy = threading.Event()
        traffic = threading.Thread(target=_keep_putting, args=(queue.client("producer"), busy))
        traffic.start()
        assert client.snapshot(whole) >= 8
        busy.set()
        traffic.join(DEADLINE_S)
        scored = dict(zip(lease.rows, [0.0, 1.0, 2.0, 3.0], strict=True))
    with tq.start(TASKS, num_units=1, config=FAST) as queue:
        client = queue.client("me")
        num_rows = client.restore(whole)
        stats = {task.task: task for task in client.stats()[0].tasks}
        assert stats["train"].ready == 4
        assert stats["score"].ready == num_rows - 4
        lease = take(client, "train", 4)
        batch = lease.read(["prompt", "score"])
        assert dict(zip(batch.indices, batch["score"].values.tolist(), strict=True)) == scored
        assert client.restore(whole) == num_rows, "putting the same again changes nothing"
        assert client.stats()[0].live_rows == num_rows
        new = client.put_rows(prompts(*"abcdefgh"))  # what the rows 0 to 7 hold
        assert client.stats()[0].live_rows == num_rows + 8
        assert min(new) >= num_rows


def _keep_putting(client: tq.QueueClient, stop: threading.Event) -> None:
    while not stop.is_set():
        client.put_rows(prompts("x", "y"))


@pytest.mark.parametrize(
    ("tasks", "settings", "message"),
    [
        ({}, {}, "at least one task"),
        ({"score": "prompt"}, {}, r"write \['prompt'\]"),
        ({"score": tq.TaskConfig(name="judge", inputs=("prompt",))}, {}, "that of 'judge'"),
        ({"score": tq.TaskConfig(name="score", inputs=("prompt",), policy="fifa")}, {}, "fifa"),
        ({"score": ["prompt"]}, {"num_units": 0}, "num_storage_units.*too few"),
        ({"score": ["prompt"]}, {"num_controllers": 0}, "num_controllers.*too few"),
        ({"score": ["prompt"]}, {"num_units": "2"}, "num_storage_units is '2'; give a whole number"),
        ({"score": ["prompt"]}, {"num_units": 1.5}, r"num_storage_units is 1\.5"),
        ({"score": ["prompt"]}, {"config": {}}, "config is a dict"),
        ({"score": ["prompt"]}, {"log_dir": Path("/proc/nowhere")}, "log_dir /proc/nowhere cannot be made"),
        ({"score": ["prompt"]}, {"host": "192.0.2.1"}, "host '192.0.2.1' is not a name or address of this host"),
        (
            {"score": ["prompt"]},
            {"host": "no.such.host.invalid"},
            "host 'no.such.host.invalid' is not a name or address",
        ),
        ({"score": ["prompt"]}, {"address_file": "/proc/nowhere/q.json"}, "/proc/nowhere/q.json cannot be written"),
        ({"score": ["prompt"]}, {"log_dir": "/proc/version"}, r"log_dir /proc/version cannot be made \(File exists\)"),
        (None, {}, "tasks are a NoneType"),
        (["score"], {}, "tasks are a list"),
        ({"score": None}, {}, "task score: the inputs are a list of columns, not None"),
        ({1: ["prompt"]}, {}, "a task is named 1"),
        ({"score": ["prompt", 2]}, {}, "task score: an input is named 2"),
        (
            {name: tq.TaskConfig(name=name, inputs=("prompt",), outputs=("y",)) for name in ("score", "judge")},
            {},
            "score and judge both write column 'y'",
        ),
    ],
)
def test_a_queue_that_cannot_be_is_refused_before_anything_starts(
    tasks: dict[str, Any], settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        tq.start(tasks, **settings)


@pytest.mark.parametrize(
    ("columns", "settings", "message"),
    [
        ({}, {}, "needs columns"),
        (prompts("a") | {"score": tq.column(["b", "c"])}, {}, "same number of rows"),
        (prompts("a", "b"), {"rows": []}, "names 0 rows"),
        (prompts("a", "b"), {"groups": [1]}, "names 1 groups"),
        (prompts("a"), {"rows": [-1]}, "rows: -1"),
        (prompts("a"), {"rows": [2**63]}, "rows: 9223372036854775808"),
        (prompts("a"), {"rows": ["one"]}, "rows: not a whole number"),
        (prompts("a"), {"partition": -1}, "partition: -1"),
        (prompts("x" * (2**20 + 1)), {}, "put fewer rows"),
    ],
)
def test_a_put_that_cannot_be_is_refused_here(
    queue: tq.LocalQueue, columns: dict[str, tq.Column], settings: dict[str, Any], message: str
) -> None:
    credentials = QueueAddress.load(queue.address).connect_store()
    client = tq.QueueClient(credentials, "wrong", config=FAST.model_copy(update={"max_message_bytes": 2**20}))
    with pytest.raises(ConfigError, match=message):
        client.put_rows(columns, **settings)
    client.close()


def test_rows_and_columns_beside_a_lease_are_refused_and_the_lease_stays(queue: tq.LocalQueue) -> None:
    client = queue.client("worker")
    client.put_rows(prompts("a", "b"), partition=10)
    lease = take(client, "score", 2)
    one = {"score": tq.column(torch.ones(1))}
    with pytest.raises(ConfigError, match="not in the lease"):
        lease.put(one, [lease.rows[-1] + 1])
    with pytest.raises(ConfigError, match="not in the lease"):
        lease.ack([lease.rows[-1] + 1])
    with pytest.raises(ConfigError, match="2 rows are named"):
        lease.put(one)
    lease.put({"score": tq.column(torch.ones(2))})
    client.clear_partition(10)


def test_a_consumer_that_was_silent_for_too_long_hears_that_its_fetch_is_over(queue: tq.LocalQueue) -> None:
    """Else it would wait, once it goes on, for an answer that nobody owes it any more."""
    address = QueueAddress.load(queue.address)
    connection = Connection(address.connect_store(), "controller-0", "silent", CONTROLLER_REPLIES)
    connection.call_service(Join("silent@1", []), timeout_s=DEADLINE_S)
    reply, _ = connection.call_service(FetchRows("score", "silent@1", 1, 0, 600), timeout_s=DEADLINE_S)
    assert isinstance(reply, NoRows)
    assert reply.reason is NoRowsReason.DEADLINE
    reply, _ = connection.call_service(Heartbeat("silent@1"), timeout_s=DEADLINE_S)
    assert not reply.known
    connection.close()


def test_a_consumer_that_never_comes_back_is_waited_for_once(tmp_path: Path) -> None:
    with tq.start({"score": ["prompt"]}, num_units=1, config=FAST, log_dir=tmp_path) as queue:
        client = queue.client("me")
        store = QueueAddress.load(queue.address).connect_store().own_store()
        ghost = "tq/0/controller-0/owner/ghost@1"
        store.set(ghost, "1")
        os.kill(queue.pids()["controller-0"], signal.SIGKILL)
        client.put_rows(prompts("a"))
        assert take(client, "score", 1).rows
        wait_for(lambda: not store.check([ghost]), "end of the ghost")
