"""The columns that each task was seen to write, in the job store: what a queue knows of them outlives all its services.

    unit          notes them before it stores a task's first put of such columns, so before anybody hears of the put
    controller    reads them before it decides which tasks stay done with rows that were lost and are put again
    client        a snapshot takes them along

Column names are only added: a task that has written a column once may have written it for any row.
"""

from collections.abc import Iterable

from asyncflow.transport.handshake import Credentials

_PREFIX = "tq/outputs"


class TaskOutputs:
    """Notes and reads them. Thread-safe."""

    def __init__(self, credentials: Credentials) -> None:
        self._credentials = credentials
        self._noted: set[tuple[str, str]] = set()

    def note(self, task: str, columns: Iterable[str]) -> None:
        """A task writes such columns; returns when the store has them. Costs nothing the next time.

        Raises:
            TransportError: the store is gone.
        """
        for column in columns:
            if (task, column) not in self._noted:
                self._credentials.call_store("put", f"{_PREFIX}/{task}/{column}", "1")
                self._noted.add((task, column))

    def read(self, tasks: Iterable[str]) -> dict[str, list[str]]:
        """Return what was noted: task -> columns.

        Raises:
            TransportError: the store is gone.
        """
        keys = self._credentials.call_store("read_below", f"{_PREFIX}/")
        prefixes = {task: f"{task}/" for task in tasks}
        found = {
            task: [key.removeprefix(prefix) for key in keys if key.startswith(prefix)]
            for task, prefix in prefixes.items()
        }
        return {task: columns for task, columns in found.items() if columns}
