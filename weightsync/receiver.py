"""The receiving side: threads fetch and check new versions while the engine works with the old one."""

#     agent's thread    | watch ... map v1, check | watch ...... map v2, check | ...
#     engine's thread   generate v0 ..............| load v1 | generate v1 .....| load v2 |
#
# The engine is offered only versions whose buckets all match their checksums; the newest one wins. A mapped version
# stays intact and readable whatever happens to the agent or the trainer. For an engine that adopts, the thread also
# copies each version to memory of this process and checks the copy: loading is then an exchange of pointers.
#
# Where versions are also broadcast, a second thread takes part and fills the same cache:
#
#     JoinBroadcast parks at the lead agent ... Transfer -> receive into memory of the engine's device, check -> cache
#
# A version that does not arrive intact is taken from the agent instead, and the next broadcast has new groups.

import contextlib
import logging
import os
import struct
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from functools import partial
from io import FileIO
from math import prod
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import msgspec
import torch
from torch import Tensor

from asyncflow.device import copied_ahead, use_device, wait_for_device
from asyncflow.errors import (
    AsyncFlowError,
    EngineFailed,
    PeerRefused,
    PlanError,
    TransportError,
    WeightsLate,
    WeightSyncError,
)
from asyncflow.job import Job
from asyncflow.sealed_store import connect_store
from asyncflow.timeline import NoTimeline, Spans
from asyncflow.transport.meeting import Credentials
from asyncflow.transport.server import Connection
from weightsync.broadcast_group import STALL_S, BroadcastMember
from weightsync.device_copies import DeviceReader, HandedOver, Share
from weightsync.messages import (
    AskSwap,
    EndSwap,
    JoinBroadcast,
    Offered,
    ReleaseVersion,
    ReportCorrupt,
    Serving,
    SwapTurn,
    Transfer,
    Watch,
    connections,
    parked_reply,
)
from weightsync.plan import Bucket, Need, Piece
from weightsync.slot_memory import Region, SlotMappings, version_checksum
from weightsync.version import Version
from weightsync.version_cache import EngineViews, ReadyVersion, VersionCache

logger = logging.getLogger(__name__)

_CALL_TIMEOUT_S = 60.0
# Pause between a version that cannot be used and the next request (s).
_PAUSE_S = 0.2
# The engine stands still while it waits for a turn: without an answer for this long, it swaps anyway (s).
_TURN_TIMEOUT_S = 2.0


