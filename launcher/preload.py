"""Starts and ends the fork server from which every worker is forked, so that they import torch once, not each.

Torch-free. `start` is called as early as possible: the server imports on one core while the launcher imports on the
other. The server (`launcher.preloaded`) has a process group of its own, so Ctrl-C in a terminal reaches the launcher
alone.
"""

import contextlib
import multiprocessing
import os
import signal
import sys
import types
from collections.abc import Iterable, Iterator
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import Any

from asyncflow.lifeline import STOP_SIGNALS

LOG_VARIABLE = "ASYNCFLOW_FORK_SERVER_LOG"
LAUNCHER_VARIABLE = "ASYNCFLOW_LAUNCHER_PID"

_forkserver: Any = forkserver._forkserver  # its process id and its end are not public


def environment(*, threads: int) -> dict[str, str]:
    """Return the variables that launcher and workers need before they import torch.

    Args:
        threads: intra-op threads per worker; forked workers also call `torch.set_num_threads`.
    """
    return {
        "TORCH_CPP_LOG_LEVEL": os.environ.get("TORCH_CPP_LOG_LEVEL", "ERROR"),
        # Each TCPStore client looks its peer's name up; with a slow resolver that costs seconds a connection.
        "RES_OPTIONS": os.environ.get("RES_OPTIONS", "timeout:1 attempts:1"),
        "OMP_NUM_THREADS": str(threads),
        # numpy's OpenBLAS would start threads at import, and forking a process with threads is unsafe.
        "OPENBLAS_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }


def start(log_file: Path) -> int:
    """Start the fork server unless it runs, and return its process id at once; it goes on importing.

    Call it from the main thread: the server dies with the thread that started it.

    Args:
        log_file: receives what the server prints, and what a worker prints before it has its own log.
    """
    variables = {
        "PYTHONSAFEPATH": "1",  # `python -P`: the working directory shadows nothing
        LOG_VARIABLE: str(log_file),
        LAUNCHER_VARIABLE: str(os.getpid()),
    }
    # Should this process be killed, the tracker removes multiprocessing's semaphores; it need not say so.
    quiet = [os.environ.get("PYTHONWARNINGS", ""), "ignore:resource_tracker:UserWarning"]
    with _set({"PYTHONWARNINGS": ",".join(filter(None, quiet))}), _blocked(STOP_SIGNALS):  # it inherits that
        resource_tracker.ensure_running()
    multiprocessing.set_forkserver_preload(["launcher.preloaded"])
    with _set(variables):
        forkserver.ensure_running()
    return int(_forkserver._forkserver_pid)


def is_running() -> bool:
    """Return whether the fork server lives; it is not reaped here, `multiprocessing` does that."""
    pid = _forkserver._forkserver_pid
    if pid is None:
        return False
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
    except ChildProcessError:
        return False


def stop() -> None:
    """End the fork server, and with it whatever workers are left; idempotent."""
    pid = _forkserver._forkserver_pid
    if pid is None:
        return
    # The server's own way to stop waits for every holder of its pipe; the kernel's way does not.
    os.kill(pid, signal.SIGKILL)
    _forkserver._stop()


@contextlib.contextmanager
def hidden_main() -> Iterator[None]:
    """Keep `multiprocessing` from running the launcher's main script again in every worker that is forked inside."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


@contextlib.contextmanager
def _blocked(signals: Iterable[signal.Signals]) -> Iterator[None]:
    """Hold signals back; a scheduler sends them to every process, also to those that know nothing of it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def _set(variables: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
