"""Weights that are broadcast to a generator of two ranks, which draw tokens with collectives of their own meanwhile.

Rank 0 trains and has the agent; rank 1 uses the engine, whose ranks are two processes, each on a device of its own.
Each counts collectives of its model that are in flight while it takes part in a broadcast.
"""

import multiprocessing
import os
import threading
import time
from collections.abc import Mapping
from datetime import timedelta
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from asyncflow.clock import HostClock
from asyncflow.device import connect_group, open_device
from asyncflow.job import Job
from asyncflow.transport.meeting import Credentials
from tests.device.processes import answer_calls
from weightsync.agent.agent_service import WeightAgent
from weightsync.broadcast_group import Broadcaster, BroadcastMember
from weightsync.config import WeightSyncConfig
from weightsync.plan import Box, Need, ShardSpec, plan_transfer
from weightsync.receiver import Following, RankReceiver, RanksReceiver, WeightReceiver
from weightsync.sender import WeightSender
from weightsync.version import Version
from workers.engines.base import LocalShard

SECRET = b"secret"
NUM_RANKS, WANTED = 2, 3
DEADLINE_S = 200
SHAPE = (512, 64)
NAMES = ("v", "w")
VERSIONS = [Version(0, step) for step in range(1, 40)]


def values(name: str, version: Version) -> Tensor:
    """Return what a tensor of a version holds, float32 [512, 64]."""
    return torch.arange(float(SHAPE[0] * SHAPE[1])).view(SHAPE).cos() * version.step + NAMES.index(name)


def paused(device: torch.device, rank: int, num_ranks: int, directory: Path) -> dict[str, Any]:
    """Publish versions until three came to all ranks by broadcast; says what each engine's rank counted."""
    files = dist.FileStore(str(directory / "store"), -1)
    return _train(device, files) if rank == 0 else _use(device, files, directory)


def _train(device: torch.device, files: dist.Store) -> dict[str, Any]:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    files.set("port", str(store.port))
    credentials = Credentials(store, SECRET, 30)
    agent = WeightAgent(credentials, "weights-0", WeightSyncConfig())
    box = Box.from_shape(SHAPE)
    masters = {name: torch.empty(SHAPE, device=device) for name in NAMES}
    shards = [LocalShard(name, SHAPE, box, master) for name, master in masters.items()]
    plan = plan_transfer(
        [[ShardSpec(name, SHAPE, "float32", box) for name in NAMES]], bucket_bytes=8192, dtype="bfloat16"
    )
    broadcaster = Broadcaster(credentials, "weights-0", "actor/0", plan, 0, device=device, epoch="0", timeout_s=30)
    sender = WeightSender(credentials, "weights-0", "actor/0", plan, 0, device=device, broadcaster=broadcaster)
    for version in VERSIONS:
        sender.before_update()
        for name, master in masters.items():
            master.copy_(values(name, version).to(device))
        sender.publish(version, shards, timeout_s=60)
        if files.get(f"{version.step}") == b"enough":
            break
    sender.close()
    files.get("left")
    agent.close()
    return {}


class Engine:
    """Two ranks, which all do what it tells them in the same order; implements `RanksEngine`."""

    def __init__(self, device: torch.device, directory: Path) -> None:
        self._device, self._directory = device, directory
        self._turn = threading.Lock()
        self._running = threading.Event()
        self._closed = threading.Event()
        self._pipes: list[Pipe] = []
        self.num_ranks = NUM_RANKS

    def weight_needs(self) -> Mapping[str, Need]:
        return {name: Need(SHAPE) for name in NAMES}

    def follow_weights(self, following: Following) -> None:
        context = multiprocessing.get_context("spawn")
        for rank in range(NUM_RANKS):
            mine, theirs = context.Pipe()
            device = f"{self._device.type}:{(self._device.index or 0) + 1 + rank}" if self._device.index else "cpu"
            arguments = theirs, following, rank, device, self._directory
            context.Process(target=engine_rank, args=arguments, daemon=True).start()
            theirs.close()
            self._pipes.append(mine)
        self._hear()
        threading.Thread(target=self._draw_tokens, daemon=True).start()
        self._running.set()

    def hold(self, version: Version) -> bool:
        return all(self.tell("hold", version))

    def load_held(self) -> None:
        self.tell("load_held")

    def receive_while_paused(self, version: Version, *, timeout_s: float) -> None:
        self.tell("receive_while_paused", version)

    def tell(self, verb: str, *arguments: Any) -> list[Any]:
        """Have all ranks do something between two tokens; returns their answers."""
        self._running.clear()  # locks are not fair
        with self._turn:
            self._running.set()
            return self._ask(verb, *arguments)

    def close(self) -> None:
        self._closed.set()
        self.tell("end")

    def _draw_tokens(self) -> None:
        while self._running.wait():
            with self._turn:
                if self._closed.is_set():
                    return
                self._ask("draw_token")

    def _ask(self, verb: str, *arguments: Any) -> list[Any]:
        for pipe in self._pipes:
            pipe.send((verb, *arguments))
        return self._hear()

    def _hear(self) -> list[Any]:
        assert all(pipe.poll(DEADLINE_S) for pipe in self._pipes), "a rank says nothing"
        return [pipe.recv() for pipe in self._pipes]


