"""A generator as a process: an engine that computes in bursts, and the real receiver.

    generate | generate | load v1 | generate | generate | generate | load v2 | ...      (until it is told to pause)

One burst is some matrix products with the engine's weights, then a pause, as the host of an accelerator has it. The
engine adopts what `load` gives it, as those on the CPU do. Between bursts it takes the newest version, and obeys.
"""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from benchmarks.weightsync.masters import WIRE, engine_digests
from benchmarks.weightsync.raw_gloo import RawReceiver
from benchmarks.weightsync.setup import AGENT, CPU, Setup, begin_process, obey
from benchmarks.weightsync.spans import Span, Spans
from weightsync.broadcast_group import BroadcastMember, Target
from weightsync.messages import Transfer
from weightsync.plan import Need, Piece, TransferPlan
from weightsync.receiver import WeightReceiver
from weightsync.slot_memory import RegionLayout
from weightsync.version import Version

_BUSY_S = 0.005
_IDLE_S = 0.015
_WIDTH = 256


@dataclass(frozen=True)
class Load:
    """One swap of the weights.

    Attributes:
        version: that was loaded.
        began, ended: of `WeightReceiver.load` (s, monotonic).
        copy_s: of the same copy from private memory, just before or after; 0 where that is not measured.
    """

    version: Version
    began: float
    ended: float
    copy_s: float

    @property
    def seconds(self) -> float:
        """How long the engine stood still."""
        return self.ended - self.began


@dataclass
class Record:
    """What a generator did since it was asked last.

    Attributes:
        version: that it computes with.
        loads: in order.
        outputs: (version, digests of the weights that it was made with) of every burst, where that is proved.
    """

    version: Version | None = None
    loads: list[Load] = field(default_factory=list)
    outputs: list[tuple[Version, list[int]]] = field(default_factory=list)


def generate(pipe: Any, setup: Setup, place: int) -> None:
    """Serve as receiver number `place`; says "ready" before it has any weights."""
    begin_process()
    generator = Generator(setup, place)
    pipe.send("ready")
    while True:
        while pipe.poll(0 if generator.running else _IDLE_S):
            obey(pipe, generator)
        if generator.running:
            generator.swap()
            generator.burst()
            pipe.poll(_IDLE_S)


class NotingMember(BroadcastMember):
    """Notes what came whole, since a receiver would quietly take from the agent what did not."""

    came: Version | None = None

    def receive_version(
        self,
        transfer: Transfer,
        layout: RegionLayout,
        target: Target,
        *,
        pieces: Sequence[Piece] | None = None,
        timeout_s: float,
    ) -> None:
        """See `BroadcastMember`."""
        super().receive_version(transfer, layout, target, pieces=pieces, timeout_s=timeout_s)
        self.came = transfer.version


class Generator:
    """Its public methods, but for `swap` and `burst`, are the orders."""

    def __init__(self, setup: Setup, place: int) -> None:
        self.running = True
        self._setup = setup
        self._place = place
        self._engine = {name: torch.ones(shape, dtype=WIRE) for name, shape in setup.shapes.items()}
        self._copy_of = {name: tensor.clone() for name, tensor in self._engine.items()} if setup.baselines else {}
        self._copy_to = {name: tensor.clone() for name, tensor in self._copy_of.items()}
        self._largest = max(setup.shapes, key=lambda name: len(setup.shapes[name]) * math.prod(setup.shapes[name]))
        self._rows = self._engine[self._largest][:_WIDTH, :_WIDTH]
        self._version: Version | None = None
        self._num_loads = 0
        self._record = Record()
        self._raw: RawReceiver | None = None
        self._spans = Spans()
        if setup.traces:
            self._spans.record_checksums("check")
        credentials, name, timeout_s = setup.credentials(), f"rollout-{place}", setup.config.timeout_s
        self._groups = credentials.group_store()
        self._member = NotingMember(credentials.group_store(timeout_s), name, CPU)
        self._receiver = WeightReceiver(
            credentials, AGENT, name, {key: Need(shape) for key, shape in setup.shapes.items()},
            device=CPU, adopts=True, member=self._member, lead=AGENT, timeout_s=timeout_s,
        )  # fmt: skip

    def burst(self) -> None:
        """Generate: compute with the weights, and say which they are."""
        with self._spans.span("generate"):
            if self._setup.proves and self._version is not None:
                self._record.outputs.append((self._version, engine_digests(self._engine, self._setup.num_ranks)))
            until = time.monotonic() + _BUSY_S
            values = self._rows.float()
            while time.monotonic() < until:
                torch.mm(values, values.T)

    def swap(self) -> None:
        """Take the newest version, if there is a newer one."""
        newest = self._receiver.newest
        if newest is None or newest == self._version:
            return
        copies_first = bool(self._copy_of) and self._num_loads % 2 == 0
        copy_s = self._copy() if copies_first else 0.0
        load = self._load()
        if load is None:
            return
        if self._copy_of and not copies_first:
            copy_s = self._copy()
        self._record.loads.append(Load(load.version, load.began, load.ended, copy_s))

    def pause(self) -> None:
        """Stop generating, as the synchronous schedule does before an update."""
        self.running = False

    def resume(self) -> None:
        """Go on."""
        self.running = True

    def take(self, step: int) -> tuple[float, bool]:
        """Wait for a version of `step` and load it; returns when that was done, and whether it came by broadcast."""
        self._receiver.wait_for(step, timeout_s=self._setup.config.timeout_s)
        load = self._load()
        assert load is not None and load.version.step == step
        return load.ended, self._member.came == load.version

    def connect_raw(self, plan: TransferPlan) -> None:
        """Meet the trainer's ranks in groups of the raw broadcast's own."""
        self._raw = RawReceiver(self._groups, plan, self._place, self._setup.num_receivers)

    def raw(self, at_a_time: int) -> tuple[float, float]:
        """Receive the same bytes without the weight path; returns begin and end (s, monotonic)."""
        assert self._raw is not None
        return self._raw.run(at_a_time)

    def record(self) -> Record:
        """Return what happened since the last time."""
        record, self._record = self._record, Record()
        record.version = self._version
        return record

    def damage(self) -> None:
        """Flip one bit of the engine's weights: a control of the proof."""
        next(iter(self._engine.values())).view(-1).view(torch.uint8)[5] ^= 1

    def spans(self) -> list[Span]:
        """Return what was recorded since the last time."""
        return self._spans.take()

    def _load(self) -> Load | None:
        began = time.monotonic()
        with self._spans.span("load"):
            version = self._receiver.load(self._apply, newer_than=self._version)
        if version is None:
            return None
        self._version = version
        self._num_loads += 1
        return Load(version, began, time.monotonic(), 0.0)

    def _apply(self, weights: Mapping[str, Tensor]) -> None:
        self._engine = dict(weights)
        self._rows = weights[self._largest][:_WIDTH, :_WIDTH]

    def _copy(self) -> float:
        began = time.monotonic()
        for name, tensor in self._copy_to.items():
            tensor.copy_(self._copy_of[name])
        return time.monotonic() - began
