"""The `GangHost` of this node: starts, ends and joins gangs, attempt after attempt.

Owned by one thread, which is the launcher's main one: the fork server lives as long as the thread that started it.
Imports torch, so it is imported after the config is accepted.
"""

import logging
import time
from collections.abc import Callable
from pathlib import Path

from asyncflow.job import GangSpec
from launcher import preload
from launcher.gang import Gang
from launcher.job_store import JobStoreClient
from launcher.run_events import GangExited

logger = logging.getLogger(__name__)


class LocalGangs:
    """Every gang has one living attempt at most."""

    def __init__(
        self,
        *,
        entrypoint: str,
        run_dir: Path,
        store: JobStoreClient,
        log_file: Path,
        exited: Callable[[GangExited], None],
        node: int = 0,
    ) -> None:
        """Args:
        entrypoint: `module:function` that every rank runs as `function(run_dir, gang)`.
        run_dir: of the run.
        store: of the job.
        log_file: of the fork server, should it have to be started again.
        exited: is called, by other threads, when this node's ranks of a gang are gone.
        node: this node.
        """
        self._entrypoint = entrypoint
        self._run_dir = run_dir
        self._store = store
        self._log_file = log_file
        self._exited = exited
        self._node = node
        self._gangs: dict[str, Gang] = {}

    def start(self, gang: GangSpec, attempt: int) -> None:
        """Start this node's ranks; returns at once. An earlier attempt is gone."""
        if not preload.is_running():
            logger.warning("the fork server is gone; starting another")
            preload.stop()
            preload.start(self._log_file)
        self._gangs[gang.name] = Gang(
            gang,
            attempt,
            entrypoint=self._entrypoint,
            run_dir=self._run_dir,
            store=self._store,
            exited=self._exited,
            node=self._node,
        )
        self._gangs[gang.name].start()

    def kill(self, gang: str) -> None:
        """SIGKILL all ranks, also those that are only about to start; idempotent."""
        if gang in self._gangs:
            self._gangs[gang].kill()

    def dump_stacks(self) -> None:
        """Have every process write the stacks of its threads into its log."""
        for gang in self._gangs.values():
            gang.dump_stacks()

    def close(self, timeout_s: float) -> None:
        """Kill what is left, end the fork server, and wait for the threads."""
        for gang in self._gangs.values():
            gang.kill()
        preload.stop()
        deadline = time.monotonic() + timeout_s
        for name, gang in self._gangs.items():
            if not gang.join(max(0.0, deadline - time.monotonic())):
                logger.error("the thread of gang %s did not end", name)
