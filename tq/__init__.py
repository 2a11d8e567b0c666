"""TransferQueue: a streaming queue of samples with separate control and data planes.

    import tq

    with tq.start({"score": ["prompt"], "train": ["prompt", "score"]}) as queue, queue.client("me") as client:
        client.put_rows({"prompt": ["1 + 1 =", "2 + 2 ="]})
        client.close_writing()  # so that the stream ends
        for lease in client.stream("score", ["prompt"]):
            lease.put({"score": [len(prompt) for prompt in lease["prompt"]]})

Names are loaded on first use, so that `tq.config` stays torch-free. Silent unless the program sets up logging.
"""

import logging
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from asyncflow.errors import (
        AsyncFlowError,
        CheckpointError,
        ConfigError,
        DeadlineExceeded,
        LeaseFenced,
        PeerRefused,
        ProducersGone,
        PutPending,
        QueueFull,
        RowsExist,
        TransportError,
    )
    from tq.client.dataloader import DeviceRoute, Replica, StreamingDataLoader
    from tq.client.lease import Lease, LeaseStream
    from tq.client.queue_client import AsyncLease, AsyncQueueClient, QueueClient
    from tq.columns import Column, PackedBatch
    from tq.columns import column_of as column
    from tq.config import QueueConfig, TaskConfig
    from tq.control.controller import ControllerService
    from tq.local import LocalQueue, connect
    from tq.local import LocalQueue as start  # noqa: N813
    from tq.messages import LostRows, NoRows, NoRowsReason, RowInfo
    from tq.policies import TaskSpec
    from tq.unit.storage import StorageUnit

__all__ = [
    "AsyncFlowError",
    "AsyncLease",
    "AsyncQueueClient",
    "CheckpointError",
    "Column",
    "ConfigError",
    "ControllerService",
    "DeadlineExceeded",
    "DeviceRoute",
    "Lease",
    "LeaseFenced",
    "LeaseStream",
    "LocalQueue",
    "LostRows",
    "NoRows",
    "NoRowsReason",
    "PackedBatch",
    "PeerRefused",
    "ProducersGone",
    "PutPending",
    "QueueClient",
    "QueueConfig",
    "QueueFull",
    "Replica",
    "RowInfo",
    "RowsExist",
    "StorageUnit",
    "StreamingDataLoader",
    "TaskConfig",
    "TaskSpec",
    "TransportError",
    "column",
    "connect",
    "start",
]

_NAMES = {
    "asyncflow.errors": "AsyncFlowError CheckpointError ConfigError DeadlineExceeded LeaseFenced PeerRefused "
    "ProducersGone PutPending QueueFull RowsExist TransportError",
    "tq.client.dataloader": "DeviceRoute Replica StreamingDataLoader",
    "tq.client.lease": "Lease LeaseStream",
    "tq.client.queue_client": "AsyncLease AsyncQueueClient QueueClient",
    "tq.columns": "Column PackedBatch column",
    "tq.config": "QueueConfig TaskConfig",
    "tq.control.controller": "ControllerService",
    "tq.local": "LocalQueue connect start",
    "tq.messages": "LostRows NoRows NoRowsReason RowInfo",
    "tq.policies": "TaskSpec",
    "tq.unit.storage": "StorageUnit",
}
_HOMES = {name: module for module, names in _NAMES.items() for name in names.split()}
_NAMED_OTHERWISE = {"column": "column_of", "start": "LocalQueue"}

logging.getLogger(__name__).addHandler(logging.NullHandler())


def __dir__() -> list[str]:
    return sorted(__all__)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'tq' has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), _NAMED_OTHERWISE.get(name, name))
    globals()[name] = value
    return value
