"""What a rollout function is written against: the task, the policy, and their context. Torch-free.

    from workers.agents import Chat, Context, Model, Sample, Task

    async def rollout(task: Task, model: Model, context: Context) -> Sample | list[Sample]:
        chat = model.chat([{"role": "user", "content": task["question"]}], tools=context.tools)
        while (reply := await chat.reply()).tool_calls:
            for call in reply.tool_calls:
                chat.add(await context.call(call))
        return chat.sample(reward=float(task["answer"] in reply.text))

Every call continues exactly the tokens that were drawn before; what the policy drew is never tokenized again.
"""

import asyncio
import contextvars
import inspect
import json
import reprlib
import types
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec

from asyncflow.errors import ConfigError, UserCodeFailed, one_line
from workers.agents.other_model import OtherModel
from workers.agents.rollout_errors import BudgetSpent, TaskSkipped
from workers.agents.turns import ChatRequest, Message, Reply
from workers.agents.wire import Begin
from workers.calls.user_function import load_function
from workers.rewards.base import finite, metrics_of
from workers.settings.rollout import unusable_stop

# Tools: typed Python functions that the policy may call. Torch-free.

_SIMPLE = {int: "integer", float: "number", str: "string", bool: "boolean"}


@dataclass(frozen=True)
class Tool:
    """A function that the policy may call.

    Attributes:
        description: OpenAI format: {"type": "function", "function": {name, description, parameters}}.
        function: `def` or `async def`.
    """

    name: str
    description: Message
    function: Callable[..., Any]

    @staticmethod
    def of(function: Callable[..., Any]) -> "Tool":
        """Describe a function by its name, the first paragraph of its docstring, and the types of its arguments. Raises
        ConfigError if an argument has no type, or one without a JSON equivalent."""
        name, hints = function.__name__, get_type_hints(function)
        properties, required = {}, []
        for argument in inspect.signature(function).parameters.values():
            where = f"rollout.tools: argument {argument.name!r} of {name}"
            if argument.kind in (argument.VAR_POSITIONAL, argument.VAR_KEYWORD, argument.POSITIONAL_ONLY):
                raise ConfigError(f"{where} cannot be passed by name; make it a named parameter")
            if argument.name not in hints:
                raise ConfigError(f"{where} has no type; annotate it")
            properties[argument.name] = _schema(hints[argument.name], where)
            if argument.default is argument.empty:
                required.append(argument.name)
        text = inspect.cleandoc(function.__doc__ or "").partition("\n\n")[0].replace("\n", " ")
        parameters = {"type": "object", "properties": properties, "required": required}
        described = {"name": name, "description": text, "parameters": parameters}
        return Tool(name, {"type": "function", "function": described}, function)


def load_tools(names: Sequence[str]) -> list[Tool]:
    """Import tools given as `module:function`; runs in a process for user code. Raises ConfigError if one cannot be
    found or described, or two have the same name."""
    tools: list[Tool] = []
    for name in names:
        tool = Tool.of(load_function(name, field="rollout.tools", arguments=None))
        if any(other.name == tool.name for other in tools):
            raise ConfigError(f"rollout.tools: two tools are called {tool.name!r}; rename one")
        tools.append(tool)
    return tools


async def call_tool(tools: Sequence[Tool], tool_call: Message, *, run: Callable[..., Awaitable[Any]]) -> Message:
    """Call the tool that a reply named and return the result, or the error, as a message. `run` awaits a blocking
    function. `TaskSkipped`, `BudgetSpent` and `MemoryError` propagate, and end the rollout."""
    named, number = tool_call["function"], tool_call.get("id", "")
    try:
        tool = next((tool for tool in tools if tool.name == named["name"]), None)
        if tool is None:
            raise LookupError(f"no tool is called {named['name']!r}")
        arguments = json.loads(named["arguments"] or "{}")
        inspect.signature(tool.function).bind(**arguments)
        if inspect.iscoroutinefunction(tool.function):
            value = await tool.function(**arguments)
        else:
            value = await run(lambda: tool.function(**arguments))
        content = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    except (TaskSkipped, BudgetSpent, MemoryError):
        raise
    except Exception as error:  # noqa: BLE001  the policy reads it, and may do better
        content = f"error: {one_line(error)}"
    return {"role": "tool", "tool_call_id": number, "name": named["name"], "content": content}


