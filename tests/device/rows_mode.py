"""Rows of a replica from device to device (`tq.replica_broadcast: device`), against those that Gloo brings."""

from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from asyncflow.device import connect_group, group_backends
from tq.client.dataloader import DeviceRoute, Replica, StreamingDataLoader
from tq.columns import Column, PackedBatch
from tq.config import ReplicaFetch
from tq.messages import FetchRound, LeaseGrant, NoRows, NoRowsReason

ROUNDS, STEPS = 6, 3
COLUMNS = ("tokens", "log_probs", "rewards", "texts", "images")


class Queue:
    """Rounds of rows of different lengths; every fourth one is empty."""

    def __init__(self) -> None:
        self.data = self

    def fetch_round(self, request: FetchRound) -> LeaseGrant | NoRows:
        index, step = request.round_index, request.partition
        if index == ROUNDS:
            return NoRows(NoRowsReason.PARTITION_DONE, 0)
        rows = [] if index % 4 == 3 else list(range(100 * step + 10 * index, 100 * step + 10 * index + 1 + index))
        return LeaseGrant("train", index, step, rows, rows, ["storage-0"] * len(rows), [5] * len(rows), ROUNDS)

    def get(self, granted: LeaseGrant, names: Sequence[str]) -> PackedBatch:
        if not granted.rows:
            return PackedBatch((), {})
        generator = torch.Generator().manual_seed(granted.rows[0])
        sizes = torch.randint(0, 3000, (len(granted.rows),), generator=generator).tolist()
        columns = {
            "tokens": Column.of_rows([torch.randint(0, 150_000, (size,), generator=generator) for size in sizes]),
            "log_probs": Column.of_rows([torch.randn(size, generator=generator) for size in sizes]),
            "rewards": Column.of_scalars(torch.randn(len(sizes), generator=generator).bfloat16()),
            "texts": Column.of_texts([f"row {row}" * (row % 7) for row in granted.rows]),
            "images": Column.of_rows([torch.rand(3, 2 + size % 5, generator=generator) for size in sizes]),
        }
        return PackedBatch(tuple(granted.rows), columns, tuple(granted.groups))

    def ack(self, granted: LeaseGrant, rows: Sequence[int]) -> None:
        """Nothing is kept."""


def rows(device: torch.device, rank: int, num_ranks: int, directory: Path) -> dict[str, Any]:
    """Read all steps by either way, with a layer's work after each round; says how many rounds came, and differ."""
    store = dist.FileStore(str(directory / "store"), -1)
    dist.init_process_group(
        group_backends(device),
        store=dist.PrefixStore("gang", store),
        rank=rank,
        world_size=num_ranks,
        timeout=timedelta(seconds=60),
    )
    assert dist.group.WORLD is not None
    weights = torch.eye(64, device=device)

    def read(name: str, route: DeviceRoute | None) -> Iterator[tuple[int, PackedBatch]]:
        group = connect_group(dist.PrefixStore(name, store), rank, num_ranks, torch.device("cpu"))
        replica = Replica(group, name, fetch=ReplicaFetch.BROADCAST, route=route)
        client: Any = Queue() if replica.fetches else None
        loader = StreamingDataLoader(
            client, "train", COLUMNS, first_partition=1, last_partition=STEPS, rows_per_round=9, replica=replica
        )
        while step := loader.next_partition():
            for batch in loader:
                hidden = torch.ones(64, 64, device=device) @ weights
                dist.all_reduce(hidden)  # a collective of the model, in the same group
                yield step, batch
                assert float(hidden[0, 0]) == num_ranks
        loader.close()

    by_host = list(read("host", None))
    by_device = list(read("device", DeviceRoute((dist.group.WORLD,), device)))
    alike = [_are_equal(one, other) for one, other in zip(by_host, by_device, strict=True)]
    dist.barrier(device_ids=None if device.type == "cpu" else [device.index])
    dist.destroy_process_group()
    return {"rounds": len(alike), "different": alike.count(False), "values": sum(_num_values(b) for _, b in by_host)}


def _are_equal(one: tuple[int, PackedBatch], other: tuple[int, PackedBatch]) -> bool:
    first, second = one[1], other[1]
    if (one[0], first.indices, first.groups) != (other[0], second.indices, second.groups):
        return False
    if first.columns.keys() != second.columns.keys():
        return False
    for name, column in first.columns.items():
        found = second[name]
        if (column.kind, column.values.dtype, column.rank) != (found.kind, found.values.dtype, found.rank):
            return False
        pairs = [(column.values.view(torch.uint8), found.values.view(torch.uint8)), (column.lengths, found.lengths)]
        if column.shapes is not None and found.shapes is not None:
            pairs.append((column.shapes, found.shapes))
        if not all(torch.equal(mine, its) for mine, its in pairs):
            return False
    return True


def _num_values(batch: PackedBatch) -> int:
    return sum(column.values.numel() for column in batch.columns.values())
