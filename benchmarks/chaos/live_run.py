"""A live run as `asyncflow status` sees it, asked again and again over channels that stay open."""

import json
from datetime import timedelta
from pathlib import Path

from asyncflow.job import Job
from asyncflow.sealed_store import SealedStore, connect_store
from asyncflow.transport.meeting import Credentials
from launcher.process.progress import Status
from tq.client.queue_client import QueueClient
from workers.settings.run import RunConfig

_TIMEOUT_S = 60.0


class LiveRun:
    """Asks; changes nothing. A context manager. Its launcher and controllers must live on."""

    def __init__(self, run_dir: Path) -> None:
        job = Job.load(run_dir)
        store, secret = (
            connect_store(job.store_host, job.store_port, timedelta(seconds=_TIMEOUT_S)),
            bytes.fromhex(job.secret),
        )
        self._store = SealedStore(store, secret)
        credentials = Credentials(store, secret, _TIMEOUT_S)
        self._client = QueueClient(credentials, "onlooker", config=RunConfig.load(run_dir).tq)

    def __enter__(self) -> "LiveRun":
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def progress(self, task: str) -> tuple[int, int]:
        """Return (rows that a task is done with so far, step of the newest weights)."""
        stats = self._client.stats()
        done = sum(one.acked for controller in stats for one in controller.tasks if one.task == task)
        return done, stats[0].newest_version

    def status(self, gang: str, rank: int = 0) -> Status:
        """Return what a rank said about itself last."""
        return Status.from_json(json.loads(self._store.get(f"status/{gang}/{rank}")))
