"""A trainer of two ranks and two generators that take turns, one of which has two ranks. Mode of `ranks.py`."""

import multiprocessing
import os
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from math import prod
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from asyncflow.clock import HostClock
from asyncflow.device import connect_group, open_device, wait_for_device
from asyncflow.job import Job
from asyncflow.timeline import NoTimeline
from asyncflow.transport.meeting import Credentials
from tests.device.processes import answer_calls
from weightsync.agent.agent_service import WeightAgent
from weightsync.config import WeightSyncConfig
from weightsync.plan import Box, Need, plan_transfer
from weightsync.receiver import Following, RankReceiver, RanksReceiver, WeightReceiver
from weightsync.sender import WeightSender, describe
from weightsync.version import Version
from workers.engines.base import LocalShard

SECRET = b"secret"
TRAINERS, ENGINE_RANKS = 2, 2
ONE, OF_RANKS = 2, 3
"""The ranks of this test that generate."""
SHAPES = {"w": (192, 64), "b": (40,)}
NUM_BYTES = 2 * (192 * 64 + 40)
VERSIONS = [Version(0, step) for step in range(1, 5)]
RESTARTED_AFTER = 2
"""After this step the second trainer rank has a new sender, as a process that started again has."""
NEEDS = {name: Need(shape) for name, shape in SHAPES.items()}
_DEADLINE_S = 100


def handover(device: torch.device, rank: int, num_ranks: int, directory: Path) -> dict[str, Any]:
    """Publish versions and load each in turn. A generator says how many were not whole, and which way bytes came."""
    files = dist.FileStore(str(directory / "store"), -1)
    store = dist.TCPStore(
        "127.0.0.1", int(files.get("port")) if rank else 0, is_master=not rank, wait_for_workers=False
    )
    if rank == 0:
        files.set("port", str(store.port))
    credentials = Credentials(store, SECRET, 30)
    if rank == ONE:
        return _generate(credentials, files, device)
    if rank == OF_RANKS:
        return _generate_on_ranks(credentials, files, device, directory, store.port)
    return _train(credentials, files, device, rank)


def _weights(version: Version) -> dict[str, Tensor]:
    return {name: torch.arange(float(prod(shape))).cos().view(shape) * version.step for name, shape in SHAPES.items()}


def _is_whole(held: Mapping[str, Tensor], version: Version) -> bool:
    expected = _weights(version)
    return all(torch.equal(held[name].cpu(), values.bfloat16()) for name, values in expected.items())


def _train(credentials: Credentials, files: dist.Store, device: torch.device, rank: int) -> dict[str, Any]:
    agent = WeightAgent(credentials, "weights-0", WeightSyncConfig()) if rank == 0 else None
    rows = SHAPES["w"][0] // TRAINERS
    boxes = [Box.rows(SHAPES["w"], each * rows, (each + 1) * rows) for each in range(TRAINERS)]
    masters = {
        name: torch.empty(boxes[rank].size if name == "w" else shape, device=device) for name, shape in SHAPES.items()
    }

    def shards(of: int) -> list[LocalShard]:
        held = [LocalShard("w", SHAPES["w"], boxes[of], masters["w"])]
        return held if of else [*held, LocalShard("b", SHAPES["b"], Box.from_shape(SHAPES["b"]), masters["b"])]

    plan = plan_transfer([describe(shards(each)) for each in range(TRAINERS)], bucket_bytes=2048, dtype="bfloat16")

    def open_sender(life: int) -> WeightSender:
        return WeightSender(
            credentials, "weights-0", f"actor/{rank}.{life}", plan, rank, device=device, on_device=True, timeout_s=60
        )

    sender = open_sender(0)
    for version in VERSIONS:
        sender.before_update()
        for name, values in _weights(version).items():  # kernels, as an update is
            masters[name].copy_((values[boxes[rank].slices] if name == "w" else values).to(device))
        sender.publish(version, shards(rank), timeout_s=60)
        sender.before_update()
        files.set(f"given {version.step} {rank}", "")
        for generator in (ONE, OF_RANKS):
            files.get(f"loaded {version.step} {generator}")
        if rank == 1 and version.step == RESTARTED_AFTER:
            sender.close()
            sender = open_sender(1)
    sender.close()
    if agent is not None:
        for generator in (ONE, OF_RANKS):
            files.get(f"left {generator}")
        agent.close()
    return {}


def _load_all(
    files: dist.Store, number: int, receiver: WeightReceiver, load: Callable[[Version | None], Version | None]
) -> int:
    """Load each version once the trainer has given the turn away; return how many were not the ones expected."""
    held: Version | None = None
    wrong = 0
    for version in VERSIONS:
        for rank in range(TRAINERS):
            files.get(f"given {version.step} {rank}")
        receiver.wait_for(version.step, timeout_s=60)
        held = load(held)
        wrong += held != version
        files.set(f"loaded {version.step} {number}", "")
    receiver.close()
    files.set(f"left {number}", "")
    return wrong


