"""`async def` rewards: they overlap, share a loop, and one that raises, hangs or blocks costs its answer."""

import asyncio
import queue
import threading
from collections.abc import Coroutine
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from asyncflow.errors import ConfigError, UserCodeFailed
from workers.coroutines import CoroutineThread
from workers.rewards.base import Score
from workers.rewards.user import UserReward
from workers.user_function import check_function

DEADLINE_S = 60


def reward(function: object, *, timeout_s: float = DEADLINE_S) -> UserReward:
    return UserReward(function, name="mine:score", timeout_s=timeout_s)  # type: ignore[arg-type]


def test_coroutines_of_several_answers_run_at_the_same_time_in_one_loop() -> None:
    loops, arrived, all_here = set(), [], asyncio.Event()

    async def score(prompt: str, response: str, answer: str) -> float:
        loops.add(asyncio.get_running_loop())
        arrived.append(response)
        if len(arrived) == 8:
            all_here.set()
        await all_here.wait()
        return float(response)

    with ThreadPoolExecutor(8) as callers:
        scores = list(callers.map(lambda number: reward(score)("", str(number), ""), range(8)))
    assert [one.reward for one in scores] == list(range(8))
    assert len(loops) == 1


def test_what_a_coroutine_raises_costs_its_answer() -> None:
    async def score(prompt: str, response: str, answer: str) -> float:
        await asyncio.sleep(0)
        raise ValueError("no idea")

    with pytest.raises(UserCodeFailed, match="mine:score raised ValueError: no idea on response 'x'"):
        reward(score)("", "x", "")


def test_a_coroutine_that_waits_for_ever_is_cancelled() -> None:
    cancelled = threading.Event()

    async def score(prompt: str, response: str, answer: str) -> float:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.set()
            raise
        return 0.0

    with pytest.raises(UserCodeFailed, match="took longer than reward.timeout_s = 2 s"):
        reward(score, timeout_s=2)("", "", "")
    assert cancelled.wait(DEADLINE_S)


def test_a_coroutine_that_begins_after_the_deadline_is_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    over, begun = threading.Event(), queue.SimpleQueue["Future[Any]"]()

    class Recording(CoroutineThread):
        def start(self, coroutine: Coroutine[Any, Any, Any]) -> "Future[Any]":
            future = super().start(coroutine)
            begun.put(future)
            return future

    def score(prompt: str, response: str, answer: str) -> Coroutine[Any, Any, bool]:
        assert over.wait(DEADLINE_S)
        return asyncio.Event().wait()

    monkeypatch.setattr("workers.user_function._COROUTINES", Recording())
    with pytest.raises(UserCodeFailed, match="took longer"):
        reward(score, timeout_s=0.05)("", "", "")
    over.set()
    with pytest.raises(CancelledError):
        begun.get(timeout=DEADLINE_S).result(DEADLINE_S)


def test_a_coroutine_that_blocks_its_loop_does_not_block_the_next_ones() -> None:
    release = threading.Event()

    async def blocks(prompt: str, response: str, answer: str) -> float:
        release.wait(DEADLINE_S)
        return 0.0

    async def fine(prompt: str, response: str, answer: str) -> Score:
        await asyncio.sleep(0)
        return Score(0.5, True)

    with pytest.raises(UserCodeFailed, match="took longer"):
        reward(blocks, timeout_s=2)("", "", "")
    assert reward(fine)("", "", "") == Score(0.5, True)
    release.set()


def test_arguments_of_an_async_function_are_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_async.py").write_text("async def one(prompt): ...\nasync def three(p, r, a): ...\n")
    arguments = ("prompt", "response", "answer")
    check_function("my_async:three", field="reward.function", arguments=arguments)
    with pytest.raises(ConfigError, match="one must take prompt, response, answer"):
        check_function("my_async:one", field="reward.function", arguments=arguments)
