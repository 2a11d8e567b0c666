"""The thread that writes what `asyncflow status` shows, in a run whose services do not answer."""

import json
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest

from asyncflow.clock import HostClock
from asyncflow.job import GangSpec, Job
from asyncflow.network import LOOPBACK
from asyncflow.run_files import STATUS_FILE
from asyncflow.sealed_store import serve_store
from launcher.run.progress import Status
from launcher.run.restarts import RestartLog
from launcher.run.status_writer import StatusWriter
from tq.config import QueueConfig

from ..support.processes import wait_until


@pytest.mark.gate
def test_it_shows_the_ranks_though_no_service_answers_and_leaves_neither_thread_nor_file(tmp_path: Path) -> None:
    """A launcher that ends while a thread of it is inside PyTorch is aborted: SIGABRT instead of its exit code."""
    _server, port = serve_store(LOOPBACK, timedelta(seconds=30))
    gangs = (GangSpec("weights-0", "weights", 0, 1, ("cpu",)), GangSpec("actor", "actor", 0, 1, ("cpu",)))
    job = Job(LOOPBACK, port, "00" * 32, 1, gangs, 0, "", 1, time.time(), HostClock.measure())
    path = tmp_path / STATUS_FILE
    with StatusWriter(job, tmp_path, QueueConfig()) as writer:
        writer.tell({("actor", 0): Status("training")}, RestartLog())
        wait_until(lambda: path.exists() and bool(json.loads(path.read_text())["ranks"]), "a picture", deadline_s=60)
    assert not any(thread.name == "status" for thread in threading.enumerate())
    assert not path.exists()
