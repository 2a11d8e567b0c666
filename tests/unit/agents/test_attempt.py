"""One attempt at a rollout: its budgets while calls run, and the conversations of its samples."""

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest

from asyncflow.errors import UserCodeFailed
from launcher.config.paths import find_recipe
from tests.support.chat_templates import tokenizer
from workers.agents import Model, Sample
from workers.agents.attempt import Attempt, BudgetIsSpent
from workers.agents.rendering import TOOL, TemplateRenderer
from workers.agents.rollout_errors import BadAgentRequest
from workers.agents.service import Service
from workers.agents.turns import ChatRequest, Message
from workers.agents.wire import AttemptDone, Begin, Drawn, Setup
from workers.agents.worker import _done

MODEL = find_recipe("quickstart-tools").parent / "quickstart_tools" / "model"
ASKED: list[Message] = [{"role": "user", "content": "6*7?"}]
MORE: list[Message] = [{"role": "user", "content": "Sure?"}]
BEGIN = Begin(1, "{}", 0, 0, 0, 1)


def setup_of(**changed: Any) -> Setup:
    settings: dict[str, Any] = {
        "model_dir": str(MODEL), "renderer": "configs.quickstart_tools.renderer:CalculatorRenderer",
        "function": None, "agent": None, "command": [], "tools": [], "timeout_s": 60.0, "max_turns": 0, "max_tokens": 0,
        "max_context": 0, "max_response_tokens": 8, "max_attempts": 1, "num_workers": 1, "scratch": "",
    }  # fmt: skip
    return Setup(**settings | changed)


def attempt_of(**changed: Any) -> Attempt:
    return Attempt(1, BEGIN, key="", nth=0, setup=setup_of(**changed), renderer=TemplateRenderer(tokenizer("qwen3")))


def ids_of(text: str) -> list[int]:
    return list(tokenizer("qwen3").encode(text, add_special_tokens=False))


async def draw_yes(ticket: int, prompt: Sequence[int], max_tokens: int, seed: int, stop: Sequence[str]) -> Drawn:
    await asyncio.sleep(0)
    ids = ids_of("yes<|im_end|>")
    return Drawn(1, ids, [-0.5] * len(ids), [3] * len(ids), truncated=False)


def test_tokens_that_running_calls_may_not_need_are_waited_for_and_not_spent() -> None:
    attempt = attempt_of(max_tokens=16)
    rooms: list[int] = []

    async def draw(ticket: int, prompt: Sequence[int], max_tokens: int, seed: int, stop: Sequence[str]) -> Drawn:
        rooms.append(max_tokens)
        return await draw_yes(ticket, prompt, max_tokens, seed, stop)

    async def ask() -> None:
        await asyncio.gather(*(attempt.complete_turn(ChatRequest(ASKED), draw=draw) for _ in range(3)))

    asyncio.run(asyncio.wait_for(ask(), 30))
    assert rooms == [8, 8, 8]  # of the first 16, two replies took six
    assert not attempt.spent


def test_a_call_that_waited_in_vain_for_tokens_has_spent_them() -> None:
    attempt = attempt_of(max_tokens=len(ids_of("yes<|im_end|>")))

    async def ask() -> list[Any]:
        calls = (attempt.complete_turn(ChatRequest(ASKED), draw=draw_yes) for _ in range(2))
        return await asyncio.gather(*calls, return_exceptions=True)

    first, second = asyncio.run(asyncio.wait_for(ask(), 30))
    assert first.text == "yes"
    assert isinstance(second, BudgetIsSpent)
    assert attempt.spent


def test_each_sample_has_its_conversation_though_another_one_went_on_from_it() -> None:
    attempt = attempt_of()

    async def ask() -> list[int]:
        first = await attempt.complete_turn(ChatRequest(ASKED), draw=draw_yes)
        longer = [*ASKED, first.message, *MORE]
        second = await attempt.complete_turn(ChatRequest(longer), draw=draw_yes)
        return [first.node, second.node]

    first, second = asyncio.run(ask())
    said = {"role": "assistant", "content": "yes"}
    short, long = [*ASKED, said], [*ASKED, said, *MORE, said]
    for nodes, conversations in (([first], [short]), ([second], [long]), ([first, second], [long]), ([], [long])):
        result = attempt.result(AttemptDone(1, nodes, 1.0, {}), spent=False)
        assert (result.conversations, len(result.samples)) == (conversations, 1)


