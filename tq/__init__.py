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
    from tq.async_client import AsyncQueueClient
    from tq.batch import PackedBatch
    from tq.client import QueueClient
    from tq.columns import Column
    from tq.columns import column_of as column
    from tq.config import QueueConfig, TaskConfig
    from tq.controller import ControllerService
    from tq.dataloader import StreamingDataLoader
    from tq.lease_stream import stream
    from tq.local import LocalQueue, connect
    from tq.local import LocalQueue as start  # noqa: N813
    from tq.replica import Replica
    from tq.storage import StorageUnit
    from tq.task_state import TaskSpec

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
    "AsyncQueueClient": "tq.async_client",
    "Column": "tq.columns",
    "ControllerService": "tq.controller",
    "LocalQueue": "tq.local",
    "PackedBatch": "tq.batch",
    "QueueClient": "tq.client",
    "QueueConfig": "tq.config",
    "Replica": "tq.replica",
    "StorageUnit": "tq.storage",
    "StreamingDataLoader": "tq.dataloader",
    "TaskConfig": "tq.config",
    "TaskSpec": "tq.task_state",
    "column": "tq.columns:column_of",
    "connect": "tq.local",
    "start": "tq.local:LocalQueue",
    "stream": "tq.lease_stream",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'tq' has no attribute {name!r}")
    module, _, attribute = _HOMES[name].partition(":")
    value = getattr(import_module(module), attribute or name)
    globals()[name] = value
    return value
