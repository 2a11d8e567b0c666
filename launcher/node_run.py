"""The command on any node but node 0: finds the run, joins it, does its part, ends with its exit code.

NodeRun.start --> job.json --> fork server, import of torch --> join --> NodeFollower.run --> last line, exit code
"""

import contextlib
import importlib.metadata
import os
import secrets
import sys
import threading
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING

from asyncflow.errors import ConfigError, RoleFailed
from asyncflow.job import Job
from launcher import preload
from launcher.devices import Devices
from launcher.launcher_process import keep_torch_off_the_terminal, launcher_log, logging_to, stop_signals
from launcher.node_follower import End, Inbound, NodeFollower
from launcher.node_messages import FinishRun, Hello
from launcher.node_options import NodePlace
from launcher.node_roll import own_name
from launcher.node_search import RunSearch
from launcher.progress import print_line
from launcher.run_events import FAILED, RESUMABLE, StopRequested
from launcher.worker_entry import ENTRYPOINT
from workers.config import LauncherConfig

if TYPE_CHECKING:
    from launcher.node_link import HeadLink

COMPLAINT_TIMEOUT_S = 60.0
"""How long a node that cannot take part tries to tell node 0, which may have ended with the same complaint (s)."""
_CLOSE_TIMEOUT_S = 2.0


@dataclass(frozen=True)
class NodeRun:
    """A command on node 1, 2, ... whose arguments were checked.

    Attributes:
        place: which node this is.
        run_dir: of the run, the same on all nodes.
        settings: of the launcher.
        devices: that this node has.
        complaint: why this node cannot take part; node 0 is told.
        entrypoint: `module:function` that every worker runs as `function(run_dir, gang)`.
    """

    place: NodePlace
    run_dir: Path
    settings: LauncherConfig = field(default_factory=LauncherConfig)
    devices: Devices = field(default_factory=lambda: Devices("cpu"))
    complaint: str = ""
    entrypoint: str = ENTRYPOINT

    def start(self) -> int:
        """Take part in the run; call it from the main thread. Returns the exit code of the whole run.

        Raises:
            ConfigError: this node cannot take part.
            RoleFailed: no run let it in in time.
        """
        inbox: SimpleQueue[Inbound] = SimpleQueue()
        stopped = threading.Event()

        def stop(count: int) -> None:
            inbox.put(StopRequested(count))
            stopped.set()

        with stop_signals(stop), contextlib.ExitStack() as stack:
            try:
                end, ended = self._take_part(inbox, stopped, stack)
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
        """Return how it ended, and whether all threads did."""
        timeout_s = COMPLAINT_TIMEOUT_S if self.complaint else self.settings.start_timeout_s
        hello = self._hello()
        state = f"cannot take part: {self.complaint}" if self.complaint else f"takes part in {self.run_dir}"
        print_line(f"node {self.place.rank} of {self.place.count} ({hello.host}): {state}")
        search = RunSearch(self.run_dir, timeout_s=timeout_s, stopped=stopped)
        if not search.wait_for_job():
            return End(RESUMABLE, "stopped before the run began"), True
        log_file = launcher_log(self.run_dir, self.place.rank)
        stack.enter_context(logging_to(log_file))
        stack.enter_context(preload.serving(log_file, threads=self.settings.threads_per_worker))
        from launcher.node_link import HeadLink  # imports torch

        keep_torch_off_the_terminal()
        link = search.find(lambda job, given_up: HeadLink.join(job, hello, inbox, given_up))
        match link:
            case None:
                return End(RESUMABLE, "stopped before the run began"), True
            case FinishRun(code=code, line=line):
                return End(code, line), True
        return self._follow(link, inbox, log_file)

    def _follow(self, link: "HeadLink", inbox: "SimpleQueue[Inbound]", log_file: Path) -> tuple[End, bool]:
        from launcher.local_gangs import LocalGangs  # imports torch

        def load_job() -> Job:
            job = Job.load(self.run_dir)
            if job.secret != link.job.secret:
                raise ConfigError(f"run directory: another run began in {self.run_dir}")
            return job

        host = LocalGangs(
            entrypoint=self.entrypoint,
            run_dir=self.run_dir,
            store=link.store,
            log_file=log_file,
            exited=inbox.put,
            node=self.place.rank,
        )
        end = NodeFollower(self.place.rank, link, host, inbox, load_job=load_job).run()
        return end, link.close(_CLOSE_TIMEOUT_S)

    def _hello(self) -> Hello:
        return Hello(
            rank=self.place.rank,
            count=self.place.count,
            launcher=secrets.token_hex(8),
            host=own_name(),
            address="",
            version=importlib.metadata.version("asyncflow-rl"),
            device=self.devices.kind,
            num_devices=self.devices.count,
            complaint=self.complaint,
        )


def _leave_at_once(code: int) -> None:
    """End without waiting for threads that hang in a store whose host is stopped."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
