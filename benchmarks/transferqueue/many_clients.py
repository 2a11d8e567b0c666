"""Part `scale`: 64 clients at once, 1 to 4 units, what services hold, and a simulation of 1,000 clients."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

import tq
from asyncflow.errors import AsyncFlowError
from benchmarks.transferqueue import service_times
from benchmarks.transferqueue.child import Child
from benchmarks.transferqueue.our_queue import COLUMNS, TASK, OurQueue
from benchmarks.transferqueue.part import Result, Settings
from benchmarks.transferqueue.queue_simulation import ServiceTimes, fewest_services, simulate
from benchmarks.transferqueue.workload import micro_batches
from tq.columns import Column

_PROCESSES, _THREADS = 8, 8
_MICRO_BATCH = 16
_SECONDS = 8.0
_UNITS = (1, 2, 4)
_SIMULATED_CLIENTS = 1000
_RATES = (0.1, 0.5, 1.0, 2.0)


def run(settings: Settings) -> Result:
    """Let every client put, fetch, get and ack micro-batches as fast as it can."""
    result = Result()
    seconds = 2.0 if settings.quick else _SECONDS
    by_units: dict[str, Any] = {}
    for num_units in _UNITS:
        with (
            OurQueue(COLUMNS, settings.directory, num_units=num_units) as ours,
            _clients(ours.queue.address) as clients,
        ):
            rows, services = _storm(ours, clients, seconds)
        by_units[str(num_units)] = {"rows_per_s": sum(rows) / seconds, "services": services, **_fairness(rows)}
        settings.say(
            f"scale: {len(rows)} clients, {num_units} units: {sum(rows) / seconds:.0f} rows/s; "
            f"rows per client {min(rows)} to {max(rows)}"
        )
    times = _service_times(settings)
    result.details["scale"] = {
        "clients": _PROCESSES * _THREADS,
        "micro_batch": _MICRO_BATCH,
        "units": by_units,
        "service_times_s": asdict(times),
        "simulated": _simulated(settings, times),
    }
    return result


def _fairness(rows: list[int]) -> dict[str, float]:
    return {"rows_least": min(rows), "rows_most": max(rows), "starved": sum(count == 0 for count in rows)}


@contextmanager
def _clients(address: Path) -> Iterator[list[Child]]:
    children = [Child(_run_clients, str(address), number) for number in range(_PROCESSES)]
    try:
        for child in children:
            child.hear()
        yield children
    finally:
        for child in children:
            child.kill()


def _storm(ours: OurQueue, clients: list[Child], seconds: float) -> tuple[list[int], dict[str, Any]]:
    pause = threading.Event()
    for child in clients:
        child.tell(seconds)
    pause.wait(seconds / 2)
    services = {name: asdict(service_times.footprint(pid)) for name, pid in ours.queue.pids().items()}
    return [rows for child in clients for rows in child.hear(seconds + 120)], services


def _run_clients(pipe: Any, address: str, number: int) -> None:
    torch.set_num_threads(1)
    clients = [tq.connect(Path(address), f"client-{number}-{thread}") for thread in range(_THREADS)]
    (batch,) = micro_batches(_MICRO_BATCH, _MICRO_BATCH, seed=number)
    columns = {name: Column(values, lengths) for name, (values, lengths) in batch.columns.items()}
    for client in clients:
        client.stats()  # connects
    pipe.send("ready")
    ends = time.monotonic() + pipe.recv()
    rows = [0] * _THREADS
    threads = [
        threading.Thread(target=_cycle, args=(clients[k], columns, ends, rows, k), daemon=True) for k in range(_THREADS)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    pipe.send(rows)
    pipe.recv()  # is killed: 64 goodbyes are not what is measured


def _cycle(client: tq.QueueClient, columns: dict[str, Column], ends: float, rows: list[int], index: int) -> None:
    while time.monotonic() < ends:
        try:
            client.put_rows(columns)
            granted = client.fetch(TASK, num_rows=_MICRO_BATCH, timeout_s=max(0.1, ends - time.monotonic()))
            if isinstance(granted, tq.Lease):
                granted.read(COLUMNS)
                granted.ack()
                rows[index] += len(granted.rows)
        except AsyncFlowError as error:
            raise SystemExit(f"client {index}: {error}") from error


def _service_times(settings: Settings) -> ServiceTimes:
    torch.set_num_threads(1)
    (batch,) = micro_batches(_MICRO_BATCH, _MICRO_BATCH)
    columns = {name: Column(values, lengths) for name, (values, lengths) in batch.columns.items()}
    requests = 200 if settings.quick else 1000
    with OurQueue(COLUMNS, settings.directory) as ours:
        ours.move(columns)
        times = service_times.measure(
            ours, lambda: ours.client.put_rows(columns), requests=requests, micro_batch=_MICRO_BATCH
        )
    told = ", ".join(f"{name} {value * 1e6:.0f}" for name, value in asdict(times).items())
    settings.say(f"scale: processor time per request of {_MICRO_BATCH} rows (us): {told}")
    return times


def _simulated(settings: Settings, times: ServiceTimes) -> list[dict[str, Any]]:
    table = []
    for rate in _RATES:
        load = fewest_services(_SIMULATED_CLIENTS, rate, times)
        entry: dict[str, Any] = {"cycles_per_client_and_s": rate, "load": load and asdict(load)}
        if load is None:
            told = "one controller cannot hear of every put; larger micro-batches are needed"
        else:
            entry["outcome"] = asdict(simulate(load, times, seconds=2.0 if settings.quick else 10.0))
            told = (
                f"{load.num_units} units, {load.num_controllers} controllers, cycle "
                f"{entry['outcome']['median_s'] * 1e3:.1f} ms, p99 {entry['outcome']['p99_s'] * 1e3:.1f} ms"
            )
        rows = rate * _SIMULATED_CLIENTS * _MICRO_BATCH
        settings.say(f"scale: simulated {_SIMULATED_CLIENTS} clients, {rows:.0f} rows/s: {told}")
        table.append(entry)
    return table
