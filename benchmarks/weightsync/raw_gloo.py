"""What the broadcast path is held against: the same bytes over groups of the same kind, and nothing else.

One group per sender, {sender} + all receivers; all buckets of the path's sizes, one or several at a time, out of warm
memory into warm memory; both senders at once. Nothing is packed, checked or loaded.
"""

import threading
import time
from collections import deque

import torch
from torch.distributed import PrefixStore, ProcessGroup, Store, Work

from asyncflow.device import connect_group
from benchmarks.weightsync.setup import CPU
from weightsync.plan import TransferPlan


class RawSender:
    """A trainer rank's group."""

    def __init__(self, store: Store, plan: TransferPlan, rank: int, num_receivers: int) -> None:
        self._sizes = [bucket.num_bytes for bucket in plan.of_sender(rank)]
        self._memory = torch.ones(sum(self._sizes), dtype=torch.uint8)
        self._group = connect_group(PrefixStore(f"raw/{rank}", store), 0, 1 + num_receivers, CPU)

    def run(self, at_a_time: int) -> tuple[float, float]:
        """Send everything; returns begin and end (s, monotonic)."""
        began = time.monotonic()
        _broadcast(self._group, self._memory, self._sizes, at_a_time)
        return began, time.monotonic()


class RawReceiver:
    """A generator's groups."""

    def __init__(self, store: Store, plan: TransferPlan, place: int, num_receivers: int) -> None:
        """Args:
        place: of this receiver among all.
        """
        self._sizes = {rank: [bucket.num_bytes for bucket in plan.of_sender(rank)] for rank in range(plan.num_senders)}
        self._memories = {rank: torch.ones(sum(sizes), dtype=torch.uint8) for rank, sizes in self._sizes.items()}
        self._groups = {
            rank: connect_group(PrefixStore(f"raw/{rank}", store), 1 + place, 1 + num_receivers, CPU)
            for rank in self._sizes
        }

    def run(self, at_a_time: int) -> tuple[float, float]:
        """Receive everything; returns begin and end (s, monotonic)."""
        began = time.monotonic()
        threads = [
            threading.Thread(target=_broadcast, args=(self._groups[rank], self._memories[rank], sizes, at_a_time))
            for rank, sizes in self._sizes.items()
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return began, time.monotonic()


def _broadcast(group: ProcessGroup, memory: torch.Tensor, sizes: list[int], at_a_time: int) -> None:
    in_flight: deque[Work] = deque()
    for bucket in torch.split(memory, sizes):
        in_flight.append(group.broadcast([bucket]))
        if len(in_flight) == at_a_time:
            in_flight.popleft().wait()
    for work in in_flight:
        work.wait()
