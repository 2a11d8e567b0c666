"""What the child processes of these tests do. Each function runs in a process of its own and talks over a pipe."""

import threading
from collections.abc import Sequence
from multiprocessing.connection import Connection as Pipe

import torch
from echo_peers import Credentials as Credentials
from echo_peers import credentials

import tq
from asyncflow.errors import Superseded
from tq import Column, ControllerService, QueueClient, StorageUnit, StreamingDataLoader, TaskSpec
from tq.config import QueueConfig, ScheduleConfig
from tq.control.admission import AdmittedGroup
from tq.messages import Granted, NoRowsReason
from weightsync.groups import Membership, agree_on_plan, connect_receiver, connect_sender, read_plan
from weightsync.plan import ShardSpec
from weightsync.receiver import WeightReceiver
from weightsync.sender import WeightSender
from weightsync.version import Version

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
    service = ControllerService(
        credentials(port),
        "controller-0",
        tasks=tasks,
        config=QUEUE,
        schedule=schedule,
        prompts=CountingPrompts() if last_step else None,
        last_step=last_step,
    )
    pipe.send("ready")
    pipe.recv()
    failed = repr(service.failure)
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
    try:
        client.put("score", lease, lease.rows, {"score": tq.column(torch.tensor([1.0]))})
    except Superseded as error:
        pipe.send(type(error).__name__)


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
        for batch, indices in loader:
            if indices:
                assert torch.equal(batch["doubled"].values, batch["x"].values * 2)
                assert batch["x"].lengths.tolist() == [group + 1 for group in batch.groups]
            assert len(indices) <= loader.round_rows
            rounds.append(list(indices))
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
        if isinstance(granted, Granted):
            x = client.get(granted, ["x"])["x"]
            client.put("double", granted, granted.rows, {"doubled": Column(x.values * 2, x.lengths)})
            total += len(granted.rows)
        elif granted.reason is NoRowsReason.STOP:
            break
    pipe.send(total)
    client.close()


class Run:
    """A shard in memory."""

    def __init__(self, name: str, shape: tuple[int, ...], start: int, values: torch.Tensor) -> None:
        self.name, self.shape, self.start, self.values = name, shape, start, values


SHAPES = {"embed": (50, 8), "norm": (8,), "head": (8, 50)}
MEMBERS = Membership("0", 2, ("rollout-0", "rollout-1"))


def weights(step: int) -> dict[str, torch.Tensor]:
    """Return the whole model of a step."""
    generator = torch.Generator().manual_seed(step)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def shards(step: int, rank: int) -> list[Run]:
    """Return what one of two trainer ranks holds."""
    runs = []
    for name, values in weights(step).items():
        flat = values.flatten()
        middle = flat.numel() // 2
        start, end = (0, middle) if rank == 0 else (middle, flat.numel())
        runs.append(Run(name, SHAPES[name], start, flat[start:end]))
    return runs


def weight_sender(port: int, pipe: Pipe, rank: int) -> None:
    """Publish the step that the pipe names, until it says None; reports errors."""
    store = credentials(port).own_store()
    held = [ShardSpec(run.name, run.shape, run.start, run.values.numel()) for run in shards(0, rank)]
    plan = agree_on_plan(store, MEMBERS, rank, held, bucket_bytes=1024, dtype="float32")
    sender = WeightSender(connect_sender(store, MEMBERS, rank, CPU), plan, rank, CPU)
    pipe.send("ready")
    while (step := pipe.recv()) is not None:
        try:
            sender.publish(Version(0, step), shards(step, rank), timeout_s=20)
            sender.wait(20)
            pipe.send("sent")
        except Exception as error:  # noqa: BLE001 - the test looks at it
            pipe.send(error)
    sender.close()
    pipe.send("closed")


def weight_receiver(port: int, pipe: Pipe, name: str) -> None:
    """Load the step that the pipe names and report the weights, until it says None; reports errors."""
    store = credentials(port).own_store()
    plan = read_plan(store, MEMBERS)
    receiver = WeightReceiver(connect_receiver(store, MEMBERS, name, CPU), plan, CPU)
    pipe.send("ready")
    while (step := pipe.recv()) is not None:
        loaded: dict[str, torch.Tensor] = {}
        try:
            receiver.wait_for(step, timeout_s=20)
            version = receiver.load(
                lambda views, loaded=loaded: loaded.update({key: view.clone() for key, view in views.items()}),
                newer_than=None,
            )
            same = all(torch.equal(loaded[key], value) for key, value in weights(step).items())
            pipe.send((version, same and loaded.keys() == weights(step).keys()))
        except Exception as error:  # noqa: BLE001 - the test looks at it
            pipe.send(error)
    receiver.join(timeout_s=10)
    alive = [thread.name for thread in threading.enumerate() if thread.name == "weight-receiver"]
    pipe.send(alive)
