"""The device `late`, built once per test run, and a way to run a script on it."""

import fcntl
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.machine import obstacle

from .processes import build_late, environment, run_ranks

Run = Callable[..., list[dict[str, Any]]]
"""(mode, schedule, number of ranks, planted mistake) -> what each rank said; nothing if one failed that may."""


@pytest.fixture(scope="session")
def late_library(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Path:
    """The device's extension. Where a test run may not skip it, LATE_DEVICE_REQUIRED is set (`.ci/full`)."""
    missing = obstacle("g++", "--version", remedy="apt-get install g++")
    if missing:
        (pytest.fail if os.environ.get("LATE_DEVICE_REQUIRED") else pytest.skip)(missing)
    base = tmp_path_factory.getbasetemp()
    directory = (base if worker_id == "master" else base.parent) / "late"
    directory.mkdir(exist_ok=True)
    with (directory / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return build_late(directory)


@pytest.fixture
def late_env(late_library: Path) -> dict[str, str]:
    """What a process needs that uses the device."""
    return environment(late_library)


@pytest.fixture
def run(late_env: dict[str, str], tmp_path: Path) -> Run:
    """Return a function that runs `ranks.py` once per rank and returns what each wrote."""

    def start(mode: str, schedule: str = "copies", *, may_fail: bool = False, **options: Any) -> list[dict[str, Any]]:
        directory = tmp_path / f"{len(list(tmp_path.iterdir()))}-{mode}"
        said = run_ranks(late_env, directory, mode, schedule, **options)
        assert said is not None or may_fail, f"a rank failed: {mode} {schedule} {options}"
        return said or []

    return start
