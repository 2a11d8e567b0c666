"""Weights for readers that the run does not wait for: processes outside of it, and the exporter.

    job.json of the run directory -> the job's store and secret -> a channel to the weight agent of this node
    -> the newest version, mapped and checked, as every generator of the run gets it

    with connect_weights("runs/mine", "my-engine") as feed:
        held = None
        while feed.wait_newer(held, timeout_s=600):
            held = feed.load(engine.load_weights, newer_than=held) or held

Reads shared memory of the agent: same host and same user as that. It never writes to a run directory.
"""

import os
import socket
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Self

import torch
import torch.distributed as dist

from asyncflow.errors import ConfigError, TransportError, WeightSyncError
from asyncflow.job import GLOO_INTERFACE, Job, interface_towards, is_loopback
from asyncflow.sealed_store import connect_store
from asyncflow.transport.meeting import Credentials
from asyncflow.transport.server import Connection
from weightsync.messages import Reply
from weightsync.receiver import WeightReceiver
from weightsync.version import Version

AGENT = "weights-0"
_ROLE = "weights"
_LOOK_S = 0.25
"""How often a wait looks whether the run is over (s)."""


class WeightFeed(WeightReceiver):
    """All weights under the trainer's Hugging Face names, in host memory, for a reader outside the rollout.

    It takes no turn in `max_updating`, so that a reader that hangs holds up no generator. Its waits also end, with
    False, when the run does.
    """

    def __init__(
        self, credentials: Credentials, agent: str, name: str, *, over: Callable[[], bool] = lambda: False
    ) -> None:
        """Start watching.

        Args:
            credentials: store and secret.
            agent: this node's weight agent.
            name: of this reader.
            over: whether the run has ended.
        """
        self._over = over
        super().__init__(credentials, agent, name, None, device=torch.device("cpu"), best_effort=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def wait_newer(self, version: Version | None, *, timeout_s: float, stop: threading.Event | None = None) -> bool:
        """Wait until a version newer than `version` is ready for `load`; False: the run is over, or `stop` is set.

        Raises:
            WeightSyncError: there was none within `timeout_s`; says why.
        """
        what = "weights" if version is None else f"weights newer than {version}"
        return self._wait(lambda: self._cache.has_newer(version), what, timeout_s=timeout_s, stop=stop)

    def _wait(self, wanted: Callable[[], bool], what: str, *, timeout_s: float, stop: threading.Event | None) -> bool:
        return self._cache.wait(
            wanted,
            f"{self._name}: {what}",
            timeout_s=timeout_s,
            over=lambda: (stop is not None and stop.is_set()) or self._over(),
        )


def connect_weights(run_dir: Path | str, name: str, *, agent: str = AGENT, timeout_s: float = 10.0) -> WeightFeed:
    """Attach to a running run of this node.

    Args:
        run_dir: of the run.
        name: of this process, for messages.
        agent: the weight agent of this node, `weights-N`.
        timeout_s: for the run and the agent to answer.

    Raises:
        ConfigError: nothing runs there, or the run has no such agent.
        WeightSyncError: the run is over, or its agent does not answer.
    """
    run_dir = Path(run_dir)
    job = Job.load(run_dir)
    agents = [gang.name for gang in job.of_role(_ROLE)]
    if agents and agent not in agents:
        raise ConfigError(f"weights: {run_dir} has no agent {agent!r}; it has {' '.join(agents)}")
    if not is_loopback(job.store_host):
        os.environ.setdefault(GLOO_INTERFACE, interface_towards(job.store_host))
    if not _store_answers(job, timeout_s):
        raise WeightSyncError(f"{name}: the run in {run_dir} is over, although its job.json is still there")
    try:
        store = connect_store(job.store_host, job.store_port, timedelta(seconds=timeout_s))
        credentials = Credentials(store, bytes.fromhex(job.secret), timeout_s)
        Connection(credentials, agent, name, Reply, timeout_s=timeout_s).close()
    except (TransportError, dist.DistError) as error:
        raise WeightSyncError(f"{name}: no weights from {agent} of the run in {run_dir} ({error})") from error
    return WeightFeed(credentials, agent, name, over=lambda: _is_over(run_dir, job))


def _is_over(run_dir: Path, job: Job) -> bool:
    """Whether the run that was attached to is gone; another one may have begun in its directory."""
    try:
        return Job.load(run_dir).secret != job.secret or not _store_answers(job, _LOOK_S)
    except (ConfigError, OSError):
        return True


def _store_answers(job: Job, timeout_s: float) -> bool:
    """Whether a server listens at the store's address. A client of the store would try for long, and print traces."""
    try:
        socket.create_connection((job.store_host, job.store_port), timeout_s).close()
    except OSError:
        return False
    return True
