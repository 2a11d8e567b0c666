"""What a unit told the controllers, in memory that outlives it: its next life says which rows were lost with it.

Controllers know the rows of a unit, and the unit knows them; when all of these processes die at once, nobody does. So
a unit appends every change of its rows to memory of the process that starts it, before it tells any process.

    starter   JournalMemory   two memfds per unit, offered in the job store; nothing to remove after a kill
    unit      RowJournal      appends; a new life reads what the earlier ones left, and begins another file
              Life            replays: rows, who is done with them, what was finished (pure)

    file      token, serial, then frames: size, checksum, message. The file with the higher serial counts: a rewrite
              fills the other one, and its serial is written last. A frame that was torn by a kill ends the file: its
              put was not confirmed.

An append is a copy within this process, without a system call. A commit is noted once all controllers know it, before
its holder hears that it counts: a holder that did not hear acknowledges again, and must find its lease. The file is
rewritten from the unit's state when it has grown by as much as the state takes, so it is never much larger than the
inventory that a controller gets.
"""

import logging
import mmap
import os
import secrets
import struct
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

import msgspec

from asyncflow.decoding import UNREADABLE, msgpack_decoder
from asyncflow.errors import TransportError
from asyncflow.sealed_store import SealedStore
from asyncflow.transport.meeting import Credentials
from tq.messages import (
    OutputsWritten,
    RegisterUnit,
    RemovalReason,
    RowRecords,
    RowsConfirmed,
    RowsCreated,
    RowsRemoved,
)
from tq.refill import RemovalCause
from tq.unit.unit_state import PARTITIONS_REMEMBERED

logger = logging.getLogger(__name__)

Change = RowsCreated | RowsConfirmed | OutputsWritten | RowsRemoved  # what changes the rows of a unit

_NAME = "asyncflow-rows"
_TOKEN_BYTES = 16
_SERIAL = struct.Struct("<Q")
_FRAME = struct.Struct("<II")
_BEGIN = _TOKEN_BYTES + _SERIAL.size
_LEAST_BYTES = 2**20  # a smaller file is not rewritten
_REWRITE_FACTOR = 4  # a file this many times as large as it should be is rewritten even while some commit is open


class _Offer(msgspec.Struct):
    pid: int
    fds: list[int]
    token: bytes


class _Began(msgspec.Struct, tag=True):
    """First frame of a file: what the unit held at that time."""

    lineage: int
    inventory: RegisterUnit


