"""The receiving side: a thread maps and checks new versions while the engine goes on with the old one.

    receiver thread   | watch ... map v1, check | watch ...... map v2, check | ...
    engine thread     generate v0 ................| load v1 | generate v1 ......| load v2 |

Only a version whose buckets all match their checksums is ever offered to the engine; the newest one wins. What is
mapped stays whole and readable whatever becomes of the agent or the trainer.
"""

import logging
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from asyncflow.errors import PeerRefused, PlanError, TransportError, WeightSyncError
from asyncflow.timeline import NoTimeline, Spans
from asyncflow.transport.connection import Connection
from asyncflow.transport.handshake import Credentials
from weightsync.broadcast import BroadcastMember
from weightsync.messages import (
    AskSwap,
    EndSwap,
    JoinBroadcast,
    Offered,
    Release,
    Reply,
    ReportCorrupt,
    Serving,
    SwapTurn,
    Transfer,
    Watch,
)
from weightsync.plan import Need, Piece, TransferPlan, match_needs
from weightsync.region import Region, RegionLayout
from weightsync.slot_memory import SlotMappings, private_memory
from weightsync.version import Version

logger = logging.getLogger(__name__)

_CONNECT_TIMEOUT_S = 5.0
_CALL_TIMEOUT_S = 60.0
_PAUSE_S = 0.2
_LOOK_S = 0.5
_KEPT_MAPPINGS = 4
_BROADCAST = 0
"""The link number of what came by broadcast; channels to the agent count from 1."""


@dataclass(frozen=True)
class _Staged:
    """A version that was checked.

    Attributes:
        version, views: what, by the engine's names.
        region: where.
        link: number of the channel on which it is held.
    """

    version: Version
    views: Mapping[str, Tensor]
    region: Region
    link: int


