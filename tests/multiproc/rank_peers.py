"""Engines of two ranks for tests: a generator with a `RankReceiver` per rank, and a divided copy of the policy with a
`SharedReceiver` per rank. Every rank is a process, driven over a pipe as in `weight_peers`."""

import itertools
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection as Pipe
from typing import Any

import torch
from echo_peers import credentials
from torch import Tensor
from torch.distributed import BroadcastOptions, PrefixStore
from weight_model import DEADLINE_S, Setup, needs, same, weights
from weight_peers import CPU, run_commands, stop_in_broadcast
from weight_run import ask_all

from asyncflow.device import connect_group
from asyncflow.errors import EngineFailed
from weightsync import version_cache
from weightsync.broadcast_group import BroadcastGroup, BroadcastMember
from weightsync.plan import Box, Need
from weightsync.receiver import Following, RankReceiver, SharedReceiver
from weightsync.slot_memory import private_memory
from weightsync.version import Version

NUM_RANKS = 2


class Ranks:
    """The engine, in the test's process; implements `RanksEngine`."""

    def __init__(self, start: Callable[..., Any], setup: Setup, port: int) -> None:
        self._start, self._setup, self._port = start, setup, port
        self.ranks: list[Any] = []
        self.pauses: list[Version] = []
        self.closed = threading.Event()

    @property
    def num_ranks(self) -> int:
        return NUM_RANKS

    def weight_needs(self) -> Mapping[str, Need]:
        return needs(self._setup.wide)

    def follow_weights(self, following: Following) -> None:
        self._store = pauses_of(self._port, following)
        self.ranks = [self._start(engine_rank, following, rank, self._setup) for rank in range(NUM_RANKS)]
        assert [rank.hear() for rank in self.ranks] == ["ready"] * NUM_RANKS

    def hold(self, version: Version) -> bool:
        return all(ask_all(self.ranks, "hold", version))

    def receive_while_paused(self, version: Version, *, timeout_s: float) -> None:
        number = len(self.pauses)
        self.pauses.append(version)
        self._store.set(f"pause {number}", f"{version.lineage} {version.step}")
        resumed, deadline = [f"{rank} resumes {number}" for rank in range(NUM_RANKS)], time.monotonic() + timeout_s
        while not self._store.check(resumed):
            if time.monotonic() > deadline or self.closed.wait(0.01):
                raise EngineFailed("a rank is gone")

    def load_held(self) -> None:
        assert ask_all(self.ranks, "load_held") == ["whole"] * NUM_RANKS


def pauses_of(port: int, following: Following) -> PrefixStore:
    """Return where the engine tells its ranks of pauses, beside the pipes that the test uses."""
    return PrefixStore(f"pauses/{following.pid}/{following.fd}", credentials(port).group_store(DEADLINE_S))


def engine_rank(port: int, pipe: Pipe, following: Following, rank: int, setup: Setup) -> None:
    """Be a rank."""
    run_commands(pipe, Rank(port, pipe, following, rank, setup))


class Rank:
    """Compares what it loads with what the version is."""

    def __init__(self, port: int, pipe: Pipe, following: Following, rank: int, setup: Setup) -> None:
        self._pipe, self._setup = pipe, setup
        store = PrefixStore(f"engine/{following.pid}/{following.fd}", credentials(port).group_store(DEADLINE_S))
        self._group = connect_group(store, rank, NUM_RANKS, CPU)
        self._copies: list[int] = []

        def counted(num_bytes: int) -> Tensor:
            self._copies.append(num_bytes)
            return private_memory(num_bytes)

        setattr(version_cache, "private_memory", counted)  # noqa: B010 - a test's hook
        self._receiver = RankReceiver(following, rank, NUM_RANKS, CPU)
        self._version: Version | None = None
        threading.Thread(target=self._pause, args=(pauses_of(port, following), rank), daemon=True).start()

    def _pause(self, store: PrefixStore, rank: int) -> None:
        for number in itertools.count():
            while not store.check([f"pause {number}"]):
                with suppress(RuntimeError):
                    store.wait([f"pause {number}"], timedelta(seconds=DEADLINE_S))
            lineage, step = map(int, store.get(f"pause {number}").split())
            self._receiver.receive_while_paused(Version(lineage, step))
            store.set(f"{rank} resumes {number}", "")

    def hold(self, version: Version) -> bool:
        self._version = version
        return self._receiver.hold(version)

    def load_held(self) -> str:
        assert self._version is not None
        loaded = {name: values.clone() for name, values in self._receiver.held(self._share)}
        self._receiver.let_go()
        return "whole" if same(loaded, self._version, dtype=self._setup.dtype, wide=self._setup.wide) else "torn"

    def copies(self) -> list[int]:
        """Return the bytes of each copy of its own that it ever made room for."""
        return self._copies

    def stop_in_broadcast(self) -> str:
        return stop_in_broadcast(self._pipe)

    def end(self) -> str:
        self._receiver.close()
        return "closed"

    def _share(self, values: Tensor, owner: int) -> None:
        options = BroadcastOptions()
        options.rootRank = owner
        bytes_of = values.reshape(-1).view(torch.uint8)
        self._group.broadcast([bytes_of], options).wait()


COPY = [f"actor_fwd-0/{rank}" for rank in range(NUM_RANKS)]


