"""What rollout functions are written against, without a process: bad arguments fail where they are made."""

import asyncio
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from asyncflow.errors import UserCodeFailed, printable
from workers.agents import Context, Model, Reply, Sample, api
from workers.agents.turns import ChatRequest
from workers.agents.wire import attempt_done
from workers.agents.worker import _done
from workers.rewards.base import metrics_of, reward_of

ASKED: list[dict[str, Any]] = [{"role": "user", "content": "6*7?"}]
DEADLINE_S = 30


class Policy:
    """Says `42`, and keeps what it was asked for."""

    def __init__(self) -> None:
        self.requests: list[ChatRequest] = []

    async def __call__(self, request: ChatRequest) -> Reply:
        self.requests.append(request)
        return Reply({"role": "assistant", "content": "42"}, "stop", [4, 2], len(self.requests) - 1, attempt_id=7)


@pytest.mark.parametrize(
    ("messages", "arguments", "words"),
    [
        (ASKED, {"max_tokens": 4.5}, "max_tokens is 4.5"),
        (ASKED, {"max_tokens": 0}, "max_tokens is 0"),
        (ASKED, {"max_tokens": -1}, "max_tokens is -1"),
        (ASKED, {"max_tokens": True}, "max_tokens is True"),
        (ASKED, {"stop": [7]}, "stop is \\[7\\]"),
        (ASKED, {"stop": ""}, "stop is \\[''\\]"),
        (ASKED, {"stop": ["a", "\ud800"]}, "stop is \\['a', '.ud800'\\]: each must be whole characters"),
        ([{"role": "user", 1: 2}], {}, "messages is .*1: 2"),
        ([], {}, "messages is \\[\\]"),
    ],
)
def test_a_bad_argument_of_a_reply_is_named_and_never_sent(messages: Any, arguments: Any, words: str) -> None:
    policy = Policy()
    with pytest.raises(UserCodeFailed, match=words):
        asyncio.run(Model(policy).chat(messages).reply(**arguments))
    assert not policy.requests


@pytest.mark.parametrize("token_ids", [[1.0], [-5], [2**40], [], "12", [True], None])
def test_bad_token_ids_are_named_and_never_sent(token_ids: Any) -> None:
    policy = Policy()
    with pytest.raises(UserCodeFailed, match="token_ids is "):
        asyncio.run(Model(policy).generate(token_ids))
    assert not policy.requests


def test_a_text_is_one_stop() -> None:
    async def ask(policy: Policy) -> None:
        await Model(policy).chat(ASKED).reply(stop="12")
        await Model(policy).generate([1], stop="12")

    policy = Policy()
    asyncio.run(ask(policy))
    assert [request.stop for request in policy.requests] == [("12",), ("12",)]


def test_samples_know_the_rollout_that_drew_them() -> None:
    async def samples() -> list[api.Sample]:
        model = Model(Policy())
        chat = model.chat(ASKED)
        first, _ = await chat.reply(), await chat.reply()
        return [chat.sample(), chat.fork().sample(), model.sample(first)]

    assert [(one.node, one.earlier, one.attempt_id) for one in asyncio.run(samples())] == [
        (1, (0,), 7),
        (1, (0,), 7),
        (0, (), 7),
    ]


def test_a_cancelled_call_that_only_waits_in_line_ends_at_once_and_never_runs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    begun, release, called = threading.Event(), threading.Event(), []  # type: ignore[var-annotated]

    def blocks() -> None:
        begun.set()
        assert release.wait(DEADLINE_S)

    async def run() -> None:
        context = Context(0.0, tmp_path, [])
        first = asyncio.create_task(context.run(blocks))
        while not begun.is_set():
            await asyncio.sleep(0)
        second = asyncio.create_task(context.run(called.append, 1))
        await asyncio.sleep(0)  # until it stands in line
        second.cancel()
        await asyncio.wait({second}, timeout=DEADLINE_S / 2)
        assert second.cancelled()
        release.set()
        await first

    with ThreadPoolExecutor(1) as threads:
        monkeypatch.setattr(api, "_THREADS", threads)
        try:
            asyncio.run(run())
        finally:
            release.set()
    assert not called


