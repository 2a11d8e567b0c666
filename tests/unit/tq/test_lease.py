"""`Lease` and `LeaseStream` over a queue in memory."""

import logging
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch

from asyncflow.errors import ConfigError, LeaseFenced, PeerRefused, ProducersGone, TransportError
from tq.client.lease import Lease, LeaseStream
from tq.columns import Column, PackedBatch
from tq.messages import LeaseGrant, NoRows, NoRowsReason

Y = Column.of_scalars(torch.zeros(2, dtype=torch.int64))


class MemoryClient:
    """Hands out rows in pairs; released ones come again; stops when all are done."""

    def __init__(self, num_rows: int, *, end: NoRowsReason = NoRowsReason.STOP) -> None:
        self.ready = list(range(num_rows))
        self.end = end
        self.leased: set[int] = set()
        self.put_rows: list[int] = []
        self.acked: list[int] = []
        self.released: list[int] = []
        self.filtered: list[int] = []
        self.reads: list[list[str]] = []
        self.errors: list[Exception] = []
        self.unreadable: list[Exception] = []
        self.asked: list[dict[str, Any]] = []
        self.changed = threading.Condition()

    def fetch(self, task: str, **request: Any) -> Lease | NoRows:
        self.asked.append(request)
        with self.changed:
            self.changed.wait_for(lambda: self.ready or not self.leased, timeout=0.05)
            if not self.ready:
                reason = NoRowsReason.DEADLINE if self.leased else self.end
                return NoRows(reason, 0, "column x", producers_alive=False)
            rows, self.ready = self.ready[:2], self.ready[2:]
            self.leased.update(rows)
            return Lease(self, LeaseGrant(task, 1, 1, rows, rows, ["storage-0"] * len(rows)))

    def get(self, granted: LeaseGrant, names: Sequence[str]) -> PackedBatch:
        self.reads.append(list(names))
        if self.unreadable:
            raise self.unreadable.pop(0)
        rows = tuple(granted.rows)
        return PackedBatch(rows, {name: Column.of_scalars(torch.tensor(rows)) for name in names}, rows)

    def put(self, grant: LeaseGrant, rows: Sequence[int], columns: Mapping[str, Column]) -> None:
        self._take(rows, self.put_rows)

    def ack(self, grant: LeaseGrant, rows: Sequence[int]) -> None:
        self._take(rows, self.acked)

    def filter_groups(self, grant: LeaseGrant, rows: Sequence[int], *, failures: int = 0) -> None:
        self._take(rows, self.filtered)

    def release_rows(self, grant: LeaseGrant, rows: Sequence[int]) -> None:
        self._take(rows, self.released)
        with self.changed:
            self.ready.extend(rows)

    def _take(self, rows: Sequence[int], kept: list[int]) -> None:
        if self.errors:
            raise self.errors.pop(0)
        with self.changed:
            kept.extend(rows)
            self.leased.difference_update(rows)
            self.changed.notify_all()


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("tq.client.lease._RETRY_S", 0.0)
    yield


def open_stream(client: MemoryClient, **options: Any) -> LeaseStream:
    """Return a stream of task `double`, without a thread unless asked for."""
    defaults = {"token_budget": 0, "version": 0, "timeout_s": 60.0, "producers_timeout_s": 0.0}
    return LeaseStream(client.fetch, "double", ["x"], **{"num_rows": 2, "prefetch": 0, **defaults, **options})


def ended(leases: LeaseStream) -> None:
    """Wait for the thread that fetches ahead: it may be giving back what it was just granted."""
    assert leases._ahead is not None
    assert leases._ahead.join(10)


@pytest.mark.parametrize("prefetch", [0, 1, 3])
def test_every_row_is_put_once(prefetch: int) -> None:
    client = MemoryClient(8)
    leases = open_stream(client, prefetch=prefetch, token_budget=99)
    for lease in leases:
        assert lease.batch["x"].values.tolist() == lease.rows
        assert lease.put({"y": Y})
    assert client.put_rows == list(range(8))
    assert leases.ended_by is NoRowsReason.STOP
    assert client.asked[0] == {"num_rows": 2, "version": 0, "timeout_s": 30.0, "token_budget": 99}


def test_ack_writes_nothing() -> None:
    client = MemoryClient(4)
    assert all(lease.ack() for lease in open_stream(client))
    assert (client.acked, client.put_rows) == ([0, 1, 2, 3], [])


