"""Part `peer`: PyPI `transferqueue` and ours on the same rows, in alternating rounds."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from benchmarks.transferqueue.json_process import JsonProcess
from benchmarks.transferqueue.our_queue import OurQueue, RowRounds, column_sum, dense, num_bytes
from benchmarks.transferqueue.part import Result, Settings
from benchmarks.transferqueue.samples import Samples, alternate
from benchmarks.transferqueue.workload import DENSE_COLUMNS, DENSE_ROWS, micro_batches

_NUM_ROWS = 1024
_MICRO_BATCHES = (16, 64)
_ROUNDS = 7


def run(settings: Settings) -> Result:
    """Measure rows per second in micro-batches and bytes per second in one piece."""
    result = Result()
    if settings.peer_python is None:
        settings.say("peer: skipped, no --peer-python")
        return result
    torch.set_num_threads(1)
    command = [str(settings.peer_python), "-m", "benchmarks.transferqueue.peer"]
    log = settings.directory / "peer.log"
    with JsonProcess(command, directory=Path(__file__).parents[2], log=log) as peer:
        result.details["peer"] = {"version": peer.hello["version"], "settings": peer.hello["settings"]}
        _measure_rows(settings, peer, result)
        _measure_bytes(settings, peer, result)
    return result


def _measure_rows(settings: Settings, peer: JsonProcess, result: Result) -> None:
    rounds = RowRounds(_NUM_ROWS, settings.directory)
    try:
        for micro_batch in _MICRO_BATCHES:
            request = {"do": "rows", "micro_batch": micro_batch, "num_rows": _NUM_ROWS}
            samples = alternate(
                {
                    "peer": lambda request=request: peer.ask(request),  # type: ignore[misc]
                    "ours": lambda size=micro_batch: rounds.round(size),  # type: ignore[misc]
                    "stream": lambda size=micro_batch: {"row_s": rounds.stream_round(size)},  # type: ignore[misc]
                },
                rounds=settings.rounds(_ROUNDS),
                warm_up=2,
            )
            tokens = (b.columns.values() for b in micro_batches(_NUM_ROWS, micro_batch))
            expected = sum(float(values.to(torch.float64).sum()) for columns in tokens for values, _ in columns)
            _check_sums(samples, expected)
            _compare(result, f"rows_{micro_batch}", samples, _NUM_ROWS, "rows_per_s")
            stream = samples["stream"]["row_s"].rates(1)
            ours = samples["ours"]
            acked = Samples(tuple(map(sum, zip(ours["get_s"].values, ours["ack_s"].values, strict=True))))
            details = result.details[f"rows_{micro_batch}"]
            details["get_and_ack_rows_per_s"] = acked.rates(_NUM_ROWS).report()
            details["stream_with_ack_rows_per_s"] = stream.report()
            details["stream_x"] = stream.median / samples["peer"]["get_s"].rates(_NUM_ROWS).median
            settings.say(f"peer: micro-batches of {micro_batch}: {_ratios(result, f'rows_{micro_batch}')}")
    finally:
        rounds.close()


def _measure_bytes(settings: Settings, peer: JsonProcess, result: Result) -> None:
    columns = dense(rows=DENSE_ROWS, columns=DENSE_COLUMNS)
    with OurQueue(tuple(columns), settings.directory) as ours:
        samples = alternate(
            {"peer": lambda: peer.ask({"do": "dense"}), "ours": lambda: ours.move(columns)},
            rounds=settings.rounds(_ROUNDS),
            warm_up=3,
        )
    _check_sums(samples, column_sum(columns))
    _compare(result, "bytes_288mb", samples, num_bytes(columns) / 1e9, "gb_per_s")
    settings.say(f"peer: 288 MB: {_ratios(result, 'bytes_288mb')}")


def _compare(result: Result, name: str, samples: Mapping[str, Mapping[str, Samples]], amount: float, unit: str) -> None:
    details: dict[str, Any] = result.details.setdefault(name, {})
    for what in ("put", "get"):
        peer, ours = (samples[side][f"{what}_s"].rates(amount) for side in ("peer", "ours"))
        result.figures[f"{what}_{name}_x"] = ours.median / peer.median
        details[f"{what}_{unit}"] = {"peer": peer.report(), "ours": ours.report()}


def _check_sums(samples: Mapping[str, Mapping[str, Samples]], expected: float) -> None:
    for side in ("peer", "ours"):
        for found in samples[side]["checksum"].values:
            if not math.isclose(found, expected, rel_tol=1e-9, abs_tol=1e-3):
                raise SystemExit(f"{side}: what was received sums to {found}, not to {expected}")


def _ratios(result: Result, name: str) -> str:
    return f"put {result.figures[f'put_{name}_x']:.1f}x, get {result.figures[f'get_{name}_x']:.1f}x"
