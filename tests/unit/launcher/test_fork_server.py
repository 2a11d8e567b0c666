"""The fork server, as far as signals stop it."""

import fcntl
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from launcher.process import fork_server

DEADLINE_S = 10.0


@pytest.fixture
def process() -> "Iterator[subprocess.Popen[bytes]]":
    """A process that stands for the fork server."""
    process = subprocess.Popen(["sleep", "60"])
    yield process
    process.kill()
    process.wait()


def wait_until_stopped(pid: int, wanted: bool) -> None:
    deadline, never = time.monotonic() + DEADLINE_S, threading.Event()
    while fork_server.is_stopped(pid) is not wanted:
        assert time.monotonic() < deadline
        never.wait(0.01)


def test_fork_server_that_a_signal_stopped_goes_on(
    process: "subprocess.Popen[bytes]", caplog: pytest.LogCaptureFixture
) -> None:
    server: Any = object.__new__(fork_server.ForkServer)
    server._process = process
    server.let_go_on()
    assert not caplog.records
    process.send_signal(signal.SIGSTOP)
    wait_until_stopped(process.pid, True)
    server.let_go_on()
    wait_until_stopped(process.pid, False)
    assert "the fork server was stopped by a signal" in caplog.text


def test_process_that_is_gone_is_not_stopped(process: "subprocess.Popen[bytes]") -> None:
    process.kill()
    process.wait()
    assert not fork_server.is_stopped(process.pid)
    assert not fork_server.is_stopped(None)


@pytest.fixture
def high_descriptor() -> Iterator[int]:
    """A number that select(2) refuses; free."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 1500:
        pytest.skip(f"{hard} descriptors at most")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 1500), hard))
    yield 1400
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_worker_is_followed_where_the_launcher_has_many_connections_and_leaves_no_descriptor(
    high_descriptor: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    low, writer = os.pipe()
    reader = fcntl.fcntl(low, fcntl.F_DUPFD, high_descriptor)
    os.close(low)
    os.write(writer, b'{"pid": 17, "obstacle": "", "import_s": 0}\n{"code": 3}\n')
    server: Any = SimpleNamespace(is_running=lambda: True, let_go_on=lambda: None)
    worker = fork_server.WorkerProcess(server, reader)
    worker.wait_for_start()
    worker.join(DEADLINE_S)
    assert (worker.pid, worker.exitcode) == (17, 3)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(reader)
    sent: list[int] = []
    monkeypatch.setattr(os, "kill", lambda pid, _: sent.append(pid))
    worker.send_signal(signal.SIGUSR2)
    worker.kill()
    assert not sent, "its number may belong to another process by now"
    os.close(writer)


def test_variables_keep_pyarrow_from_starting_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers imports scikit-learn where it is installed, that pandas, and that pyarrow."""
    monkeypatch.setenv("JE_ARROW_MALLOC_CONF", "narenas:1")
    environment = fork_server.environment(threads=1)
    assert environment["JE_ARROW_MALLOC_CONF"] == "background_thread:false,narenas:1"
    pytest.importorskip("pyarrow")
    look = "import os, pyarrow; print(len(os.listdir('/proc/self/task')))"
    done = subprocess.run([sys.executable, "-c", look], env={**os.environ, **environment}, capture_output=True)
    assert (done.stdout, done.stderr) == (b"1\n", b"")
