"""`asyncflow status`: what a live run is doing, asked of its processes. The text is made here, without torch.

Called by `launcher.commands`. It only asks: nothing in the run changes.
"""

import contextlib
import json
import socket
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from asyncflow.errors import ConfigError, TransportError
from asyncflow.job import GangSpec, Job
from asyncflow.network import choose_interfaces, is_loopback
from asyncflow.size_text import size_text
from launcher.line_tail import LineTail
from launcher.preload import is_stopped
from launcher.progress import Status, Statuses, accuracy_text, role_rows
from launcher.restart_log import RestartLog
from launcher.rundir import EVALUATION_FILE
from launcher.running_launcher import running_launcher
from launcher.table import table
from workers.config import RunConfig
from workers.dataflow import WEIGHTS

if TYPE_CHECKING:
    from tq.messages import QueueStats, UnitStats
    from weightsync.messages import AgentStatus

_TIMEOUT_S = 10.0
_PROBE_TIMEOUT_S = 2.0
_LONGEST_S = 60.0
"""For a whole answer (s)."""


@dataclass(frozen=True)
class RunStatus:
    """One look at a run.

    Attributes:
        run_dir: of the run.
        gangs: all of them.
        ranks: what each said last.
        controllers: counts of each controller, the lead first; none: the queue does not answer.
        units: what each storage unit holds.
        weights: what each weight agent that answers holds, and who computes with which version.
        evaluation: on held-out prompts, of the newest version that was evaluated; None: there is none yet.
        restarts: what failed and was started again; see `launcher.restart_log`.
    """

    run_dir: Path
    gangs: tuple[GangSpec, ...]
    ranks: Statuses
    controllers: "Sequence[QueueStats]"
    units: "Mapping[str, UnitStats]"
    weights: "Mapping[str, AgentStatus]"
    evaluation: Mapping[str, Any] | None = None
    restarts: RestartLog = field(default_factory=RestartLog)

    def as_json(self) -> str:
        """Return everything as one JSON object (SI units)."""
        fields: dict[str, Any] = {
            "run_dir": str(self.run_dir),
            "ranks": {f"{gang}/{rank}": asdict(status) for (gang, rank), status in self.ranks.items()},
            "controllers": [msgspec.to_builtins(stats) for stats in self.controllers],
            "units": {name: msgspec.to_builtins(stats) for name, stats in self.units.items()},
            "weights": {name: msgspec.to_builtins(status) for name, status in self.weights.items()},
            "evaluation": None if self.evaluation is None else dict(self.evaluation),
            "restarts": self.restarts.summary(),
        }
        return json.dumps(fields, indent=2)

    def as_text(self, now: float) -> str:
        """Return tables for a person."""
        roles = [("ROLE", "RANKS", "DOES", "WEIGHTS"), *role_rows(self.gangs, self.ranks, now)]
        tables = [table(rows) for rows in (self._tasks(), self._units(), self._weights())]
        parts = [str(self.run_dir), table(roles), *self._restarts(now), *self._held_out(), self._queue(), *tables]
        return "\n\n".join(parts)

    def _restarts(self, now: float) -> list[str]:
        log = self.restarts
        if not log.last_error:
            return []
        again = ", ".join(f"{name} {times}x" for name, times in sorted(log.gangs.items())) or "nothing"
        back = f"; {log.restores}x back to a checkpoint (lineage {log.lineage})" if log.restores else ""
        return [f"started again: {again}{back}\nlast error, {now - log.last_error_at:.0f} s ago: {log.last_error}"]

    def _held_out(self) -> list[str]:
        if self.evaluation is None:
            return []
        return [f"held-out accuracy: {accuracy_text(self.evaluation)} at step {self.evaluation['step']}"]

    def _queue(self) -> str:
        if not self.controllers:
            return "queue: it does not answer; it may be starting"
        lead = self.controllers[0]
        room = f" of {lead.row_limit}" if lead.row_limit else ""
        bytes_room = f" of {size_text(lead.byte_limit)}" if lead.byte_limit else ""
        parts = [
            f"{lead.live_rows}{room} rows, {size_text(lead.live_bytes)}{bytes_room} live",
            f"{lead.waiting_puts} puts wait for room",
            f"{lead.admitted_groups} groups admitted",
            f"weights of step {lead.newest_version}",
        ]
        if lead.lost_rows:
            parts.append(f"{lead.lost_rows} rows lost with a unit")
        quarantined = max(stats.quarantined_groups for stats in self.controllers)
        if quarantined:
            parts.append(f"{quarantined} groups in quarantine")
        filtered = max(stats.filtered_groups for stats in self.controllers)
        if filtered:
            parts.append(f"{filtered} groups filtered out")
        return "queue: " + ", ".join(parts)

    def _tasks(self) -> list[tuple[str, ...]]:
        rows: list[tuple[str, ...]] = [
            ("TASK", "CONTROLLER", "WAITING", "READY", "LEASED", "DONE", "ROWS/S", "REQUESTS", "OLDEST")
        ]
        for stats in self.controllers:
            for task in stats.tasks:
                counts = (task.waiting, task.ready, task.leased, task.acked)
                oldest = f"{task.oldest_request_s:.1f} s" if task.parked_requests else "-"
                speed = f"{task.rows_per_s:.1f}"
                parked = str(task.parked_requests)
                rows.append((task.task, task.controller, *map(str, counts), speed, parked, oldest))
        return rows

    def _units(self) -> list[tuple[str, ...]]:
        rows: list[tuple[str, ...]] = [("UNIT", "ROWS", "HELD", "KEPT FOR CHECKPOINT", "IN", "OUT", "CHANNELS")]
        for name, unit in self.units.items():
            channels = f"{unit.shared_channels} shared memory, {unit.wire_channels} wire"
            moved = (size_text(unit.bytes_in), size_text(unit.bytes_out))
            rows.append(
                (name, str(unit.num_rows), size_text(unit.num_bytes), size_text(unit.retained_bytes), *moved, channels)
            )
        return rows

    def _weights(self) -> list[tuple[str, ...]]:
        rows: list[tuple[str, ...]] = [("WEIGHTS", "NEWEST", "MEMORY", "FROM OTHER NODES", "IN USE")]
        for name, agent in self.weights.items():
            serving = ", ".join(f"{who}: {version}" for who, version in sorted(agent.serving.items()))
            newest = "-" if agent.newest is None else str(agent.newest)
            rows.append((name, newest, size_text(agent.slot_bytes), size_text(agent.fetched_bytes), serving or "-"))
        return rows


