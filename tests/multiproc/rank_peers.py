"""An engine of two ranks for tests: processes with a `RankReceiver` each, driven over pipes as in `weight_peers`."""

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
from weight_model import DEADLINE_S, Setup, needs, same
from weight_peers import CPU, run_commands, stop_in_broadcast
from weight_run import ask_all

from asyncflow.device import connect_group
from asyncflow.errors import EngineFailed
from weightsync import version_cache
from weightsync.plan import Need
from weightsync.receiver import Following, RankReceiver
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
