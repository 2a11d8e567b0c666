"""Environments: what the policy reads and may call, what their steps are worth, and what ends them."""

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest

from asyncflow.errors import ConfigError, UserCodeFailed
from configs.smollm2_tools.calculator import Calculator
from launcher.config.load_config import load_config
from launcher.config.paths import find_recipe
from tests.support.chat_templates import tokenizer
from tests.support.policies import Played, played
from workers.agents import BudgetSpent, Environment, Reply, Task, tool
from workers.agents.agent_checks import usable
from workers.agents.turns import Message
from workers.agents.wire import Setup
from workers.agents.worker import load_rollout

REWARDS = [-0.25, -0.25, 1.0]
closed: list["Guess"] = []


class Guess(Environment):
    """The policy guesses a number, and may ask."""

    def reset(self, task: Task) -> str:
        self.number = task["number"]
        self.guesses = 0
        return "Which number?"

    @tool
    def is_larger(self, than: int) -> bool:
        """Say whether the number is larger."""
        self.context.log("asked", 1)
        return bool(self.number > than)

    def step(self, reply: Reply) -> tuple[str, float | None, bool]:
        self.guesses += 1
        if not reply.text.isdigit():
            raise ValueError(f"{reply.text} is not a number")
        right = int(reply.text) == self.number
        return f"no {self.guesses}", 1.0 if right else -0.25, right

    def close(self) -> None:
        closed.append(self)


class Slow(Environment):
    """Coroutines, messages, and no reward."""

    async def reset(self, task: Task) -> list[Message]:
        await asyncio.sleep(0)
        return [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Well?"}]

    @tool
    async def wait(self) -> str:
        """Wait."""
        await asyncio.sleep(0)
        return "waited"


class Odd(Guess):
    def step(self, reply: Reply) -> Any:
        return {"text": 7, "pair": ("no", 1.0), "dict": ({}, None, False), "nan": ("", float("nan"), True)}[reply.text]


def call(name: str, arguments: str) -> Message:
    function = {"name": name, "arguments": arguments}
    return {"role": "assistant", "tool_calls": [{"id": "c", "type": "function", "function": function}]}


def guessed(environment: type[Environment], *replies: str | Message, tools: Any = ()) -> Played:
    return played(environment, *replies, task={"number": 7}, tools=tools)


def test_each_reply_has_its_steps_reward_until_a_step_is_the_last() -> None:
    game = guessed(Guess, "3", "4", "7", "never")
    assert (game.sample.reward, game.sample.earlier, game.sample.node) == (REWARDS, (1, 2), 3)
    assert [message["content"] for message in game.last.messages] == ["Which number?", "3", "no 1", "4", "no 2"]


def test_each_rollout_has_an_instance_of_its_own_that_is_closed() -> None:
    closed.clear()
    guessed(Guess, "7")
    with pytest.raises(ValueError, match="x is not a number"):
        guessed(Guess, "x")
    assert [environment.guesses for environment in closed] == [1, 1]


def test_tools_are_methods_that_see_the_state_and_cost_no_step() -> None:
    def shout(text: str) -> str:
        """Shout."""
        return text.upper()

    replies = call("is_larger", '{"than": 3}'), call("shout", '{"text": "a"}'), call("reset", "{}"), "7"
    game = guessed(Guess, *replies, tools=[shout])
    last = game.last
    assert game.sample.reward == [0.0, 0.0, 0.0, 1.0]
    told = [message["content"] for message in last.messages if message["role"] == "tool"]
    assert told[:2] == ["true", "A"] and "no tool is called 'reset'" in told[2]
    assert [described["function"]["name"] for described in last.tools or ()] == ["is_larger", "shout"]
    assert (last.tools or ())[0]["function"]["parameters"]["properties"] == {"than": {"type": "integer"}}
    assert game.context.metrics == {"asked": 1.0}


def test_coroutines_and_messages_will_do_and_the_default_step_leaves_the_reward_to_the_function() -> None:
    game = guessed(Slow, call("wait", "{}"), "done")
    assert game.sample.reward is None
    assert [message["role"] for message in game.last.messages] == ["system", "user", "assistant", "tool"]
    assert game.last.messages[-1]["content"] == "waited"


def test_what_was_earned_counts_when_the_budget_is_spent() -> None:
    game = guessed(Guess, "3", "4")
    assert (game.sample.reward, game.sample.node) == (REWARDS[:2], 2)
    with pytest.raises(BudgetSpent):
        guessed(Guess)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("text", "^step returned 7; return"),
        ("pair", r"^step returned \('no', 1.0\); return"),
        ("dict", "^the environment's observation is {}; return text, or messages"),
        ("nan", "step's reward"),
    ],
)
def test_what_a_step_may_not_return_is_named(kind: str, words: str) -> None:
    with pytest.raises(UserCodeFailed, match=words):
        guessed(Odd, kind)


def test_a_tool_without_types_is_refused_where_the_class_is_made() -> None:
    with pytest.raises(ConfigError, match="argument 'than' of is_larger has no type"):

        class Untyped(Environment):
            @tool
            def is_larger(self, than):  # type: ignore[no-untyped-def]
                return than


@pytest.mark.parametrize("name", ["Game", "Plain"])
def test_a_class_is_a_rollout_function_if_it_is_an_environment(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_game.py").write_text(
        "from workers.agents import Environment\nclass Game(Environment): ...\nclass Plain: ...\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    if name == "Game":
        assert load_rollout("my_game:Game", None).__name__ == "rollout"
        return
    with pytest.raises(ConfigError, match=r"rollout.function: .*defines no 'Plain.rollout'"):
        load_rollout("my_game:Plain", None)


def test_tools_of_an_environment_need_a_template_that_writes_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_tool_game.py").write_text(
        "from workers.agents import Environment, tool\n"
        "class Game(Environment):\n    @tool\n    def look(self) -> str: ...\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    for family in ("qwen2.5", "smollm2"):
        tokenizer(family).save_pretrained(tmp_path / family)
        (tmp_path / family / "config.json").write_text('{"architectures": ["LlamaForCausalLM"], "eos_token_id": 0}')
    usable(setup_with_game(tmp_path / "qwen2.5"))
    with pytest.raises(ConfigError, match="ignores tools"):
        usable(setup_with_game(tmp_path / "smollm2"))


def setup_with_game(model_dir: Path) -> dict[str, Any]:
    changed = (
        f"model.path={model_dir}",
        "model.renderer=null",
        "rollout.function=my_tool_game:Game",
        "rollout.tools=[]",
    )
    config = load_config(find_recipe("quickstart-tools"), overrides=changed)
    setup: dict[str, Any] = msgspec.to_builtins(Setup.from_config(config, max_context=0, max_response_tokens=8))
    return setup


def test_calculator_of_the_recipe_takes_two_turns() -> None:
    game = played(Calculator, "<calc>37*64</calc>", "It is 2368.", "never", task={"prompt": "37*64"})
    assert (game.sample.node, game.sample.reward) == (2, None)
    assert game.last.messages[-1]["content"] == "The calculator says 2368."
    assert [message["content"] for message in game.last.messages[-3:-1]] == ["What is 37*64?", "<calc>37*64</calc>"]