class WeightReceiver:
    """Keeps the newest version of the node's weight agent ready and checked. One thread of the caller loads.

    Args:
        agent: name of this node's weight agent.
        name: of this receiver.
        needs: what the engine wants, by its own names; None: everything, by the trainer's names.
        device: that the engine loads to.
        whole: the engine takes the whole model; False: its ranks share it.
        share: the names in `needs` that this process keeps and checks; others have the rest. None: all.
        adopts: the engine computes in place with what `load` gives it, until it has loaded the next version. That
            memory belongs to this process then (up to three versions); otherwise it is the node's shared memory.
        arrived: called by a thread of the receiver when a newer version is ready.
        best_effort: the trainer does not wait for memory that this receiver reads; for a process outside of the run.
        takes_turns: ask the agent before each swap, because the number of simultaneous swaps is limited.
        wanted: skip versions for which this is False; None: take the newest.
        least: returns the next version that is wanted; None: any. It takes no part in broadcasts of earlier ones.
        member: takes part in broadcasts; None: everything comes from the agent.
        together: names of the receivers that take part in broadcasts only together, this one among them; empty: it is
            alone.
        lead: name of the agent that announces broadcasts.
        keeps_on_host: keep broadcast versions in host memory; otherwise on `device`.
        on_device: the engine takes turns with the trainer on `device`, and loads while it has the turn: take what the
            trainer's ranks keep on their devices from there (`weightsync.device_copies`).
        timeout_s: deadline of a broadcast.
    """

    def __init__(
        self,
        credentials: Credentials,
        agent: str,
        name: str,
        needs: Mapping[str, Need] | None,
        *,
        device: torch.device,
        whole: bool = True,
        share: Collection[str] | None = None,
        adopts: bool = False,
        arrived: Callable[[], None] = lambda: None,
        best_effort: bool = False,
        takes_turns: bool = False,
        wanted: Callable[[Version], bool] | None = None,
        least: Callable[[], Version] | None = None,
        member: BroadcastMember | None = None,
        together: Sequence[str] = (),
        lead: str = "",
        keeps_on_host: bool = False,
        on_device: bool = False,
        timeout_s: float = 300.0,
        timeline: Spans | None = None,
    ) -> None:
        assert not (on_device and adopts), "an engine that takes turns has its memory to itself"
        self._timeline = timeline or NoTimeline()
        self._adopts = adopts
        self._best_effort = best_effort
        self._takes_turns = takes_turns
        self._wanted = wanted
        self._least = least
        self._together = list(together)
        self._credentials = credentials
        self._agent = agent
        self._name = name
        self._views = EngineViews(needs, whole=whole, share=share)
        self._slots = SlotMappings(write=False, device=device)
        self._device = device
        self._on_device = self._make_reader(name, device) if on_device else None
        memory = torch.device("cpu") if keeps_on_host else device
        self._cache = VersionCache(agent, adopts=adopts, arrived=arrived, device=memory)
        self._connection: Connection | None = None
        self._closing = threading.Event()
        self._member = member
        self._lead = lead
        self._timeout_s = timeout_s
        self._broken = ""
        self._threads = [threading.Thread(target=self._keep_connected, name="weight-receiver", daemon=True)]
        if member is not None:
            self._threads.append(
                threading.Thread(target=self._take_part, args=(member,), name="weight-member", daemon=True)
            )
        for thread in self._threads:
            thread.start()

    @property
    def adopts(self) -> bool:
        """Whether what `load` gives stays valid until the end of the next call."""
        return self._adopts

    @property
    def newest(self) -> Version | None:
        return self._cache.newest

    def load(
        self,
        apply: Callable[[Mapping[str, Tensor]], None],
        *,
        newer_than: Version | None,
        wait_s: float = 0.0,
    ) -> Version | None:
        """Give the newest version to `apply` if it is newer than the one held and it is this receiver's turn.

        Args:
            apply: takes the weights by the names of `needs`. The views are valid during the call or, if the engine
                adopts, until the end of the next call.
            newer_than: version that the engine holds; None: none.
            wait_s: how long to wait for a turn, where the number of simultaneous swaps is limited.

        Returns:
            The version that was loaded; None: there is no newer one, or others are swapping.
        """
        if not self._cache.has_newer(newer_than) or not self._ask_turn(wait_s):
            return None
        try:
            loaded = self._load_newest(apply, newer_than)  # a still newer one may have come by now
        finally:
            if self._takes_turns:
                self._tell_agent(EndSwap())
        if loaded is not None:
            self._tell_agent(Serving(loaded))
        return loaded

    def computing(self) -> AbstractContextManager[None]:
        """Enter while the engine computes together with other ranks; see `SharedReceiver`."""
        return contextlib.nullcontext()

    def drop(self) -> None:
        """Forget the loaded version if it is still the newest, so that its memory can be reused."""
        self._cache.drop_loaded()

    def wait_for(self, step: int, *, timeout_s: float, lineage: int = 0, stop: threading.Event | None = None) -> bool:
        """Wait until a version of `step` or later, or of a later lineage, is ready; False: `stop` was set first.

        Raises WeightSyncError, which says why, if none comes within `timeout_s`; PlanError if trainer and engine
        disagree on a tensor.
        """
        return self._wait_until(
            lambda: (newest := self.newest) is not None and newest >= (lineage, step),
            f"weights of {Version(lineage, step)}",
            timeout_s=timeout_s,
            stop=stop,
        )

    def close(self, timeout_s: float = 10.0) -> None:
        """Leave the agent; idempotent."""
        self._closing.set()
        self._cache.wake_waiters()
        if self._member is not None:
            self._member.abort()  # even in the middle of a broadcast
        self._watch_again()
        for thread in self._threads:
            thread.join(timeout_s)

    def _make_reader(self, name: str, device: torch.device) -> DeviceReader:
        return DeviceReader(name, device, timeline=self._timeline)

    def _load_newest(self, apply: Callable[[Mapping[str, Tensor]], None], newer_than: Version | None) -> Version | None:
        return self._cache.load_newest(apply, newer_than=newer_than)

    def _wait_until(
        self, wanted: Callable[[], bool], what: str, *, timeout_s: float, stop: threading.Event | None
    ) -> bool:
        return self._cache.wait(wanted, what, timeout_s=timeout_s, over=lambda: stop is not None and stop.is_set())

    def _keep_connected(self) -> None:
        for connection in connections(
            self._credentials, self._agent, self._name, stop=self._closing, failed=self._note_failure
        ):
            self._connection = connection
            self._cache.connected()
            try:
                self._watch_versions(connection)
            except PlanError as error:  # permanent: a new channel would end the same way
                self._note_failure(error)
                return
            except Exception as error:  # noqa: BLE001 - the boundary of a thread: the engine goes on with what it has
                self._note_failure(error)
            finally:
                self._connection = None

    def _note_failure(self, error: Exception) -> None:
        if self._cache.fail(error) and not self._closing.is_set():
            logger.warning("%s: %s", self._name, error)

    def _watch_versions(self, connection: Connection) -> None:
        self._slots.clear()
        seen = self.newest
        # An agent that was restarted does not know what this engine serves.
        if self._cache.loaded is not None:
            connection.call_service(Serving(self._cache.loaded), timeout_s=_CALL_TIMEOUT_S)
        while True:
            watch = connection.submit(Watch(seen, self._best_effort), timeout_s=_CALL_TIMEOUT_S)
            offered = parked_reply(watch, stop=self._closing)
            if not isinstance(offered, Offered):
                return
            self._slots.keep(offered.live)
            version = offered.version
            unwanted = self._wanted is not None and not self._wanted(version)
            if unwanted or self._cache.wait_for_coming(version, stop=self._closing):
                self._tell_agent(ReleaseVersion(version), connection)
                seen = version
            elif self._take_offered(connection, offered):
                seen = version
            else:
                seen = self.newest  # the agent dropped that version: accept an older one
                self._closing.wait(_PAUSE_S)

    def _take_offered(self, connection: Connection, offered: Offered) -> bool:
        """Check what the agent offers and hand it to the engine; False: it is damaged."""
        version, layout = offered.version, self._views.layout(offered.plan, connection)
        elsewhere = self._is_elsewhere(offered)
        extents = self._views.slot_extents(layout, elsewhere=elsewhere)
        region = slot = Region(self._slots.get(offered.slot, extents), layout)
        release = partial(self._tell_agent, ReleaseVersion(version), connection)
        if self._adopts:
            region = self._cache.memory(layout)
        with self._timeline.span("check weights", version=version.step):
            checked = self._check_buckets(connection, offered, slot, region, elsewhere)
        if self._adopts:
            # The copy is made, so the slot is free again.
            release()
            release = partial(self._cache.recycle_memory, region)
        if checked:
            on_devices = None if self._on_device is None else self._hand_over(self._on_device, offered, slot, elsewhere)
            views = self._views.views_of_region(region)
            self._cache.put(ReadyVersion(version, views, own=self._adopts, release=release, on_devices=on_devices))
        else:
            release()
        return checked

    def _is_elsewhere(self, offered: Offered) -> Callable[[Bucket], bool]:
        """Return for which buckets of a version this process does not look into shared memory: a device copy is to be
        tried first, or another rank of the engine reads them."""
        reader, copies = self._on_device, offered.device_copies
        if reader is None:
            return lambda _: False
        senders = reader.covered_senders(copies)
        return lambda bucket: bucket.sender in senders or not reader.reads_bucket(bucket)

    def _hand_over(
        self, reader: DeviceReader, offered: Offered, slot: Region, elsewhere: Callable[[Bucket], bool]
    ) -> HandedOver:
        unchecked = {bucket.index for bucket in slot.layout.plan.buckets if elsewhere(bucket)}

        def check_on_host(bucket: Bucket) -> None:
            if bucket.index in unchecked and not self._check_bucket(self._connection, offered, slot, slot, bucket):
                raise WeightSyncError(f"weights of {offered.version}: bucket {bucket.index} stays damaged")
            unchecked.discard(bucket.index)

        matched = self._views.matched(slot.layout)
        return HandedOver(reader, offered.version, offered.device_copies, slot, matched, check_on_host=check_on_host)

    def _check_buckets(
        self,
        connection: Connection,
        offered: Offered,
        slot: Region,
        region: Region,
        elsewhere: Callable[[Bucket], bool],
    ) -> bool:
        """Check the buckets that the engine will read in `region`: the slot, or where to copy it.

        Returns False if they do not hold the version, or the receiver closes.
        """
        if version_checksum(offered.checksums) != offered.checksum:
            raise WeightSyncError(f"weights of {offered.version}: {self._agent}'s checksums contradict each other")
        for bucket in slot.layout.plan.buckets:
            if self._closing.is_set():
                return False
            if not self._views.reads_bucket(bucket, slot.layout) or elsewhere(bucket):
                continue
            if not self._check_bucket(connection, offered, slot, region, bucket):
                return False
        return True

    def _check_bucket(
        self, connection: Connection | None, offered: Offered, slot: Region, region: Region, bucket: Bucket
    ) -> bool:
        """Compare a bucket with its checksum where the engine will read it, reporting a damaged one once."""

        def fits() -> bool:
            if region is not slot:
                region.copy_bucket(bucket, slot)
            return region.bucket_checksum(bucket) == offered.checksums[bucket.index]

        if fits():
            return True
        if connection is not None:
            logger.warning("%s: bucket %d of %s is damaged; reported", self._name, bucket.index, offered.version)
            try:
                connection.call_service(ReportCorrupt(offered.version, bucket.index), timeout_s=_CALL_TIMEOUT_S)
            except PeerRefused as error:
                self._note_failure(WeightSyncError(str(error)))
                return False
            if fits():
                return True
        self._note_failure(WeightSyncError(f"weights of {offered.version}: bucket {bucket.index} stays damaged"))
        return False

    def _take_part(self, member: BroadcastMember) -> None:
        use_device(self._device)
        try:
            for connection in connections(self._credentials, self._lead, self._name, stop=self._closing):
                try:
                    self._join_all(connection, member)
                except TransportError as error:
                    self._log_error(error)
        except Exception as error:  # noqa: BLE001 - the boundary of a thread: versions come from the agent from now on
            self._cache.fail(error)
            logger.warning("%s takes part in no more broadcasts: %s", self._name, error)
        member.abort()

    def _log_error(self, error: TransportError) -> None:
        logger.debug("%s: %s", self._name, error)

    def _join_all(self, connection: Connection, member: BroadcastMember) -> None:
        while True:
            join = JoinBroadcast(self._broken, None if self._least is None else self._least(), self._together)
            transfer = parked_reply(connection.submit(join, timeout_s=_CALL_TIMEOUT_S), stop=self._closing)
            if not isinstance(transfer, Transfer):
                return
            self._broken = "" if self._receive_broadcast(connection, member, transfer) else transfer.epoch

    def _receive_broadcast(self, connection: Connection, member: BroadcastMember, transfer: Transfer) -> bool:
        """Receive a broadcast version; False: it did not arrive intact, and the agent will have it.

        Raises PlanError if the engine does not fit the trainer, TransportError if the lead agent is gone.
        """
        region: Region | None = None
        # What it joined for may have come from the agent meanwhile; the others still wait for it.
        wanted = self._wanted is None or self._wanted(transfer.version)
        with self._cache.coming_version(transfer.version) if wanted else contextlib.nullcontext():
            try:
                layout = self._views.layout(transfer.plan, connection)
                region = self._cache.memory(self._views.own_layout(layout)) if wanted else None
                with self._timeline.span("receive weights", version=transfer.version.step):
                    member.receive_version(
                        transfer, layout, _nowhere if region is None else region.view_overlap,
                        pieces=self._views.pieces(layout), timeout_s=self._timeout_s,
                    )  # fmt: skip
            except (PlanError, TransportError):
                member.decline_transfer(transfer)
                raise
            except (RuntimeError, WeightSyncError) as error:  # the device's out-of-memory error is a RuntimeError
                if region is not None:
                    self._cache.recycle_memory(region)
                self._leave_transfer(member, transfer, error)
                return False
            if region is not None:
                release = partial(self._cache.recycle_memory, region)
                self._cache.put(
                    ReadyVersion(transfer.version, self._views.views_of_region(region), own=True, release=release)
                )
        return True

    def _leave_transfer(self, member: BroadcastMember, transfer: Transfer, error: Exception) -> None:
        member.decline_transfer(transfer)
        logger.warning("%s: %s; taking it from its agent", self._name, error)
        # The agent may have offered this version already, while it was being broadcast.
        self._watch_again()

    def _watch_again(self) -> None:
        """End the channel: the next one is offered the newest version, even if that was skipped before."""
        connection = self._connection
        if connection is not None:
            connection.close()

    def _ask_turn(self, wait_s: float) -> bool:
        """Ask for a turn to swap. Without an agent nobody counts turns, so there is no one to wait for."""
        connection = self._connection
        if connection is None or not self._takes_turns:
            return True
        try:
            reply, _ = connection.call_service(AskSwap(wait_s), timeout_s=wait_s + _TURN_TIMEOUT_S)
        except TransportError:
            return True
        return isinstance(reply, SwapTurn) and reply.granted

    def _tell_agent(self, message: EndSwap | Serving | ReleaseVersion, connection: Connection | None = None) -> None:
        """Send without waiting, over this channel or the current one; a broken channel is reported elsewhere."""
        connection = connection or self._connection
        if connection is not None:
            try:
                connection.submit(message, timeout_s=_CALL_TIMEOUT_S)
            except TransportError as error:
                self._log_error(error)


