"""Finds the run that this node is to take part in: node 0 writes where it is, and the secret, into the run directory.

What lies there may be of a run that is over: then nobody answers, or somebody who does not know the secret, and the
file is read again until it changes. A try that hangs (node 0 is stopped) is waited for, unless another run begins.

    job.json --> try to join, in a thread --> HeadLink | refused | nobody --> again, until the deadline
"""

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from asyncflow.errors import AsyncFlowError, ConfigError, RoleFailed
from asyncflow.job import Job
from launcher.node_messages import FinishRun, Refuse

if TYPE_CHECKING:
    from launcher.node_link import HeadLink

logger = logging.getLogger(__name__)

LOOK_S = 0.25

Join = Callable[[Job, threading.Event], "HeadLink | Refuse | FinishRun"]


@dataclass
class _Try:
    job: Job
    given_up: threading.Event = field(default_factory=threading.Event)
    done: threading.Event = field(default_factory=threading.Event)
    answer: "HeadLink | Refuse | FinishRun | AsyncFlowError | None" = None


class RunSearch:
    """One launcher's way into a run."""

    def __init__(self, run_dir: Path, *, stopped: threading.Event, timeout_s: float) -> None:
        """Args:
        run_dir: of the run; it need not exist yet.
        stopped: the user or the scheduler asked to stop.
        timeout_s: for the run to appear, and to let this node in.
        """
        self._run_dir = run_dir
        self._stopped = stopped
        self._timeout_s = timeout_s
        self._deadline = time.monotonic() + timeout_s
        self._obstacle = f"there is no run in {run_dir}; is it on a file system that all nodes share?"
        self._try: _Try | None = None

    def wait_for_job(self) -> bool:
        """Wait for a `job.json`, perhaps an old one; False: a stop came first.

        Raises:
            RoleFailed: there was none in time.
        """
        while self._read() is None:
            if self._pause():
                return False
        return True

    def find(self, join: Join) -> "HeadLink | FinishRun | None":
        """Join the run; None: a stop came first.

        Args:
            join: see `HeadLink.join`; is called in a thread.

        Raises:
            ConfigError: node 0 refuses this node.
            RoleFailed: no run let it in in time.
        """
        while True:
            job = self._read()
            if self._try is not None and job is not None and job.secret != self._try.job.secret:
                self._try.given_up.set()
                self._try = None
            if self._try is None and job is not None:
                self._begin(job, join)
            if self._pause():
                return None
            answer = self._answer()
            if answer is not None:
                return answer
            if self._try is None:
                self._stopped.wait(LOOK_S)

    def _begin(self, job: Job, join: Join) -> None:
        self._try = _Try(job)
        threading.Thread(target=_run, args=(self._try, join), name="join", daemon=True).start()

    def _answer(self) -> "HeadLink | FinishRun | None":
        """Return what the try brought; None: nothing yet, or nothing but a reason to try again."""
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

    def _pause(self) -> bool:
        """Wait a moment; returns whether a stop came."""
        if time.monotonic() > self._deadline:
            raise RoleFailed(f"no run to take part in within {self._timeout_s:g} s: {self._obstacle}")
        done = self._try.done if self._try is not None else None
        if done is not None:
            done.wait(LOOK_S)
        elif self._stopped.wait(LOOK_S):
            return True
        return self._stopped.is_set()

    def _read(self) -> Job | None:
        try:
            return Job.load(self._run_dir)
        except (ConfigError, OSError, ValueError, TypeError, KeyError):  # none yet, or one of another version
            return None


def _run(one: _Try, join: Join) -> None:
    try:
        one.answer = join(one.job, one.given_up)
    except AsyncFlowError as error:
        one.answer = error
    except Exception:  # the boundary of a thread: another try may do better
        logger.exception("joining the run failed")
    finally:
        one.done.set()
