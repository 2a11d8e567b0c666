"""Tools: what the policy is told of a function, and what it hears back."""

import asyncio
from collections.abc import Callable
from typing import Any, Literal

import pytest

from asyncflow.errors import ConfigError
from workers.agents.api import Tool, call_tool
from workers.agents.rollout_errors import BudgetSpent, TaskSkipped


def add(a: int, b: int = 1, *, how: Literal["plain", "loud"] = "plain", names: list[str] | None = None) -> str:
    """Add two
    numbers.

    More that nobody needs.
    """
    return f"{a + b}{'!' if how == 'loud' else ''}"


async def slow(a: float) -> dict[str, float]:
    return {"half": a / 2}


def over(why: str) -> str:
    raise {"skip": TaskSkipped, "budget": BudgetSpent, "memory": MemoryError}[why]


async def _run(function: Callable[..., Any]) -> Any:
    return function()


def called(name: str, arguments: str) -> Any:
    tools = [Tool.of(add), Tool.of(slow), Tool.of(over)]
    named = {"id": "c1", "type": "function", "function": {"name": name, "arguments": arguments}}
    return asyncio.run(call_tool(tools, named, run=_run))["content"]


def test_a_tool_is_described_by_its_types_and_the_first_paragraph() -> None:
    described = Tool.of(add).description["function"]
    assert described["name"] == "add"
    assert described["description"] == "Add two numbers."
    assert described["parameters"] == {
        "type": "object",
        "properties": {
            "a": {"type": "integer"},
            "b": {"type": "integer"},
            "how": {"enum": ["plain", "loud"]},
            "names": {"anyOf": [{"type": "array", "items": {"type": "string"}}, {"type": "null"}]},
        },
        "required": ["a"],
    }


@pytest.mark.parametrize(
    ("name", "arguments", "content"),
    [
        ("add", '{"a": 2, "b": 3, "how": "loud"}', "5!"),
        ("slow", '{"a": 3}', '{"half": 1.5}'),
        ("add", '{"a": 2, "c": 3}', "error: TypeError"),
        ("add", "{", "error: JSONDecodeError"),
        ("add", '{"a": "x"}', "error: TypeError"),
        ("none", "{}", "error: LookupError"),
    ],
)
def test_a_call_brings_its_result_or_what_was_wrong(name: str, arguments: str, content: str) -> None:
    assert called(name, arguments).startswith(content)


def test_an_argument_without_a_type_is_refused() -> None:
    def bad(a):  # type: ignore[no-untyped-def]
        return a

    with pytest.raises(ConfigError, match="'a' of bad has no type"):
        Tool.of(bad)


@pytest.mark.parametrize(("why", "error"), [("skip", TaskSkipped), ("budget", BudgetSpent), ("memory", MemoryError)])
def test_what_ends_a_rollout_is_no_tools_result(why: str, error: type[Exception]) -> None:
    with pytest.raises(error):
        called("over", f'{{"why": "{why}"}}')