def _nowhere(_: Piece) -> None:
    """Drop what arrives; a `Target`."""


# The receiver of a rank of a model that several ranks share and none trains. The ranks compute together, so they
# receive broadcasts between two of their computations: otherwise two communicators, the weights' and the model's own,
# would be in flight on one device. All ranks make the same computations in the same order, and agree on the one after
# which they receive: the last one that any of them has begun.
#
#     rank 0, engine     compute 7 ..... |  (waits) .................................... | compute 8
#     rank 0, receiver     Transfer: begun 7 ...... agree: 7 | connect, ready, receive   |
#     rank 1, engine     compute 6 ... | compute 7 ........... |  (waits) ................ | compute 8
#     rank 1, receiver     Transfer: begun 6 . agree: 7 ..... | connect, ready, receive  |


class _Computations:
    """A rank's computations, numbered; the receiver's thread stops the engine's between two of them."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._begun = self._ended = 0
        self._last: int | None = None  # the engine's thread begins none after this one; None: it may begin any
        self._closed = False

    @contextmanager
    def computing(self) -> Iterator[None]:
        """In the engine's thread: one computation, which begins once it may."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._last is None or self._begun < self._last)
            self._begun += 1
        try:
            yield
        finally:
            with self._changed:
                self._ended += 1
                self._changed.notify_all()

    def stop(self) -> int:
        """Let no further computation begin; return how many have begun. `go_on` must follow."""
        with self._changed:
            self._last = self._begun
            return self._begun

    def run_to(self, number: int, *, timeout_s: float) -> bool:
        """Let computations begin and end up to this one; False: they did not in time, or the receiver closes."""
        with self._changed:
            self._last = number
            self._changed.notify_all()
            return self._changed.wait_for(lambda: self._closed or self._ended == number, timeout_s) and not self._closed

    def go_on(self) -> None:
        with self._changed:
            self._last = None
            self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()


