"""What ranks of a training gang do in `test_gang_peers`."""

from datetime import timedelta
from multiprocessing.connection import Connection as Pipe
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from echo_peers import credentials
from torch.distributed import PrefixStore
from torch.testing._internal.distributed.fake_pg import FakeProcessGroup

import asyncflow.device
from asyncflow.errors import AsyncFlowError
from asyncflow.vendors import Vendor
from workers.rank.peers import gather, meet_peers


def connect_rudely(store: dist.Store, rank: int, size: int, timeout: timedelta) -> FakeProcessGroup:
    """Connect as NCCL does: block in the host until all ranks are there, whatever the timeout is.

    Its collectives do nothing, so a host value that travels over it is lost.
    """
    store.set(f"connecting/{rank}", "1")
    store.wait([f"connecting/{other}" for other in range(size)], timedelta(days=1))
    return FakeProcessGroup._create_internal(rank, size)


def gang_rank(port: int, pipe: Pipe, rank: int, num_ranks: int, timeout_s: float, device: str = "cpu") -> None:
    """Meet the others, then gather what it is told, and its rank, until that fails; then say why.

    Args:
        device: of the rank; the backend of any but the CPU is `connect_rudely`.
    """
    if device != "cpu":
        dist.Backend.register_backend("rude", connect_rudely, devices=[device])
        asyncflow.device.vendor_of = lambda _: Vendor(device, "rude")
    store = credentials(port).group_store()
    context: Any = SimpleNamespace(
        rank=rank,
        gang=SimpleNamespace(name="actor", num_ranks=num_ranks),
        device=torch.device(device),
        config=SimpleNamespace(launcher=SimpleNamespace(operation_timeout_s=timeout_s)),
        group_store=lambda: PrefixStore("gang", store),
    )
    store.set_timeout(timedelta(seconds=timeout_s))
    try:
        meet_peers(context)
        while True:
            pipe.send("ready")
            pipe.send(gather([rank, pipe.recv()]))
    except AsyncFlowError as error:
        pipe.send((type(error).__name__, str(error)))
