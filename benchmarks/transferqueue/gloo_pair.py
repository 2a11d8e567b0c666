"""Raw Gloo point-to-point between this process and a child: what the off-host path and the latency are held against.

Both ends use warm buffers and nothing but `send` and `recv`; a one-byte answer ends each timed transfer.
"""

import time
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import PrefixStore, ProcessGroup

from asyncflow.device import connect_group
from asyncflow.job import LOOPBACK
from asyncflow.sealed_store import connect_store, serve_store
from benchmarks.transferqueue.child import Child

_TIMEOUT = timedelta(seconds=60)
_CPU = torch.device("cpu")


class GlooPair:
    """Two ranks; this process is rank 0. A context manager."""

    def __init__(self, num_bytes: int) -> None:
        """Connect; transfers move `num_bytes`."""
        self._store, port = serve_store(LOOPBACK, _TIMEOUT)
        self._child = Child(_partner, port, num_bytes)
        self._group = connect_group(PrefixStore("pair", self._store), 0, 2, _CPU)
        self._data = torch.zeros(num_bytes, dtype=torch.uint8)
        self._small = torch.zeros(1, dtype=torch.uint8)

    def send_s(self) -> float:
        """Return the seconds of one transfer to the child."""
        self._child.ask("receive")
        began = time.perf_counter()
        self._group.send([self._data], 1, 0).wait()
        self._group.recv([self._small], 1, 0).wait()
        return time.perf_counter() - began

    def receive_s(self) -> float:
        """Return the seconds of one transfer from the child, asked for by one byte."""
        self._child.ask("send")
        began = time.perf_counter()
        self._group.send([self._small], 1, 0).wait()
        self._group.recv([self._data], 1, 0).wait()
        return time.perf_counter() - began

    def round_trips_s(self, number: int) -> list[float]:
        """Return the seconds of `number` round trips of one byte, one after the other."""
        self._child.ask(("echo", number))
        times = []
        for _ in range(number):
            began = time.perf_counter()
            self._group.send([self._small], 1, 0).wait()
            self._group.recv([self._small], 1, 0).wait()
            times.append(time.perf_counter() - began)
        return times

    def close(self) -> None:
        """End the child."""
        self._child.kill()

    def __enter__(self) -> "GlooPair":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _partner(pipe: Any, port: int, num_bytes: int) -> None:
    store = connect_store(LOOPBACK, port, _TIMEOUT)
    group = connect_group(PrefixStore("pair", store), 1, 2, _CPU)
    data, small = torch.zeros(num_bytes, dtype=torch.uint8), torch.zeros(1, dtype=torch.uint8)
    while True:
        order = pipe.recv()
        pipe.send("ready")
        _obey(order, group, data, small)


def _obey(order: Any, group: ProcessGroup, data: torch.Tensor, small: torch.Tensor) -> None:
    match order:
        case "receive":
            group.recv([data], 0, 0).wait()
            group.send([small], 0, 0).wait()
        case "send":
            group.recv([small], 0, 0).wait()
            group.send([data], 0, 0).wait()
        case ("echo", number):
            for _ in range(number):
                group.recv([small], 0, 0).wait()
                group.send([small], 0, 0).wait()