class SharedReceiver(WeightReceiver):
    """Of one rank of a model that several ranks share. The engine's thread makes every computation in which the ranks
    take part together inside `computing`; all ranks make the same ones, in the same order.

    Its arguments are those of `WeightReceiver`, with `whole=False` and, if it takes part in broadcasts, `together`: the
    receivers of all ranks.
    """

    def __init__(
        self, credentials: Credentials, agent: str, name: str, needs: Mapping[str, Need], **named: Any
    ) -> None:
        self._computations = _Computations()
        super().__init__(credentials, agent, name, needs, whole=False, **named)

    def computing(self) -> AbstractContextManager[None]:
        """Enter while all ranks compute together; waits as long as a broadcast is received."""
        return self._computations.computing()

    def close(self, timeout_s: float = 10.0) -> None:
        """Leave the agent; idempotent. `computing` waits for nothing any more."""
        self._computations.close()
        super().close(timeout_s)

    def _receive_broadcast(self, connection: Connection, member: BroadcastMember, transfer: Transfer) -> bool:
        begun = self._computations.stop()
        try:
            try:
                last = member.agree_on_most(transfer, self._together, begun, timeout_s=self._timeout_s)
                if not self._computations.run_to(last, timeout_s=self._timeout_s):
                    raise WeightsLate(f"weights of {transfer.version}: the ranks did not end what they compute in time")
                wait_for_device(self._device)  # its collectives have ended, not only been issued
            except (RuntimeError, WeightSyncError) as error:
                self._leave_transfer(member, transfer, error)
                return False
            return super()._receive_broadcast(connection, member, transfer)
        finally:
            self._computations.go_on()


