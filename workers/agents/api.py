"""What a rollout function is written against: the task, the policy to talk to, and what surrounds them. Torch-free.

    from workers.agents import Chat, Context, Model, Sample, Task

    async def rollout(task: Task, model: Model, context: Context) -> Sample | list[Sample]:
        chat = model.chat([{"role": "user", "content": task["question"]}], tools=context.tools)
        while (reply := await chat.reply()).tool_calls:
            for call in reply.tool_calls:
                chat.add(await context.call(call))
        return chat.sample(reward=float(task["answer"] in reply.text))

Every call goes on behind exactly the tokens that were drawn before; what the policy drew is never tokenized again.
"""

import asyncio
import contextvars
import json
import reprlib
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec

from asyncflow.errors import UserCodeFailed
from workers.agents.errors import TaskSkipped
from workers.agents.messages import Message
from workers.agents.other_model import OtherModel, Utterance
from workers.agents.requests import ChatRequest
from workers.agents.tools import Tool, call_tool
from workers.agents.wire import Begin
from workers.rewards.base import metrics_of
from workers.settings.rollout import unusable_stop

T = TypeVar("T")

_ARGUMENTS: Mapping[str, Any] = {
    "messages": Annotated[list[dict[str, Any]], msgspec.Meta(min_length=1)],
    "tools": list[dict[str, Any]],
    "token_ids": Annotated[list[Annotated[int, msgspec.Meta(ge=0, lt=2**31)]], msgspec.Meta(min_length=1)],
    "max_tokens": Annotated[int, msgspec.Meta(ge=1, lt=2**31)] | None,
    "stop": list[str],
}
_THREADS = ThreadPoolExecutor(256, thread_name_prefix="rollout")
"""Of `Context.run`, for all rollouts of a process; a thread starts when it is needed."""


class Task(Mapping[str, Any]):
    """One row of the data: `task["question"]`.

    Attributes:
        index: global index of the row.
        group: of the rows that have this task; `member`: which of them this is, from 0.
        seed: of this rollout's random numbers, 64 bits.
    """

    def __init__(self, row: Mapping[str, Any], *, index: int, group: int, member: int, seed: int) -> None:
        self._row = row
        self.index = index
        self.group = group
        self.member = member
        self.seed = seed

    def __getitem__(self, name: str) -> Any:
        try:
            return self._row[name]
        except KeyError:
            raise KeyError(f"{name} (the row has {', '.join(self._row) or 'no fields'})") from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._row)

    def __len__(self) -> int:
        return len(self._row)


@dataclass(frozen=True)
class Reply(Utterance):
    """What the policy said.

    Attributes:
        token_ids: that were drawn.
        node: names them, in its rollout's attempt `run`.
    """

    token_ids: list[int]
    node: int
    run: int = 0


@dataclass(frozen=True)
class Sample:
    """What is trained: the token sequence that ends with one drawn piece.

    Attributes:
        node: that piece, drawn in the rollout's attempt `run`.
        reward: of the whole rollout; None: `reward.function` scores the last reply.
        metrics: numbers by name.
        earlier: pieces of the same conversation: what the last one does not go on from in tokens is trained beside it.
    """

    node: int
    reward: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    earlier: tuple[int, ...] = ()
    run: int = 0


Policy = Callable[[ChatRequest, Sequence[int] | None], Awaitable[Reply]]
"""(request, token ids) -> the policy's reply to the conversation, or what it draws behind the token ids, if given.

Raises:
    BudgetSpent: see there.
    UserCodeFailed: the request cannot be taken.
"""


class Model:
    """The policy in training."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy

    def chat(self, messages: Sequence[Message], tools: "Sequence[Tool | Message] | None" = None) -> "Chat":
        """Begin a conversation; tools as of `context.tools`, or as OpenAI's API has them."""
        described = [tool.description if isinstance(tool, Tool) else tool for tool in tools or ()]
        return Chat(self._policy, [dict(message) for message in messages], described)

    async def generate(
        self, token_ids: Sequence[int], *, max_tokens: int | None = None, stop: str | Sequence[str] = ()
    ) -> Reply:
        """Go on behind tokens; those of an earlier reply and its prompt are continued, not begun anew.

        Args:
            token_ids: of the whole prompt, at least 1.
            max_tokens, stop: see `Chat.reply`.

        Raises:
            BudgetSpent: see there.
            UserCodeFailed: an argument cannot be used.
        """
        stop = [stop] if isinstance(stop, str) else stop
        _check(token_ids=token_ids, max_tokens=max_tokens, stop=stop)
        return await self._policy(ChatRequest([], max_tokens=max_tokens, stop=tuple(stop)), token_ids)

    def sample(
        self, reply: Reply, *, reward: float | None = None, metrics: Mapping[str, float] | None = None
    ) -> Sample:
        """Return the sample that ends with this reply."""
        return Sample(reply.node, reward, metrics or {}, run=reply.run)


