"""The thread that writes what `asyncflow status` shows, in a run whose services do not answer."""

import json
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from asyncflow.clock import HostClock
from asyncflow.job import LOOPBACK, GangSpec, Job
from asyncflow.run_files import STATUS_FILE
from asyncflow.sealed_store import serve_store
from launcher.process.progress import Status
from launcher.run.status_writer import StatusWriter
from launcher.run.supervisor import RestartLog
from workers.settings.run import RunConfig

from ..support.processes import wait_until


@pytest.mark.gate
def test_it_shows_the_ranks_though_no_service_answers_and_leaves_neither_thread_nor_file(tmp_path: Path) -> None:
    """A launcher that ends while a thread of it is inside PyTorch is aborted: SIGABRT instead of its exit code."""
    _server, port = serve_store(LOOPBACK, timedelta(seconds=30))
    gangs = (GangSpec("weights-0", "weights", 0, 1, ("cpu",)), GangSpec("actor", "actor", 0, 1, ("cpu",)))
    job = Job(LOOPBACK, port, "00" * 32, 1, gangs, 0, "", 1, time.time(), HostClock.from_wall_clock())
    path = tmp_path / STATUS_FILE
    values: dict[str, Any] = {
        "steps": 9,
        "roles": {"rollout": 2, "actor": 1},
        "model": {"path": "model"},
        "data": {"path": "data.jsonl", "max_prompt_tokens": 8},
        "schedule": {"rollout_batch_size": 4, "n_samples_per_prompt": 4},
        "rollout": {"engine": "sim", "max_response_tokens": 64},
        "actor": {"engine": "sim", "micro_batch_size": 4},
    }
    steps = [{"step": k, "step_time_s": 2.0, "idle_fraction": {"rollout": 0.9, "actor": 0.0}} for k in range(1, 9)]
    with StatusWriter(job, tmp_path, RunConfig.model_validate(values)) as writer:
        writer.tell({("actor", 0): Status("training")}, RestartLog(), steps)
        wait_until(lambda: path.exists() and bool(json.loads(path.read_text())["ranks"]), "a picture", deadline_s=60)
        wait_until(lambda: bool(json.loads(path.read_text())["advice"]), "advice", deadline_s=60)
        assert json.loads(path.read_text())["advice"]["limits"] == "actor"
    assert not any(thread.name == "status" for thread in threading.enumerate())
    assert not path.exists()
