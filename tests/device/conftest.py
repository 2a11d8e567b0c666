"""The device `late`, built once per test run, and a way to run a script on it."""

import fcntl
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.machine import obstacle

HERE = Path(__file__).parent
DEVICE = HERE / "late"
DEADLINE_S = 240
Run = Callable[..., list[dict[str, Any]]]
"""(mode, schedule, number of ranks, planted mistake) -> what each rank said."""


@pytest.fixture(scope="session")
def late_library(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Path:
    """The device's extension. Where a test run may not skip it, LATE_DEVICE_REQUIRED is set (`.ci/full`)."""
    missing = obstacle("g++", "--version", remedy="apt-get install g++")
    if missing:
        (pytest.fail if os.environ.get("LATE_DEVICE_REQUIRED") else pytest.skip)(missing)
    base = tmp_path_factory.getbasetemp()
    directory = (base if worker_id == "master" else base.parent) / "late"
    directory.mkdir(exist_ok=True)
    library = directory / "late_extension.so"
    with (directory / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            subprocess.run([sys.executable, DEVICE / "late_device" / "build.py", directory], check=True)
    return library


@pytest.fixture
def late_env(late_library: Path) -> dict[str, str]:
    """What a process needs that uses the device."""
    paths = [str(DEVICE), *(path for path in sys.path if path)]
    return {"LATE_DEVICE_LIBRARY": str(late_library), "PYTHONPATH": os.pathsep.join(paths)}


@pytest.fixture
def run(late_env: dict[str, str], tmp_path: Path) -> Run:
    """Return a function that runs `ranks.py` once per rank and returns what each wrote."""

    def start(
        mode: str, schedule: str = "copies", *, num_ranks: int = 1, plant: str = "", device: str = "late"
    ) -> list[dict[str, Any]]:
        directory = tmp_path / f"{mode}-{schedule}-{device}-{plant}"
        directory.mkdir()
        env = os.environ | late_env | {"LATE_DEVICE_SCHEDULE": schedule, "GLOO_SOCKET_IFNAME": "lo", "PLANT": plant}
        command = [sys.executable, HERE / "ranks.py", mode, device, directory]
        processes = [subprocess.Popen([*command, str(rank), str(num_ranks)], env=env) for rank in range(num_ranks)]
        try:
            assert [process.wait(DEADLINE_S) for process in processes] == [0] * num_ranks
        finally:
            for process in processes:
                process.kill()
                process.wait()
        return [json.loads((directory / f"said-{rank}.json").read_text()) for rank in range(num_ranks)]

    return start
