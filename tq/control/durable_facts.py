"""What of a controller outlives its process: a few facts in the job store. Everything else is rebuilt from the units.

    tq/LINEAGE/NAME/incarnation     how often it was started
    tq/LINEAGE/NAME/mark            newest version, sizes of partitions, admission's mark; no refills
    tq/LINEAGE/NAME/refills/K       groups that replace others, part K of them in order
    tq/LINEAGE/NAME/lost/K          rows that went with their unit, and who was done with them, part K of `Losses`
    tq/LINEAGE/NAME/finished/P/K    rows of partition P that all tasks are done with, part K of `RowSet.parts`
    tq/LINEAGE/NAME/removed/P/K     rows that left it with dead-letter groups and have no replacement, in like parts
    tq/LINEAGE/NAME/owner/OWNER     a consumer that joined and was not given up
    tq/LINEAGE/NAME/unit/UNIT       a unit that registered

A fact is durable before it is acted on or told. What grows with a run is stored in parts, since the store refuses
values beyond 8 MiB, and a part that did not change is not written again. A queue that begins anew (the next lineage)
reads nothing of the one before. What was not written by this job ends the controller: it cannot do without these facts,
nor guess them. `DurableMark` reads and writes; `Memory` knows what was saved last.
"""

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence

import msgspec

from asyncflow.decoding import msgpack_decoder
from asyncflow.transport.meeting import Credentials
from tq.control.events import Event, RowsFinished, RowsLacking, RowsLost
from tq.control.row_set import RowSet, Span
from tq.messages import CloseWriting, OpenPartition, PublishVersion, RowRecords, Stop
from tq.refill import AdmissionMark, Refill

Finished = dict[int, RowSet]
"""Partition -> rows that all tasks are done with."""

KEPT_PARTITIONS = 256
"""The newest ones are remembered."""
_REFILLS = 256
"""In one part."""


class Mark(msgspec.Struct):
    """The facts.

    Attributes:
        newest_version: newest published weights.
        partitions: number -> rows as declared, the newest ones.
        stopped: the queue was stopped.
        writing_closed: the queue was closed for writing.
        admission: where admission stands; None without it.
    """

    newest_version: int = 0
    partitions: dict[int, int] = {}
    stopped: bool = False
    writing_closed: bool = False
    admission: AdmissionMark | None = None


