"""A process and its kernel: dying with the parent, keeping freed memory, setting environment variables for a while.

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
# More descriptors than a process has open when it starts.
_MOST_DESCRIPTORS = 4096
# What `asyncflow view --control` sends a launcher: save a checkpoint, admit no more steps, admit steps again.
SAVE_SIGNAL, PAUSE_SIGNAL, RESUME_SIGNAL = signal.SIGRTMIN + 1, signal.SIGRTMIN + 2, signal.SIGRTMIN + 3
# What users and schedulers send to end a run. The launcher obeys them; workers ignore them and leave by message.
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)


def die_with_parent(parent_pid: int | None = None, *, by: signal.Signals = signal.SIGKILL) -> None:
    """Make the kernel send a signal to this process as soon as its parent dies.

    The setting is lost on fork, so each process calls this itself. The "parent" is the *thread* that created the
    process: start children from a thread that lives as long as they should.

    Args:
        parent_pid: the expected parent; None: the present one.

    Raises:
        OSError: the kernel refused.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, by, 0, 0, 0) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"prctl(PR_SET_PDEATHSIG): {os.strerror(code)}")
    # The parent died before the call, so no signal will come.
    if parent_pid is not None and os.getppid() != parent_pid:
        os.kill(os.getpid(), signal.SIGKILL)