def test_a_template_that_ignores_tools_is_the_agents_error_also_where_tokens_are_counted() -> None:
    async def count() -> int:
        engine: Any = None  # it draws nothing
        service = Service(engine, setup_of(agent="nowhere:agent"))
        service._renderer = TemplateRenderer(tokenizer("smollm2"))
        service._start_attempt(BEGIN, nth=0)
        (key,) = service._keys
        assert service.count(key, ChatRequest(ASKED)) > 0
        return service.count(key, ChatRequest(ASKED, [TOOL]))

    with pytest.raises(BadAgentRequest, match="tools: .* ignores tools"):
        asyncio.run(count())


def test_rewards_of_turns_are_in_their_order_and_the_rollouts_is_their_sum() -> None:
    attempt = attempt_of(tells_turns=True)
    first, second, aside = asyncio.run(asked_thrice(attempt))
    result = attempt.result(
        AttemptDone(1, [], None, {}, turn_rewards={aside: 0.5, first: 0.25, second: -1.0}), spent=False
    )
    assert (result.turn_rewards, result.reward, result.num_trained_turns) == ([0.25, -1.0, 0.5], -0.25, 3)
    said = {"role": "assistant", "content": "yes"}
    assert result.turn_messages == [[*ASKED, said], [*MORE, said], [*MORE, said]]
    alone = attempt.result(AttemptDone(1, [second], None, {}, turn_rewards={first: 1.0, second: 2.0}), spent=False)
    assert (alone.turn_rewards, alone.num_trained_turns) == ([1.0, 2.0], 2)
    plain = attempt.result(AttemptDone(1, [], 0.5, {}), spent=False)
    assert (plain.turn_rewards, plain.reward) == (None, 0.5)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (
            {0: 1.0, 1: 1.0},
            r"^rewards for 2 turns, but the rollout trains 3 \(turn 3 has none\); give one number for each",
        ),
        ({0: 1.0, 1: 1.0, 2: 0.0, 3: 0.0}, "^rewards for 4 turns, but the rollout trains 3; give"),
    ],
)
def test_as_many_rewards_as_trained_turns_or_none(given: dict[int, float], words: str) -> None:
    attempt = attempt_of()
    asyncio.run(asked_thrice(attempt))
    with pytest.raises(UserCodeFailed, match=words):
        attempt.result(AttemptDone(1, [], None, {}, turn_rewards=given), spent=False)


def test_a_chat_goes_on_with_its_own_reply_if_others_said_the_same() -> None:
    """Best of two forks: the other one's reply must not be trained in its place, without a reward."""
    attempt = attempt_of()
    model = Model(partial(attempt.complete_turn, draw=draw_yes))

    async def play() -> Sample:
        chats = [model.chat([*ASKED]) for _ in range(3)]
        for chat in chats:
            await chat.reply()
        chats[2].add(*MORE)
        await chats[2].reply()
        return chats[2].sample(reward=[0.25, 1.0])

    sample = asyncio.run(play())
    assert (sample.earlier, sample.node) == ((2,), 3)
    finished = attempt.result(_done(attempt.number, sample, {}), spent=False)
    assert finished.turn_rewards == [0.25, 1.0] and len(finished.samples) == 1


async def asked_thrice(attempt: Attempt) -> list[int]:
    """A conversation of two turns, and another one of one."""
    first = await attempt.complete_turn(ChatRequest(ASKED), draw=draw_yes)
    second = await attempt.complete_turn(ChatRequest([*ASKED, first.message, *MORE]), draw=draw_yes)
    aside = await attempt.complete_turn(ChatRequest(MORE), draw=draw_yes)
    return [first.node, second.node, aside.node]