class DurableMark:
    """Reads and writes the facts of one controller."""

    def __init__(self, credentials: Credentials, service: str, *, lineage: int = 0) -> None:
        self._credentials = credentials
        self._base = f"tq/{lineage}/{service}"
        self._num_refills = 0

    def start(self) -> int:
        """Count this start; returns 1 for the first."""
        return int(self._credentials.call_store("add", f"{self._base}/incarnation", 1))

    def load(self) -> Mark:
        """Return the facts that were saved last; those of a new queue when there are none."""
        key = f"{self._base}/mark"
        if not self._credentials.call_store("check", [key]):
            return Mark()
        mark = msgpack_decoder(Mark).decode(self._credentials.call_store("get", key))
        if mark.admission is not None:
            for _, data in sorted(self._parts("refills").items(), key=lambda part: int(part[0])):
                mark.admission.refills += msgpack_decoder(list[Refill]).decode(data)
            self._num_refills = len(mark.admission.refills)
        return mark

    def save(self, mark: Mark) -> None:
        """Write the facts; returns when the store has them. Admission's refills only ever get more."""
        for partition in sorted(mark.partitions)[:-KEPT_PARTITIONS]:
            del mark.partitions[partition]
        admission = mark.admission
        if admission is not None:
            self._save_refills(admission.refills)
            mark = msgspec.structs.replace(mark, admission=msgspec.structs.replace(admission, refills=[]))
        self._credentials.call_store("put", f"{self._base}/mark", msgspec.msgpack.encode(mark))

    def load_lost(self) -> list[RowRecords]:
        """Return the lost rows that were saved."""
        records: list[RowRecords] = []
        for data in self._parts("lost").values():
            records += msgpack_decoder(list[RowRecords]).decode(data)
        return records

    def save_lost(self, part: int, records: list[RowRecords]) -> None:
        """Write which rows of a part are lost now; returns when the store has them."""
        key = f"{self._base}/lost/{part}"
        if records:
            self._credentials.call_store("put", key, msgspec.msgpack.encode(records))
        else:
            self._credentials.call_store("delete_key", key)

    def load_finished(self) -> Finished:
        """Return the finished rows that were saved."""
        return self._load_rows("finished")

    def save_finished(self, partition: int, part: int, rows: RowSet) -> None:
        """Write one part of the finished rows of a partition; returns when the store has it."""
        self._save_rows("finished", partition, part, rows)

    def forget_finished(self, partition: int, parts: Iterable[int]) -> None:
        """Remove these parts of the finished rows of a partition."""
        for part in parts:
            self._save_rows("finished", partition, part, RowSet())

    def load_removed(self) -> dict[int, RowSet]:
        """Return partition -> the rows that it lacks, as they were saved."""
        return self._load_rows("removed")

    def save_removed(self, partition: int, part: int, rows: RowSet) -> None:
        """Write one part of the rows that a partition lacks now; returns when the store has it."""
        self._save_rows("removed", partition, part, rows)

    def add(self, kind: str, name: str) -> None:
        """Note that the owner or unit `name` is there."""
        self._credentials.call_store("put", f"{self._base}/{kind}/{name}", "1")

    def remove(self, kind: str, name: str) -> None:
        """Note that it is gone for good."""
        self._credentials.call_store("delete_key", f"{self._base}/{kind}/{name}")

    def names(self, kind: str) -> list[str]:
        """Return the owners or units that were there when the last incarnation ended."""
        return list(self._parts(kind))

    def _parts(self, kind: str) -> dict[str, bytes]:
        parts: dict[str, bytes] = self._credentials.call_store("read_below", f"{self._base}/{kind}/")
        return parts

    def _load_rows(self, kind: str) -> dict[int, RowSet]:
        rows: dict[int, RowSet] = {}
        for name, data in self._parts(kind).items():
            spans = msgpack_decoder(list[Span]).decode(data)
            rows.setdefault(int(name.partition("/")[0]), RowSet()).merge(RowSet.of_spans(spans))
        return rows

    def _save_rows(self, kind: str, partition: int, part: int, rows: RowSet) -> None:
        key = f"{self._base}/{kind}/{partition}/{part}"
        if rows:
            self._credentials.call_store("put", key, msgspec.msgpack.encode(rows.spans()))
        else:
            self._credentials.call_store("delete_key", key)

    def _save_refills(self, refills: Sequence[Refill]) -> None:
        """Write those that are new, with the others of their part."""
        if len(refills) == self._num_refills:
            return
        for first in range(self._num_refills // _REFILLS * _REFILLS, len(refills), _REFILLS):
            part = msgspec.msgpack.encode(refills[first : first + _REFILLS])
            self._credentials.call_store("put", f"{self._base}/refills/{first // _REFILLS}", part)
        self._num_refills = len(refills)


class Memory:
    """The facts of one controller, as they were saved last."""

    def __init__(self, durable: DurableMark, *, version: int) -> None:
        """Recall.

        Args:
            durable: reads and writes.
            version: step of the weights at the start, at least.
        """
        self._durable = durable
        self._lock = threading.Lock()
        self.saving_losses = threading.Lock()
        """Held while losses are being written and are not durable yet."""
        self._saving_finished, self._saving_removed = threading.Lock(), threading.Lock()
        """Taken, as that one is, before the facts are asked for, so that those of the latest moment are saved last."""
        self._mark = durable.load()
        self._finished = {partition: rows.parts() for partition, rows in durable.load_finished().items()}
        self._removed = {partition: rows.parts() for partition, rows in durable.load_removed().items()}
        self._unsaved: set[tuple[int, int]] = set()
        """(partition, part) of finished rows still to be saved; a failed save leaves them here."""
        self._mark.newest_version = max(version, self._mark.newest_version)

    @property
    def newest_version(self) -> int:
        """Newest published weights."""
        return self._mark.newest_version

    @property
    def admission(self) -> AdmissionMark | None:
        """Where admission stood."""
        return self._mark.admission

    def events(self) -> Iterator[Event]:
        """Return what a new control state must be told."""
        for partition, parts in self._removed.items():
            for rows in parts.values():
                yield RowsLacking(partition, rows)
        for partition, num_rows in self._mark.partitions.items():
            yield OpenPartition(partition, num_rows)
        for partition, parts in self._finished.items():
            for rows in parts.values():
                yield RowsFinished(partition, rows)
        if lost := self._durable.load_lost():
            yield RowsLost(tuple(lost))
        if self._mark.writing_closed:
            yield CloseWriting()
        if self._mark.stopped:
            yield Stop()

    def remember(self, event: OpenPartition | PublishVersion | Stop | CloseWriting) -> None:
        """Make durable what the control state was told, or found out."""
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
            self._durable.save(self._mark)

    def remember_admission(self, mark: AdmissionMark) -> None:
        """Save admission's mark; returns when it is durable."""
        with self._lock:
            self._mark.admission = mark
            self._durable.save(self._mark)

    def remember_finished(self, newly: Callable[[], Finished]) -> None:
        """Save the rows finished since the last call, which units may forget: a restarted controller neither waits for
        them nor takes them as new.

        Args:
            newly: takes the rows that were finished since it was called last.
        """
        with self._saving_finished:
            self._save_finished(newly())

    def clear(self, partition: int) -> None:
        """A partition was cleared: it begins anew."""
        with self._saving_finished:
            self._forget_finished(partition)
        with self._lock:
            if self._mark.partitions.pop(partition, None) is not None:
                self._durable.save(self._mark)

    def remember_losses(self, state: Callable[[], tuple[Finished, dict[int, list[RowRecords]]] | None]) -> None:
        """Write that rows were lost, or that tasks are done with some of them, before any process is told.

        Args:
            state: takes what was finished lately, and the parts of the losses that changed, of one moment (a lost row
                that gets finished is known to no unit), or None when that has been saved since.
        """
        with self.saving_losses, self._saving_finished:
            facts = state()
            if facts is not None:
                self._save_finished(facts[0])
                for part, records in facts[1].items():
                    self._durable.save_lost(part, records)

    def remember_removed(self, partition: int, state: Callable[[int], RowSet]) -> None:
        """A partition lacks rows, or was cleared and has none that it lacks.

        Args:
            partition: which one.
            state: returns the rows that it lacks now; another thread may have saved later ones than caused this call.
        """
        with self._saving_removed:
            self._save_removed(partition, state(partition).parts())
            for old in sorted(self._removed)[:-KEPT_PARTITIONS]:
                self._save_removed(old, {})

    def _save_removed(self, partition: int, now: dict[int, RowSet]) -> None:
        before = self._removed.pop(partition, {})
        if now:
            self._removed[partition] = now
        for part in now.keys() | before.keys():
            rows = now.get(part, RowSet())
            if rows != before.get(part, RowSet()):
                self._durable.save_removed(partition, part, rows)

    def _save_finished(self, newly: Finished) -> None:
        for partition, rows in newly.items():
            parts = self._finished.setdefault(partition, {})
            for part, grown in rows.parts().items():
                parts.setdefault(part, RowSet()).merge(grown)
                self._unsaved.add((partition, part))
        for partition in sorted(self._finished)[:-KEPT_PARTITIONS]:
            self._forget_finished(partition)
        for partition, part in sorted(self._unsaved):
            self._durable.save_finished(partition, part, self._finished[partition][part])
            self._unsaved.discard((partition, part))

    def _forget_finished(self, partition: int) -> None:
        parts = self._finished.pop(partition, {})
        self._unsaved.difference_update([(partition, part) for part in parts])
        self._durable.forget_finished(partition, parts)
