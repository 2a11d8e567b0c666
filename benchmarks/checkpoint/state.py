"""A trainer's state that costs nothing to make: parameters and AdamW's two moments, rows over the ranks."""

from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

_COLUMNS = 1024
_TENSORS = 100


class SyntheticEngine:
    """What saving needs of a `TrainEngine`."""

    def __init__(self, num_bytes: int, num_ranks: int) -> None:
        """Args:
        num_bytes: of parameters and moments, on all ranks together.
        num_ranks: of the default group.
        """
        mesh = init_device_mesh("cpu", (num_ranks,))
        rows = max(1, num_bytes // (3 * 4 * _COLUMNS * _TENSORS * num_ranks))

        def sharded() -> dict[str, DTensor]:
            return {
                f"layer.{k}": DTensor.from_local(torch.rand(rows, _COLUMNS), mesh, [Shard(0)], run_check=False)
                for k in range(_TENSORS)
            }

        self._state: dict[str, Any] = {"model": sharded(), "optimizer": {"first": sharded(), "second": sharded()}}

    @property
    def local(self) -> list[Tensor]:
        """This rank's tensors."""
        optimizer = self._state["optimizer"]
        parts = [self._state["model"], optimizer["first"], optimizer["second"]]
        return [tensor.to_local() for part in parts for tensor in part.values()]

    def state_dict(self) -> dict[str, Any]:
        """Return the state; views."""
        return dict(self._state)

    def update(self) -> None:
        """Change every number."""
        torch._foreach_add_(self.local, 1.0)
