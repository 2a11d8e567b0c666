"""What ranks of a training gang do in `test_gang_peers`."""

from datetime import timedelta
from multiprocessing.connection import Connection as Pipe
from types import SimpleNamespace
from typing import Any

import torch
from echo_peers import credentials
from torch.distributed import PrefixStore

from asyncflow.errors import AsyncFlowError
from workers.trainer.gang_peers import gather, meet_peers


def gang_rank(port: int, pipe: Pipe, rank: int, num_ranks: int, timeout_s: float) -> None:
    """Meet the others, then gather whenever told, until that fails; then say why."""
    store = credentials(port).group_store()
    context: Any = SimpleNamespace(
        rank=rank,
        gang=SimpleNamespace(name="actor", num_ranks=num_ranks),
        device=torch.device("cpu"),
        config=SimpleNamespace(launcher=SimpleNamespace(operation_timeout_s=timeout_s)),
        group_store=lambda: PrefixStore("gang", store),
    )
    store.set_timeout(timedelta(seconds=timeout_s))
    try:
        meet_peers(context)
        while True:
            pipe.send("ready")
            pipe.recv()
            pipe.send(gather(rank))
    except AsyncFlowError as error:
        pipe.send((type(error).__name__, str(error)))
