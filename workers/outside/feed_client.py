"""An outside process that feeds prompts to a run: `asyncflow.connect(...).feed(NAME)`.

    with asyncflow.connect("runs/mine") as run:
        feed = run.feed("math")
        for batch in batches_of(rows[feed.last_sequence :]):     a feeder that was killed continues where it was
            feed.put(batch)                                       returns when the rows are durable
        feed.end()

If the reply to a put is lost because the lead controller died, the put is sent again once it is back. Rows are
numbered, so the run takes each once.
"""

import math
import reprlib
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from torch.distributed import DistError

from asyncflow.errors import ConfigError, PeerRefused, QueueFull, TransportError
from asyncflow.transport.meeting import Credentials
from asyncflow.transport.server import Connection
from workers.admission.feed_service import SERVICE, EndFeed, FedUpTo, OpenFeed, PutFeed

_MOST_BYTES = 2**25
_RETRY_S = 0.2


class PromptFeed:
    """Feeds under one name. Thread-safe: puts are serialized.

    Opening it revokes the name from any other process that feeds under it.

    Args:
        credentials: store and secret; their timeout applies to each call.
        name: of the feeder; keep it across restarts.
        over: set when the run has ended.

    Raises:
        QueueFull: the run's disk is full.
        TransportError: the run does not answer.
    """

    def __init__(self, credentials: Credentials, name: str, *, over: threading.Event) -> None:
        self.name = name
        self._credentials = credentials
        self._over = over
        self._process = uuid.uuid4().hex
        self._lock = threading.Lock()
        self._connection: Connection | None = None
        self._closed = False
        # None: the outcome of the last put is unknown
        self._last: int | None = self._call_service(OpenFeed(name, self._process))

    @property
    def last_sequence(self) -> int:
        """How many rows of this feeder the run has: the next one is `rows[last_sequence]`. Raises as `put` does."""
        with self._lock:
            return self._known_last()

    def put(self, rows: Sequence[Mapping[str, Any]]) -> int:
        """Append rows, which are like lines of a data file, all or none; return `last_sequence`.

        Returns once they are on the run's disk, the only limit on how far a feeder runs ahead. A few hundred rows per
        put are faster than single ones.

        Raises:
            ConfigError: a row is unusable, the feed has ended, or another process took over the name; nothing is
                stored.
            QueueFull: the run's disk is full; nothing is stored.
            TransportError: this was closed, the run is over or does not answer. Rows may be stored: see
                `last_sequence`.
        """
        try:
            given = [dict(row) for row in rows]
            _check_plain(given)
            encoded = msgspec.json.encode(given)
        except (TypeError, ValueError, RecursionError) as error:
            raise ConfigError(f"feed {self.name}: a row is not a JSON object: {error}; give dicts") from error
        if len(encoded) > _MOST_BYTES:
            raise ConfigError(f"feed {self.name}: a put of {len(encoded)} bytes; put {_MOST_BYTES} or fewer at once")
        with self._lock:
            first = self._known_last() + 1
            # Unknown until the reply; see `_known_last`.
            self._last = None
            self._last = self._call_service(PutFeed(self.name, self._process, first, encoded))
            return self._last

    def end(self) -> None:
        """Declare that no feeder will put more rows: the run trains the steps that they fill, and ends. Raises as `put`
        does."""
        with self._lock:
            self._call_service(EndFeed(self.name, self._process))

    def close(self) -> None:
        """Leave for good; idempotent."""
        self._closed = True
        self._disconnect()

    def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def _known_last(self) -> int:
        if self._last is None:
            self._last = self._call_service(OpenFeed(self.name, self._process, again=True))
        return self._last

    def _call_service(self, message: OpenFeed | PutFeed | EndFeed) -> int:
        timeout_s = self._credentials.timeout_s
        deadline = time.monotonic() + timeout_s
        while True:
            if self._closed:
                raise TransportError(f"feed {self.name}: it is closed; get a new feed from an open client")
            try:
                if self._connection is None:
                    self._connection = Connection(
                        self._credentials, SERVICE, self.name, FedUpTo, timeout_s=timeout_s, stop=self._over
                    )
                reply, _ = self._connection.call_service(message, timeout_s=timeout_s)
            except QueueFull:
                raise
            except PeerRefused as error:
                raise ConfigError(str(error)) from error
            except (TransportError, DistError) as error:
                self._disconnect()
                if self._over.wait(_RETRY_S):
                    raise TransportError(f"feed {self.name}: the run is over") from error
                if time.monotonic() >= deadline:
                    raise TransportError(f"feed {self.name}: no answer within {timeout_s:g} s: {error}") from error
            else:
                last: int = reply.last_sequence
                return last


def _check_plain(value: object) -> None:
    """Raise TypeError for values that msgspec would change: bytes to base64, dates to text, inf to null."""
    if isinstance(value, Mapping):
        for key, each in value.items():
            if not isinstance(key, str):
                raise TypeError(f"key {key!r} is not a text")
            _check_plain(each)
    elif isinstance(value, list | tuple):
        for each in value:
            _check_plain(each)
    elif not (value is None or isinstance(value, str | int) or (isinstance(value, float) and math.isfinite(value))):
        raise TypeError(f"{reprlib.repr(value)} is not a JSON value")
