"""What a child calls: a user's function, and what stands between it and the pool. Torch-free."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any


def _as_they_are(arguments: Sequence[Any]) -> Sequence[Any]:
    return arguments


def _as_it_is(value: Any, arguments: Sequence[Any]) -> Any:
    return value


@dataclass(frozen=True)
class Callee:
    """A function with its conversions; an entry (`workers.calls.pool.Entry`) returns it in the child.

    Attributes:
        function: the user's; `def` or `async def`.
        takes: what the pool sent -> the function's arguments.
        gives: (what it returned, what the pool sent) -> a value that JSON has; raises `UserCodeFailed`, with the whole
            message, if that cannot be used.
    """

    function: Callable[..., Any]
    takes: Callable[[Sequence[Any]], Sequence[Any]] = _as_they_are
    gives: Callable[[Any, Sequence[Any]], Any] = _as_it_is
