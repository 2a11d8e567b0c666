"""Parts `offhost` and `samehost`: 64 MB put and got, against raw Gloo and against a copy in memory."""

import time
from collections.abc import Callable, Mapping

import torch

import tq
from benchmarks.transferqueue.gloo_pair import GlooPair
from benchmarks.transferqueue.our_queue import OurQueue, column_sum, dense, num_bytes
from benchmarks.transferqueue.part import Result, Settings
from benchmarks.transferqueue.samples import Samples, alternate
from tq.columns import Column

_ROWS, _COLUMNS = 1024, 2
_LARGE_ROWS, _LARGE_COLUMNS = 1024, 9
_ROUNDS = 11
_WARM_UP = 3


def run_offhost(settings: Settings) -> Result:
    """Shared memory switched off, so that payloads take the channel as they do between hosts."""
    torch.set_num_threads(1)
    columns = dense(rows=_ROWS, columns=_COLUMNS)
    config = tq.QueueConfig(shared_memory=False)
    with GlooPair(num_bytes(columns)) as pair, OurQueue(tuple(columns), settings.directory, config=config) as ours:
        samples = alternate(
            {
                "raw": lambda: {"put_s": pair.send_s(), "get_s": pair.receive_s()},
                "ours": lambda: _checked(ours, columns),
            },
            rounds=settings.rounds(_ROUNDS),
            warm_up=_WARM_UP,
        )
        channels = {name: stats.shared_channels for name, stats in ours.client.unit_stats().items()}
    assert not any(channels.values()), f"shared memory was switched off, but channels use it: {channels}"
    return _compare(settings, "offhost_vs_gloo", samples, num_bytes(columns), "Gloo point-to-point")


def run_samehost(settings: Settings) -> Result:
    """Through shared memory, against copying the same bytes into a warm buffer."""
    torch.set_num_threads(1)
    columns = dense(rows=_ROWS, columns=_COLUMNS)
    result = _against_memcpy(settings, columns, "samehost_vs_memcpy")
    large = dense(rows=_LARGE_ROWS, columns=_LARGE_COLUMNS)
    result.details |= _against_memcpy(settings, large, "samehost_vs_memcpy_288mb").details
    return result


def _against_memcpy(settings: Settings, columns: Mapping[str, Column], name: str) -> Result:
    copy = _memcpy(columns)
    with OurQueue(tuple(columns), settings.directory) as ours:
        samples = alternate(
            {"raw": lambda: {"put_s": copy(), "get_s": copy()}, "ours": lambda: _checked(ours, columns)},
            rounds=settings.rounds(_ROUNDS),
            warm_up=_WARM_UP,
        )
    return _compare(settings, name, samples, num_bytes(columns), "memcpy")


def _memcpy(columns: Mapping[str, Column]) -> Callable[[], float]:
    warm = {name: torch.zeros_like(column.values) for name, column in columns.items()}

    def copy() -> float:
        began = time.perf_counter()
        for name, column in columns.items():
            warm[name].copy_(column.values)
        return time.perf_counter() - began

    return copy


def _checked(ours: OurQueue, columns: Mapping[str, Column]) -> dict[str, float]:
    moved = ours.move(columns)
    expected = column_sum(columns)
    assert moved["checksum"] == expected, f"received values sum to {moved['checksum']}, not to {expected}"
    return moved


def _compare(
    settings: Settings, name: str, samples: Mapping[str, Mapping[str, Samples]], amount: int, against: str
) -> Result:
    ratios = {what: samples["raw"][f"{what}_s"].median / samples["ours"][f"{what}_s"].median for what in ("put", "get")}
    rates = {
        f"{what}_gb_per_s": {side: samples[side][f"{what}_s"].rates(amount / 1e9).report() for side in ("raw", "ours")}
        for what in ("put", "get")
    }
    settings.say(f"{name}: put {ratios['put']:.2f}, get {ratios['get']:.2f} of {against}, {amount / 1e6:.0f} MB")
    details = {"put": ratios["put"], "get": ratios["get"], "fetch_s": samples["ours"]["fetch_s"].median, **rates}
    return Result({name: min(ratios.values())}, {name: details})