class Chat:
    """A conversation.

    Attributes:
        messages: all of it; replies are appended.
    """

    def __init__(self, policy: Policy, messages: list[Message], tools: list[Message]) -> None:
        self.messages = messages
        self._policy = policy
        self._tools = tools
        self._replies: list[Reply] = []

    def add(self, *messages: Message) -> None:
        """Append messages, e.g. `{"role": "tool", "tool_call_id": ..., "content": ...}`."""
        self.messages.extend(dict(message) for message in messages)

    async def reply(self, *, max_tokens: int | None = None, stop: str | Sequence[str] = ()) -> Reply:
        """Have the policy reply, and append what it said.

        Args:
            max_tokens: at most so many; None: `rollout.max_response_tokens`.
            stop: a text, or several: the reply ends with the token that completes the first of them, which is trained;
                its text is what stands before. Special tokens count as their text.

        Raises:
            BudgetSpent: see there.
            UserCodeFailed: an argument cannot be used, or the conversation not be rendered.
        """
        stop = [stop] if isinstance(stop, str) else stop
        _check(messages=self.messages, tools=self._tools, max_tokens=max_tokens, stop=stop)
        request = ChatRequest(self.messages, self._tools or None, max_tokens, tuple(stop))
        reply = await self._policy(request, None)
        self.messages.append(reply.message)
        self._replies.append(reply)
        return reply

    def fork(self) -> "Chat":
        """Return a conversation that goes on from here by itself."""
        other = Chat(self._policy, [dict(message) for message in self.messages], self._tools)
        other._replies = list(self._replies)
        return other

    def sample(self, reward: float | None = None, metrics: Mapping[str, float] | None = None) -> Sample:
        """Return the sample that ends with the last reply; earlier replies that it could not go on from in tokens are
        samples beside it.

        Raises:
            UserCodeFailed: there was none.
        """
        if not self._replies:
            raise UserCodeFailed("chat.sample: the policy has not replied yet; call chat.reply() first")
        *earlier, last = self._replies
        return Sample(last.node, reward, metrics or {}, tuple(reply.node for reply in earlier), last.run)


@dataclass
class Context:
    """What surrounds one rollout.

    Attributes:
        deadline: of the rollout, by `time.monotonic()` (s).
        directory: becomes `scratch`.
        tools: of `rollout.tools`.
        attempt: from 0; more where earlier ones failed.
        models: of `rollout.models`: `await context.models["judge"].chat(messages)`. They are not trained.
    """

    deadline: float
    directory: Path
    tools: Sequence[Tool]
    attempt: int = 0
    models: Mapping[str, OtherModel] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)

    @cached_property
    def scratch(self) -> Path:
        """A directory of this rollout's own, removed at its end."""
        self.directory.mkdir(parents=True, exist_ok=True)
        return self.directory

    def log(self, name: str, value: float) -> None:
        """Report a number of this rollout; the last one of a name counts.

        Raises:
            UserCodeFailed: it is no finite number, or the name cannot be used.
        """
        self.metrics |= metrics_of({name: value})

    def skip(self, reason: str) -> None:
        """Give this task up: its group leaves the run, and the next prompt takes its place."""
        raise TaskSkipped(reason)

    async def call(self, tool_call: Message) -> Message:
        """Call the tool that the policy named; return its result as a message. What it raises is the result, too, but
        for `skip`, a spent budget, and memory that ran out."""
        return await call_tool(self.tools, tool_call, run=self.run)

    async def run(self, function: Callable[..., T], *args: Any) -> T:
        """Run a function that blocks in a thread, so that other rollouts of this process go on.

        256 calls of a process run at a time; others wait in line. A rollout that is cancelled meanwhile ends when the
        function does, at once if it has not begun; one that hangs costs the process.
        """
        surroundings = contextvars.copy_context()

        def call() -> T:
            try:
                return surroundings.run(function, *args)
            except StopIteration as error:  # no future takes it: the wait would never end
                raise RuntimeError("StopIteration: what was iterated over has ended") from error

        work = _THREADS.submit(call)
        ended = asyncio.wrap_future(work)
        try:
            return await asyncio.shield(ended)
        except asyncio.CancelledError:
            if not work.cancel():  # it has begun
                await asyncio.wait({ended})
            raise


def task_of(begin: Begin) -> Task:
    """Return the task of a row that was sent."""
    return Task(json.loads(begin.task), index=begin.index, group=begin.group, member=begin.member, seed=begin.seed)


def _check(**arguments: Any) -> None:
    """Refuse what the session service could not read: there it would cost the process, with all its rollouts.

    Raises:
        UserCodeFailed: names the argument.
    """
    for name, value in arguments.items():
        try:
            msgspec.convert(value, _ARGUMENTS[name])
        except msgspec.ValidationError as error:
            raise UserCodeFailed(f"{name} is {reprlib.repr(value)}: {error}") from error
    for text in arguments.get("stop", ()):
        if wrong := unusable_stop(text):
            raise UserCodeFailed(f"stop is {reprlib.repr(arguments['stop'])}: each {wrong}")


async def call_tools(task: Task, model: Model, context: Context) -> Sample:
    """`rollout.function: tools`: reply and call tools until a reply calls none.

    The task has `messages`, or a `prompt`; `reward.function` scores the last reply's text.
    """
    messages = task.get("messages") or [{"role": "user", "content": task["prompt"]}]
    chat = model.chat(messages, tools=context.tools)
    while (reply := await chat.reply()).tool_calls:
        for tool_call in reply.tool_calls:
            chat.add(await context.call(tool_call))
    return chat.sample()