class WeightReceiver:
    """Keeps the newest version of the node's weight agent at hand, checked. One thread of the caller loads."""

    def __init__(
        self,
        credentials: Credentials,
        agent: str,
        name: str,
        needs: Mapping[str, Need] | None,
        *,
        device: torch.device,
        whole: bool = True,
        guest: bool = False,
        wanted: Callable[[Version], bool] | None = None,
        member: BroadcastMember | None = None,
        lead: str = "",
        timeout_s: float = 300.0,
        timeline: Spans | None = None,
    ) -> None:
        """Start watching.

        Args:
            credentials: store and secret.
            agent: this node's weight agent.
            name: of this receiver.
            needs: what the engine wants, by its own names; None: everything, by the trainer's.
            device: that the engine loads to.
            whole: the engine takes the whole model; False: its ranks share it.
            guest: nobody waits for it, and it waits for no turn to swap: for a process outside of the run.
            wanted: passes other versions over; None: takes the newest.
            member: takes part in broadcasts; None: everything comes from the agent.
            lead: the agent that says when a broadcast begins.
            timeout_s: deadline of a broadcast.
            timeline: records what the threads do.
        """
        self._timeline = timeline or NoTimeline()
        self._guest = guest
        self._wanted = wanted
        self._member = member
        self._lead = lead
        self._timeout_s = timeout_s
        self._credentials = credentials
        self._agent = agent
        self._name = name
        self._needs = needs
        self._device = device
        self._whole = whole
        self._layouts: dict[str, tuple[RegionLayout, dict[str, Piece]]] = {}
        self._slots = SlotMappings(write=False, keep=_KEPT_MAPPINGS, device=device)
        self._changed = threading.Condition()
        self._loading = threading.Lock()
        self._connection: Connection | None = None
        self._link = 0
        self._staged: _Staged | None = None
        self._serving: Version | None = None
        self._error: Exception | None = None
        self._receiving: Version | None = None
        self._incoming: list[Region] = []
        self._closing = threading.Event()
        self._threads = [threading.Thread(target=self._run, name="weight-receiver", daemon=True)]
        if member is not None:
            taking_part = threading.Thread(target=self._take_part, args=(member,), name="weight-member", daemon=True)
            self._threads.append(taking_part)
        for thread in self._threads:
            thread.start()

    @property
    def newest(self) -> Version | None:
        """The newest version that is checked and at hand."""
        staged = self._staged
        return None if staged is None else staged.version

    def load(
        self,
        apply: Callable[[Mapping[str, Tensor]], None],
        *,
        newer_than: Version | None,
        patience_s: float = 0.0,
    ) -> Version | None:
        """Give the newest version to `apply` if it is newer than the one held and it is this receiver's turn.

        Args:
            apply: copies the weights (by the names of `needs`; views that are valid during the call).
            newer_than: version that the engine holds; None: none.
            patience_s: how long to wait for a turn, where the number of receivers that swap at once is limited.

        Returns:
            The version that was loaded, or None: there is no newer one, or others are swapping.
        """
        if not _is_news(self._staged, newer_than) or not self._ask_turn(patience_s):
            return None
        try:
            with self._loading:
                staged = self._staged  # perhaps a newer one by now
                if staged is None or not _is_news(staged, newer_than):
                    return None
                apply(staged.views)
                self._serving = staged.version
        finally:
            self._tell(EndSwap())
        self._tell(Serving(staged.version))
        return staged.version

    def drop(self) -> None:
        """Forget the version that was loaded, if it is still the newest, so that its memory can be used again."""
        with self._loading, self._changed:
            staged = self._staged
            if staged is None or staged.version != self._serving:
                return
            self._staged = None
        if staged.link == self._link:
            self._tell(Release(staged.version))

    def wait_for(self, step: int, *, timeout_s: float, stop: threading.Event | None = None) -> bool:
        """Wait until a version of `step` or later is at hand; False when `stop` was set first.

        Raises:
            WeightSyncError: not within `timeout_s`; says why.
            PlanError: trainer and engine do not agree on a tensor.
        """
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while (newest := self.newest) is None or newest.step < step:
                if stop is not None and stop.is_set():
                    return False
                if isinstance(self._error, PlanError):
                    raise self._error
                if time.monotonic() >= deadline:
                    why = f": {self._error}" if self._error is not None else f"; {self._agent} has none"
                    raise WeightSyncError(f"weights of step {step} did not come within {timeout_s:g} s{why}")
                self._changed.wait(min(_LOOK_S, max(0.0, deadline - time.monotonic())))
        return True

    def close(self, timeout_s: float = 10.0) -> None:
        """Leave the agent; idempotent."""
        self._closing.set()
        with self._changed:
            self._changed.notify_all()
        if self._member is not None:
            self._member.abort()  # nobody need wait for the end of a broadcast
        self._watch_again()
        for thread in self._threads:
            thread.join(timeout_s)

    def _run(self) -> None:
        while not self._closing.is_set():
            try:
                connection = Connection(
                    self._credentials, self._agent, self._name, Reply, timeout_s=_CONNECT_TIMEOUT_S, stop=self._closing
                )
            except TransportError as error:
                self._fail(error)
            else:
                self._link += 1
                self._connection = connection
                if isinstance(self._error, TransportError):
                    self._error = None
                try:
                    self._watch(connection)
                except (TransportError, WeightSyncError) as error:
                    self._fail(error)
                finally:
                    self._connection = None
                    connection.close()
            self._closing.wait(_PAUSE_S)

    def _fail(self, error: Exception) -> None:
        with self._changed:
            changed = str(error) != str(self._error)
            self._error = error
            self._changed.notify_all()
        if changed and not self._closing.is_set():
            logger.warning("%s: %s", self._name, error)

    def _watch(self, connection: Connection) -> None:
        self._slots.clear()
        seen = self.newest
        if self._serving is not None:
            connection.call(Serving(self._serving), timeout_s=_CALL_TIMEOUT_S)
        while True:
            offered = self._await(connection.submit(Watch(seen, self._guest), timeout_s=_CALL_TIMEOUT_S))
            if not isinstance(offered, Offered):
                return
            seen = offered.version
            unwanted = self._wanted is not None and not self._wanted(offered.version)
            if unwanted or self._came_by_broadcast(offered.version):
                connection.call(Release(offered.version), timeout_s=_CALL_TIMEOUT_S)
                continue
            region, matched = self._region(offered)
            with self._timeline.span("check weights", version=offered.version.step):
                checked = self._check(connection, offered, region)
            if not (checked and self._stage(_Staged(offered.version, region.views(matched), region, self._link))):
                connection.call(Release(offered.version), timeout_s=_CALL_TIMEOUT_S)

    def _await(self, future: "Future[tuple[Any, Tensor]]") -> Any:
        """Wait for a parked answer; None: closing."""
        while not self._closing.is_set():
            try:
                return future.result(timeout=_LOOK_S)[0]
            except FutureTimeout:
                continue
        return None

    def _region(self, offered: Offered) -> tuple[Region, dict[str, Piece]]:
        layout, matched = self._layout(offered.plan)
        return Region(self._slots.get(offered.slot), layout), matched

    def _layout(self, plan: TransferPlan) -> tuple[RegionLayout, dict[str, Piece]]:
        digest = plan.digest()
        if digest not in self._layouts:
            needs = self._needs
            if needs is None:
                needs = {name: Need(tensor.shape) for name, tensor in plan.tensors.items()}
            self._layouts[digest] = RegionLayout(plan), match_needs(plan, needs, whole=self._whole)
        return self._layouts[digest]

    def _check(self, connection: Connection, offered: Offered, region: Region) -> bool:
        """Compare all buckets with their checksums; one that differs is asked for again, once."""
        for bucket, expected in zip(offered.plan.buckets, offered.checksums, strict=True):
            if region.checksum(bucket) == expected:
                continue
            logger.warning("%s: bucket %d of %s is damaged; reported", self._name, bucket.index, offered.version)
            try:
                connection.call(ReportCorrupt(offered.version, bucket.index), timeout_s=_CALL_TIMEOUT_S)
            except PeerRefused as error:
                self._fail(WeightSyncError(str(error)))
                return False
            if region.checksum(bucket) != expected:
                self._fail(WeightSyncError(f"weights of {offered.version}: bucket {bucket.index} stays damaged"))
                return False
        return True

    def _stage(self, staged: _Staged) -> bool:
        """Have the engine load this next; returns False if there is something newer already."""
        with self._loading, self._changed:  # not while the engine reads the older one
            older = self._staged
            if older is not None and older.version >= staged.version:
                return False
            self._staged = staged
            self._error = None
            self._changed.notify_all()
        connection = self._connection
        if older is not None and connection is not None and older.link == self._link:
            connection.call(Release(older.version), timeout_s=_CALL_TIMEOUT_S)
        return True

    def _came_by_broadcast(self, version: Version) -> bool:
        """Return whether a version need not be taken from the agent; waits for a broadcast of it to end."""
        with self._changed:
            while self._receiving is not None and self._receiving >= version and not self._closing.is_set():
                self._changed.wait(_LOOK_S)
            newest = self.newest
        return newest is not None and newest >= version

    def _take_part(self, member: BroadcastMember) -> None:
        broken = ""
        while not self._closing.is_set():
            try:
                connection = Connection(
                    self._credentials, self._lead, self._name, Reply, timeout_s=_CONNECT_TIMEOUT_S, stop=self._closing
                )
            except TransportError as error:
                logger.debug("%s: %s", self._name, error)
                self._closing.wait(_PAUSE_S)
                continue
            try:
                while True:
                    join = connection.submit(JoinBroadcast(broken), timeout_s=_CALL_TIMEOUT_S)
                    transfer = self._await(join)
                    if not isinstance(transfer, Transfer):
                        break
                    broken = "" if self._receive(member, transfer) else transfer.epoch
            except TransportError as error:
                logger.debug("%s: %s", self._name, error)
            except PlanError as error:
                self._fail(error)
                break  # else every broadcast would wait for one that cannot take it in
            finally:
                connection.close()
            self._closing.wait(_PAUSE_S)
        member.abort()

    def _receive(self, member: BroadcastMember, transfer: Transfer) -> bool:
        """Take a version in by broadcast; returns whether it came whole. If not, the agent will have it.

        Raises:
            PlanError: the engine does not fit the trainer.
        """
        assert transfer.plan is not None
        layout, matched = self._layout(transfer.plan)
        with self._loading, self._changed:  # not while the engine reads what is overwritten now
            self._receiving = transfer.version
            region = self._memory_for(layout)
        try:
            with self._timeline.span("receive weights", version=transfer.version.step):
                member.receive(transfer, region, timeout_s=self._timeout_s)
            self._stage(_Staged(transfer.version, region.views(matched), region, _BROADCAST))
        except WeightSyncError as error:
            logger.warning("%s: %s; taking it from %s", self._name, error, self._agent)
            self._incoming.remove(region)  # bytes may still be under way to it
            self._watch_again()
            return False
        except TransportError as error:
            logger.debug("%s: %s", self._name, error)  # an older version could not be released: the agent is gone
        finally:
            with self._changed:
                self._receiving = None
                self._changed.notify_all()
        return True

    def _memory_for(self, layout: RegionLayout) -> Region:
        """Return where a broadcast is written: not where a version lies that the engine has yet to load."""
        staged = self._staged
        if staged is not None and staged.link == _BROADCAST and staged.version == self._serving:
            self._staged = staged = None
        kept = [each for each in self._incoming if staged is not None and each is staged.region]
        free = [each for each in self._incoming if each not in kept and each.layout is layout]
        region = free[0] if free else Region(private_memory(layout.plan.region_bytes), layout)
        self._incoming = [*kept, region]
        return region

    def _watch_again(self) -> None:
        """End the channel: its successor is offered the newest version, also if that was passed over before."""
        connection = self._connection
        if connection is not None:
            connection.close()

    def _ask_turn(self, patience_s: float) -> bool:
        """Ask for a turn to swap; without an agent there is nobody who could count, and nothing to wait for."""
        connection = self._connection
        if connection is None or self._guest:
            return True
        try:
            reply, _ = connection.call(AskSwap(patience_s), timeout_s=patience_s + _CALL_TIMEOUT_S)
        except TransportError:
            return True
        return isinstance(reply, SwapTurn) and reply.granted

    def _tell(self, message: EndSwap | Serving | Release) -> None:
        connection = self._connection
        if connection is not None:
            try:
                connection.submit(message, timeout_s=_CALL_TIMEOUT_S)
            except TransportError as error:
                logger.debug("%s: %s", self._name, error)


def _is_news(staged: _Staged | None, newer_than: Version | None) -> bool:
    return staged is not None and (newer_than is None or staged.version > newer_than)
