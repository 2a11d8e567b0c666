"""TransferQueue: a streaming queue of samples with separate control and data planes.

    import tq

    with tq.start({"score": ["prompt"], "train": ["prompt", "score"]}) as queue:
        client = queue.client("me")
        client.put_rows({"prompt": tq.column(["1 + 1 =", "2 + 2 ="])})

Names are loaded on first use, so that `tq.config` stays torch-free.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tq.batch import PackedBatch
    from tq.client.async_client import AsyncQueueClient
    from tq.client.dataloader import StreamingDataLoader
    from tq.client.lease_stream import stream
    from tq.client.queue_client import QueueClient
    from tq.client.replica import Replica
    from tq.columns import Column
    from tq.columns import column_of as column
    from tq.config import QueueConfig, TaskConfig
    from tq.control.controller import ControllerService
    from tq.local import LocalQueue, connect
    from tq.local import LocalQueue as start  # noqa: N813
    from tq.task_spec import TaskSpec
    from tq.unit.storage import StorageUnit

__all__ = [
    "AsyncQueueClient",
    "Column",
    "ControllerService",
    "LocalQueue",
    "PackedBatch",
    "QueueClient",
    "QueueConfig",
    "Replica",
    "StorageUnit",
    "StreamingDataLoader",
    "TaskConfig",
    "TaskSpec",
    "column",
    "connect",
    "start",
    "stream",
]

_HOMES = {
    "AsyncQueueClient": "tq.client.async_client",
    "Column": "tq.columns",
    "ControllerService": "tq.control.controller",
    "LocalQueue": "tq.local",
    "PackedBatch": "tq.batch",
    "QueueClient": "tq.client.queue_client",
    "QueueConfig": "tq.config",
    "Replica": "tq.client.replica",
    "StorageUnit": "tq.unit.storage",
    "StreamingDataLoader": "tq.client.dataloader",
    "TaskConfig": "tq.config",
    "TaskSpec": "tq.task_spec",
    "column": "tq.columns:column_of",
    "connect": "tq.local",
    "start": "tq.local:LocalQueue",
    "stream": "tq.client.lease_stream",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'tq' has no attribute {name!r}")
    module, _, attribute = _HOMES[name].partition(":")
    value = getattr(import_module(module), attribute or name)
    globals()[name] = value
    return value
