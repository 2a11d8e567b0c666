"""Weights from device to device: all ranks but the last are trainer ranks, the first one has the agent, too."""

import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from asyncflow.device import connect_group, use_device
from asyncflow.transport.meeting import Credentials
from weightsync.agent.agent_service import WeightAgent
from weightsync.broadcast_group import Broadcaster, BroadcastGroup, BroadcastMember
from weightsync.checksums import checksum
from weightsync.config import WeightSyncConfig
from weightsync.plan import Box, Need, ShardSpec, plan_transfer
from weightsync.receiver import SharedReceiver, WeightReceiver
from weightsync.sender import WeightSender
from weightsync.version import Version
from workers.engines.base import LocalShard


def follow(device: torch.device, rank: int, num_ranks: int, directory: Path) -> dict[str, Any]:
    """Publish versions; the last rank receives them, until three came by broadcast. Says what went wrong."""
    files = dist.FileStore(str(directory / "store"), -1)
    store = dist.TCPStore(
        "127.0.0.1", int(files.get("port")) if rank else 0, is_master=not rank, wait_for_workers=False
    )
    credentials, senders, rows = Credentials(store, b"secret", 30), num_ranks - 1, 64
    agent = None
    if rank == 0:
        files.set("port", str(store.port))
        agent = WeightAgent(credentials, "weights-0", WeightSyncConfig())
    copies = _HostCopies(least=1024)
    checksum(torch.zeros(1, dtype=torch.int64, device=device))  # its factors are copied once
    versions = [Version(0, step) for step in range(1, 40)]

    def values(version: Version) -> Tensor:
        return torch.arange(64.0 * senders * rows).view(-1, 64).cos() * version.step

    if rank == senders:
        came: list[Version] = []

        class Member(BroadcastMember):
            def receive_version(self, transfer: Any, *arguments: Any, **named: Any) -> None:
                with copies:
                    super().receive_version(transfer, *arguments, **named)
                came.append(transfer.version)

        live, held, wrong = torch.zeros(senders * rows, 64, dtype=torch.bfloat16, device=device), None, 0
        receiver = WeightReceiver(
            credentials, "weights-0", "rollout-0", {"w": Need(tuple(live.shape))}, device=device,
            member=Member(credentials.group_store(30), "rollout-0", device), lead="weights-0", timeout_s=30,
        )  # fmt: skip

        def load(views: Mapping[str, Tensor]) -> None:
            live.copy_(views["w"])

        for version in versions:
            receiver.wait_for(version.step, timeout_s=60)
            held = receiver.load(load, newer_than=held)
            wrong += not torch.equal(live.cpu(), values(version).bfloat16())
            more = len(came) < 3 and version != versions[-1]
            files.set(f"{version.step}", "more" if more else "enough")
            if not more:
                break
        receiver.close()
        files.set(f"left {rank}", "1")
        return {"came": len(came), "wrong": wrong, "host_copies": copies.number}
    mine = slice(rank * rows, (rank + 1) * rows)
    shape = (senders * rows, 64)
    boxes = [Box.rows(shape, each * rows, (each + 1) * rows) for each in range(senders)]
    master = torch.empty(rows, 64, device=device)
    shards = [LocalShard("w", shape, boxes[rank], master)]
    held = [[ShardSpec("w", shape, "float32", box)] for box in boxes]
    plan = plan_transfer(held, bucket_bytes=2048, dtype="bfloat16")

    class Counted(Broadcaster):
        def broadcast_version(self, *arguments: Any, **named: Any) -> None:
            with copies:
                super().broadcast_version(*arguments, **named)

    broadcaster = Counted(credentials, "weights-0", f"actor/{rank}", plan, rank, device=device, epoch="0", timeout_s=30)
    sender = WeightSender(credentials, "weights-0", f"actor/{rank}", plan, rank, device=device, broadcaster=broadcaster)
    for version in versions:
        sender.before_update()
        angles = torch.arange(64.0 * senders * rows).view(-1, 64)[mine].to(device)
        master.copy_(angles.cos() * version.step)  # a kernel, as an update is
        sender.publish(version, shards, timeout_s=60)
        if files.get(str(version.step)) == b"enough":
            break
    sender.close()
    if agent is not None:
        for other in range(1, num_ranks):
            files.get(f"left {other}")
        agent.close()
    files.set(f"left {rank}", "1")
    return {"host_copies": copies.number}


