"""What the job store keeps of a queue for all its processes: its services, the next row index, who writes what.

`Directory`      published by controllers once, read by clients. Names only, no secrets. Units are not listed: they come
                 and go, and the lead controller's heartbeat answers name those that are up.
`allocate_rows`  row indices for clients
`TaskOutputs`    the columns that each task was seen to write; outlives all services
"""

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import msgspec
import torch.distributed as dist
from torch.distributed import DistError

from asyncflow.decoding import msgpack_decoder
from asyncflow.errors import ConfigError, TransportError
from asyncflow.sealed_store import SealedStore, connect_store
from asyncflow.transport.meeting import Credentials
from tq.config import QueueConfig, TaskConfig
from tq.policies import TaskSpec

_KEY = "tq/directory"
_NEXT_ROW = "tq/next_row"
_OUTPUTS = "tq/outputs"
_MOST_COUNTED = 2**61


@dataclass(frozen=True)
class Directory:
    """Services and tasks of one queue."""

    # Service names; the first one is the lead: admission, limits, lost rows, loads of the units.
    controllers: tuple[str, ...]
    tasks: tuple[str, ...]  # names, in the dataflow's order; task k is served by controller k modulo their number

    @property
    def lead(self) -> str:
        return self.controllers[0]

    def controller_of(self, task: str) -> str:
        """Return the service that hands out rows of `task`; for an unknown task the lead, which refuses it."""
        if task not in self.tasks:
            return self.lead
        return self.controllers[self.tasks.index(task) % len(self.controllers)]

    def served_by(self, controller: str) -> tuple[str, ...]:
        return tuple(task for task in self.tasks if self.controller_of(task) == controller)

    def publish(self, store: SealedStore) -> None:
        """Write it to the store; every controller may do so, since all write the same."""
        store.set(_KEY, msgspec.msgpack.encode(self))

    @staticmethod
    def is_published(store: SealedStore) -> bool:
        return store.check([_KEY])

    @staticmethod
    def read(store: SealedStore) -> "Directory":
        """Wait for a directory; raises TransportError if this job publishes none within the store's timeout."""
        try:
            return msgpack_decoder(Directory).decode(store.get(_KEY))
        except dist.DistError as error:
            raise TransportError("the queue's directory is not in the job store; is a controller running?") from error


class TaskOutputs:
    """The columns that each task was seen to write. Thread-safe.

    A unit notes them before it stores a task's first put of such columns, hence before any process hears of the put. A
    controller reads them before it decides which tasks stay done with lost rows that are put again. A snapshot contains
    them. Names are only added: a task that wrote a column once may have written it for any row.
    """

    def __init__(self, credentials: Credentials) -> None:
        self._credentials = credentials
        self._noted: set[tuple[str, str]] = set()

    def note_outputs(self, task: str, columns: Iterable[str]) -> None:
        """Note that a task writes these columns; returns once the store has them. Free from the second time on."""
        for column in columns:
            if (task, column) not in self._noted:
                self._credentials.call_store("put", f"{_OUTPUTS}/{task}/{column}", "1")
                self._noted.add((task, column))

    def read(self, tasks: Iterable[str]) -> dict[str, list[str]]:
        """Return task -> columns."""
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
    """Keep later `allocate_rows` from returning a row up to `beyond`; returns where it continues."""
    end = store.add(_NEXT_ROW, 0)
    # Two callers at once may skip more than they need. Rows from 2**61 on need no care: no counter gets there.
    missing = min(beyond + 1, _MOST_COUNTED) - end
    return store.add(_NEXT_ROW, missing) if missing > 0 else end


# How to reach a stand-alone queue: a file with mode 0600, since it holds the queue's secret.


@dataclass(frozen=True)
class QueueAddress:
    """Endpoint, secret and settings of a queue; the secret is proved by challenge-response, never sent."""

    host: str
    port: int
    secret: bytes
    config: QueueConfig
    tasks: tuple[TaskConfig, ...]

    def connect_store(self) -> Credentials:
        """Connect to the store; raises TransportError when it does not answer."""
        timeout_s = self.config.request_timeout_s
        try:
            store = connect_store(self.host, self.port, timedelta(seconds=timeout_s))
        except DistError as error:
            raise TransportError(f"no queue answers at {self.host}:{self.port}; has it been closed?") from error
        return Credentials(store, self.secret, timeout_s)

    def list_specs(self) -> list[TaskSpec]:
        return [task.spec(self.config) for task in self.tasks]

    def save(self, path: Path) -> None:
        """Write the file (mode 0600), replacing any other; raises ConfigError."""
        fields = {
            "host": self.host,
            "port": self.port,
            "secret": self.secret.hex(),
            "config": self.config.model_dump(mode="json"),
            "tasks": [task.model_dump(mode="json") for task in self.tasks],
        }
        try:
            path.unlink(missing_ok=True)  # an existing file would keep its mode
            with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                json.dump(fields, file)
        except OSError as error:
            raise ConfigError(f"queue: {path} cannot be written ({error.strerror}); name another file") from error

    @staticmethod
    def load(path: Path) -> "QueueAddress":
        """Read the file; raises ConfigError if it is not a queue's."""
        try:
            fields = json.loads(path.read_text())
            return QueueAddress(
                fields["host"],
                fields["port"],
                bytes.fromhex(fields["secret"]),
                QueueConfig.model_validate(fields["config"]),
                tuple(TaskConfig.model_validate(task) for task in fields["tasks"]),
            )
        except FileNotFoundError as error:
            raise ConfigError(f"queue: {path} does not exist; start a queue there first") from error
        except OSError as error:
            raise ConfigError(f"queue: {path} cannot be read ({error.strerror})") from error
        except (ValueError, KeyError, TypeError) as error:  # also pydantic's
            raise ConfigError(f"queue: {path} is not a queue's address; give the path of LocalQueue.address") from error
