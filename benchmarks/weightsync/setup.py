"""What every process of a cluster is told, and how it begins and obeys."""

import faulthandler
import logging
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch

from asyncflow.errors import AsyncFlowError
from asyncflow.job import LOOPBACK
from asyncflow.sealed_store import connect_store
from asyncflow.transport.meeting import Credentials
from benchmarks.weightsync.shapes import Shapes
from weightsync.config import WeightSyncConfig
from weightsync.version import Version

AGENT = "weights-0"
CPU = torch.device("cpu")
_STORE_TIMEOUT = timedelta(seconds=60)


@dataclass(frozen=True)
class Setup:
    """Of one cluster.

    Attributes:
        port, secret: of the job store on loopback.
        shapes: of the model.
        config: of the weight path; `path` says nothing here: each update names its own.
        num_ranks: trainer ranks.
        num_receivers: generators.
        masters: element type of the trainer's weights.
        proves: trainers publish every version's digests, generators report those of their weights.
        baselines: generators keep a private copy, from which they load for comparison.
        traces: processes record spans.
    """

    port: int
    secret: bytes
    shapes: Shapes
    config: WeightSyncConfig
    num_ranks: int = 2
    num_receivers: int = 4
    masters: torch.dtype = torch.float32
    proves: bool = False
    baselines: bool = False
    traces: bool = False

    def credentials(self) -> Credentials:
        """Connect to the store."""
        return Credentials(connect_store(LOOPBACK, self.port, _STORE_TIMEOUT), self.secret)


def begin_process() -> None:
    """Set up a process of the cluster: one thread for tensors, faults are told, warnings of the weight path are not."""
    faulthandler.enable()
    torch.set_num_threads(1)
    logging.basicConfig(level=logging.ERROR, format="%(process)d %(name)s %(message)s")


def proof_key(version: Version, rank: int) -> str:
    """Return where in the store a rank puts its digest of a version."""
    return f"proof/{version.lineage}.{version.step}/{rank}"


def obey(pipe: Any, servant: object) -> None:
    """Wait for one order, (method, *arguments), carry it out and answer; an error of ours is an answer, too."""
    method, *arguments = pipe.recv()
    function: Callable[..., Any] = getattr(servant, method)
    try:
        answer = function(*arguments)
    except AsyncFlowError as error:
        answer = error
    pipe.send(answer)
