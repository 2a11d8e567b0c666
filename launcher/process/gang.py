"""One gang's ranks on this node under torchrun's elastic agent, in a thread of the launcher.

`launcher.process.gang_hosts` starts and kills gangs; nothing else touches their processes. What happens to them
becomes events of the supervisor. Imports torch, so import it only after the config is accepted.

    Gang.start -> thread: GangAgent.run -> the interpreter's fork server starts the ranks
                          polls every MONITOR_INTERVAL_S; all returned, or one died or was stopped -> GangExited

A gang starts once; a restart is another `Gang` with the next attempt.
"""

import functools
import json
import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch._C._distributed_c10d import HashStore
from torch.distributed.elastic.agent.server.api import (
    RunResult,
    SimpleElasticAgent,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.rendezvous.api import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

from asyncflow.job import GangSpec, error_in
from asyncflow.run_files import LOGS
from launcher.process.fork_server import UNKNOWN_CODE, ForkServer, WorkerProcess, is_stopped
from launcher.process.job_store import JobStoreClient
from launcher.process.run_events import FAILED, GangExited
from launcher.process.worker_entry import ATTEMPT_VARIABLE, LOG_VARIABLE, STACKS_SIGNAL

MONITOR_INTERVAL_S = 0.2
KILL_TIMEOUT_S = 5.0
STOPPED_S = 3.0
"""A process that a signal has stopped for this long is killed (s)."""

logger = logging.getLogger(__name__)


class Gang:
    """The processes of one gang on this node, and the thread that watches them.

    Args:
        spec: of the whole gang, including its ranks on other nodes.
        attempt: counts the gang's starts from 0.
        server: starts the ranks.
        entrypoint: `module:function` that every rank runs as `function(run_dir, gang)`.
        exited: called by the gang's thread when all ranks are gone.
        node: this node; only its ranks are started.
    """

    def __init__(
        self,
        spec: GangSpec,
        attempt: int = 0,
        *,
        server: ForkServer,
        entrypoint: str,
        run_dir: Path,
        store: JobStoreClient,
        exited: Callable[[GangExited], None],
        node: int = 0,
    ) -> None:
        self.spec = spec
        self._node = node
        self._ranks = spec.ranks_on(node)
        self._attempt = attempt
        self._server = server
        self._entrypoint = entrypoint
        self._run_dir = run_dir
        self._store = store
        self._exited = exited
        self._killed = threading.Event()
        self._agent: GangAgent | None = None
        self._thread = threading.Thread(target=self._watch_ranks, name=f"gang-{spec.name}", daemon=True)

    def start(self) -> None:
        """Start the ranks; returns at once."""
        self._thread.start()

    def kill(self) -> None:
        """Have the agent SIGKILL every rank at its next poll, including ranks about to start. Idempotent."""
        self._killed.set()

    def dump_stacks(self) -> None:
        """Have every rank write its threads' stacks into its log; a stopped process does so once it continues."""
        if self._agent is not None:
            self._agent.send(STACKS_SIGNAL)

    def join(self, timeout_s: float) -> bool:
        """Wait for the thread; return whether it ended or never began."""
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _watch_ranks(self) -> None:
        """Run the agent. However this thread ends, the supervisor learns that the gang is gone."""
        exited = GangExited(self.spec.name, 1, "its launcher thread died; see logs/launcher*.log", at=time.time())
        try:
            exited = self._run_agent()
        except Exception as error:  # thread boundary: e.g. logs/ is not writable
            logger.exception("gang %s", self.spec.name)
            text = f"its launcher thread died: {type(error).__name__}: {error}; see logs/launcher*.log"
            exited = GangExited(self.spec.name, 1, text, at=time.time())
        finally:
            self._exited(exited)

    def _run_agent(self) -> GangExited:
        spec = self.spec
        if self._killed.is_set():
            return GangExited(spec.name, -signal.SIGKILL, "killed before it started", at=time.time(), ordered=True)
        self._agent = agent = GangAgent(
            WorkerSpec(
                role=spec.role,
                # Only this node's ranks: torchrun's rendezvous over several agents blocks in calls that cannot be
                # interrupted.
                local_world_size=len(self._ranks),
                rdzv_handler=OneNodeRendezvous(self._store),
                entrypoint=self._entrypoint,
                args=(str(self._run_dir), spec.name),
                max_restarts=0,
                monitor_interval=MONITOR_INTERVAL_S,
            ),
            self._server,
            RankFiles(spec, self._attempt, self._run_dir),
            ranks=self._ranks,
            killed=self._killed,
            last_words=functools.partial(self._store.last_words, spec.name),
        )
        try:
            result = agent.run()
        except (OSError, EOFError):
            if not self._server.has_died():
                raise
            logger.exception("gang %s: the fork server died while it was asked for processes", spec.name)
            return _without_server(spec.name, self._ranks.start, self._server)
        if result is not None and result.state is WorkerState.SUCCEEDED:
            return GangExited(spec.name, 0, at=time.time())
        gave_up = "the elastic agent gave up; see logs/launcher*.log"
        return agent.failure or GangExited(spec.name, 1, gave_up, self._ranks.start, time.time())


class GangAgent(SimpleElasticAgent):
    """torchrun's agent with ranks from a fork server; it names the rank that failed first and kills the others at once.

    The stock agent sends SIGTERM and waits 30 s; our workers ignore SIGTERM (a scheduler sends it to every process).
    It also starts processes of its own interpreter only.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        server: ForkServer,
        files: "RankFiles",
        *,
        ranks: range,
        killed: threading.Event,
        last_words: Callable[[int], str | None],
    ) -> None:
        super().__init__(spec, exit_barrier_timeout=KILL_TIMEOUT_S)
        self.failure: GangExited | None = None
        """Of the rank that failed first."""
        self._server = server
        self._files = files
        self._ranks = ranks
        self._killed = killed
        self._last_words = last_words
        self._processes: dict[int, WorkerProcess] = {}
        self._stopped_since: dict[int, float] = {}

    def send(self, number: signal.Signals) -> None:
        """Send a signal to every live rank. Any thread may call it."""
        for process in tuple(self._processes.values()):
            process.send_signal(number)

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        spec = worker_group.spec
        for worker in worker_group.workers:
            rank = self._ranks[worker.local_rank]
            variables = self._files.variables(rank) | {
                "LOCAL_RANK": str(worker.local_rank),
                "LOCAL_WORLD_SIZE": str(spec.local_world_size),
                "GROUP_RANK": str(worker_group.group_rank),
                "GROUP_WORLD_SIZE": str(worker_group.group_world_size),
                "ROLE_NAME": spec.role,
                "MASTER_ADDR": str(worker_group.master_addr),
                "MASTER_PORT": str(worker_group.master_port),
                "TORCHELASTIC_RESTART_COUNT": "0",
                "TORCHELASTIC_MAX_RESTARTS": "0",
                "TORCHELASTIC_RUN_ID": spec.rdzv_handler.get_run_id(),
                "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
            }
            self._processes[rank] = self._server.start_worker([str(spec.entrypoint), *spec.args], variables)
        return {local: process.pid for local, process in enumerate(self._processes.values())}

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        self._server.let_go_on()  # it reports the ends
        dead = self._find_dead_ranks()
        if not dead and self._killed.is_set():  # a rank that a signal ended before that is a cause
            self._kill_all()
            dead = [replace(one, ordered=True) for one in self._find_dead_ranks()]
        if dead:
            self.failure = min(dead, key=GangExited.failure_precedence)
            self._kill_all()
            return RunResult(state=WorkerState.FAILED)
        if any(process.exitcode is None for process in self._processes.values()):
            return RunResult(state=WorkerState.HEALTHY)
        return RunResult(state=WorkerState.SUCCEEDED, return_values={w.global_rank: None for w in worker_group.workers})

    def _find_dead_ranks(self) -> list[GangExited]:
        codes = {rank: process.exitcode for rank, process in self._processes.items()}
        dead = [
            self._describe_failure(rank, code)
            for rank, code in codes.items()
            if code is not None and not (code == 0 and self._processes[rank].finished)
        ]
        return dead + self._find_stopped_ranks()

    def _find_stopped_ranks(self) -> list[GangExited]:
        """Return the ranks that have been stopped (SIGSTOP) for too long: to their peers they are as good as dead."""
        now = time.monotonic()
        # From /proc, not from missing heartbeats: a process whose threads wait for the GIL would look dead too.
        stopped = [
            rank for rank, process in self._processes.items() if process.exitcode is None and is_stopped(process.pid)
        ]
        self._stopped_since = {rank: self._stopped_since.get(rank, now) for rank in stopped}
        return [
            self._make_exited(rank, -signal.SIGSTOP, f"stopped by a signal for {STOPPED_S:g} s; killed")
            for rank, since in self._stopped_since.items()
            if now - since > STOPPED_S
        ]

    def _kill_all(self) -> None:
        for process in self._processes.values():
            process.kill()
        for process in self._processes.values():
            process.join(KILL_TIMEOUT_S)

    def _stop_workers(self, worker_group: WorkerGroup, *_asked: object, **_named: object) -> None:
        self._kill_all()

    def _shutdown(self, *_asked: object, **_named: object) -> None:
        # Whatever signal the agent asks for: workers ignore SIGTERM. (The arguments differ between versions of torch.)
        self._kill_all()

    def _describe_failure(self, rank: int, code: int) -> GangExited:
        recorded = self._files.read_failure(rank, code)
        if recorded is not None:
            return recorded
        if code < 0:
            return self._make_exited(rank, code, f"ended by {signal.Signals(-code).name}")
        if code == UNKNOWN_CODE and self._server.has_died():
            return _without_server(self._files.gang.name, rank, self._server)
        if error := error_in(self._last_words(rank)):  # on a full disk it cannot write its error file
            return self._make_exited(rank, code or 1, error)
        return self._make_exited(rank, code or 1, f"exited with code {code} without finishing")

    def _make_exited(self, rank: int, code: int, error: str) -> GangExited:
        return GangExited(self._files.gang.name, code, error, rank, time.time())


def _without_server(gang: str, rank: int, server: ForkServer) -> GangExited:
    """Return the end of a gang whose fork server is gone."""
    death = server.why_died()
    return GangExited(gang, FAILED if death.raised else -signal.SIGKILL, death.error, rank, time.time())


class OneNodeRendezvous(RendezvousHandler):
    """Rendezvous of a gang's only agent on this node. It meets no other agent, so a store in this process suffices."""

    def __init__(self, store: JobStoreClient) -> None:
        self._endpoint = RendezvousStoreInfo(store.host, store.port)

    def get_backend(self) -> str:
        return "asyncflow"

    def next_rendezvous(self) -> RendezvousInfo:
        return RendezvousInfo(HashStore(), 0, 1, self._endpoint)

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return "asyncflow"

    def shutdown(self) -> bool:
        return True


class RankFiles:
    """The files of a gang's ranks, and their places in the whole gang, since an agent knows only those of its node.

    `logs/ROLE/RANK.log` has a rank's stdout and stderr, appended to (`worker_entry` opens it); RANK counts over all
    gangs of the role. `RANK.error.json` has the error that ended it.
    """

    def __init__(self, gang: GangSpec, attempt: int, run_dir: Path) -> None:
        self.gang = gang
        self._attempt = attempt
        self._dir = run_dir / LOGS / gang.role

    def variables(self, rank: int) -> dict[str, str]:
        """Return the variables with which a rank of the gang starts; drop what an earlier attempt left."""
        self._dir.mkdir(parents=True, exist_ok=True)
        self._error_file(rank).unlink(missing_ok=True)  # an earlier attempt's error must not count for this one
        number, ranks = str(rank), str(self.gang.num_ranks)
        return {
            LOG_VARIABLE: str(self._dir / f"{self.gang.rank_in_role(rank)}.log"),
            ATTEMPT_VARIABLE: str(self._attempt),
            "TORCHELASTIC_ERROR_FILE": str(self._error_file(rank)),
            "RANK": number,
            "ROLE_RANK": number,
            "WORLD_SIZE": ranks,
            "ROLE_WORLD_SIZE": ranks,
        }

    def read_failure(self, rank: int, code: int) -> GangExited | None:
        """Return the last error that a rank of the gang recorded, or None."""
        path = self._error_file(rank)
        try:
            message = json.loads(path.read_text())["message"]
        except (OSError, ValueError):
            return None
        error, at = " ".join(message["message"].split()), path.stat().st_mtime
        # A record of torchelastic's, by code that a rank calls, has neither field.
        final, deadline = message.get("final", False), message.get("deadline", False)
        return GangExited(self.gang.name, code, error, rank, at, final, deadline)

    def _error_file(self, rank: int) -> Path:
        return self._dir / f"{self.gang.rank_in_role(rank)}.error.json"
