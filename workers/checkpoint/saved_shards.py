"""Shards of one engine's state in one directory, by torch.distributed.checkpoint; collective over its ranks.

Called for checkpoints: by the actor's ranks, and by those of a critic in a role of its own.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from asyncflow.errors import CheckpointError


class SavedEngine(Protocol):
    """What is saved: a `TrainEngine` or a `ValueEngine`."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore it."""


def save_shards(state: dict[str, Any], target: Path, *, group: dist.ProcessGroup) -> None:
    """Write this rank's part of a state that lies on the host.

    Args:
        state: what `state_dict` returned, or a copy.
        target: is made.
        group: of all ranks that hold the state, over the CPU.
    """
    # What is copied lies on the host already: no copies ahead, from streams that training uses.
    dcp.save(state, storage_writer=_ShardFiles(target, per_thread_copy_ahead=0), process_group=group)


def load_shards(engine: SavedEngine, source: Path, *, group: dist.ProcessGroup) -> None:
    """Restore an engine; any number of ranks may have saved it.

    Raises:
        CheckpointError: there are none.
    """
    if not source.is_dir():
        raise CheckpointError(f"{source} is missing: the run that saved it trained no such model; resume another one")
    state = engine.state_dict()
    dcp.load(state, checkpoint_id=source, process_group=group)
    engine.load_state_dict(state)


def own_shards(work: Path, part: str, rank: int) -> Iterator[str]:
    """Yield the files that a rank wrote in `work / part`, relative to `work`."""
    for path in (work / part).glob(f"__{rank}_*"):
        yield f"{part}/{path.name}"


class _ShardFiles(dcp.FileSystemWriter):
    """Raises the system's own error, e.g. a full disk: torch raises another one over the half-written file."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's shards; called by torch."""
        try:
            return super().write_data(plan, planner)
        except RuntimeError as error:
            if isinstance(error.__context__, OSError):
                raise error.__context__ from None
            raise
