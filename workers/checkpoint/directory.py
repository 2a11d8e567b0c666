"""The `checkpoints/` of a run while it is written: beside, into place, pruned. One process calls it: actor rank 0.

.step_000020.tmp --complete--> step_000020 --newer ones came--> .step_000020.tmp --> gone
         '--discard--> gone                     '--kept: newest, `keep_every`, the one that the run went on from

A directory that is being written or removed has a hidden name, so a crash leaves nothing that looks like a checkpoint.
"""

import errno
import logging
import os
import shutil
from collections.abc import Collection
from pathlib import Path

from asyncflow.json_lines import sync
from asyncflow.run_files import CHECKPOINTS, checkpoint_path, list_checkpoints, sync_tree
from workers.settings.run import CheckpointConfig

logger = logging.getLogger(__name__)

_RESERVE_BYTES = 2**24
"""Left to others: metrics, ledger and logs are written meanwhile."""


def beside(checkpoint: Path) -> Path:
    """Return where a checkpoint lies while it is not, or no longer, complete."""
    return checkpoint.with_name(f".{checkpoint.name}.tmp")


def prunable(steps: Collection[int], *, keep_last: int, keep_every: int, in_use: Collection[int]) -> list[int]:
    """Return the steps whose checkpoints go.

    Args:
        steps: that have one.
        keep_last: so many of the newest stay.
        keep_every: those of its multiples stay; 0: none for that.
        in_use: others that stay.
    """
    newest = sorted(steps)[-keep_last:]
    return [
        step
        for step in sorted(steps)
        if step not in newest and step not in in_use and not (keep_every and step % keep_every == 0)
    ]


class CheckpointDirectory:
    """The directory that checkpoints are written to and renamed in."""

    def __init__(self, run_dir: Path, config: CheckpointConfig, *, restored_from: Path | None) -> None:
        """Args:
        config: what is kept.
        restored_from: the checkpoint that the run went on from: processes that start again still read it.
        """
        self._run_dir = run_dir
        self._root = run_dir / CHECKPOINTS
        self._config = config
        self._restored_from = restored_from

    def path(self, step: int) -> Path:
        """Return where a complete checkpoint lies."""
        return checkpoint_path(self._run_dir, step)

    def clean(self) -> None:
        """Remove what an interrupted save or removal left."""
        for directory in self._root.glob(".step_*.tmp"):
            shutil.rmtree(directory, ignore_errors=True)

    def begin(self, step: int, *, num_bytes: int) -> None:
        """Make the directory that a save is written into.

        Args:
            step: of the checkpoint.
            num_bytes: that it needs at least. Where there is less room nothing is written, so that other files of the
                run keep the rest.

        Raises:
            OSError: no room, or the file system refuses.
        """
        self._root.mkdir(exist_ok=True)
        target = beside(self.path(step))
        shutil.rmtree(target, ignore_errors=True)
        needed = num_bytes + _RESERVE_BYTES
        if self.free_bytes() < needed:
            raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)}: {needed / 1e6:.0f} MB are needed")
        target.mkdir()

    def complete(self, step: int) -> None:
        """Make what was written durable and visible, as one step; older checkpoints may go.

        Raises:
            OSError: the file system refuses; nothing is visible.
        """
        target = self.path(step)
        written = beside(target)
        sync_tree(written)
        if target.exists():  # of a step that is trained again
            shutil.rmtree(target)
        written.rename(target)
        sync(self._root)
        self._prune()

    def discard(self, step: int) -> None:
        """Remove what was written of a save that failed."""
        shutil.rmtree(beside(self.path(step)), ignore_errors=True)

    def free_bytes(self) -> int:
        """Return what is free on the file system."""
        return shutil.disk_usage(self._root).free

    def _prune(self) -> None:
        paths = list_checkpoints(self._run_dir)
        in_use = [step for step, path in paths.items() if path == self._restored_from]
        keep = self._config
        for step in prunable(paths, keep_last=keep.keep_last, keep_every=keep.keep_every, in_use=in_use):
            try:
                shutil.rmtree(paths[step].rename(beside(paths[step])), ignore_errors=True)
            except OSError as error:
                logger.warning("checkpoint %s cannot be removed: %s", paths[step], error)
