"""Writes `status.json` for `asyncflow status`: what ranks, queue and weight agents say. A thread of the head launcher.

`launcher.job` tells it what it knows anyway, ranks and restarts; the thread asks queue and agents over channels of its
own, which stay open. Nobody waits for it: a service that hangs makes the file older, nothing else. Imports torch.
"""

import logging
import threading
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec
from torch.distributed import DistError

from asyncflow.errors import TransportError
from asyncflow.job import Job
from asyncflow.store_server import connect_store
from asyncflow.transport.connection import Connection
from asyncflow.transport.handshake import Credentials
from launcher.progress import Statuses
from launcher.restart_log import RestartLog
from launcher.rundir import STATUS_FILE
from launcher.status import RunStatus
from tq.client.queue_client import QueueClient
from tq.config import QueueConfig
from weightsync.agent_status import agent_status, connect_agent
from workers.dataflow import WEIGHTS

_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 5.0
"""Between two looks. It grows with what a look takes, that is, with the number of services (s)."""
_SHARE = 0.05
"""Of the time goes into asking, within these bounds."""
_TIMEOUT_S = 5.0
_NAME = "status"

logger = logging.getLogger(__name__)


class StatusWriter:
    """A context manager: the file exists while it is open."""

    def __init__(self, job: Job, run_dir: Path, config: QueueConfig) -> None:
        """Args:
        job: of the run.
        run_dir: its directory.
        config: of the queue.
        """
        self._job = job
        self._path = run_dir / STATUS_FILE
        self._config = config
        self._known = RunStatus(run_dir, time.time(), job.gangs, {})
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="status", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join(_TIMEOUT_S)
        self._path.unlink(missing_ok=True)

    def tell(self, ranks: Statuses, restarts: RestartLog) -> None:
        """Take in what the launcher knows; from its main thread."""
        self._known = replace(self._known, ranks=ranks, restarts=restarts)

    def _run(self) -> None:
        self._write({})
        services = _Services(self._job, self._config, self._stop)
        try:
            while not self._stop.is_set():
                began = time.monotonic()
                self._write({**services.queue(), "weights": services.weights()})
                took_s = time.monotonic() - began
                self._stop.wait(min(max(_SHORTEST_PAUSE_S, took_s / _SHARE), _LONGEST_PAUSE_S))
        finally:
            services.close()

    def _write(self, answers: dict[str, Any]) -> None:
        beside = self._path.with_suffix(".tmp")
        try:
            beside.write_text(replace(self._known, at=time.time(), **answers).as_json())
            beside.replace(self._path)
        except OSError as error:
            logger.debug("%s: %s", self._path, error)  # a full disk is told by what the run needs of it


class _Services:
    """Queue and weight agents as an onlooker sees them; whoever does not answer is left out and tried again."""

    def __init__(self, job: Job, config: QueueConfig, stop: threading.Event) -> None:
        store = connect_store(job.store_host, job.store_port, timedelta(seconds=_TIMEOUT_S))
        self._credentials = Credentials(store, bytes.fromhex(job.secret), _TIMEOUT_S)
        self._stop = stop
        self._config = config.model_copy(update={"request_timeout_s": _TIMEOUT_S})
        self._client: QueueClient | None = None
        self._agents: dict[str, Connection | None] = {gang.name: None for gang in job.of_role(WEIGHTS)}

    def queue(self) -> dict[str, Any]:
        """Return `controllers` and `units`; nothing while the queue does not answer."""
        try:
            self._client = client = self._client or self._open_client()
            units = {name: msgspec.to_builtins(stats) for name, stats in client.unit_stats().items()}
            return {"controllers": [msgspec.to_builtins(stats) for stats in client.stats()], "units": units}
        except (TransportError, DistError) as error:
            logger.debug("status: %s", error)
            if self._client is not None:
                self._client.close()
            self._client = None
            return {}

    def weights(self) -> dict[str, Any]:
        """Return what each weight agent says that answers."""
        answers = {}
        for name, connection in self._agents.items():
            try:
                connection = connection or connect_agent(
                    self._credentials, name, _NAME, timeout_s=_TIMEOUT_S, stop=self._stop
                )
                answers[name] = msgspec.to_builtins(agent_status(connection, timeout_s=_TIMEOUT_S))
            except (TransportError, DistError) as error:
                logger.debug("status: %s", error)
                if connection is not None:
                    connection.close()
                connection = None
            self._agents[name] = connection
        return answers

    def _open_client(self) -> QueueClient:
        return QueueClient(self._credentials, _NAME, config=self._config, stop=self._stop)

    def close(self) -> None:
        """Close all channels."""
        for closable in (self._client, *self._agents.values()):
            if closable is not None:
                closable.close()
