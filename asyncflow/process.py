"""A process and its kernel: it dies with its parent, keeps freed memory, has other environment variables for a while.

The kernel ends a process with its parent (`prctl(2)`, PR_SET_PDEATHSIG), even while it is stuck in C++, so `kill -9` of
a launcher leaves nothing behind. Every worker and the fork server call `die_with_parent`.
"""

import ctypes
import logging
import os
import resource
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from asyncflow.errors import AsyncFlowError, RoleFailed, one_line

PR_SET_PDEATHSIG = 1
_MOST_DESCRIPTORS = 4096
"""More than a process has open when it starts."""
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
"""What users and schedulers send to end a run. The launcher obeys them; workers ignore them and leave by message."""


def die_with_parent(parent_pid: int | None = None, *, by: signal.Signals = signal.SIGKILL) -> None:
    """Have the kernel send a signal to this process as soon as its parent dies.

    The setting is lost on fork, so each process calls this itself. "Parent" is the *thread* that created the process:
    start children from a thread that lives as long as they should.

    Args:
        parent_pid: the expected parent; when it died before this call, the process ends here. None: the present one.
        by: the signal.
    Raises:
        OSError: the kernel refused.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, by, 0, 0, 0) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"prctl(PR_SET_PDEATHSIG): {os.strerror(code)}")
    if parent_pid is not None and os.getppid() != parent_pid:
        os.kill(os.getpid(), signal.SIGKILL)


def ignore_stop_signals() -> None:
    """Leave stop signals to the launcher, which tells this process when to end. Programs it starts inherit that."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def end_session_with_me() -> None:
    """Lead a session, all of whose processes are killed once this one is gone, however it ended.

    `die_with_parent` reaches children; this also what they start in turn, unless that begins a session of its own.
    Call it before there are threads.
    """
    os.setsid()
    leader = os.getpid()
    end, _ = os.pipe()  # the kernel closes the other one, which no child gets, when this process is gone
    if os.fork():
        os.close(end)
        return
    try:
        ignore_stop_signals()
        os.setsid()
        os.dup2(end, 0)
        os.closerange(3, _MOST_DESCRIPTORS)
        os.read(0, 1)
        for _ in range(3):  # some may have been starting others
            for process in (int(path.name) for path in Path("/proc").glob("[0-9]*")):
                with suppress(OSError):
                    if os.getsid(process) == leader:
                        os.kill(process, signal.SIGKILL)
    finally:
        os._exit(0)


def limit_resources(*, memory_bytes: int, file_bytes: int) -> None:
    """Have the kernel refuse this process, and each that it starts, more memory or longer files than this; 0: no limit.

    Memory is what is allocated (RLIMIT_DATA): no libraries, no shared memory, and nothing that is only reserved, which
    RLIMIT_AS would count. An allocation beyond it fails. A longer file is signal SIGXFSZ, and in Python an `OSError`.
    """
    for what, wanted in ((resource.RLIMIT_DATA, memory_bytes), (resource.RLIMIT_FSIZE, file_bytes)):
        if wanted:
            hard = resource.getrlimit(what)[1]
            resource.setrlimit(what, 2 * (wanted if hard == resource.RLIM_INFINITY else min(wanted, hard),))


@contextmanager
def variables_set(variables: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables; on leaving, those that were there come back. Not thread-safe."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX = -1, -2, -4
"""Parameters of glibc's mallopt(3)."""
_NEVER = -1
_TOP_PAD_BYTES = 1 << 26


def keep_freed_memory() -> None:
    """Keep what the main thread frees for its next allocation, however large it is; for the rest of the process.

    glibc gives blocks above 32 MiB back as soon as they are freed, and the kernel clears every page of the next one at
    its first touch: a pass over a model on the CPU frees and gets its activations and gradients again and again. The
    process stays as large as it ever was; blocks of many sizes leave gaps between them, so that is more than it would
    need. Other C libraries are left as they are.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        for parameter, value in ((_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, _NEVER), (_M_TOP_PAD, _TOP_PAD_BYTES)):
            mallopt(parameter, value)


# The threads that a service cannot do without: if one dies, the service has failed, and says which one and why.
#
#     threads = ServiceThreads("storage-0")
#     threads.start(self._run, name="upkeep")     by the parts of the service
#     threads.wait(stop)                          in the process's main thread: raises, and the process ends
#
# The parent (the launcher, `tq.LocalQueue`) starts the process again. A thread whose error is raised to the waiter for
# its result needs none of this.

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
