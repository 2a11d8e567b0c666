"""First and last code of a worker process: its log, its parent's life, its last error. Torch-free at import.

A fork server (`launcher.process.preloaded`) calls `enter` in the child. It imports the real entrypoint by name, since
the launcher itself never imports that.
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
"""What every worker of a run executes, unless a test overrides it."""
LOG_VARIABLE = "ASYNCFLOW_LOG"
ATTEMPT_VARIABLE = "ASYNCFLOW_ATTEMPT"
STACKS_SIGNAL = signal.SIGUSR2
"""Makes a worker write all threads' stacks into its log; in C, so it works wherever the process hangs."""

FINISHED = b'{"finished": true}\n'
"""What a worker writes into its pipe once its function returned: one that is gone without it died, even with code 0."""


def enter_spawned() -> None:
    """`enter` in a process of its own, with the command line's arguments."""
    enter(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
    os._exit(0)  # as a forked worker does


def enter(server: int, report: int, entrypoint: str, *args: str) -> None:
    """Run `module:function` with `args`; an exception goes to the log and torchelastic's error file, then exit 1.

    Args:
        server: process id of the fork server, whose child this is.
        report: this worker's pipe; see `launcher.process.fork_server`.
    """
    os.set_inheritable(report, False)
    die_with_parent(server)
    _redirect(os.environ[LOG_VARIABLE])
    faulthandler.enable()  # a crash in C++ then leaves every thread's stack in the log
    faulthandler.register(STACKS_SIGNAL, all_threads=True)
    module, _, function = entrypoint.partition(":")
    try:
        getattr(importlib.import_module(module), function)(*args)
    except Exception as error:  # noqa: BLE001 (process boundary)
        with contextlib.suppress(OSError):  # on a full disk the exit code still tells
            traceback.print_exc()
            _record(error)
            sys.stdout.flush()
        os._exit(1)  # at once: a regular interpreter exit joins threads, which may wait forever
    sys.stdout.flush()
    sys.stderr.flush()
    with contextlib.suppress(BrokenPipeError):  # the launcher is gone
        os.write(report, FINISHED)


def _redirect(path: str) -> None:
    """Append stdout and stderr, of Python and of C++, to one file; if it cannot be opened, to the fork server's."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    except OSError as error:
        sys.stderr.write(f"{path}: {error.strerror}; output of process {os.getpid()} comes here instead\n")
    else:
        for number in (1, 2):
            os.dup2(descriptor, number)
        os.close(descriptor)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True, errors="backslashreplace")  # type: ignore[union-attr]


def _record(error: Exception) -> None:
    """Write torchelastic's error file, plus what the supervisor needs."""
    message = {
        "message": f"{type(error).__name__}: {error}",
        "extraInfo": {"py_callstack": traceback.format_exc(), "timestamp": str(int(time.time()))},
        "final": isinstance(error, AsyncFlowError) and error.final,
        "deadline": isinstance(error, AsyncFlowError) and error.deadline,
    }
    replace_text(Path(os.environ["TORCHELASTIC_ERROR_FILE"]), json.dumps({"message": message}))
