"""Processor time that services take per request, from /proc, and what else a service process holds."""

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import tq
from benchmarks.transferqueue.our_queue import OurQueue
from benchmarks.transferqueue.queue_simulation import ServiceTimes

_TICK_S = 1 / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Footprint:
    """Of one process."""

    threads: int
    descriptors: int


def cpu_s(pids: Iterable[int]) -> float:
    """Return the processor time that processes have used so far, in user and kernel mode."""
    total = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        total += int(fields[11]) + int(fields[12])
    return total * _TICK_S


def footprint(pid: int) -> Footprint:
    """Return what a process holds now."""
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":" in line)
    descriptors = len(list(Path(f"/proc/{pid}/fd").iterdir()))
    return Footprint(int(status["Threads"]), descriptors)


def by_kind(pids: Mapping[str, int]) -> tuple[list[int], list[int]]:
    """Return the process ids of (units, controllers)."""
    units = [pid for name, pid in pids.items() if name.startswith("storage-")]
    return units, [pid for name, pid in pids.items() if not name.startswith("storage-")]


def measure(ours: OurQueue, put: Callable[[], object], *, requests: int, micro_batch: int) -> ServiceTimes:
    """Return the processor time per request, one kind of request after the other by one client.

    Args:
        ours: an empty queue.
        put: puts one micro-batch.
        requests: of each kind; the clock ticks in 10 ms, so some hundred are needed.
        micro_batch: rows per request.
    """
    units, controllers = by_kind(ours.queue.pids())
    granted: list[tq.Lease] = []

    def phase(request: Callable[[int], object]) -> tuple[float, float]:
        before = cpu_s(units), cpu_s(controllers)
        for number in range(requests):
            request(number)
        return (cpu_s(units) - before[0]) / requests, (cpu_s(controllers) - before[1]) / requests

    unit_put, created = phase(lambda _: put())
    _, fetched = phase(lambda _: granted.append(ours.fetch(micro_batch)))
    unit_get, _ = phase(lambda number: ours.get(granted[number]))
    unit_ack, written = phase(lambda number: granted[number].ack())
    return ServiceTimes(unit_put, unit_get, unit_ack, (created + written) / 2, fetched)
