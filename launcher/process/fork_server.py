"""Starts and ends the fork servers from which all workers are forked, so that they import torch once, not each.

Torch-free. A node has one server per interpreter that its roles have (`launcher.environments`). Start one as early as
possible: it imports on one core while the launcher imports on another. It runs `launcher.process.preloaded`, in its own
process group, so Ctrl-C in a terminal reaches only the launcher.

    launcher                                  server                       worker
      |-- what to run, a pipe's end (socket) -->|-- fork ------------------->|   spawn, where a fork would be unsafe
      |<- its process id (pipe) ----------------|                            |
      |<- it finished (pipe) ------------------------------------------------|   its function returned
      |<- its exit code (pipe) -----------------|<- SIGCHLD -----------------|

The messages are JSON, and every worker has a pipe of its own: launcher and server may be of different versions of
Python and torch, and threads of the launcher share no lock but the socket's.
"""

import contextlib
import json
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asyncflow.process import STOP_SIGNALS

logger = logging.getLogger(__name__)

UNKNOWN_CODE = 255
"""The exit code of a worker whose fork server is gone."""
_COMMAND = "from launcher.process.preloaded import serve_launcher; serve_launcher()"
_DYING_S = 1.0
_LOOK_S = 0.02
_START_LOOK_S = 0.2


@dataclass(frozen=True)
class ServerDeath:
    """Why a fork server ended.

    Attributes:
        error: in one line.
        raised: it raised this itself, before it could start anything; False: something ended it.
    """

    error: str
    raised: bool = False


class WorkerProcess:
    """A worker that a fork server started. One thread reads its end; any may send it signals by `pid`."""

    def __init__(self, server: "ForkServer", reader: int) -> None:
        self._server = server
        self._reader = reader
        self._unread = b""
        self._code: int | None = None
        self.pid = 0
        self.finished = False
        """Its function returned."""

    @property
    def exitcode(self) -> int | None:
        """Its exit code, or minus the signal that ended it; None: it lives."""
        if self._code is None:
            served = self._server.is_running()  # asked first: a server that ended reported before
            self._read_reports(0.0)
            if self._code is None and not served:
                self._end(UNKNOWN_CODE)
        return self._code

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal unless its end is known: its number may since belong to another process."""
        if self._code is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        """SIGKILL; idempotent."""
        if self.exitcode is None:
            self.send_signal(signal.SIGKILL)

    def join(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while self.exitcode is None and (left_s := deadline - time.monotonic()) > 0:
            self._has_report(min(left_s, _START_LOOK_S))

    def wait_for_start(self) -> None:
        """Wait until it runs, which takes as long as the server's imports; EOFError: the server is gone."""
        while not self.pid:
            self._server.let_go_on()
            served = self._server.is_running()
            self._read_reports(_START_LOOK_S if served else 0.0)
            if not self.pid and (not served or self._code is not None):
                self._end(UNKNOWN_CODE)
                raise EOFError("the fork server is gone")

    def _end(self, code: int) -> None:
        if self._code is None:
            self._code = code
            os.close(self._reader)

    def _has_report(self, timeout_s: float) -> bool:
        # Not select(2), which refuses descriptors from 1024 on: a launcher of many ranks has so many connections.
        poll = select.poll()
        poll.register(self._reader, select.POLLIN)
        return bool(poll.poll(timeout_s * 1000))

    def _read_reports(self, timeout_s: float) -> None:
        while self._code is None and self._has_report(timeout_s):
            data = os.read(self._reader, 1 << 16)
            if not data:  # both ends of it are gone, so nothing more comes
                self._end(UNKNOWN_CODE)
                return
            *lines, self._unread = (self._unread + data).split(b"\n")
            for line in lines:
                self._take_report(json.loads(line))
            timeout_s = 0.0

    def _take_report(self, report: Mapping[str, Any]) -> None:
        match report:
            case {"pid": int(pid)}:
                self.pid = pid
                if report["obstacle"]:
                    self._server.tell_cost(report["obstacle"], report["import_s"])
            case {"finished": _}:
                self.finished = True
            case {"code": int(code)}:
                self._end(code)
            case _:
                self._end(UNKNOWN_CODE)
                raise OSError(f"the fork server cannot start a worker: {report['error']}")