def ask_status(run_dir: Path, *, timeout_s: float = _LONGEST_S) -> RunStatus:
    """Ask a live run.

    Args:
        run_dir: of the run.
        timeout_s: for everything. A client of the job store waits for ever for a launcher that is stopped or hangs, and
            listens to no signal meanwhile, so it has a thread of its own.

    Raises:
        ConfigError: nothing runs there.
        TransportError: it does not answer.
    """
    if not run_dir.is_dir():
        raise ConfigError(f"run directory: {run_dir} does not exist; name a run, or leave it out for the newest")
    launcher = running_launcher(run_dir)
    if launcher is None and not _answers_from_afar(run_dir):
        raise ConfigError(
            f"run directory: nothing runs in {run_dir}; what it did is in metrics.jsonl and logs/, and "
            f"`asyncflow-launch --resume {run_dir}` goes on with a run that ended too early"
        )
    if is_stopped(launcher):
        raise TransportError(
            f"{run_dir}: its launcher (process {launcher}) was stopped by a signal, so nobody answers; let it go on: "
            f"kill -CONT {launcher}"
        )
    answer: Future[RunStatus] = Future()
    threading.Thread(target=_ask_into, args=(run_dir, answer), name="status", daemon=True).start()
    try:
        return answer.result(timeout_s)
    except TimeoutError as error:
        raise TransportError(f"{run_dir}: the run's launcher does not answer within {timeout_s:g} s") from error


def _ask_into(run_dir: Path, answer: "Future[RunStatus]") -> None:
    try:
        answer.set_result(_ask(run_dir))
    except Exception as error:  # noqa: BLE001 (it is raised to whoever waits for the answer)
        answer.set_exception(error)


def _ask(run_dir: Path) -> RunStatus:
    from torch.distributed import DistError  # imports torch

    from asyncflow.store_server import connect_store
    from asyncflow.transport.handshake import Credentials
    from tq.client.queue_client import QueueClient
    from weightsync.agent_status import ask_agent

    job = Job.load(run_dir)
    choose_interfaces(job.store_host)
    config = RunConfig.load(run_dir).tq.model_copy(update={"request_timeout_s": _TIMEOUT_S})
    try:
        store = connect_store(job.store_host, job.store_port, timedelta(seconds=_TIMEOUT_S))
        ranks = _ranks(job, store)
        restarts = (
            RestartLog.from_summary(json.loads(store.get("restarts"))) if store.check(["restarts"]) else RestartLog()
        )
    except DistError as error:
        raise TransportError(f"{run_dir}: the run does not answer; is it starting or stopping?") from error
    credentials = Credentials(store, bytes.fromhex(job.secret), _TIMEOUT_S)
    weights = {}
    for gang in job.of_role(WEIGHTS):
        with contextlib.suppress(TransportError, DistError):
            weights[gang.name] = ask_agent(credentials, gang.name, "status", timeout_s=_TIMEOUT_S)
    client = QueueClient(credentials, "status", config=config)
    controllers, units = [], {}
    try:
        with contextlib.suppress(TransportError, DistError):
            controllers, units = client.stats(), client.unit_stats()
    finally:
        client.close()
    return RunStatus(run_dir, job.gangs, ranks, controllers, units, weights, _newest_evaluation(run_dir), restarts)


def _answers_from_afar(run_dir: Path) -> bool:
    """Return whether the store of a run on several nodes answers, which may be another host's."""
    try:
        job = Job.load(run_dir)
        if is_loopback(job.store_host):
            return False
        socket.create_connection((job.store_host, job.store_port), _PROBE_TIMEOUT_S).close()
    except (ConfigError, OSError, ValueError, TypeError, KeyError):
        return False
    return True


def _newest_evaluation(run_dir: Path) -> dict[str, Any] | None:
    lines = LineTail(run_dir / EVALUATION_FILE).read()
    return max(lines, key=lambda line: int(line["step"]), default=None)


def _ranks(job: Job, store: Any) -> dict[tuple[str, int], Status]:
    keys = {(gang.name, rank): f"status/{gang.name}/{rank}" for gang in job.gangs for rank in range(gang.num_ranks)}
    return {place: Status.from_json(json.loads(store.get(key))) for place, key in keys.items() if store.check([key])}
