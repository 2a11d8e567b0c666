"""Starts and ends the fork server from which all workers are forked, so that they import torch once, not each.

Torch-free. Call `start` as early as possible: the server imports on one core while the launcher imports on another.
The server runs `launcher.process.preloaded`. It has its own process group, so Ctrl-C in a terminal reaches only the
launcher.
"""

import contextlib
import json
import logging
import multiprocessing
import os
import signal
import sys
import time
import types
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import Any

from asyncflow.process import STOP_SIGNALS, variables_set

logger = logging.getLogger(__name__)

LOG_VARIABLE = "ASYNCFLOW_FORK_SERVER_LOG"
LAUNCHER_VARIABLE = "ASYNCFLOW_LAUNCHER_PID"

_DYING_S = 1.0
_LOOK_S = 0.02

_forkserver: Any = forkserver._forkserver  # its process id and its end are not public
_log_file: Path | None = None


@dataclass(frozen=True)
class ServerDeath:
    """Why a fork server ended.

    Attributes:
        error: in one line.
        raised: it raised this itself, before it could fork anything; False: something ended it.
        final: another server would raise it again.
    """

    error: str
    raised: bool = False
    final: bool = False


@contextlib.contextmanager
def serving(log_file: Path, *, threads: int) -> Iterator[None]:
    """Keep a fork server while the enclosed block runs; import torch inside the block, not before.

    Args:
        log_file: see `start`.
        threads: see `environment`.
    """
    os.environ.update(environment(threads=threads))
    for left in log_file.parent.glob(error_file(log_file, "*").name):  # left by earlier starts of the run
        left.unlink(missing_ok=True)
    start(log_file)
    try:
        with hidden_main():
            yield
    finally:
        stop()


def environment(*, threads: int) -> dict[str, str]:
    """Return the variables that launcher and workers need before they import torch.

    `threads`: intra-op threads per worker; forked workers also call `torch.set_num_threads`.
    """
    return {
        "TORCH_CPP_LOG_LEVEL": os.environ.get("TORCH_CPP_LOG_LEVEL", "ERROR"),
        # Each TCPStore client looks up its peer's name; with a slow resolver that costs seconds per connection.
        "RES_OPTIONS": os.environ.get("RES_OPTIONS", "timeout:1 attempts:1"),
        "OMP_NUM_THREADS": str(threads),
        # numpy's OpenBLAS would start threads at import, and forking a process that has threads is unsafe.
        "OPENBLAS_NUM_THREADS": "1",
        # So would pyarrow's allocator, and whatever transformers finds installed may import pyarrow (scikit-learn does,
        # by way of pandas). Later options win: the user's.
        "JE_ARROW_MALLOC_CONF": ",".join(
            filter(None, ["background_thread:false", os.environ.get("JE_ARROW_MALLOC_CONF")])
        ),
        "TOKENIZERS_PARALLELISM": "false",
    }


def start(log_file: Path) -> int:
    """Start the fork server unless it runs, and return its process id at once, while it is still importing.

    Call it from the main thread: the server dies with the thread that started it.

    Args:
        log_file: receives what the server prints, and what a worker prints before it has its own log.
    """
    global _log_file
    _log_file = log_file
    variables = {
        "PYTHONSAFEPATH": "1",  # `python -P`: the working directory shadows nothing
        LOG_VARIABLE: str(log_file),
        LAUNCHER_VARIABLE: str(os.getpid()),
    }
    # If this process is killed, the tracker removes multiprocessing's semaphores; it need not warn about that.
    quiet = [os.environ.get("PYTHONWARNINGS", ""), "ignore:resource_tracker:UserWarning"]
    with _stop_signals_blocked(), variables_set({"PYTHONWARNINGS": ",".join(filter(None, quiet))}):
        resource_tracker.ensure_running()
    multiprocessing.set_forkserver_preload(["launcher.process.preloaded"])
    with _stop_signals_blocked(), variables_set(variables):  # again: `ensure_running` above unblocked two of them
        forkserver.ensure_running()
    # See there: later starts must never create a server.
    _forkserver.ensure_running = _check_running
    return int(_forkserver._forkserver_pid)


def server_pid() -> int:
    """Return the process id of the fork server; 0: there is none."""
    return _forkserver._forkserver_pid or 0


def is_running() -> bool:
    """Return whether the fork server lives."""
    pid = server_pid()
    if not pid:
        return False
    try:
        # WNOWAIT: `multiprocessing` reaps the server, not we.
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
    except ChildProcessError:
        return False


def let_go_on() -> None:
    """Continue the fork server if a signal has stopped it: new workers would wait for it."""
    pid = _forkserver._forkserver_pid
    if pid is not None and is_stopped(pid):
        logger.warning("the fork server was stopped by a signal; continuing it")
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def is_stopped(pid: int | None) -> bool:
    """Return whether a process is in state T (a debugger's stop is t, and does not count)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    except (OSError, IndexError):
        return False


def stop() -> None:
    """End the fork server, and with it all remaining workers. Idempotent."""
    # Also ends workers: they die with the server (`die_with_parent`).
    pid = _forkserver._forkserver_pid
    if pid is None:
        return
    # Kill first: `_stop` alone would wait for every process that holds the server's pipe.
    os.kill(pid, signal.SIGKILL)
    _forkserver._stop()


def has_died(pid: int) -> bool:
    """Return whether the fork server `pid`, whose pipe just closed or which refused, is gone or was replaced."""
    # Wait a moment: the server's pipes close before the process is gone.
    deadline = time.monotonic() + _DYING_S
    while pid == server_pid() and is_running():
        if time.monotonic() > deadline:
            return False
        time.sleep(_LOOK_S)
    return True


def why_died(pid: int) -> ServerDeath:
    """Return why fork server `pid` ended."""
    if _log_file is not None:
        with contextlib.suppress(OSError, ValueError):
            said = json.loads(error_file(_log_file, str(pid)).read_text())
            return ServerDeath(f"the fork server did not start: {said['error']}", raised=True, final=said["final"])
    return ServerDeath("the fork server died, and with it every worker; see logs/launcher*.log")


def error_file(log_file: Path, pid: str) -> Path:
    """Return where the server `pid` records what it raised; several nodes share the directory."""
    return log_file.with_name(f"{log_file.stem}-fork-server-{pid}.error.json")


def _check_running() -> None:
    """Stands in for `ForkServer.ensure_running`, which every start of a worker calls; raises ConnectionRefusedError."""
    # The original would start another server in the calling thread, and die with it; only `start` may.
    if not is_running():
        raise ConnectionRefusedError("the fork server is gone")


@contextlib.contextmanager
def hidden_main() -> Iterator[None]:
    """Keep `multiprocessing` from rerunning the launcher's main script in every worker forked inside the block."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


@contextlib.contextmanager
def _stop_signals_blocked() -> Iterator[None]:
    """Block stop signals, here and in processes started inside the block; blocked signals stay pending."""
    # A scheduler signals all processes at once. The fork server ignores these signals as soon as it can; the tracker
    # keeps those blocked that `multiprocessing` does not handle (USR1, HUP).
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
