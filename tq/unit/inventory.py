"""What a unit tells of its rows, their columns, and the tasks that are done with them. Pure.

A controller that meets the unit (again) gets all of it; a client that lists rows gets the confirmed ones that it names.
"""

from collections.abc import Collection, Iterable

from tq.messages import RegisterUnit, RemovalReason, RowRecords, RowsRemoved
from tq.unit.records import Row
from tq.unit.state import UnitState

_Key = tuple[int, frozenset[str], frozenset[str], bool]


def take_inventory(unit: str, incarnation: str, state: UnitState, *, held: bool) -> RegisterUnit:
    """Return all rows of `state`, also those that controllers have not agreed to yet.

    Args:
        unit, incarnation: of the unit.
        state: what it holds.
        held: such rows are not to be handed out before `RowsConfirmed`.
    """
    finished = {partition: list(rows) for partition, rows in state.finished().items()}
    live: list[tuple[int, Row]] = []
    for number, row in state.rows():
        if row.retained:
            finished.setdefault(row.partition, []).append(number)
        else:
            live.append((number, row))
    removed = [
        RowsRemoved(unit, partition, rows, RemovalReason.GROUP_LEFT, cause)
        for (partition, cause), rows in state.removed_groups().items()
    ]
    return RegisterUnit(unit, incarnation, _records(live, held=held), finished, removed)


def list_rows(
    state: UnitState, rows: Collection[int] | None, partition: int | None, *, retained: bool = True
) -> list[RowRecords]:
    """Return the confirmed rows among `rows` (None: all) and of `partition` (None: any).

    Args:
        state: what the unit holds.
        rows, partition: which ones.
        retained: also those that only wait for a checkpoint.
    """
    return _records(
        (number, row)
        for number, row in state.rows(rows)
        if not row.pending and partition in (None, row.partition) and (retained or not row.retained)
    )


def _records(rows: Iterable[tuple[int, Row]], *, held: bool = False) -> list[RowRecords]:
    records: dict[_Key, RowRecords] = {}
    for number, row in rows:
        key = (row.partition, frozenset(row.places), frozenset(row.commits), held and row.pending)
        record = records.get(key)
        if record is None:
            columns, done = sorted(row.places), sorted(row.commits)
            record = RowRecords(row.partition, [], [], [], [], [], columns, done, pending=key[-1])
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
