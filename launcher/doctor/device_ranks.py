"""One rank of what `launcher.doctor.device_check` tries with several processes: each mode returns its facts."""

import os
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from asyncflow.device import (
    ExportedMemory,
    OpenedMemory,
    abort_group,
    connect_group,
    group_backends,
    on_device,
    open_device,
    pin,
    wait_for_device,
)
from asyncflow.errors import DeviceMemoryError
from asyncflow.job import LOOPBACK
from asyncflow.sealed_store import connect_store
from launcher.doctor.findings import reason
from launcher.plan.profile import EXCHANGED

TIMEOUT = timedelta(seconds=10)
"""Timeout of each wait."""
SIZE = 2**22
"""Number of float32 elements that are sent."""


def collectives(device: torch.device, rank: int, size: int, store: dist.Store) -> dict[str, Any]:
    """Return, for each collective, the seconds of its second call, or its error."""
    dist.init_process_group(group_backends(device), store=store, rank=rank, world_size=size, timeout=TIMEOUT)
    return _try_all(device, rank, size, SIZE)


def exchanges(device: torch.device, rank: int, size: int, store: dist.Store) -> dict[str, Any]:
    """Return the same for several sizes, which follow the names as bytes."""
    dist.init_process_group(group_backends(device), store=store, rank=rank, world_size=size, timeout=TIMEOUT)
    return {
        f"{name} {size_bytes}": seconds
        for size_bytes in EXCHANGED
        for name, seconds in _try_all(device, rank, size, size_bytes // 4).items()
    }


def _try_all(device: torch.device, rank: int, size: int, numbers: int) -> dict[str, float | str]:
    own, total = rank + 1.0, size * (size + 1) / 2
    mine = torch.full((numbers // size,), own, device=device)

    def reduced() -> tuple[Tensor, float]:
        values = mine.clone()
        dist.all_reduce(values)
        return values, total

    def broadcast() -> tuple[Tensor, float]:
        values = mine.clone()
        dist.broadcast(values, src=0)
        return values, 1.0

    def gathered() -> tuple[Tensor, float]:
        values = torch.empty(len(mine) * size, device=device)
        dist.all_gather_into_tensor(values, mine)
        return values[-len(mine) :], float(size)

    def scattered() -> tuple[Tensor, float]:
        values = torch.empty(len(mine), device=device)
        dist.reduce_scatter_tensor(values, mine.repeat(size))
        return values, total

    def exchanged() -> tuple[Tensor, float]:
        part = max(1, len(mine) // size)  # for each rank
        values = torch.empty(size * part, device=device)
        dist.all_to_all_single(values, torch.full((size * part,), own, device=device))
        return values.view(size, part).sum(0), total

    def passed_on() -> tuple[Tensor, float]:
        # As one group: NCCL connects a pair in its first call and blocks the host meanwhile, so a ring of ranks that
        # all send first would deadlock.
        values = torch.empty_like(mine)
        passing = [
            dist.P2POp(dist.isend, mine, (rank + 1) % size),
            dist.P2POp(dist.irecv, values, (rank - 1) % size),
        ]
        for work in dist.batch_isend_irecv(passing):
            work.wait()
        return values, float((rank - 1) % size + 1)

    tried: dict[str, Callable[[], tuple[Tensor, float]]] = {
        "all_reduce": reduced, "broadcast": broadcast, "all_gather": gathered, "reduce_scatter": scattered,
        "all_to_all": exchanged,
    }  # fmt: skip
    if size > 1:
        tried["send and recv"] = passed_on
    return {name: _timed(one, device) for name, one in tried.items()}


def _timed(collective: Callable[[], tuple[Tensor, float]], device: torch.device) -> float | str:
    try:
        for _ in range(2):  # the first call connects
            dist.barrier()
            began = time.monotonic()
            values, expected = collective()
            wrong = int((values != expected).sum())  # the conversion waits for the device
            seconds = time.monotonic() - began
    except Exception as error:  # noqa: BLE001 (each backend raises errors of its own)
        return reason(error)
    return f"{wrong} numbers came out wrong" if wrong else seconds


def dead_receiver(device: torch.device, rank: int, size: int, store: dist.Store) -> dict[str, Any]:
    """Kill rank 1 between two broadcasts; return how long rank 0 waits for it, and whether it can still compute."""
    group = connect_group(dist.PrefixStore("dead", store), rank, size, device)
    values = torch.ones(SIZE, device=device)
    group.broadcast([values]).wait(TIMEOUT)
    wait_for_device(device)
    if rank:
        store.set("leaves", "1")
        os.kill(os.getpid(), signal.SIGKILL)
    store.wait(["leaves"], TIMEOUT)
    # A root may return from a few broadcasts without its receiver, since buffers take them in.
    began, error = time.monotonic(), ""
    try:
        while time.monotonic() < began + 3 * TIMEOUT.total_seconds():
            group.broadcast([values]).wait(TIMEOUT)
    except RuntimeError as raised:
        error = reason(raised)
    seconds = time.monotonic() - began
    ending = threading.Thread(target=abort_group, args=(group,), daemon=True)
    ending.start()
    ending.join(TIMEOUT.total_seconds())
    computed = float((torch.ones(64, device=device) * 2).sum()) == 128
    return {"error": error, "seconds": seconds, "aborted": not ending.is_alive(), "computed": computed}


def contexts(device: torch.device, rank: int, size: int, store: dist.Store) -> dict[str, Any]:
    """Use the device from threads, as a trainer does, and stay until others have looked at device 0's memory."""
    host = torch.zeros(2**20, dtype=torch.uint8)

    def work() -> None:
        release = pin(host.data_ptr(), host.numel(), device, writable=True)
        with on_device(device):
            host.to(device)
        if release is not None:
            release()

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    store.set("here", "1")
    store.wait(["looked"], TIMEOUT)
    return {}


def handover(device: torch.device, rank: int, size: int, store: dist.Store) -> dict[str, Any]:
    """Export memory as a colocated trainer does, and read every other rank's; return by rank what came of it: GB/s, how
    many numbers were wrong, or why there is nothing to read."""
    numbers = torch.arange(4 * SIZE, device=device)
    try:
        memory = ExportedMemory(numbers.nbytes, device)
    except DeviceMemoryError as error:
        store.set(f"handle {rank}", "")
        return {f"{rank}": {"refused": str(error)}}
    memory.write(0, numbers + rank)
    wait_for_device(device)
    store.set(f"handle {rank}", memory.handle.hex())
    others = [other for other in range(size) if other != rank]
    store.wait([f"handle {other}" for other in others], TIMEOUT)
    found: dict[str, Any] = {}
    for other in others:
        handle = bytes.fromhex(store.get(f"handle {other}").decode())
        if handle:
            found[f"{other}"] = _read_memory(handle, device, numbers + other)
    store.set(f"has read {rank}", "1")
    store.wait([f"has read {other}" for other in others if store.get(f"handle {other}")], TIMEOUT)  # memory stays
    return found


def _read_memory(handle: bytes, device: torch.device, expected: Tensor) -> dict[str, Any]:
    try:
        opened = OpenedMemory(handle, device)
    except DeviceMemoryError as error:
        return {"refused": str(error)}
    there = torch.empty_like(expected)
    for _ in range(2):
        wait_for_device(device)
        began = time.monotonic()
        opened.read(0, there)
        wait_for_device(device)
        seconds = time.monotonic() - began
    wrong = int((there != expected).sum())
    opened.close()
    return {"wrong": wrong, "gb_s": there.nbytes / seconds / 1e9}


MODES = {
    "collectives": collectives, "exchanges": exchanges, "dead receiver": dead_receiver, "contexts": contexts,
    "handover": handover,
}  # fmt: skip


def act_as_rank(mode: str, name: str, rank: int, size: int, port: int) -> dict[str, Any]:
    """Return what a mode finds on a device, together with the other ranks, which meet in the store at `port`."""
    return MODES[mode](open_device(name), rank, size, connect_store(LOOPBACK, port, TIMEOUT))
