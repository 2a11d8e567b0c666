"""`QueueClient` over services that answer from memory, on a clock that only they move."""

from collections.abc import Callable
from concurrent.futures import TimeoutError as FutureTimeout
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

from asyncflow.errors import (
    ConfigError,
    DeadlineExceeded,
    LeaseFenced,
    PeerRefused,
    PutPending,
    RowsExist,
    TransportError,
)
from asyncflow.sealed_store import SealedStore
from asyncflow.transport.meeting import Credentials
from tq.client.lease import Lease
from tq.client.queue_client import QueueClient
from tq.client.session import PUT_GRACE_S
from tq.columns import Column
from tq.config import QueueConfig
from tq.directory import Directory, allocate_rows, reserve_rows
from tq.messages import (
    AckLost,
    Alive,
    ClearPartition,
    ClearRows,
    CloseWriting,
    Columns,
    CutSnapshot,
    Done,
    FetchRows,
    GetColumns,
    GetUnitStats,
    Heartbeat,
    HoldPuts,
    LeaseGrant,
    ListRows,
    Message,
    PutOutputs,
    PutRows,
    Release,
    RowList,
    RowRecords,
    SnapshotWritten,
    Stored,
    WriteSnapshot,
)
from tq.wire import describe

TIMEOUT_S = 10.0
LEASE = LeaseGrant("score", 7, 1, [3, 4], [3, 4], ["storage-0", "storage-1"])
Y = {"y": Column.of_scalars(torch.zeros(2))}