@pytest.mark.parametrize("name", ["turns", "tool_s", "cpu_s", "bridge_failures", "", "a\nb", "\x1b[31m"])
def test_a_metric_with_the_name_of_the_runs_own_or_of_none_is_refused(name: str) -> None:
    with pytest.raises(UserCodeFailed, match="metric"):
        metrics_of({name: 1.0})


@pytest.mark.parametrize("value", ["1.0", "great", float("nan"), None, 10**400])
def test_a_reward_that_is_no_number_is_named_with_its_value(value: Any) -> None:
    with pytest.raises(UserCodeFailed) as raised:
        reward_of({"reward": value} if value is not None else [value])
    assert str(raised.value).startswith("the reward is ")
    assert repr(value)[:10] in str(raised.value)


def test_an_object_without_a_reward_is_refused_but_null_leaves_it_to_the_reward_function() -> None:
    with pytest.raises(UserCodeFailed, match="rewrad.*no `reward`"):
        reward_of({"rewrad": 1.0})
    assert reward_of({"reward": None, "seen": 2}) == (None, {"seen": 2.0})
    assert (reward_of(0.5), reward_of(None)) == ((0.5, {}), (None, {}))


def test_texts_are_made_printable_once() -> None:
    escaped = printable("caf\u00e9 \x1b[31m \ud800 it's \\n")
    assert escaped == "caf\u00e9 \\x1b[31m \\ud800 it's \\n"
    assert printable(escaped) == escaped


def reply_of(node: int) -> Reply:
    return Reply({"role": "assistant", "content": "yes"}, "stop", [1], node, attempt_id=1)


def test_one_reward_for_a_rollout_or_one_for_each_reply() -> None:
    async def never(request: ChatRequest) -> Reply:
        raise AssertionError

    model, first, second, aside = Model(never), *map(reply_of, (0, 2, 1))
    whole = _done(1, model.sample([first, second], reward=[0.25, 1]), {})
    assert (whole.nodes, whole.reward, whole.turn_rewards) == ([0, 2], None, {0: 0.25, 2: 1.0})
    both = [model.sample([first, second], reward=(0.25, 1)), model.sample([first, aside], reward=[0.25, 2])]
    assert _done(1, both, {}).turn_rewards == {0: 0.25, 2: 1.0, 1: 2.0}
    plain = _done(1, [model.sample(first, reward=0.5), model.sample(aside)], {})
    assert (plain.reward, plain.turn_rewards) == (0.5, None)
    agent = attempt_done(1, [], *reward_of({"reward": [0, 1.5], "tests": 3}))
    assert (agent.reward, agent.turn_rewards, agent.metrics) == (None, {0: 0.0, 1: 1.5}, {"tests": 3.0})


def test_the_replies_of_a_sample_are_different_ones_of_one_rollout() -> None:
    async def never(request: ChatRequest) -> Reply:
        raise AssertionError

    first, others = reply_of(0), replace(reply_of(1), attempt_id=2)
    for replies in ([], [first, first], [others, first]):
        with pytest.raises(UserCodeFailed, match="several different ones of one rollout"):
            Model(never).sample(replies, reward=[1.0] * len(replies))


@pytest.mark.parametrize(
    ("rewards", "words"),
    [
        ([[1.0], None], "a sample of 2 replies has 1 rewards; give one for each reply, in order, or one number"),
        ([[0.25, 1.0], [0.5, 1.0]], "two samples share a reply and give it rewards 0.25 and 0.5; give it the same"),
        ([[0.25, 1.0], 0.5], "some samples of the rollout have one reward, others one per reply"),
        ([[0.25, float("nan")], None], "the reward of turn 2 of 2 is nan; give a number"),
        ([[3e38, 3e38], None], "the sum of the turns' rewards is 6e"),
        ([["1", 2.0], None], "the reward is "),
        ([[], None], "the reward is "),
        ([{0: 1.0}, None], "the reward is "),
    ],
)
def test_rewards_of_turns_that_would_train_something_else_are_refused(rewards: Sequence[Any], words: str) -> None:
    replies = [reply_of(0), reply_of(2)], [reply_of(0), reply_of(1)]
    samples = [
        Sample(last.node, reward, earlier=(first.node,), attempt_id=1)
        for (first, last), reward in zip(replies, rewards, strict=True)
    ]
    with pytest.raises(UserCodeFailed) as raised:
        _done(1, samples, {})
    assert words in str(raised.value)
