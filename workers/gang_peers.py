"""The ranks of a training gang as seen by one of them: how they meet, and whom a broken collective is blamed on."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import get_default_backend_for_device

from asyncflow.errors import DeadlineExceeded
from workers.context import WorkerContext


def meet_peers(context: WorkerContext) -> None:
    """Make the default process group, over all ranks of this gang; every later wait in it has its deadline.

    Raises:
        DeadlineExceeded: not all of them came.
    """
    launcher, size = context.config.launcher, context.gang.num_ranks
    began = time.monotonic()
    try:
        dist.init_process_group(
            get_default_backend_for_device(context.device),
            store=context.group_store(),
            rank=context.rank,
            world_size=size,
            timeout=timedelta(seconds=launcher.operation_timeout_s),
        )
    except RuntimeError as error:
        raise _blame(
            f"{context.gang.name} rank {context.rank}", _others(context.rank, size), began, "to meet", error
        ) from error


@contextmanager
def waiting_for_peers(what: str) -> Iterator[None]:
    """Say who waited for whom when a collective over the default group breaks, because its deadline passed or a rank
    left.

    Args:
        what: is waited for, e.g. `in the gradients' sums`.

    Raises:
        DeadlineExceeded: instead of whatever the backend raises.
    """
    began = time.monotonic()
    try:
        yield
    except RuntimeError as error:
        rank = dist.get_rank()
        raise _blame(f"rank {rank}", _others(rank, dist.get_world_size()), began, what, error) from error


def _others(rank: int, size: int) -> str:
    ranks = [str(other) for other in range(size) if other != rank]
    return f"rank{'s' if len(ranks) > 1 else ''} {' '.join(ranks)}"


def _blame(who: str, whom: str, began: float, what: str, error: Exception) -> DeadlineExceeded:
    waited_s = time.monotonic() - began
    reason = " ".join(str(error).split())[-200:]
    return DeadlineExceeded(f"{who} waited {waited_s:.0f} s {what} for {whom}, in vain: {reason}")