def _use(device: torch.device, files: dist.Store, directory: Path) -> dict[str, Any]:
    port = int(files.get("port"))
    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    Job("127.0.0.1", port, SECRET.hex(), os.getpid(), (), 0, "", 100, time.time(), HostClock.from_wall_clock()).save(
        directory
    )
    engine = Engine(device, directory)
    receiver = RanksReceiver(
        Credentials(store, SECRET, 30), "weights-0", "rollout-0", engine, run_dir=directory, lead="weights-0",
        arrived=lambda: None, takes_turns=False, timeout_s=30,
    )  # fmt: skip
    held: Version | None = None
    for version in VERSIONS:
        receiver.wait_for(version.step, timeout_s=DEADLINE_S)
        while held is None or held < version:
            held = receiver.load(lambda _: engine.load_held(), newer_than=held, wait_s=30) or held
        counted = engine.tell("report")
        enough = min(came for came, *_ in counted) >= WANTED or version == VERSIONS[-1]
        files.set(f"{version.step}", "enough" if enough else "more")
        if enough:
            break
    engine.close()
    receiver.close()
    files.set("left", "1")
    names = ("came", "wrong", "tokens", "in_flight")
    return {name: [one[k] for one in counted] for k, name in enumerate(names)}


def engine_rank(pipe: Pipe, following: Following, rank: int, name: str, directory: Path) -> None:
    """Be a rank of the engine."""
    torch.set_num_threads(1)
    answer_calls(pipe, Rank(following, rank, open_device(name), directory))


class Rank:
    """Its part of the model: one sum over the ranks per token."""

    def __init__(self, following: Following, rank: int, device: torch.device, directory: Path) -> None:
        self._device = device
        self._transferring = False
        self._issued: list[Any] = []  # collectives whose end was not seen yet
        self._came, self._wrong, self._tokens, self.in_flight = 0, 0, 0, 0
        self._version = Version(0, 0)
        store = dist.FileStore(str(directory / "model"), -1)
        store.set_timeout(timedelta(seconds=60))
        self._group = connect_group(store, rank, NUM_RANKS, device)
        self._hook_transfers()
        self._receiver = RankReceiver(following, rank, NUM_RANKS, device)

    def draw_token(self) -> None:
        """Issue a collective, as a step of vLLM does, and do not wait for its end."""
        self.in_flight += self._transferring
        total = torch.ones(256, device=self._device)
        work = self._group.allreduce([total])
        work.wait()
        end = None if self._device.type == "cpu" else torch.accelerator.current_stream(self._device).record_event()
        self._issued = [*(one for one in self._issued[-8:] if not one.query()), *([] if end is None else [end])]
        self._tokens += 1

    def receive_while_paused(self, version: Version) -> None:
        self._receiver.receive_while_paused(version)

    def hold(self, version: Version) -> bool:
        self._version = version
        return self._receiver.hold(version)

    def load_held(self) -> None:
        for name, found in self._receiver.held(self._share):
            self._wrong += not torch.equal(found.cpu(), values(name, self._version).bfloat16())
        self._receiver.let_go()

    def report(self) -> tuple[int, int, int, int]:
        return self._came, self._wrong, self._tokens, self.in_flight

    def end(self) -> None:
        self._receiver.close()

    def _share(self, tensor: Tensor, owner: int) -> None:
        options = dist.BroadcastOptions()
        options.rootRank = owner
        self._group.broadcast([tensor.view(torch.int32)], options).wait()

    def _hook_transfers(self) -> None:
        """Note when this rank's receiver is in a broadcast, its group's connecting included."""
        receive = BroadcastMember.receive_version

        def noted(member: BroadcastMember, *arguments: Any, **named: Any) -> None:
            self.in_flight += sum(not end.query() for end in self._issued)
            self._transferring = True
            try:
                receive(member, *arguments, **named)
                self._came += 1
            finally:
                self._transferring = False

        BroadcastMember.receive_version = noted  # type: ignore[method-assign]
        if os.environ.get("WITHOUT_PAUSE"):  # shows that the count would tell
            RankReceiver._receive_broadcast = WeightReceiver._receive_broadcast  # type: ignore[method-assign]
