"""What of a controller outlives its process: a few facts in the job store. The rest is rebuilt from the units.

    tq/LINEAGE/NAME/incarnation     how often it was started
    tq/LINEAGE/NAME/mark            newest version, sizes of partitions, admission's mark; no refills
    tq/LINEAGE/NAME/refills/K       groups that replace others, part K of them in order
    tq/LINEAGE/NAME/lost/K          rows lost with their unit, and who was done with them, part K of `Losses`
    tq/LINEAGE/NAME/finished/P/K    rows of partition P that all tasks are done with, part K of `RowSet.split_parts`
    tq/LINEAGE/NAME/removed/P/K     rows that left it with dead-letter groups and have no replacement, in the same parts
    tq/LINEAGE/NAME/owner/OWNER     a consumer that joined and was not given up
    tq/LINEAGE/NAME/unit/UNIT       a unit that registered

A fact is durable before it is acted on or told. What grows with a run is stored in parts, since the store refuses
values beyond 8 MiB, and an unchanged part is not written again. A queue that begins anew (the next lineage) reads
nothing of the one before. Facts not written by this job end the controller: it can neither do without them nor guess
them. `DurableMark` reads and writes; `Memory` knows what was saved last.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from asyncflow.decoding import msgpack_decoder
from asyncflow.errors import LeaseFenced, PeerRefused, TransportError
from asyncflow.process import ServiceThreads
from asyncflow.transport.frame import Limits
from asyncflow.transport.meeting import Credentials
from tq.control.events import (
    Event,
    Fenced,
    ForwardAck,
    OrderFenceRows,
    OrderFenceTask,
    OrderRemoveRows,
    RecalledFinished,
    RecalledLosses,
    RecalledRemoved,
)
from tq.control.row_table import RowSet, Span
from tq.messages import (
    UNIT_REPLIES,
    CloseWriting,
    FenceRows,
    FenceTask,
    Message,
    OpenPartition,
    PublishVersion,
    PutOutputs,
    RemoveRows,
    RowRecords,
    Stop,
)
from tq.refill import AdmissionMark, Refill
from tq.service_channels import ServiceChannels, await_reply

Finished = dict[int, RowSet]  # partition -> rows that all tasks are done with
RowKind = Literal["finished", "removed"]

KEPT_PARTITIONS = 256  # only this many of the newest partitions are remembered
_REFILLS = 256  # refills per part


class Mark(msgspec.Struct):
    """The facts in one value."""

    newest_version: int = 0
    partitions: dict[int, int] = {}  # number -> rows as declared, for the newest partitions
    stopped: bool = False
    writing_closed: bool = False
    admission: AdmissionMark | None = None  # where admission stands; None without admission


class DurableMark:
    """Reads and writes the facts of one controller. A save returns once the store has it."""

    def __init__(self, credentials: Credentials, service: str, *, lineage: int = 0) -> None:
        self._credentials = credentials
        self._base = f"tq/{lineage}/{service}"
        self._num_refills = 0

    def start(self) -> int:
        """Count this start; returns 1 for the first."""
        return int(self._credentials.call_store("add", f"{self._base}/incarnation", 1))

    def load_mark(self) -> Mark:
        """Return the facts that were saved last, or those of a new queue."""
        key = f"{self._base}/mark"
        if not self._credentials.call_store("check", [key]):
            return Mark()
        mark = msgpack_decoder(Mark).decode(self._credentials.call_store("get", key))
        if mark.admission is not None:
            for _, data in sorted(self._read_parts("refills").items(), key=lambda part: int(part[0])):
                mark.admission.refills += msgpack_decoder(list[Refill]).decode(data)
            self._num_refills = len(mark.admission.refills)
        return mark

    def save_mark(self, mark: Mark) -> None:
        for partition in sorted(mark.partitions)[:-KEPT_PARTITIONS]:
            del mark.partitions[partition]
        admission = mark.admission
        # The list of refills only grows, so it is saved in parts.
        if admission is not None:
            self._save_refills(admission.refills)
            mark = msgspec.structs.replace(mark, admission=msgspec.structs.replace(admission, refills=[]))
        self._credentials.call_store("put", f"{self._base}/mark", msgspec.msgpack.encode(mark))

    def load_lost(self) -> list[RowRecords]:
        records: list[RowRecords] = []
        for data in self._read_parts("lost").values():
            records += msgpack_decoder(list[RowRecords]).decode(data)
        return records

    def save_lost(self, part: int, records: list[RowRecords]) -> None:
        key = f"{self._base}/lost/{part}"
        if records:
            self._credentials.call_store("put", key, msgspec.msgpack.encode(records))
        else:
            self._credentials.call_store("delete_key", key)

    def load_rows(self, kind: RowKind) -> dict[int, RowSet]:
        """Return partition -> its rows of a kind."""
        rows: dict[int, RowSet] = {}
        for name, data in self._read_parts(kind).items():
            spans = msgpack_decoder(list[Span]).decode(data)
            rows.setdefault(int(name.partition("/")[0]), RowSet()).merge_rows(RowSet.of_spans(spans))
        return rows

    def save_rows(self, kind: RowKind, partition: int, part: int, rows: RowSet) -> None:
        """Save one part of a partition's rows; forget it if it is empty."""
        key = f"{self._base}/{kind}/{partition}/{part}"
        if rows:
            self._credentials.call_store("put", key, msgspec.msgpack.encode(rows.list_spans()))
        else:
            self._credentials.call_store("delete_key", key)

    def add_peer(self, kind: str, name: str) -> None:
        """Note that the owner or unit `name` is there."""
        self._credentials.call_store("put", f"{self._base}/{kind}/{name}", "1")

    def remove(self, kind: str, name: str) -> None:
        """Note that the owner or unit is gone for good."""
        self._credentials.call_store("delete_key", f"{self._base}/{kind}/{name}")

    def list_peers(self, kind: str) -> list[str]:
        """Return the owners or units that were there when the last incarnation ended."""
        return list(self._read_parts(kind))

    def _read_parts(self, kind: str) -> dict[str, bytes]:
        parts: dict[str, bytes] = self._credentials.call_store("read_below", f"{self._base}/{kind}/")
        return parts

    def _save_refills(self, refills: Sequence[Refill]) -> None:
        """Write the new refills, with the others of their part."""
        if len(refills) == self._num_refills:
            return
        for first in range(self._num_refills // _REFILLS * _REFILLS, len(refills), _REFILLS):
            part = msgspec.msgpack.encode(refills[first : first + _REFILLS])
            self._credentials.call_store("put", f"{self._base}/refills/{first // _REFILLS}", part)
        self._num_refills = len(refills)


class Memory:
    """The facts of one controller, as they were saved last. `version`: a lower bound of the newest weights."""

    def __init__(self, durable: DurableMark, *, version: int) -> None:
        self._durable = durable
        self._lock = threading.Lock()
        self.saving_losses = threading.Lock()  # held while losses are being written and are not durable yet
        # Each lock is taken before the facts are read, so that the latest facts are saved last.
        self._saving_finished, self._saving_removed = threading.Lock(), threading.Lock()
        self._mark = durable.load_mark()
        self._finished = {partition: rows.split_parts() for partition, rows in durable.load_rows("finished").items()}
        self._removed = {partition: rows.split_parts() for partition, rows in durable.load_rows("removed").items()}
        # (Partition, part) of finished rows that are not saved yet; a failed save leaves them here.
        self._unsaved: set[tuple[int, int]] = set()
        self._mark.newest_version = max(version, self._mark.newest_version)

    @property
    def newest_version(self) -> int:
        return self._mark.newest_version

    @property
    def admission(self) -> AdmissionMark | None:
        return self._mark.admission

    def replay_events(self) -> Iterator[Event]:
        """Return what a new control state must be told."""
        for partition, parts in self._removed.items():
            for rows in parts.values():
                yield RecalledRemoved(partition, rows)
        for partition, num_rows in self._mark.partitions.items():
            yield OpenPartition(partition, num_rows)
        for partition, parts in self._finished.items():
            for rows in parts.values():
                yield RecalledFinished(partition, rows)
        if lost := self._durable.load_lost():
            yield RecalledLosses(tuple(lost))
        if self._mark.writing_closed:
            yield CloseWriting()
        if self._mark.stopped:
            yield Stop()

    def remember_event(self, event: OpenPartition | PublishVersion | Stop | CloseWriting) -> None:
        with self._lock:
            match event:
                case OpenPartition():
                    self._mark.partitions[event.partition] = event.num_rows
                case PublishVersion():
                    self._mark.newest_version = max(self._mark.newest_version, event.step)
                case Stop():
                    self._mark.stopped = True
                case CloseWriting():
                    self._mark.writing_closed = True
            self._durable.save_mark(self._mark)

    def remember_admission(self, mark: AdmissionMark) -> None:
        with self._lock:
            self._mark.admission = mark
            self._durable.save_mark(self._mark)

    def remember_finished(self, newly: Callable[[], Finished]) -> None:
        """Save the rows that `newly` takes: those finished since its last call.

        Units may then forget them: a restarted controller neither waits for them nor takes them as new.
        """
        with self._saving_finished:
            self._save_finished(newly())

    def clear(self, partition: int) -> None:
        """A partition was cleared: it begins anew."""
        with self._saving_finished:
            self._forget_finished(partition)
        with self._lock:
            if self._mark.partitions.pop(partition, None) is not None:
                self._durable.save_mark(self._mark)

    def remember_losses(self, state: Callable[[], tuple[Finished, dict[int, list[RowRecords]]] | None]) -> None:
        """Write that rows were lost, or that tasks are done with some of them, before any process is told.

        `state` takes the newly finished rows and the changed parts of the losses at one moment, since no unit knows a
        lost row that gets finished; None: another call has saved them.
        """
        with self.saving_losses, self._saving_finished:
            facts = state()
            if facts is not None:
                self._save_finished(facts[0])
                for part, records in facts[1].items():
                    self._durable.save_lost(part, records)

    def remember_removed(self, partition: int, state: Callable[[int], RowSet]) -> None:
        """Save the rows that a partition lacks now, none once it was cleared."""
        with self._saving_removed:
            # Ask only now: another thread may have saved later facts than those that caused this call.
            self._save_removed(partition, state(partition).split_parts())
            for old in sorted(self._removed)[:-KEPT_PARTITIONS]:
                self._save_removed(old, {})

    def _save_removed(self, partition: int, now: dict[int, RowSet]) -> None:
        before = self._removed.pop(partition, {})
        if now:
            self._removed[partition] = now
        for part in now.keys() | before.keys():
            rows = now.get(part, RowSet())
            if rows != before.get(part, RowSet()):
                self._durable.save_rows("removed", partition, part, rows)

    def _save_finished(self, newly: Finished) -> None:
        for partition, rows in newly.items():
            parts = self._finished.setdefault(partition, {})
            for part, grown in rows.split_parts().items():
                parts.setdefault(part, RowSet()).merge_rows(grown)
                self._unsaved.add((partition, part))
        for partition in sorted(self._finished)[:-KEPT_PARTITIONS]:
            self._forget_finished(partition)
        for partition, part in sorted(self._unsaved):
            self._durable.save_rows("finished", partition, part, self._finished[partition][part])
            self._unsaved.discard((partition, part))

    def _forget_finished(self, partition: int) -> None:
        parts = self._finished.pop(partition, {})
        self._unsaved.difference_update([(partition, part) for part in parts])
        for part in parts:
            self._durable.save_rows("finished", partition, part, RowSet())


# What a controller has to tell the units: fences, dead letters, and acks that it took in their place.
#
# Each unit has its own thread (`UnitBacklog`), so that no unit waits for another one that is stopped, no life of a
# unit waits for an earlier one (a thread may wait long for an end that died while it was connecting), and no handler
# waits for any. One more thread reports the fences, each for one unit.
#
#     add --> told --> done, forgotten
#         '-> refused: the unit cannot confirm yet --> told again
#         '-> the unit cannot be reached --> done, owed --(the next `add`, or `catch_up`)--> told --> forgotten
#
# A unit that is down gets what it missed when it registers again, before its rows are handed out: only the handler of
# a registration waits for a unit, the one that registers. A unit may hear a message twice; that changes nothing.

logger = logging.getLogger(__name__)

_RETRY_S = 0.5


@dataclass(eq=False)
class _Entry:
    message: Message
    was_done: "Future[None]" = field(default_factory=Future)
    is_settled: bool = False


class UnitBacklog:
    """What one unit has yet to confirm. Owned by a `UnitOrders`.

    `tell` tells the unit something and waits until the unit confirms; it raises TransportError.
    """

    def __init__(self, unit: str, tell: Callable[[str, Message], None], threads: ServiceThreads) -> None:
        self._unit = unit
        self._tell = tell
        self._threads = threads
        self._changed = threading.Condition()
        self._entries: dict[_Entry, None] = {}
        self._fresh = False
        self._again = False
        self._closed = False
        self._start_thread()

    def add_message(self, message: Message) -> "Future[None]":
        """Queue a message. The future completes when the unit has confirmed, or is away and is owed the message."""
        entry = _Entry(message)
        with self._changed:
            self._entries[entry] = None
            self._fresh = True
            self._changed.notify()
        return entry.was_done

    def catch_up(self) -> None:
        """Tell everything now, in the caller's thread; raises TransportError, and still owes the rest."""
        # The backlog's own thread may still wait for an earlier life of the unit.
        for entry in self._list_entries():
            self._tell_once(entry)
        with self._changed:
            self._fresh = True  # the earlier thread may just have taken a new entry
            self._start_thread()
            self._changed.notify_all()

    @property
    def owes(self) -> bool:
        """Whether the unit has not confirmed everything."""
        with self._changed:
            return bool(self._entries)

    def stop(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def join(self, timeout_s: float) -> None:
        self._thread.join(timeout_s)

    def _start_thread(self) -> None:
        """Start a new thread; an earlier one ends as soon as it can."""
        with self._changed:  # the new thread compares itself with what is stored here
            self._thread = self._threads.start(self._tell_entries, name=f"orders-{self._unit}")

    @property
    def _over(self) -> bool:
        return self._closed or self._thread is not threading.current_thread()

    def _tell_entries(self) -> None:
        while True:
            with self._changed:
                if self._again:
                    self._changed.wait(_RETRY_S)
                while not self._over and not self._fresh and not self._again:
                    self._changed.wait()
                if self._over:
                    return
                self._fresh = self._again = False
            self._tell_all()

    def _tell_all(self) -> None:
        reachable = True
        for entry in self._list_entries():
            try:
                if reachable:
                    self._tell_once(entry)
            except (PeerRefused, LeaseFenced) as error:  # the unit is up, but cannot confirm yet
                logger.warning("%s is told %s again: %s", self._unit, type(entry.message).__name__, error)
                self._again = True
                continue
            except TransportError as error:
                if self._over:  # the thread of the unit's new life tells the rest
                    return
                logger.warning("%s is still owed %s: %s", self._unit, type(entry.message).__name__, error)
                reachable = False
            self._mark_done(entry)

    def _list_entries(self) -> list[_Entry]:
        with self._changed:
            return list(self._entries)

    def _tell_once(self, entry: _Entry) -> None:
        with self._changed:
            if entry not in self._entries:
                return  # the other thread was faster
        self._tell(self._unit, entry.message)
        with self._changed:
            self._entries.pop(entry, None)
        self._mark_done(entry)

    def _mark_done(self, entry: _Entry) -> None:
        with self._changed:
            before, entry.is_settled = entry.is_settled, True
        if not before:
            entry.was_done.set_result(None)


_CLOSE_TIMEOUT_S = 5.0

Order = ForwardAck | OrderFenceRows | OrderFenceTask | OrderRemoveRows


class UnitOrders:
    """Carries orders to the units and reports fences that hold.

    `fenced` is called from a thread when a fence holds at its unit, or when the unit is away and is owed it. `threads`
    are the controller's, which must fail with ours: otherwise rows of void leases would never come back.
    """

    def __init__(
        self,
        credentials: Credentials,
        name: str,
        *,
        timeout_s: float,
        fenced: Callable[[Fenced], None],
        threads: ServiceThreads,
    ) -> None:
        self._links = ServiceChannels(credentials, name, Limits(), lambda *_: None)
        self._timeout_s = timeout_s
        self._fenced = fenced
        self._threads = threads
        self._lock = threading.Lock()
        self._backlogs: dict[str, UnitBacklog] = {}
        self._closed = False
        self._holding: queue.SimpleQueue[Fenced | None] = queue.SimpleQueue()
        self._thread = threads.start(self._report_fences, name="unit-orders")

    def add_order(self, order: Order) -> None:
        """Carry out an order soon: at each unit, after the orders that were added before."""
        with self._lock:
            if self._closed:
                return
            was_done = [self._get_backlog(unit).add_message(message) for unit, message in _messages(order)]
        if isinstance(order, OrderFenceRows | OrderFenceTask):
            fenced = Fenced(order.task, order.token)
            was_done[0].add_done_callback(lambda _: self._holding.put(fenced))

    def catch_up(self, unit: str) -> None:
        """Tell a registering unit what it missed; raises TransportError when it does not answer."""
        with self._lock:
            backlog = self._backlogs.get(unit)
        if backlog is not None:
            self._links.give_up_waiting(unit)
            # A unit that restarted empty has no use for this, which does no harm.
            backlog.catch_up()

    def owes_unit(self, unit: str) -> bool:
        with self._lock:
            backlog = self._backlogs.get(unit)
        return backlog is not None and backlog.owes

    def close(self) -> None:
        with self._lock:
            self._closed = True
            backlogs = list(self._backlogs.values())
        for backlog in backlogs:
            backlog.stop()
        self._holding.put(None)
        self._links.close()
        deadline = time.monotonic() + _CLOSE_TIMEOUT_S
        for backlog in backlogs:
            backlog.join(max(0.0, deadline - time.monotonic()))
        self._thread.join(timeout=max(0.0, deadline - time.monotonic()))

    def _get_backlog(self, unit: str) -> UnitBacklog:
        if unit not in self._backlogs:
            self._backlogs[unit] = UnitBacklog(unit, self._tell_unit, self._threads)
        return self._backlogs[unit]

    def _report_fences(self) -> None:
        while (fenced := self._holding.get()) is not None:
            self._fenced(fenced)

    def _tell_unit(self, unit: str, message: Message) -> None:
        connection = self._links.get(unit, UNIT_REPLIES)
        try:
            await_reply(connection.submit(message), unit, type(message).__name__, self._timeout_s)
        except (PeerRefused, LeaseFenced) as error:
            if not isinstance(message, PutOutputs):
                raise
            # The ack counts here; the unit lost the rows again, or keeps it until every controller has heard of it.
            logger.info("%s: an ack of rows that were lost: %s", unit, error)


def _messages(order: Order) -> list[tuple[str, Message]]:
    match order:
        case ForwardAck(task, token):
            return [(unit, PutOutputs(task, token, list(rows), [])) for unit, rows in order.rows.items()]
        case OrderFenceRows():
            return [(order.unit, FenceRows(order.task, order.token, list(order.rows)))]
        case OrderFenceTask():
            return [(order.unit, FenceTask(order.task, order.token, list(order.alive)))]
        case OrderRemoveRows():
            return [(unit, RemoveRows(list(rows), order.cause)) for unit, rows in order.rows.items()]
