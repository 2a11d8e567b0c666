"""TransferQueue: a streaming queue of samples with separate control and data planes.

    import tq

    with tq.start({"score": ["prompt"], "train": ["prompt", "score"]}) as queue:
        client = queue.client("me")
        client.put_rows({"prompt": tq.column(["1 + 1 =", "2 + 2 ="])})

Names are loaded on first use, so that `tq.config` stays torch-free. Silent unless the program sets up logging.
"""

import logging
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from asyncflow.errors import ConfigError, ProducersGone, QueueFull, RowsExist, Superseded, TransportError
    from tq.batch import PackedBatch
    from tq.client.async_client import AsyncQueueClient
    from tq.client.dataloader import StreamingDataLoader
    from tq.client.lease_stream import Lease, stream
    from tq.client.queue_client import QueueClient
    from tq.client.replica import Replica
    from tq.columns import Column
    from tq.columns import column_of as column
    from tq.config import QueueConfig, TaskConfig
    from tq.control.controller import ControllerService
    from tq.local import LocalQueue, connect
    from tq.local import LocalQueue as start  # noqa: N813
    from tq.messages import Granted, LostRows, NoRows, NoRowsReason
    from tq.task_spec import TaskSpec
    from tq.unit.storage import StorageUnit

__all__ = [
    "AsyncQueueClient",
    "Column",
    "ConfigError",
    "ControllerService",
    "Granted",
    "Lease",
    "LocalQueue",
    "LostRows",
    "NoRows",
    "NoRowsReason",
    "PackedBatch",
    "ProducersGone",
    "QueueClient",
    "QueueConfig",
    "QueueFull",
    "Replica",
    "RowsExist",
    "StorageUnit",
    "StreamingDataLoader",
    "Superseded",
    "TaskConfig",
    "TaskSpec",
    "TransportError",
    "column",
    "connect",
    "start",
    "stream",
]

_HOMES = {
    "AsyncQueueClient": "tq.client.async_client",
    "Column": "tq.columns",
    "ConfigError": "asyncflow.errors",
    "ControllerService": "tq.control.controller",
    "Granted": "tq.messages",
    "Lease": "tq.client.lease_stream",
    "LocalQueue": "tq.local",
    "LostRows": "tq.messages",
    "NoRows": "tq.messages",
    "NoRowsReason": "tq.messages",
    "PackedBatch": "tq.batch",
    "ProducersGone": "asyncflow.errors",
    "QueueClient": "tq.client.queue_client",
    "QueueConfig": "tq.config",
    "QueueFull": "asyncflow.errors",
    "Replica": "tq.client.replica",
    "RowsExist": "asyncflow.errors",
    "StorageUnit": "tq.unit.storage",
    "StreamingDataLoader": "tq.client.dataloader",
    "Superseded": "asyncflow.errors",
    "TaskConfig": "tq.config",
    "TaskSpec": "tq.task_spec",
    "TransportError": "asyncflow.errors",
    "column": "tq.columns:column_of",
    "connect": "tq.local",
    "start": "tq.local:LocalQueue",
    "stream": "tq.client.lease_stream",
}

logging.getLogger(__name__).addHandler(logging.NullHandler())


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'tq' has no attribute {name!r}")
    module, _, attribute = _HOMES[name].partition(":")
    value = getattr(import_module(module), attribute or name)
    globals()[name] = value
    return value
