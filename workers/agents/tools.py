"""Tools: typed Python functions that the policy may call. Torch-free."""

import inspect
import json
import types
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from asyncflow.errors import ConfigError, one_line
from workers.agents.errors import BudgetSpent, TaskSkipped
from workers.agents.messages import Message
from workers.calls.user_function import load_function

_SIMPLE = {int: "integer", float: "number", str: "string", bool: "boolean"}


@dataclass(frozen=True)
class Tool:
    """One tool.

    Attributes:
        name: of the function.
        description: as OpenAI's API has it: {"type": "function", "function": {name, description, parameters}}.
        function: `def` or `async def`.
    """

    name: str
    description: Message
    function: Callable[..., Any]

    @staticmethod
    def of(function: Callable[..., Any]) -> "Tool":
        """Describe a function: its name, the first paragraph of its docstring, the types of its arguments.

        Raises:
            ConfigError: an argument has no type, or one that JSON has no word for.
        """
        name, hints = function.__name__, get_type_hints(function)
        properties, required = {}, []
        for argument in inspect.signature(function).parameters.values():
            where = f"rollout.tools: argument {argument.name!r} of {name}"
            if argument.kind in (argument.VAR_POSITIONAL, argument.VAR_KEYWORD, argument.POSITIONAL_ONLY):
                raise ConfigError(f"{where}: give it a name that can be passed")
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
    """Import `module:function`s, in a process of the users' code.

    Raises:
        ConfigError: one cannot be found or described, or two have one name.
    """
    tools: list[Tool] = []
    for name in names:
        tool = Tool.of(load_function(name, field="rollout.tools", arguments=None))
        if any(other.name == tool.name for other in tools):
            raise ConfigError(f"rollout.tools: two are called {tool.name!r}; rename one")
        tools.append(tool)
    return tools


async def call_tool(tools: Sequence[Tool], tool_call: Message, *, run: Callable[..., Awaitable[Any]]) -> Message:
    """Call the tool that a reply named and return the result as a message; an error is a result, too.

    Args:
        tools: there are.
        tool_call: as OpenAI's API has it.
        run: awaits a function that blocks.

    Raises:
        TaskSkipped, BudgetSpent, MemoryError: the tool did, which ends the rollout.
    """
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
    except Exception as error:  # noqa: BLE001  the policy is told, and may do better
        content = f"error: {one_line(error)}"
    return {"role": "tool", "tool_call_id": number, "name": named["name"], "content": content}


def _schema(kind: Any, where: str) -> dict[str, Any]:
    """Return the JSON schema of a type.

    Raises:
        ConfigError: it has none.
    """
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
