"""The `vllm` engine asleep, against a stand-in for vLLM that refuses wrong calls, orders, levels, tags and modes."""

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.support.strict_vllm import TAGS, WRONG, StrictLlm, Wrong, refuses, strict_vllm
from workers.engines.base import GenerateRequest, Generation, SleepingGenerator, WakePart
from workers.engines.vllm.engine import VllmEngine

NEVER = threading.Event()
TURN = ["wake ['weights']", "start", "update", "finish", "wake ['kv_cache']"]


@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: wrong.__name__.strip("_"))
def test_the_stand_in_refuses_what_vllm_would_do_wrong(wrong: Wrong) -> None:
    assert refuses(wrong)


def load(engine: VllmEngine, version: int) -> None:
    engine.load_weights({name: torch.zeros(need.shape) for name, need in engine.weight_needs().items()})
    engine.version = version


def requests(*tickets: int) -> list[GenerateRequest]:
    return [GenerateRequest(ticket, torch.tensor([3, 4]), seed=ticket, ticket=ticket) for ticket in tickets]


def drain(engine: VllmEngine) -> list[Generation]:
    responses = []
    while engine.num_running:
        responses += engine.step(NEVER)
    return sorted(responses, key=lambda response: response.ticket)


def wake(engine: VllmEngine, version: int) -> None:
    engine.wake(WakePart.WEIGHTS)
    load(engine, version)
    engine.wake(WakePart.KV_CACHE)


@pytest.mark.parametrize("tells_versions", [True, False], ids=["0.32", "before"])
def test_running_responses_go_on_after_a_sleep_and_none_is_lost(model_dir: Path, tells_versions: bool) -> None:
    llm = StrictLlm(tells_versions)
    with strict_vllm(model_dir, llm) as engine:
        assert isinstance(engine, SleepingGenerator)
        load(engine, 3)
        llm.most_tokens = 8
        engine.submit(requests(0, 1))
        while llm.num_drawn < 2 * 8:
            engine.step(NEVER)
        before = len(llm.calls)
        engine.sleep()
        assert llm.is_running == tells_versions, "an old vLLM cannot keep them"
        engine.submit(requests(2))
        engine.cancel(1)
        wake(engine, 4)
        assert llm.calls[before:] == [f"sleep 2 {'keep' if tells_versions else 'abort'}", *TURN]
        llm.most_tokens = 40
        responses = drain(engine)
        assert [response.ticket for response in responses] == [0, 2]
        assert [len(response.response_R) for response in responses] == [40, 40]
        assert responses[0].versions_R.tolist() == [3] * 8 + [4] * 32 and set(responses[1].versions_R.tolist()) == {4}
        assert llm.num_aborted == (0 if tells_versions else 2)


def test_no_token_is_drawn_before_the_cache_is_back(model_dir: Path) -> None:
    llm = StrictLlm()
    with strict_vllm(model_dir, llm) as engine:
        load(engine, 0)
        engine.sleep()
        engine.submit(requests(0))
        engine.wake(WakePart.WEIGHTS)
        load(engine, 1)
        engine._tasks.run_coroutine(_turns_of_the_loop(), what="the loop", timeout_s=60)
        assert (llm.num_drawn, llm.running) == (0, {})
        engine.wake(WakePart.KV_CACHE)
        assert len(drain(engine)) == 1


@pytest.mark.parametrize("tells_versions", [True, False], ids=["0.32", "before"])
def test_an_engine_that_got_no_weights_sleeps_again(model_dir: Path, tells_versions: bool) -> None:
    llm = StrictLlm(tells_versions, most_tokens=8)
    with strict_vllm(model_dir, llm) as engine:
        load(engine, 0)
        engine.submit(requests(0))
        while llm.num_drawn < 8:
            engine.step(NEVER)
        engine.sleep()
        engine.submit(requests(1))
        engine.wake(WakePart.WEIGHTS)
        engine.sleep()
        assert (llm.asleep, llm.num_drawn) == (TAGS, 8)
        llm.most_tokens = 40
        wake(engine, 1)
        assert [len(response.response_R) for response in drain(engine)] == [40, 40]


async def _turns_of_the_loop() -> None:
    for _ in range(100):
        await asyncio.sleep(0)


@pytest.mark.parametrize(
    "call", [lambda engine: engine.wake(WakePart.KV_CACHE), lambda engine: load(engine, 1)], ids=["cache", "weights"]
)
def test_wrong_order_is_refused_before_vllm_hears_of_it(model_dir: Path, call: Callable[[VllmEngine], None]) -> None:
    llm = StrictLlm()
    with strict_vllm(model_dir, llm) as engine:
        load(engine, 0)
        engine.sleep()
        known = list(llm.calls)
        with pytest.raises(AssertionError):
            call(engine)
        assert llm.calls == known
