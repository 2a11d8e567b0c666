"""Memory and exactness of the head. Each peak is of a process of its own, read where Linux keeps it."""

import re
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.devices.whole_logits import WAYS, inputs

TEMPERATURE = 0.7


def run(**_: int) -> dict[str, float]:
    """Return the figures."""
    peak = {way: _in_child(way, 2048)[0] for way in WAYS}
    more, less = _in_child("now", 16384)[1], _in_child("now", 8192)[1]
    exact = _results("before", torch.float64)
    return {
        "logits_peak_x": peak["before"] / peak["now"],
        "logits_peak_mb": peak["now"] / 1e6,
        "logits_bytes_per_token": (more - less) / 8192,
        "logits_max_rel": _difference(_results("now", torch.float32), exact),
        "logits_before_rel": _difference(_results("before", torch.float32), exact),
    }


def _in_child(way: str, num_tokens: int) -> tuple[int, int]:
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(peak_bytes, way, num_tokens).result()


def peak_bytes(way: str, num_tokens: int) -> tuple[int, int]:
    """Return this process's peak (bytes) over what it has in the end, and over what it had in the beginning."""
    hidden_AD, weight_VD, targets_A = inputs(num_tokens)
    with torch.no_grad():
        WAYS[way](hidden_AD[:8], weight_VD, targets_A[:8], TEMPERATURE)  # what libraries set up once
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark begins anew
    start = _memory("VmRSS")
    log_probs_A, entropy_A = WAYS[way](hidden_AD, weight_VD, targets_A, TEMPERATURE)
    (log_probs_A.sum() + entropy_A.sum()).backward()  # type: ignore[no-untyped-call]
    del log_probs_A
    return _memory("VmHWM") - _memory("VmRSS"), _memory("VmHWM") - start


def _memory(what: str) -> int:
    found = re.search(rf"{what}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return 1024 * int(found[1])


def _results(way: str, dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor]]:
    """Return float64 log-probabilities and entropies, and gradients of weighted log-probabilities."""
    given = inputs(512, dtype)
    log_probs_A, entropy_A = WAYS[way](*given, TEMPERATURE)
    (log_probs_A * torch.linspace(-1, 1, 512, dtype=dtype)).sum().backward()  # type: ignore[no-untyped-call]
    gradients = [tensor.grad.double() for tensor in given[:2] if tensor.grad is not None]
    return [log_probs_A.detach().double(), entropy_A.double()], gradients


def _difference(found: tuple[list[Tensor], list[Tensor]], exact: tuple[list[Tensor], list[Tensor]]) -> float:
    values = [float(((a - b).abs() / b.abs()).max()) for a, b in zip(found[0], exact[0], strict=True)]
    return max(values + [float((a - b).norm() / b.norm()) for a, b in zip(found[1], exact[1], strict=True)])
