"""The fork server, as far as signals stop it."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
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


def test_variables_keep_pyarrow_from_starting_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers imports scikit-learn where it is installed, that pandas, and that pyarrow."""
    monkeypatch.setenv("JE_ARROW_MALLOC_CONF", "narenas:1")
    environment = fork_server.environment(threads=1)
    assert environment["JE_ARROW_MALLOC_CONF"] == "background_thread:false,narenas:1"
    pytest.importorskip("pyarrow")
    look = "import os, pyarrow; print(len(os.listdir('/proc/self/task')))"
    done = subprocess.run([sys.executable, "-c", look], env={**os.environ, **environment}, capture_output=True)
    assert (done.stdout, done.stderr) == (b"1\n", b"")
