"""Writes `status.json` for `asyncflow status`: what ranks, queue and weight agents report. A thread of the launcher.

`launcher.run.run_job` passes in what it already knows: ranks, restarts, finished steps. The thread asks the queue and
agents over channels of its own, which stay open, and derives advice from the steps. Nothing waits for it. Imports
torch.
"""

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from queue import SimpleQueue
from types import MappingProxyType
from typing import Any, Self, TypeVar

import msgspec
from torch.distributed import DistError

from asyncflow.errors import TransportError
from asyncflow.job import Job
from asyncflow.json_lines import replace_text
from asyncflow.run_files import STATUS_FILE
from asyncflow.sealed_store import connect_store
from asyncflow.transport.meeting import Credentials
from asyncflow.transport.server import Connection
from launcher.process.progress import Metrics, Statuses
from launcher.run.advice import Advisor
from launcher.run.status import RunStatus
from launcher.run.supervisor import RestartLog
from tq.client.queue_client import QueueClient
from tq.config import QueueConfig
from tq.directory import Directory
from weightsync.messages import AgentStatus, AskStatus, Reply
from workers.settings.dataflow import WEIGHTS
from workers.settings.run import RunConfig

# Pause between two polls (s). It grows with a poll's duration, and so with the number of services.
_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 5.0
_SHARE = 0.05
"""Fraction of the time spent asking, within these bounds."""
_TIMEOUT_S = 2.0
_LEAVE_S = 20.0
"""For the call in flight, and for closing (s). A process that exits while one of its threads is in PyTorch aborts."""
_NAME = "status"

logger = logging.getLogger(__name__)

T = TypeVar("T")


class StatusWriter:
    """A context manager: the file exists while it is open."""

    def __init__(self, job: Job, run_dir: Path, config: RunConfig) -> None:
        self._job = job
        self._path = run_dir / STATUS_FILE
        self._config = config.tq
        self._advisor = Advisor(config, job.gangs, run_dir)
        self._finished_steps: SimpleQueue[Metrics] = SimpleQueue()
        self._clock = job.local_clock()  # by which ranks of all hosts say when they reported
        self._known = RunStatus(run_dir, self._clock.now(), job.gangs, {})
        self._stop = threading.Event()
        self._writing = threading.Lock()
        self._thread = threading.Thread(target=self._write_until_stopped, name="status", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(_LEAVE_S)
        with self._writing:  # a late thread then sees the stop, and does not write the file again
            self._path.unlink(missing_ok=True)

    def tell(
        self,
        ranks: Statuses,
        restarts: RestartLog,
        finished_steps: Sequence[Metrics],
        failures: Mapping[str, str] = MappingProxyType({}),
        *,
        turn: str = "",
        pause: str = "",
    ) -> None:
        """Take in what the launcher knows; call it from the launcher's main thread.

        Args:
            finished_steps: since the last call.
            failures: kind -> why one last failed.
            turn: who has the devices that roles share; "": they share none.
            pause: how far a pause is; "": there is none.
        """
        for metrics in finished_steps:
            self._finished_steps.put(metrics)
        self._known = replace(self._known, ranks=ranks, restarts=restarts, failures=failures, turn=turn, pause=pause)

    def _write_until_stopped(self) -> None:
        while not self._stop.is_set():
            self._write_status()
            try:
                self._look_again_and_again()
            except Exception:  # the status is a convenience: its errors must not affect the run
                logger.exception("status: starting again")
                self._stop.wait(_LONGEST_PAUSE_S)

    def _look_again_and_again(self) -> None:
        services = _Services(self._job, self._config, self._stop)
        try:
            while not self._stop.is_set():
                began = time.monotonic()
                for ask in (services.ask_controllers, services.units, services.ask_weight_agents, self._ask_advisor):
                    if not self._stop.is_set():
                        self._write_status(**ask())
                took_s = time.monotonic() - began
                self._stop.wait(min(max(_SHORTEST_PAUSE_S, took_s / _SHARE), _LONGEST_PAUSE_S))
        finally:
            services.close()

    def _ask_advisor(self) -> dict[str, Any]:
        new = [self._finished_steps.get_nowait() for _ in range(self._finished_steps.qsize())]
        advice = self._advisor.update_advice(new)
        return {"advice": advice and advice.to_summary()}

    def _write_status(self, **answers: Any) -> None:
        """Write the file with these answers and the other services' previous ones."""
        self._known = replace(self._known, at=self._clock.now(), **answers)
        with self._writing:
            if self._stop.is_set():
                return
            try:
                replace_text(self._path, self._known.as_json())
            except OSError as error:
                logger.debug("%s: %s", self._path, error)  # what the run itself writes will report a full disk


class _Services:
    """Queue and weight agents as an observer sees them. A service that does not answer is left out of this poll."""

    def __init__(self, job: Job, config: QueueConfig, stop: threading.Event) -> None:
        store = connect_store(job.store_host, job.store_port, timedelta(seconds=_TIMEOUT_S))
        self._credentials = Credentials(store, bytes.fromhex(job.secret), _TIMEOUT_S)
        self._stop = stop
        self._config = config.model_copy(update={"request_timeout_s": _TIMEOUT_S})
        self._client: QueueClient | None = None
        self._agents: dict[str, Connection | None] = {gang.name: None for gang in job.of_role(WEIGHTS)}

    def ask_controllers(self) -> dict[str, Any]:
        answers = self._ask_queue(lambda client: client.stats())
        return {"controllers": [msgspec.to_builtins(stats) for stats in answers or ()]}

    def units(self) -> dict[str, Any]:
        answers = self._ask_queue(lambda client: client.unit_stats())
        return {"units": {name: msgspec.to_builtins(stats) for name, stats in (answers or {}).items()}}

    def ask_weight_agents(self) -> dict[str, Any]:
        answers = {}
        for name, connection in self._agents.items():
            if self._stop.is_set():
                break
            try:
                connection = connection or Connection(
                    self._credentials, name, _NAME, Reply, timeout_s=_TIMEOUT_S, stop=self._stop
                )
                status, _ = connection.call_service(AskStatus(), timeout_s=_TIMEOUT_S)
                assert isinstance(status, AgentStatus)
                answers[name] = msgspec.to_builtins(status)
            except (TransportError, DistError) as error:
                logger.debug("status: %s", error)
                if connection is not None:
                    connection.close()
                connection = None
            self._agents[name] = connection
        return {"weights": answers}

    def _ask_queue(self, question: Callable[[QueueClient], T]) -> T | None:
        """Return the queue's answer, or None; after None the next call opens a new client."""
        try:
            if self._client is None:
                with self._credentials.borrowed_store() as store:
                    if not Directory.is_published(store):  # a client would block in the store, which no stop interrupts
                        return None
                self._client = QueueClient(self._credentials, _NAME, config=self._config, stop=self._stop)
            return question(self._client)
        except (TransportError, DistError) as error:
            logger.debug("status: %s", error)
            if self._client is not None:
                self._client.close()
            self._client = None
            return None

    def close(self) -> None:
        for closable in (self._client, *self._agents.values()):
            if closable is not None:
                closable.close()
