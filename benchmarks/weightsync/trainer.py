"""A trainer rank as a process: masters that change, and the real sender. Obeys one order after another."""

import threading
import time
from typing import Any

import torch

from benchmarks.weightsync.masters import WIRE, WIRE_NAME, Masters, held_by
from benchmarks.weightsync.raw_gloo import RawSender
from benchmarks.weightsync.setup import AGENT, CPU, Setup, begin_process, obey, proof_key
from benchmarks.weightsync.spans import Span, Spans
from weightsync.broadcast_group import Broadcaster, BucketLayout, Cast
from weightsync.plan import TransferPlan, plan_transfer
from weightsync.sender import WeightSender
from weightsync.version import Version

_BURSTS = 50
_PRODUCTS = 10
_IDLE_S = 0.015
"""A step: matrix products of some 5 ms, then a pause, as often as this takes about a second."""


def train(pipe: Any, setup: Setup, rank: int, lineage: int) -> None:
    """Serve as one rank of the trainer's gang; says "ready" first."""
    begin_process()
    trainer = TrainerRank(setup, rank, lineage)
    pipe.send("ready")
    while True:
        obey(pipe, trainer)


class SwitchedBroadcaster(Broadcaster):
    """Broadcasts only when it is `on`: what is left is the staged path, so one sender shows both."""

    on = False

    def broadcast_version(self, version: Version, cast: Cast, *, stop: threading.Event | None = None) -> None:
        """See `Broadcaster`."""
        if self.on:
            super().broadcast_version(version, cast, stop=stop)


_damages: list[None] = []
"""One for each bucket that is yet to be damaged on its way."""


def _damage_on_the_way() -> None:
    """Have a byte of a bucket change behind its checksum, as often as is ordered."""
    stamp = BucketLayout.stamp_trailer

    def damaging(bucket: BucketLayout, words: torch.Tensor, version: Version) -> None:
        stamp(bucket, words, version)
        if _damages:
            _damages.pop()
            words.view(torch.uint8)[7] ^= 4

    BucketLayout.stamp_trailer = damaging  # type: ignore[assignment, method-assign]


class TrainerRank:
    """Its public methods are the orders."""

    def __init__(self, setup: Setup, rank: int, lineage: int) -> None:
        self._setup = setup
        self._rank = rank
        self._lineage = lineage
        _damage_on_the_way()
        self._masters = Masters(setup.shapes, rank, setup.num_ranks, setup.masters, seed=lineage)
        self._activations = torch.ones(256, 256)
        self._private: list[torch.Tensor] = []
        self._raw: RawSender | None = None
        self._spans = Spans()
        if setup.traces:
            self._spans.record_checksums("seal")
        self._credentials = setup.credentials()
        self._store = self._credentials.own_store()
        epoch, config, name = f"{lineage}.0", setup.config, f"actor-0/{rank}"
        held = [held_by(each, setup.num_ranks, setup.shapes, setup.masters) for each in range(setup.num_ranks)]
        self._plan = plan_transfer(held, bucket_bytes=config.bucket_bytes, dtype=WIRE_NAME)
        self._broadcaster = SwitchedBroadcaster(
            self._credentials, AGENT, name, self._plan, rank, device=CPU, epoch=epoch, timeout_s=config.timeout_s
        )
        self._sender = WeightSender(
            self._credentials, AGENT, name, self._plan, rank,
            device=CPU, timeout_s=config.timeout_s, broadcaster=self._broadcaster,
        )  # fmt: skip

    def plan(self) -> TransferPlan:
        """Return the plan, the same on every rank."""
        return self._plan

    def prepare(self, step: int) -> None:
        """Make the weights of a step, and tell the store what they are."""
        with self._spans.span("update"):
            self._sender.before_update()
            self._masters.update(step)
            if self._setup.proves:
                self._store.set(proof_key(Version(self._lineage, step), self._rank), str(self._masters.digest()))

    def publish(self, step: int, broadcast: bool) -> tuple[float, float]:
        """Publish them; returns when the trainer was held up (s, monotonic)."""
        self._broadcaster.on = broadcast
        began = time.monotonic()
        with self._spans.span("publish"):
            timeout_s = self._setup.config.timeout_s
            self._sender.publish(Version(self._lineage, step), self._masters.shards, timeout_s=timeout_s)
        return began, time.monotonic()

    def damage_next(self) -> None:
        """Damage one bucket of the next broadcast."""
        _damages.append(None)

    def train(self) -> tuple[float, float]:
        """Do a step's work, as the host of an accelerator does, then have leave to change the weights.

        Returns:
            The seconds that this was waited for, and those of the work before that.
        """
        pause = threading.Event()
        began = time.monotonic()
        with self._spans.span("train"):
            for _ in range(_BURSTS):
                for _ in range(_PRODUCTS):
                    torch.mm(self._activations, self._activations)
                pause.wait(_IDLE_S)
        worked_s = time.monotonic() - began
        with self._spans.span("wait for copies"):
            return self._sender.before_update(), worked_s

    def settle(self) -> None:
        """Wait until the agent has what was published."""
        self._sender.wait(self._setup.config.timeout_s)

    def copy(self) -> float:
        """Return the seconds of one copy of this rank's shards, cast, into warm private memory."""
        if not self._private:
            self._private = [torch.zeros_like(shard.values, dtype=WIRE) for shard in self._masters.shards]
        began = time.monotonic()
        for target, shard in zip(self._private, self._masters.shards, strict=True):
            target.copy_(shard.values)
        return time.monotonic() - began

    def connect_raw(self, plan: TransferPlan) -> None:
        """Meet the receivers in a group of the raw broadcast's own."""
        self._raw = RawSender(self._credentials.group_store(), plan, self._rank, self._setup.num_receivers)

    def raw(self, at_a_time: int) -> tuple[float, float]:
        """Broadcast the same bytes without the weight path; returns begin and end (s, monotonic)."""
        assert self._raw is not None
        return self._raw.run(at_a_time)

    def spans(self) -> list[Span]:
        """Return what was recorded since the last time."""
        return self._spans.take()
