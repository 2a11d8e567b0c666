"""The queue as processes: two storage units, a controller service, clients."""

import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from peers import QUEUE, Credentials, controller, doubler, holder, storage_unit, trainer

import tq
from asyncflow.errors import TransportError
from asyncflow.transport.server import Connection
from tq import Column, QueueClient, StreamingDataLoader, TaskSpec
from tq.messages import CONTROLLER_REPLIES, UNIT_REPLIES, FetchRound, GetUnitStats, LeaseGrant, NoRows, NoRowsReason
from workers.settings.schedule import ScheduleConfig, ScheduleMode

Start = Callable[..., Any]
SYNC = ScheduleConfig(mode=ScheduleMode.SYNC, max_staleness=0, rollout_batch_size=4, n_samples_per_prompt=2)
ASYNC = ScheduleConfig(mode=ScheduleMode.ASYNC, max_staleness=1, rollout_batch_size=3, n_samples_per_prompt=2)
DOUBLE = TaskSpec("double", frozenset({"x"}))
TRAIN = TaskSpec("train", frozenset({"x", "doubled"}), whole_groups=True, keeps_leases=True)
UNITS = ("storage-0", "storage-1")


@pytest.fixture(name="queue")
def _queue(start: Start) -> Callable[..., dict[str, Any]]:
    """Return a function that starts the queue's three processes."""

    def start_queue(*tasks: TaskSpec, schedule: ScheduleConfig = SYNC, last_step: int = 0) -> dict[str, Any]:
        services = {"controller": start(controller, tasks, schedule, last_step)}
        services |= {unit: start(storage_unit, unit) for unit in UNITS}
        for service in services.values():
            assert service.hear() == "ready"
        return services

    return start_queue


@pytest.fixture(name="connect")
def _connect(credentials: Credentials) -> Iterator[Callable[..., QueueClient]]:
    opened: list[QueueClient] = []

    def connect(name: str = "client") -> QueueClient:
        opened.append(QueueClient(credentials, name, config=QUEUE))
        return opened[-1]

    yield connect
    for client in opened:
        client.close()


