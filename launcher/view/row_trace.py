"""`asyncflow trace RUN ROW`: everything that a run wrote down about one row. Torch-free.

    samples/rollout-*.jsonl    who drew it, with which weights, and what it says     kept rows only
    trace/leases-*.jsonl       who got it of the queue, and when                     kept rows only
    trace/trained-*.jsonl      the trainer's log-probabilities of its tokens         kept rows only
    ledger.jsonl               the step that trained it, or what replaced its group  every row

Where each row's lines are stands in `trace/index.sqlite`, which this command brings up to date first: it reads what was
added to the files since, in transactions of a few megabytes, so a build that is killed resumes where it was. The run
itself never reads or writes it. A file that was cut or replaced is read anew, and so is everything if the index is
damaged.
"""

import contextlib
import os
import sqlite3
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import xxhash

from asyncflow.decoding import UNREADABLE, json_decoder, json_object
from asyncflow.errors import AsyncFlowError, ConfigError
from asyncflow.run_files import LEDGER_FILE, SAMPLES, TRACE
from launcher.process.progress import plain
from launcher.report.report import KeptRow, reward_text
from launcher.run.rundir import is_inside
from launcher.run.several_runs import check_runs

Fields = dict[str, Any]

INDEX_FILE = "index.sqlite"
_FORMAT = 1
_CHUNK_BYTES = 8 * 2**20
_TAIL_BYTES = 256
_LOCK_S = 30.0
_SCHEMA = """
CREATE TABLE files (id INTEGER PRIMARY KEY, name TEXT UNIQUE, inode INTEGER, read INTEGER, tail TEXT);
CREATE TABLE rows (row INTEGER, file INTEGER, place INTEGER, PRIMARY KEY (row, file, place)) WITHOUT ROWID;
CREATE TABLE groups (number INTEGER, file INTEGER, place INTEGER, PRIMARY KEY (number, file, place)) WITHOUT ROWID;
"""


class _Line(msgspec.Struct):
    """The fields of a line that the index needs, whichever file the line is of."""

    index: int | None = None
    indices: list[int] = []
    rows: list[int] = []
    group: int | None = None
    replaced_by: int | None = None

    def names(self, row: int) -> bool:
        return row == self.index or row in self.indices or row in self.rows


class _Lease(msgspec.Struct):
    task: str
    token: int
    time_s: float
    lineage: int = 0
    to: str = ""
    ended: str = ""


class _Computed(msgspec.Struct):
    step: int
    lineage: int
    log_probs: list[float | None]


class _Trained(msgspec.Struct):
    step: int
    lineage: int
    time_s: float
    group: int
    versions: tuple[int, int]
    admitted_step: int
    epoch: int
    staleness: float


class _Replaced(msgspec.Struct):
    step: int
    group: int
    replaced_by: int
    task: str = ""


_decode = json_decoder(_Line).decode


