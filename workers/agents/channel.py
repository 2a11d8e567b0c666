"""Messages over a stream socket in an event loop: msgpack behind four bytes of length. Torch-free."""

import asyncio
import socket
import time
from typing import Any, Generic, TypeVar

import msgspec

from asyncflow.decoding import msgpack_decoder
from workers.calls.frames import frame, read_frame

S = TypeVar("S", bound=msgspec.Struct)
R = TypeVar("R")


class ProcessorTime:
    """Counts the processor time of this process."""

    def __init__(self) -> None:
        self._counted_s = time.process_time()

    def since_last(self) -> float:
        """Return what it took since this was asked for the last time (s)."""
        before, self._counted_s = self._counted_s, time.process_time()
        return self._counted_s - before


class Channel(Generic[S, R]):
    """Sends messages of type S and receives those of type R."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, received: Any) -> None:
        """See `open`."""
        self._reader = reader
        self._writer = writer
        self._decoder = msgpack_decoder(received)

    @classmethod
    async def open(cls, connection: socket.socket, received: Any) -> "Channel[Any, Any]":
        """Take a connected socket over.

        Args:
            connection: closed by `close`.
            received: the union of the types that come.
        """
        reader, writer = await asyncio.open_connection(sock=connection)
        return cls(reader, writer, received)

    def send(self, message: S) -> None:
        """Send a message; returns at once. To a peer that is gone it goes nowhere.

        Raises:
            TypeError, ValueError: it cannot travel.
        """
        data = frame(message)
        if not self._writer.is_closing():
            self._writer.write(data)

    async def receive(self) -> R | None:
        """Return the next message; None: the peer is gone, or sent what is no message."""
        try:
            message: R = self._decoder.decode(await read_frame(self._reader))
        except (EOFError, ConnectionError, msgspec.DecodeError):
            return None
        return message

    async def drain(self) -> None:
        """Wait until the peer's side took what was sent."""
        await self._writer.drain()

    def close(self) -> None:
        """Close the socket; idempotent."""
        self._writer.close()
