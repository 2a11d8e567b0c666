"""Rows whose unit is gone: which must be put again, which clients are told, what must be made durable, and which tasks
stay done with a row that is put again. Pure.

lose 5, 9000      undecided: 5, 9000     changed: parts 0, 2
report 5          watchers are told of 5, under a sequence number
take              {0: [5], 2: [9000]}    the store holds both
back 5            changed: -, the record stays: the unit may not know yet which tasks were done with the row
end 5             changed: part 0        take -> {0: []}: the store forgets the part
"""

from collections.abc import Iterable, Iterator, Sequence

from tq.control.rows import Row, Rows
from tq.messages import LostRows, WatchLost
from tq.task_spec import TaskSpec

_ROWS = 4096
"""Neighbours that go into one part of the durable record."""
_PARTS = 256
"""Rows beyond so many parts begin with the first one again."""


class Losses:
    """Part of a `RowTable`."""

    def __init__(self, first: int) -> None:
        """Args:
        first: sequence numbers count up from here; a restarted controller starts above all earlier ones.
        """
        self.watchers: dict[int, WatchLost] = {}
        """By request."""
        self._sequence = first
        self._reported: dict[int, int] = {}
        """Row -> sequence number; no watcher misses a loss or sees it twice."""
        self._undecided: dict[int, bool] = {}
        """Row -> whether a reader waits for it, though it is in that reader's lease."""
        self._lost: dict[int, set[int]] = {}
        self._noted: dict[int, set[int]] = {}
        self._changed: set[int] = set()

    def __iter__(self) -> Iterator[int]:
        """Yield all lost rows."""
        for rows in self._lost.values():
            yield from rows

    # What happens to rows

    def lose(self, numbers: Iterable[int]) -> None:
        """The unit of these rows is gone."""
        for number in numbers:
            self._lost.setdefault(_part(number), set()).add(number)
            self._changed.add(_part(number))
            self._undecided.setdefault(number, False)

    def look_again(self, numbers: Iterable[int], *, wanted: bool = False) -> None:
        """Lost rows left a lease, or a reader of their lease waits for them (`wanted`): they may be needed now."""
        for number in numbers:
            self._undecided[number] = wanted or self._undecided.get(number, False)

    def ack(self, number: int) -> None:
        """A task is done with a lost row."""
        self._changed.add(_part(number))

    def back(self, number: int) -> None:
        """A row was put again; if it gets lost once more, that is another loss."""
        self._lost.get(_part(number), set()).discard(number)
        self._reported.pop(number, None)

    def end(self, number: int) -> None:
        """A row is finished, or removed."""
        if not self._lost:
            return  # every row ends here; hardly one was ever lost
        self.back(number)
        if number in self._noted.get(_part(number), ()):
            self._changed.add(_part(number))

    # Clients that are told

    @property
    def undecided(self) -> bool:
        """Whether rows wait for a decision."""
        return bool(self._undecided)

    def take_undecided(self) -> dict[int, bool]:
        """Return lost row -> whether a reader waits for it, of those that are not decided on."""
        undecided, self._undecided = self._undecided, {}
        return undecided

    def report(self, rows: Iterable[int]) -> list[int]:
        """These rows must be put again; returns those that were not reported yet."""
        new = [number for number in rows if number not in self._reported]
        if new:
            self._sequence += 1
            self._reported.update(dict.fromkeys(new, self._sequence))
        return new

    def take_answers(self, table: dict[int, Row]) -> list[tuple[int, LostRows]]:
        """Return (request, reply) of the watchers that have not seen the newest losses; they watch no more."""
        answers = []
        for request, watch in list(self.watchers.items()):
            rows = sorted(number for number, sequence in self._reported.items() if sequence > watch.after)
            if rows:
                held = [table[number] for number in rows]
                places = [row.partition for row in held]
                answers.append((request, LostRows(self._sequence, places, rows, [row.group for row in held])))
                del self.watchers[request]
        return answers

    # What is durable

    @property
    def changed(self) -> bool:
        """Whether the record must be written again: for a loss, an ack of a lost row, the end of a noted one."""
        return bool(self._changed)

    def take(self) -> dict[int, list[int]]:
        """Return part -> the lost rows that its record is to hold, of the parts that changed since the last call."""
        changed, self._changed = self._changed, set()
        for part in changed:
            self._noted[part] = set(self._lost.get(part, ()))
        return {part: sorted(self._noted[part]) for part in sorted(changed)}


class TaskGraph:
    """All tasks of the queue; tasks and columns are bits."""

    def __init__(self, tasks: Sequence[TaskSpec], rows: Rows) -> None:
        """Args:
        tasks: of the queue.
        rows: names the bits.
        """
        self._rows = rows
        self._declared = [rows.mask(spec.outputs) for spec in tasks]
        self._outputs = list(self._declared)
        self._inputs = [rows.mask(spec.inputs) for spec in tasks]

    def learn(self, task: str, columns: Iterable[str]) -> None:
        """A task was seen to write such columns, for some row."""
        self._outputs[self._rows.bit(task).bit_length() - 1] |= self._rows.mask(columns)

    def outputs(self, tasks: int) -> int:
        """Return the columns that tasks write."""
        mask = 0
        for k, outputs in enumerate(self._outputs):
            mask |= outputs if tasks >> k & 1 else 0
        return mask

    def upstream(self, task: int) -> int:
        """Return the tasks that wrote, directly or not, what `task` reads."""
        found, read = 0, self._inputs[task.bit_length() - 1]
        while True:
            new = sum(1 << k for k, outputs in enumerate(self._outputs) if outputs & read) & ~found
            if not new:
                return found & ~task
            found |= new
            for k, inputs in enumerate(self._inputs):
                read |= inputs if new >> k & 1 else 0

    def still_done(self, row: Row, put: Row) -> int:
        """Return the tasks that are done with a lost row that was put again: not those whose outputs went.

        These are the declared ones and, beside them, what the task was seen to write and the row had.
        """
        done = self._rows.every_task & ~row.left
        for k, (declared, outputs) in enumerate(zip(self._declared, self._outputs, strict=True)):
            if (declared | outputs & row.written) & ~put.written:
                done &= ~(1 << k)
        return done


def _part(number: int) -> int:
    return number // _ROWS % _PARTS