class Services:
    """Stands for the channels to all services: notes what they are told, and how long their answers were waited for.

    Attributes:
        alive: answers to heartbeats; the last one again and again.
        answer_s: how long every answer takes.
        beat_s: how long a heartbeat takes.
        waited_s: for each answer, how long it was waited for.
        refusals: message type -> errors, one per answer as long as there are some.
        away: services to which no channel is open.
        rows: unit -> rows that it holds.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self.answer_s = 0.0
        self.beat_s = 0.05
        self.alive = [Alive(True, {"storage-0": 0, "storage-1": 0}, [], 0)]
        self.told: list[tuple[str, Message]] = []
        self.waited_s: list[float] = []
        self.refusals: dict[type[Message], list[Exception]] = {}
        self.away: set[str] = set()
        self.rows: dict[str, list[int]] = {}
        self.closed = False

    def find_open(self, service: str) -> "Service | None":
        return None if service in self.away else Service(self, service)

    def get(self, service: str, replies: Any, *, timeout_s: float | None = None) -> "Service":
        return Service(self, service)

    def close(self) -> None:
        self.closed = True

    def services_told(self, kind: type[Message]) -> list[str]:
        return [service for service, message in self.told if isinstance(message, kind)]


class Service:
    """One of them."""

    def __init__(self, services: Services, name: str) -> None:
        self.services, self.name = services, name

    def submit(self, message: Message, payload: Any = None) -> "Answer":
        if not isinstance(message, Heartbeat):
            self.services.told.append((self.name, message))
        return Answer(self.services, message, self.name)

    def call_service(self, message: Message, *, timeout_s: float) -> Any:
        return self.submit(message).result(timeout_s)


class Answer:
    """A future whose result takes time."""

    def __init__(self, services: Services, message: Message, service: str) -> None:
        self.services, self.message, self.service = services, message, service
        self.left_s = services.answer_s
        self.number = -1

    def done(self) -> bool:
        return self.left_s <= 0

    def result(self, timeout_s: float) -> Any:
        services, message = self.services, self.message
        if isinstance(message, Heartbeat):
            services.now += services.beat_s
            return (services.alive.pop(0) if len(services.alive) > 1 else services.alive[0]), None
        if services.refusals.get(type(message)):
            services.now += services.answer_s
            raise services.refusals[type(message)].pop(0)
        if isinstance(message, AckLost) and AckLost not in services.refusals:
            raise PeerRefused("the row is not lost")
        if self.number < 0:
            self.number = len(services.waited_s)
            services.waited_s.append(0.0)
        waited_s = min(self.left_s, timeout_s)
        services.waited_s[self.number] += waited_s
        services.now += waited_s
        self.left_s -= waited_s
        if self.left_s > 0:
            raise FutureTimeout
        if isinstance(message, ListRows | ClearRows):
            named = message.rows
            here = [row for row in services.rows.get(self.service, ()) if named is None or row in named]
            return RowList([row_records(*here)] if here else []), None
        if isinstance(message, GetColumns):
            headers, payload = describe({"x": Column.of_scalars(torch.tensor(message.rows))}, narrow=False)
            values = torch.empty(payload.num_bytes, dtype=torch.uint8)
            payload.write(values)
            return Columns(headers), values
        if isinstance(message, WriteSnapshot):
            return SnapshotWritten([], 0, 0), None
        return (Stored(0) if isinstance(message, PutOutputs | PutRows) else Done()), None


@pytest.fixture(name="services")
def _services(monkeypatch: pytest.MonkeyPatch) -> Services:
    monkeypatch.setattr("tq.client.session._RETRY_S", 0.0)
    services = Services()
    monkeypatch.setattr("asyncflow.clock.time", SimpleNamespace(monotonic=lambda: services.now))
    return services


@pytest.fixture(name="client")
def _client(services: Services) -> QueueClient:
    config = QueueConfig(request_timeout_s=TIMEOUT_S)
    credentials = Credentials(store := HashStore(), b"secret")  # type: ignore[arg-type]
    credentials._idle.append(SealedStore(store, b"secret"))
    client = QueueClient(credentials, "me", config=config)
    client._session._links = services  # type: ignore[assignment]
    client._session._clock = lambda: services.now
    client._session.__dict__["directory"] = Directory(("controller-0",), ("score", "train"))
    return client


CALLS: dict[str, Callable[[QueueClient], object]] = {
    "get": lambda client: client.data.get(LEASE, ["x"]),
    "put": lambda client: client.data.put(LEASE, LEASE.rows, Y),
    "ack": lambda client: client.data.ack(LEASE, LEASE.rows),
}


@pytest.mark.parametrize("call", CALLS)
def test_all_units_share_the_deadline_of_one_call(client: QueueClient, services: Services, call: str) -> None:
    services.answer_s = 0.4 * TIMEOUT_S
    CALLS[call](client)
    assert services.waited_s == pytest.approx([0.4 * TIMEOUT_S] * 2)


@pytest.mark.parametrize("call", CALLS)
def test_units_that_are_slow_one_after_the_other_do_not_add_up(
    client: QueueClient, services: Services, call: str
) -> None:
    services.answer_s = 0.7 * TIMEOUT_S
    with pytest.raises(TransportError, match="storage-1 did not answer"):
        CALLS[call](client)
    assert services.now == pytest.approx(TIMEOUT_S, abs=0.1)


def test_whoever_gives_up_says_who_waited_for_whom_and_how_long(client: QueueClient, services: Services) -> None:
    services.answer_s = 2 * TIMEOUT_S
    with pytest.raises(DeadlineExceeded, match=r"^\S+ tried for 10 s: storage-0 did not answer PutOutputs") as caught:
        client.data.put(LEASE, LEASE.rows, Y)
    assert caught.value.deadline


def test_silent_unit_leaves_those_asked_after_it_some_time(client: QueueClient, services: Services) -> None:
    services.answer_s = 2 * TIMEOUT_S
    with pytest.raises(TransportError, match="storage-0 did not answer"):
        client.data.put(LEASE, LEASE.rows, Y)
    assert services.waited_s == pytest.approx([TIMEOUT_S], rel=0.1)


def test_read_does_not_wait_any_longer_for_a_unit_that_counts_as_away(client: QueueClient, services: Services) -> None:
    """It may be stopped: its process lives, so the channel does not end. (Puts and acks wait for its return.)"""
    services.answer_s = 2 * TIMEOUT_S
    services.alive = [alive("storage-0", "storage-1"), alive("storage-1", away=("storage-0",))]
    with pytest.raises(TransportError, match="storage-0 does not answer .*, and counts as away"):
        client.data.get(LEASE, ["x"])
    assert services.now < 0.9 * TIMEOUT_S


@pytest.mark.parametrize("timeout_s", [0.0, 3.0, None])
def test_call_has_the_time_that_was_asked_for_even_if_that_is_none(
    client: QueueClient, services: Services, timeout_s: float | None
) -> None:
    expected = TIMEOUT_S if timeout_s is None else timeout_s
    client.put_rows(Y, rows=[3, 4], timeout_s=timeout_s)
    [(_, put)] = services.told
    assert isinstance(put, PutRows)
    assert put.timeout_s == expected
    assert services.waited_s == [0.0]
    services.answer_s = 1000.0
    with pytest.raises(TransportError):
        client.put_rows(Y, rows=[3, 4], timeout_s=timeout_s)
    assert services.waited_s[1] == pytest.approx(expected + PUT_GRACE_S, rel=0.1)


def test_put_of_rows_that_somebody_else_is_putting_is_repeated_until_that_is_over(
    client: QueueClient, services: Services
) -> None:
    services.refusals[PutRows] = [PutPending("row 3 is just being put, at storage-0")] * 3
    client.put_rows(Y, rows=[3, 4])
    assert len(services.services_told(PutRows)) == 4
    services.refusals[PutRows] = [PutPending("row 3 is just being put"), RowsExist("row 3 exists already")]
    with pytest.raises(RowsExist):
        client.put_rows(Y, rows=[3, 4])


def test_put_that_somebody_else_never_ends_fails_at_its_deadline(client: QueueClient, services: Services) -> None:
    services.refusals[PutRows] = [PutPending("row 3 is just being put, at storage-0")] * 9
    services.answer_s = 0.3 * TIMEOUT_S
    with pytest.raises(DeadlineExceeded, match="tried for 10 s: row 3 is just being put, at storage-0"):
        client.put_rows(Y, rows=[3, 4])
    assert len(services.services_told(PutRows)) == 4


@pytest.mark.parametrize("call", ["put", "ack"])
def test_rows_whose_work_is_dropped_return_though_the_lease_is_void_for_one_of_them_only(
    client: QueueClient, services: Services, call: str
) -> None:
    """Else a controller that goes on to count them as this client's would never give them to anybody."""
    client._session.held.granted(FetchRows("score", client.owner, 2, 0, 1.0), LEASE)
    services.refusals[PutOutputs] = [LeaseFenced("row 3 is not here any more")]
    services.refusals[AckLost] = [LeaseFenced("row 3: the lease was given to another")]
    with pytest.raises(LeaseFenced):
        CALLS[call](client)
    assert services.told[-1] == ("controller-0", Release("score", 7, [3, 4], fenced=True))
    assert client._session.held.of_tasks(["score"]) == []


