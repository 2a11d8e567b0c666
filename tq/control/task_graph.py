"""Which tasks read and write which columns: as declared, and as they were seen to write. Pure."""

from collections.abc import Iterable, Sequence

from tq.control.rows import Row, Rows
from tq.task_spec import TaskSpec


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
