"""Checkpoints: written beside, renamed into place when all ranks are done; readers never see half of one.

checkpoints/step_000020/
    meta.json   step, lineage, model fingerprint, ranks, admission's cursor (written last)
    dcp/        model and optimizer shards (torch.distributed.checkpoint)
    rng/        one file per rank
    hf/         Hugging Face export (safetensors), if configured
    reference/  the reference's weights, if they are neither the initial ones nor these
"""

import json
import logging
import os
import shutil
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file

from asyncflow.errors import CheckpointError
from workers.engines.base import TrainEngine

logger = logging.getLogger(__name__)


class Checkpointer:
    """Saves and restores one actor gang; every method is collective over its ranks."""

    def __init__(self, run_dir: Path, *, keep_last: int, export_hf: bool) -> None:
        """Remove what an interrupted save or removal left."""
        self._root = run_dir / "checkpoints"
        self._keep_last = keep_last
        self._export_hf = export_hf
        if dist.get_rank() == 0:
            for directory in self._root.glob(".step_*.tmp"):
                shutil.rmtree(directory, ignore_errors=True)

    def save(self, engine: TrainEngine, *, step: int, meta: dict[str, Any], reference: Path | None = None) -> Path:
        """Write the checkpoint of `step`; returns its directory.

        Args:
            engine: whose state is saved.
            step: the step that was completed last.
            meta: more facts for `meta.json`.
            reference: directory of weights that belongs to it, too.

        Raises:
            CheckpointError: it cannot be written.
        """
        target = self._root / f"step_{step:06d}"
        try:
            self._write(engine, target, {"step": step, **meta}, reference)
        except (OSError, RuntimeError, dcp.CheckpointException) as error:
            raise CheckpointError(
                f"checkpoint {target}: cannot be written ({_reason(error)}; {_free_mb(self._root):.0f} MB are free "
                f"there); make room and resume"
            ) from error
        return target

    def restore(self, engine: TrainEngine, source: Path) -> dict[str, Any]:
        """Load a checkpoint into the engine; returns its meta.

        Raises:
            CheckpointError: it cannot be read.
        """
        try:
            meta: dict[str, Any] = json.loads((source / "meta.json").read_text())
            state = engine.state_dict()
            dcp.load(state, checkpoint_id=source / "dcp", no_dist=dist.get_world_size() == 1)
        except (OSError, ValueError, RuntimeError, dcp.CheckpointException) as error:
            raise CheckpointError(f"checkpoint {source}: cannot be read ({error}); resume from an older one") from error
        engine.load_state_dict(state)
        rng = source / "rng" / f"rank_{dist.get_rank()}.safetensors"
        if meta["num_ranks"] == dist.get_world_size():
            torch.set_rng_state(load_file(rng)["cpu"])
        return meta

    def _write(self, engine: TrainEngine, target: Path, meta: dict[str, Any], reference: Path | None) -> None:
        rank = dist.get_rank()
        beside = _beside(target)
        if rank == 0:
            shutil.rmtree(beside, ignore_errors=True)
            (beside / "rng").mkdir(parents=True)
        dist.barrier()
        dcp.save(engine.state_dict(), checkpoint_id=beside / "dcp", no_dist=dist.get_world_size() == 1)
        save_file({"cpu": torch.get_rng_state()}, beside / "rng" / f"rank_{rank}.safetensors")
        if self._export_hf:
            engine.export_hf(beside / "hf")
        dist.barrier()
        if rank == 0:
            if reference is not None:
                shutil.copytree(reference, beside / "reference", copy_function=_link_or_copy)
            facts = {**meta, "num_ranks": dist.get_world_size(), "saved_at": time.time()}
            _write_durably(beside / "meta.json", json.dumps(facts, indent=1))
            shutil.rmtree(target, ignore_errors=True)
            beside.rename(target)
            self._prune()
        dist.barrier()

    def _prune(self) -> None:
        old = sorted(self._root.glob("step_*"))[: -self._keep_last]
        for directory in old:
            # Renamed first: a removal that is interrupted leaves nothing that looks like a checkpoint.
            shutil.rmtree(directory.rename(_beside(directory)), ignore_errors=True)


def _link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system
        shutil.copy2(source, target)


def _beside(target: Path) -> Path:
    """Return where a checkpoint lies while it is not, or no longer, complete."""
    return target.with_name(f".{target.name}.tmp")


def _reason(error: BaseException) -> str:
    """Return one line; PyTorch's own has every rank's whole traceback."""
    if isinstance(error, dcp.CheckpointException):
        error = next(iter(error.failures.values()))[0]
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def _free_mb(directory: Path) -> float:
    return shutil.disk_usage(directory).free / 1e6


def _write_durably(path: Path, text: str) -> None:
    with path.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