class JournalMemory:
    """The memory of one unit's journal, offered in the job store; a context manager.

    The process that restarts the unit owns it.
    """

    def __init__(self, store: SealedStore, unit: str) -> None:
        self._fds: list[int] = []
        token = secrets.token_bytes(_TOKEN_BYTES)
        try:
            for _ in range(2):
                self._fds.append(os.memfd_create(_NAME, os.MFD_CLOEXEC))
                os.pwrite(self._fds[-1], token, 0)
        except OSError:
            self.close()
            raise
        store.put(_key(unit), msgspec.msgpack.encode(_Offer(os.getpid(), self._fds, token)))

    def close(self) -> None:
        while self._fds:
            os.close(self._fds.pop())

    def __enter__(self) -> "JournalMemory":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class RowJournal:
    """The journal of one life of a unit, whose lock the caller holds. Reads at construction what earlier lives left.

    Where no process offered memory (a unit started neither by the queue's starter nor by its launcher), nothing is
    kept.

    Args:
        lineage: of the queue; nothing of an earlier lineage counts.
        inventory: returns what the unit holds now.
        failed: hears that no memory is left: the unit cannot continue.
    """

    def __init__(
        self,
        credentials: Credentials,
        unit: str,
        *,
        lineage: int,
        inventory: Callable[[], RegisterUnit],
        failed: Callable[[Exception], None],
    ) -> None:
        # What earlier lives held when they ended, the oldest first, except lives that all controllers know about.
        self.earlier: list[RegisterUnit] = []
        # Commits in the unit's state that not all controllers know: a rewrite would note them as known.
        self.open_commits = 0
        self._unit = unit
        self._lineage = lineage
        self._inventory = inventory
        self._failed = failed
        self._files = _open(credentials, unit)
        self._memory: mmap.mmap | None = None  # the file that counts
        self._end = self._limit = 0
        if self._files:
            self._read_file()

    def append(self, message: Change) -> None:
        """Note a change; it is kept when this returns. Raises TransportError when no memory is left."""
        if not self._files:
            return
        if self._end > self._limit and (
            not self.open_commits or self._end > _REWRITE_FACTOR * max(_LEAST_BYTES, self._limit)
        ):
            self._rewrite_file()  # the inventory contains the change already; noting it twice makes no difference
        if isinstance(message, RowsCreated | RowsConfirmed) and message.values:
            message = msgspec.structs.replace(message, values=b"")
        frame = _framed(message)
        end = self._end + len(frame)
        if self._memory is None or end > len(self._memory):
            self._map_file(end)
        assert self._memory is not None
        self._memory[self._end : end] = frame  # not a system call, which would hand the interpreter to another thread
        self._end = end

    def note_commits(self, commits: Mapping[str, Iterable[int]]) -> None:
        """Note that controllers know that tasks are done with rows."""
        if commits:
            self.append(confirmation(self._unit, commits))

    def forget_earlier(self) -> None:
        """All controllers know about the earlier lives, durably."""
        if self.earlier:
            self.earlier = []
            self.forget_finished()

    def forget_finished(self) -> None:
        """The unit has forgotten rows that it was done with: so does the journal, now or soon."""
        self._limit = 0
        if self._files and not self.open_commits:
            self._rewrite_file()

    def _rewrite_file(self) -> None:
        before, after = self._files
        serial = _serial(before) + 1
        self._cut_file(after)
        inventory = self._inventory()
        inventory.earlier = self.earlier
        frame = _framed(_Began(self._lineage, inventory))
        self._files = [after, before]
        self._end = _BEGIN + len(frame)
        self._limit = max(_LEAST_BYTES, 2 * self._end)
        memory = self._map_file(self._limit)
        memory[_BEGIN : self._end] = frame
        memory[_TOKEN_BYTES:_BEGIN] = _SERIAL.pack(serial)  # last: from now on this file counts
        self._cut_file(before)

    def close(self) -> None:
        self._memory = None
        files, self._files = self._files, []
        for fd in files:
            os.close(fd)

    def _read_file(self) -> None:
        life = Life()
        for message in _messages(self._files[0]):
            if isinstance(message, _Began):
                if message.lineage != self._lineage:
                    break
                self.earlier = message.inventory.earlier
                life = Life(message.inventory)
            else:
                life.apply_change(message)
        if not life.empty:
            self.earlier = [*self.earlier, life.inventory()]
        if self.earlier:
            rows = sum(len(record.rows) for one in self.earlier for record in one.records)
            logger.warning("%s: an earlier life ended with %d rows", self._unit, rows)
        self._rewrite_file()

    def _map_file(self, least_bytes: int) -> mmap.mmap:
        """Make room in the file that counts; untouched pages take no memory."""
        size = max(2 * least_bytes, _LEAST_BYTES)
        try:
            os.ftruncate(self._files[0], size)
            self._memory = mmap.mmap(self._files[0], size)
        except OSError as error:
            self._failed(error)
            raise TransportError(f"{self._unit}: its journal of rows cannot grow ({error.strerror})") from error
        return self._memory

    @staticmethod
    def _cut_file(fd: int) -> None:
        # Serial first: a file that a kill leaves half cut must not count.
        os.pwrite(fd, _SERIAL.pack(0), _TOKEN_BYTES)
        os.ftruncate(fd, _BEGIN)