class RowIndex:
    """Where each row's lines are; a context manager. Another process may use the same index at the same time."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._path = run_dir / TRACE / INDEX_FILE
        self._database = self._open()

    def __enter__(self) -> "RowIndex":
        return self

    def __exit__(self, *_: object) -> None:
        self._database.close()

    def update(self) -> None:
        """Take in what was added to the run's files since the last call."""
        try:
            self._update()
        except sqlite3.OperationalError:  # such as a full disk or a lock, which says nothing about the index
            raise
        except sqlite3.DatabaseError:
            self._begin_anew()
            self._update()

    def find_lines(self, row: int) -> list[tuple[str, Fields]]:
        """Return (file, line) of every line that names a row, or that says what replaced its group."""
        try:
            return self._find_lines(row)
        except (_Stale, sqlite3.DatabaseError):
            self._begin_anew()
            self._update()
            return self._find_lines(row)

    def _find_lines(self, row: int) -> list[tuple[str, Fields]]:
        found = list(self._lines_of("rows", "row", row))
        if any(not _decode(line).names(row) for _, line in found):
            raise _Stale
        read = [(name, json_object(line)) for name, line in found]
        groups = {line["group"] for _, line in read if isinstance(line.get("group"), int)}
        for group in sorted(groups):
            read += [(name, json_object(line)) for name, line in self._lines_of("groups", "number", group)]
        return read

    def _lines_of(self, table: str, column: str, number: int) -> Iterator[tuple[str, bytes]]:
        places = self._database.execute(
            f"SELECT name, place FROM {table} JOIN files ON files.id = file WHERE {column} = ? ORDER BY name, place",
            (number,),
        ).fetchall()
        for name, place in places:
            if not is_inside(self._run_dir / name, self._run_dir):  # an index of somebody else's making
                raise _Stale
            try:
                with (self._run_dir / name).open("rb") as file:
                    file.seek(place)
                    line = file.readline()
                _decode(line)
            except (OSError, *UNREADABLE, msgspec.ValidationError) as error:
                raise _Stale from error
            yield name, line

    def _open(self) -> sqlite3.Connection:
        try:
            self._path.parent.mkdir(exist_ok=True)
            if is_inside(self._path.parent, self._run_dir) and not self._path.is_symlink():
                return self._connect(self._path)
        except sqlite3.DatabaseError:
            with contextlib.suppress(OSError):
                self._path.unlink(missing_ok=True)
            with contextlib.suppress(sqlite3.DatabaseError):
                return self._connect(self._path)
        except OSError:
            pass
        return self._connect(":memory:")  # somebody else's run: all files are read, and nothing is left behind

    @staticmethod
    def _connect(path: Path | str) -> sqlite3.Connection:
        database = sqlite3.connect(path, timeout=_LOCK_S, isolation_level=None)
        try:
            # A killed process loses nothing by this, and what a power failure damages is built anew.
            database.execute("PRAGMA synchronous = OFF")
            with _transaction(database):  # also finds out whether it may be written
                (there,) = database.execute("PRAGMA user_version").fetchone()
                if there != _FORMAT:
                    for (table,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall():
                        database.execute(f'DROP TABLE "{table}"')
                    for statement in filter(str.strip, _SCHEMA.split(";")):
                        database.execute(statement)
                    database.execute(f"PRAGMA user_version = {_FORMAT}")
        except sqlite3.DatabaseError:
            database.close()
            raise
        return database

    def _begin_anew(self) -> None:
        self._database.close()
        with contextlib.suppress(OSError):
            self._path.unlink(missing_ok=True)
        self._database = self._open()

    def _update(self) -> None:
        names = [LEDGER_FILE]
        for folder, pattern in ((SAMPLES, "rollout-*.jsonl"), (TRACE, "leases-*.jsonl"), (TRACE, "trained-*.jsonl")):
            names += [f"{folder}/{path.name}" for path in sorted((self._run_dir / folder).glob(pattern))]
        for name in names:
            while is_inside(self._run_dir / name, self._run_dir) and self._read_some(name):
                pass

    def _read_some(self, name: str) -> bool:
        """Take in the next lines of a file; returns whether there may be more."""
        try:
            with (self._run_dir / name).open("rb") as file:
                facts = os.fstat(file.fileno())
                known = self._database.execute("SELECT inode, read, tail FROM files WHERE name = ?", (name,)).fetchone()
                if known is not None and known[:2] == (facts.st_ino, facts.st_size):
                    file.seek(max(0, known[1] - _TAIL_BYTES))
                    if _tail(file.read(min(known[1], _TAIL_BYTES))) == known[2]:
                        return False
                with _transaction(self._database):
                    number, start = self._place_in(name, file, facts)
                    file.seek(start)
                    data = file.read(_CHUNK_BYTES)
                    while data and b"\n" not in data and (more := file.read(_CHUNK_BYTES)):
                        data += more
                    data = data[: data.rfind(b"\n") + 1]
                    self._add_lines(number, start, data)
                    end = start + len(data)
                    file.seek(max(0, end - _TAIL_BYTES))
                    tail = _tail(file.read(min(end, _TAIL_BYTES)))
                    self._database.execute("UPDATE files SET read = ?, tail = ? WHERE id = ?", (end, tail, number))
                    return bool(data)
        except OSError:
            return False  # it is missing, or was just removed

    def _place_in(self, name: str, file: Any, facts: os.stat_result) -> tuple[int, int]:
        """Return the file's number and where to read on; a file that was cut or replaced is forgotten."""
        known = self._database.execute("SELECT id, inode, read, tail FROM files WHERE name = ?", (name,)).fetchone()
        if known is not None:
            number, inode, read, tail = known
            file.seek(max(0, read - _TAIL_BYTES))
            if inode == facts.st_ino and read <= facts.st_size and _tail(file.read(min(read, _TAIL_BYTES))) == tail:
                return int(number), int(read)
            for table in ("rows", "groups"):
                self._database.execute(f"DELETE FROM {table} WHERE file = ?", (number,))
            self._database.execute("DELETE FROM files WHERE id = ?", (number,))
        added = self._database.execute(
            "INSERT INTO files (name, inode, read, tail) VALUES (?, ?, 0, ?)", (name, facts.st_ino, _tail(b""))
        )
        return int(added.lastrowid or 0), 0

    def _add_lines(self, number: int, start: int, data: bytes) -> None:
        rows: list[tuple[int, int, int]] = []
        groups: list[tuple[int, int, int]] = []
        place = start
        for line in data.splitlines(keepends=True):
            try:
                one = _decode(line)
            except (*UNREADABLE, msgspec.ValidationError):
                one = _Line()  # a crash may have torn it
            named = one.indices or one.rows or ([] if one.index is None else [one.index])
            rows += [(row, number, place) for row in named]
            if one.replaced_by is not None and one.group is not None:
                groups.append((one.group, number, place))
            place += len(line)
        self._database.executemany("INSERT OR IGNORE INTO rows VALUES (?, ?, ?)", rows)
        self._database.executemany("INSERT OR IGNORE INTO groups VALUES (?, ?, ?)", groups)


class _Stale(Exception):
    """The index names a place where the line is another one."""


@contextlib.contextmanager
def _transaction(database: sqlite3.Connection) -> Iterator[None]:
    database.execute("BEGIN IMMEDIATE")
    try:
        yield
    except BaseException:
        with contextlib.suppress(sqlite3.DatabaseError):
            database.execute("ROLLBACK")
        raise
    database.execute("COMMIT")


def _tail(data: bytes) -> str:
    return str(xxhash.xxh3_64_hexdigest(data))


@dataclass(frozen=True)
class RowTrace:
    """What a run wrote down about a row.

    Attributes:
        samples: of each time that it was drawn; a resumed run draws some again. Each has its instance as `worker`.
        leases: in order of time; a resumed run counts its time anew, in a later lineage.
        computed: the trainer's log-probabilities, of each time that it was trained.
        trained, replaced: the lines of the ledger.
        damaged: how many lines that name the row are none of these.
    """

    row: int
    samples: Sequence[Fields] = ()
    leases: Sequence[Fields] = ()
    computed: Sequence[Fields] = ()
    trained: Sequence[Fields] = field(default=())
    replaced: Sequence[Fields] = ()
    damaged: int = 0

    @staticmethod
    def read(run_dir: Path, row: int) -> "RowTrace":
        """Raises ConfigError: no run, or the run wrote nothing about the row; AsyncFlowError: its index cannot be used,
        e.g. since the disk is full."""
        check_runs([run_dir])
        try:
            with RowIndex(run_dir) as index:
                index.update()
                return RowTrace.from_lines(run_dir, row, index.find_lines(row))
        except sqlite3.Error as error:
            raise AsyncFlowError(f"{run_dir / TRACE / INDEX_FILE}: {error}; make room, or try again later") from error

    @staticmethod
    def from_lines(run_dir: Path, row: int, lines: Sequence[tuple[str, Fields]]) -> "RowTrace":
        if not lines:
            raise ConfigError(
                f"ROW: {run_dir} wrote nothing about row {row}; a row is in its ledger once it is trained, and "
                f"elsewhere if its group is kept (rollout.samples_per_step)"
            )
        found: dict[type, list[Fields]] = {kind: [] for kind in (KeptRow, _Lease, _Computed, _Trained, _Replaced)}
        damaged = 0
        for name, line in lines:
            kind = _kind_of(name, line)
            try:
                msgspec.convert(line, kind)
                found[kind].append({**line, "worker": Path(name).stem} if kind is KeptRow else line)
            except msgspec.ValidationError:
                damaged += 1
        leases = sorted(found[_Lease], key=_when)
        return RowTrace(row, found[KeptRow], leases, found[_Computed], found[_Trained], found[_Replaced], damaged)

    def as_dict(self) -> Fields:
        return {name: value if isinstance(value, int) else list(value) for name, value in vars(self).items()}

    def gaps(self) -> list[float | None]:
        """Return `log_prob_gaps` of the sample that was trained; []: it is not known, e.g. since there are several."""
        if not self.trained or len(self.samples) != 1 or not self.computed:
            return []
        last = self.trained[-1]
        mine = [line for line in self.computed if (line["lineage"], line["step"]) == (last["lineage"], last["step"])]
        if not mine:
            return []
        return log_prob_gaps(self.samples[0].get("log_probs") or (), mine[-1]["log_probs"])

    def moments(self, lineage: int) -> list[tuple[float, str, str]]:
        """Return (time_s, what happened, the timeline's process) of a lineage, in order: leases, drawing, training."""
        leases = [line for line in self.leases if _when(line)[0] == lineage]
        holders = {(line["task"], line["token"]): _process(line["to"]) for line in leases if "to" in line}
        found = [(line["time_s"], _lease_text(line), holders.get((line["task"], line["token"]), "")) for line in leases]
        drawn = [line for line in self.samples if line.get("lineage") == lineage]
        found += [(line["time_s"], f"drawn and scored by {line['worker']}", f"{line['worker']}-0") for line in drawn]
        taken = [line for line in self.trained if line["lineage"] == lineage]
        found += [(line["time_s"], f"trained in step {line['step']}", "actor-0") for line in taken]
        return sorted(found)

    def as_text(self) -> str:
        """Return lines of at most 80 columns, but for texts of the row."""
        lines = [f"row {self.row}"]
        for line in self.trained:
            first, last = line["versions"]
            versions = f"version {first}" if first == last else f"versions {first} to {last}"
            lines += [
                f"  trained in step {line['step']} (lineage {line['lineage']}) at {line['time_s']:.1f} s, "
                f"group {line['group']}",
                f"    admitted for step {line['admitted_step']}, epoch {line['epoch']}, drawn by {versions}, "
                f"staleness {line['staleness']}",
            ]
        for line in self.replaced:
            why = "filtered out" if "filtered" in line else f"given up in {line['task'] or 'some task'}"
            lines.append(
                f"  its group {line['group']} was {why} by step {line['step']}; group {line['replaced_by']} took its "
                f"place"
            )
        for sample in self.samples:
            lines += _sample_lines(sample)
        if len(self.samples) > 1:
            lines.append("  it was drawn more than once, and which one was trained is not known")
        lines += self._gap_lines()
        if self.leases:
            lines.append("  leases")
            lines += _lease_lines(self.leases)
        if self.damaged:
            lines.append(f"  {self.damaged} lines that name it are damaged, and left out")
        if not self.samples:
            lines.append("  its group is not among those kept (rollout.samples_per_step): the ledger is all there is")
        return plain("\n".join(lines))

    def _gap_lines(self) -> list[str]:
        gaps = {place: gap for place, gap in enumerate(self.gaps()) if gap is not None}
        if not gaps:
            return []
        worst = max(gaps, key=lambda place: abs(gaps[place]))
        mean = sum(map(abs, gaps.values())) / len(gaps)
        tokens = self.samples[0].get("tokens") or ()
        said = f" ({plain(tokens[worst])!r:.40})" if worst < len(tokens) else ""
        return [
            f"  log-probabilities, engine minus trainer, of {len(gaps)} tokens: mean |gap| {mean:.4f},",
            f"    largest {gaps[worst]:+.4f} at token {worst}{said}",
        ]


def _kind_of(name: str, line: Fields) -> type:
    """Return what a line of a file is; `name`: the file's, in the run's directory."""
    if name == LEDGER_FILE:
        return _Replaced if "replaced_by" in line else _Trained
    if name.startswith(f"{SAMPLES}/"):
        return KeptRow
    return _Lease if Path(name).stem.startswith("leases-") else _Computed


def log_prob_gaps(drawn: Sequence[Any], computed: Sequence[Any]) -> list[float | None]:
    """Return the generating engine's log-probability minus the trainer's, token by token (nats); None: one has none."""
    pairs = zip(drawn, computed, strict=False)
    return [a - b if isinstance(a, float) and isinstance(b, float) else None for a, b in pairs]


def _sample_lines(sample: Fields) -> list[str]:
    reward = reward_text(sample)
    cut = ", truncated" if sample.get("truncated") else ""
    lines = [
        f"  drawn by {sample['worker']} for step {sample['step']}: {sample.get('response_tokens', '?')} tokens, "
        f"{reward}{cut}"
    ]
    if "time_s" in sample:
        lines.append(f"    drawn and scored at {sample['time_s']:.3f} s (lineage {sample['lineage']})")
    begin = 0
    for version, count in sample.get("versions") or ():
        lines.append(f"    tokens {begin} to {begin + count - 1}: version {version}")
        begin += count
    for name in ("prompt", "response", "ground_truth"):
        text = " ".join(str(sample.get(name) or "").split())
        lines.append(f"    {name.replace('_', ' ')}: {text if len(text) <= 200 else f'{text[:197]}...'}")
    return lines


def _when(line: Fields) -> tuple[int, float]:
    return line.get("lineage", 0), line["time_s"]  # earlier versions wrote no lineage, and of samples no time


def _lease_text(lease: Fields) -> str:
    done = f"{lease['ended']} by its consumer" if "ended" in lease else f"leased to {lease['to']}"
    return plain(f"{lease['task']}: {done}")


def _process(consumer: str) -> str:
    """Return the process that has a lease, e.g. `rollout-1-0` of `rollout-1/0@0.e7cdb4ea`."""
    return consumer.partition("@")[0].replace("/", "-")


def _lease_lines(leases: Sequence[Fields]) -> list[str]:
    lines = []
    tokens: dict[str, int] = {}
    lineage = _when(leases[0])[0]
    for lease in leases:
        task, token = lease["task"], lease["token"]
        if _when(lease)[0] != lineage:
            lineage, tokens = _when(lease)[0], {}
            lines.append(f"    lineage {lineage}: the run was resumed, or went back")
        if "ended" in lease:
            what = f"{lease['ended']} by its consumer"
        else:
            again = "" if tokens.get(task, token) == token else ", again: the one before ended without a result"
            tokens[task] = token
            what = f"to {lease['to']}{again}"
        lines.append(f"    {lease['time_s']:9.3f} s  {task}  {what}")
    return lines
