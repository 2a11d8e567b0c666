"""Models that are asked and not trained."""

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import ValidationError

from asyncflow.errors import ConfigError, UserCodeFailed
from tests.support.judge import SAID, Judge
from workers.agents import other_model
from workers.agents.other_model import OtherModel
from workers.agents.turns import Utterance
from workers.settings.rollout import RolloutConfig, ServedModelConfig

KEY = "sk-secret-of-a-judge"
HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture
def judge(monkeypatch: pytest.MonkeyPatch) -> Iterator[Judge]:
    monkeypatch.setenv("JUDGE_KEY", KEY)
    monkeypatch.setattr(other_model, "_LONGEST_PAUSE_S", 0.0)
    one = Judge()
    yield one
    one.close()


def ask(served: ServedModelConfig, **fields: Any) -> Utterance:
    async def asked() -> Utterance:
        model = OtherModel("judge", served.model_dump())
        try:
            return await model.chat(HELLO, **fields)
        finally:
            await model.close()

    return asyncio.run(asyncio.wait_for(asked(), 60))


def test_a_judge_is_asked_with_its_key_and_options(judge: Judge) -> None:
    said = ask(judge.served(), max_tokens=5)
    assert (said.text, said.finish_reason, said.tool_calls) == ("7/10", "stop", [])
    body = {"model": "judge-7b", "temperature": 0, "max_tokens": 5, "messages": HELLO}
    assert judge.asked == [("/v1/chat/completions", f"Bearer {KEY}", body)]


def test_a_request_that_failed_is_sent_again(judge: Judge) -> None:
    judge.answers = [(429, {}), (503, b"busy"), (200, SAID)]
    assert ask(judge.served()).text == "7/10"
    assert len(judge.asked) == 3


@pytest.mark.parametrize(
    ("answer", "words", "asked"),
    [
        ((500, b"broken"), "answered 500: broken (asked 3 times)", 3),
        ((401, {"error": f"wrong key {KEY}"}), "wrong key ***", 1),
        ((302, b""), "answered 302", 1),
        ((200, b"<html>"), "not a chat completion: <html>", 1),
        ((200, {"choices": []}), "not a chat completion", 1),
    ],
)
def test_what_cannot_be_used_is_one_line_without_the_key(judge: Judge, answer: Any, words: str, asked: int) -> None:
    judge.answers = [answer]
    with pytest.raises(UserCodeFailed) as raised:
        ask(judge.served())
    text = str(raised.value)
    assert text.startswith("rollout.models.judge (http://127.0.0.1:")
    assert words in text
    assert KEY not in text and "\n" not in text
    assert len(judge.asked) == asked


def test_a_server_that_is_not_there_is_named(judge: Judge) -> None:
    with pytest.raises(UserCodeFailed, match=r"rollout.models.judge .*does not answer: .*asked 3 times"):
        ask(judge.served(base_url="http://127.0.0.1:1"))


def test_a_key_that_is_not_there_is_refused_before_anything_is_asked(judge: Judge) -> None:
    with pytest.raises(ConfigError, match=r"rollout.models.judge.api_key_variable: the environment has no OTHER_KEY"):
        OtherModel("judge", judge.served(api_key_variable="OTHER_KEY").model_dump())
    assert ask(judge.served(api_key_variable="")).text == "7/10"
    assert judge.asked[0][1] is None


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"models": {"judge": {"base_url": "http://me:word@host/v1", "model": "m"}}}, "has a user name"),
        ({"models": {"judge": {"base_url": "http://host/v1", "model": "m"}}, "function": None}, "clients of their own"),
    ],
)
def test_models_that_cannot_be_asked_are_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        RolloutConfig.model_validate({"max_response_tokens": 4, "function": "tools", **fields})
