"""The processes of `device_ranks`, one per device: which devices, and a start whose every wait has a deadline."""

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

from asyncflow.job import LOOPBACK

_MOST_RANKS = 8
_DEADLINE_S = 60.0
"""For all ranks together: a check ends after 90 s, and must say by then which of them hang."""
_LEAST_S = 1.0
"""For one whose answer may be there already, once the others took all the time."""
_LONGEST = 200


def rank_devices(kind: str) -> list[str]:
    """Return a device for each rank: one each, at most eight; two ranks on the CPU."""
    import torch

    if kind == "cpu":
        return ["cpu", "cpu"]
    most = min(_MOST_RANKS, torch.accelerator.device_count(), max(2, os.cpu_count() or 2))
    return [f"{kind}:{index}" for index in range(most)]


@contextlib.contextmanager
def started_ranks(mode: str, devices: list[str]) -> Iterator[tuple[Any, Any]]:
    """Start a process per device; yields their store, and what waits for them and returns what each said: facts, or why
    there are none: the last line of its errors if it died, or that it hangs."""
    from asyncflow.sealed_store import serve_store

    store, port = serve_store(LOOPBACK, timedelta(seconds=_DEADLINE_S))
    command = [sys.executable, "-P", "-m", "launcher.doctor.device_ranks", mode]
    processes = [
        subprocess.Popen(
            [*command, device, str(rank), str(len(devices)), str(port)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, device in enumerate(devices)
    ]

    def finish() -> list[dict[str, Any] | str]:
        deadline = time.monotonic() + _DEADLINE_S
        return [_said(process, max(_LEAST_S, deadline - time.monotonic())) for process in processes]

    try:
        yield store, finish
    finally:
        for process in processes:
            with process:  # closes its pipes, and waits
                process.kill()


def _said(process: "subprocess.Popen[str]", timeout_s: float) -> dict[str, Any] | str:
    """Return what a rank found, or why that is unknown."""
    try:
        out, errors = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        return f"no answer within {_DEADLINE_S:g} s"
    if process.returncode == 0:
        found: dict[str, Any] = json.loads(out.splitlines()[-1])
        return found
    last = (errors.splitlines() or [f"code {process.returncode}"])[-1]
    return last[:_LONGEST]
