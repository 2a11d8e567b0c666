"""The `checkpoints/` of a run during writing: beside, into place, pruned. Only one process calls it: actor rank 0.

.step_000020.tmp --complete--> step_000020 --newer ones came--> .step_000020.tmp --> gone
         '--discard--> gone                     '--kept: newest, `keep_every`, the one that the run resumed from

A directory that is being written or removed has a hidden name, so a crash leaves nothing that looks like a checkpoint.
"""

import errno
import logging
import os
import shutil
from collections.abc import Collection
from pathlib import Path

from asyncflow.checkpoint_files import HALF_EXPORT, sync_tree
from asyncflow.json_lines import sync
from asyncflow.run_files import CHECKPOINTS, checkpoint_path, list_checkpoints
from workers.settings.run import CheckpointConfig

logger = logging.getLogger(__name__)

# Left free for metrics, ledger and logs, which are written at the same time.
_RESERVE_BYTES = 2**24


def beside(checkpoint: Path) -> Path:
    """Return where a checkpoint is while it is incomplete or being removed."""
    return checkpoint.with_name(f".{checkpoint.name}.tmp")


def prunable(steps: Collection[int], *, keep_last: int, keep_every: int, in_use: Collection[int]) -> list[int]:
    """Return the steps whose checkpoints to remove: not the `keep_last` newest, multiples of `keep_every` (0: none), or
    `in_use`."""
    newest = sorted(steps)[-keep_last:]
    return [
        step
        for step in sorted(steps)
        if step not in newest and step not in in_use and not (keep_every and step % keep_every == 0)
    ]


class CheckpointDirectory:
    """The directory that checkpoints are written to and renamed in. `restored_from`, which the run resumed from, is
    never removed, because restarted processes still read it."""

    def __init__(self, run_dir: Path, config: CheckpointConfig, *, restored_from: Path | None) -> None:
        self._run_dir = run_dir
        self._root = run_dir / CHECKPOINTS
        self._config = config
        self._restored_from = restored_from

    def path(self, step: int) -> Path:
        return checkpoint_path(self._run_dir, step)

    def clean_leftovers(self) -> None:
        for pattern in (".step_*.tmp", f"step_*/{HALF_EXPORT}*"):
            for directory in self._root.glob(pattern):
                shutil.rmtree(directory, ignore_errors=True)

    def begin(self, step: int, *, num_bytes: int) -> None:
        """Make the directory that a save of at least `num_bytes` writes into. Raises OSError if the file system
        refuses, or has less room; then nothing is written, which leaves the rest to the run's other files."""
        self._root.mkdir(exist_ok=True)
        target = beside(self.path(step))
        shutil.rmtree(target, ignore_errors=True)
        needed = num_bytes + _RESERVE_BYTES
        if self.free_bytes() < needed:
            raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)}: {needed / 1e6:.0f} MB are needed")
        target.mkdir()

    def complete_save(self, step: int) -> None:
        """Make what was written durable and visible, atomically. Raises OSError, with nothing visible, if the file
        system refuses."""
        target = self.path(step)
        written = beside(target)
        sync_tree(written)
        former = None
        if target.exists():  # from before the run went back and trained this step again
            # Hide it first: half of it must not be there under its name.
            former = target.rename(target.with_name(f".{target.name}.former.tmp"))
        written.rename(target)
        sync(self._root)
        if former is not None:
            shutil.rmtree(former, ignore_errors=True)

    def discard_save(self, step: int) -> None:
        shutil.rmtree(beside(self.path(step)), ignore_errors=True)

    def free_bytes(self) -> int:
        return shutil.disk_usage(self._root).free

    def prune_checkpoints(self) -> None:
        """Remove what is not to be kept; a checkpoint that cannot be removed costs a line."""
        paths = list_checkpoints(self._run_dir)
        in_use = [step for step, path in paths.items() if path == self._restored_from]
        keep = self._config
        for step in prunable(paths, keep_last=keep.keep_last, keep_every=keep.keep_every, in_use=in_use):
            try:
                # Hide it first: a crash during removal must not leave a partial checkpoint.
                shutil.rmtree(paths[step].rename(beside(paths[step])), ignore_errors=True)
            except OSError as error:
                logger.warning("checkpoint %s cannot be removed: %s", paths[step], error)