# Receivers of an engine whose ranks are separate processes: each has a receiver, and keeps its share of a version.
#
#     engine's rank k    RankReceiver     agent, broadcasts -> the k-th share of a version
#       | pipe: (k, version)                                                 hold(v) ... load, share by share ... let_go
#     user's process     RanksReceiver    what all ranks have is ready ... load: have all hold v, have them load it
#
# A broadcast reaches several ranks only while their engine is paused. Otherwise two communicators, the weights' and the
# engine's own, would be in flight on one device; if two devices begin them in different orders, both wait for ever.
#
#     rank k's receiver  Transfer -> pipe: (k, coming) ............... connect, ready, receive -> pipe: (k, version)
#     user's process     coming to all ranks -> pause -> all: let it receive ................... resume
#     rank k's engine    draw tokens ................ | wait for its device, then for the receiver | draw tokens
#
# A broadcast share is on the rank's device; any other share stays in the agent's memory, which the rank has mapped.
# Shares consist of whole tensors and have about equal sizes. A rank checks its own share, and passes it to the others
# while all load; so a version is stored once, however many ranks there are. The user's process has no copy at all.

_CPU = torch.device("cpu")
# What a rank writes to the pipe: its number, a version (lineage, step), the seconds of its last span, and whether the
# version came by that (a broadcast, or from the agent) or is about to be broadcast. Short enough for an atomic write.
_NEWS = struct.Struct("<qqqdB")
_BROADCAST, _AGENT = "receive weights", "check weights"
_CAME, _CAME_BY_BROADCAST, _COMING = range(3)
# A transfer's waits: connecting, all being ready, the transfer itself; and the engine's pause.
_WAITS_PER_TRANSFER = 4


