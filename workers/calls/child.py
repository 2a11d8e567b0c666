"""The process in which a user's function is called, for `workers.calls.pool`.

    python -u -P -m workers.calls.child PARENT_PID SOCKET

A `def` is called in the main thread, one call after the other; if it hangs or holds the GIL, the pool kills the
process. An `async def` runs in the main thread's event loop, with as many concurrent calls as the pool sends. Output of
the function, and the traceback of the first error, go where the parent's output goes. Imports what the function needs;
never torch by itself.
"""

import asyncio
import contextlib
import importlib
import inspect
import os
import resource
import signal
import socket
import sys
import traceback
from typing import Any

from asyncflow.errors import ConfigError, UserCodeFailed, one_line
from asyncflow.process import STOP_SIGNALS, die_with_parent
from workers.calls.frames import (
    Ask,
    Cancel,
    Cancelled,
    Load,
    Loaded,
    Raised,
    Refused,
    Returned,
    Unusable,
    frame,
    read_frame,
    receive,
    to_child,
)
from workers.calls.user_function import Callee, is_async

Outcome = Returned | Raised | Unusable


def main() -> None:
    parent_pid, descriptor = (int(text) for text in sys.argv[1:])
    die_with_parent(parent_pid)
    outlive_stop_signals()
    connection = socket.socket(fileno=descriptor)
    # Programs started by the user's code must not hold it open.
    connection.set_inheritable(False)
    load = receive(connection)
    assert isinstance(load, Load)
    sys.path[:] = map(os.fsdecode, load.path)
    if load.memory_bytes is not None:
        resource.setrlimit(resource.RLIMIT_AS, (load.memory_bytes, load.memory_bytes))
    module, _, name = load.entry.partition(":")
    try:
        callee: Callee = getattr(importlib.import_module(module), name)(**load.settings)
    except ConfigError as error:
        connection.sendall(frame(Refused(str(error))))
        return
    server = Server(callee)
    connection.sendall(frame(Loaded(server.is_async)))
    try:
        asyncio.run(server.serve_async(connection)) if server.is_async else server.serve(connection)
    except (EOFError, ConnectionError):
        return


class Server:
    def __init__(self, callee: Callee) -> None:
        self._callee = callee
        self._told = False
        self._running: dict[int, asyncio.Task[None]] = {}
        self.is_async = is_async(callee.function)

    def serve(self, connection: socket.socket) -> None:
        """Call a `def`, again and again, until EOFError or ConnectionError: the pool is gone."""
        while True:
            ask = receive(connection)
            assert isinstance(ask, Ask), "a child that is busy is killed, not asked to stop"
            connection.sendall(_framed(self._call(ask)))

    async def serve_async(self, connection: socket.socket) -> None:
        """Call an `async def`, with concurrent calls, until EOFError or ConnectionError: the pool is gone."""
        reader, writer = await asyncio.open_connection(sock=connection)
        while True:
            message = to_child(await read_frame(reader))
            if isinstance(message, Ask):
                self._running[message.number] = asyncio.create_task(self._answer(message, writer))
            elif isinstance(message, Cancel):
                if (task := self._running.pop(message.number, None)) is not None:
                    task.cancel()
                writer.write(frame(Cancelled(message.number)))

    async def _answer(self, ask: Ask, writer: asyncio.StreamWriter) -> None:
        try:
            value = self._callee.function(*self._callee.takes(ask.arguments))
            value = await value if inspect.isawaitable(value) else value
        except BaseException as error:  # noqa: BLE001  boundary to user code, which may call sys.exit
            outcome: Outcome = self._raised(ask, error)
        else:
            outcome = self._given(ask, value)
        if self._running.pop(ask.number, None) is not None:  # otherwise it was cancelled
            writer.write(_framed(outcome))

    def _call(self, ask: Ask) -> Outcome:
        try:
            value = self._callee.function(*self._callee.takes(ask.arguments))
            if inspect.iscoroutine(value):
                value = asyncio.run(value)
        except BaseException as error:  # noqa: BLE001  the same boundary
            return self._raised(ask, error)
        return self._given(ask, value)

    def _given(self, ask: Ask, value: Any) -> Outcome:
        try:
            return Returned(ask.number, self._callee.gives(value, ask.arguments))
        except UserCodeFailed as error:
            return Unusable(ask.number, str(error))

    def _raised(self, ask: Ask, error: BaseException) -> Raised:
        if not self._told and not isinstance(error, asyncio.CancelledError):
            self._told = True
            with contextlib.suppress(Exception):  # stderr may be closed
                try:
                    traceback.print_exception(error)
                except Exception:  # noqa: BLE001  an exception's __str__ is user code, too
                    sys.stderr.write("the error cannot be printed\n")
        if isinstance(error, MemoryError):  # what this process holds would make the next call fail, too
            os._exit(1)
        return Raised(ask.number, one_line(error))


def outlive_stop_signals() -> None:
    """Survive stop signals: the pool decides when this process ends."""
    for number in STOP_SIGNALS:
        # A handler, since programs started by the user's code would inherit ignored signals. Forks get the default
        # handling.
        signal.signal(number, lambda *_: None)
    os.register_at_fork(after_in_child=_obey_stop_signals)


def _obey_stop_signals() -> None:
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_DFL)


def _framed(outcome: Outcome) -> bytes:
    """Encode the outcome or, if it cannot be encoded, the reason."""
    try:
        return frame(outcome)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        return frame(Raised(outcome.number, f"something that cannot be passed on: {one_line(error)}"))


if __name__ == "__main__":
    main()
