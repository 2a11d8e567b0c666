"""Calls of users' code in child processes: what hangs, holds the lock or crashes costs its own call and no other."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Any

import pytest

from asyncflow.errors import ConfigError, UserCodeFailed
from workers.calls.pool import CallPool, CallProcess, CallRaised, ChildDied, Entry

DEADLINE_S = 60
SOURCE = """
import asyncio, os, re, sys, time
from asyncflow.errors import ConfigError, UserCodeFailed
from workers.calls.user_function import Callee

def entry(name):
    return Callee(globals()[name])

def refused(name):
    raise ConfigError(f"no {name}")

def checked(name):
    def gives(value, arguments):
        if value == "odd":
            raise UserCodeFailed("it returned odd")
        return value
    return Callee(globals()[name], gives=gives)

def echo(value):
    return value

def pid(value):
    return os.getpid()

def torch_is_there(value):
    return "torch" in sys.modules

def prints(value):
    print("hello from", value)
    print("and to stderr", value, file=sys.stderr)

def does(what):
    if what == "hang":
        time.sleep(3600)
    if what == "hold the lock":
        re.match("((?:x+x+)+)y", "x" * 60)
    if what == "exit":
        os._exit(3)
    if what == "leave":
        sys.exit(3)
    if what == "raise":
        raise ValueError("no idea")
    if what == "memory":
        raise MemoryError
    if what == "object":
        return object()
    return what

both = asyncio.Event()
here = []
async def meets(number):
    here.append(number)
    if len(here) == 8:
        both.set()
    await both.wait()
    return [number, os.getpid()]

async def awaits(what):
    if what == "for ever":
        await asyncio.Event().wait()
    if what == "block":
        time.sleep(3600)
    if what == "exit":
        os._exit(3)
    await asyncio.sleep(0.2)
    return what

def returns_coroutine(what):
    return awaits(what)

class Judge:
    async def __call__(self, what):
        return what
