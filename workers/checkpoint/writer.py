"""Writes one checkpoint: every rank its shards, rank 0 the rest. Collective, in the thread that saves, beside training.

    all     bytes needed -> [rank 0: room? reference/, queue/] -> dcp/ -> rng/, own checksums
    rank 0  config.yaml, hf/ -> ledger durable -> meta.json -> into place -> older ones go

After each part the ranks agree whether all could do theirs: a save fails on all of them or on none, and no rank
waits for one that gave up. Collectives go over a group of the saving thread's own; training uses the default one.
"""

import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from asyncflow.device import rng_states, set_rng_states
from asyncflow.errors import AsyncFlowError, CheckpointError, one_line
from asyncflow.json_lines import DISK_FULL, sync
from asyncflow.run_files import (
    CRITIC,
    DCP,
    HF,
    QUEUE,
    REFERENCE,
    RNG,
    CheckpointMeta,
    FileEntry,
    describe,
    files_below,
)
from asyncflow.timeline import NoTimeline, Spans
from workers.checkpoint.directory import CheckpointDirectory, beside
from workers.checkpoint.saved_shards import HostCopy, SavedEngine, load_shards, own_shards, save_shards
from workers.rank.actor_critic_channel import ActorCriticChannel
from workers.rank.peers import gather
from workers.settings.run import CheckpointConfig

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunFacts:
    """What `meta.json` says beside the step.

    Attributes:
        lineage, model_fingerprint, data_hash, tokenizer_files: see `CheckpointMeta`.
        config: the resolved configuration's file.
    """

    lineage: int
    model_fingerprint: str
    data_hash: str
    config: Path
    tokenizer_files: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Contents:
    """What rank 0 adds to the shards. All of it is called in the saving thread.

    Attributes:
        make_durable: makes ledger and metrics up to the step durable: before the checkpoint can be seen.
        export_hf: (target, saved state) -> writes the Hugging Face directory; None: there is none.
        snapshot: writes the queue's finished samples into a directory; None: they are not kept.
        reference: directory of weights that belongs to it, too.
        critic: leads to a critic in a role of its own, which writes its part beside the checkpoint.
        saved: is called when the checkpoint is in place.
    """

    make_durable: Callable[[], None]
    export_hf: Callable[[Path, Path], None] | None = None
    snapshot: Callable[[Path], object] | None = None
    reference: Path | None = None
    critic: ActorCriticChannel | None = None
    saved: Callable[[], None] = lambda: None


