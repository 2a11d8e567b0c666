"""The way to one other agent: a thread that watches what it has and fetches buckets from it, one after the other.

    connect -> WatchPeer parks ... answered: what it has -> the agent decides -> FetchBucket ... -> WatchPeer parks ...

A channel that breaks fails what was to be fetched and is opened again, with pauses, until `close`.
"""

import logging
import queue
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from asyncflow.errors import PeerRefused, TransportError, WeightSyncError
from asyncflow.process import ServiceThreads
from asyncflow.transport.frame import Limits
from asyncflow.transport.meeting import Credentials
from asyncflow.transport.server import Connection
from weightsync.agent.instructions import Pull
from weightsync.connections import connections
from weightsync.messages import BucketFetched, FetchBucket, FetchPlan, Held, PeerHas, PlanFetched, WatchPeer
from weightsync.region import Region
from weightsync.version import Version

logger = logging.getLogger(__name__)

_FETCH_TIMEOUT_S = 60.0
_CLOSE_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class Fetch:
    """A bucket to fetch.

    Attributes:
        pull: what was decided.
        region: of the slot's memory as it was then.
    """

    pull: Pull
    region: Region


@dataclass(frozen=True)
class _PlanWanted:
    digest: str


class _Lost:
    """The channel broke."""


class Agent(Protocol):
    """Whom a link works for."""

    def peer_has(self, peer: str, held: Sequence[Held]) -> None: ...
    def peer_plan(self, plan: bytes) -> None: ...
    def peer_lost(self, peer: str) -> None: ...
    def write_bucket(self, fetch: Fetch, payload: Tensor, base: Version | None) -> bool: ...
    def fetched(self, fetch: Fetch, num_bytes: int, *, matches: bool) -> None: ...


_Event = PeerHas | Fetch | _PlanWanted | _Lost


class PeerLink:
    """The link to one other agent."""

    def __init__(
        self,
        credentials: Credentials,
        name: str,
        peer: str,
        agent: Agent,
        threads: ServiceThreads,
        *,
        limits: Limits,
    ) -> None:
        """Start connecting.

        Args:
            credentials: store and secret.
            name: of this agent.
            peer: of the other one.
            agent, threads: this one, and its threads.
            limits: of the channel.
        """
        self._credentials = credentials
        self._name = name
        self._peer = peer
        self._agent = agent
        self._limits = limits
        self._events: queue.SimpleQueue[_Event] = queue.SimpleQueue()
        self._closing = threading.Event()
        self._held: list[Held] = []
        self._thread = threads.start(self._run, name=f"peer-{peer}")

    def fetch(self, fetch: Fetch) -> None:
        """Get a bucket, after those before it."""
        self._events.put(fetch)

    def fetch_plan(self, digest: str) -> None:
        """Get a plan."""
        self._events.put(_PlanWanted(digest))

    def close(self) -> None:
        """End the thread; idempotent."""
        self._closing.set()
        self._events.put(_Lost())
        self._thread.join(timeout=_CLOSE_TIMEOUT_S)

    def _run(self) -> None:
        for connection in connections(
            self._credentials, self._peer, self._name, stop=self._closing, limits=self._limits
        ):
            try:
                self._work(connection)
            except (TransportError, WeightSyncError) as error:
                logger.info("%s: %s", self._name, error)
            finally:
                connection.close()  # first: no event of it may come after those that are dropped
                self._agent.peer_lost(self._peer)  # second: what fails is fetched from others
                self._fail_fetches()

    def _work(self, connection: Connection) -> None:
        self._watch(connection, 0)
        while not self._closing.is_set():
            event = self._events.get()
            match event:
                case PeerHas(revision, held):
                    self._held = held
                    self._watch(connection, revision)
                    self._agent.peer_has(self._peer, held)
                case Fetch() as fetch:
                    self._fetch(connection, fetch)
                case _PlanWanted(digest):
                    reply, _ = connection.call(FetchPlan(digest), timeout_s=_FETCH_TIMEOUT_S)
                    assert isinstance(reply, PlanFetched)
                    self._agent.peer_plan(reply.plan)
                    self._agent.peer_has(self._peer, self._held)
                case _Lost():
                    return

    def _watch(self, connection: Connection, revision: int) -> None:
        connection.submit(WatchPeer(revision), timeout_s=_FETCH_TIMEOUT_S).add_done_callback(self._watched)

    def _watched(self, future: "Future[tuple[object, Tensor]]") -> None:
        try:
            reply, _ = future.result()
        except TransportError:
            reply = None
        self._events.put(reply if isinstance(reply, PeerHas) else _Lost())

    def _fetch(self, connection: Connection, fetch: Fetch) -> None:
        num_bytes = 0
        bases = (None, None) if fetch.pull.base is None else (fetch.pull.base, None, None)
        for base in bases:  # a delta that fails is followed by the whole bucket, and that is tried once more
            try:
                request = FetchBucket(fetch.pull.version, fetch.pull.bucket, base)
                reply, payload = connection.call(request, timeout_s=_FETCH_TIMEOUT_S)
                assert isinstance(reply, BucketFetched)
                num_bytes += reply.num_bytes
                if self._agent.write_bucket(fetch, payload[: reply.num_bytes], reply.base):
                    self._agent.fetched(fetch, num_bytes, matches=True)
                    return
                problem = "its checksum does not match"
            except PeerRefused as error:
                logger.info("%s: %s", self._name, error)
                break
            except WeightSyncError as error:
                problem = str(error)
            except TransportError:
                self._agent.fetched(fetch, num_bytes, matches=False)
                raise
            logger.warning("bucket %d of %s from %s: %s", fetch.pull.bucket, fetch.pull.version, self._peer, problem)
        self._agent.fetched(fetch, num_bytes, matches=False)

    def _fail_fetches(self) -> None:
        while not self._events.empty():
            event = self._events.get()
            if isinstance(event, Fetch):
                self._agent.fetched(event, 0, matches=False)
