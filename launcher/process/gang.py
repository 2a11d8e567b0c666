"""One gang's ranks on this node under torchrun's elastic agent, in a thread of the launcher.

`launcher.process.gang_hosts` starts and kills gangs; nothing else touches their processes. What happens to them
becomes events of the supervisor. Imports torch, so import it only after the config is accepted.

    Gang.start -> thread: GangAgent.run -> fork server forks ranks
                          polls every MONITOR_INTERVAL_S; all returned, or one died or was stopped -> GangExited

A gang starts once; a restart is another `Gang` with the next attempt.
"""

import contextlib
import functools
import inspect
import json
import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from torch._C._distributed_c10d import HashStore
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs
from torch.distributed.elastic.rendezvous.api import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

from asyncflow.job import GangSpec, error_in
from asyncflow.run_files import LOGS
from launcher.process import fork_server
from launcher.process.job_store import JobStoreClient
from launcher.process.run_events import FAILED, GangExited
from launcher.process.worker_entry import ATTEMPT_VARIABLE, LOG_VARIABLE, STACKS_SIGNAL, enter

MONITOR_INTERVAL_S = 0.2
KILL_TIMEOUT_S = 5.0
STOPPED_S = 3.0
"""A process that a signal has stopped for this long is killed (s)."""
_UNKNOWN = 255
"""The exit code that `multiprocessing` reports for a process whose fork server is gone."""

logger = logging.getLogger(__name__)


