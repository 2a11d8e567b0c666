"""Seals the messages that launchers send each other through the job store, with the job's secret.

The store's port can be reached by others, so every message carries its sender, a number that grows, and an HMAC over
both and the receiver: it cannot be forged, changed, replayed or redirected, and the receiver notices one that was taken
away.
"""

from typing import Any

import msgspec

from asyncflow.decoding import msgpack_decoder
from asyncflow.errors import TransportError
from asyncflow.mac import Mac
from asyncflow.transport.frame import UNREADABLE

_MOST_BYTES = 2**20
_PURPOSE = "launchers"
_ENCODER = msgspec.msgpack.Encoder()


class Envelope(msgspec.Struct):
    """A message with its proof; `body` counts only if the proof is right."""

    sender: str
    number: int
    proof: bytes
    body: bytes


class Sealer:
    """Seals one sender's messages to one receiver. The caller keeps their order."""

    def __init__(self, secret: bytes, sender: str, receiver: str) -> None:
        self._mac = Mac(secret, _PURPOSE)
        self._sender = sender
        self._receiver = receiver
        self._number = 0

    def seal(self, message: msgspec.Struct | None = None) -> bytes:
        """Return the next message as bytes; None: it has no content."""
        self._number += 1
        body = b"" if message is None else _ENCODER.encode(message)
        proof = self._mac.of(*_fields(self._sender, self._receiver, self._number, body))
        return _ENCODER.encode(Envelope(self._sender, self._number, proof, body))


class Opener:
    """Checks the messages of one sender to one receiver."""

    def __init__(self, secret: bytes, sender: str, receiver: str) -> None:
        self._mac = Mac(secret, _PURPOSE)
        self._sender = sender
        self._receiver = receiver
        self.number = 0
        """Of the newest genuine message."""

    def open(self, envelope: Envelope) -> bytes | None:
        """Return the body of the next message; None: it is forged, or was there before.

        Raises:
            TransportError: messages before it are missing.
        """
        if envelope.number <= self.number or not self._is_genuine(envelope):
            return None
        missing = envelope.number - self.number - 1
        self.number = envelope.number
        if missing:
            raise TransportError(f"{missing} messages of {self._sender} are missing; somebody else takes them")
        return envelope.body

    def newest(self, envelope: Envelope) -> int:
        """Take in a message that replaces those before it; returns the number of the newest."""
        if envelope.number > self.number and self._is_genuine(envelope):
            self.number = envelope.number
        return self.number

    def _is_genuine(self, envelope: Envelope) -> bool:
        fields = _fields(self._sender, self._receiver, envelope.number, envelope.body)
        return envelope.sender == self._sender and self._mac.proves(envelope.proof, *fields)


def read_envelope(data: bytes) -> Envelope | None:
    """Decode what came; None: it is no envelope."""
    if len(data) > _MOST_BYTES:
        return None
    try:
        return msgpack_decoder(Envelope).decode(data)
    except UNREADABLE:
        return None


def read_body(body: bytes, messages: Any) -> Any:
    """Decode a message of the types in a union.

    Raises:
        TransportError: it is none of them; the two ends have different versions.
    """
    try:
        return msgpack_decoder(messages).decode(body)
    except UNREADABLE as error:
        raise TransportError(f"a launcher's message cannot be read ({error}); do all nodes run one version?") from error


def _fields(sender: str, receiver: str, number: int, body: bytes) -> tuple[bytes, ...]:
    return sender.encode(), receiver.encode(), number.to_bytes(8, "little"), body