def box_needs(rank: int, setup: Setup) -> dict[str, Need]:
    """Return what a rank of a copy holds: half of the columns of a matrix and half of the rows of another one."""
    found = {}
    for name, need in needs(setup.wide).items():
        if name == "tied":
            continue
        offset, size = [0] * len(need.shape), list(need.shape)
        if name in ("embed", "head"):
            axis = 1 if name == "embed" else 0
            size[axis] //= NUM_RANKS
            offset[axis] = rank * size[axis]
        found[f"{name}[0]"] = Need(need.shape, (name,), Box(tuple(offset), tuple(size)))
    return found


def shared_rank(port: int, pipe: Pipe, rank: int, setup: Setup, every: int, life: int) -> None:
    """Be a rank of a divided copy; see `SharedRank`."""
    run_commands(pipe, SharedRank(port, pipe, rank, setup, every, life))


class SharedRank:
    """Computes with the other rank all the time, and notes what it had computed when a broadcast began and ended.

    Args:
        every: it takes versions of which this divides the step.
        life: of the gang.
    """

    def __init__(self, port: int, pipe: Pipe, rank: int, setup: Setup, every: int, life: int) -> None:
        self._pipe, self._setup, self._needs = pipe, setup, box_needs(rank, setup)
        self._every, self._life, self._rank, self._port = every, life, rank, port
        self._computed, self._computing, self._stopping = 0, False, threading.Event()
        self._broadcasts: list[tuple[int, int]] = []
        self._copies: list[int] = []
        self._bytes = 0
        copy = private_memory

        def counted(num_bytes: int) -> Tensor:
            self._copies.append(num_bytes)
            return copy(num_bytes)

        setattr(version_cache, "private_memory", counted)  # noqa: B010 - a test's hook
        self._note_broadcasts()
        mine = credentials(port)
        self._loaded: Version | None = None
        self._receiver = SharedReceiver(
            mine, "weights-0", COPY[rank], self._needs, device=CPU, together=COPY,
            wanted=None if every == 1 else lambda version: version >= self._least(),
            least=None if every == 1 else self._least,
            member=BroadcastMember(mine.group_store(setup.timeout_s), COPY[rank], CPU),
            lead="weights-0", timeout_s=setup.timeout_s,
        )  # fmt: skip
        self._thread = threading.Thread(target=self._compute, daemon=True)
        self._thread.start()

    def load(self, step: int) -> Any:
        """Wait for a step and load; returns the version and whether the parts are those."""
        self._receiver.wait_for(step, timeout_s=60)
        whole = False

        def apply(views: Mapping[str, Tensor]) -> None:
            nonlocal whole
            newest = self._receiver.newest
            assert newest is not None
            expected = weights(newest, self._setup.wide)
            parts = {name: (need.aliases[0], need.box) for name, need in self._needs.items()}
            whole = all(
                box is not None and torch.equal(views[name], expected[source][box.slices])
                for name, (source, box) in parts.items()
            )

        self._loaded = self._receiver.load(apply, newer_than=self._loaded) or self._loaded
        return self._loaded, whole

    def noted(self) -> dict[str, Any]:
        """Return what was computed at each broadcast, bytes of copies and of what arrived."""
        return {
            "broadcasts": self._broadcasts, "copies": self._copies, "bytes": self._bytes, "computed": self._computed
        }  # fmt: skip

    def stop_in_broadcast(self) -> str:
        return stop_in_broadcast(self._pipe)

    def end(self) -> str:
        self._stopping.set()
        self._thread.join(DEADLINE_S)
        self._receiver.close()
        return "closed"

    def _least(self) -> Version:
        newest = self._receiver.newest if hasattr(self, "_receiver") else None
        return Version(0, ((newest.step if newest else 0) // self._every + 1) * self._every)

    def _compute(self) -> None:
        keys = PrefixStore(f"copy/{self._life}", credentials(self._port).group_store(DEADLINE_S))
        group = connect_group(keys, self._rank, NUM_RANKS, CPU)
        while True:
            with self._receiver.computing():
                self._computing = True
                over = torch.tensor([int(self._stopping.is_set()), self._computed])
                group.allreduce([over]).wait()
                assert over[1] == self._computed * NUM_RANKS, "the ranks compute different things together"
                self._computed += 1
                self._computing = False
            if over[0]:
                return
            time.sleep(0)

    def _note_broadcasts(self) -> None:
        connect, transfer = BroadcastGroup.connect_members, BroadcastGroup.transfer_buckets

        def connecting(group: BroadcastGroup, *arguments: Any, **named: Any) -> None:
            assert not self._computing
            self._broadcasts.append((self._computed, -1))
            connect(group, *arguments, **named)

        def transferring(group: BroadcastGroup, buckets: Any, *, take: Any, **named: Any) -> None:
            def counting(bucket: Any, words: Tensor) -> None:
                self._bytes += bucket.bucket.num_bytes
                take(bucket, words)

            transfer(group, buckets, take=counting, **named)
            assert not self._computing
            self._broadcasts[-1] = (self._broadcasts[-1][0], self._computed)

        setattr(BroadcastGroup, "connect_members", connecting)  # noqa: B010 - a test's hook
        setattr(BroadcastGroup, "transfer_buckets", transferring)  # noqa: B010 - a test's hook
