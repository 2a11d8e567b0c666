"""First and last code of a worker process: its own log, its parent's life, its last error. Torch-free at import.

`launcher.process.gang` hands `enter` to torchelastic. It runs in the forked child and calls the real entrypoint by
name, since the launcher itself never imports that.
"""

import contextlib
import faulthandler
import importlib
import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path

from asyncflow.errors import AsyncFlowError
from asyncflow.json_lines import replace_text
from asyncflow.process import die_with_parent

ENTRYPOINT = "workers.roles.main:run_worker"
"""What every worker of a run is, unless a test says otherwise."""
LOG_VARIABLE = "ASYNCFLOW_LOG"
ATTEMPT_VARIABLE = "ASYNCFLOW_ATTEMPT"
STACKS_SIGNAL = signal.SIGUSR2
"""Has a worker write the stacks of all its threads into its log; in C, so it works whatever the process hangs in."""

_fork_server_pid: int | None = None
_sys_path: list[str] = []


def remember_fork_server() -> None:
    """Keep what children need to know of the fork server; called there once."""
    global _fork_server_pid
    _fork_server_pid = os.getpid()
    _sys_path[:] = sys.path


def enter(entrypoint: str, *args: str) -> None:
    """Run `module:function` with `args`; an exception goes to the log and to torchelastic's error file, then exit 1.

    Args:
        entrypoint: `module:function`, imported here.
        args: passed on.
    """
    die_with_parent(_fork_server_pid)
    if _sys_path:
        sys.path[:] = _sys_path  # multiprocessing put the launcher's there, which may hold the working directory
    _redirect(os.environ[LOG_VARIABLE])
    faulthandler.enable()  # a crash in C++ leaves every thread's stack in the log
    faulthandler.register(STACKS_SIGNAL, all_threads=True)
    module, _, function = entrypoint.partition(":")
    try:
        getattr(importlib.import_module(module), function)(*args)
    except Exception as error:  # noqa: BLE001 (the process boundary)
        with contextlib.suppress(OSError):  # the disk is full; the exit code still tells
            traceback.print_exc()
            _record(error)
            sys.stdout.flush()
        os._exit(1)  # at once: an interpreter that ends by itself waits for threads, which may wait for anything
    sys.stdout.flush()
    sys.stderr.flush()


def _redirect(path: str) -> None:
    """Append stdout and stderr, of Python and of C++, to one file; if it cannot be opened, to the fork server's."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    except OSError as error:
        sys.stderr.write(f"{path}: {error.strerror}; what process {os.getpid()} has to say comes here instead\n")
    else:
        for number in (1, 2):
            os.dup2(descriptor, number)
        os.close(descriptor)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True, errors="backslashreplace")  # type: ignore[union-attr]


def _record(error: Exception) -> None:
    """Write torchelastic's error file, with what a supervisor needs to know besides."""
    message = {
        "message": f"{type(error).__name__}: {error}",
        "extraInfo": {"py_callstack": traceback.format_exc(), "timestamp": str(int(time.time()))},
        "final": isinstance(error, AsyncFlowError) and error.final,
        "deadline": isinstance(error, AsyncFlowError) and error.deadline,
    }
    replace_text(Path(os.environ["TORCHELASTIC_ERROR_FILE"]), json.dumps({"message": message}))
