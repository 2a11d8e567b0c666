"""A critic's part of a checkpoint, where it has a role of its own; the actor's saver waits for it.

    training thread   save s heard -> begin(s): the copy begins -> before_update() -> update of step s + 1
    saving thread     s has begun -> shards, checksums -> files of s

One object per rank of the critic; all do the same. A failure is told to the actor, which then drops the whole save.
"""

import logging
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from asyncflow.errors import AsyncFlowError, CheckpointError, one_line
from workers.checkpoint_directory import beside, checkpoint_path
from workers.checkpoint_files import CRITIC, describe
from workers.engines.base import ValueEngine
from workers.gather import gather
from workers.host_copy import HostCopy
from workers.saved_shards import load_shards, own_shards, save_shards
from workers.trainer_words import TrainerWords

logger = logging.getLogger(__name__)

_CPU = torch.device("cpu")


class CriticSaver:
    """Constructed, and called, by all ranks together."""

    def __init__(
        self,
        engine: ValueEngine,
        words: Callable[[], TrainerWords],
        run_dir: Path,
        *,
        device: torch.device,
        timeout_s: float,
    ) -> None:
        """Args:
        engine: that is saved.
        words: makes the access of the saving thread.
        run_dir: of the run.
        device: that holds the state.
        timeout_s: deadline of one save (s).
        """
        self._engine = engine
        self._words = words()
        self._run_dir = run_dir
        self._timeout_s = timeout_s
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
        self._copy = HostCopy(device)
        self._thread: threading.Thread | None = None
        self._step = 0
        """That is saved, or was last."""

    def restore(self, source: Path) -> None:
        """Load the critic's part of a checkpoint, whoever saved it.

        Raises:
            CheckpointError: it cannot be read.
        """
        load_shards(self._engine, source / CRITIC, group=self._group)

    def begin(self, step: int) -> None:
        """Begin to save the state as it is now: after `step`.

        Raises:
            CheckpointError: an earlier save does not end.
        """
        self.wait()
        state = self._copy.begin(self._engine.state_dict())
        self._step = step
        self._thread = threading.Thread(target=self._write, args=(step, state), name="checkpoint", daemon=True)
        self._thread.start()

    def before_update(self) -> float:
        """Wait until the state may change."""
        self._copy.wait()
        return 0.0

    def wait(self) -> None:
        """Wait until the last save is written, or has failed.

        Raises:
            CheckpointError: it does not end; its thread may still read the copy, so another save cannot begin.
        """
        if self._thread is None:
            return
        self._thread.join(self._timeout_s)
        if self._thread.is_alive():
            raise CheckpointError(
                f"the critic's part of the checkpoint of step {self._step} is not written after {self._timeout_s:g} s "
                f"(checkpoint.timeout_s); look whether the file system answers"
            )
        self._thread = None

    def close(self) -> None:
        """Let go of the copy's thread; idempotent."""
        self._copy.close()

    def _write(self, step: int, state: dict[str, Any]) -> None:
        try:
            self._save(step, state)
        except Exception:  # the boundary of a thread: a rank is gone, or the actor; both are noticed elsewhere
            logger.exception("the critic's part of step %d is not saved", step)

    def _save(self, step: int, state: dict[str, Any]) -> None:
        files: dict[str, tuple[int, str]] = {}
        error = ""
        try:
            files = self._shards(step, state)
        except (Exception, dcp.CheckpointException) as failure:  # the boundary of a thread; the second is no Exception
            expected = isinstance(failure, (AsyncFlowError, OSError))
            logger.warning("the critic's part of step %d", step, exc_info=None if expected else failure)
            error = f"rank {dist.get_rank()}: {one_line(failure)}"
        parts = gather([files, error], device=_CPU, group=self._group)
        if dist.get_rank() == 0:
            merged = {name: tuple(entry) for found, _ in parts for name, entry in found.items()}
            self._words.give_files(step, merged, next((why for _, why in parts if why), ""))

    def _shards(self, step: int, state: dict[str, Any]) -> dict[str, tuple[int, str]]:
        self._copy.wait()
        if not self._words.begun(step, timeout_s=self._timeout_s):
            return {}
        work = beside(checkpoint_path(self._run_dir, step))
        save_shards(state, work / CRITIC, group=self._group)
        own = describe(work, own_shards(work, CRITIC, dist.get_rank()))
        return {name: (entry.num_bytes, entry.xxh3) for name, entry in own.items()}
