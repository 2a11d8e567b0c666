"""Reads whole tensors out of a saved state, one by one, in one process: for exports while the ranks train on."""

from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import TensorStorageMetadata


class SavedTensors:
    """The tensors of one state, whichever ranks saved their parts."""

    def __init__(self, saved: Path) -> None:
        """Args:
        saved: directory that torch.distributed.checkpoint wrote.
        """
        self._reader = dcp.FileSystemReader(saved)
        self._metadata = self._reader.read_metadata()
        self._reader.set_up_storage_reader(self._metadata, is_coordinator=True)

    def shapes(self, prefix: str) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the tensors below a dotted path, by the rest of their path, sorted."""
        entries = sorted(self._metadata.state_dict_metadata.items())
        return {
            name.removeprefix(prefix): tuple(entry.size)
            for name, entry in entries
            if name.startswith(prefix) and isinstance(entry, TensorStorageMetadata)
        }

    def read(self, name: str) -> Tensor:
        """Return a tensor by its dotted path in the state."""
        entry = self._metadata.state_dict_metadata[name]
        assert isinstance(entry, TensorStorageMetadata), f"{name} is no tensor"
        tensor = torch.empty(entry.size, dtype=entry.properties.dtype)
        planner = DefaultLoadPlanner(flatten_state_dict=False)
        planner.set_up_planner({name: tensor}, self._metadata, is_coordinator=True)
        plan = self._reader.prepare_local_plan(planner.create_local_plan())
        (plan,) = self._reader.prepare_global_plan(planner.create_global_plan([plan]))
        self._reader.read_data(planner.finish_plan(plan), planner).wait()
        return tensor
