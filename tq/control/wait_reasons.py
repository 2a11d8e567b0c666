"""What a fetch waits for, as text for people, and whether anybody is connected who could bring it. Pure."""

from dataclasses import dataclass

from tq.control.row_table import RowTable
from tq.control.rows import Row, RowState
from tq.control.task_state import TaskState
from tq.messages import NEW_ROWS, FetchRound, FetchRows

_LOOKED_AT = 4096


@dataclass(frozen=True)
class Reason:
    text: str
    producers_alive: bool = True


class WaitReasons:
    """Finds what is missing, and knows who writes what."""

    def __init__(self, table: RowTable) -> None:
        self.recovering = ""  # what a restarted controller waits for; "": it serves
        self._table = table
        self._writers: dict[str, frozenset[str]] = {}

    def writes(self, owner: str, columns: tuple[str, ...]) -> None:
        """A connected consumer puts these columns."""
        self._writers[owner] = frozenset(columns)

    def leave(self, owner: str) -> None:
        self._writers.pop(owner, None)

    def of(self, task: TaskState, fetch: FetchRows | FetchRound, *, gate: int | None) -> Reason:
        """Return why a fetch got nothing; `gate`: newest partition that the consumer's weights allow."""
        if self.recovering:
            return Reason(f"the controller was restarted and waits for {self.recovering}")
        if isinstance(fetch, FetchRows) and task.isolation.holds(fetch.owner):
            return Reason("this consumer holds rows that failed too often to be handed out with others")
        number = fetch.partition if isinstance(fetch, FetchRound) and task.spec.steps is None else self._oldest(task)
        if number is None:
            leased = len(task.leases.holders)
            others = f"{leased} are leased" if leased else "none was put"
            return Reason(f"no row waits for this task; {others}", self._alive({NEW_ROWS}))
        if gate is not None and number > gate:
            return Reason(f"partition {number} waits for newer weights than version {_version(fetch)}")
        return self._in_partition(task, number)

    def blocking(self) -> str:
        """Return which task keeps the oldest partition alive: what a put without room waits for."""
        rows = self._table.rows
        for number in sorted(rows.partitions):
            first = next(rows.numbers(number), None)
            if first is None:
                continue
            for name in rows.tasks(rows.rows[first].left):
                task = self._table.tasks.get(name)
                if task is None:
                    return f"partition {number} waits for task {name}"
                part = task.partition(number)
                state = f"{part.num_held} rows leased" if part.num_held else f"{part.queue.num_rows} rows ready"
                return f"partition {number} waits for task {name}: {state}"
        return "nothing is alive"

    def _oldest(self, task: TaskState) -> int | None:
        for number in sorted(self._table.rows.partitions):
            if not task.over(number) and self._outstanding(task, number)[1] > 0:
                return number
        return None

    def _outstanding(self, task: TaskState, number: int) -> tuple[int, int]:
        """Return (rows that the partition has or will have, those of them that are in no lease)."""
        info = self._table.rows.partitions[number]
        part = task.partition(number)
        size = info.num_rows if info.num_rows is not None else info.num_live + info.num_finished
        return size, size - part.num_done - part.num_held

    def _in_partition(self, task: TaskState, number: int) -> Reason:
        info = self._table.rows.partitions.get(number)
        if info is None:
            return Reason(f"partition {number} was not opened, and has no rows", self._alive({NEW_ROWS}))
        size, waiting = self._outstanding(task, number)
        absent = size - info.num_live - info.num_finished
        rows = [self._table.rows.rows[row] for row in self._waiting(task, number)]
        causes = []
        missing = 0
        for row in rows:
            missing |= task.inputs & ~row.written
        sources = set(self._table.rows.columns(missing))
        if missing:
            count = sum(1 for row in rows if task.inputs & ~row.written)
            causes.append(f"{count} of {size} rows wait for {_columns(sorted(sources))}")
        if absent > 0:
            causes.append(f"{absent} of {size} rows were not put yet")
            sources.add(NEW_ROWS)
        causes += self._away(rows)
        if not causes and waiting > 0:
            causes.append(f"{waiting} of {size} rows are ready, which is not enough, or return from a lease that ended")
        if info.num_rows is None:
            causes.append("the partition was not opened, so its end is not known")
        return Reason(f"partition {number}: " + ("; ".join(causes) or "all rows are leased"), self._alive(sources))

    def _waiting(self, task: TaskState, number: int) -> list[int]:
        numbers = []
        for looked, row in enumerate(self._table.rows.numbers(number)):
            # Bounded: this runs for every fetch whose deadline passes.
            if looked >= _LOOKED_AT:
                break
            if self._table.rows.rows[row].left & task.bit and row not in task.leases.holders:
                numbers.append(row)
        return numbers

    def _away(self, rows: list[Row]) -> list[str]:
        lost = sum(1 for row in rows if row.lost)
        away = sorted({row.unit.name for row in rows if row.state is RowState.AWAY})
        causes = [f"{lost} rows were lost with their unit and not put again"] if lost else []
        return causes + ([f"{' '.join(away)} is away with rows"] if away else [])

    def _alive(self, sources: set[str]) -> bool:
        return all(any(source in writes for writes in self._writers.values()) for source in sources)


def _columns(names: list[str]) -> str:
    return f"column {names[0]}" if len(names) == 1 else f"columns {' '.join(names)}"


def _version(fetch: FetchRows | FetchRound) -> int:
    return fetch.version if isinstance(fetch, FetchRows) else 0
