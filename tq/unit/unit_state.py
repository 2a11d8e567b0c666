"""Rows of one storage unit: where their values are, which tasks committed. Pure; the caller holds the lock.

    absent --create--> here --every task committed--> freed        (a tombstone stays with the partition)
                        |            '--retain: kept until `release_checkpointed` covers it (unless it was finished when
                        |              it came: what tasks wrote went with another unit)
                        '--remove--> absent                        (cleared, removed, dropped, refused)

A commit is atomic for all rows of a put. A token is void for a row when the row was fenced above it, when the task was
(`fence_task`), or when another lease committed. Blocks are counted in full until their last row goes.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from asyncflow.errors import LeaseFenced, PeerRefused, RowsExist
from tq.messages import RegisterUnit, RemovalReason, RowRecords, RowsRemoved
from tq.refill import RemovalCause, first_token
from tq.unit.block import Block, BlockAccounting, Part, Place

# What a storage unit knows of a row, a commit and a partition. Plain data; `UnitState` keeps it.


@dataclass(frozen=True)
class StoredCommit:
    """One put of outputs (columns `names`), shared by all its rows. Tokens below 0 mark commits made elsewhere."""

    task: str
    token: int
    names: frozenset[str]


_NONE: Mapping[str, int] = MappingProxyType({})


def _none() -> Mapping[str, int]:
    """Most rows are never fenced, so they share one empty mapping."""
    return _NONE


KNOWN_ELSEWHERE = -1  # token of a commit that a controller reported
PUT_WITH_ROW = -2  # token of a commit that came with the row from a snapshot


@dataclass(slots=True, eq=False)
class StoredRow:
    """A row that is here; see also `messages.PutRows`."""

    partition: int
    group: int
    group_size: int
    # `tokens`, `num_bytes`: over all its columns.
    tokens: int = 0
    num_bytes: int = 0
    places: dict[str, Place] = field(default_factory=dict)
    commits: dict[str, StoredCommit] = field(default_factory=dict)
    fences: Mapping[str, int] = field(default_factory=_none)  # task -> lowest token that is not void
    returns: Mapping[str, int] = field(default_factory=_none)  # task -> how often a lease on it was released
    unconfirmed: bool = True  # the controllers have not confirmed yet that it exists
    retained: bool = False  # every task is done with it; it waits for a checkpoint

    def cut_row(self, number: int, forget: frozenset[str]) -> "CutRow":
        """Return the row as it is now, without what tasks of `forget` put."""
        gone = {name for task, commit in self.commits.items() if task in forget for name in commit.names}
        places = {name: place for name, place in self.places.items() if name not in gone}
        commits = tuple(sorted(self.commits.keys() - forget))
        return CutRow(number, self.partition, self.group, self.group_size, places, commits)

    def belongs_with(self, other: "StoredRow") -> bool:
        """Whether both rows belong to the same group, of the same size, in the same partition."""
        mine, theirs = ((row.partition, row.group, row.group_size) for row in (self, other))
        return mine == theirs


@dataclass
class Partition:
    """Rows of one partition that are here, that were finished here, and that were removed with their group."""

    rows: set[int] = field(default_factory=set)
    finished: set[int] = field(default_factory=set)
    removed: dict[int, RemovalCause] = field(default_factory=dict)

    @property
    def empty(self) -> bool:
        return not (self.rows or self.finished or self.removed)


@dataclass(frozen=True)
class CutRow:
    number: int
    partition: int
    group: int
    group_size: int
    places: Mapping[str, Place]
    commits: tuple[str, ...]


@dataclass(frozen=True)
class Cut:
    """What a unit held at one moment; its blocks are pinned until `BlockAccounting.unpin_blocks`."""

    rows: list[CutRow]
    blocks: list[Block]


@dataclass(frozen=True)
class Repeated:
    """A put whose rows are all here already: the same put again, or another one to refuse with `refusal`."""

    # (Earlier block, position there, position in the put); the blocks stay pinned until they are compared.
    pairs: list[tuple[Block, int, int]]
    refusal: PeerRefused

    @property
    def blocks(self) -> list[Block]:
        """The earlier blocks, each once."""
        return list({block: None for block, _, _ in self.pairs})


def parts_of(numbers: Sequence[int], rows: Sequence[StoredRow], name: str) -> list[Part]:
    """Return where a column of rows is, in order; neighbours in a block are one range. Raises PeerRefused."""
    try:
        places = [row.places[name] for row in rows]
    except KeyError:
        number = next(number for number, row in zip(numbers, rows, strict=True) if name not in row.places)
        raise PeerRefused(f"row {number}: column {name!r} is not written") from None
    parts: list[tuple[Block, list[int]]] = []
    last: Block | None = None
    for block, position in places:
        if block is not last:
            found: list[int] = []
            parts.append((block, found))
            last = block
        found.append(position)
    return [(block, _as_range(positions)) for block, positions in parts]


def _as_range(positions: list[int]) -> Sequence[int]:
    neighbours = range(positions[0], positions[0] + len(positions))
    return neighbours if positions == list(neighbours) else positions


def check_distinct(rows: Sequence[int]) -> None:
    if len(set(rows)) != len(rows):
        raise PeerRefused(f"a put names a row twice: {list(rows)}")


PARTITIONS_REMEMBERED = 64  # tombstones of older partitions are forgotten


class UnitState:
    """The rows, columns and fences of one storage unit.

    `retain` keeps finished rows until `release_checkpointed`. Tokens of lineages before `lineage` are void.
    """

    def __init__(self, *, retain: bool = False, lineage: int = 0) -> None:
        self._oldest_token = first_token(lineage)
        self.accounting = BlockAccounting()
        self.retained_rows = 0
        self._retain = retain
        self._tasks: frozenset[str] = frozenset()
        self._rows: dict[int, StoredRow] = {}
        self._finished: dict[int, tuple[StoredCommit, ...]] = {}
        self._dropped: set[int] = set()
        self._partitions: dict[int, Partition] = {}
        self._checkpointed_step = -1
        self._floors: dict[str, tuple[int, frozenset[int]]] = {}

    def __len__(self) -> int:
        return len(self._rows)

    def create_rows(
        self,
        rows: Sequence[int],
        block: Block | None,
        *,
        partition: int,
        groups: Sequence[int],
        group_size: int = 0,
        commits: Mapping[str, Sequence[int]] | None = None,
    ) -> Repeated | None:
        """Add rows with their first columns, unconfirmed until `confirm`; see `messages.PutRows`.

        Returns what the caller must compare if all rows are here already. Raises RowsExist if some are, or PeerRefused
        for a malformed put; nothing was added then.
        """
        check_distinct(rows)
        if not rows:
            raise PeerRefused("a put of new rows names no rows")
        if len(groups) != len(rows) or any(not 0 <= k < len(rows) for known in (commits or {}).values() for k in known):
            raise PeerRefused(f"a put of {len(rows)} rows names {len(groups)} groups, or commits beyond its rows")
        self._check_tasks(commits or {})
        sizes = Counter(groups)
        arrived = [StoredRow(partition, group, group_size or sizes[group]) for group in groups]
        there = [row for row in rows if row in self._rows or row in self._finished]
        if there:
            return self._created_before(rows, there, block, arrived)
        home = self._get_partition(partition)
        for number, row in zip(rows, arrived, strict=True):
            self._rows[number] = row
            home.rows.add(number)
            home.removed.pop(number, None)  # the group is tried again
        self._attach_block(rows, block)
        for task, positions in (commits or {}).items():
            came = StoredCommit(task, PUT_WITH_ROW, frozenset())
            for k in positions:
                arrived[k].commits[task] = came
        return None

    def confirm(self, rows: Sequence[int]) -> None:
        """The controllers know these rows now; free those that every task is done with."""
        for number in rows:
            if number in self._rows:
                self._rows[number].unconfirmed = False
        self._free_done_rows(rows)

    def commit_outputs(self, task: str, token: int, rows: Sequence[int], block: Block | None) -> Repeated | None:
        """Atomically store all output columns of a task for some rows of a lease.

        Returns what the caller must compare if every row was committed under this token before; otherwise None.

        Raises:
            LeaseFenced: a row's lease was given to another consumer, or the row is gone; nothing was stored.
            PeerRefused: no such task, a column exists already, or the put differs from an earlier one under this token;
                nothing was stored.
        """
        if (refusal := self.check_commit(task, token, rows, block)) is not None:
            return self._make_repeated(rows, block, refusal)
        commit = StoredCommit(task, token, frozenset() if block is None else block.names)
        for number in rows:
            self._rows[number].commits[task] = commit
        self._attach_block(rows, block)
        self._free_done_rows(rows)
        return None

    def check_commit(self, task: str, token: int, rows: Sequence[int], block: Block | None) -> PeerRefused | None:
        """Raise what `commit_outputs` would raise, without changing anything.

        Returns the refusal to raise should the values differ, if every row was committed under this token before.
        """
        check_distinct(rows)
        self._check_tasks([task])
        names = frozenset[str]() if block is None else block.names
        before = [commit for number in rows if (commit := self._check_row(number, task, token)) is not None]
        if before and len(before) == len(rows):
            refusal = PeerRefused(f"row {rows[0]}: {task} put something else under this lease before")
            if any(commit.names != names for commit in before):
                raise refusal
            return refusal
        for number in rows:
            clash = [] if number not in self._rows else sorted(self._rows[number].places.keys() & names)
            if clash or number not in self._rows or task in self._rows[number].commits:
                raise PeerRefused(f"row {number}: {task} put {' '.join(clash) or 'its outputs'} already")
        return None

    def learn_commits(self, commits: Mapping[str, Sequence[int]]) -> dict[str, list[int]]:
        """Take a controller's word that tasks are done with rows; returns what is new for confirmed rows."""
        new: dict[str, list[int]] = {}
        for task, rows in commits.items():
            commit = StoredCommit(task, KNOWN_ELSEWHERE, frozenset())
            for number in rows:
                row = self._rows.get(number)
                if row is not None and task not in row.commits:
                    row.commits[task] = commit
                    if not row.unconfirmed:
                        new.setdefault(task, []).append(number)
            self._free_done_rows(rows)
        return new

    def commits_of(self, rows: Sequence[int]) -> dict[str, list[int]]:
        """Return task -> positions in `rows` that the task is done with."""
        done: dict[str, list[int]] = {}
        for k, number in enumerate(rows):
            for task in self._rows[number].commits if number in self._rows else ():
                done.setdefault(task, []).append(k)
        return done

    def set_tasks(self, tasks: Iterable[str]) -> None:
        """Learn all tasks of the queue; free rows that these are done with."""
        if self._tasks != (tasks := frozenset(tasks)):
            self._tasks = tasks
            self._free_done_rows(list(self._rows))

    def fence_rows(self, task: str, token: int, rows: Sequence[int]) -> None:
        """Refuse commits of `rows` under tokens below `token` from now on; rows that are gone are skipped."""
        for number in rows:
            row = self._rows.get(number)
            if row is not None and token > row.fences.get(task, 0):
                row.fences = {**row.fences, task: token}
                # A fence of a row that the task is not done with ends a lease: the row comes back.
                if task not in row.commits:
                    row.returns = {**row.returns, task: row.returns.get(task, 0) + 1}

    def fence_task(self, task: str, token: int, alive: Iterable[int]) -> None:
        """Refuse all commits of a task under tokens below `token` that are not `alive`."""
        if token >= self._floors.get(task, (0, frozenset()))[0]:
            self._floors[task] = (token, frozenset(alive))

    def locate_columns(self, rows: Sequence[int], names: Sequence[str]) -> dict[str, list[Part]]:
        """Return where columns of rows are, as `parts_of` does. Pin the blocks to read them.

        Raises:
            LeaseFenced: a row is not here (any more).
            PeerRefused: a column is not written, or no row was named.
        """
        if not rows:
            raise PeerRefused("a read names no rows")
        stored = []
        for number in rows:
            row = self._rows.get(number)
            if row is None:
                raise LeaseFenced(f"row {number} is not here; it was freed, lost with its unit, or never put")
            stored.append(row)
        return {name: parts_of(rows, stored, name) for name in names}

    def remove(self, rows: Iterable[int]) -> dict[int, list[int]]:
        """Forget rows without a tombstone; unknown ones are skipped. Returns partition -> rows that were here."""
        removed: dict[int, list[int]] = {}
        for number in rows:
            row = self._rows.get(number)
            if row is not None:
                removed.setdefault(row.partition, []).append(number)
                self._detach_row(number, row)
        return removed

    def drop_elsewhere(self, rows: Iterable[int]) -> dict[int, list[int]]:
        """Forget rows that are elsewhere, as `remove` does, but remember those whose put is still under way."""
        here = [number for number in rows if number in self._rows]
        self._dropped.update(number for number in here if self._rows[number].unconfirmed)
        return self.remove(here)

    def take_dropped(self, rows: Iterable[int]) -> list[int]:
        """Return, once, the rows of a put that were dropped while it was under way."""
        dropped = [number for number in rows if number in self._dropped] if self._dropped else []
        self._dropped.difference_update(dropped)
        return dropped

    def remove_groups(self, rows: Iterable[int], cause: RemovalCause) -> dict[int, list[int]]:
        """Forget rows as `remove` does, but remember why, for controllers that ask later."""
        where = {number: self._rows[number].partition for number in rows if number in self._rows}
        for number, partition in where.items():
            self._partitions[partition].removed[number] = cause
        return self.remove(where)

    def removed_groups(self) -> dict[tuple[int, RemovalCause], list[int]]:
        """Return (partition, cause) -> rows that became a dead letter."""
        found: dict[tuple[int, RemovalCause], list[int]] = {}
        for partition, known in self._partitions.items():
            for number, cause in known.removed.items():
                found.setdefault((partition, cause), []).append(number)
        return found

    def clear(self, partition: int) -> list[int]:
        """Forget a partition's rows and tombstones; returns the rows that were here."""
        removed = sorted(self._partitions.get(partition, Partition()).rows)
        self.remove(removed)
        self._forget_finished(partition)
        return removed

    def release_checkpointed(self, step: int) -> None:
        """A checkpoint covers partitions up to `step`: free their retained rows and tombstones."""
        self._checkpointed_step = max(self._checkpointed_step, step)
        for number in [partition for partition in self._partitions if partition <= step]:
            known = self._partitions[number]
            self.remove([row for row in known.rows if self._rows[row].retained])
            if number in self._partitions:
                self._forget_finished(number)

    def cut_rows(self, *, after_partition: int, forget_acks_of: Iterable[str]) -> Cut:
        """Note the confirmed rows of later partitions, and pin their blocks.

        What tasks of `forget_acks_of` put is left out, as if they had never had the row.
        """
        forget = frozenset(forget_acks_of)
        there = ((number, row) for number, row in self._rows.items() if row.partition > after_partition)
        cut = [row.cut_row(number, forget) for number, row in there if not row.unconfirmed]
        blocks = list({block: None for row in cut for block, _ in row.places.values()})
        self.accounting.pin(blocks)
        return Cut(cut, blocks)

    def find_survivors(self, block: Block) -> list[int]:
        """Return the positions in a block that rows still need."""
        name = next(iter(block.names))
        return [
            position
            for position, number in enumerate(block.rows)
            if number in self._rows and self._rows[number].places.get(name) == (block, position)
        ]

    def move_block(self, old: Block, new: Block, positions: Sequence[int]) -> None:
        """The survivors of `old`, which is pinned, are now in `new`; `positions` are those in `old`."""
        self.accounting.mark_moved(old, new, positions, self._rows)

    def rows(self, numbers: Iterable[int] | None = None) -> Iterable[tuple[int, StoredRow]]:
        """Return the named rows that are here; None: all."""
        if numbers is None:
            return self._rows.items()
        return [(number, self._rows[number]) for number in dict.fromkeys(numbers) if number in self._rows]

    def finished(self) -> dict[int, list[int]]:
        """Return partition -> rows that were freed because every task was done with them."""
        return {number: sorted(known.finished) for number, known in self._partitions.items() if known.finished}

    def _created_before(
        self, rows: Sequence[int], there: Sequence[int], block: Block | None, arrived: Sequence[StoredRow]
    ) -> Repeated:
        refusal = f"row {there[0]} exists already; row indices are never reused in a run"
        names = frozenset[str]() if block is None else block.names
        for number, new in zip(rows, arrived, strict=True):
            row = self._rows.get(number)
            if row is None or not row.belongs_with(new) or not names <= row.places.keys():
                raise RowsExist(refusal)
        return self._make_repeated(rows, block, RowsExist(refusal))

    def _make_repeated(self, rows: Sequence[int], block: Block | None, refusal: PeerRefused) -> Repeated:
        pairs = []
        if block is not None:
            name = next(iter(block.names))
            for k, number in enumerate(rows):
                if number in self._rows:  # freed ones have nothing left to compare
                    pairs.append((*self._rows[number].places[name], k))
        repeated = Repeated(pairs, refusal)
        self.accounting.pin(repeated.blocks)
        return repeated

    def _check_row(self, number: int, task: str, token: int) -> StoredCommit | None:
        """Return an earlier commit under this very token, or None."""
        row = self._rows.get(number)
        if row is not None:
            commit = row.commits.get(task)
        else:
            commit = next((one for one in self._finished.get(number, ()) if one.task == task), None)
        if commit is not None and commit.token == token:
            return commit
        if row is None:
            raise LeaseFenced(f"row {number} is not here any more, so the lease {token} of {task} is void")
        floor, alive = self._floors.get(task, (0, frozenset()))
        fence = max(self._oldest_token, row.fences.get(task, 0))
        if commit is not None or token < fence or (token < floor and token not in alive):
            raise LeaseFenced(f"row {number}: the lease {token} of {task} was given to another consumer")
        return None

    def _check_tasks(self, tasks: Iterable[str]) -> None:
        for task in tasks:
            if self._tasks and task not in self._tasks:
                raise PeerRefused(f"no task is named {task!r}; known: {' '.join(sorted(self._tasks))}")

    def _attach_block(self, rows: Sequence[int], block: Block | None) -> None:
        if block is None:
            return
        for position, number in enumerate(rows):
            row = self._rows[number]
            place = (block, position)
            for name in block.names:
                row.places[name] = place
            row.tokens += block.tokens[position]
            row.num_bytes += block.row_bytes[position]
        self.accounting.add_block(block)

    def _free_done_rows(self, rows: Iterable[int]) -> None:
        """Free rows that every task is done with."""
        if not self._tasks:
            return
        for number in rows:
            row = self._rows.get(number)
            if row is None or row.unconfirmed or row.retained or not self._tasks <= row.commits.keys():
                continue
            # If not, what the tasks wrote went with another unit: there is nothing here to retain.
            worked_on_here = any(commit.token != KNOWN_ELSEWHERE for commit in row.commits.values())
            if self._retain and worked_on_here and row.partition > self._checkpointed_step:
                row.retained = True
                self.retained_rows += 1
                self.accounting.retain_places(set(row.places.values()))
            else:
                self._get_partition(row.partition).finished.add(number)
                self._finished[number] = tuple(row.commits.values())
                self._detach_row(number, row)

    def _detach_row(self, number: int, row: StoredRow) -> None:
        del self._rows[number]
        self.retained_rows -= row.retained
        self.accounting.release_places(set(row.places.values()), retained=row.retained)
        known = self._partitions[row.partition]
        known.rows.discard(number)
        if known.empty:
            del self._partitions[row.partition]

    def _get_partition(self, number: int) -> Partition:
        known = self._partitions.get(number)
        if known is None:
            known = self._partitions[number] = Partition()
            for old in sorted(self._partitions)[:-PARTITIONS_REMEMBERED]:
                if old != number:
                    self._forget_finished(old)
        return known

    def _forget_finished(self, number: int) -> None:
        known = self._partitions.get(number)
        if known is None:
            return
        for row in known.finished:
            del self._finished[row]
        known.finished.clear()
        known.removed.clear()
        if known.empty:
            del self._partitions[number]