judge = Judge()
"""

Open = Callable[..., CallPool]


def test_values_of_json_come_back_as_they_are(open_pool: Open) -> None:
    pool = open_pool("echo")
    for value in (None, True, 3, 0.5, "a\n\0ü\u2028" + "x" * 10**6, [1, {"a": [2.0, None]}]):
        assert pool.call_and_wait(value, on="it") == value


def test_a_child_has_no_torch_unless_the_function_wants_it(open_pool: Open) -> None:
    assert open_pool("torch_is_there").call_and_wait(0, on="it") is False


@pytest.mark.parametrize("what", ["hang", "hold the lock"])
def test_a_function_that_hangs_is_killed_at_its_deadline_and_costs_only_its_call(open_pool: Open, what: str) -> None:
    pool = open_pool("does", timeout_s=2)
    with pytest.raises(
        UserCodeFailed,
        match=r"^reward.function: mine:does took longer than reward.timeout_s = 2 s on response 'x'; make it faster",
    ):
        pool.call_and_wait(what, on="response 'x'")
    assert pool.call_and_wait("fine", on="it") == "fine"


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("exit", "ended its process on response 'x'; its last words are in this log"),
        ("memory", "ended its process on response 'x'"),
        ("leave", "raised SystemExit: 3 on response 'x'"),
        ("raise", "raised ValueError: no idea on response 'x'"),
        ("object", "raised something that cannot be passed on: TypeError: .* on response 'x'"),
    ],
)
def test_what_goes_wrong_is_named_and_the_next_call_is_made(open_pool: Open, what: str, message: str) -> None:
    pool = open_pool("does")
    with pytest.raises(UserCodeFailed, match=f"^reward.function: mine:does {message}"):
        pool.call_and_wait(what, on="response 'x'")
    assert pool.call_and_wait("fine", on="it") == "fine"


def test_a_result_that_the_entry_refuses_has_its_message(open_pool: Open) -> None:
    with pytest.raises(UserCodeFailed, match="^it returned odd$"):
        open_pool("echo", entry="checked").call_and_wait("odd", on="it")


def test_arguments_that_are_no_text_cost_their_call(open_pool: Open) -> None:
    pool = open_pool("echo")
    with pytest.raises(UserCodeFailed, match="mine:echo cannot be called on it: .*surrogates"):
        pool.call_and_wait("\ud83d", on="it")
    assert pool.call_and_wait(1, on="it") == 1


def test_several_calls_of_a_plain_function_have_a_child_each_and_no_more_than_configured(open_pool: Open) -> None:
    pool = open_pool("pid", concurrency=3)
    calls = [pool.submit(number, on="it") for number in range(50)]
    assert 1 <= len({call.result(DEADLINE_S) for call in calls}) <= 3


def test_coroutines_share_one_child_and_run_at_the_same_time(open_pool: Open) -> None:
    pool = open_pool("meets", concurrency=8)
    threads = threading.active_count()
    calls = [pool.submit(number, on="it") for number in range(8)]
    values = [call.result(DEADLINE_S) for call in calls]
    assert [number for number, _ in values] == list(range(8)) and len({child for _, child in values}) == 1
    assert threading.active_count() <= threads, "no call has a thread"


@pytest.mark.parametrize("name", ["judge", "returns_coroutine"])
def test_what_is_awaitable_is_awaited(open_pool: Open, name: str) -> None:
    assert open_pool(name).call_and_wait("fine", on="it") == "fine"


def test_a_coroutine_that_waits_for_ever_is_cancelled_and_the_others_go_on(open_pool: Open) -> None:
    pool = open_pool("awaits", timeout_s=2, concurrency=4)
    late = pool.submit("for ever", on="it")
    assert pool.call_and_wait("fine", on="it") == "fine"
    with pytest.raises(UserCodeFailed, match="mine:awaits took longer than reward.timeout_s = 2 s"):
        late.result(DEADLINE_S)
    assert pool.call_and_wait("fine", on="it") == "fine"


@pytest.mark.parametrize(("what", "message"), [("block", "took longer than"), ("exit", "ended its process")])
def test_a_coroutine_that_blocks_or_ends_its_loop_costs_only_its_own_call(
    open_pool: Open, what: str, message: str
) -> None:
    pool = open_pool("awaits", timeout_s=2, concurrency=4)
    calls = [pool.submit(value, on="it") for value in ("a", what, "b", "c")]
    with pytest.raises(UserCodeFailed, match=message):
        calls[1].result(DEADLINE_S)
    assert [calls[k].result(DEADLINE_S) for k in (0, 2, 3)] == ["a", "b", "c"]


def test_a_function_that_cannot_be_had_is_refused_at_once_and_for_good(open_pool: Open) -> None:
    pool = open_pool("echo", entry="refused")
    with pytest.raises(ConfigError, match="^no echo$"):
        pool.until_ready()
    for _ in range(2):
        with pytest.raises(ConfigError, match="^no echo$"):
            pool.call_and_wait(1, on="it")


def test_a_child_that_does_not_start_costs_the_call(open_pool: Open) -> None:
    pool = open_pool("echo", entry="missing")
    for _ in range(2):
        with pytest.raises(UserCodeFailed, match="mine:echo: its process did not start; see this log"):
            pool.call_and_wait(1, on="it")


def test_a_child_that_died_while_it_had_nothing_to_do_is_replaced(open_pool: Open) -> None:
    pool = open_pool("pid")
    child = pool.call_and_wait(1, on="it")
    # The pool has not read its end of file when the next call comes.
    busy, gone = threading.Event(), threading.Event()
    pool._loop.call_soon_threadsafe(lambda: (busy.set(), gone.wait(DEADLINE_S)))
    assert busy.wait(DEADLINE_S)
    os.kill(child, signal.SIGKILL)
    wait_until_gone(child)
    call = pool.submit(1, on="it")
    gone.set()
    assert call.result(DEADLINE_S) != child


def test_close_kills_the_children_and_cancels_what_is_not_done(open_pool: Open) -> None:
    pool = open_pool("does", timeout_s=3600)
    pid = open_pool("pid").call_and_wait(0, on="it")
    calls = [pool.submit("hang", on="it") for _ in range(3)]
    pool.until_ready()
    pool.close()
    pool.close()
    for call in (*calls, pool.submit("fine", on="it")):
        with pytest.raises(CancelledError):
            call.result(0)
    assert Path(f"/proc/{pid}").exists(), "another pool's"


@pytest.mark.usefixtures("open_pool")
def test_one_process_has_a_deadline_for_each_call_and_tells_how_it_ended() -> None:
    does = Entry("users_code:entry", {"name": "does"})
    with CallProcess(does) as process:
        assert process.call("fine", timeout_s=DEADLINE_S) == "fine"
        with pytest.raises(CallRaised, match="ValueError: no idea"):
            process.call("raise")
        with pytest.raises(TimeoutError, match="timed out after 0.5 s"):
            process.call("hang", timeout_s=0.5)
        with pytest.raises(ChildDied, match="was ended by SIGKILL"):
            process.call("fine")
    with CallProcess(does) as process, pytest.raises(ChildDied, match="ended with code 3"):
        process.call("exit")


PARENT = """
import sys, threading
sys.path.insert(0, sys.argv[1])
from workers.calls.pool import CallPool, Entry
pool = CallPool(Entry("users_code:entry", {"name": sys.argv[2]}), what="w", limit="l", timeout_s=3600, concurrency=1)
print(pool.call_and_wait("the parent", on="it"), flush=True)
CallPool(Entry("users_code:entry", {"name": "does"}), what="w", limit="l", timeout_s=3600, concurrency=1).submit(
    "hold the lock", on="it"
)
threading.Event().wait()
"""


def start_parent(tmp_path: Path, name: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-c", PARENT, str(tmp_path), name],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_children_die_with_their_parent(open_pool: Open, tmp_path: Path) -> None:
    with start_parent(tmp_path, "pid") as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        parent.kill()
    wait_until_gone(child)


def test_what_the_function_prints_is_where_the_parent_prints_also_if_it_is_killed(
    open_pool: Open, tmp_path: Path
) -> None:
    with start_parent(tmp_path, "prints") as parent:
        assert parent.stdout is not None and parent.stderr is not None
        assert parent.stdout.readline() == "hello from the parent\n"
        assert parent.stderr.readline() == "and to stderr the parent\n"
        parent.kill()


def wait_until_gone(pid: int) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while _is_alive(pid):
        assert time.monotonic() < deadline, f"{pid} lives on"
        time.sleep(0.01)


def _is_alive(pid: int) -> bool:
    try:
        state: Any = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return bool(state != "Z")
