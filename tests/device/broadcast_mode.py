"""Weights from device to device: all ranks but the last are trainer ranks, the first one has the agent, too."""

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from asyncflow.transport.meeting import Credentials
from weightsync.agent.agent_service import WeightAgent
from weightsync.broadcast_group import Broadcaster, BroadcastMember
from weightsync.checksums import checksum
from weightsync.config import WeightSyncConfig
from weightsync.plan import Box, Need, ShardSpec, plan_transfer
from weightsync.receiver import WeightReceiver
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
