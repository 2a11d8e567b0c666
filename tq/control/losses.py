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
        self.undecided: dict[int, bool] = {}
        """Row, of which it is not decided whether it must be put again -> whether a reader waits for it, though it is
        in that reader's lease."""
        self.lost: dict[int, set[int]] = {}
        """Part -> lost rows."""
        self.acked: dict[int, set[int]] = {}
        """Part -> rows that are at a unit which has not heard, and may never hear, that a task is done with them."""
        self._noted: dict[int, set[int]] = {}
        self.changed: set[int] = set()
        """Parts whose record must be written again: for a loss, an ack of a lost row, the end of a noted one."""

    def __iter__(self) -> Iterator[int]:
        """Yield all lost rows."""
        for rows in self.lost.values():
            yield from rows

    # What happens to rows

    def lose(self, numbers: Iterable[int]) -> None:
        """Record rows as lost; their partitions are to be saved."""
        for number in numbers:
            self.lost.setdefault(_part(number), set()).add(number)
            self.changed.add(_part(number))
            self.undecided.setdefault(number, False)

    def look_again(self, numbers: Iterable[int], *, wanted: bool = False) -> None:
        """Lost rows left a lease, or a reader of their lease waits for them (`wanted`): they may be needed now."""
        for number in numbers:
            self.undecided[number] = wanted or self.undecided.get(number, False)

    def ack(self, number: int) -> None:
        """A task finished a lost row: its partition is to be saved."""
        self.changed.add(_part(number))

    def ack_elsewhere(self, number: int) -> None:
        """A task is done with a row that is not lost, and its unit has yet to hear: the record is to have it."""
        self.acked.setdefault(_part(number), set()).add(number)
        self.changed.add(_part(number))

    def back(self, number: int) -> None:
        """A row was put again; if it gets lost once more, that is another loss."""
        self.lost.get(_part(number), set()).discard(number)
        self._reported.pop(number, None)

    def end(self, number: int) -> None:
        """Forget a row that was finished or removed."""
        self.back(number)
        self.acked.get(_part(number), set()).discard(number)
        if number in self._noted.get(_part(number), ()):
            self.changed.add(_part(number))

    # Clients that are told

    def take_undecided(self) -> dict[int, bool]:
        """Return lost row -> whether a reader waits for it, of those that are not decided on."""
        undecided, self.undecided = self.undecided, {}
        return undecided

    def report(self, rows: Iterable[int]) -> list[int]:
        """These rows must be put again; returns those that were not reported yet."""
        new = [number for number in rows if number not in self._reported]
        if new:
            self._sequence += 1
            self._reported.update(dict.fromkeys(new, self._sequence))
        return new

    def take_answers(self, all_rows: dict[int, Row]) -> list[tuple[int, LostRows]]:
        """Return (request, reply) of the watchers that have not seen the newest losses; they watch no more."""
        answers = []
        for request, watch in list(self.watchers.items()):
            rows = sorted(number for number, sequence in self._reported.items() if sequence > watch.after)
            if rows:
                held = [all_rows[number] for number in rows]
                places = [row.partition for row in held]
                answers.append((request, LostRows(self._sequence, places, rows, [row.group for row in held])))
                del self.watchers[request]
        return answers

    # What is durable

    def take(self) -> dict[int, list[int]]:
        """Return part -> the rows that its record is to hold, of the parts that changed since the last call."""
        changed, self.changed = self.changed, set()
        for part in changed:
            self._noted[part] = self.lost.get(part, set()) | self.acked.get(part, set())
        return {part: sorted(self._noted[part]) for part in sorted(changed)}


class TaskGraph:
    """All tasks of the queue; tasks and columns are bits."""

    def __init__(self, tasks: Sequence[TaskSpec], rows: Rows) -> None:
        """Args:
        tasks: of the queue.
        rows: names the bits.
        """
        self._rows = rows
        self._declared = {rows.bit(spec.name): rows.mask(spec.outputs) for spec in tasks}
        self._inputs = {rows.bit(spec.name): rows.mask(spec.inputs) for spec in tasks}
        self.known = dict(self._declared)
        """Task -> columns that it declares or was seen to write, for some row."""

    def learn(self, task: str, columns: Iterable[str]) -> None:
        """A task was seen to write such columns."""
        self.known[self._rows.bit(task)] |= self._rows.mask(columns)

    def outputs(self, tasks: int) -> int:
        """Return the columns that tasks write."""
        mask = 0
        for task, outputs in self.known.items():
            mask |= outputs if tasks & task else 0
        return mask

    def upstream(self, task: int) -> int:
        """Return the tasks that wrote, directly or not, what `task` reads."""
        found, read = 0, self._inputs[task]
        while True:
            new = sum(writer for writer, outputs in self.known.items() if outputs & read) & ~found
            if not new:
                return found & ~task
            found |= new
            for reader, inputs in self._inputs.items():
                read |= inputs if new & reader else 0

    def still_done(self, row: Row, put: Row) -> int:
        """Return the tasks that are done with a lost row that was put again: not those whose outputs went.

        These are the declared ones and, beside them, what the task was seen to write and the row had.
        """
        done = self._rows.every_task & ~row.left
        for task, outputs in self.known.items():
            if (self._declared[task] | outputs & row.written) & ~put.written:
                done &= ~task
        return done


def _part(number: int) -> int:
    return number // _ROWS % _PARTS
