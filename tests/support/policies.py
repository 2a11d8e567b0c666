"""A policy of a few lines for tests of rollout functions: it says what a test wrote down."""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workers.agents import BudgetSpent, Context, Environment, Model, Reply, Sample, Task
from workers.agents.api import Tool
from workers.agents.turns import ChatRequest, Message


@dataclass(frozen=True)
class Played:
    """A rollout, the last request that the policy got, and what was logged."""

    sample: Sample
    last: ChatRequest
    context: Context


def played(
    environment: type[Environment],
    *replies: str | Message,
    task: Mapping[str, Any],
    tools: Sequence[Callable[..., Any]] = (),
) -> Played:
    """Play one rollout with these replies, of nodes 1, 2, ...; behind them the turns are spent."""
    context = Context(time.monotonic() + 60, Path("unused"), [Tool.of(each) for each in tools])
    asked: list[ChatRequest] = []

    async def policy(request: ChatRequest) -> Reply:
        if len(asked) == len(replies):
            raise BudgetSpent("no more turns")
        asked.append(ChatRequest(list(request.messages), request.tools))
        said = replies[len(asked) - 1]
        message = {"role": "assistant", "content": said} if isinstance(said, str) else said
        return Reply(message, "stop", [1], len(asked))

    row = Task(task, index=0, group=0, member=0, seed=0)
    sample = asyncio.run(asyncio.wait_for(environment.rollout(row, Model(policy), context), 30))
    return Played(sample, asked[-1], context)
