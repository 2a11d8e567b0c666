"""The messages between the launchers of a run's nodes: orders of node 0, and events of the others.

node K                               node 0
  |-- Hello ---------------------------->|   who I am; or why I cannot take part
  |<------------------ Welcome | Refuse -|
  |-- Ping --------------------- Pong ---|   several times: the offset of the clocks
  |-- Ready ---------------------------->|
  |<- StartPart | KillPart | DumpStacks -|
  |-- PartExited | StopAsked ----------->|
  |<------------------------- FinishRun -|
  |-- Left ----------------------------->|   all its processes are gone

They go through the job store, whose port others can reach. So every message carries its sender, a growing number, and
an HMAC over both and the receiver: it cannot be forged, changed, replayed or redirected, and the receiver notices a
missing one.
"""

from typing import TYPE_CHECKING

from launcher.process.run_events import GangExited, StopRequested

if TYPE_CHECKING:
    pass

from typing import Any

import msgspec

from asyncflow.decoding import UNREADABLE, msgpack_decoder
from asyncflow.errors import TransportError
from asyncflow.mac import Mac


class Hello(msgspec.Struct, tag=True):
    """A launcher asks to take part.

    Attributes:
        rank, count: as given at its start.
        launcher: names this process; another attempt of the same process replaces the first.
        host: for people.
        address: at which the others reach it.
        version: of AsyncFlow.
        device: kind of its devices, as PyTorch names it.
        num_devices: 0 for the CPU.
        complaint: why it cannot take part, or "".
    """

    rank: int
    count: int
    launcher: str
    host: str
    address: str
    version: str
    device: str
    num_devices: int
    complaint: str = ""


class Ping(msgspec.Struct, tag=True):
    """Asks for node 0's time; `asked` is the asking host's monotonic clock (s)."""

    asked: float


class Ready(msgspec.Struct, tag=True):
    """This launcher can start gangs.

    Attributes:
        boot: names its host's monotonic clock.
        offset_s: node 0's unix time minus that clock (s).
        ahead_s: how far its wall clock is ahead of node 0's (s).
    """

    boot: str
    offset_s: float
    ahead_s: float


class PartExited(msgspec.Struct, tag=True):
    """All ranks of a gang on this node are gone; `exited.at` is in node 0's time."""

    exited: GangExited


class StopAsked(msgspec.Struct, tag=True):
    """This launcher received a signal; `count` is the number so far."""

    count: int


class Left(msgspec.Struct, tag=True):
    """This launcher leaves; all its processes are gone."""


class Welcome(msgspec.Struct, tag=True):
    """The launcher is a member of the run."""


class Refuse(msgspec.Struct, tag=True):
    """The launcher may not take part; `later`: another attempt may succeed."""

    reason: str
    later: bool


class Pong(msgspec.Struct, tag=True):
    """The answer to a `Ping`; `arrived` and `answered` are node 0's unix time (s)."""

    asked: float
    arrived: float
    answered: float


class StartPart(msgspec.Struct, tag=True):
    """Start this node's ranks of a gang as described by this revision of `job.json`, or a later one."""

    gang: str
    attempt: int
    revision: int


class KillPart(msgspec.Struct, tag=True):
    """SIGKILL this node's ranks of a gang."""

    gang: str


class DumpStacks(msgspec.Struct, tag=True):
    """Have every process of this node write its threads' stacks into its log."""


class FinishRun(msgspec.Struct, tag=True):
    """The run is over: end what is left, print `line`, exit with `code`."""

    code: int
    line: str


FromNode = Hello | Ping | Ready | PartExited | StopAsked | Left
Order = Welcome | Refuse | Pong | StartPart | KillPart | DumpStacks | FinishRun


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
    """Seals one sender's messages to one receiver. Not thread-safe: the caller keeps their order."""

    def __init__(self, secret: bytes, sender: str, receiver: str) -> None:
        self._mac = Mac(secret, _PURPOSE)
        self._sender = sender
        self._receiver = receiver
        self._number = 0

    def seal(self, message: msgspec.Struct | None = None) -> bytes:
        """Return the next message as bytes; None: one without content."""
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
        """Return the body of the next message; None: it is forged or a replay.

        Raises:
            TransportError: messages before it are missing.
        """
        if envelope.number <= self.number or not self._is_genuine(envelope):
            return None
        missing = envelope.number - self.number - 1
        self.number = envelope.number
        if missing:
            raise TransportError(f"{missing} messages of {self._sender} are missing; something else reads them")
        return envelope.body

    def newest(self, envelope: Envelope) -> int:
        """Take in a message that replaces earlier ones; return the newest genuine number."""
        if envelope.number > self.number and self._is_genuine(envelope):
            self.number = envelope.number
        return self.number

    def _is_genuine(self, envelope: Envelope) -> bool:
        fields = _fields(self._sender, self._receiver, envelope.number, envelope.body)
        return envelope.sender == self._sender and self._mac.proves(envelope.proof, *fields)


def read_envelope(data: bytes) -> Envelope | None:
    """Decode received bytes; None: they are not an envelope."""
    if len(data) > _MOST_BYTES:
        return None
    try:
        return msgpack_decoder(Envelope).decode(data)
    except UNREADABLE:
        return None


def read_body(body: bytes, messages: Any) -> Any:
    """Decode a message of one of the types in the union `messages`.

    Raises:
        TransportError: it is none of them; the two ends run different versions.
    """
    try:
        return msgpack_decoder(messages).decode(body)
    except UNREADABLE as error:
        raise TransportError(f"a launcher's message cannot be read ({error}); do all nodes run one version?") from error


def _fields(sender: str, receiver: str, number: int, body: bytes) -> tuple[bytes, ...]:
    return sender.encode(), receiver.encode(), number.to_bytes(8, "little"), body


Inbound = Order | GangExited | StopRequested
"""What the launcher of node 1, 2, ... handles."""
