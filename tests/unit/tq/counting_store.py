"""A store that knows how much was written to it, and what a controller keeps there."""

from typing import Any, cast

from torch.distributed import DistStoreError, HashStore

from asyncflow.process import ServiceThreads
from asyncflow.sealed_store import SealedStore
from asyncflow.transport.meeting import Credentials
from tq.control.controller import StateShell
from tq.control.durable_facts import DurableMark, Memory
from tq.control.state import ControlState


class CountingStore(HashStore):
    """Knows how large the values are that were written."""

    def __init__(self) -> None:
        super().__init__()
        self.written: dict[str, int] = {}
        self.written_bytes = 0
        self.failures = 0

    def set(self, key: str, value: Any) -> None:
        """Write."""
        if self.failures:
            self.failures -= 1
            raise DistStoreError("no answer in time")
        self.written[key] = len(value)
        self.written_bytes += len(value)
        super().set(key, value)


def shell_of(state: ControlState, memory: Memory) -> StateShell:
    """Return what makes a controller's facts durable, without units, threads and calls."""
    threads, unused = ServiceThreads("controller-0"), cast(Any, None)
    return StateShell(state, memory, unused, threads, outputs=dict, orders=lambda fenced: unused, restarted=False)


def memory_in(store: CountingStore) -> Memory:
    credentials = Credentials(store, b"secret")  # type: ignore[arg-type]
    credentials._idle.append(SealedStore(store, b"secret"))
    return Memory(DurableMark(credentials, "controller-0"), version=0)
