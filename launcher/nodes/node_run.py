"""The command on every node but node 0: finds the run, joins it, does its part, ends with the run's exit code.

NodeRun.start --> job.json --> fork server, import of torch --> join --> NodeFollower.follow_head --> exit code
"""

import contextlib
import logging
import os
import secrets
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Protocol

from asyncflow.agreement import Identity, software
from asyncflow.clock import HostClock
from asyncflow.errors import AsyncFlowError, ConfigError, RoleFailed
from asyncflow.job import GangSpec, Job, own_name
from launcher.checks.placement import Devices
from launcher.nodes.node_messages import (
    DumpStacks,
    FinishRun,
    FromNode,
    Hello,
    Inbound,
    KillPart,
    Left,
    PartExited,
    Refuse,
    StartPart,
    StopAsked,
)
from launcher.nodes.options import NodePlace
from launcher.process.fork_server import ForkServers, serving
from launcher.process.gang_hosts import GangHost, LocalGangs
from launcher.process.launcher_process import keep_torch_off_the_terminal, launcher_log, logging_to, stop_signals
from launcher.process.progress import print_line
from launcher.process.run_events import FAILED, RESUMABLE, GangExited, StopRequested
from launcher.process.worker_entry import ENTRYPOINT
from workers.settings.run import LauncherConfig

if TYPE_CHECKING:
    from launcher.nodes.link import HeadLink


# The launcher of node 1, 2, ... after it joined: carries out the orders of node 0 and reports what happens here.
#
# It decides nothing. However it ends (by an order, or because node 0 is lost), it leaves no process behind.

_LOOK_S = 0.25
"""How often it checks that node 0 is there, and whether the job that an order refers to is visible (s)."""
KILL_TIMEOUT_S = 5.0
SIGHT_TIMEOUT_S = 60.0
"""How long a shared file system may take to show what node 0 wrote (s); NFS takes up to a minute."""

logger = logging.getLogger(__name__)


class Link(Protocol):
    """The connection to node 0."""

    clock: HostClock

    def send(self, event: FromNode) -> None: ...
    def lost(self) -> str: ...


@dataclass(frozen=True)
class End:
    """How this launcher ends: exit code, and the last line for the user."""

    code: int
    line: str


