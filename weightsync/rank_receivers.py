"""Receivers of an engine whose ranks are processes of their own: each has a receiver, and keeps its share of a version.

    engine's rank k    RankReceiver     agent, broadcasts -> the k-th share of a version
      | pipe: (k, version)                                                 hold(v) ... load, share by share ... let_go
    user's process     RanksReceiver    what all ranks have is ready ... load: have all hold v, have them load it

A share that was broadcast is on the rank's device; another one stays in the agent's memory, which the rank has mapped.
The shares are whole tensors, of about the same size together. A rank checks its own; the others get them from it while
all load, so a version takes its size once, however many ranks there are. The user's process has no copy of anything.
"""

import os
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from io import FileIO
from math import prod
from pathlib import Path
from typing import Protocol, runtime_checkable

import msgspec
import torch
from torch import Tensor

from asyncflow.errors import EngineFailed, WeightSyncError
from asyncflow.job import Job
from asyncflow.sealed_store import connect_store
from asyncflow.timeline import Spans
from asyncflow.transport.meeting import Credentials
from asyncflow.transport.server import Connection
from weightsync.broadcast import BroadcastMember
from weightsync.broadcast_group import STALL_S
from weightsync.messages import Offered, Release
from weightsync.plan import Need
from weightsync.receiver import WeightReceiver
from weightsync.version import Version
from weightsync.version_cache import ReadyVersion

_CPU = torch.device("cpu")
_NEWS = struct.Struct("<qqqd?")
"""What a rank says in the pipe: its number, the version that it has, the seconds of its last span, and whether that was
a broadcast. Short enough to be written as a whole."""
_BROADCAST, _AGENT = "receive weights", "check weights"

Share = Callable[[Tensor, int], object]
"""(tensor, rank): gives all ranks that rank's tensor, in place; collective."""


class Following(msgspec.Struct, frozen=True):
    """What a rank has to know to receive; plain values, none of them secret.

    Attributes:
        run_dir: of the run; its `job.json` says how to reach the others.
        name: of the engine's user.
        agent: see `WeightReceiver`.
        lead: see there; empty: nothing is broadcast.
        timeout_s: deadline of a broadcast.
        start_timeout_s: deadline of a handshake.
        pid, fd: of the pipe's writing end.
        needs: what the engine wants, by its own names.
    """

    run_dir: str
    name: str
    agent: str
    lead: str
    timeout_s: float
    start_timeout_s: float
    pid: int
    fd: int
    needs: dict[str, Need]


@runtime_checkable
class RanksEngine(Protocol):
    """An engine whose ranks receive by themselves."""

    @property
    def num_ranks(self) -> int:
        """Processes that share the model."""

    @property
    def can_follow(self) -> bool:
        """Whether they can receive what is not broadcast, too, out of the agent's memory."""

    def weight_needs(self) -> Mapping[str, Need]:
        """Return what they need together."""

    def follow(self, following: Following) -> None:
        """Have every rank open a `RankReceiver`; returns when all have."""

    def hold(self, version: Version) -> bool:
        """Have every rank `hold` a version; False: one has not got it, or not any more."""

    def load_held(self) -> None:
        """Have all ranks load the version that they hold, and let it go."""


class RanksReceiver(WeightReceiver):
    """In the process that uses the engine: decides which version the ranks load, and takes turns for them."""

    def __init__(
        self,
        credentials: Credentials,
        agent: str,
        name: str,
        engine: RanksEngine,
        *,
        run_dir: Path,
        lead: str,
        arrived: Callable[[], None],
        takes_turns: bool,
        timeout_s: float,
        timeline: Spans | None = None,
    ) -> None:
        """Have the ranks follow, and watch.

        Args:
            engine: whose ranks receive.
            run_dir: of the run.
            lead: see `Following`.
            credentials, agent, name, arrived, takes_turns, timeout_s, timeline: see `WeightReceiver`.
        """
        self._engine = engine
        self._newest_of: list[Version | None] = [None] * engine.num_ranks
        self._agree = threading.Event()
        read_end, write_end = os.pipe()
        super().__init__(
            credentials, agent, name, engine.weight_needs(),
            device=_CPU, arrived=arrived, takes_turns=takes_turns, timeline=timeline,
        )  # fmt: skip
        self._cache.fail(self._lag())
        threading.Thread(target=self._listen, args=(read_end,), name="weight-ranks", daemon=True).start()
        try:
            engine.follow(
                Following(
                    str(run_dir.absolute()), name, agent, lead, timeout_s, credentials.timeout_s,
                    os.getpid(), write_end, dict(engine.weight_needs()),
                )
            )  # fmt: skip
        finally:
            os.close(write_end)  # the ranks have it open: it ends with them

    def load(
        self,
        apply: Callable[[Mapping[str, Tensor]], None],
        *,
        newer_than: Version | None,
        wait_s: float = 0.0,
    ) -> Version | None:
        """Have the ranks hold the newest version that all of them have, and `apply`; see `WeightReceiver.load`.

        Args:
            apply: has the ranks load what they hold; its argument is empty.
            newer_than: version that the engine has; None: none.
            wait_s: how long to wait for the ranks to have the same version, and for a turn.
        """
        agreed = self._agree.wait(wait_s)
        return super().load(apply, newer_than=newer_than, wait_s=wait_s) if agreed else None

    def _listen(self, read_end: int) -> None:
        """Hear which versions the ranks have, until they end."""
        with open(read_end, "rb", buffering=0) as pipe:
            while len(said := pipe.read(_NEWS.size)) == _NEWS.size:
                rank, lineage, step, seconds, by_broadcast = _NEWS.unpack(said)
                self._newest_of[rank] = version = Version(lineage, step)
                if self._newest_of.count(version) < len(self._newest_of):
                    self._agree.clear()
                    self._cache.fail(self._lag())
                else:
                    self._cache.put(ReadyVersion(version, {}, own=False, release=lambda: None))
                    self._agree.set()
                self._timeline.record(_BROADCAST if by_broadcast else _AGENT, seconds, version=step, rank=rank)
        self._cache.fail(EngineFailed("the engine's ranks have ended; the log above says why"))
        self._agree.set()  # on nothing any more: the engine raises when it is to hold a version

    def _lag(self) -> WeightSyncError:
        """Return what a wait says that ends before all ranks have the same version."""
        have = ", ".join("none" if version is None else str(version) for version in self._newest_of)
        return WeightSyncError(f"the engine's ranks have {have}; see their log")

    def _take(self, connection: Connection, offered: Offered) -> bool:
        """Check that the engine fits the trainer; the ranks take the version themselves."""
        self._views.layout(offered.plan, connection)
        self._tell(Release(offered.version), connection)
        return True

    def _load(self, apply: Callable[[Mapping[str, Tensor]], None], newer_than: Version | None) -> Version | None:
        ready = self._cache.hold(lambda version: newer_than is None or version > newer_than)
        if ready is None:
            return None
        if not self._engine.hold(ready.version):  # a rank has moved on, or gave it up for one that is coming
            self._agree.clear()
            if self._cache.newest != ready.version:  # they have agreed on another meanwhile
                self._agree.set()
            return None
        apply(ready.views)
        self._cache.let_go(ready)
        return ready.version


