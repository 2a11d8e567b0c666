"""Rows x columns of one storage unit, with lease tokens. No sockets; the caller holds the lock."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from asyncflow.errors import PeerRefused, Superseded
from tq.batch import Column


@dataclass
class _StoredRow:
    columns: dict[str, tuple[Tensor, bool]]
    fences: dict[str, int] = field(default_factory=dict)
    commits: dict[str, "_Commit"] = field(default_factory=dict)


@dataclass(frozen=True)
class _Commit:
    token: int
    columns: frozenset[str]


class UnitState:
    """What a unit holds."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self._rows: dict[int, _StoredRow] = {}

    def __len__(self) -> int:
        return len(self._rows)

    def create(self, rows: Sequence[int], columns: dict[str, Column]) -> None:
        """Add rows with their first columns.

        Raises:
            PeerRefused: a row exists already, or a column has another number of rows; nothing was added.
        """
        _check_shape(rows, columns)
        for row in rows:
            if row in self._rows:
                raise PeerRefused(f"row {row} exists already; row indices are never reused in a run")
        for row in rows:
            self._rows[row] = _StoredRow({})
        self._store(rows, columns)

    def commit(self, task: str, token: int, rows: Sequence[int], columns: dict[str, Column]) -> bool:
        """Store all output columns of a task for some rows of a lease, as one atom.

        Returns:
            False when the same put was carried out before (nothing to do).

        Raises:
            Superseded: the lease of a row was given to somebody else, or the row is freed; nothing was stored.
            PeerRefused: a column is there already, has another number of rows, or the put differs from an earlier one
                under this token.
        """
        _check_shape(rows, columns)
        stored = []
        for number in rows:
            row = self._rows.get(number)
            if row is None:
                raise Superseded(f"row {number}: every task is done with it, so the lease {token} of {task} is void")
            done = row.commits.get(task)
            if token < row.fences.get(task, 0) or (done is not None and done.token != token):
                raise Superseded(f"row {number}: the lease {token} of {task} was given to somebody else")
            stored.append(row)
        if stored and all(task in row.commits for row in stored):
            self._check_same(task, rows, columns)
            return False
        for number, row in zip(rows, stored, strict=True):
            clash = row.columns.keys() & columns.keys()
            if task in row.commits or clash:
                raise PeerRefused(f"row {number}: {task} put {' '.join(sorted(clash)) or 'its outputs'} already")
        for row in stored:
            row.commits[task] = _Commit(token, frozenset(columns))
        self._store(rows, columns)
        return True

    def fence(self, task: str, token: int, rows: Sequence[int]) -> None:
        """Refuse commits of `rows` under tokens below `token` from now on; freed rows are passed over."""
        for number in rows:
            row = self._rows.get(number)
            if row is not None:
                row.fences[task] = max(token, row.fences.get(task, 0))

    def read(self, rows: Sequence[int], names: Sequence[str]) -> dict[str, Column]:
        """Return columns of rows, in order (at least one row).

        Raises:
            PeerRefused: a row or column does not exist.
        """
        if not rows:
            raise PeerRefused("a read names no rows")
        stored = [self._row(row) for row in rows]
        columns = {}
        for name in names:
            try:
                parts = [row.columns[name] for row in stored]
            except KeyError:
                lacking = next(n for n, row in zip(rows, stored, strict=True) if name not in row.columns)
                raise PeerRefused(f"row {lacking}: column {name!r} is not written") from None
            packed = Column.of_rows([values for values, _ in parts])
            columns[name] = Column(packed.values, packed.lengths, parts[0][1])
        return columns

    def drop(self, rows: Sequence[int]) -> None:
        """Forget rows; unknown ones are passed over."""
        for number in rows:
            row = self._rows.pop(number, None)
            if row is not None:
                self.num_bytes -= sum(values.nbytes for values, _ in row.columns.values())

    def _store(self, rows: Sequence[int], columns: dict[str, Column]) -> None:
        for name, column in columns.items():
            self.num_bytes += column.values.nbytes
            for number, values in zip(rows, column.rows(), strict=True):
                self._rows[number].columns[name] = (values, column.text)

    def _check_same(self, task: str, rows: Sequence[int], columns: dict[str, Column]) -> None:
        for k, number in enumerate(rows):
            row = self._rows[number]
            same = row.commits[task].columns == columns.keys()
            if not same or any(not _equal(row.columns[name], columns[name], k) for name in columns):
                raise PeerRefused(f"row {number}: {task} put something else under this lease before")

    def _row(self, number: int) -> _StoredRow:
        row = self._rows.get(number)
        if row is None:
            raise PeerRefused(f"row {number} does not exist; it was freed, or never put")
        return row


def _check_shape(rows: Sequence[int], columns: dict[str, Column]) -> None:
    if len(set(rows)) != len(rows):
        raise PeerRefused(f"a put names a row twice: {list(rows)}")
    for name, column in columns.items():
        if len(column) != len(rows):
            raise PeerRefused(f"column {name}: {len(column)} rows, but the put names {len(rows)}")


def _equal(stored: tuple[Tensor, bool], column: Column, position: int) -> bool:
    values, text = stored
    other = column.rows()[position]
    same_type = text == column.text and values.dtype == other.dtype and values.numel() == other.numel()
    return same_type and torch.equal(values.view(torch.uint8), other.view(torch.uint8))  # bytes, so NaN equals NaN