def put_source(client: QueueClient, rows: range, partition: int = 1) -> None:
    """Put groups of two rows, in two parts, which go to different units; row r holds 0 .. its group."""
    for k in range(2):
        part = [row for row in rows if row // 2 % 2 == k]
        if part:
            column = Column.of_rows([torch.arange(row // 2 + 1) for row in part])
            client.put_rows({"x": column}, partition=partition, rows=part, groups=[row // 2 for row in part])


def unit_stats(credentials: Credentials) -> list[tuple[int, int]]:
    """Return (rows, bytes) of each unit."""
    stats = []
    for unit in UNITS:
        connection = Connection(credentials, unit, "observer", UNIT_REPLIES)
        reply, _ = connection.call_service(GetUnitStats(), timeout_s=10)
        stats.append((reply.num_rows, reply.num_bytes))
        connection.close()
    return stats


def eventually(check: Callable[[], bool], what: str) -> None:
    """Wait for something that no event announces to the test."""
    pause, deadline = threading.Event(), time.monotonic() + 10
    while not check():
        assert time.monotonic() < deadline, what
        pause.wait(0.05)


def round_of(index: int, rank: int, num_ranks: int = 2) -> FetchRound:
    """Return a request for two rows per rank."""
    return FetchRound("train", "", 1, index, 2, rank, num_ranks, 10)


@pytest.mark.gate
def test_rows_flow_through_all_tasks_and_leave_nothing_behind(
    queue: Any, connect: Any, credentials: Credentials
) -> None:
    queue(DOUBLE, TRAIN)
    source, client = connect("source"), connect("ref")
    parked: list[LeaseGrant | NoRows] = []
    waiting = threading.Thread(target=lambda: parked.append(client.fetch("double", num_rows=8)))
    waiting.start()
    eventually(lambda: source.stats()[0].tasks[0].parked_requests == 1, "the fetch did not park")
    source.open_partition(1, 8)
    put_source(source, range(8))
    waiting.join(10)
    assert not waiting.is_alive(), "the write did not wake the parked fetch"
    mapped = 0
    granted = parked[0]
    while mapped < 8:
        assert isinstance(granted, tq.Lease)
        x = granted["x"]
        assert x.lengths.tolist() == [group + 1 for group in granted.groups]
        granted.put({"doubled": Column(x.values * 2, x.lengths)})
        mapped += len(granted.rows)
        if mapped < 8:
            granted = client.fetch("double", num_rows=8)
    trainers = [connect(f"actor/{rank}") for rank in range(2)]
    held: list[tuple[QueueClient, LeaseGrant]] = []
    for index in range(2):
        for rank, one in enumerate(trainers):
            share = one.fetch_round(round_of(index, rank))
            batch = one.data.get(share, ["doubled", "x"])
            assert torch.equal(batch["doubled"].values, batch["x"].values * 2)
            assert batch.indices == tuple(share.rows)
            held.append((one, share))
    assert sorted(row for _, share in held for row in share.rows) == list(range(8))
    assert [share.last for _, share in held] == [False, False, True, True]
    ends = [one.fetch_round(round_of(2, rank)) for rank, one in enumerate(trainers)]
    assert [end.reason for end in ends] == [NoRowsReason.PARTITION_DONE] * 2
    for one, share in held:
        one.data.ack(share, share.rows)
    eventually(lambda: unit_stats(credentials) == [(0, 0), (0, 0)], "rows were not freed")
    assert source.stats()[0].live_rows == 0


def test_deadline_answers_a_fetch_that_finds_nothing(queue: Any, connect: Any) -> None:
    queue(DOUBLE)
    client = connect()
    began = time.monotonic()
    answer = client.fetch("double", num_rows=1, timeout_s=0.3)
    assert (answer.reason, time.monotonic() - began < 30) == (NoRowsReason.DEADLINE, True)


@pytest.mark.gate
def test_rows_of_a_killed_client_go_to_another_one(queue: Any, start: Start, connect: Any) -> None:
    queue(DOUBLE)
    client = connect()
    put_source(client, range(8))
    victim = start(holder, "double", 8)
    assert victim.hear() == list(range(8))
    waiting: list[int] = []

    def take_all() -> None:
        while len(waiting) < 8:  # each unit's rows come back by themselves
            waiting.extend(client.fetch("double", num_rows=8).rows)

    thread = threading.Thread(target=take_all)
    thread.start()
    victim.signal(signal.SIGKILL)
    thread.join(10)
    assert sorted(waiting) == list(range(8))


@pytest.mark.gate
def test_late_put_of_a_former_owner_is_fenced(queue: Any, connect: Any) -> None:
    queue(DOUBLE, TRAIN)
    former, heir = connect("former"), connect("heir")
    put_source(heir, range(2))
    lost = former.fetch("double", num_rows=2)
    former._session._links.get("controller-0", CONTROLLER_REPLIES).close()
    granted = heir.fetch("double", num_rows=2)
    assert granted.rows == lost.rows
    outputs = {"doubled": Column.of_scalars(torch.zeros(2, dtype=torch.int64))}
    assert not lost.put(outputs, lost.rows)
    assert granted.put(outputs)
    assert granted.put(outputs, granted.rows)
    assert not lost.put(outputs, lost.rows)


def test_late_put_to_rows_that_were_freed_is_fenced(queue: Any, connect: Any, credentials: Credentials) -> None:
    queue(DOUBLE)
    former, heir = connect("former"), connect("heir")
    put_source(heir, range(2))
    lost = former.fetch("double", num_rows=2)
    former._session._links.get("controller-0", CONTROLLER_REPLIES).close()
    granted = heir.fetch("double", num_rows=2)
    granted.ack()
    eventually(lambda: unit_stats(credentials) == [(0, 0), (0, 0)], "rows were not freed")
    assert not lost.ack()


def test_client_whose_channel_broke_opens_another(queue: Any, connect: Any) -> None:
    queue(DOUBLE)
    client = connect()
    put_source(client, range(2))
    assert client.stats()[0].live_rows == 2
    for link in list(client._session._links._links.values()):
        link.close()
    assert client.fetch("double", num_rows=2)["x"].values.tolist() == [0, 0]


def test_dead_unit_is_an_error_within_the_deadline_of_whoever_needs_it(queue: Any, credentials: Credentials) -> None:
    services = queue(DOUBLE)
    client = QueueClient(credentials, "client", config=QUEUE.model_copy(update={"request_timeout_s": 2.0}))
    eventually(lambda: len(client.unit_stats()) == len(UNITS), "a unit did not register")
    put_source(client, range(4))
    granted = client.fetch("double", num_rows=4)
    assert set(granted.units) == set(UNITS)
    granted.read(["x"])
    services["storage-1"].signal(signal.SIGKILL)
    services["storage-1"].end_by_signal()
    began = time.monotonic()
    with pytest.raises(TransportError):
        granted.put({"doubled": granted["x"]})
    assert time.monotonic() - began < 30
    assert client.stats()[0].newest_version == 0
    client.close()


@pytest.mark.gate
def test_admission_trainers_and_a_map_task_run_a_few_steps(
    queue: Any, start: Start, connect: Any, credentials: Credentials
) -> None:
    services = queue(DOUBLE, TRAIN, schedule=ASYNC, last_step=4)
    mapper = start(doubler)
    ranks = [start(trainer, rank, 2, 4, 0) for rank in range(2)]
    seen = [rank.hear() for rank in ranks]
    for partition in range(1, 5):
        rounds = [rank_seen[partition] for rank_seen, _ in seen]
        assert len(rounds[0]) == len(rounds[1])
        rows = sorted(row for of_rank in rounds for indices in of_rank for row in indices)
        assert rows == list(range((partition - 1) * 6, partition * 6))
    assert [stopped for _, stopped in seen] == [False, False]
    eventually(lambda: unit_stats(credentials) == [(0, 0), (0, 0)], "rows were not freed")
    stats = connect().stats()[0]
    assert (stats.admitted_groups, stats.newest_version, stats.live_rows) == (12, 4, 0)
    connect().stop()
    assert mapper.hear() == 24
    for service in services.values():
        service.tell("close")
    assert [service.hear() for service in services.values()] == ["None", "closed", "closed"]
    assert [child.end() for child in (*services.values(), *ranks, mapper)] == [0] * 6


def test_stop_ends_all_trainers_at_the_same_partition(queue: Any, start: Start) -> None:
    queue(DOUBLE, TRAIN, schedule=ASYNC, last_step=50)
    start(doubler)
    ranks = [start(trainer, rank, 2, 50, 3) for rank in range(2)]
    (first, stopped_0), (second, stopped_1) = (rank.hear() for rank in ranks)
    assert (stopped_0, stopped_1) == (True, True)
    assert {1, 2, 3} <= first.keys()
    assert first.keys() == second.keys()


def test_closing_a_loader_ends_an_iteration_that_waits(queue: Any, connect: Any) -> None:
    queue(DOUBLE, TRAIN)
    client = connect()
    loader = StreamingDataLoader(client, "train", ["x"], first_partition=1, last_partition=1, rows_per_round=1)
    loader.next_partition()
    rounds: list[Any] = []
    iterating = threading.Thread(target=lambda: rounds.extend(loader))
    iterating.start()
    loader.close()
    loader.close()
    iterating.join(10)
    assert not iterating.is_alive()
    assert rounds == []


def test_loader_raises_when_the_controller_dies_and_raises_again(
    queue: Any, connect: Any, credentials: Credentials
) -> None:
    services = queue(DOUBLE, TRAIN)
    impatient = QueueClient(
        replace(credentials, timeout_s=2.0), "actor/0", config=QUEUE.model_copy(update={"request_timeout_s": 1.0})
    )
    loader = StreamingDataLoader(impatient, "train", ["x"], first_partition=1, last_partition=1, rows_per_round=1)
    loader.next_partition()
    eventually(lambda: connect("observer").stats()[0].tasks[1].parked_requests == 1, "the loader did not ask")
    services["controller"].signal(signal.SIGKILL)
    for _ in range(2):
        with pytest.raises(TransportError):
            next(iter(loader))
    loader.close()
    impatient.close()