class Gang:
    """The processes of one gang on this node, and the thread that watches them.

    Args:
        spec: of the whole gang, including its ranks on other nodes.
        attempt: counts the gang's starts from 0.
        entrypoint: `module:function` that every rank runs as `function(run_dir, gang)`.
        exited: called by the gang's thread when all ranks are gone.
        node: this node; only its ranks are started.
    """

    def __init__(
        self,
        spec: GangSpec,
        attempt: int = 0,
        *,
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
        if self._killed.is_set():  # the fork server may be gone: asking it would start a new one
            return GangExited(spec.name, -signal.SIGKILL, "killed before it started", at=time.time())
        self._agent = agent = GangAgent(
            WorkerSpec(
                role=spec.role,
                # Only this node's ranks: torchrun's rendezvous over several agents blocks in calls that cannot be
                # interrupted.
                local_world_size=len(self._ranks),
                rdzv_handler=OneNodeRendezvous(self._store),
                entrypoint=enter,
                args=(self._entrypoint, str(self._run_dir), spec.name),
                max_restarts=0,
                monitor_interval=MONITOR_INTERVAL_S,
            ),
            RankLogs(spec, self._ranks, self._attempt, self._run_dir),
            gang=spec.name,
            ranks=self._ranks,
            killed=self._killed,
            last_words=functools.partial(self._store.last_words, spec.name),
        )
        try:
            result = agent.run()
        except (OSError, EOFError):
            if not fork_server.has_died(agent.fork_server):
                raise
            logger.exception("gang %s: the fork server died while it was asked for processes", spec.name)
            return _without_server(spec.name, self._ranks.start, agent.fork_server)
        if result is not None and result.state is WorkerState.SUCCEEDED:
            return GangExited(spec.name, 0, at=time.time())
        gave_up = "the elastic agent gave up; see logs/launcher*.log"
        return agent.failure or GangExited(spec.name, 1, gave_up, self._ranks.start, time.time())


class GangAgent(LocalElasticAgent):
    """torchrun's agent, modified to name the rank that failed first and to kill the others at once.

    The stock agent sends SIGTERM and waits 30 s; our workers ignore SIGTERM (a scheduler sends it to every process).
    """

    def __init__(
        self,
        spec: WorkerSpec,
        logs: "RankLogs",
        *,
        gang: str,
        ranks: range,
        killed: threading.Event,
        last_words: Callable[[int], str | None],
    ) -> None:
        super().__init__(spec, logs, start_method="forkserver", exit_barrier_timeout=KILL_TIMEOUT_S)
        self.fork_server = fork_server.server_pid()
        self.failure: GangExited | None = None
        """Of the rank that failed first."""
        self._gang = gang
        self._ranks = ranks
        self._logs = logs
        self._killed = killed
        self._last_words = last_words
        self._stopped_since: dict[int, float] = {}

    def send(self, number: signal.Signals) -> None:
        """Send a signal to every live rank. Any thread may call it."""
        for process in self._rank_processes():
            with contextlib.suppress(ProcessLookupError):
                if process.pid is not None:
                    os.kill(process.pid, number)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        fork_server.let_go_on()  # any gang's poll does this for all gangs that wait to start
        # Only this thread polls the processes: multiprocessing reads an exit code once, without a lock.
        if self._killed.is_set():
            self._kill_all()
        # A rank that returns waits for its agent before it exits, so one that is gone by now died, even with code 0.
        codes = {rank: process.exitcode for rank, process in self._by_rank()}
        dead = [self._describe_failure(rank, code) for rank, code in codes.items() if code is not None]
        dead += self._find_stopped_ranks()
        if not dead:
            result: RunResult = super()._monitor_workers(worker_group)
            return result
        self.failure = min(dead, key=GangExited.failure_precedence)
        self._kill_all()
        return RunResult(state=WorkerState.FAILED)

    def _find_stopped_ranks(self) -> list[GangExited]:
        """Return the ranks that have been stopped (SIGSTOP) for too long: to their peers they are as good as dead."""
        now = time.monotonic()
        # From /proc, not from missing heartbeats: a process whose threads wait for the GIL would look dead too.
        stopped = [rank for rank, process in self._by_rank() if fork_server.is_stopped(process.pid)]
        self._stopped_since = {rank: self._stopped_since.get(rank, now) for rank in stopped}
        return [
            self._make_exited(rank, -signal.SIGSTOP, f"stopped by a signal for {STOPPED_S:g} s; killed")
            for rank, since in self._stopped_since.items()
            if now - since > STOPPED_S
        ]

    def _kill_all(self) -> None:
        processes = self._rank_processes()
        for process in processes:
            process.kill()
        for process in processes:
            process.join(KILL_TIMEOUT_S)

    def _shutdown(self, *_asked: object, **_named: object) -> None:
        # Whatever signal the agent asks for: workers ignore SIGTERM.
        inherited = super()._shutdown
        if "timeout" in inspect.signature(inherited).parameters:
            inherited(signal.SIGKILL, timeout=int(KILL_TIMEOUT_S))
        else:  # before torch 2.12
            inherited(signal.SIGKILL)

    def _describe_failure(self, rank: int, code: int) -> GangExited:
        recorded = self._logs.read_failure(rank, code)
        if recorded is not None:
            return recorded
        if code < 0:
            return self._make_exited(rank, code, f"ended by {signal.Signals(-code).name}")
        if code == _UNKNOWN and fork_server.has_died(self.fork_server):
            return _without_server(self._gang, rank, self.fork_server)
        if error := error_in(self._last_words(rank)):  # on a full disk it cannot write its error file
            return self._make_exited(rank, code or 1, error)
        return self._make_exited(rank, code or 1, f"exited with code {code} without finishing")

    def _make_exited(self, rank: int, code: int, error: str) -> GangExited:
        return GangExited(self._gang, code, error, rank, time.time())

    def _by_rank(self) -> list[tuple[int, BaseProcess]]:
        return list(zip(self._ranks, self._rank_processes(), strict=False))  # empty before the start

    def _rank_processes(self) -> list[BaseProcess]:
        context: Any = self._pcontext  # MultiprocessContext; `_pc` exists once its processes do
        return list(context._pc.processes) if context is not None and context._pc is not None else []


def _without_server(gang: str, rank: int, server: int) -> GangExited:
    """Return the end of a gang whose fork server is gone."""
    death = fork_server.why_died(server)
    code = FAILED if death.raised else -signal.SIGKILL
    return GangExited(gang, code, death.error, rank, time.time(), final=death.final)


class OneNodeRendezvous(RendezvousHandler):
    """Rendezvous of a gang's only agent on this node. It meets no other agent, so a store in this process suffices."""

    def __init__(self, store: JobStoreClient) -> None:
        self._endpoint = RendezvousStoreInfo(store.host, store.port)

    def get_backend(self) -> str:
        return "asyncflow"

    @property
    def use_agent_store(self) -> bool:
        return True

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


class RankLogs(LogsSpecs):
    """`logs/ROLE/RANK.log` with a rank's stdout and stderr, appended to; RANK counts over all gangs of the role.

    It also tells each rank its place in the whole gang, since an agent knows only the ranks of its node.
    `worker_entry` opens the log: torchelastic's own redirection truncates, and cannot merge the two streams.
    """

    def __init__(self, gang: GangSpec, ranks: range, attempt: int, run_dir: Path) -> None:
        super().__init__(str(run_dir / LOGS))
        self._gang = gang
        self._ranks = ranks
        self._attempt = attempt
        self._dir = run_dir / LOGS / gang.role

    @property
    def root_log_dir(self) -> str:
        return str(self._root_log_dir)

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        self._dir.mkdir(parents=True, exist_ok=True)
        errors = {}
        for local_rank, variables in envs.items():
            rank = self._ranks[local_rank]
            # An earlier attempt's error must not count for this one.
            self._error_file(rank).unlink(missing_ok=True)
            errors[local_rank] = str(self._error_file(rank))
            variables[LOG_VARIABLE] = str(self._dir / f"{self._rank_in_role(rank)}.log")
            variables[ATTEMPT_VARIABLE] = str(self._attempt)
            variables["TORCHELASTIC_ERROR_FILE"] = errors[local_rank]
            # Global ranks come from the placement; torchelastic set this node's.
            variables["RANK"] = variables["ROLE_RANK"] = str(rank)
            variables["WORLD_SIZE"] = variables["ROLE_WORLD_SIZE"] = str(self._gang.num_ranks)
        return LogsDest(dict.fromkeys(envs, ""), dict.fromkeys(envs, ""), {}, {}, errors)

    def read_failure(self, rank: int, code: int) -> GangExited | None:
        """Return the last error that a rank of the gang recorded, or None."""
        path = self._error_file(rank)
        try:
            message = json.loads(path.read_text())["message"]
        except (OSError, ValueError):
            return None
        error, at = " ".join(message["message"].split()), path.stat().st_mtime
        # torchelastic's own record, of a rank that failed before it could write ours, has neither field.
        final, deadline = message.get("final", False), message.get("deadline", False)
        return GangExited(self._gang.name, code, error, rank, at, final, deadline)

    def _rank_in_role(self, rank: int) -> int:
        return self._gang.index * self._gang.num_ranks + rank

    def _error_file(self, rank: int) -> Path:
        return self._dir / f"{self._rank_in_role(rank)}.error.json"
