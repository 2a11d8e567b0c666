"""What of a controller outlives its process: a few facts in the job store. Everything else is rebuilt from the units.

    tq/LINEAGE/NAME/incarnation     how often it was started
    tq/LINEAGE/NAME/mark            newest version, sizes of partitions, admission's mark; no refills
    tq/LINEAGE/NAME/refills/K       groups that replace others, part K of them in order
    tq/LINEAGE/NAME/lost/K          rows that went with their unit, and who was done with them, part K of `LostNumbers`
    tq/LINEAGE/NAME/finished/P/K    rows of partition P that all tasks are done with, part K of `RowSet.parts`
    tq/LINEAGE/NAME/removed/P/K     rows that left it with groups in quarantine and have no replacement, in like parts
    tq/LINEAGE/NAME/owner/OWNER     a consumer that joined and was not given up
    tq/LINEAGE/NAME/unit/UNIT       a unit that registered

What grows with a run is stored in parts, since the store refuses values beyond 8 MiB, and a part that did not change is
not written again. A queue that begins anew (the next lineage) reads nothing of the one before. What was not written by
this job ends the controller: it cannot do without these facts, nor guess them.
Called by the controller's shell. One owner per service name; thread-safe.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
import torch.distributed as dist

from asyncflow.decoding import msgpack_decoder
from asyncflow.errors import TransportError
from asyncflow.transport.handshake import Credentials
from tq.control.admission import AdmissionMark
from tq.control.row_set import RowSet, Span
from tq.messages import RowRecords
from tq.refill import Refill

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
        return int(self._call("add", f"{self._base}/incarnation", 1))

    def load(self) -> Mark:
        """Return the facts that were saved last; those of a new queue when there are none."""
        key = f"{self._base}/mark"
        if not self._call("check", [key]):
            return Mark()
        mark = msgpack_decoder(Mark).decode(self._call("get", key))
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
        self._call("put", f"{self._base}/mark", msgspec.msgpack.encode(mark))

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
            self._call("put", key, msgspec.msgpack.encode(records))
        else:
            self._call("delete_key", key)

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
        self._call("put", f"{self._base}/{kind}/{name}", "1")

    def remove(self, kind: str, name: str) -> None:
        """Note that it is gone for good."""
        self._call("delete_key", f"{self._base}/{kind}/{name}")

    def names(self, kind: str) -> list[str]:
        """Return the owners or units that were there when the last incarnation ended."""
        return list(self._parts(kind))

    def _parts(self, kind: str) -> dict[str, bytes]:
        parts: dict[str, bytes] = self._call("read_below", f"{self._base}/{kind}/")
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
            self._call("put", key, msgspec.msgpack.encode(rows.spans()))
        else:
            self._call("delete_key", key)

    def _save_refills(self, refills: Sequence[Refill]) -> None:
        """Write those that are new, with the others of their part."""
        if len(refills) == self._num_refills:
            return
        for first in range(self._num_refills // _REFILLS * _REFILLS, len(refills), _REFILLS):
            part = msgspec.msgpack.encode(refills[first : first + _REFILLS])
            self._call("put", f"{self._base}/refills/{first // _REFILLS}", part)
        self._num_refills = len(refills)

    def _call(self, method: str, *arguments: Any) -> Any:
        try:
            with self._credentials.borrowed_store() as store:
                return getattr(store, method)(*arguments)
        except dist.DistError as error:
            raise TransportError("the job store is gone, so the launcher is") from error