def test_lease_left_open_is_released(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    client = MemoryClient(4)
    for number, lease in enumerate(open_stream(client)):
        if number:
            lease.put({"y": Y})
    assert (client.released, client.put_rows) == ([0, 1], [2, 3, 0, 1])
    assert caplog.messages == ["double: 2 rows were neither put nor acked, releasing them"]


def test_rows_can_be_put_and_acked_one_by_one() -> None:
    client = MemoryClient(2)
    leases = iter(open_stream(client))
    lease = next(leases)
    lease.put({"y": torch.zeros(1)}, rows=[1])
    assert lease.open_rows == [0]
    lease.ack()
    assert (client.put_rows, client.acked, list(leases)) == ([1], [0], [])


def test_error_in_the_loop_releases_what_is_in_hand_and_ahead() -> None:
    client = MemoryClient(6)
    leases = open_stream(client, prefetch=1)

    def work() -> None:
        for _ in leases:
            raise ValueError("out of memory")

    with pytest.raises(ValueError, match="out of memory"):
        work()
    ended(leases)
    assert client.leased == set()
    assert {0, 1} <= set(client.released)
    assert sorted(client.ready) == list(range(6))


def test_leaving_the_loop_releases_what_was_fetched_ahead() -> None:
    client = MemoryClient(6)
    leases = open_stream(client, prefetch=2)
    for lease in leases:
        lease.put({"y": Y})
        break
    ended(leases)
    assert (client.put_rows, client.leased) == ([0, 1], set())


def test_kept_leases_are_left_to_their_keeper() -> None:
    client = MemoryClient(4)
    leases = iter(open_stream(client))
    kept = [next(leases).keep() for _ in range(2)]
    assert client.released == []
    for lease in kept:
        lease.put({"y": Y})
    assert (list(leases), client.put_rows) == ([], [0, 1, 2, 3])


def test_with_block_releases_what_is_still_open_at_its_end() -> None:
    client = MemoryClient(2)
    leases = iter(open_stream(client))
    with pytest.raises(ValueError), next(leases):
        raise ValueError
    assert client.released == [0, 1]
    with next(leases) as lease:
        lease.put({"y": Y})
    assert (client.put_rows, list(leases)) == ([0, 1], [])


def test_fenced_work_is_dropped_without_an_error() -> None:
    client = MemoryClient(2)
    leases = iter(open_stream(client))
    lease = next(leases)
    client.errors = [LeaseFenced("rows belong to somebody else")]
    assert not lease.put({"y": Y})
    client.leased.clear()
    assert (list(leases), client.released) == ([], [])


def test_failed_put_can_be_tried_again() -> None:
    client = MemoryClient(2)
    leases = iter(open_stream(client))
    lease = next(leases)
    client.errors = [TransportError("storage-0 does not answer")]
    with pytest.raises(TransportError):
        lease.put({"y": Y})
    assert lease.put({"y": Y})
    assert (list(leases), client.put_rows) == ([], [0, 1])


def test_columns_are_read_once_and_only_those_that_are_missing() -> None:
    client = MemoryClient(2)
    lease = client.fetch("double")
    assert isinstance(lease, Lease)
    assert [int(row) for row in lease["x"]] == [0, 1]
    both = lease.read(["x", "y"])
    assert (list(both.columns), both.groups, client.reads) == (["x", "y"], (0, 1), [["x"], ["y"]])
    assert lease["y"] is both["y"]


def test_plain_lists_and_tensors_are_put() -> None:
    client = MemoryClient(2)
    lease = client.fetch("double")
    assert isinstance(lease, Lease)
    with pytest.raises(ConfigError, match="double: columns of 3 rows, but 2 rows are named"):
        lease.put({"y": torch.zeros(3)})
    with pytest.raises(ConfigError, match=r"rows \[7\] are not in the lease"):
        lease.put({"y": ["a"]}, rows=[7])
    assert lease.put({"y": torch.zeros(2), "z": ["a", "b"]})
    assert client.put_rows == [0, 1]


def test_filtered_rows_are_not_released_again() -> None:
    client = MemoryClient(2)
    with client.fetch("double") as lease:  # type: ignore[union-attr]
        lease.filter([1])
    assert (client.filtered, client.released) == ([1], [0])


def test_stream_of_a_queue_that_is_closed_for_writing_ends_and_says_so() -> None:
    client = MemoryClient(2, end=NoRowsReason.CLOSED)
    leases = open_stream(client)
    assert [lease.ack() for lease in leases] == [True]
    assert leases.ended_by is NoRowsReason.CLOSED


def test_newer_weights_end_the_stream_and_say_so() -> None:
    client = MemoryClient(2, end=NoRowsReason.NEWER_VERSION)
    leases = open_stream(client, version=iter(range(4, 99)).__next__)
    assert [lease.ack() for lease in leases] == [True]
    assert leases.ended_by is NoRowsReason.NEWER_VERSION
    assert [request["version"] for request in client.asked] == [4, 5]


def test_rows_of_a_unit_that_died_go_back_and_come_again() -> None:
    client = MemoryClient(2)
    client.unreadable = [TransportError("storage-0 is gone"), LeaseFenced("row 0 is not here")]
    assert [lease.ack() for lease in open_stream(client)] == [True]
    assert client.released == [0, 1] * 2


@pytest.mark.parametrize("prefetch", [0, 1])
def test_refused_read_is_an_error(prefetch: int) -> None:
    client = MemoryClient(2)
    client.unreadable = [PeerRefused("no column z")]
    with pytest.raises(PeerRefused, match="no column z"):
        list(open_stream(client, prefetch=prefetch))


def test_producers_that_are_gone_are_an_error_when_asked_for() -> None:
    client = MemoryClient(2)
    leases = iter(open_stream(client, producers_timeout_s=0.02))
    next(leases).keep()
    with pytest.raises(ProducersGone, match="double: waits for column x"):
        next(leases)
