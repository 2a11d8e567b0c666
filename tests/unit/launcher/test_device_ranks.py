"""Ranks of the device check: what would hang on NCCL does not, and what hangs costs nobody else's answer."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from launcher.doctor import device_check, device_ranks

CPU = torch.device("cpu")


class RingOfThree:
    """In the place of `torch.distributed`, at rank 0: collectives that work, but a pair connects in its first call."""

    def __init__(self) -> None:
        self.posted: list[tuple[Any, int]] = []

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_, **__: None

    def isend(self, *_: Any) -> None:
        raise RuntimeError("rank 1 sends first, too, and so does rank 2: all wait in the host")

    def irecv(self, *_: Any) -> None:
        raise RuntimeError("see isend")

    recv, send = irecv, isend

    def P2POp(self, operation: Any, tensor: torch.Tensor, peer: int) -> Any:
        if operation == self.irecv:
            tensor.fill_(peer + 1.0)
        return operation, peer

    def batch_isend_irecv(self, operations: list[tuple[Any, int]]) -> list[Any]:
        self.posted = operations
        return [SimpleNamespace(wait=lambda: None)]


def test_a_ring_sends_and_receives_as_one_group(monkeypatch: pytest.MonkeyPatch) -> None:
    ring = RingOfThree()
    monkeypatch.setattr(device_ranks, "dist", ring)
    seconds = device_ranks._try_all(CPU, 0, 3, 12)["send and recv"]
    assert isinstance(seconds, float), seconds
    assert ring.posted == [(ring.isend, 1), (ring.irecv, 2)]


def test_a_rank_that_hangs_is_named_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_check, "_DEADLINE_S", 0.1)
    with device_check.started_ranks("contexts", ["cpu"]) as (_, finish):  # it waits for what the check never says
        (said,) = finish()
        assert isinstance(said, str) and said.startswith("contexts took longer than the deadline = 0.1 s on rank 0")
