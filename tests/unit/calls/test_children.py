"""Processes of a pool: what they leave behind, how they start, and how their end is noticed."""

import asyncio
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from asyncflow.errors import AsyncFlowError, UserCodeFailed
from workers.calls.child_process import StreamChannel
from workers.calls.pool import CallPool

DEADLINE_S = 15
SOURCE = """
import multiprocessing, os, signal, subprocess, sys, threading
from pathlib import Path
from workers.calls.user_function import Callee

def entry(name):
    return Callee(globals()[name])

def dies_first(name):
    try:
        Path(__file__).with_name("died").touch(exist_ok=False)
    except FileExistsError:
        return entry(name)
    os.kill(os.getpid(), signal.SIGKILL)

def dies(name):
    os.kill(os.getpid(), signal.SIGKILL)

def echo(value):
    return value

def leaves_a_process(how):
    process = subprocess.Popen(["sleep", "3600"])
    Path(__file__).with_name("pid").write_text(str(process.pid))
    if how == "hang":
        process.wait()
    os._exit(3)

def forks_and_exits(session):
    pid = os.fork()
    if pid == 0:
        if session:
            os.setsid()
        Path(__file__).with_name("forked").write_text(str(os.getpid()))
        threading.Event().wait()
    while not Path(__file__).with_name("forked").exists():
        pass
    os._exit(3)

def terminates_a_program(value):
    process = subprocess.Popen(["sleep", "3600"])
    process.terminate()
    return process.wait(20)

def wait_for_ever(runs):
    runs.set()
    threading.Event().wait()

def terminates_a_fork(value):
    fork = multiprocessing.get_context("fork")
    runs = fork.Event()
    process = fork.Process(target=wait_for_ever, args=(runs,))
    process.start()
    runs.wait()
    process.terminate()
    process.join(20)
    code = process.exitcode
    process.kill()
    return code

def raises_without_output(value):
    sys.stdout.close()
    sys.stderr.close()
    raise ValueError("no idea")
"""

Open = Callable[..., CallPool]


@pytest.mark.parametrize("how", ["hang", "exit"])
def test_what_a_function_started_ends_with_its_child(open_pool: Open, tmp_path: Path, how: str) -> None:
    pool = open_pool("leaves_a_process", timeout_s=3)
    with pytest.raises(UserCodeFailed):
        pool.call_and_wait(how, on="it")
    pool.close()
    wait_until_gone(int((tmp_path / "pid").read_text()))


def test_a_path_that_is_no_utf8_does_not_keep_a_child_from_starting(
    open_pool: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path, os.fsdecode(b"/tmp/\xff")])
    pool = open_pool("echo")
    assert pool.submit(1, on="it").result(DEADLINE_S) == 1


def test_an_unforeseen_error_of_a_start_is_told(open_pool: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path, 7])
    pool = open_pool("echo")
    with pytest.raises(UserCodeFailed, match="mine:echo: its process did not start .*int"):
        pool.submit(1, on="it").result(DEADLINE_S)


def test_a_child_that_dies_while_it_imports_is_started_once_more(open_pool: Open) -> None:
    pool = open_pool("echo", entry="dies_first")
    pool.until_ready()
    assert pool.call_and_wait(1, on="it") == 1


def test_children_that_do_not_start_do_not_prove_that_the_function_is_bad(open_pool: Open) -> None:
    pool = open_pool("echo", entry="dies")
    with pytest.raises(AsyncFlowError, match="its process did not start") as caught:
        pool.until_ready()
    assert not caught.value.final, "the role may start again"


PARENT = """
import signal, sys
from asyncflow.process import STOP_SIGNALS
for number in STOP_SIGNALS:
    signal.signal(number, signal.SIG_IGN)
sys.path.insert(0, sys.argv[1])
from workers.calls.pool import CallPool, Entry
pool = CallPool(Entry("users_code:entry", {"name": sys.argv[2]}), what="w", limit="l", timeout_s=60, concurrency=1)
print(pool.call_and_wait(0, on="it"), flush=True)
pool.close()
"""


@pytest.mark.parametrize("name", ["terminates_a_program", "terminates_a_fork"])
def test_a_function_can_terminate_what_it_started_though_workers_ignore_that(tmp_path: Path, name: str) -> None:
    (tmp_path / "users_code.py").write_text(SOURCE)
    parent = subprocess.run(
        [sys.executable, "-c", PARENT, str(tmp_path), name], capture_output=True, text=True, timeout=DEADLINE_S
    )
    assert parent.stdout == "-15\n", parent.stderr


@pytest.mark.parametrize("session", [False, True])
def test_the_end_of_a_child_that_forked_is_seen_at_once(open_pool: Open, tmp_path: Path, session: bool) -> None:
    pool = open_pool("forks_and_exits", timeout_s=3600)
    try:
        with pytest.raises(UserCodeFailed, match="ended its process"):
            pool.submit(session, on="it").result(DEADLINE_S)
    finally:
        if session:  # what has a session of its own is its own
            os.kill(int((tmp_path / "forked").read_text()), 9)


def test_an_error_is_told_as_such_though_the_function_closed_its_output(open_pool: Open) -> None:
    with pytest.raises(UserCodeFailed, match="raised ValueError: no idea on it"):
        open_pool("raises_without_output").call_and_wait(0, on="it")


def wait_until_gone(pid: int) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while Path(f"/proc/{pid}").exists() and "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text():
        assert time.monotonic() < deadline, f"{pid} lives on"
        time.sleep(0.01)


def test_who_waits_for_a_channels_end_is_not_cancelled_with_another_who_does() -> None:
    async def run() -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            channel: StreamChannel[str, str] = await StreamChannel.open(ours, str)
            one, other = (asyncio.create_task(channel.closed()) for _ in range(2))
            await asyncio.sleep(0.01)
            one.cancel()
            await asyncio.wait({one})
            channel.abort()
            await other

    asyncio.run(asyncio.wait_for(run(), DEADLINE_S))