def _schema(kind: Any, where: str) -> dict[str, Any]:
    if kind in _SIMPLE:
        return {"type": _SIMPLE[kind]}
    origin, inner = get_origin(kind), get_args(kind)
    if origin is Literal:
        return {"enum": list(inner)}
    if origin in (list, Sequence) and len(inner) == 1:
        return {"type": "array", "items": _schema(inner[0], where)}
    if kind is dict or origin is dict:
        return {"type": "object"}
    if origin in (Union, types.UnionType) and type(None) in inner:
        others = [each for each in inner if each is not type(None)]
        if len(others) == 1:
            return {"anyOf": [_schema(others[0], where), {"type": "null"}]}
    raise ConfigError(
        f"{where} has type {kind}; use str, int, float, bool, Literal, list, dict, or one of these | None"
    )


T = TypeVar("T")

_ARGUMENTS: Mapping[str, Any] = {
    "messages": Annotated[list[dict[str, Any]], msgspec.Meta(min_length=1)],
    "tools": list[dict[str, Any]],
    "token_ids": Annotated[list[Annotated[int, msgspec.Meta(ge=0, lt=2**31)]], msgspec.Meta(min_length=1)],
    "max_tokens": Annotated[int, msgspec.Meta(ge=1, lt=2**31)] | None,
    "stop": list[str],
}
# For `Context.run`, shared by all rollouts of a process; threads start on demand
_THREADS = ThreadPoolExecutor(256, thread_name_prefix="rollout")


class Task(Mapping[str, Any]):
    """One row of the data: `task["question"]`.

    Attributes:
        index: global index of the rollout's row.
        group: id of the rows that share this task; `member`: this rollout's number within it, from 0.
        seed: for this rollout's random numbers, 64 bits.
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
class Sample:
    """What is trained on: the token sequence that ends with one drawn piece.

    Attributes:
        node, attempt_id: that piece, drawn in one attempt at the rollout.
        reward: of the whole rollout, or one number per reply of this conversation, in order; None: `reward.function`
            scores the last reply.
        metrics: numbers by name.
        earlier: earlier pieces of the conversation; those whose tokens the last one does not continue are trained on as
            separate samples.
    """

    node: int
    reward: float | Sequence[float] | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    earlier: tuple[int, ...] = ()
    attempt_id: int = 0


Policy = Callable[[ChatRequest], Awaitable[Reply]]
"""Has the policy reply; raises BudgetSpent, or UserCodeFailed if the request is unusable."""


class Model:
    """The policy in training."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy

    def chat(self, messages: Sequence[Message], tools: "Sequence[Tool | Message] | None" = None) -> "Chat":
        """Begin a conversation; `tools` from `context.tools`, or in OpenAI format."""
        described = [tool.description if isinstance(tool, Tool) else tool for tool in tools or ()]
        return Chat(self._policy, [dict(message) for message in messages], described)

    async def generate(
        self, token_ids: Sequence[int], *, max_tokens: int | None = None, stop: str | Sequence[str] = ()
    ) -> Reply:
        """Continue the tokens of a whole prompt (at least 1). An earlier prompt with its reply is continued, not begun
        anew. `max_tokens`, `stop` and exceptions: see `Chat.reply`."""
        stop = [stop] if isinstance(stop, str) else stop
        _check(token_ids=token_ids, max_tokens=max_tokens, stop=stop)
        return await self._policy(ChatRequest([], None, max_tokens, tuple(stop), list(token_ids)))

    def sample(
        self,
        reply: Reply | Sequence[Reply],
        *,
        reward: float | Sequence[float] | None = None,
        metrics: Mapping[str, float] | None = None,
    ) -> Sample:
        """Return the sample that ends with a reply, or with the last of several. `reward`: of the whole rollout, or one
        number for each of these replies. Raises UserCodeFailed unless they are different replies of one rollout."""
        replies = [reply] if isinstance(reply, Reply) else list(reply)
        if len({each.attempt_id for each in replies}) != 1 or len({each.node for each in replies}) < len(replies):
            raise UserCodeFailed("model.sample: give a reply, or several different ones of one rollout")
        *earlier, last = replies
        return Sample(last.node, reward, metrics or {}, tuple(each.node for each in earlier), last.attempt_id)