class Following(msgspec.Struct, frozen=True):
    """What a rank must know to receive; plain values, none of them secret."""

    run_dir: str  # its `job.json` says how to reach the others
    name: str  # of the engine's user
    agent: str  # see `WeightReceiver`
    lead: str  # see `WeightReceiver`; empty: nothing is broadcast
    timeout_s: float  # deadline of a broadcast
    start_timeout_s: float  # deadline of a handshake
    pid: int  # of the engine's user
    fd: int  # the pipe's writing end there
    needs: dict[str, Need]  # what the engine wants, by its own names
    on_device: bool = False  # see `WeightReceiver`


@runtime_checkable
class RanksEngine(Protocol):
    """An engine whose ranks receive by themselves."""

    @property
    def num_ranks(self) -> int:
        """Processes that share the model."""

    def weight_needs(self) -> Mapping[str, Need]:
        """Return what the ranks need together."""

    def follow_weights(self, following: Following) -> None:
        """Have every rank open a `RankReceiver`; returns when all have."""

    def hold(self, version: Version) -> bool:
        """Have every rank `hold` a version; False: a rank lacks it, or has already replaced it."""

    def load_held(self) -> None:
        """Have all ranks load the version that they hold, and let it go."""

    def receive_while_paused(self, version: Version, *, timeout_s: float) -> None:
        """Pause, so that the ranks compute nothing and no collective of theirs is in flight; have every rank
        `receive_while_paused`; go on with the weights that are loaded. Called by another thread than the others, but
        never at the same time as `hold` and `load_held`; only with several ranks. Raises AsyncFlowError."""


