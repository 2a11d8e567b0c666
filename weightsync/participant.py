"""A receiver's part in broadcasts: a thread that joins each one and puts versions into the cache.

    JoinBroadcast parks at the lead agent ... Transfer -> receive into memory of this process, check -> cache

A version that does not come whole is left to the agent: `missed` is called, and the next broadcast has new groups.
"""

import logging
import threading
from collections.abc import Callable
from functools import partial

from asyncflow.errors import TransportError, WeightSyncError
from asyncflow.timeline import NoTimeline, Spans
from asyncflow.transport.connection import Connection
from asyncflow.transport.handshake import Credentials
from weightsync.broadcast import BroadcastMember
from weightsync.connections import connections, parked_reply
from weightsync.messages import JoinBroadcast, Transfer
from weightsync.version_cache import EngineViews, ReadyVersion, VersionCache

logger = logging.getLogger(__name__)

_CALL_TIMEOUT_S = 60.0


class Participant:
    """Owned by a `WeightReceiver`."""

    def __init__(
        self,
        credentials: Credentials,
        lead: str,
        name: str,
        member: BroadcastMember,
        cache: VersionCache,
        views: EngineViews,
        *,
        missed: Callable[[], None],
        timeout_s: float,
        timeline: Spans | NoTimeline,
    ) -> None:
        """Start joining.

        Args:
            credentials: store and secret.
            lead: the agent that says when a broadcast begins.
            name: of the receiver.
            member: its side of the groups.
            cache: gets what came.
            views: of the engine.
            missed: is called when a version did not come whole.
            timeout_s: for each transfer.
            timeline: records the transfers.
        """
        self._credentials = credentials
        self._lead = lead
        self._name = name
        self._member = member
        self._cache = cache
        self._views = views
        self._missed = missed
        self._timeout_s = timeout_s
        self._timeline = timeline
        self._broken = ""
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="weight-member", daemon=True)
        self._thread.start()

    def close(self, timeout_s: float) -> None:
        """Leave, also in the middle of a broadcast; idempotent."""
        self._closing.set()
        self._member.abort()  # the caller need not wait for its end
        self._thread.join(timeout_s)

    def _run(self) -> None:
        try:
            for connection in connections(
                self._credentials, self._lead, self._name, stop=self._closing, failed=self._note
            ):
                try:
                    self._join_all(connection)
                except TransportError as error:
                    self._note(error)
        except Exception as error:  # noqa: BLE001 - the boundary of a thread: versions come from the agent from now on
            self._cache.fail(error)
            logger.warning("%s takes part in no more broadcasts: %s", self._name, error)
        self._member.abort()

    def _note(self, error: TransportError) -> None:
        logger.debug("%s: %s", self._name, error)

    def _join_all(self, connection: Connection) -> None:
        while True:
            join = connection.submit(JoinBroadcast(self._broken), timeout_s=_CALL_TIMEOUT_S)
            transfer = parked_reply(join, stop=self._closing)
            if not isinstance(transfer, Transfer):
                return
            self._broken = "" if self._receive(connection, transfer) else transfer.epoch

    def _receive(self, connection: Connection, transfer: Transfer) -> bool:
        """Take a version in; returns whether it came whole. If not, the agent will have it.

        Raises:
            PlanError: the engine does not fit the trainer.
        """
        layout = self._views.layout(transfer.plan, connection)
        with self._cache.coming(transfer.version):
            try:
                region = self._cache.memory(layout)
                with self._timeline.span("receive weights", version=transfer.version.step):
                    self._member.receive(transfer, region, timeout_s=self._timeout_s)
            except WeightSyncError as error:  # bytes may still be under way to the region: it is not released
                logger.warning("%s: %s; taking it from its agent", self._name, error)
                self._missed()
                return False
            release = partial(self._cache.recycle, region)
            self._cache.put(ReadyVersion(transfer.version, self._views.of(region), own=True, release=release))
        return True
