"""What the child processes of these tests do. Each function runs in a process of its own and talks over a pipe."""

from collections.abc import Sequence
from multiprocessing.connection import Connection as Pipe

import torch
from echo_peers import Credentials as Credentials
from echo_peers import credentials

import tq
from tq import Column, ControllerService, QueueClient, StorageUnit, StreamingDataLoader, TaskSpec
from tq.config import QueueConfig
from tq.messages import NoRowsReason
from workers.admission.admission_state import AdmissionState, AdmittedGroup
from workers.admission.admitter import prompt_admission
from workers.settings.schedule import ScheduleConfig

QUEUE = QueueConfig(request_timeout_s=20)
CPU = torch.device("cpu")


def storage_unit(port: int, pipe: Pipe, name: str) -> None:
    """Serve one storage unit."""
    unit = StorageUnit(credentials(port), name, QUEUE, controllers=QUEUE.controllers)
    pipe.send("ready")
    pipe.recv()
    unit.close()
    pipe.send("closed")


class CountingPrompts:
    """Prompts of growing length: row r of a group holds 0 .. group."""

    def columns(self, groups: Sequence[AdmittedGroup]) -> dict[str, Column]:
        return {"x": Column.of_rows([torch.arange(group.group + 1) for group in groups for _ in group.rows])}


def controller(port: int, pipe: Pipe, tasks: Sequence[TaskSpec], schedule: ScheduleConfig, last_step: int) -> None:
    """Serve the control plane over two units; admission puts prompts when `last_step` > 0."""
    admission = prompt_admission(
        credentials(port),
        "controller-0",
        CountingPrompts(),
        AdmissionState(schedule, last_step=last_step, version=0),
        config=QUEUE,
    )
    service = ControllerService(
        credentials(port),
        "controller-0",
        tasks=tasks,
        config=QUEUE,
        admission=admission if last_step else None,
        refill=bool(last_step),
        row_limit=schedule.live_rows,
    )
    pipe.send("ready")
    pipe.recv()
    failed = repr(service.threads.failure)
    service.close()
    pipe.send(failed)


def holder(port: int, pipe: Pipe, task: str, num_rows: int) -> None:
    """Lease rows and keep them."""
    client = QueueClient(credentials(port), "holder", config=QUEUE)
    pipe.send(client.fetch(task, num_rows=num_rows).rows)
    pipe.recv()


def sleeper(_port: int, pipe: Pipe, address: str) -> None:
    """Lease a row of a queue that runs alone, and put late."""
    client = tq.connect(address, "sleeper")
    lease = client.fetch("score", num_rows=1)
    pipe.send(lease.rows)
    pipe.recv()
    pipe.send(lease.put({"score": torch.tensor([1.0])}))


def trainer(port: int, pipe: Pipe, rank: int, num_ranks: int, last_partition: int, stop_after: int) -> None:
    """Go through partitions, acknowledge each; rank 0 publishes versions. Reports rows per partition."""
    client = QueueClient(credentials(port), f"actor/{rank}", config=QUEUE)
    loader = StreamingDataLoader(
        client, "train", ["x", "doubled"], first_partition=1, last_partition=last_partition,
        rows_per_round=2, rank=rank, num_ranks=num_ranks, timeout_s=1,
    )  # fmt: skip
    seen: dict[int, list[list[int]]] = {}
    while partition := loader.next_partition():
        rounds = []
        for batch in loader:
            if len(batch):
                assert torch.equal(batch["doubled"].values, batch["x"].values * 2)
                assert batch["x"].lengths.tolist() == [group + 1 for group in batch.groups]
            assert len(batch) <= loader.largest_slice
            rounds.append(list(batch.indices))
        if loader.stopped:
            break
        seen[partition] = rounds
        loader.ack()
        if rank == 0:
            client.publish_version(partition)
            if partition == stop_after:
                client.stop()
    pipe.send((seen, loader.stopped))
    loader.close()
    client.close()


def doubler(port: int, pipe: Pipe) -> None:
    """A map task: doubled = 2 x, until the queue stops."""
    client = QueueClient(credentials(port), "ref-0/0", config=QUEUE)
    total = 0
    while True:
        granted = client.fetch("double", num_rows=3)
        if isinstance(granted, tq.Lease):
            x = granted["x"]
            granted.put({"doubled": Column(x.values * 2, x.lengths)})
            total += len(granted.rows)
        elif granted.reason is NoRowsReason.STOP:
            break
    pipe.send(total)
    client.close()
