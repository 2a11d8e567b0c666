"""The process in which a user's function is called, for `workers.calls.pool`, and their messages.

pool                                     child (`python -m workers.calls.child`)
Load        ------------------------->   imports the function
            <-------------------------   Loaded, or Refused
CallFunction 1, 2 .. ---------------->   calls it
            <-------------------------   Returned, Raised, or Unusable
Cancel 2    ------------------------->   cancels its coroutine (only an async child reads this during a call)
            <-------------------------   Cancelled

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
import socket
import sys
import traceback
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from asyncflow.decoding import msgpack_decoder
from asyncflow.errors import ConfigError, UserCodeFailed, one_line
from workers.calls.child_process import Loaded, Refused, StreamChannel, frame, parent_socket, receive_frame
from workers.calls.user_function import Callee, is_async


class Load(msgspec.Struct, frozen=True, tag=True):
    """Import the entry, and the function that it names."""

    entry: str  # our own `module:function`, which returns the `Callee`
    settings: Mapping[str, Any]  # its arguments
    memory_bytes: int | None  # limit of the address space; None: unlimited


class CallFunction(msgspec.Struct, frozen=True, tag=True):
    """Call the function."""

    number: int
    arguments: list[Any]


class Cancel(msgspec.Struct, frozen=True, tag=True):
    """Cancel a call whose deadline passed."""

    number: int


class Returned(msgspec.Struct, frozen=True, tag=True):
    """The function's result."""

    number: int
    value: Any


class Raised(msgspec.Struct, frozen=True, tag=True):
    """The function raised; type and message on one line."""

    number: int
    text: str


class Unusable(msgspec.Struct, frozen=True, tag=True):
    """The function returned something unusable; the whole message."""

    number: int
    text: str


class Cancelled(msgspec.Struct, frozen=True, tag=True):
    """The call is cancelled, and the child's loop is alive."""

    number: int


Outcome = Returned | Raised | Unusable
ToChild = Load | CallFunction | Cancel
ToPool = Loaded | Refused | Outcome | Cancelled


def main() -> None:
    connection = parent_socket()
    load = _receive(connection)
    assert isinstance(load, Load)
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
        asyncio.run(server.serve_async(connection)) if server.is_async else server.serve_calls(connection)
    except (EOFError, ConnectionError):
        return


def _receive(connection: socket.socket) -> ToChild:
    """Wait for a message; EOFError: the pool is gone."""
    message: ToChild = msgpack_decoder(ToChild).decode(receive_frame(connection))
    return message


class Server:
    def __init__(self, callee: Callee) -> None:
        self._callee = callee
        self._told = False
        self._running: dict[int, asyncio.Task[None]] = {}
        self.is_async = is_async(callee.function)

    def serve_calls(self, connection: socket.socket) -> None:
        """Call a `def`, again and again, until EOFError or ConnectionError: the pool is gone."""
        while True:
            ask = _receive(connection)
            assert isinstance(ask, CallFunction), "a child that is busy is killed, not asked to stop"
            _send(lambda outcome: connection.sendall(frame(outcome)), self._call_function(ask))

    async def serve_async(self, connection: socket.socket) -> None:
        """Call an `async def`, with concurrent calls, until the pool is gone."""
        channel: StreamChannel[ToPool, ToChild] = await StreamChannel.open(connection, ToChild)
        while (message := await channel.receive()) is not None:
            if isinstance(message, CallFunction):
                self._running[message.number] = asyncio.create_task(self._answer_ask(message, channel))
            elif isinstance(message, Cancel):
                if (task := self._running.pop(message.number, None)) is not None:
                    task.cancel()
                channel.send(Cancelled(message.number))

    async def _answer_ask(self, ask: CallFunction, channel: StreamChannel[ToPool, ToChild]) -> None:
        try:
            value = self._callee.function(*self._callee.takes(ask.arguments))
            value = await value if inspect.isawaitable(value) else value
        except BaseException as error:  # noqa: BLE001  boundary to user code, which may call sys.exit
            outcome: Outcome = self._make_raised(ask, error)
        else:
            outcome = self._check_result(ask, value)
        if self._running.pop(ask.number, None) is not None:  # otherwise it was cancelled
            _send(channel.send, outcome)

    def _call_function(self, ask: CallFunction) -> Outcome:
        try:
            value = self._callee.function(*self._callee.takes(ask.arguments))
            if inspect.iscoroutine(value):
                value = asyncio.run(value)
        except BaseException as error:  # noqa: BLE001  the same boundary
            return self._make_raised(ask, error)
        return self._check_result(ask, value)

    def _check_result(self, ask: CallFunction, value: Any) -> Outcome:
        try:
            return Returned(ask.number, self._callee.gives(value, ask.arguments))
        except UserCodeFailed as error:
            return Unusable(ask.number, str(error))

    def _make_raised(self, ask: CallFunction, error: BaseException) -> Raised:
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


def _send(send: Callable[[Outcome], None], outcome: Outcome) -> None:
    """Send the outcome or, if it cannot be encoded, the reason."""
    try:
        send(outcome)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        send(Raised(outcome.number, f"something that cannot be passed on: {one_line(error)}"))


if __name__ == "__main__":
    main()
