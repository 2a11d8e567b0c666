"""Services of which a part raises what nobody expects; for `test_service_failures.py`. Each says what it ended with."""

import threading
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from peers import Pipe, credentials

from asyncflow.errors import AsyncFlowError
from tq import service_process
from weightsync.config import WeightSyncConfig
from workers.roles import services


def of_queue(_port: int, pipe: Pipe, address: str, service: str, part: str = "", from_call: int = 1) -> None:
    """Run a service of a queue that runs alone; `part`, if any, raises from its call `from_call` on."""
    if part:
        _break(part, from_call)
    _tell_end(pipe, service_process.serve, Path(address), service, threading.Event())


def weight_agent(port: int, pipe: Pipe, name: str, part: str = "") -> None:
    """Run one of two weight agents of a run; `part`, if any, raises."""
    if part:
        _break(part, 1)
    gangs = {f"weights-{k}": SimpleNamespace(name=f"weights-{k}", index=k) for k in range(2)}
    context = SimpleNamespace(
        gang=gangs[name],
        job=SimpleNamespace(of_role=lambda _: gangs.values()),
        config=SimpleNamespace(weightsync=WeightSyncConfig()),
        job_credentials=lambda: credentials(port),
        report_state=pipe.send,
        exiting=threading.Event(),
    )
    _tell_end(pipe, services.run_weights, context)


def _break(part: str, from_call: int) -> None:
    """Let `module:Class.method` work until its call `from_call`, counted from 1, and then raise for ever."""
    module, _, path = part.partition(":")
    owner, method = path.split(".")
    cls = getattr(import_module(module), owner)
    original, calls = getattr(cls, method), 0

    def broken(*arguments: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls >= from_call:
            raise KeyError("nobody thought of this")
        return original(*arguments, **options)

    setattr(cls, method, broken)


def _tell_end(pipe: Pipe, serve: Callable[..., None], *arguments: Any) -> None:
    try:
        serve(*arguments)
    except AsyncFlowError as error:
        pipe.send(str(error))
