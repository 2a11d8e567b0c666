"""Environments: a rollout as a class with `reset` and `step`. Torch-free.

from workers.agents import Environment, Reply, Task, tool

class Guess(Environment):                     # rollout.function: guess:Guess
    def reset(self, task: Task) -> str:
        self.number = task["number"]
        return "I think of a number from 1 to 100. Ask, then say it."

    @tool
    def is_larger(self, than: int) -> bool:
        "Say whether the number is larger than another."
        return self.number > than

    def step(self, reply: Reply) -> tuple[str, float, bool]:
        right = reply.text == str(self.number)
        return "No. Say another.", float(right), right
"""

import inspect
import types
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, TypeVar

from asyncflow.errors import UserCodeFailed
from workers.agents.api import Chat, Context, Model, Reply, Sample, Task
from workers.agents.errors import BudgetSpent
from workers.agents.messages import Message
from workers.agents.tools import Tool
from workers.rewards.base import finite

Function = TypeVar("Function", bound=Callable[..., Any])
Observation = str | Sequence[Message]
"""What the policy reads next: the text of a user's message, or messages."""
Step = tuple[Observation, float | None, bool]
"""(observation, reward, done): rewards add up, None is none; with `done` the observation is not read."""


def tool(method: Function) -> Function:
    """Let the policy call a method of an environment; it is described as a function of `rollout.tools` is."""
    method.__dict__["_is_tool"] = True
    return method


class Environment:
    """One rollout's environment: made anew for each, without arguments.

    Methods may be `def`, which run in a thread, or `async def`. What they raise is a failure of the rollout, but the
    policy reads what a tool raises. When turns, tokens or context are spent the rewards so far count; when its time
    is, `reward.function` scores the last reply.

    Attributes:
        tools: of the class, described.
        context: of the rollout.
    """

    tools: ClassVar[Sequence[Tool]] = ()
    context: Context

    def __init_subclass__(cls, **arguments: Any) -> None:
        """Describe the tools.

        Raises:
            ConfigError: an argument of one has no type, or one that JSON has no word for.
        """
        super().__init_subclass__(**arguments)
        methods = (getattr(cls, name) for name in dir(cls))
        cls.tools = [Tool.of(types.MethodType(method, cls)) for method in methods if hasattr(method, "_is_tool")]

    def reset(self, task: Task) -> Observation | Awaitable[Observation]:
        """Begin; return what the policy reads first."""
        raise NotImplementedError

    def step(self, reply: Reply) -> Step | Awaitable[Step]:
        """Take a reply that calls no tool; the default ends the rollout, for `reward.function` to score."""
        return "", None, True

    def close(self) -> Awaitable[None] | None:
        """Release what it holds; called once, however the rollout ends."""

    @classmethod
    async def rollout(cls, task: Task, model: Model, context: Context) -> Sample:
        """Play one rollout; see `workers.agents.api`."""
        environment = await context.run(cls)
        own = [replace(each, function=getattr(environment, each.name)) for each in cls.tools]
        environment.context = context = replace(context, tools=[*own, *context.tools])
        try:
            chat = model.chat(_messages(await _call(context, environment.reset, task)), tools=context.tools)
            return chat.sample(await _play(environment, chat, context))
        finally:
            await _call(context, environment.close)


async def _play(environment: Environment, chat: Chat, context: Context) -> float | None:
    """Return the sum of the rewards; None: there was none."""
    total, num_replies, done = None, 0, False
    while not done:
        try:
            reply = await chat.reply()
        except BudgetSpent:
            if not num_replies:
                raise
            break
        num_replies += 1
        for call in reply.tool_calls:
            chat.add(await context.call(call))
        if not reply.tool_calls:
            observation, reward, done = _checked(await _call(context, environment.step, reply))
            chat.add(*([] if done else _messages(observation)))
            total = total if reward is None else (total or 0.0) + finite("step's reward", reward)
    return total


async def _call(context: Context, function: Callable[..., Any], *arguments: Any) -> Any:
    if inspect.iscoroutinefunction(function):
        return await function(*arguments)
    return await context.run(function, *arguments)


def _checked(returned: Any) -> Step:
    if not isinstance(returned, tuple) or len(returned) != 3 or not isinstance(returned[2], bool):
        raise UserCodeFailed(f"step returned {returned!r:.80}; return (observation, reward or None, done)")
    return returned


def _messages(observation: Any) -> list[Message]:
    if isinstance(observation, str):
        return [{"role": "user", "content": observation}]
    if not isinstance(observation, Sequence) or not all(isinstance(each, Mapping) for each in observation):
        raise UserCodeFailed(f"the environment's observation is {observation!r:.80}; return text, or messages")
    return [dict(each) for each in observation]
