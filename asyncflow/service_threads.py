"""The threads that a service cannot do without: if one dies, the service has failed, and says which one and why.

    threads = ServiceThreads("storage-0")
    threads.start(self._run, name="upkeep")     by the parts of the service
    threads.wait(stop)                          in the process's main thread: raises, and the process ends

The parent (the launcher, `tq.LocalQueue`) starts the process again. A thread whose error is raised to the waiter for
its result needs none of this.
"""

import logging
import threading
from collections.abc import Callable

from asyncflow.errors import AsyncFlowError, RoleFailed, one_line

logger = logging.getLogger(__name__)

_LOOK_S = 0.2


class ServiceThreads:
    """Owned by a service. Thread-safe."""

    def __init__(self, service: str) -> None:
        """Args:
        service: its name, for messages.
        """
        self.failed = threading.Event()
        """Set as soon as a thread has died."""
        self._service = service
        self._failure: AsyncFlowError | None = None
        self._closed = False

    @property
    def failure(self) -> AsyncFlowError | None:
        """Which thread died first, and why; None: all live."""
        return self._failure

    def start(self, work: Callable[..., None], *arguments: object, name: str) -> threading.Thread:
        """Start a daemon thread that does `work`; it must not raise."""
        thread = threading.Thread(target=self._run, args=(name, work, *arguments), name=name, daemon=True)
        thread.start()
        return thread

    def fail(self, name: str, error: Exception) -> None:
        """Thread `name` died of `error`, or has lost a part of its work to it."""
        if self._closed:
            logger.info("%s: thread %s died while the service closed: %s", self._service, name, one_line(error))
            return
        logger.error("%s: thread %s died", self._service, name, exc_info=error)
        if self._failure is None:
            self._failure = _failure(f"{self._service}: thread {name} died", error)
            self.failed.set()

    def check(self) -> None:
        """Raise what a thread died of.

        Raises:
            AsyncFlowError: see `failure`.
        """
        if self._failure is not None:
            raise self._failure

    def wait(self, stop: threading.Event) -> None:
        """Wait until `stop` is set, or a thread dies.

        Raises:
            AsyncFlowError: see `failure`.
        """
        while not stop.wait(_LOOK_S):
            self.check()

    def close(self) -> None:
        """The service closes: what its threads raise from now on fails nothing. Idempotent."""
        self._closed = True

    def _run(self, name: str, work: Callable[..., None], *arguments: object) -> None:
        try:
            work(*arguments)
        except Exception as error:  # noqa: BLE001 - the boundary of a thread
            self.fail(name, error)


def _failure(what: str, error: Exception) -> AsyncFlowError:
    """Return an error of a kind that the supervisor knows, with the cause."""
    if isinstance(error, AsyncFlowError) and error.final:
        return error
    failure = RoleFailed(f"{what}: {error if isinstance(error, AsyncFlowError) else one_line(error)}")
    failure.__cause__ = error
    return failure
