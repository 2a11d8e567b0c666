"""What a unit tells a controller that meets it (again): its rows, their columns, who is done with them. Pure."""

from tq.messages import RegisterUnit, RemovalReason, RowRecords, RowsRemoved
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
    records: dict[_Key, RowRecords] = {}
    for number, row in state.rows():
        if row.retained:
            finished.setdefault(row.partition, []).append(number)
            continue
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
    quarantined = [
        RowsRemoved(unit, partition, rows, RemovalReason.QUARANTINED, cause)
        for (partition, cause), rows in state.quarantined().items()
    ]
    return RegisterUnit(unit, incarnation, list(records.values()), finished, quarantined)
