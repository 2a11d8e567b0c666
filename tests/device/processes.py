"""Runs `ranks.py` on `late`: the tests' fixtures and `benchmarks/devices` do. Also what a process that a rank starts
answers to it."""

import json
import os
import subprocess
import sys
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
DEVICE = HERE / "late"
DEADLINE_S = 240


def build_late(directory: Path) -> Path:
    """Build the device's extension unless it is there; return it."""
    library = directory / "late_extension.so"
    if not library.exists():
        subprocess.run([sys.executable, DEVICE / "late_device" / "build.py", directory], check=True)
    return library


def environment(library: Path) -> dict[str, str]:
    """Return what a process needs that uses the device."""
    paths = [str(DEVICE), *(path for path in sys.path if path)]
    return {"LATE_DEVICE_LIBRARY": str(library), "PYTHONPATH": os.pathsep.join(paths)}


def answer_calls(pipe: Pipe, party: object) -> None:
    """Call the methods of `party` that the other end of a pipe names, and send what they return, until `end`."""
    pipe.send("ready")
    verb = ""
    while verb != "end":
        verb, *arguments = pipe.recv()
        pipe.send(getattr(party, verb)(*arguments))


def run_ranks(
    env: dict[str, str],
    directory: Path,
    mode: str,
    schedule: str = "copies",
    *,
    num_ranks: int = 1,
    plant: str = "",
    device: str = "late",
    deadline_s: float = DEADLINE_S,
) -> list[dict[str, Any]] | None:
    """Return what each rank said; None: one of them failed, or did not end.

    Args:
        env: of `environment`, and more.
        directory: for what they write; is made.
        mode, schedule: see `ranks.py` and the device.
        plant: see `plants.py`.
        deadline_s: for each rank's end.
    """
    directory.mkdir()
    env = os.environ | env | {"LATE_DEVICE_SCHEDULE": schedule, "GLOO_SOCKET_IFNAME": "lo", "PLANT": plant}
    command = [sys.executable, HERE / "ranks.py", mode, device, directory]
    processes = [subprocess.Popen([*command, str(rank), str(num_ranks)], env=env) for rank in range(num_ranks)]
    try:
        if any(process.wait(deadline_s) for process in processes):
            return None
    except subprocess.TimeoutExpired:
        print(f"{mode} {schedule} {plant}: not ended after {deadline_s} s", file=sys.stderr)
        return None
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return [json.loads((directory / f"said-{rank}.json").read_text()) for rank in range(num_ranks)]
