"""What the job store keeps of a queue for all its processes: its services, the next row index, who writes what.

`Directory`      published by controllers once, read by clients. Names only, nothing secret. Units are not listed: they
                 come and go, and the lead controller's heartbeat answers name those that are up.
`allocate_rows`  row indices for clients
`TaskOutputs`    the columns that each task was seen to write; outlives all services
"""

from collections.abc import Iterable
from dataclasses import dataclass

import msgspec
import torch.distributed as dist

from asyncflow.decoding import msgpack_decoder
from asyncflow.errors import TransportError
from asyncflow.sealed_store import SealedStore
from asyncflow.transport.meeting import Credentials

_KEY = "tq/directory"
_NEXT_ROW = "tq/next_row"
_OUTPUTS = "tq/outputs"
_MOST_COUNTED = 2**61


@dataclass(frozen=True)
class Directory:
    """Services and tasks of one queue.

    Attributes:
        controllers: service names; the first one is the lead: admission, limits, lost rows, loads of the units.
        tasks: names, in the dataflow's order; task k is served by controller k modulo their number.
    """

    controllers: tuple[str, ...]
    tasks: tuple[str, ...]

    @property
    def lead(self) -> str:
        """The lead controller's service name."""
        return self.controllers[0]

    def controller_of(self, task: str) -> str:
        """Return the service that hands out rows of `task`; an unknown task's name goes to the lead, which refuses."""
        if task not in self.tasks:
            return self.lead
        return self.controllers[self.tasks.index(task) % len(self.controllers)]

    def served_by(self, controller: str) -> tuple[str, ...]:
        """Return the tasks of one controller."""
        return tuple(task for task in self.tasks if self.controller_of(task) == controller)

    def publish(self, store: SealedStore) -> None:
        """Make it known; every controller may do so, all write the same."""
        store.set(_KEY, msgspec.msgpack.encode(self))

    @staticmethod
    def is_published(store: SealedStore) -> bool:
        """Whether a controller has made it known."""
        return store.check([_KEY])

    @staticmethod
    def read(store: SealedStore) -> "Directory":
        """Wait for it.

        Raises:
            TransportError: it was not published within the store's timeout, or not by this job.
        """
        try:
            return msgpack_decoder(Directory).decode(store.get(_KEY))
        except dist.DistError as error:
            raise TransportError("the queue's directory is not in the job store; is a controller running?") from error


class TaskOutputs:
    """The columns that each task was seen to write. Thread-safe.

    A unit notes them before it stores a task's first put of such columns, so before any process hears of the put. A
    controller reads them before it decides which tasks stay done with rows that were lost and are put again. A snapshot
    takes them along. Names are only added: a task that wrote a column once may have written it for any row.
    """

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
                self._credentials.call_store("put", f"{_OUTPUTS}/{task}/{column}", "1")
                self._noted.add((task, column))

    def read(self, tasks: Iterable[str]) -> dict[str, list[str]]:
        """Return what was noted: task -> columns.

        Raises:
            TransportError: the store is gone.
        """
        keys = self._credentials.call_store("read_below", f"{_OUTPUTS}/")
        prefixes = {task: f"{task}/" for task in tasks}
        found = {
            task: [key.removeprefix(prefix) for key in keys if key.startswith(prefix)]
            for task, prefix in prefixes.items()
        }
        return {task: columns for task, columns in found.items() if columns}


def allocate_rows(store: SealedStore, number: int) -> range:
    """Return global row indices that no other client has or will have (queues without admission)."""
    end = store.add(_NEXT_ROW, number)
    return range(end - number, end)


def reserve_rows(store: SealedStore, beyond: int) -> int:
    """Let no later `allocate_rows` return a row up to `beyond`; returns where it goes on.

    Two callers at once may leave more out than they need. Rows from 2**61 on are left alone: no counter gets there.
    """
    end = store.add(_NEXT_ROW, 0)
    missing = min(beyond + 1, _MOST_COUNTED) - end
    return store.add(_NEXT_ROW, missing) if missing > 0 else end
