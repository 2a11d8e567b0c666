"""Which services a queue has: published in the job store once, read by every client. Names only, nothing secret.

Called by controllers (`publish`) and by clients (`read`). Units are not listed: they come and
go, and the lead controller's heartbeat answers name those that are up.
"""

from dataclasses import dataclass

import msgspec
import torch.distributed as dist

from asyncflow.decoding import msgpack_decoder
from asyncflow.errors import TransportError
from asyncflow.sealed_store import SealedStore

_KEY = "tq/directory"
_NEXT_ROW = "tq/next_row"
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
