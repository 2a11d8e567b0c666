"""Replicas of the trainer: over what their rows travel."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

from workers.rank import peers as replicas
from workers.rank.peers import ReplicaPlace, open_replica


def test_rows_travel_over_gloo_whatever_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A communicator of the device beside the model's could wait for it, and it for that."""
    connected: list[str] = []

    def connect(store: Any, rank: int, size: int, device: torch.device) -> Any:
        connected.append(device.type)
        return SimpleNamespace(rank=lambda: rank, size=lambda: size)

    monkeypatch.setattr(replicas, "connect_group", connect)
    context: Any = SimpleNamespace(
        device=torch.device("cuda:1"), gang=SimpleNamespace(name="actor"), job=SimpleNamespace(lineage=0), attempt=0,
        config=SimpleNamespace(launcher=SimpleNamespace(operation_timeout_s=1.0)), new_store=lambda _: HashStore(),
    )  # fmt: skip
    assert open_replica(context, ReplicaPlace(0, 1, ((0, 1),), 1)) is not None
    assert connected == ["cpu"]
