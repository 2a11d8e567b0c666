"""Checks in a child process, before anything starts, that a run's rollouts can work: entries of `workers.calls`."""

import asyncio
import secrets
import socket
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from asyncflow.errors import ConfigError, UserCodeFailed
from workers.agents.api import load_tools
from workers.agents.other_model import OtherModel
from workers.agents.rendering import load_renderer, prove
from workers.agents.service import serve
from workers.agents.wire import (
    Begin,
    Draw,
    Drawn,
    Failed,
    Finished,
    FromService,
    ServiceReady,
    Setup,
    ToService,
)
from workers.agents.worker import load_rollout
from workers.calls.child_process import Refused, StreamChannel
from workers.calls.user_function import Callee
from workers.data.tokenizer import load_tokenizer

_END_S = 5.0  # time that a trial's processes have to end (s); after that they die with this process


def usable(setup: Mapping[str, Any]) -> Callee:
    """Import the user's function, tools and renderer, and check that the keys of other models are set.

    The returned callee lists, in words, what the renderer cannot do. `setup` is a `workers.agents.wire.Setup` as
    builtins. Raises ConfigError if anything is unusable, or the model's template ignores tools.
    """
    given = msgspec.convert(setup, Setup)
    tools = load_tools(given.tools)
    if given.function is not None or given.agent is not None:
        environment = getattr(load_rollout(given.function, given.agent), "__self__", None)
        tools += getattr(environment, "tools", ())
    for name, settings in given.models.items():
        OtherModel(name, settings)
    described = [tool.description for tool in tools]
    model_dir, renderer = Path(given.model_dir), given.renderer
    rendering = load_renderer(model_dir, renderer, given.templates)
    missing: list[str] = []
    if renderer is None or ":" not in renderer:  # a user's class may know only a few words
        missing = prove(rendering, load_tokenizer(model_dir), described or None)
    return Callee(lambda: missing)


def trial(setup: Mapping[str, Any]) -> Callee:
    """Return a callee that makes one rollout: (data row as JSON, ground truth) -> why it failed, and whether it has a
    reward.

    Session service, workers, gateway and programs are those of a run; in place of the policy, the ground truth replies.
    `setup` is a `workers.agents.wire.Setup` as builtins; directory and secret are made here.
    """
    given = msgspec.convert(setup, Setup)
    tokenizer = load_tokenizer(Path(given.model_dir))

    def make(task: str, ground_truth: str) -> dict[str, Any]:
        words = tokenizer.encode(ground_truth, add_special_tokens=False) if ground_truth else []
        with tempfile.TemporaryDirectory(prefix="trial-", ignore_cleanup_errors=True) as scratch:
            whole = replace(given, scratch=scratch, seal=secrets.token_bytes(32))
            return asyncio.run(_one_rollout(whole, task, words))

    return Callee(make)


async def _one_rollout(setup: Setup, task: str, words: Sequence[int]) -> dict[str, Any]:
    ours, theirs = socket.socketpair()
    engine: StreamChannel[ToService, FromService] = await StreamChannel.open(ours, FromService)
    serving = asyncio.create_task(serve(theirs))
    engine.send(setup)
    try:
        while (message := await engine.receive()) is not None:
            match message:
                case ServiceReady():
                    engine.send(Begin(ticket=0, task=task, index=0, group=0, member=0, seed=0))
                case Draw():
                    tokens = [*words[: message.max_tokens - 1], *message.stop_ids[:1]]
                    engine.send(Drawn(message.call, tokens, [0.0] * len(tokens), [0] * len(tokens), truncated=False))
                case Finished():
                    return {"failed": "", "has_reward": message.reward is not None, "truncated": message.truncated}
                case Failed():
                    return {"failed": "" if message.skipped else message.text, "has_reward": False, "truncated": True}
                case Refused(text=text):
                    raise ConfigError(text)
        raise UserCodeFailed("its session service ended; see above")
    finally:
        engine.close()  # ends the service and everything that it started
        await asyncio.wait({serving}, timeout=_END_S)