class RanksReceiver(WeightReceiver):
    """In the process that uses the engine: decides which version the ranks load, and takes turns for them.

    The constructor calls the engine's `follow_weights`. For its other arguments see `WeightReceiver` and `Following`.
    """

    def __init__(
        self,
        credentials: Credentials,
        agent: str,
        name: str,
        engine: RanksEngine,
        *,
        run_dir: Path,
        lead: str,
        arrived: Callable[[], None],
        takes_turns: bool,
        timeout_s: float,
        on_device: bool = False,
        timeline: Spans | None = None,
    ) -> None:
        self._engine = engine
        self._newest_of: list[Version | None] = [None] * engine.num_ranks
        self._coming_to: list[Version | None] = [None] * engine.num_ranks
        self._using_ranks = threading.Lock()
        self._agree = threading.Event()
        read_end, write_end = os.pipe()
        super().__init__(
            credentials, agent, name, engine.weight_needs(),
            device=_CPU, arrived=arrived, takes_turns=takes_turns, timeout_s=timeout_s, timeline=timeline,
        )  # fmt: skip
        self._cache.fail(self._make_lag_error())
        threading.Thread(target=self._listen_to_ranks, args=(read_end,), name="weight-ranks", daemon=True).start()
        try:
            engine.follow_weights(
                Following(
                    str(run_dir.absolute()), name, agent, lead, timeout_s, credentials.timeout_s,
                    os.getpid(), write_end, dict(engine.weight_needs()), on_device,
                )
            )  # fmt: skip
        finally:
            os.close(write_end)  # the ranks have opened it, so the pipe ends with them

    def load(
        self,
        apply: Callable[[Mapping[str, Tensor]], None],
        *,
        newer_than: Version | None,
        wait_s: float = 0.0,
    ) -> Version | None:
        """Have the ranks hold the newest version that all of them have, and `apply`; see `WeightReceiver.load`.

        Args:
            apply: has the ranks load what they hold; its argument is empty.
            wait_s: how long to wait for the ranks to have the same version, and for a turn.
        """
        agreed = self._agree.wait(wait_s)
        return super().load(apply, newer_than=newer_than, wait_s=wait_s) if agreed else None

    def _listen_to_ranks(self, read_end: int) -> None:
        with open(read_end, "rb", buffering=0) as pipe:
            while len(said := pipe.read(_NEWS.size)) == _NEWS.size:
                rank, lineage, step, seconds, news = _NEWS.unpack(said)
                version = Version(lineage, step)
                if news == _COMING:
                    self._coming_to[rank] = version
                    if self._coming_to.count(version) == len(self._coming_to):
                        self._coming_to = [None] * len(self._coming_to)
                        self._let_ranks_receive(version)
                    continue
                self._newest_of[rank] = version
                if self._newest_of.count(version) < len(self._newest_of):
                    self._agree.clear()
                    self._cache.fail(self._make_lag_error())
                else:
                    self._cache.put(ReadyVersion(version, {}, own=False, release=lambda: None))
                    self._agree.set()
                name = _BROADCAST if news == _CAME_BY_BROADCAST else _AGENT
                self._timeline.record_span(name, seconds, version=step, rank=rank)
        self._cache.fail(EngineFailed("the engine's ranks have ended; the log above says why"))
        self._agree.set()  # let `load` continue: the engine then raises in `hold`

    def _let_ranks_receive(self, version: Version) -> None:
        try:
            with self._using_ranks, self._timeline.span("pause for weights", version=version.step):
                self._engine.receive_while_paused(version, timeout_s=_WAITS_PER_TRANSFER * self._timeout_s)
        except AsyncFlowError as error:
            # The engine's own thread will notice if it has ended; a version that did not come is taken from the agent.
            logger.warning("%s: weights of %s were not received in a pause: %s", self._name, version, error)

    def _make_lag_error(self) -> WeightSyncError:
        """Return the error for a wait that ends before all ranks have the same version."""
        have = ", ".join("none" if version is None else str(version) for version in self._newest_of)
        return WeightSyncError(f"the engine's ranks have {have}; see their log")

    def _take_offered(self, connection: Connection, offered: Offered) -> bool:
        """Check that the engine fits the trainer; the ranks take the version themselves."""
        self._views.layout(offered.plan, connection)
        self._tell_agent(ReleaseVersion(offered.version), connection)
        return True

    def _load_newest(self, apply: Callable[[Mapping[str, Tensor]], None], newer_than: Version | None) -> Version | None:
        ready = self._cache.hold(lambda version: newer_than is None or version > newer_than)
        if ready is None:
            return None
        with self._using_ranks:
            held = self._engine.hold(ready.version)
            if held:
                apply(ready.views)
        if not held:  # a rank moved on, or made room for one that is coming
            self._agree.clear()
            if self._cache.newest != ready.version:  # meanwhile they agreed on another version
                self._agree.set()
            return None
        self._cache.let_go(ready)
        return ready.version


class _LastSpan(threading.local):
    """What a thread did last, and for how long."""

    name, seconds = "", 0.0

    @contextmanager
    def span(self, name: str, **attributes: int | float | str) -> Iterator[None]:
        began = time.monotonic()
        yield
        self.name, self.seconds = name, time.monotonic() - began

    def record_span(self, name: str, seconds: float, **attributes: int | float | str) -> None:
        self.name, self.seconds = name, seconds


class _Pause:
    """An engine that is paused so that its receiver may take part in a broadcast."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._coming: Version | None = None
        self._granted: Version | None = None
        self._closed = False

    def expect(self, version: Version) -> None:
        """In the receiver's thread, before anyone can ask for the pause: this version waits; `end` must follow."""
        with self._changed:
            self._coming = version

    def await_pause(self, version: Version, *, timeout_s: float) -> bool:
        """In the receiver's thread: wait until the engine is paused for this version."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._granted == version, timeout_s)
            return not self._closed and self._granted == version

    def end(self) -> None:
        """In the receiver's thread: it takes part no more."""
        with self._changed:
            self._coming = None
            self._changed.notify_all()

    def grant(self, version: Version) -> None:
        """In the engine's thread: return once the receiver takes part no more; at once if it does not wait for this."""
        with self._changed:
            if self._coming != version:
                return
            self._granted = version
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._closed or self._coming != version)
            self._granted = None

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()