class Chat:
    """A conversation. `messages`: the whole history; replies are appended."""

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
            max_tokens: None: `rollout.max_response_tokens`.
            stop: one or several texts. The reply ends with the token that completes the first match; that token is
                trained on, while the reply's text ends before the match. Special tokens count as their text.

        Raises:
            BudgetSpent: see there.
            UserCodeFailed: an argument is unusable, or the conversation cannot be rendered.
        """
        stop = [stop] if isinstance(stop, str) else stop
        _check(messages=self.messages, tools=self._tools, max_tokens=max_tokens, stop=stop)
        replies = tuple(reply.node for reply in self._replies)
        request = ChatRequest(self.messages, self._tools or None, max_tokens, tuple(stop), replies=replies)
        reply = await self._policy(request)
        self.messages.append(reply.message)
        self._replies.append(reply)
        return reply

    def fork(self) -> "Chat":
        """Return an independent conversation that continues from here."""
        other = Chat(self._policy, [dict(message) for message in self.messages], self._tools)
        other._replies = list(self._replies)
        return other

    def sample(
        self, reward: float | Sequence[float] | None = None, metrics: Mapping[str, float] | None = None
    ) -> Sample:
        """Return the sample that ends with the last reply. Earlier replies whose tokens it does not continue become
        separate samples. `reward`: of the whole rollout, or one number for each reply, in order. Raises UserCodeFailed
        if there is no reply yet."""
        if not self._replies:
            raise UserCodeFailed("chat.sample: the policy has not replied yet; call chat.reply() first")
        *earlier, last = self._replies
        return Sample(last.node, reward, metrics or {}, tuple(reply.node for reply in earlier), last.attempt_id)


@dataclass
class Context:
    """What surrounds one rollout.

    Attributes:
        deadline: of the rollout, on the clock of `time.monotonic()` (s).
        directory: where `scratch` is created.
        tools: from `rollout.tools`.
        attempt: from 0; higher after failed attempts.
        models: from `rollout.models`: `await context.models["judge"].chat(messages)`. They are not trained.
    """

    deadline: float
    directory: Path
    tools: Sequence[Tool]
    attempt: int = 0
    models: Mapping[str, OtherModel] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)

    @cached_property
    def scratch(self) -> Path:
        """A directory for this rollout alone, removed at its end."""
        self.directory.mkdir(parents=True, exist_ok=True)
        return self.directory

    def log(self, name: str, value: float) -> None:
        """Report a number for this rollout; the last value of a name counts. Raises UserCodeFailed if it is not a
        finite number, or the name is unusable."""
        self.metrics |= metrics_of({name: value})

    def skip(self, reason: str) -> None:
        """Give up on this task: its group leaves the run, and the next prompt takes its place."""
        raise TaskSkipped(reason or "no reason was given")  # without one, evaluations would take it for an answer

    async def call(self, tool_call: Message) -> Message:
        """Call the tool that the policy named; return its result as a message. Exceptions become results as well,
        except for `skip`, a spent budget, and running out of memory."""
        return await call_tool(self.tools, tool_call, run=self.run)

    async def run(self, function: Callable[..., T], *args: Any) -> T:
        """Run a blocking function in a thread, so that other rollouts of this process continue.

        At most 256 calls per process run at once; others queue. If the rollout is cancelled, it ends as soon as the
        function does (at once if the function has not started); a function that hangs costs the whole process.
        """
        surroundings = contextvars.copy_context()

        def call() -> T:
            try:
                return surroundings.run(function, *args)
            except StopIteration as error:  # futures do not accept it: the wait would never end
                raise RuntimeError("StopIteration: what was iterated over has ended") from error

        work = _THREADS.submit(call)
        ended = asyncio.wrap_future(work)
        try:
            # A running function cannot be cancelled, only awaited.
            return await asyncio.shield(ended)
        except asyncio.CancelledError:
            if not work.cancel():  # already running
                await asyncio.wait({ended})
            raise


def task_of(begin: Begin) -> Task:
    return Task(json.loads(begin.task), index=begin.index, group=begin.group, member=begin.member, seed=begin.seed)


def _check(**arguments: Any) -> None:
    """Raise UserCodeFailed for arguments that the session service could not decode."""
    # There, a bad message would cost the whole process with all its rollouts.
    for name, value in arguments.items():
        try:
            msgspec.convert(value, _ARGUMENTS[name])
        except msgspec.ValidationError as error:
            raise UserCodeFailed(f"{name} is {reprlib.repr(value)}: {error}") from error
    for text in arguments.get("stop", ()):
        if wrong := unusable_stop(text):
            raise UserCodeFailed(f"stop is {reprlib.repr(arguments['stop'])}: each {wrong}")


async def call_tools(task: Task, model: Model, context: Context) -> Sample:
    """`rollout.function: tools`: reply and call tools until a reply calls none. The task has `messages` or a `prompt`;
    `reward.function` scores the text of the last reply."""
    messages = task.get("messages") or [{"role": "user", "content": task["prompt"]}]
    chat = model.chat(messages, tools=context.tools)
    while (reply := await chat.reply()).tool_calls:
        for tool_call in reply.tool_calls:
            chat.add(await context.call(tool_call))
    return chat.sample()


# Environments: a rollout as a class with `reset` and `step`. Torch-free.
#
# from workers.agents import Environment, Reply, Task, tool
#
# class Guess(Environment):                     # rollout.function: guess:Guess
#     def reset(self, task: Task) -> str:
#         self.number = task["number"]
#         return "I think of a number from 1 to 100. Ask, then say it."
#
#     @tool
#     def is_larger(self, than: int) -> bool:
#         "Say whether the number is larger than another."
#         return self.number > than
#
#     def step(self, reply: Reply) -> tuple[str, float, bool]:
#         right = reply.text == str(self.number)
#         return "No. Say another.", float(right), right

Function = TypeVar("Function", bound=Callable[..., Any])
Observation = str | Sequence[Message]
"""What the policy reads next: the text of a user message, or messages."""
Step = tuple[Observation, float | None, bool]
"""(observation, reward, done). The reward is the turn's, and None counts as no reward; with `done` the observation is
ignored."""


def tool(method: Function) -> Function:
    """Let the policy call a method of an environment; it is described like a function of `rollout.tools`."""
    method.__dict__["_is_tool"] = True
    return method


class Environment:
    """The environment of one rollout, created for it without arguments.

    Methods may be `async def`, or `def`, which run in a thread. If one raises, the rollout fails, except that the
    policy reads what a tool raises. When turns, tokens or context are spent, the rewards so far count; when the time is
    up, `reward.function` scores the last reply.

    Attributes:
        tools: of the class.
        context: of the rollout.
    """

    tools: ClassVar[Sequence[Tool]] = ()
    context: Context

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        methods = (getattr(cls, name) for name in dir(cls))
        cls.tools = [Tool.of(types.MethodType(method, cls)) for method in methods if hasattr(method, "_is_tool")]

    def reset(self, task: Task) -> Observation | Awaitable[Observation]:
        """Begin; return what the policy reads first."""
        raise NotImplementedError

    def step(self, reply: Reply) -> Step | Awaitable[Step]:
        """Handle a reply without tool calls; the default ends the rollout, for `reward.function` to score."""
        return "", None, True

    def close(self) -> Awaitable[None] | None:
        """Release resources; called once, however the rollout ends."""

    @classmethod
    async def rollout(cls, task: Task, model: Model, context: Context) -> Sample:
        environment = await context.run(cls)
        own = [replace(each, function=getattr(environment, each.name)) for each in cls.tools]
        environment.context = context = replace(context, tools=[*own, *context.tools])
        try:
            chat = model.chat(_messages(await _call(context, environment.reset, task)), tools=context.tools)
            return chat.sample(await _play(environment, chat, context))
        finally:
            await _call(context, environment.close)


async def _play(environment: Environment, chat: Chat, context: Context) -> list[float] | None:
    """Return the reward of each reply, 0 where `step` gave none or tools were called; None if there was none at all."""
    rewards: list[float | None] = []
    done = False
    while not done:
        try:
            reply = await chat.reply()
        except BudgetSpent:
            if not rewards:
                raise
            break
        rewards.append(None)
        for call in reply.tool_calls:
            chat.add(await context.call(call))
        if not reply.tool_calls:
            observation, reward, done = _checked(await _call(context, environment.step, reply))
            chat.add(*([] if done else _messages(observation)))
            rewards[-1] = None if reward is None else finite("step's reward", reward)
    if all(reward is None for reward in rewards):
        return None
    return [reward or 0.0 for reward in rewards]


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
