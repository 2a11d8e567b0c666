"""Runs a script in one process per rank."""

import os
import subprocess
import sys
from pathlib import Path


def run_script(script: Path, *arguments: str | Path, num_ranks: int, deadline_s: float) -> None:
    """Run `SCRIPT ARGUMENTS RANK NUM_RANKS` for every rank, on loopback; all must end well in time."""
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    processes = [
        subprocess.Popen([sys.executable, script, *arguments, str(rank), str(num_ranks)], env=environment)
        for rank in range(num_ranks)
    ]
    try:
        assert [process.wait(deadline_s) for process in processes] == [0] * num_ranks
    finally:
        for process in processes:
            process.kill()
            process.wait()
