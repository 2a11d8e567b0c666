"""One agent, the trainer's ranks and some generators on this host, around a job store on loopback."""

import os
import secrets
import threading
import time
from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from asyncflow.errors import TransportError
from asyncflow.job import LOOPBACK
from asyncflow.sealed_store import SealedStore, serve_store
from benchmarks.transferqueue.child import Child
from benchmarks.weightsync.generator import Load, generate
from benchmarks.weightsync.masters import WIRE_NAME
from benchmarks.weightsync.setup import AGENT, Setup, begin_process, obey, proof_key
from benchmarks.weightsync.shapes import Shapes
from benchmarks.weightsync.trainer import train
from tq.service_process import serve_only
from weightsync.agent.agent_service import WeightAgent
from weightsync.config import WeightSyncConfig
from weightsync.messages import AgentStatus
from weightsync.plan import TransferPlan
from weightsync.version import Version

_START_S = 120.0
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_POLL_S = 0.02


class Cluster:
    """Owns the processes; a context manager that ends them by their ids.

    Attributes:
        agent, trainers, receivers: the processes.
        loads: every swap that receivers told of, by receiver.
        outputs: (version, digests) of every burst whose weights were proved.
        lineage: of the trainer's gang.
    """

    def __init__(
        self,
        shapes: Shapes,
        *,
        bucket_bytes: int,
        num_receivers: int = 4,
        timeout_s: float = 60.0,
        answer_s: float = 120.0,
        proves: bool = False,
        baselines: bool = False,
        traces: bool = False,
    ) -> None:
        """Start everything and wait until it works.

        Args:
            shapes, num_receivers, proves, baselines, traces: see `Setup`.
            bucket_bytes, timeout_s: of the weight path.
            answer_s: how long an order may take.
        """
        self._answer_s = answer_s
        self._store, port = serve_store(LOOPBACK, timedelta(seconds=timeout_s))
        config = WeightSyncConfig(bucket_bytes=bucket_bytes, dtype=WIRE_NAME, timeout_s=timeout_s)
        self.setup = Setup(
            port, secrets.token_bytes(32), shapes, config, num_receivers=num_receivers,
            masters=torch.float32, proves=proves, baselines=baselines, traces=traces,
        )  # fmt: skip
        self._proofs = SealedStore(self._store, self.setup.secret)
        self.agent: Child | None = None
        self.trainers: list[Child] = []
        self.receivers: list[Child] = []
        self.loads: list[list[Load]] = [[] for _ in range(num_receivers)]
        self.outputs: list[tuple[Version, list[int]]] = []
        self.lineage = 0
        self._pause = threading.Event()
        try:
            self.start_agent()
            self.receivers = [self._start_receiver(place) for place in range(num_receivers)]
            self.start_gang(0)
            hear(self.receivers, timeout_s=_START_S)
        except BaseException:
            self.close()
            raise

    def start_agent(self) -> None:
        """Start it, again if it is dead."""
        self.agent = Child(_serve_agent, self.setup)
        hear([self.agent], timeout_s=_START_S)

    def restart_receiver(self, place: int) -> None:
        """Start one in place of a dead one; returns when it obeys."""
        self.receivers[place] = self._start_receiver(place)
        hear([self.receivers[place]], timeout_s=_START_S)

    def start_gang(self, lineage: int) -> None:
        """End the trainer's ranks that are left, and start all of them as a newer lineage."""
        for child in self.trainers:
            child.kill()
        self.lineage = lineage
        self.trainers = [Child(train, self.setup, rank, lineage) for rank in range(self.setup.num_ranks)]
        hear(self.trainers, timeout_s=_START_S)

    def plan(self) -> TransferPlan:
        """Return what the trainer's ranks agreed on."""
        plan: TransferPlan = ask(self.trainers[:1], "plan")[0]
        return plan

    def status(self) -> AgentStatus:
        """Return what the agent has."""
        assert self.agent is not None
        status: AgentStatus = ask([self.agent], "status")[0]
        return status

    def update(self, step: int, *, broadcast: bool) -> list[tuple[float, float]]:
        """Train and publish a step; returns when each rank was held up (s, monotonic)."""
        ask(self.trainers, "prepare", step, timeout_s=self._answer_s)
        held_up: list[tuple[float, float]] = ask(self.trainers, "publish", step, broadcast, timeout_s=self._answer_s)
        return held_up

    def collect(self) -> list[Version | None]:
        """Hear what receivers did; returns the version that each computes with."""
        records = ask(self.receivers, "record", timeout_s=self._answer_s)
        for loads, record in zip(self.loads, records, strict=True):
            loads.extend(record.loads)
            self.outputs.extend(record.outputs)
        return [record.version for record in records]

    def wait_loaded(self, step: int, *, timeout_s: float = 120.0) -> bool:
        """Wait until all receivers compute with a step of this lineage, or newer; returns whether they do."""
        wanted, deadline = Version(self.lineage, step), time.monotonic() + timeout_s
        while not all(version is not None and version >= wanted for version in self.collect()):
            if time.monotonic() > deadline:
                return False
            self._pause.wait(_POLL_S)
        return True

    def loads_of(self, step: int) -> list[Load]:
        """Return every receiver's swap to a step of this lineage."""
        version = Version(self.lineage, step)
        return [load for loads in self.loads for load in loads if load.version == version]

    def num_mixed(self) -> int:
        """Return how many outputs were made with other weights than those of the version that they claim."""
        proofs = {version: self._proof(version) for version, _ in self.outputs}
        return sum(digests != proofs[version] for version, digests in self.outputs)

    def pids(self) -> list[int]:
        """Return the ids of all processes."""
        return [child.pid for child in self._children()]

    def cpu_s(self) -> float:
        """Return the processor time of all processes so far (s)."""
        fields = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in self.pids()]
        return sum(int(user) + int(system) for *_, user, system in (each[:13] for each in fields)) / _TICKS_PER_S

    def alive(self) -> bool:
        """Return whether all processes run."""
        return all(child.alive for child in self._children())

    def close(self) -> None:
        """Kill everything; idempotent."""
        for child in self._children():
            child.kill()

    def __enter__(self) -> "Cluster":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _children(self) -> list[Child]:
        return [*([] if self.agent is None else [self.agent]), *self.trainers, *self.receivers]

    def _start_receiver(self, place: int) -> Child:
        return Child(generate, self.setup, place)

    def _proof(self, version: Version) -> list[int] | None:
        keys = [proof_key(version, rank) for rank in range(self.setup.num_ranks)]
        proofs = self._proofs.get_existing(keys)
        return [int(proofs[key]) for key in keys] if len(proofs) == len(keys) else None


def tell(children: Iterable[Child], *order: Any) -> None:
    """Order all of them."""
    for child in children:
        child.tell(order)


def hear(children: Iterable[Child], *, timeout_s: float = 120.0) -> list[Any]:
    """Return all answers.

    Raises:
        AsyncFlowError: one of them is an error, or does not come.
    """
    try:
        answers = [child.hear(timeout_s) for child in children]
    except SystemExit as error:
        raise TransportError(str(error)) from error
    for answer in answers:
        if isinstance(answer, Exception):
            raise answer
    return answers


def ask(children: list[Child], *order: Any, timeout_s: float = 120.0) -> list[Any]:
    """Order all of them and return all answers."""
    tell(children, *order)
    return hear(children, timeout_s=timeout_s)


def _serve_agent(pipe: Any, setup: Setup) -> None:
    begin_process()
    serve_only()
    agent = WeightAgent(setup.credentials(), AGENT, setup.config)
    pipe.send("ready")
    while True:
        obey(pipe, agent)
