"""The nodes of a run as `launcher.run.run_job` sees them: one `GangHost`, whatever their number. Imports torch.

A run on one node waits for nothing. On several, the other launchers join first; from then on `job.json` names all
nodes.
"""

import os
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType
from typing import Self

from asyncflow.agreement import Identity
from asyncflow.errors import ConfigError
from asyncflow.job import (
    GLOO_INTERFACE,
    LOOPBACK,
    Job,
    Node,
    address_to_listen_on,
    describe_way,
    endpoint,
    own_interface,
    own_name,
)
from launcher.checks.placement import HEAD
from launcher.nodes.head import NodeHead
from launcher.nodes.membership import Membership, needed_devices
from launcher.nodes.options import NodePlace
from launcher.process.gang_hosts import AllHosts
from launcher.process.job_store import JobStore
from launcher.process.run_events import RESUMABLE, Event, Finish


def open_store(place: NodePlace, secret: str) -> JobStore:
    """Start the job store: on loopback for a single node, else where the others reach it; ConfigError: it cannot."""
    host = LOOPBACK if place.count == 1 else address_to_listen_on(place.head_host, place.hints)
    try:
        return JobStore(secret, host, place.head_port)
    except OSError as error:
        raise ConfigError(
            f"--head: cannot listen at {endpoint(host, place.head_port)} ({error.strerror}); choose another port, or "
            f"none"
        ) from error


class RunNodes:
    """All nodes of a run. A context manager: after it, no other launcher waits for this one.

    The constructor starts to admit other launchers; `job` is as it was written, without nodes. `identity`: what must be
    equal on all of them.
    """

    def __init__(
        self,
        job: Job,
        run_dir: Path,
        *,
        store: JobStore,
        place: NodePlace,
        identity: Identity,
        events: "SimpleQueue[Event]",
    ) -> None:
        self.job = job
        self.hosts = AllHosts(events.put)
        self._run_dir = run_dir
        self._count = place.count
        self._events = events
        self._head: NodeHead | None = None
        if place.count > 1:
            members = Membership(place.count, needed_devices(job.gangs, place.count), identity)
            self._head = NodeHead(
                store,
                job.secret,
                members,
                clock=job.clock,
                run_dir=run_dir,
                part_exited=self.hosts.part_exited,
                report=events.put,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._head is not None:
            self._head.end(error)

    def gather(self, timeout_s: float, *, version_bytes: int, say: Callable[[str], None]) -> Finish | None:
        """Wait for all launchers and record where they are; return how the run ends if it cannot begin, else None.

        Args:
            version_bytes: that a weight version takes on the wire, to say how long that will be.

        Raises:
            ConfigError: one cannot take part.
            RoleFailed: not all arrived in time.
        """
        if self._head is None:
            return None
        where = endpoint(self.job.store_host, self.job.store_port)
        say(f"node 0 of {self._count} ({own_name()}): waits for the others at {where}")
        obstacle = self._head.gather(timeout_s, lambda: not self._events.empty())
        if obstacle:
            return Finish(RESUMABLE, obstacle)
        for warning in self._head.clock_warnings():
            say(warning)
        own = Node(HEAD, own_name(), self.job.store_host, self.job.clock)
        network = self._head.choose_network(self.job.networks)
        self.job = self.job.with_changes(nodes=(own, *self._head.other_nodes()), network=network)
        self.job.save(self._run_dir)
        own_way = own_interface(network) if network else None
        named = os.environ.get(GLOO_INTERFACE, "").split(",")[0]  # the user's, or the way to the job store
        say(f"between nodes: {describe_way(named if own_way is None else own_way[0], version_bytes)}")
        self.hosts.add_hosts(self._head.remote_hosts())
        return None

    def check(self) -> None:
        """Check the threads that listen to the other nodes; raises RoleFailed if one died."""
        if self._head is not None:
            self._head.threads.check()

    def finish_run(self, code: int, line: str) -> None:
        """End what is left on other nodes; their launchers print `line` and exit with `code`."""
        if self._head is not None:
            self._head.finish_run(code, line)