def ignore_stop_signals() -> None:
    """Leave stop signals to the launcher, which tells this process when to end. Child processes inherit this."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def end_session_with_me() -> None:
    """Lead a session whose processes are all killed once this one is gone, however it ended.

    `die_with_parent` reaches children; this also reaches their descendants, unless they start a session of their own.
    Call it before there are threads.
    """
    os.setsid()
    leader = os.getpid()
    end, _ = os.pipe()  # the other end, which no child inherits, closes when this process dies
    if os.fork():
        os.close(end)
        return
    try:
        ignore_stop_signals()
        os.setsid()
        # Keep only the pipe open, none of the process's files and sockets.
        os.dup2(end, 0)
        os.closerange(3, _MOST_DESCRIPTORS)
        os.read(0, 1)
        for _ in range(3):  # some may have been forking meanwhile
            for process in (int(path.name) for path in Path("/proc").glob("[0-9]*")):
                with suppress(OSError):
                    if os.getsid(process) == leader:
                        os.kill(process, signal.SIGKILL)
    finally:
        os._exit(0)


def limit_resources(*, memory_bytes: int, file_bytes: int) -> None:
    """Make the kernel refuse this process and its children more memory or longer files than this; 0: no limit.

    Memory means allocations (RLIMIT_DATA): not libraries, shared memory, or memory that is only reserved, which
    RLIMIT_AS would count. An allocation beyond it fails. A longer file raises SIGXFSZ, in Python an `OSError`.
    """
    for what, wanted in ((resource.RLIMIT_DATA, memory_bytes), (resource.RLIMIT_FSIZE, file_bytes)):
        if wanted:
            hard = resource.getrlimit(what)[1]
            resource.setrlimit(what, 2 * (wanted if hard == resource.RLIM_INFINITY else min(wanted, hard),))


@contextmanager
def variables_set(variables: Mapping[str, str | None]) -> Iterator[None]:
    """Set environment variables (None: unset), and restore the old ones afterwards. Not thread-safe."""
    before = {name: os.environ.get(name) for name in variables}
    _put_variables(variables)
    try:
        yield
    finally:
        _put_variables(before)


def _put_variables(variables: Mapping[str, str | None]) -> None:
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


# Parameters of glibc's mallopt(3).
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX = -1, -2, -4
_NEVER = -1
_TOP_PAD_BYTES = 1 << 26


class ProcessWork:
    """Tells whether a process and its descendants get on with loading and compiling, which reports nothing.

    Counted are bytes read and written, through system calls or mapped files, and the processor time of children that
    ended, such as compilers. A process that only waits, or spins while it waits, does none of this.
    """

    _LEAST_BYTES = 2**16  # between two looks; logs and heartbeats are less

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._bytes, self._ended_ticks = self._totals()

    def advanced(self) -> bool:
        """Return whether anything was done since the last call."""
        before, (self._bytes, self._ended_ticks) = (self._bytes, self._ended_ticks), self._totals()
        return self._bytes - before[0] >= self._LEAST_BYTES or self._ended_ticks > before[1]

    def _totals(self) -> tuple[int, int]:
        num_bytes = ended_ticks = 0
        for pid in _family(self._pid):
            with suppress(OSError, ValueError, IndexError):  # it ended meanwhile, or is another user's
                lines = dict(line.split(": ") for line in Path(f"/proc/{pid}/io").read_text().splitlines())
                num_bytes += sum(int(lines[key]) for key in ("rchar", "wchar", "read_bytes"))
            with suppress(OSError, ValueError, IndexError):
                fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                ended_ticks += int(fields[13]) + int(fields[14])  # cutime, cstime
        return num_bytes, ended_ticks


def _family(pid: int) -> Iterator[int]:
    """Yield a process and its descendants."""
    yield pid
    for children in Path("/proc").glob(f"{pid}/task/*/children"):
        with suppress(OSError):
            for child in children.read_text().split():
                yield from _family(int(child))


def keep_freed_memory() -> None:
    """Keep what the main thread frees for its next allocation, whatever the size; for the rest of the process.

    The process stays as large as it ever was, and gaps between blocks of many sizes make that more than it would need.
    Other C libraries than glibc are left alone.
    """
    # glibc returns blocks above 32 MiB as soon as they are freed, and the kernel clears every page of the next one at
    # its first touch. A pass over a model on the CPU frees and allocates activations and gradients again and again.
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
# The parent (the launcher, `tq.LocalQueue`) restarts the process. A thread needs none of this if someone waits for its
# result and gets its error.

logger = logging.getLogger(__name__)

_LOOK_S = 0.2


class ServiceThreads:
    """Owned by a service, whose name it uses in messages. Thread-safe."""

    def __init__(self, service: str) -> None:
        # Set as soon as a thread has died.
        self.failed = threading.Event()
        self._service = service
        self._failure: AsyncFlowError | None = None
        self._closed = False

    @property
    def failure(self) -> AsyncFlowError | None:
        return self._failure

    def start(self, work: Callable[..., None], *arguments: object, name: str) -> threading.Thread:
        thread = threading.Thread(target=self._run_thread, args=(name, work, *arguments), name=name, daemon=True)
        thread.start()
        return thread

    def fail(self, name: str, error: Exception) -> None:
        """Thread `name` died of `error`, or lost a part of its work to it."""
        if self._closed:
            logger.info("%s: thread %s died while the service closed: %s", self._service, name, one_line(error))
            return
        logger.error("%s: thread %s died", self._service, name, exc_info=error)
        if self._failure is None:
            self._failure = _failure(f"{self._service}: thread {name} died", error)
            self.failed.set()

    def check(self) -> None:
        if self._failure is not None:
            raise self._failure

    def wait(self, stop: threading.Event) -> None:
        """Wait until `stop` is set or a thread dies; then raise `failure`."""
        while not stop.wait(_LOOK_S):
            self.check()

    def close(self) -> None:
        """The service closes: errors of its threads no longer count. Idempotent."""
        self._closed = True

    def _run_thread(self, name: str, work: Callable[..., None], *arguments: object) -> None:
        try:
            work(*arguments)
        except Exception as error:  # noqa: BLE001 - the boundary of a thread
            self.fail(name, error)


def _failure(what: str, error: Exception) -> AsyncFlowError:
    if isinstance(error, AsyncFlowError) and error.final:
        return error
    failure = RoleFailed(f"{what}: {error if isinstance(error, AsyncFlowError) else one_line(error)}")
    failure.__cause__ = error
    return failure