STAGES = 2  # trainer ranks, each with a tensor of its own
GENERATOR = STAGES  # the rank that receives all tensors; those after it are a copy that is divided as the trainer is
SHAPE = (256, 64)
WANTED = 3


def stages(device: torch.device, rank: int, num_ranks: int, directory: Path) -> dict[str, Any]:
    """Publish versions until three came by broadcast to the generator and to both ranks of a divided copy, which
    compute together all the time. Says what they received, and which collectives were in flight at the same time."""
    files = dist.FileStore(str(directory / "store"), -1)
    store = dist.TCPStore(
        "127.0.0.1", int(files.get("port")) if rank else 0, is_master=not rank, wait_for_workers=False
    )
    if rank == 0:
        files.set("port", str(store.port))
    credentials = Credentials(store, b"secret", 30)
    versions = [Version(0, step) for step in range(1, 40)]
    if rank < STAGES:
        return _publish_stage(credentials, files, versions, device, rank, num_ranks)
    return _receive_stages(credentials, store, files, versions, device, rank)


def _stage_values(stage: int, version: Version) -> Tensor:
    return torch.arange(float(SHAPE[0] * SHAPE[1])).view(SHAPE).cos() * version.step + stage


def _publish_stage(
    credentials: Credentials, files: dist.Store, versions: list[Version], device: torch.device, rank: int, size: int
) -> dict[str, Any]:
    agent = WeightAgent(credentials, "weights-0", WeightSyncConfig()) if rank == 0 else None
    box = Box.from_shape(SHAPE)
    held = [[ShardSpec(f"stage{stage}", SHAPE, "float32", box)] for stage in range(STAGES)]
    plan = plan_transfer(held, bucket_bytes=4096, dtype="bfloat16")
    caster = Broadcaster(credentials, "weights-0", f"actor/{rank}", plan, rank, device=device, epoch="0", timeout_s=30)
    sender = WeightSender(credentials, "weights-0", f"actor/{rank}", plan, rank, device=device, broadcaster=caster)
    master = torch.empty(SHAPE, device=device)
    shards = [LocalShard(f"stage{rank}", SHAPE, box, master)]
    for version in versions:
        sender.before_update()
        master.copy_(_stage_values(rank, version).to(device))
        sender.publish(version, shards, timeout_s=60)
        if {files.get(f"{version.step} {other}") for other in range(STAGES, size)} == {b"enough"}:
            break
    sender.close()
    if agent is not None:
        for other in range(1, size):
            files.get(f"left {other}")
        agent.close()
    files.set(f"left {rank}", "1")
    return {}