class RankReceiver(WeightReceiver):
    """In a rank's process. One thread of the engine holds and loads. If the engine has several ranks, versions are
    broadcast only during `receive_while_paused`.

    Args:
        following: from the engine's user.
        rank, num_ranks: of the processes that share the model.
        device: that this process computes on.

    Raises:
        WeightSyncError: the engine's user is gone.
    """

    def __init__(self, following: Following, rank: int, num_ranks: int, device: torch.device) -> None:
        self._rank, self._last = rank, _LastSpan()
        self._names = [f"{following.name}-{each}" for each in range(num_ranks)]
        self._pause = _Pause()
        self._owners = owners(following.needs, num_ranks)
        self._num_ranks = num_ranks
        self._held: ReadyVersion | None = None
        try:
            self._pipe = FileIO(f"/proc/{following.pid}/fd/{following.fd}", "wb")
        except OSError as error:
            raise WeightSyncError(f"{following.name}: its pipe cannot be opened ({error.strerror})") from error
        job, name = Job.load(Path(following.run_dir)), self._names[rank]
        timeout = timedelta(seconds=min(following.start_timeout_s, STALL_S))
        store = connect_store(job.store_host, job.store_port, timeout)
        credentials = Credentials(store, bytes.fromhex(job.secret), following.start_timeout_s)
        member = None
        if following.lead:
            member = BroadcastMember(credentials.group_store(min(following.timeout_s, STALL_S)), name, device)
        super().__init__(
            credentials, following.agent, name, following.needs,
            device=device,
            share=None if following.on_device else [each for each, owner in self._owners.items() if owner == rank],
            on_device=following.on_device,
            arrived=self._report_newest, member=member, together=self._names, lead=following.lead,
            timeout_s=following.timeout_s, timeline=self._last,
        )  # fmt: skip

    def hold(self, version: Version) -> bool:
        """Pin a version until `let_go` or the next pin; False: a newer one replaced it."""
        self._held = self._cache.hold(lambda newest: newest == version)
        return self._held is not None

    def held(self, share: Share) -> Iterator[tuple[str, Tensor]]:
        """Yield names and tensors of the held version, on the rank's device; collective over the ranks."""
        assert self._held is not None, "held() before hold()"
        if self._held.on_devices is not None:
            with self._held.on_devices.opened(share if self._num_ranks > 1 else None) as tensors:
                yield from tensors.items()
            return
        views = self._held.views
        # All ranks copy their own tensors at the same time, ahead of their turns to share them.
        own = copied_ahead([view for name, view in views.items() if self._owners[name] == self._rank], self._device)
        with contextlib.closing(own):
            for name, view in views.items():
                owner = self._owners[name]
                values = next(own) if owner == self._rank else torch.empty_like(view, device=self._device)
                share(values, owner)
                yield name, values

    def let_go(self) -> None:
        if self._held is not None:
            self._cache.let_go(self._held)
            self._held = None

    def receive_while_paused(self, version: Version) -> None:
        """Have a broadcast that waits for this received, or end; the engine's thread computes nothing meanwhile."""
        wait_for_device(self._device)  # the engine's last collectives have ended, not only been issued
        self._pause.grant(version)

    def close(self, timeout_s: float = 10.0) -> None:
        self._pause.close()
        super().close(timeout_s)
        self._pipe.close()

    def _make_reader(self, name: str, device: torch.device) -> DeviceReader:
        return DeviceReader(name, device, timeline=self._timeline, rank=self._rank, num_ranks=self._num_ranks)

    def _receive_broadcast(self, connection: Connection, member: BroadcastMember, transfer: Transfer) -> bool:
        if len(self._names) == 1:
            return super()._receive_broadcast(connection, member, transfer)
        self._pause.expect(transfer.version)
        try:
            self._pipe.write(_NEWS.pack(self._rank, *transfer.version, 0.0, _COMING))
            if self._pause.await_pause(transfer.version, timeout_s=self._timeout_s):
                return super()._receive_broadcast(connection, member, transfer)
        finally:
            self._pause.end()
        member.decline_transfer(transfer)
        self._watch_again()  # the agent may have offered this version already
        return False

    def _report_newest(self) -> None:
        newest, last = self.newest, self._last
        if newest is not None:  # None: it already made room for the next one
            news = _CAME_BY_BROADCAST if last.name == _BROADCAST else _CAME
            self._pipe.write(_NEWS.pack(self._rank, *newest, last.seconds, news))


def owners(needs: Mapping[str, Need], num_ranks: int) -> dict[str, int]:
    """Return which rank keeps each tensor, so that all keep about the same number of elements."""
    loads, owner_of = [0] * num_ranks, {}
    # Largest first, each to the least loaded rank.
    for name in sorted(needs, key=lambda each: -prod(needs[each].shape)):
        owner_of[name] = loads.index(min(loads))
        loads[owner_of[name]] += prod(needs[name].shape)
    return owner_of