class ForkServer:
    """A fork server of one interpreter. The thread that constructs it must outlive it: it dies with that thread.

    The constructor returns at once, while the server is still importing.

    Args:
        python: the interpreter.
        log_file: receives what the server prints, and what a worker prints before it has its own log.
        say: shows the user, once, why and at what cost this interpreter's workers are not forked; any thread calls it.
    """

    def __init__(self, python: str, log_file: Path, say: Callable[[str], None] = logger.warning) -> None:
        self.python = python
        self._log_file = log_file
        self._say = say
        self._told = False
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket = ours
        environment = dict(os.environ)
        if python != sys.executable:  # its programs come first, as in an environment that was activated
            environment["PATH"] = os.pathsep.join([str(Path(python).parent), environment.get("PATH", os.defpath)])
        with theirs, log_file.open("ab") as log, _stop_signals_blocked():
            self._process = subprocess.Popen(
                # -P: the working directory shadows nothing
                [python, "-P", "-c", _COMMAND, str(theirs.fileno()), str(os.getpid()), str(log_file)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
                pass_fds=[theirs.fileno()],
                process_group=0,  # a Ctrl-C in the terminal reaches the launcher alone
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def start_worker(self, arguments: Sequence[str], variables: Mapping[str, str]) -> WorkerProcess:
        """Start `worker_entry.enter(*arguments)` in a process with these variables. Any thread may call it.

        Raises:
            EOFError, OSError: the server is gone, or cannot start a process.
        """
        reader, writer = os.pipe()
        order = json.dumps({"arguments": list(arguments), "variables": dict(variables)}).encode()
        try:
            socket.send_fds(self._socket, [order], [writer])
        except OSError:
            os.close(reader)
            raise
        finally:
            os.close(writer)
        worker = WorkerProcess(self, reader)
        worker.wait_for_start()
        return worker

    def is_running(self) -> bool:
        return self._process.poll() is None

    def let_go_on(self) -> None:
        """Continue the server if a signal has stopped it: new workers would wait for it."""
        if is_stopped(self.pid) and self.is_running():
            logger.warning("the fork server was stopped by a signal; continuing it")
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGCONT)

    def stop(self) -> None:
        """End the server, and with it all remaining workers, which die with it. Idempotent."""
        self._process.kill()
        self._process.wait()
        self._socket.close()

    def has_died(self) -> bool:
        """Return whether the server, whose pipe just closed or which refused, is gone."""
        # Wait a moment: its pipes close before the process is gone.
        deadline = time.monotonic() + _DYING_S
        while self.is_running():
            if time.monotonic() > deadline:
                return False
            time.sleep(_LOOK_S)
        return True

    def why_died(self) -> ServerDeath:
        with contextlib.suppress(OSError, ValueError):
            said = json.loads(error_file(self._log_file, str(self.pid)).read_text())
            return ServerDeath(f"the fork server did not start: {said['error']}", raised=True)
        own = "" if self.python == sys.executable else f" of {self.python}"
        return ServerDeath(f"the fork server{own} died, and with it every worker; see logs/launcher*.log")

    def tell_cost(self, obstacle: str, import_s: float) -> None:
        """Tell the user, once, what a worker's start costs because the server must spawn it."""
        if not self._told:
            self._told = True
            self._say(
                f"workers of {self.python} are spawned, not forked, because of {obstacle}; each start of one imports "
                f"for itself, some {import_s:.1f} s and the memory of the libraries"
            )


class ForkServers:
    """This node's fork servers, by interpreter. For the launcher's main thread only, with which all of them die.

    Attributes:
        say: see `ForkServer`; may be replaced while servers run.
    """

    def __init__(self, log_file: Path) -> None:
        self._log_file = log_file
        self._servers: dict[str, ForkServer] = {}
        self.say: Callable[[str], None] = logger.warning

    def server_of(self, python: str) -> ForkServer:
        """Return the interpreter's server; start it if there is none, or none any more."""
        server = self._servers.get(python)
        if server is None or not server.is_running():
            if server is not None:
                logger.warning("the fork server of %s is gone; starting another", python)
                server.stop()
            server = self._servers[python] = ForkServer(python, self._log_file, lambda line: self.say(line))
        return server

    def stop(self) -> None:
        """End all servers, and with them all remaining workers. Idempotent."""
        while self._servers:
            self._servers.popitem()[1].stop()


@contextlib.contextmanager
def serving(log_file: Path, *, threads: int, pythons: Sequence[str] = ()) -> Iterator[ForkServers]:
    """Keep fork servers while the enclosed block runs; import torch inside the block, not before.

    Args:
        log_file: see `ForkServer`.
        threads: see `environment`.
        pythons: interpreters that will be needed, besides this one.
    """
    os.environ.update(environment(threads=threads))
    for left in log_file.parent.glob(error_file(log_file, "*").name):  # left by earlier starts of the run
        left.unlink(missing_ok=True)
    servers = ForkServers(log_file)
    try:
        for python in dict.fromkeys((sys.executable, *pythons)):
            servers.server_of(python)
        yield servers
    finally:
        servers.stop()


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


def is_stopped(pid: int | None) -> bool:
    """Return whether a process is in state T (a debugger's stop is t, and does not count)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    except (OSError, IndexError):
        return False


def error_file(log_file: Path, pid: str) -> Path:
    """Return where the server `pid` records what it raised; several nodes share the directory."""
    return log_file.with_name(f"{log_file.stem}-fork-server-{pid}.error.json")


@contextlib.contextmanager
def _stop_signals_blocked() -> Iterator[None]:
    """Block stop signals, here and in processes started inside the block; blocked signals stay pending."""
    # A scheduler signals all processes at once. The fork server ignores these signals as soon as it can.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