def _receive_stages(
    credentials: Credentials,
    store: dist.Store,
    files: dist.Store,
    versions: list[Version],
    device: torch.device,
    rank: int,
) -> dict[str, Any]:
    wanted = list(range(STAGES)) if rank == GENERATOR else [rank - GENERATOR - 1]
    noted = _Noted(device)
    needs = {f"stage{stage}": Need(SHAPE, box=Box.from_shape(SHAPE)) for stage in wanted}
    names = [f"actor_fwd-0/{each}" for each in range(STAGES)]
    name = "rollout-0" if rank == GENERATOR else names[wanted[0]]
    options: dict[str, Any] = {
        "device": device, "member": BroadcastMember(credentials.group_store(30), name, device), "lead": "weights-0",
        "timeout_s": 30.0,
    }  # fmt: skip
    computing, over = threading.Thread(), threading.Event()
    receiver: WeightReceiver
    if rank == GENERATOR:
        receiver = WeightReceiver(credentials, "weights-0", name, needs, **options)
    else:
        group = connect_group(dist.PrefixStore("copy", store), wanted[0], STAGES, device)
        receiver = SharedReceiver(credentials, "weights-0", name, needs, together=names, **options)

        def compute() -> None:
            use_device(device)
            stopping = 0
            while not stopping:
                with receiver.computing():
                    total = torch.full((64,), float(over.is_set()), device=device)
                    with noted.collective("model"):
                        group.allreduce([total]).wait()
                stopping = int(total[0])

        computing = threading.Thread(target=compute)
        computing.start()
    wrong, loaded = 0, None
    for version in versions:
        receiver.wait_for(version.step, timeout_s=60)

        def load(views: Mapping[str, Tensor], version: Version = version) -> None:
            nonlocal wrong
            for stage in wanted:
                expected = _stage_values(stage, version).bfloat16()
                wrong += not torch.equal(views[f"stage{stage}"].cpu(), expected)

        loaded = receiver.load(load, newer_than=loaded)
        enough = noted.came >= WANTED or version == versions[-1]
        files.set(f"{version.step} {rank}", "enough" if enough else "more")
        if {files.get(f"{version.step} {other}") for other in range(STAGES, GENERATOR + 1 + STAGES)} == {b"enough"}:
            break
    over.set()
    if rank != GENERATOR:
        computing.join()
    receiver.close()
    files.set(f"left {rank}", "1")
    return {
        "came": noted.came, "wrong": wrong, "groups": noted.groups, "bytes": noted.num_bytes,
        "in_flight": noted.in_flight, "computed": noted.number.get("model", 0),
    }  # fmt: skip


class _Noted:
    """What a rank received by broadcast, and how often a collective began while one of another group was in flight."""

    def __init__(self, device: torch.device) -> None:
        self.came = self.groups = self.num_bytes = self.in_flight = 0
        self.number: dict[str, int] = {}
        self._device = device
        self._ends: dict[str, Any] = {}
        self._inside: set[str] = set()
        receive, transfer = BroadcastMember.receive_version, BroadcastGroup._transfer_in

        def receiving(member: BroadcastMember, *arguments: Any, **named: Any) -> None:
            self.groups = self.num_bytes = 0  # of the last one
            receive(member, *arguments, **named)
            self.came += 1

        def transferring(group: BroadcastGroup, seats: Any, buckets: Any, *arguments: Any, **named: Any) -> None:
            self.groups += 1
            self.num_bytes += sum(bucket.bucket.num_bytes for bucket in buckets)
            with self.collective(f"group {self.groups}"):
                transfer(group, seats, buckets, *arguments, **named)

        BroadcastMember.receive_version = receiving  # type: ignore[method-assign]
        BroadcastGroup._transfer_in = transferring  # type: ignore[method-assign]

    @contextmanager
    def collective(self, name: str) -> Iterator[None]:
        others = [end for other, end in self._ends.items() if other != name]
        self.in_flight += bool(self._inside) + sum(not end.query() for end in others)
        self._inside.add(name)
        yield
        self._inside.remove(name)
        self.number[name] = self.number.get(name, 0) + 1
        if self._device.type != "cpu":
            self._ends[name] = torch.accelerator.current_stream(self._device).record_event()


class _HostCopies(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts what a thread copies between the host and a device, outside of process groups, of so many bytes."""

    def __init__(self, *, least: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._least = least
        self.number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        in_group = "late_device.group" in {frame.f_globals.get("__name__") for frame in _frames()}
        if "copy" in func.__name__ and not in_group:
            tensors = [one for one in tree_leaves((args, kwargs, result)) if isinstance(one, Tensor)]
            sizes = [one.numel() * one.element_size() for one in tensors]
            self.number += len({one.device.type for one in tensors}) > 1 and max(sizes) >= self._least
        return result


def _frames() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        yield frame
        frame = frame.f_back
