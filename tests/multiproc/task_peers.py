"""What ranks that share a model do in these tests: `workers.tasks.task_worker` takes rows from a fake queue."""

import threading
from collections.abc import Sequence
from contextlib import nullcontext
from multiprocessing.connection import Connection as Pipe
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from loader_peers import batch_of, check, round_of
from peers import CPU, credentials
from torch.distributed import PrefixStore

from asyncflow.errors import TransportError
from tq.client.lease import Lease
from tq.columns import PackedBatch
from tq.config import QueueConfig
from tq.messages import LeaseGrant, NoRows, NoRowsReason
from workers.settings.engines import RefConfig
from workers.tasks.task_worker import _shared_rounds

INPUTS = ("tokens", "ids", "rewards", "texts")
NUM_LEASES = 5


class LeasingQueue:
    """A queue client: leases of three rows, news of newer weights after the first one, then a stop."""

    def __init__(self, *, fails_at: int) -> None:
        self.data = self
        self.fails_at = fails_at
        self.num_leases = self.num_reads = 0
        self.released: list[int] = []
        self.closed = False

    def fetch(self, task: str, **_: object) -> Lease | NoRows:
        self.num_leases += 1
        if self.num_leases == 2:
            return NoRows(NoRowsReason.NEWER_VERSION, 7)
        return (
            NoRows(NoRowsReason.STOP, 7)
            if self.num_leases > NUM_LEASES
            else Lease(self, round_of(self.num_leases, 0 if self.num_leases != 4 else 2))
        )

    def get(self, grant: LeaseGrant, names: Sequence[str]) -> PackedBatch:
        self.num_reads += 1
        if self.num_reads == self.fails_at:
            raise TransportError("storage-0 is gone")
        batch = batch_of(grant)
        return PackedBatch(batch.indices, {name: batch[name] for name in names}, batch.groups)

    def release_rows(self, grant: LeaseGrant, rows: Sequence[int]) -> None:
        self.released += rows

    def close(self) -> None:
        self.closed = True

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"nothing here calls {name}")


def task_rank(port: int, pipe: Pipe, rank: int, size: int, settings: dict[str, str], ref: Any, failing: int) -> None:
    """Take all rows; report them, and what was asked of the queue. Rank `failing` cannot read the second time."""
    torch.set_num_threads(1)
    store = credentials(port).group_store()
    dist.init_process_group("gloo", store=PrefixStore("gang", store), rank=rank, world_size=size)
    ref = RefConfig.model_validate(ref)
    if ref.engine == "megatron":
        from tests.megatron_engine import cpu_shim
        from workers.engines.megatron.megatron_model import join_groups

        cpu_shim.install()
        join_groups(ref.megatron.layout(size), timeout_s=60, seed=0)
    queue = LeasingQueue(fails_at=2 if rank == failing else 0)
    context: Any = SimpleNamespace(
        config=SimpleNamespace(
            tq=QueueConfig.model_validate(settings), ref=ref, launcher=SimpleNamespace(operation_timeout_s=60.0)
        ),
        gang=SimpleNamespace(num_ranks=size, name="ref-0", role="ref"), job=SimpleNamespace(lineage=0), attempt=0,
        rank=rank, device=CPU, stopping=threading.Event(), queue_client=lambda: queue, new_store=lambda _: store,
    )  # fmt: skip
    task: Any = SimpleNamespace(name="ref_log_probs", inputs=INPUTS)
    taken: list[Any] = []
    chain: Any = SimpleNamespace(computing=nullcontext)
    for item in _shared_rounds(context, task, _lead(context, task, queue) if rank == 0 else None, chain):
        if isinstance(item, NoRows):
            taken.append(item.reason.value)
        else:
            check(item[1])
            assert tuple(item[1].columns) == INPUTS
            taken.append(item[1].indices)
            total = torch.ones(1)
            dist.all_reduce(total)  # ranks compute together
            assert int(total) == size
    pipe.send((taken, queue.num_leases, queue.num_reads, queue.released, queue.closed))
    pipe.recv()
    dist.destroy_process_group()


def _lead(context: Any, task: Any, queue: LeasingQueue) -> Any:
    from workers.tasks.task_worker import _Lead

    lead = _Lead.__new__(_Lead)
    lead._context, lead._task, lead.client, lead._lease = context, task, queue, None  # type: ignore[assignment]
    lead._chain = SimpleNamespace(num_rows=3, version=0)  # type: ignore[assignment]
    return lead