def test_ack_is_repeated_until_the_controller_hears_that_a_unit_started_empty(
    client: QueueClient, services: Services
) -> None:
    """Else the trainer, which acks beside its next step, would end because a unit did."""
    services.refusals[PutOutputs] = [LeaseFenced("row 3 is not here any more")] * 3
    services.refusals[AckLost] = [PeerRefused("row 3 is not lost: storage-0 has it")] * 2
    client.data.ack(LEASE, LEASE.rows)
    assert services.services_told(PutOutputs) == ["storage-0"] * 3 + ["storage-1"]
    assert services.services_told(AckLost) == ["controller-0"] * 3


def test_consumer_whose_controller_is_away_does_not_wait_to_return_rows(
    client: QueueClient, services: Services
) -> None:
    """It joins anew when the controller is back, and does not tell of them."""
    client._session.held.granted(FetchRows("score", client.owner, 2, 0, 1.0), LEASE)
    services.away.add("controller-0")
    services.refusals[PutOutputs] = [LeaseFenced("row 3 is not here any more")]
    with pytest.raises(LeaseFenced):
        client.data.put(LEASE, LEASE.rows, Y)
    assert services.services_told(Release) == []
    assert client._session.held.of_tasks(["score"]) == []


def test_controller_that_is_joined_again_does_not_hear_of_rows_that_could_not_be_released(
    client: QueueClient, services: Services
) -> None:
    client._session.held.granted(FetchRows("score", client.owner, 2, 0, 1.0), LEASE)
    services.refusals[Release] = [TransportError("gone")]
    services.closed = True
    with pytest.raises(TransportError):
        client.data.release_rows(LEASE, LEASE.rows)
    assert client._session.held.of_tasks(["score"]) == []


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"x": []}, "column 'x': an empty list says nothing about its rows"),
        ({"x": torch.tensor(1)}, "column 'x': a tensor of rank 0 holds no rows"),
        ({"y": Y["y"], "x": "ab"}, "column 'x': a column cannot be made of str; give a tensor or a list of rows"),
        ({"x": ["a", {1}]}, "column 'x': row 1 cannot be stored as json"),
        ([1, 2], "a put needs columns by name, not a list"),
        ({"": Y["y"]}, 'a column is named ""; give it a name'),
        ({1: Y["y"]}, "a column is named 1, a int; name it with a string"),
    ],
)
def test_what_is_no_column_is_refused_by_name(
    client: QueueClient, services: Services, columns: Any, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        client.put_rows(columns)
    with pytest.raises(ConfigError, match=message):
        Lease(client.data, LEASE).put(columns)
    assert services.told == []


@pytest.mark.parametrize(
    ("partition", "num_rows", "message"),
    [(-1, 4, "partition: -1"), (1, -4, "num_rows: -4"), ("one", 4, "partition: not a whole number")],
)
def test_partition_that_cannot_be_is_refused(
    client: QueueClient, services: Services, partition: Any, num_rows: int, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        client.open_partition(partition, num_rows)
    assert services.told == []


def alive(*units: str, away: tuple[str, ...] = ()) -> Alive:
    return Alive(True, dict.fromkeys(units, 0), list(away), 0)


def test_unit_that_dies_while_it_is_asked_leaves_open_whether_a_checkpoint_is_wanted(
    client: QueueClient, services: Services
) -> None:
    services.alive = [alive("storage-0")]
    services.refusals[GetUnitStats] = [TransportError("storage-0 is gone")]
    assert not client.checkpoint_wanted()
    assert services.services_told(GetUnitStats) == ["storage-0"]


def test_clearing_waits_for_a_unit_that_is_away(client: QueueClient, services: Services) -> None:
    services.alive = [alive("storage-0", away=("storage-1",))] * 2 + [alive("storage-0", "storage-1")]
    client.clear_partition(1)
    assert services.services_told(ClearPartition) == ["storage-0", "storage-1", "controller-0"]


def test_unit_that_stays_away_is_named_at_the_deadline(client: QueueClient, services: Services, tmp_path: Path) -> None:
    services.alive = [alive("storage-0", away=("storage-1", "storage-2"))]
    with pytest.raises(TransportError, match="away: storage-1 storage-2"):
        client.clear_partition(1)
    assert services.now == pytest.approx(TIMEOUT_S, abs=1.1)
    with pytest.raises(TransportError, match="away: storage-1 storage-2"):
        client.snapshot(tmp_path / "snapshot")
    assert services.told == []
    assert list(tmp_path.iterdir()) == []


def test_commits_and_counts_go_on_without_a_unit_that_is_away(client: QueueClient, services: Services) -> None:
    services.alive = [alive("storage-0", away=("storage-1",))]
    client.release_checkpointed(3)
    assert [service for service, _ in services.told] == ["controller-0", "storage-0"], "units forget finished rows"


def test_snapshot_of_units_of_which_one_went_meanwhile_is_no_snapshot(
    client: QueueClient, services: Services, tmp_path: Path
) -> None:
    both = alive("storage-0", "storage-1")
    services.alive = [alive("storage-0", away=("storage-1",)), both, both, alive("storage-0", away=("storage-1",))]
    with pytest.raises(TransportError, match="storage-1 went away while it was taken"):
        client.snapshot(tmp_path / "snapshot")
    told = [services.services_told(kind) for kind in (HoldPuts, CutSnapshot, WriteSnapshot)]
    assert told == [["storage-0", "storage-1"], ["storage-0", "storage-1"], ["storage-0"]]
    assert list(tmp_path.iterdir()) == []


def test_new_rows_are_none_of_those_that_were_named_before(client: QueueClient) -> None:
    assert client.put_rows(Y) == (0, 1)
    client.put_rows(Y, rows=[3, 4])
    assert client.put_rows(Y) == (5, 6)
    client.put_rows(Y, rows=[10_000, 10_001])
    (first, second) = client.put_rows(Y)
    assert second == first + 1
    with client._session._credentials.borrowed_store() as store:
        assert allocate_rows(store, 1)[0] > 10_001


def test_ascending_rows_ask_the_store_once_per_block(client: QueueClient, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def reserve(store: Any, beyond: int) -> int:
        asked.append(beyond)
        return reserve_rows(store, beyond)

    monkeypatch.setattr("tq.client.session.reserve_rows", reserve)
    for row in range(0, 2048, 2):
        client.put_rows(Y, rows=[row, row + 1])
    assert len(asked) == 2


def test_the_largest_row_may_be_named_and_new_ones_are_still_small(client: QueueClient) -> None:
    client.put_rows(Y, rows=[2**63 - 2, 2**63 - 1])
    assert 0 <= client.put_rows(Y)[0] < 2**62


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"task": "scoer"}, "no task is named 'scoer'; known: score train"),
        ({"task": 3}, "no task is named 3; known: score train"),
        ({"num_rows": 0}, r"num_rows: 0 is not in 1 \.\. 2147483648"),
        ({"num_rows": 1.5}, "num_rows: not a whole number"),
        ({"version": -1}, "version: -1"),
        ({"version": "new"}, "version: not a whole number"),
        ({"token_budget": -1}, "token_budget: -1"),
        ({"timeout_s": float("nan")}, "timeout_s: nan is not a number of seconds"),
        ({"timeout_s": float("inf")}, "timeout_s: inf"),
        ({"timeout_s": -1}, "timeout_s: -1"),
        ({"timeout_s": "10"}, "timeout_s: '10'"),
        ({"replica": 3}, "replica: 3 is not a string"),
    ],
)
def test_fetch_that_cannot_be_is_refused(
    client: QueueClient, services: Services, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        client.fetch(**({"task": "score", "num_rows": 1} | settings))
    assert services.told == []


@pytest.mark.parametrize("names", ["x", [1], ["x", None], 3])
def test_columns_are_asked_for_by_a_list_of_names(client: QueueClient, services: Services, names: Any) -> None:
    with pytest.raises(ConfigError, match="column name"):
        Lease(client.data, LEASE).read(names)
    assert services.told == []


@pytest.mark.parametrize("call", ["publish_version", "release_checkpointed"])
def test_what_is_no_step_is_refused(client: QueueClient, services: Services, call: str) -> None:
    with pytest.raises(ConfigError, match="step: -1"):
        getattr(client, call)(-1)
    assert services.told == []


def test_plain_tensors_lists_and_strings_are_put(client: QueueClient, services: Services) -> None:
    client.put_rows({"a": torch.zeros(2, 3), "b": ["x", "y"], "c": [torch.ones(1), torch.ones(4)], "d": [1, None]})
    [(_, put)] = services.told
    assert isinstance(put, PutRows)
    assert [(header.name, header.kind, header.num_rows) for header in put.columns] == [
        ("a", "tensor", 2), ("b", "text", 2), ("c", "tensor", 2), ("d", "json", 2),
    ]  # fmt: skip


def row_records(*rows: int) -> RowRecords:
    there = list(rows)
    return RowRecords(1, there, [row // 2 for row in there], [2] * len(rows), there, there, ["x"], ["score"])


def test_rows_are_listed_read_and_cleared_by_index(client: QueueClient, services: Services) -> None:
    services.rows = {"storage-0": [4, 6], "storage-1": [5]}
    assert [(row.index, row.group, row.unit, row.columns, row.done) for row in client.list_rows(partition=1)] == [
        (4, 2, "storage-0", ("x",), ("score",)),
        (5, 2, "storage-1", ("x",), ("score",)),
        (6, 3, "storage-0", ("x",), ("score",)),
    ]
    batch = client.read_rows([6, 5, 4], ["x"])
    assert (batch.indices, batch.groups, batch["x"].values.tolist()) == ((6, 5, 4), (3, 2, 2), [6, 5, 4])
    with pytest.raises(PeerRefused, match=r"rows \[7\] are not in the queue"):
        client.read_rows([4, 7], ["x"])
    assert client.clear_rows([5, 7]) == [5]
    with pytest.raises(ConfigError, match="rows: -1"):
        client.clear_rows([-1])


def test_closing_for_writing_tells_every_controller(client: QueueClient, services: Services) -> None:
    client.close_writing()
    assert services.services_told(CloseWriting) == ["controller-0"]


def test_client_is_a_context_manager(client: QueueClient, services: Services) -> None:
    with client as entered:
        assert entered is client
    assert services.closed


def test_commits_of_a_put_are_positions_in_it(client: QueueClient, services: Services) -> None:
    with pytest.raises(ConfigError, match=r"commits of score: 2 is not in 0 \.\. 1"):
        client.put_rows(Y, commits={"score": [2]})
    assert services.told == []