def confirmation(unit: str, commits: Mapping[str, Iterable[int]]) -> RowsConfirmed:
    """Return the message that tasks are done with rows of a unit; `commits`: task -> rows."""
    rows = sorted({number for numbers in commits.values() for number in numbers})
    place = {number: k for k, number in enumerate(rows)}
    return RowsConfirmed(unit, rows, {task: [place[number] for number in numbers] for task, numbers in commits.items()})


@dataclass(slots=True, eq=False)
class _Row:
    """`known`: it was confirmed, or some task worked on it: a process may believe that it is in the queue."""

    partition: int
    group: int
    group_size: int
    tokens: int
    num_bytes: int
    columns: set[str]
    done: set[str] = field(default_factory=set)
    known: bool = False


class Life:
    """One life of a unit, replayed from what it told. Messages that the inventory covers change nothing. Pure."""

    def __init__(self, began: RegisterUnit | None = None) -> None:
        self.incarnation = "" if began is None else began.incarnation
        self._unit = "" if began is None else began.unit
        self._rows: dict[int, _Row] = {}
        self._finished: dict[int, set[int]] = {}
        self._removed: dict[int, dict[int, RemovalCause]] = {}
        if began is not None:
            self._load_inventory(began)

    @property
    def empty(self) -> bool:
        """Whether it has nothing to tell."""
        rows = any(row.known for row in self._rows.values())
        return not (rows or any(self._finished.values()) or any(self._removed.values()))

    def apply_change(self, message: Change) -> None:
        match message:
            case RowsCreated():
                self._create_rows(message)
            case RowsConfirmed():
                for number in message.rows:
                    if number in self._rows:
                        self._rows[number].known = True
                for task, positions in message.commits.items():
                    for row in [self._rows.get(message.rows[k]) for k in positions]:
                        if row is not None:
                            row.done.add(task)
            case OutputsWritten():
                self._write_outputs(message)
            case RowsRemoved():
                self._remove_rows(message)

    def inventory(self) -> RegisterUnit:
        """Return what it held at its end, except rows that no process can know of."""
        records: dict[tuple[int, frozenset[str], frozenset[str]], RowRecords] = {}
        for number, row in self._rows.items():
            if not row.known:
                continue
            key = row.partition, frozenset(row.columns), frozenset(row.done)
            if key not in records:
                records[key] = RowRecords(row.partition, [], [], [], [], [], sorted(row.columns), sorted(row.done))
            records[key].append(
                number, group=row.group, group_size=row.group_size, tokens=row.tokens, num_bytes=row.num_bytes
            )
        finished = {number: sorted(self._finished[number]) for number in _newest(self._finished)}
        removed: dict[tuple[int, RemovalCause], list[int]] = {}
        for partition in _newest(self._removed):
            for number, cause in self._removed[partition].items():
                removed.setdefault((partition, cause), []).append(number)
        groups = [
            RowsRemoved(self._unit, partition, rows, RemovalReason.GROUP_LEFT, cause)
            for (partition, cause), rows in removed.items()
        ]
        return RegisterUnit(self._unit, self.incarnation, list(records.values()), finished, groups)

    def _load_inventory(self, began: RegisterUnit) -> None:
        for record in began.records:
            for k, number in enumerate(record.rows):
                self._rows[number] = _Row(
                    record.partition, record.groups[k], record.group_sizes[k], record.tokens[k], record.num_bytes[k],
                    set(record.columns), set(record.done), not record.announced,
                )  # fmt: skip
        self._finished = {partition: set(rows) for partition, rows in began.finished.items()}
        for gone in began.removed_groups:
            self._removed.setdefault(gone.partition, {}).update(dict.fromkeys(gone.rows, gone.cause))

    def _create_rows(self, message: RowsCreated) -> None:
        sizes = Counter(message.groups)
        size, rest = divmod(message.num_bytes, max(1, len(message.rows)))
        removed = self._removed.get(message.partition, {})
        for k, number in enumerate(message.rows):
            removed.pop(number, None)  # its group is tried again
            group = message.groups[k]
            self._rows[number] = _Row(
                message.partition, group, message.group_size or sizes[group], message.tokens[k], size + (k < rest),
                set(message.columns),
            )  # fmt: skip
        for task, positions in message.commits.items():
            for k in positions:
                self._rows[message.rows[k]].done.add(task)

    def _write_outputs(self, message: OutputsWritten) -> None:
        grown = message.num_bytes // max(1, len(message.rows))
        for k, number in enumerate(message.rows):
            row = self._rows.get(number)
            if row is not None and message.task not in row.done:
                row.done.add(message.task)
                row.columns.update(message.columns)
                row.tokens += message.tokens[k] if message.tokens else 0
                row.num_bytes += grown
                row.known = True

    def _remove_rows(self, message: RowsRemoved) -> None:
        for number in message.rows:
            self._rows.pop(number, None)
        if message.reason is RemovalReason.GROUP_LEFT:
            self._removed.setdefault(message.partition, {}).update(dict.fromkeys(message.rows, message.cause))
        elif message.reason is RemovalReason.CLEARED:
            self._finished.pop(message.partition, None)
            self._removed.pop(message.partition, None)
            for number in [number for number, row in self._rows.items() if row.partition == message.partition]:
                del self._rows[number]  # the unit named none of these: all tasks were done with them


