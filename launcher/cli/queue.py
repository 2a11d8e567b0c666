"""`asyncflow queue`: the queue alone, for programs on this host or on several."""

import threading
from pathlib import Path

import click
from pydantic import Field, ValidationError

from asyncflow.errors import ConfigError
from asyncflow.settings import Settings
from launcher.config.load_config import Origins, explain, read_yaml
from launcher.process.launcher_process import stop_signals
from tq.config import QueueConfig, TaskConfig


class QueueFile(Settings):
    """The file that the command reads."""

    tasks: dict[str, tuple[str, ...] | TaskConfig] = Field(min_length=1)
    """Name -> input columns, or all settings of a task; producers before consumers."""
    tq: QueueConfig = QueueConfig()
    """As `tq` of a run."""


def serve_queue(file: Path, *, host: str, address: Path) -> None:
    """Serve until a signal arrives.

    Raises:
        ConfigError: the file, the host or the location of the address file cannot be used.
        TransportError: a service cannot be started again.
    """
    from tq.local import LocalQueue  # imports torch

    text = read_yaml(file)
    try:
        given = QueueFile.model_validate(text.values)
    except ValidationError as error:
        raise ConfigError(explain(error, Origins(text, {}))) from error
    stop = threading.Event()
    with (
        stop_signals(lambda _: stop.set()),
        LocalQueue(given.tasks, config=given.tq, host=host, address_file=address) as queue,
    ):
        click.echo(f"serving at {host}; clients: tq.connect({str(queue.address)!r}, NAME)")
        queue.wait(stop)
