"""Messages between a pool and its children over a socket pair: msgpack after a four-byte length. Torch-free.

pool                                     child
Load        ------------------------->   imports the function
            <-------------------------   Loaded, or Refused
Ask 1, 2 .. ------------------------->   calls it
            <-------------------------   Returned, Raised, or Unusable
Cancel 2    ------------------------->   cancels its coroutine (only an async child reads this during a call)
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
"""Longest message: the texts of a response, or a function's result."""


class Load(msgspec.Struct, frozen=True, tag=True):
    """Import the entry, and the function that it names."""

    entry: str  # our own `module:function`, which returns the `Callee`
    settings: Mapping[str, Any]  # its arguments
    path: list[bytes]  # `sys.path` of the parent in file-system encoding, which need not be UTF-8
    memory_bytes: int | None  # limit of the address space; None: unlimited


class Ask(msgspec.Struct, frozen=True, tag=True):
    """Call the function."""

    number: int
    arguments: list[Any]


class Cancel(msgspec.Struct, frozen=True, tag=True):
    """Cancel a call whose deadline passed."""

    number: int


class Loaded(msgspec.Struct, frozen=True, tag=True):
    """The child is ready; an `async def` accepts concurrent calls."""

    is_async: bool


class Refused(msgspec.Struct, frozen=True, tag=True):
    """The user's module or function is unusable; says why."""

    text: str


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


ToChild = Load | Ask | Cancel
ToPool = Loaded | Refused | Returned | Raised | Unusable | Cancelled


def frame(message: msgspec.Struct) -> bytes:
    """Encode a message; raises ValueError if it is too long, or contains text that is not Unicode."""
    data = msgspec.msgpack.encode(message)
    if len(data) > MOST_BYTES:
        raise ValueError(f"a message of {len(data)} bytes is longer than {MOST_BYTES}")
    return len(data).to_bytes(LENGTH_BYTES, "little") + data


def length_of(header: bytes) -> int:
    """Return the length in a frame's header. Raises EOFError if it is too large, since then the user's code wrote into
    the socket."""
    length = int.from_bytes(header, "little")
    if length > MOST_BYTES:
        raise EOFError(f"a frame of {length} bytes")
    return length


def to_child(data: bytes) -> ToChild:
    message: ToChild = msgpack_decoder(ToChild).decode(data)
    return message


def to_pool(data: bytes) -> ToPool:
    """Decode a child's message; EOFError if it is none: the user's code wrote into the socket."""
    try:
        message: ToPool = msgpack_decoder(ToPool).decode(data)
    except msgspec.DecodeError as error:
        raise EOFError("no message") from error
    return message


def receive(connection: socket.socket) -> ToChild:
    """Wait for a message, in a child that does nothing else; EOFError: the pool is gone."""
    return to_child(receive_frame(connection))


def receive_frame(connection: socket.socket) -> bytes:
    """Wait for the next frame's message; EOFError: the peer is gone, or sent no frame."""
    return _exactly(connection, length_of(_exactly(connection, LENGTH_BYTES)))


async def read_frame(reader: asyncio.StreamReader) -> bytes:
    """Return the next frame's message; EOFError or ConnectionError: the peer is gone, or sent no frame."""
    return await reader.readexactly(length_of(await reader.readexactly(LENGTH_BYTES)))


def _exactly(connection: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        piece = connection.recv(size - len(data))
        if not piece:
            raise EOFError
        data += piece
    return bytes(data)