def _framed(message: Change | _Began) -> bytes:
    body = msgspec.msgpack.encode(message)
    return _FRAME.pack(len(body), zlib.crc32(body)) + body


def _newest(partitions: Iterable[int]) -> Sequence[int]:
    return sorted(partitions)[-PARTITIONS_REMEMBERED:]


def _key(unit: str) -> str:
    return f"tq/journal/{unit}"


def _open(credentials: Credentials, unit: str) -> list[int]:
    """Return our own descriptors of the offered memory, first the file that counts; [] where none was offered."""
    key = _key(unit)
    if not credentials.call_store("check", [key]):
        return []
    offer = msgpack_decoder(_Offer).decode(credentials.call_store("get", key))
    fds: list[int] = []
    try:
        for fd in offer.fds:
            path = f"/proc/{int(offer.pid)}/fd/{int(fd)}"
            # Check the identity: the process id and the descriptor may have been reused.
            if not str(Path(path).readlink()).startswith(f"/memfd:{_NAME}"):
                raise TransportError(f"{path} is not the memory of a row journal")
            fds.append(os.open(path, os.O_RDWR | os.O_CLOEXEC))
            if os.pread(fds[-1], _TOKEN_BYTES, 0) != offer.token:
                raise TransportError(f"{path} belongs to another unit")
    except (OSError, TransportError) as error:
        for fd in fds:
            os.close(fd)
        logger.error(
            "%s: no row journal: rows will be forgotten if it dies together with all controllers (%s)", unit, error
        )
        return []
    return sorted(fds, key=_serial, reverse=True)


def _serial(fd: int) -> int:
    data = os.pread(fd, _SERIAL.size, _TOKEN_BYTES)
    return int(_SERIAL.unpack(data)[0]) if len(data) == _SERIAL.size else 0


def _messages(fd: int) -> Iterable[Change | _Began]:
    """Yield what a file holds, up to the first torn frame; nothing where it was never begun."""
    if not _serial(fd):
        return
    data = memoryview(os.pread(fd, os.fstat(fd).st_size, 0))
    decoder, at = msgpack_decoder(RowsCreated | RowsConfirmed | OutputsWritten | RowsRemoved | _Began), _BEGIN
    while at + _FRAME.size <= len(data):
        size, checksum = _FRAME.unpack_from(data, at)
        body = data[at + _FRAME.size : at + _FRAME.size + size]
        if not size or len(body) < size or zlib.crc32(body) != checksum:
            return
        try:
            yield decoder.decode(body)
        except UNREADABLE:
            return
        at += _FRAME.size + size