# What a unit says about its rows, their columns, and the tasks that are done with them. Pure.
#
# A controller that meets the unit (again) gets all of it; a client that lists rows gets the confirmed ones it names.

_Key = tuple[int, frozenset[str], frozenset[str], bool]


def take_inventory(unit: str, incarnation: str, state: UnitState, *, announced: bool) -> RegisterUnit:
    """Return all rows of `state`; with `announced`, unconfirmed ones must not be handed out before `RowsConfirmed`."""
    finished = {partition: list(rows) for partition, rows in state.finished().items()}
    live: list[tuple[int, StoredRow]] = []
    for number, row in state.rows():
        if row.retained:
            finished.setdefault(row.partition, []).append(number)
        else:
            live.append((number, row))
    removed = [
        RowsRemoved(unit, partition, rows, RemovalReason.GROUP_LEFT, cause)
        for (partition, cause), rows in state.removed_groups().items()
    ]
    return RegisterUnit(unit, incarnation, _records(live, announced=announced), finished, removed)


def list_rows(
    state: UnitState, rows: Collection[int] | None, partition: int | None, *, retained: bool = True
) -> list[RowRecords]:
    """Return confirmed rows; None: any. `retained`: include those that only wait for a checkpoint."""
    return _records(
        (number, row)
        for number, row in state.rows(rows)
        if not row.unconfirmed and partition in (None, row.partition) and (retained or not row.retained)
    )


def _records(rows: Iterable[tuple[int, StoredRow]], *, announced: bool = False) -> list[RowRecords]:
    records: dict[_Key, RowRecords] = {}
    for number, row in rows:
        key = (row.partition, frozenset(row.places), frozenset(row.commits), announced and row.unconfirmed)
        record = records.get(key)
        if record is None:
            columns, done = sorted(row.places), sorted(row.commits)
            record = RowRecords(row.partition, [], [], [], [], [], columns, done, announced=key[-1])
            records[key] = record
        for task, times in row.returns.items():
            counts = record.deliveries.setdefault(task, [])
            counts += [0] * (len(record.rows) - len(counts))
            counts.append(times)
        record.append(number, group=row.group, group_size=row.group_size, tokens=row.tokens, num_bytes=row.num_bytes)
    for record in records.values():
        for counts in record.deliveries.values():
            counts += [0] * (len(record.rows) - len(counts))
    return list(records.values())