class _LastSpan(threading.local):
    """What a thread did last, and for how long."""

    name, seconds = "", 0.0

    @contextmanager
    def span(self, name: str, **attributes: int | float | str) -> Iterator[None]:
        began = time.monotonic()
        yield
        self.name, self.seconds = name, time.monotonic() - began

    def record(self, name: str, seconds: float, **attributes: int | float | str) -> None:
        self.name, self.seconds = name, seconds


class RankReceiver(WeightReceiver):
    """In a rank's process. One thread of the engine holds and loads."""

    def __init__(self, following: Following, rank: int, num_ranks: int, device: torch.device) -> None:
        """Start to receive.

        Args:
            following: from the engine's user.
            rank, num_ranks: of this process among those that share the model.
            device: that it computes on.

        Raises:
            WeightSyncError: the engine's user is gone.
        """
        self._rank, self._last = rank, _LastSpan()
        self._owners = owners(following.needs, num_ranks)
        self._held: ReadyVersion | None = None
        try:
            self._pipe = FileIO(f"/proc/{following.pid}/fd/{following.fd}", "wb")
        except OSError as error:
            raise WeightSyncError(f"{following.name}: its pipe cannot be opened ({error.strerror})") from error
        job, name = Job.load(Path(following.run_dir)), f"{following.name}-{rank}"
        timeout = timedelta(seconds=min(following.start_timeout_s, STALL_S))
        store = connect_store(job.store_host, job.store_port, timeout)
        credentials = Credentials(store, bytes.fromhex(job.secret), following.start_timeout_s)
        member = None
        if following.lead:
            member = BroadcastMember(credentials.group_store(min(following.timeout_s, STALL_S)), name, device)
        super().__init__(
            credentials, following.agent, name, following.needs,
            device=device, share=[each for each, owner in self._owners.items() if owner == rank], arrived=self._say,
            member=member, lead=following.lead, timeout_s=following.timeout_s,
            timeline=self._last,
        )  # fmt: skip

    def hold(self, version: Version) -> bool:
        """Keep a version as it is until `let_go`, or the next one that is held; False: it is not the newest here."""
        self._held = self._cache.hold(lambda newest: newest == version)
        return self._held is not None

    def held(self, share: Share) -> Iterator[tuple[str, Tensor]]:
        """Yield names and tensors of the version that is held, on the rank's device; collective over the ranks.

        Args:
            share: of the ranks.
        """
        assert self._held is not None, "held() before hold()"
        for name, view in self._held.views.items():
            owner = self._owners[name]
            mine = owner == self._rank
            values = view.to(self._device) if mine else torch.empty_like(view, device=self._device)
            share(values, owner)
            yield name, values

    def let_go(self) -> None:
        """The rank computes with the version that was held, and reads its copy no more."""
        if self._held is not None:
            self._cache.let_go(self._held)
            self._held = None

    def close(self, timeout_s: float = 10.0) -> None:
        super().close(timeout_s)
        self._pipe.close()

    def _say(self) -> None:
        newest, last = self.newest, self._last
        if newest is not None:  # else it made room already
            self._pipe.write(_NEWS.pack(self._rank, *newest, last.seconds, last.name == _BROADCAST))


def owners(needs: Mapping[str, Need], num_ranks: int) -> dict[str, int]:
    """Return which rank keeps each tensor; all have about as much."""
    loads, owner_of = [0] * num_ranks, {}
    for name in sorted(needs, key=lambda each: -prod(needs[each].shape)):
        owner_of[name] = loads.index(min(loads))
        loads[owner_of[name]] += prod(needs[name].shape)
    return owner_of
