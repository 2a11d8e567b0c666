"""Copies through the host of a broadcast on `late`, and what is drawn from weights while transfers break."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.weightsync.chaos import chaos

DEVICE_TESTS = Path(__file__).resolve().parents[2] / "tests" / "device"
VICTIMS = ("receiver", "trainer", "bucket")
STRUCK = 50
"""Each is followed by a transfer in which nothing happens."""
RANKS = 3
DEADLINE_S = 300


def run(*, rounds: int, layers: int) -> dict[str, float]:
    """Return the figures; the transfers that break need some eight minutes."""
    report = chaos(kills=STRUCK, seed=0, model_bytes=8_000_000, deadline_s=30.0, victims=VICTIMS, staged=False)
    for failure in report.failures:
        print(failure, file=sys.stderr)
    return {
        "broadcast_host_copies": max(_host_copies(schedule) for schedule in ("copies", "kernels")),
        "torn_draws": report.mixed_reads,
        "torn_transfers": 2 * report.num_kills,
        "torn_transfers_survived": 2 * report.survived,
        "torn_outputs": report.outputs,
    }


def _host_copies(schedule: str) -> int:
    """Return how often weights went through the host, at the end that did so most, with two senders and a receiver."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        subprocess.run([sys.executable, DEVICE_TESTS / "late" / "late_device" / "build.py", directory], check=True)
        paths = [str(DEVICE_TESTS / "late"), *(path for path in sys.path if path)]
        env = os.environ | {
            "LATE_DEVICE_LIBRARY": str(directory / "late_extension.so"),
            "LATE_DEVICE_SCHEDULE": schedule,
            "PYTHONPATH": os.pathsep.join(paths),
        }
        command = [sys.executable, str(DEVICE_TESTS / "ranks.py"), "broadcast", "late", str(directory)]
        processes = [subprocess.Popen([*command, str(rank), str(RANKS)], env=env) for rank in range(RANKS)]
        try:
            codes = [process.wait(DEADLINE_S) for process in processes]
        finally:
            for process in processes:
                process.kill()
        said = [json.loads((directory / f"said-{rank}.json").read_text()) for rank in range(RANKS) if not codes[rank]]
    if len(said) < RANKS or not said[-1]["came"] or said[-1]["wrong"]:
        raise SystemExit(f"broadcast on late: exit codes {codes}, {said}")
    return max(int(one["host_copies"]) for one in said)