class NodeFollower:
    """One node's part of the run.

    Args:
        host: starts ranks on this node.
        inbox: orders of node 0, ends of ranks here (`GangExited`), signals (`StopRequested`).
        load_job: reads `job.json`.
        now: monotonic time (s).
    """

    def __init__(
        self,
        node: int,
        link: Link,
        host: GangHost,
        inbox: "SimpleQueue[Inbound]",
        *,
        load_job: Callable[[], Job],
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._node = node
        self._link = link
        self._host = host
        self._inbox = inbox
        self._load_job = load_job
        self._now = now
        self._unseen: dict[str, tuple[StartPart, float]] = {}

    def follow_head(self) -> End:
        """Follow node 0 until the run ends or node 0 is lost; on return no process started here is left."""
        try:
            while True:
                try:
                    end = self._handle_event(self._inbox.get(timeout=_LOOK_S))
                except Empty:
                    end = self._check_head()
                if end is not None:
                    return end
        finally:
            self._host.close(KILL_TIMEOUT_S)
            self._link.send(Left())

    def _handle_event(self, event: Inbound) -> End | None:
        match event:
            case StartPart():
                self._unseen[event.gang] = (event, self._now() + SIGHT_TIMEOUT_S)
                self._start_seen()
            case KillPart(gang=gang):
                # Not started yet: its end is reported all the same, because node 0 waits for it.
                unseen = self._unseen.pop(gang, None)
                if unseen is not None:
                    self._never_started(unseen[0], "killed before it started")
                self._host.kill(gang)
            case DumpStacks():
                self._host.dump_stacks()
            case FinishRun(code=code, line=line):
                return End(code, line)
            case GangExited():
                self._link.send(self._to_part_exited(event))
            case StopRequested(count=count):
                self._link.send(StopAsked(count))
            case _:
                logger.warning("%s was not expected", event)
        return None

    def _check_head(self) -> End | None:
        self._start_seen()
        reason = self._link.lost()
        if not reason:
            return None
        line = f"node 0 is lost ({reason}); node {self._node} ended its processes. Continue the run with --resume"
        return End(RESUMABLE, line)

    def _start_seen(self) -> None:
        """Start the gangs whose `job.json` is visible here; a shared file system may show it late."""
        if not self._unseen:
            return
        try:
            job = self._load_job()
        except (ConfigError, OSError, ValueError) as error:
            logger.info("%s", error)
            job = None
        for name, (order, deadline) in list(self._unseen.items()):
            if job is not None and job.revision >= order.revision:
                del self._unseen[name]
                self._host.start(job.gang(name), order.attempt)
            elif self._now() > deadline:
                del self._unseen[name]
                self._never_started(order, f"node {self._node} does not see the job.json that node 0 wrote")

    def _never_started(self, order: StartPart, error: str) -> None:
        exited = GangExited(order.gang, FAILED, error, at=time.time())
        self._link.send(self._to_part_exited(exited))

    def _to_part_exited(self, exited: GangExited) -> PartExited:
        # Convert this host's wall clock to node 0's time.
        at = exited.at - (time.time() - self._link.clock.now())
        return PartExited(replace(exited, at=at))


COMPLAINT_TIMEOUT_S = 60.0
"""How long a node that cannot take part tries to tell node 0, which may have ended with the same complaint (s)."""
_CLOSE_TIMEOUT_S = 2.0

Join = Callable[[Job, threading.Event], "HeadLink | Refuse | FinishRun"]


@dataclass(frozen=True)
class NodeRun:
    """A command on node 1, 2, ... whose arguments were checked.

    Attributes:
        check_gangs: checks what the processes of this node need, once the placement is known, and returns what must be
            equal on all nodes; raises ConfigError.
        complaint: why this node cannot take part; node 0 is told. "": it can.
        entrypoint: `module:function` that every worker runs as `function(run_dir, gang)`.
    """

    place: NodePlace
    run_dir: Path
    settings: LauncherConfig = field(default_factory=LauncherConfig)
    devices: Devices = field(default_factory=lambda: Devices("cpu"))
    check_gangs: Callable[[Sequence[GangSpec]], Identity] = lambda gangs: software()
    complaint: str = ""
    entrypoint: str = ENTRYPOINT

    def start(self) -> int:
        """Take part in the run; return the exit code of the whole run. Call it from the main thread.

        Raises:
            ConfigError: this node cannot take part.
            RoleFailed: no run admitted this node in time.
        """
        inbox: SimpleQueue[Inbound] = SimpleQueue()
        stopped = threading.Event()

        def stop(count: int) -> None:
            inbox.put(StopRequested(count))
            stopped.set()

        with stop_signals(stop), contextlib.ExitStack() as stack:
            try:
                end, ended = self._take_part(inbox, stopped, stack)
            # A node with a complaint reports that, not that nobody answered.
            except RoleFailed:
                if not self.complaint:
                    raise
        if self.complaint:
            raise ConfigError(self.complaint)
        print_line(end.line, err=end.code == FAILED)
        if not ended:
            _leave_at_once(end.code)
        return end.code

    def _take_part(
        self, inbox: "SimpleQueue[Inbound]", stopped: threading.Event, stack: contextlib.ExitStack
    ) -> tuple[End, bool]:
        """Return how it ended, and whether all of its threads ended."""
        timeout_s = COMPLAINT_TIMEOUT_S if self.complaint else self.settings.start_timeout_s
        launcher = secrets.token_hex(8)  # the same in every attempt
        state = f"cannot take part: {self.complaint}" if self.complaint else f"takes part in {self.run_dir}"
        print_line(f"node {self.place.rank} of {self.place.count} ({own_name()}): {state}")
        search = RunSearch(self.run_dir, timeout_s=timeout_s, stopped=stopped)
        if not search.wait_for_job():
            return End(RESUMABLE, "stopped before the run began"), True
        log_file = launcher_log(self.run_dir, self.place.rank)
        stack.enter_context(logging_to(log_file, self.settings.log_format, self.place.rank))
        servers = stack.enter_context(serving(log_file, threads=self.settings.threads_per_worker))
        servers.say = lambda line: print_line(f"warning: node {self.place.rank}: {line}")
        from launcher.nodes.link import HeadLink  # imports torch

        keep_torch_off_the_terminal()
        hellos: dict[tuple[GangSpec, ...], Hello] = {}

        def join(job: Job, given_up: threading.Event) -> "HeadLink | Refuse | FinishRun":
            if job.gangs not in hellos:  # asked again and again until node 0 answers
                hellos[job.gangs] = self._make_hello(job, launcher)
            return HeadLink.join(job, hellos[job.gangs], inbox, given_up)

        link = search.find_run(join)
        match link:
            case None:
                return End(RESUMABLE, "stopped before the run began"), True
            case FinishRun(code=code, line=line):
                return End(code, line), True
        return self._follow_run(link, inbox, servers)

    def _follow_run(self, link: "HeadLink", inbox: "SimpleQueue[Inbound]", servers: ForkServers) -> tuple[End, bool]:
        def load_job() -> Job:
            job = Job.load(self.run_dir)
            if job.secret != link.job.secret:
                raise ConfigError(
                    f"run directory: another run began in {self.run_dir}; give each run one of its own (--run-dir)"
                )
            return job

        host = LocalGangs(
            entrypoint=self.entrypoint,
            run_dir=self.run_dir,
            store=link.store,
            servers=servers,
            pythons=self.settings.interpreters(self.place.rank, own_name()),
            exited=inbox.put,
            node=self.place.rank,
        )
        end = NodeFollower(self.place.rank, link, host, inbox, load_job=load_job).follow_head()
        return end, link.close(_CLOSE_TIMEOUT_S)

    def _make_hello(self, job: Job, launcher: str) -> Hello:
        complaint, identity = self.complaint, software()
        try:
            identity = identity if complaint else self.check_gangs(job.gangs)
        except ConfigError as error:
            complaint = str(error)
        return Hello(
            rank=self.place.rank,
            count=self.place.count,
            launcher=launcher,
            host=own_name(),
            address="",
            identity=dict(identity),
            device=self.devices.kind,
            num_devices=self.devices.count,
            complaint=complaint,
        )


@dataclass
class _Try:
    """One attempt to join, in its own thread."""

    job: Job
    given_up: threading.Event = field(default_factory=threading.Event)
    done: threading.Event = field(default_factory=threading.Event)
    answer: "HeadLink | Refuse | FinishRun | AsyncFlowError | None" = None


class RunSearch:
    """Finds the run that this node is to take part in.

    Node 0 writes its address and the secret into `job.json` in the run directory. A file there may belong to a run
    that is over: then nothing answers, or something that does not know the secret, and the file is read again until it
    changes. An attempt that hangs (node 0 is stopped) is waited for, unless another run begins.

        job.json --> try to join, in a thread --> HeadLink | refused | no answer --> again, until the deadline

    Args:
        run_dir: need not exist yet.
        stopped: set when the user or the scheduler asks to stop.
        timeout_s: for the run to appear and to admit this node (s).
    """

    def __init__(self, run_dir: Path, *, stopped: threading.Event, timeout_s: float) -> None:
        self._run_dir = run_dir
        self._stopped = stopped
        self._timeout_s = timeout_s
        self._deadline = time.monotonic() + timeout_s
        self._obstacle = f"there is no run in {run_dir}; is it on a file system that all nodes share?"
        self._try: _Try | None = None

    def wait_for_job(self) -> bool:
        """Wait for any `job.json`, even an old one; False: a stop came first.

        Raises:
            RoleFailed: none appeared in time.
        """
        while self._read_job() is None:
            if self._wait_or_stop():
                return False
        return True

    def find_run(self, join: Join) -> "HeadLink | FinishRun | None":
        """Join the run; None: a stop came first.

        Args:
            join: see `HeadLink.join`; called in a thread.

        Raises:
            ConfigError: node 0 refuses this node.
            RoleFailed: no run admitted this node in time.
        """
        while True:
            job = self._read_job()
            if self._try is not None and job is not None and job.secret != self._try.job.secret:
                # Another run began: abandon the attempt, which may hang in the old one.
                self._try.given_up.set()
                self._try = None
            if self._try is None and job is not None:
                self._start_attempt(job, join)
            if self._wait_or_stop():
                return None
            answer = self._take_answer()
            if answer is not None:
                return answer
            if self._try is None:
                self._stopped.wait(_LOOK_S)

    def _start_attempt(self, job: Job, join: Join) -> None:
        # In a thread, because joining hangs while node 0's host is stopped.
        self._try = _Try(job)
        threading.Thread(target=_join, args=(self._try, join), name="join", daemon=True).start()

    def _take_answer(self) -> "HeadLink | FinishRun | None":
        """Return the attempt's result; None: none yet, or only a reason to try again."""
        if self._try is None or not self._try.done.is_set():
            return None
        answer, self._try = self._try.answer, None
        match answer:
            case Refuse(reason=reason, later=False):
                raise ConfigError(reason)
            case Refuse(reason=reason):
                self._obstacle = reason
            case AsyncFlowError():
                self._obstacle = str(answer)
            case None:
                self._obstacle = "joining it failed; see the launcher's log"
            case _:
                return answer
        return None

    def _wait_or_stop(self) -> bool:
        """Wait a moment; return whether a stop came."""
        if time.monotonic() > self._deadline:
            raise RoleFailed(f"no run to take part in within {self._timeout_s:g} s: {self._obstacle}")
        done = self._try.done if self._try is not None else None
        if done is not None:
            done.wait(_LOOK_S)
        elif self._stopped.wait(_LOOK_S):
            return True
        return self._stopped.is_set()

    def _read_job(self) -> Job | None:
        try:
            return Job.load(self._run_dir)
        except (ConfigError, OSError, ValueError, TypeError, KeyError):  # none yet, or of another version
            return None


def _join(one: _Try, join: Join) -> None:
    try:
        one.answer = join(one.job, one.given_up)
    except AsyncFlowError as error:
        one.answer = error
    except Exception:  # thread boundary: another attempt may succeed
        logger.exception("joining the run failed")
    finally:
        one.done.set()


def _leave_at_once(code: int) -> None:
    # Not sys.exit: it would wait for threads that hang in a store whose host is stopped.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
