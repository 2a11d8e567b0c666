"""Part `control`: what a request for 64 rows costs with 10,000 and with 1,000,000 rows registered."""

import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.transferqueue.our_queue import OurQueue
from benchmarks.transferqueue.part import Result, Settings
from tq.columns import column_of
from tq.control.events import Answer
from tq.control.state import ControlState
from tq.messages import FetchRows, LeaseGrant, OutputsWritten, RowsCreated
from tq.policies import TaskSpec

_SIZES = (10_000, 1_000_000)
_REQUEST_ROWS = 64
_REQUESTS = 120
_ROWS_PER_PUT = 1000
_SERVICE_ROWS_PER_PUT = 8192
_TASKS = [
    TaskSpec("score", frozenset({"response"}), frozenset({"score"})),
    TaskSpec("train", frozenset({"response", "score"})),
]


def run(settings: Settings) -> Result:
    """Measure the pure state machine, whose ratio is the figure, and a real controller process."""
    pure = {size: _requests_s(size) for size in _SIZES}
    few, many = (statistics.median(pure[size]) for size in _SIZES)
    settings.say(f"control: {few * 1e6:.0f} us with {_SIZES[0]} rows, {many * 1e6:.0f} us with {_SIZES[1]}")
    details: dict[str, Any] = {"state_s": {size: _report(times) for size, times in pure.items()}}
    sizes = (_SIZES[0], 50_000) if settings.quick else _SIZES
    service = _service_s(sizes, settings.directory)
    small, large = (statistics.median(service[size]) for size in sizes)
    settings.say(
        f"control: through the service {small * 1e6:.0f} us with {sizes[0]}, {large * 1e6:.0f} with {sizes[1]}"
    )
    details["service_s"] = {size: _report(times) for size, times in service.items()}
    details["service_ratio"] = large / small
    return Result({"control_1m_vs_10k": many / few}, {"control": details})


def _requests_s(num_rows: int) -> list[float]:
    """Return the seconds of each request; rows that were handed out are finished and replaced, so the size stays."""
    state = ControlState(_TASKS)
    for event in _puts(0, num_rows):
        state.handle(event)
    times, newest = [], num_rows
    for number in range(1, _REQUESTS + 1):
        fetch = FetchRows("score", "owner", _REQUEST_ROWS, 0, 60.0)
        began = time.perf_counter()
        (answer,) = state.handle(fetch, number)
        times.append(time.perf_counter() - began)
        assert isinstance(answer, Answer)
        assert isinstance(answer.reply, LeaseGrant)
        assert len(answer.reply.rows) == _REQUEST_ROWS
        _finish(state, answer.reply, number)
        for event in _puts(newest, _REQUEST_ROWS):
            state.handle(event)
        newest += _REQUEST_ROWS
    return times


def _finish(state: ControlState, scored: LeaseGrant, number: int) -> None:
    tokens = [0] * len(scored.rows)
    state.handle(OutputsWritten("storage-0", "score", scored.rows, ["score"], tokens, 0))
    (answer,) = state.handle(FetchRows("train", "owner", len(scored.rows), 0, 60.0), _REQUESTS + number)
    assert isinstance(answer, Answer)
    assert isinstance(answer.reply, LeaseGrant)
    state.handle(OutputsWritten("storage-0", "train", answer.reply.rows, [], tokens, 0))


def _puts(first: int, number: int) -> Iterator[RowsCreated]:
    for start in range(first, first + number, _ROWS_PER_PUT):
        rows = list(range(start, min(start + _ROWS_PER_PUT, first + number)))
        tokens = [512] * len(rows)
        yield RowsCreated("storage-0", start // 100_000, rows, rows, ["response"], tokens, 6144 * len(rows))


def _service_s(sizes: tuple[int, ...], log_dir: Path) -> dict[int, list[float]]:
    times: dict[int, list[float]] = {}
    column = column_of(torch.zeros(_SERVICE_ROWS_PER_PUT, dtype=torch.int32))
    with OurQueue(("response",), log_dir) as ours:
        held = 0
        for size in sizes:
            while held < size:
                ours.client.put_rows({"response": column})
                held += _SERVICE_ROWS_PER_PUT
            ours.fetch(_REQUEST_ROWS)
            times[size] = []
            for _ in range(_REQUESTS):
                began = time.perf_counter()
                granted = ours.fetch(_REQUEST_ROWS)
                times[size].append(time.perf_counter() - began)
                assert len(granted.rows) == _REQUEST_ROWS
    return times


def _report(times: list[float]) -> dict[str, float]:
    return {"median": statistics.median(times), "mean": statistics.mean(times), "worst": max(times)}
