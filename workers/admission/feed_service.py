"""The protocol between feeders and the lead controller's process: the messages, and the service that answers them.

OpenFeed   this process feeds under a name     -> FedUpTo: the name's last row
PutFeed    rows, numbered on from there        -> FedUpTo, once they are durable; or refused, and none is stored
EndFeed    no more rows follow                 -> FedUpTo
"""

import threading
from typing import Any

import msgspec

from asyncflow.decoding import UNREADABLE, json_decoder
from asyncflow.errors import ConfigError
from asyncflow.process import ServiceThreads
from asyncflow.transport.meeting import Credentials
from asyncflow.transport.server import Call, ChannelServer, ChannelSession
from workers.data.prompt_dataset import FedPrompts

SERVICE = "feed"


class OpenFeed(msgspec.Struct, tag=True):
    """A process feeds under a name from now on. With `again` it did before, and is refused if another one does now."""

    feeder: str  # The name
    process: str  # Distinguishes processes with the same name
    again: bool = False


class PutFeed(msgspec.Struct, tag=True):
    """Rows of a feeder."""

    # `feeder`, `process`: as in `OpenFeed`
    feeder: str
    process: str
    first: int  # Number of the first row; the feeder's rows count from 1
    rows: bytes  # JSON, an array of objects


class EndFeed(msgspec.Struct, tag=True):
    """No more rows follow, from any feeder."""

    feeder: str
    process: str


class FedUpTo(msgspec.Struct, tag=True):
    """Number of the feeder's last durable row; 0: none."""

    last_sequence: int


class FeedService:
    """Serves feeders until `close`; `prompts` checks their rows, and its file must be open for appending."""

    def __init__(self, credentials: Credentials, prompts: FedPrompts, *, threads: ServiceThreads) -> None:
        self._prompts = prompts
        self._lock = threading.Lock()
        self._server = ChannelServer(credentials, SERVICE, OpenFeed | PutFeed | EndFeed, self, threads=threads)

    def handle(self, call: Call) -> None:
        """Handle one request at a time. Raises ConfigError if the rows cannot be trained on, or another process now
        feeds under the name; QueueFull if the file system refuses."""
        message, rows = call.message, self._prompts.rows
        with self._lock:
            if isinstance(message, OpenFeed) and not message.again:
                rows.take_ownership(message.feeder, message.process)
            elif rows.owner(message.feeder) != message.process:
                raise ConfigError(f"feeder {message.feeder}: another process has this name now; use another one")
            if isinstance(message, PutFeed):
                self._put_rows(message)
            elif isinstance(message, EndFeed):
                rows.end(message.feeder)
            last = rows.last_sequence(message.feeder)
        call.send_reply(FedUpTo(last))

    def handle_disconnect(self, session: ChannelSession) -> None:
        """Do nothing: a feeder may come back at any time."""

    def close(self) -> None:
        self._server.close()

    def _put_rows(self, message: PutFeed) -> None:
        try:
            given: list[dict[str, Any]] = json_decoder(list[dict[str, Any]]).decode(message.rows)
        except UNREADABLE as error:
            raise ConfigError(f"feeder {message.feeder}: a put must be an array of objects ({error})") from error
        new = given[self._prompts.rows.num_known(message.feeder, message.first, given) :]
        self._prompts.check(new)
        if new:
            self._prompts.rows.put(message.feeder, new)
