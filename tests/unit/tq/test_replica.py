"""What travels in a replica, between two threads that play its ranks."""

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

from asyncflow.device import connect_group
from asyncflow.errors import ConfigError, LeaseFenced, ProducersGone, TransportError
from asyncflow.transport.meeting import Credentials
from tq.client.dataloader import HEADER_BYTES, Replica, Round, StreamingDataLoader
from tq.client.queue_client import QueueClient
from tq.columns import Column, PackedBatch
from tq.config import QueueConfig, ReplicaFetch
from tq.messages import LeaseGrant, NoRows, NoRowsReason

CPU = torch.device("cpu")


def both(work: Any) -> list[Any]:
    """Run `work(rank)` in two threads; return what it returned or raised."""
    results: list[Any] = [None, None]

    def run(rank: int) -> None:
        try:
            results[rank] = work(rank)
        except Exception as error:  # noqa: BLE001 - the test looks at it
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    return results


@pytest.fixture(name="pair")
def _pair() -> list[Replica]:
    """Two ranks."""
    store = HashStore()

    def connect(rank: int) -> Replica:
        return Replica(connect_group(store, rank, 2, CPU), "replica 3", fetch=ReplicaFetch.BROADCAST)

    pair: list[Replica] = both(connect)
    return pair


def relayed(pair: list[Replica], items: Iterator[Round | NoRows]) -> list[Any]:
    """Return what both ranks yield, or raise."""
    return both(lambda rank: list(pair[rank].relay(items if rank == 0 else None)))


def round_with(num_values: int, units: int = 1) -> Round:
    """Return a round of two rows."""
    column = Column.of_rows([torch.rand(num_values), torch.rand(3)])
    granted = LeaseGrant("train", 5, 2, [1, 2], [0, 0], ["storage-0", "u" * units], [num_values, 3], 2, True)
    return granted, PackedBatch((1, 2), {"x": column}, (0, 0))


def test_rounds_of_any_size_arrive_as_they_were(pair: list[Replica]) -> None:
    sizes = [0, 1, *range(HEADER_BYTES // 4 - 110, HEADER_BYTES // 4), HEADER_BYTES, 10**6]
    items: list[Round | NoRows] = [round_with(size) for size in sizes]
    items += [round_with(1, units=HEADER_BYTES), NoRows(NoRowsReason.DEADLINE, 4, "column y", False)]
    sent, received = relayed(pair, iter(items))
    assert len(sent) == len(received) == len(items)
    for item, other in zip(items, received, strict=True):
        if isinstance(item, NoRows):
            assert other == item
            continue
        assert (other[0], other[1].indices, other[1].groups) == (item[0], item[1].indices, item[1].groups)
        assert torch.equal(other[1]["x"].values, item[1]["x"].values)
        assert torch.equal(other[1]["x"].lengths, item[1]["x"].lengths)


def test_integers_travel_narrow_and_arrive_wide(pair: list[Replica]) -> None:
    wide = Column.of_scalars(torch.tensor([-(2**62), 2**62]))
    narrow = Column.of_rows([torch.arange(1000), torch.tensor([-1])])
    granted = LeaseGrant("train", 5, 2, [1, 2], [0, 0], ["storage-0"] * 2)
    _, received = relayed(pair, iter([(granted, PackedBatch((1, 2), {"wide": wide, "narrow": narrow}, (0, 0)))]))
    for name, column in (("wide", wide), ("narrow", narrow)):
        assert received[0][1][name].values.dtype is torch.int64
        assert torch.equal(received[0][1][name].values, column.values)


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (ProducersGone("nobody is left"), ProducersGone, "nobody is left (at rank 0 of replica 3)"),
        (LeaseFenced("void"), LeaseFenced, "void (at rank 0 of replica 3)"),
        (ValueError("odd"), TransportError, "ValueError: odd (at rank 0 of replica 3)"),
    ],
)
def test_error_of_rank_0_is_raised_on_both_ranks(
    pair: list[Replica], error: Exception, kind: type[Exception], text: str
) -> None:
    def failing() -> Iterator[Round | NoRows]:
        yield round_with(3)
        raise error

    first, second = relayed(pair, failing())
    assert first is error
    assert (type(second), str(second)) == (kind, text)


def test_abort_ends_a_rank_that_waits_and_later_use(pair: list[Replica]) -> None:
    def work(rank: int) -> None:
        if rank == 1:
            list(pair[1].relay(None))
        pair[0].abort()
        pair[0].abort()

    assert isinstance(both(work)[1], TransportError)
    with pytest.raises(TransportError, match="replica 3: closed"):
        list(pair[0].relay(iter([])))


def test_who_fetches_shares_and_acks(pair: list[Replica]) -> None:
    assert [(one.shares, one.fetches, one.acks) for one in pair] == [(True, True, True), (True, False, False)]
    each = [Replica(one._group, fetch=ReplicaFetch.EACH) for one in pair]
    assert [(one.shares, one.fetches, one.acks) for one in each] == [(False, True, True), (False, True, False)]


@pytest.mark.parametrize(("settings", "fetches"), [({}, [True, False]), ({"replica_fetch": "each"}, [True, True])])
def test_a_replica_that_does_not_say_who_fetches_goes_by_the_clients_config(
    pair: list[Replica], settings: dict[str, str], fetches: list[bool]
) -> None:
    config = QueueConfig.model_validate(settings)
    replicas = [Replica(one._group) for one in pair]
    loaders = []
    for replica in replicas:
        client = QueueClient(Credentials(HashStore(), b"", 1.0), "me", config=config)
        loaders.append(
            StreamingDataLoader(
                client, "train", ["x"], first_partition=1, last_partition=1, rows_per_round=1, replica=replica
            )
        )
        client.close()
    assert [replica.fetches for replica in replicas] == fetches
    assert [one.asking_s == 0.0 for one in loaders] == fetches, "the others are not silent: they ask nothing"


def test_a_replica_by_device_needs_its_groups(pair: list[Replica]) -> None:
    client = QueueClient(
        Credentials(HashStore(), b"", 1.0), "me", config=QueueConfig.model_validate({"replica_broadcast": "device"})
    )
    with pytest.raises(ConfigError, match=r"replica_broadcast is device; give mine the groups of its devices"):
        StreamingDataLoader(
            client, "train", ["x"], first_partition=1, last_partition=1, rows_per_round=1,
            replica=Replica(pair[0]._group, "mine"),
        )  # fmt: skip
    client.close()


def test_a_rank_without_client_must_be_told_who_fetches(pair: list[Replica]) -> None:
    with pytest.raises(ConfigError, match=r"give every rank of stage its client"):
        StreamingDataLoader(
            None,
            "train",
            ["x"],
            first_partition=1,
            last_partition=1,
            rows_per_round=1,
            replica=Replica(pair[1]._group, "stage"),
        )