class CheckpointWriter:
    """One rank's part."""

    def __init__(
        self, directory: CheckpointDirectory, facts: RunFacts, *, group: dist.ProcessGroup, timeout_s: float
    ) -> None:
        """Args:
        directory: of the run's checkpoints.
        group: of all ranks, over the CPU, for this thread alone.
        timeout_s: how long a critic may take to write its part (s).
        """
        # Half the processor time of writing; what is written has a checksum of our own.
        torch.serialization.set_crc32_options(False)
        self._directory = directory
        self._facts = facts
        self._group = group
        self._timeout_s = timeout_s
        self._rank = dist.get_rank(group)

    def write(
        self, step: int, copied: Callable[[], dict[str, Any]], *, num_bytes: int, rng: dict[str, Tensor], rest: Contents
    ) -> None:
        """Write the checkpoint of a step.

        Args:
            step: that was completed last.
            copied: waits for the copies of this rank's states and returns them, by their directories.
            rng: states of this rank's random number generators.
            rest: what rank 0 adds.

        Raises:
            CheckpointError: a rank could not do its part; nothing is left of the save.
        """
        target = self._directory.path(step)
        work = beside(target)
        try:
            sizes = self._together(target, lambda: num_bytes)
            self._first_rank(target, partial(self._begin, step, sum(sizes), rest))
            names = self._together(target, partial(self._write_shards, work, copied))[0]
            parts = self._together(target, partial(self._write_own, work, rng, names))
            files = {name: entry for part in parts for name, entry in part.items()}
            self._first_rank(target, partial(self._complete, step, files, rest))
        except CheckpointError:
            if self._rank == 0:
                if rest.critic is not None:
                    rest.critic.send_begun(step, begun=False)
                self._directory.discard(step)
            raise
        if self._rank == 0:
            self._tell(rest)

    def _begin(self, step: int, num_bytes: int, rest: Contents) -> None:
        """Make room, and take what does not wait: references are replaced, and what is trained leaves the queue."""
        work = beside(self._directory.path(step))
        self._directory.begin(step, num_bytes=num_bytes)
        if rest.critic is not None:
            rest.critic.send_begun(step, begun=True)
        if rest.reference is not None:
            shutil.copytree(rest.reference, work / REFERENCE, copy_function=_link_or_copy)
        if rest.snapshot is None:
            return
        try:
            rest.snapshot(work / QUEUE)
        except (AsyncFlowError, OSError) as error:
            logger.warning("checkpoint of step %d is without the queue's finished samples: %s", step, error)

    def _write_shards(self, work: Path, copied: Callable[[], dict[str, Any]]) -> list[str]:
        """Write the states one after the other; returns their directories."""
        states = copied()
        for name, state in states.items():
            save_shards(state, work / name, group=self._group)
        return list(states)

    def _write_own(self, work: Path, rng: dict[str, Tensor], parts: list[str]) -> dict[str, tuple[int, str]]:
        """Write what belongs to this rank alone; returns checksums of all of its files."""
        (work / RNG).mkdir(exist_ok=True)
        own = f"{RNG}/rank_{self._rank}.safetensors"
        save_file(rng, work / own)
        sync(work / own)
        names = [own, *(name for part in parts for name in own_shards(work, part, self._rank))]
        return {name: (entry.num_bytes, entry.xxh3) for name, entry in describe(work, names).items()}

    def _complete(self, step: int, files: dict[str, tuple[int, str]], rest: Contents) -> None:
        work = beside(self._directory.path(step))
        shutil.copyfile(self._facts.config, work / self._facts.config.name)
        if rest.export_hf is not None:
            rest.export_hf(work / HF, work / DCP)
        if rest.critic is not None:
            files |= rest.critic.recv_files(step, timeout_s=self._timeout_s)
        rest.make_durable()
        entries = {name: FileEntry(*entry) for name, entry in files.items()}
        others = [name for name in files_below(work) if name not in entries and not name.startswith(f"{QUEUE}/")]
        entries |= describe(work, others)
        CheckpointMeta(
            step=step,
            lineage=self._facts.lineage,
            model_fingerprint=self._facts.model_fingerprint,
            data_hash=self._facts.data_hash,
            tokenizer_files=dict(self._facts.tokenizer_files),
            num_ranks=dist.get_world_size(self._group),
            saved_at=time.time(),
            files=dict(sorted(entries.items())),
        ).write(work)
        self._directory.complete(step)

    def _tell(self, rest: Contents) -> None:
        try:
            rest.saved()
        except AsyncFlowError as error:  # it will be told of the next one
            logger.warning("the queue was not told of a checkpoint: %s", error)

    def _first_rank(self, target: Path, part: Callable[[], None]) -> None:
        self._together(target, part if self._rank == 0 else lambda: None)

    def _together(self, target: Path, part: Callable[[], Any]) -> list[Any]:
        """Do this rank's part; returns what all ranks' parts returned.

        Raises:
            CheckpointError: one could not, the same on all ranks.
        """
        try:
            mine = [part(), ""]
        except (Exception, dcp.CheckpointException) as error:  # whatever it is, others wait; the second is no Exception
            expected = isinstance(error, OSError)
            logger.warning("checkpoint %s: rank %d gives up", target, self._rank, exc_info=None if expected else error)
            mine = [None, self._reason(error)]
        try:
            parts = gather(mine, group=self._group)
        except RuntimeError as error:
            raise CheckpointError(
                f"checkpoint {target}: the actor's ranks lost each other ({one_line(error)})"
            ) from error
        failed = [reason for _, reason in parts if reason]
        if failed:
            raise CheckpointError(f"checkpoint {target}: cannot be written ({failed[0]})")
        return [value for value, _ in parts]

    def _reason(self, error: BaseException) -> str:
        """Return one line; PyTorch's own has every rank's whole traceback, and does not say that a disk is full."""
        rank = self._rank
        if isinstance(error, dcp.CheckpointException):
            rank, (error, _) = next(iter(error.failures.items()))
        remedy = ": make room" if isinstance(error, OSError) and error.errno in DISK_FULL else ""
        try:
            free = f"; {self._directory.free_bytes() / 1e6:.0f} MB are free there"
        except OSError:
            free = ""
        return f"rank {rank}: {one_line(error)}{free}{remedy}"


def _link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system
        shutil.copy2(source, target)


# Saves the actor while it trains on, and restores it. One object per rank; all do the same at the same steps.
#
#     training      step 20 -> begin(20) -> step 21: forward, backward -> before_update() -> update -> ...
#                     |        copies of the state begin |                waits for the copies
#     saving thread   |        '-- queue's samples, shards, checksums ... into place; older ones go
#     step 40 -> begin(40): waits until 20 is written, then the same again
#
# So training is held up while the copy begins, by what is left of it when the weights are about to change, and by a
# save that is still being written when the next is due. A save that fails costs a warning: what was there stays, and
# the next one is tried in its turn. The directory is described in `asyncflow.run_files`.

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