class Spans(NoTimeline):
    """What came each way, load by load."""

    def __init__(self) -> None:
        self.loads: list[tuple[int, int]] = []

    def record_span(self, name: str, seconds: float, **attributes: Any) -> None:
        if name == "hand over weights":
            self.loads.append((attributes["device_bytes"], attributes["host_bytes"]))


def _generate(credentials: Credentials, files: dist.Store, device: torch.device) -> dict[str, Any]:
    spans, torn = Spans(), []
    live = {name: torch.zeros(shape, dtype=torch.bfloat16, device=device) for name, shape in SHAPES.items()}
    receiver = WeightReceiver(
        credentials, "weights-0", "rollout-0", NEEDS, device=device, on_device=True, timeline=spans
    )

    def replace(tensors: Mapping[str, Tensor]) -> None:
        for name, values in tensors.items():
            live[name].copy_(values)

    def load(held: Version | None) -> Version | None:
        loaded = receiver.load(replace, newer_than=held)
        torn.append(loaded is None or not _is_whole(live, loaded))
        return loaded

    wrong = _load_all(files, ONE, receiver, load)
    return {"wrong": wrong + sum(torn), "loads": spans.loads}


class Engine:
    """Two ranks, each a process; implements `RanksEngine`."""

    num_ranks = ENGINE_RANKS

    def __init__(self, device: torch.device, directory: Path) -> None:
        self._device, self._directory = device, directory
        self._pipes: list[Pipe] = []

    def weight_needs(self) -> Mapping[str, Need]:
        return NEEDS

    def follow_weights(self, following: Following) -> None:
        context = multiprocessing.get_context("spawn")
        for rank in range(ENGINE_RANKS):
            mine, theirs = context.Pipe()
            device = f"{self._device.type}:{(self._device.index or 0) + rank}"
            context.Process(
                target=engine_rank, args=(theirs, following, rank, device, self._directory), daemon=True
            ).start()
            theirs.close()
            self._pipes.append(mine)
        self._hear()

    def hold(self, version: Version) -> bool:
        return all(self.tell("hold", version))

    def load_held(self) -> None:
        self.tell("load_held")

    def receive_while_paused(self, version: Version, *, timeout_s: float) -> None:
        raise AssertionError("nothing is broadcast")

    def tell(self, verb: str, *arguments: Any) -> list[Any]:
        for pipe in self._pipes:
            pipe.send((verb, *arguments))
        return self._hear()

    def _hear(self) -> list[Any]:
        assert all(pipe.poll(_DEADLINE_S) for pipe in self._pipes), "a rank says nothing"
        return [pipe.recv() for pipe in self._pipes]


def _generate_on_ranks(
    credentials: Credentials, files: dist.Store, device: torch.device, directory: Path, port: int
) -> dict[str, Any]:
    Job("127.0.0.1", port, SECRET.hex(), os.getpid(), (), 0, "", 100, time.time(), HostClock.from_wall_clock()).save(
        directory
    )
    engine = Engine(device, directory)
    receiver = RanksReceiver(
        credentials, "weights-0", "rollout-1", engine, run_dir=directory, lead="", arrived=lambda: None,
        takes_turns=False, timeout_s=30, on_device=True,
    )  # fmt: skip

    def load(held: Version | None) -> Version | None:
        return receiver.load(lambda _: engine.load_held(), newer_than=held, wait_s=30)

    wrong = _load_all(files, OF_RANKS, receiver, load)
    said = engine.tell("end")
    on_device, on_host = (sum(one[k] for one in said) for k in (1, 2))
    return {
        "wrong": wrong + sum(one[0] for one in said),
        "each": [one[1:] for one in said],
        "sum": (on_device, on_host),
    }


def engine_rank(pipe: Pipe, following: Following, rank: int, name: str, directory: Path) -> None:
    """Be a rank of the engine."""
    torch.set_num_threads(1)
    answer_calls(pipe, Rank(following, rank, open_device(name), directory))


class Rank:
    def __init__(self, following: Following, rank: int, device: torch.device, directory: Path) -> None:
        self._device, self._wrong = device, 0
        store = dist.FileStore(str(directory / "model"), -1)
        store.set_timeout(timedelta(seconds=60))
        self._group = connect_group(store, rank, ENGINE_RANKS, device)
        self._receiver = RankReceiver(following, rank, ENGINE_RANKS, device)
        self._version: Version | None = None

    def hold(self, version: Version) -> bool:
        self._version = version
        return self._receiver.hold(version)

    def load_held(self) -> None:
        assert self._version is not None
        held = {name: values.clone() for name, values in self._receiver.held(self._share)}
        wait_for_device(self._device)
        self._receiver.let_go()
        self._wrong += not _is_whole(held, self._version)

    def end(self) -> tuple[int, int, int]:
        """Return how many loads were torn, and the bytes that this rank read each way."""
        reader = self._receiver._on_device
        assert reader is not None
        self._receiver.close()
        return self._wrong, reader.bytes_on_device, reader.bytes_on_host

    def _share(self, values: Tensor, owner: int) -> None:
        options = dist.BroadcastOptions()
        options.rootRank = owner
        self._group.broadcast([values], options).wait()
