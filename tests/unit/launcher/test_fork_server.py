"""The fork server, as far as signals stop it."""

import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace

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
    process: "subprocess.Popen[bytes]", monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(fork_server, "_forkserver", SimpleNamespace(_forkserver_pid=process.pid))
    fork_server.let_go_on()
    assert not caplog.records
    process.send_signal(signal.SIGSTOP)
    wait_until_stopped(process.pid, True)
    fork_server.let_go_on()
    wait_until_stopped(process.pid, False)
    assert "the fork server was stopped by a signal" in caplog.text


def test_without_a_fork_server_there_is_nothing_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fork_server, "_forkserver", SimpleNamespace(_forkserver_pid=None))
    fork_server.let_go_on()


def test_process_that_is_gone_is_not_stopped(process: "subprocess.Popen[bytes]") -> None:
    process.kill()
    process.wait()
    assert not fork_server.is_stopped(process.pid)
    assert not fork_server.is_stopped(None)
