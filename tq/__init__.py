"""TransferQueue: a streaming queue of samples with separate control and data planes.

    from tq import Column, PackedBatch, QueueClient, StreamingDataLoader

Names are loaded on first use, so that `tq.config` stays torch-free.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tq.batch import Column, PackedBatch
    from tq.client import QueueClient
    from tq.controller import ControllerService
    from tq.dataloader import StreamingDataLoader
    from tq.replica import Replica
    from tq.storage import StorageUnit
    from tq.task_state import TaskSpec

__all__ = [
    "Column",
    "ControllerService",
    "PackedBatch",
    "QueueClient",
    "Replica",
    "StorageUnit",
    "StreamingDataLoader",
    "TaskSpec",
]

_HOMES = {
    "Column": "tq.batch",
    "ControllerService": "tq.controller",
    "PackedBatch": "tq.batch",
    "QueueClient": "tq.client",
    "Replica": "tq.replica",
    "StorageUnit": "tq.storage",
    "StreamingDataLoader": "tq.dataloader",
    "TaskSpec": "tq.task_state",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'tq' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
