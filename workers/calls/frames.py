"""What a pool and its children say to each other over a socket pair: msgpack behind four bytes of length. Torch-free.

pool                                     child
Load        ------------------------->   imports the function
            <-------------------------   Loaded, or Refused
Ask 1, 2 .. ------------------------->   calls it
            <-------------------------   Returned, Raised, or Unusable
Cancel 2    ------------------------->   cancels its coroutine (only an async child hears it while a call runs)
            <-------------------------   Cancelled
"""

import asyncio
import socket
from collections.abc import Mapping
from typing import Any

import msgspec

from asyncflow.decoding import msgpack_decoder

LENGTH_BYTES = 4
MOST_BYTES = 2**28
"""Longest message: texts of a response, or what a function returned."""


class Load(msgspec.Struct, frozen=True, tag=True):
    """Import the entry, and the function that it names.

    Attributes:
        entry: `module:function` of ours, which returns the `Callee`.
        settings: its arguments.
        path: where modules are sought, as in the parent; as the file system spells it, which need not be UTF-8.
        memory_bytes: limit of the address space; None: none.
    """

    entry: str
    settings: Mapping[str, Any]
    path: list[bytes]
    memory_bytes: int | None


class Ask(msgspec.Struct, frozen=True, tag=True):
    """Call the function."""

    number: int
    arguments: list[Any]


class Cancel(msgspec.Struct, frozen=True, tag=True):
    """Cancel a call whose deadline passed."""

    number: int


class Loaded(msgspec.Struct, frozen=True, tag=True):
    """The child is ready; an `async def` takes several calls at a time."""

    is_async: bool


class Refused(msgspec.Struct, frozen=True, tag=True):
    """The user's module or function cannot be used; says why."""

    text: str


class Returned(msgspec.Struct, frozen=True, tag=True):
    """The call's result."""

    number: int
    value: Any


class Raised(msgspec.Struct, frozen=True, tag=True):
    """The function raised; type and message on one line."""

    number: int
    text: str


class Unusable(msgspec.Struct, frozen=True, tag=True):
    """The function returned something that cannot be used; the whole message."""

    number: int
    text: str


class Cancelled(msgspec.Struct, frozen=True, tag=True):
    """The child's loop is alive, and the call is cancelled."""

    number: int


ToChild = Load | Ask | Cancel
ToPool = Loaded | Refused | Returned | Raised | Unusable | Cancelled


def frame(message: msgspec.Struct) -> bytes:
    """Return a message as it travels.

    Raises:
        ValueError: it is too long, or has text that is no Unicode.
    """
    data = msgspec.msgpack.encode(message)
    if len(data) > MOST_BYTES:
        raise ValueError(f"a message of {len(data)} bytes is longer than {MOST_BYTES}")
    return len(data).to_bytes(LENGTH_BYTES, "little") + data


def length_of(header: bytes) -> int:
    """Return the length that a frame's first bytes announce.

    Raises:
        EOFError: it is too long: the user's code wrote into the socket.
    """
    length = int.from_bytes(header, "little")
    if length > MOST_BYTES:
        raise EOFError(f"a frame of {length} bytes")
    return length


def to_child(data: bytes) -> ToChild:
    """Decode what the pool sent."""
    message: ToChild = msgpack_decoder(ToChild).decode(data)
    return message


def to_pool(data: bytes) -> ToPool:
    """Decode what a child sent.

    Raises:
        EOFError: it is not a message: the user's code wrote into the socket.
    """
    try:
        message: ToPool = msgpack_decoder(ToPool).decode(data)
    except msgspec.DecodeError as error:
        raise EOFError("no message") from error
    return message


def receive(connection: socket.socket) -> ToChild:
    """Wait for a message, in a child that does nothing else.

    Raises:
        EOFError: the pool is gone.
    """
    return to_child(receive_frame(connection))


def receive_frame(connection: socket.socket) -> bytes:
    """Wait for the next frame's message.

    Raises:
        EOFError: the peer is gone, or wrote what is not a frame.
    """
    return _exactly(connection, length_of(_exactly(connection, LENGTH_BYTES)))


async def read_frame(reader: asyncio.StreamReader) -> bytes:
    """Return the next frame's message.

    Raises:
        EOFError, ConnectionError: the peer is gone, or wrote what is not a frame.
    """
    return await reader.readexactly(length_of(await reader.readexactly(LENGTH_BYTES)))


def _exactly(connection: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        piece = connection.recv(size - len(data))
        if not piece:
            raise EOFError
        data += piece
    return bytes(data)
