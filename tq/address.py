"""How to reach a queue that runs alone: a file with mode 0600, since it holds the queue's secret."""

import json
import os
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from torch.distributed import DistError

from asyncflow.errors import ConfigError, TransportError
from asyncflow.sealed_store import connect_store
from asyncflow.transport.meeting import Credentials
from tq.config import QueueConfig, TaskConfig
from tq.task_spec import TaskSpec


@dataclass(frozen=True)
class QueueAddress:
    """Endpoint, secret and settings.

    Attributes:
        host, port: of the queue's store.
        secret: proved by challenge-response, never sent.
        config: settings of all processes.
        tasks: what the controllers hand out.
    """

    host: str
    port: int
    secret: bytes
    config: QueueConfig
    tasks: tuple[TaskConfig, ...]

    def credentials(self) -> Credentials:
        """Connect to the store.

        Raises:
            TransportError: the store does not answer.
        """
        timeout_s = self.config.request_timeout_s
        try:
            store = connect_store(self.host, self.port, timedelta(seconds=timeout_s))
        except DistError as error:
            raise TransportError(f"no queue answers at {self.host}:{self.port}; has it been closed?") from error
        return Credentials(store, self.secret, timeout_s)

    def specs(self) -> list[TaskSpec]:
        """Return the tasks as controllers want them."""
        return [task.spec(self.config) for task in self.tasks]

    def save(self, path: Path) -> None:
        """Write the file (mode 0600), in place of any that is there.

        Raises:
            ConfigError: it cannot be written.
        """
        fields = {
            "host": self.host,
            "port": self.port,
            "secret": self.secret.hex(),
            "config": self.config.model_dump(mode="json"),
            "tasks": [task.model_dump(mode="json") for task in self.tasks],
        }
        try:
            path.unlink(missing_ok=True)  # its mode would stay
            with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                json.dump(fields, file)
        except OSError as error:
            raise ConfigError(f"queue: {path} cannot be written ({error.strerror}); name another file") from error

    @staticmethod
    def load(path: Path) -> "QueueAddress":
        """Read the file.

        Raises:
            ConfigError: there is none, or it is no queue's.
        """
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
            raise ConfigError(f"queue: {path} is no queue's address; give the path of LocalQueue.address") from error
