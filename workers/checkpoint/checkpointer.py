"""Saves the actor while it trains on, and restores it. One object per rank; all do the same at the same steps.

    training      step 20 -> begin(20) -> step 21: forward, backward -> before_update() -> update -> ...
                    |        copies of the state begin |                waits for the copies
    saving thread   |        '-- queue's samples, shards, checksums ... into place; older ones go
    step 40 -> begin(40): waits until 20 is written, then the same again

So training is held up while the copy begins, by what is left of it when the weights are about to change, and by a save
that is still being written when the next is due. A save that fails costs a warning: what was there stays, and the next
one is tried in its turn. The directory is described in `asyncflow.run_files`.
"""

import logging
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from asyncflow.device import rng_states, set_rng_states
from asyncflow.errors import CheckpointError
from asyncflow.run_files import CRITIC, DCP, RNG, CheckpointMeta
from asyncflow.timeline import NoTimeline, Spans
from workers.checkpoint.directory import CheckpointDirectory
from workers.checkpoint.saved_shards import HostCopy, SavedEngine, load_shards
from workers.checkpoint.writer import CheckpointWriter, Contents, RunFacts
from workers.settings.run import CheckpointConfig

logger = logging.getLogger(__name__)

_LOOK_S = 1.0


def _parts(engine: SavedEngine, critic: SavedEngine | None) -> dict[str, SavedEngine]:
    return {DCP: engine} if critic is None else {DCP: engine, CRITIC: critic}


class Checkpointer:
    """One rank of the actor; constructed, and called, by all of them together."""

    def __init__(
        self,
        run_dir: Path,
        config: CheckpointConfig,
        *,
        facts: RunFacts,
        device: torch.device,
        restored_from: Path | None = None,
        timeline: Spans | None = None,
        waits: Callable[[], None] = lambda: None,
        warn: Callable[[str], None] = logger.warning,
    ) -> None:
        """Remove what an interrupted save or removal left.

        Args:
            config: what is kept, and the deadline of a save.
            device: that holds the state.
            restored_from: checkpoint that the run goes on from; stays.
            timeline: records spans.
            waits: is called every second while training waits for a save.
            warn: is told, in the saving thread, that a save failed, and with "" that one succeeded after that.
        """
        self._config = config
        self._device = device
        self._timeline = timeline or NoTimeline()
        self._waits = waits
        self._warn = warn
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=config.timeout_s))
        directory = CheckpointDirectory(run_dir, config, restored_from=restored_from)
        if dist.get_rank() == 0:
            directory.clean()
        self._writer = CheckpointWriter(directory, facts, group=self._group, timeout_s=config.timeout_s)
        self._copy = HostCopy(device)
        self._thread: threading.Thread | None = None
        self._step = 0
        self._stalled_s = 0.0
        self.saved_step = 0
        """Newest step that was saved, or restored; 0: there is none."""
        self.failure: CheckpointError | None = None
        """Why the last save failed; None: it did not."""
        self.num_failures = 0
        """Saves that failed."""

    @property
    def busy(self) -> bool:
        """Whether a save is being written."""
        return self._thread is not None and self._thread.is_alive()

    def begin(self, engine: SavedEngine, step: int, rest: Contents, *, critic: SavedEngine | None = None) -> None:
        """Begin to save the state after `step`, as it is now.

        Args:
            engine: whose state it is; it may compute on, and must not update before `before_update` was called.
            critic: that the same ranks train; so must it not.
            step: that was completed last.
            rest: what rank 0 adds.

        Raises:
            CheckpointError: an earlier save does not end.
        """
        self.wait()
        began = time.monotonic()
        with self._timeline.span("checkpoint", step=step):
            state = self._copy.begin({name: one.state_dict() for name, one in _parts(engine, critic).items()})
            self._step = step
            self._thread = threading.Thread(
                target=self._write, args=(step, state, rng_states(self._device), rest), name="checkpoint", daemon=True
            )
            self._thread.start()
        self._stalled_s += time.monotonic() - began

    def before_update(self) -> None:
        """Wait until the state may change."""
        began = time.monotonic()
        self._copy.wait()
        self._stalled_s += time.monotonic() - began

    def wait(self) -> None:
        """Wait until the last save is written, or has failed: see `failure`.

        Raises:
            CheckpointError: it does not end.
        """
        if self._thread is None:
            return
        began = time.monotonic()
        if self.busy:
            with self._timeline.span("wait for checkpoint", step=self._step):
                self._join(self._thread)
        self._thread = None
        self._stalled_s += time.monotonic() - began

    def take_stalled_s(self) -> float:
        """Return for how long saving held training up since the last call (s)."""
        stalled_s, self._stalled_s = self._stalled_s, 0.0
        return stalled_s

    def restore(
        self, engine: SavedEngine, source: Path, *, seed: int, critic: SavedEngine | None = None
    ) -> CheckpointMeta:
        """Load a checkpoint into the engine, and the critic that the same ranks train; returns what it is.

        As many ranks as saved it go on with their own random numbers; another number begins new ones, by seed, step
        and rank.

        Raises:
            CheckpointError: it cannot be read.
        """
        try:
            meta = CheckpointMeta.read(source)
            for name, one in _parts(engine, critic).items():
                load_shards(one, source / name, group=self._group)
            same_ranks = meta.num_ranks == dist.get_world_size()
            rng = load_file(source / RNG / f"rank_{dist.get_rank()}.safetensors") if same_ranks else {}
        except (OSError, ValueError, RuntimeError, SafetensorError, dcp.CheckpointException) as error:
            raise CheckpointError(f"checkpoint {source}: cannot be read ({error}); resume from an older one") from error
        self.saved_step = meta.step
        if rng:
            set_rng_states(rng, self._device)
        else:
            torch.manual_seed(int(np.random.SeedSequence([seed, meta.step, dist.get_rank()]).generate_state(1)[0]))
        return meta

    def close(self) -> None:
        """End the copy's thread; idempotent."""
        self._copy.close()

    def _join(self, thread: threading.Thread) -> None:
        deadline = time.monotonic() + self._config.timeout_s
        while thread.is_alive():
            self._waits()
            thread.join(max(0.0, min(_LOOK_S, deadline - time.monotonic())))
            if thread.is_alive() and time.monotonic() >= deadline:
                raise CheckpointError(
                    f"the checkpoint of step {self._step} is not written after {self._config.timeout_s:g} s "
                    f"(checkpoint.timeout_s); look whether the file system answers"
                )

    def _write(self, step: int, state: dict[str, Any], rng: dict[str, Tensor], rest: Contents) -> None:
        def copied() -> dict[str, Any]:
            self._copy.wait()
            return state

        try:
            with self._timeline.span("write checkpoint", step=step):
                self._writer.write(step, copied, num_bytes=self._copy.num_bytes, rng=rng, rest=rest)
        except CheckpointError as error:
            self._failed(error)
        except Exception as error:  # the boundary of a thread
            logger.exception("saving step %d", step)
            self._failed(CheckpointError(f"checkpoint of step {step}: {type(error).__name__}: {error}"))
        else:
            if self.failure is not None:
                self._warn("")
            self.failure, self.saved_step = None, step

    def _failed(self, error: CheckpointError) -> None:
        self.failure = error
        self.num_failures += 1
        newest = f"its newest checkpoint is of step {self.saved_step}" if self.saved_step else "it has no checkpoint"
        self._warn(f"{error}; the run goes on, {newest}")
