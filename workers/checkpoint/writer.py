"""Writes one checkpoint: shards from every rank, the rest from rank 0. Collective, in the saving thread beside
training.

    all     bytes needed -> [rank 0: room? reference/, queue/] -> dcp/ -> rng/, own checksums
    rank 0  config.yaml -> ledger durable -> meta.json -> into place
    all     own bytes of .hf.tmp/ -> [rank 0: hf/, meta.json] -> [rank 0: remove older ones]

The checkpoint counts before its export begins, so a run that is stopped or dies while it writes `hf/` loses no step.
After each part the ranks agree whether all of them succeeded, so a save fails on all ranks or on none, and no rank
waits for one that gave up. These collectives use the saving thread's own group: training uses the default group.
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

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from asyncflow.checkpoint_files import (
    CRITIC,
    DCP,
    HALF_EXPORT,
    QUEUE,
    REFERENCE,
    RNG,
    CheckpointMeta,
    FileEntry,
    add_export,
    describe,
    files_below,
)
from asyncflow.device import rng_states, seed_rank, set_rng_states
from asyncflow.errors import AsyncFlowError, CheckpointError, one_line
from asyncflow.json_lines import DISK_FULL, sync
from asyncflow.timeline import NoTimeline, Spans
from workers.checkpoint.checkpoint_directory import CheckpointDirectory, beside
from workers.checkpoint.saved_shards import ExportShare, HostCopy, SavedEngine, load_shards, own_shards, save_shards
from workers.rank.actor_critic_channel import ActorCriticChannel
from workers.rank.peers import gather
from workers.settings.run import CheckpointConfig

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunFacts:
    """What `meta.json` says beside the step."""

    # See `CheckpointMeta` for all but `config`
    lineage: int
    model_fingerprint: str
    data_hash: str
    config: Path  # File of the resolved configuration
    tokenizer_files: Mapping[str, str] = field(default_factory=dict)
    weights_fingerprint: str = ""
    scoring_weights: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Contents:
    """What rank 0 adds to the shards. The saving thread makes all of these calls."""

    # Makes ledger and metrics up to the step durable, before the checkpoint becomes visible
    make_durable: Callable[[], None]
    # Writes the queue's finished samples into a directory; None: do not keep them
    snapshot: Callable[[Path], object] | None = None
    reference: Path | None = None  # Directory of reference weights to include
    # Channel to a critic in a role of its own, which writes its part into the same work directory
    critic: ActorCriticChannel | None = None
    saved: Callable[[], None] = lambda: None  # Called once the checkpoint is in place


# (target, saved state, share) -> whether this rank's share of the Hugging Face directory was written, or was stopped
Export = Callable[[Path, Path, ExportShare], bool]


class CheckpointWriter:
    def __init__(
        self, directory: CheckpointDirectory, facts: RunFacts, *, group: dist.ProcessGroup, timeout_s: float
    ) -> None:
        # CRC32 takes half the CPU time of writing, and every file gets a checksum of our own (xxh3) anyway.
        torch.serialization.set_crc32_options(False)
        self._directory = directory
        self._facts = facts
        self._group = group
        self._timeout_s = timeout_s
        self._rank = dist.get_rank(group)

    def write(
        self, step: int, copied: Callable[[], dict[str, Any]], *, num_bytes: int, rng: dict[str, Tensor], rest: Contents
    ) -> None:
        """Write the checkpoint of `step`, the last completed step. Raises CheckpointError if a rank failed its part;
        nothing of the save is left then.

        Args:
            copied: waits for the copies of this rank's states and returns them, keyed by directory.
            num_bytes: size of this rank's states.
        """
        target = self._directory.path(step)
        work = beside(target)
        try:
            sizes = self._gather_parts(target, lambda: num_bytes)
            self._first_rank(target, partial(self._begin_save, step, sum(sizes), rest))
            names = self._gather_parts(target, partial(self._write_shards, work, copied))[0]
            parts = self._gather_parts(target, partial(self._write_own, work, rng, names))
            files = {name: entry for part in parts for name, entry in part.items()}
            self._first_rank(target, partial(self._complete_save, step, files, rest))
        except CheckpointError:
            if self._rank == 0:
                if rest.critic is not None:
                    rest.critic.send_begun(step, begun=False)  # it may still wait to write its part
                self._directory.discard_save(step)
            raise
        if self._rank == 0:
            self._tell_queue(rest)

    def write_export(self, checkpoint: Path, export: Export, *, stop: Callable[[], bool]) -> bool:
        """Add `hf/` to a checkpoint that is in place. Returns False if `stop` said so on any rank; nothing is left of
        the export then. Raises CheckpointError if a rank failed its part."""
        work = checkpoint / HALF_EXPORT
        share = ExportShare(self._rank, dist.get_world_size(self._group), stop)
        try:
            self._first_rank(checkpoint, partial(_make_anew, work))
            written = self._gather_parts(checkpoint, lambda: export(work, checkpoint / DCP, share))
            if not all(written):
                self._first_rank(checkpoint, partial(shutil.rmtree, work, ignore_errors=True))
                return False
            # Rank 0 lists them: another node may not see the newest files yet.
            names = self._gather_parts(checkpoint, lambda: files_below(work) if self._rank == 0 else [])[0]
            parts = self._gather_parts(checkpoint, partial(self._describe_share, work, names))
            files = {name: FileEntry(*entry) for part in parts for name, entry in part.items()}
            self._first_rank(checkpoint, partial(add_export, checkpoint, work, files))
        except CheckpointError:
            if self._rank == 0:
                shutil.rmtree(work, ignore_errors=True)
            raise
        return True

    def prune_checkpoints(self) -> None:
        if self._rank == 0:
            self._directory.prune_checkpoints()

    def checkpoint_of(self, step: int) -> Path:
        return self._directory.path(step)

    def _describe_share(self, work: Path, names: list[str]) -> dict[str, tuple[int, str]]:
        """Return this rank's share of the checksums."""
        own = names[self._rank :: dist.get_world_size(self._group)]
        return {name: (entry.num_bytes, entry.xxh3) for name, entry in describe(work, own).items()}

    def _begin_save(self, step: int, num_bytes: int, rest: Contents) -> None:
        """Make room, then take what must not wait: references get replaced, and trained rows leave the queue."""
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
            logger.warning("checkpoint of step %d lacks the queue's finished samples: %s", step, error)

    def _write_shards(self, work: Path, copied: Callable[[], dict[str, Any]]) -> list[str]:
        states = copied()
        for name, state in states.items():
            save_shards(state, work / name, group=self._group)
        return list(states)

    def _write_own(self, work: Path, rng: dict[str, Tensor], parts: list[str]) -> dict[str, tuple[int, str]]:
        (work / RNG).mkdir(exist_ok=True)
        own = f"{RNG}/rank_{self._rank}.safetensors"
        save_file(rng, work / own)
        sync(work / own)
        names = [own, *(name for part in parts for name in own_shards(work, part, self._rank))]
        return {name: (entry.num_bytes, entry.xxh3) for name, entry in describe(work, names).items()}

    def _complete_save(self, step: int, files: dict[str, tuple[int, str]], rest: Contents) -> None:
        work = beside(self._directory.path(step))
        shutil.copyfile(self._facts.config, work / self._facts.config.name)
        if rest.critic is not None:
            files |= rest.critic.recv_files(step, timeout_s=self._timeout_s)
        # `meta.json` makes the checkpoint valid, so the ledger up to its step must be durable before it is written.
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
            weights_fingerprint=self._facts.weights_fingerprint,
            scoring_weights=dict(self._facts.scoring_weights),
            num_ranks=dist.get_world_size(self._group),
            saved_at=time.time(),
            files=dict(sorted(entries.items())),
        ).write(work)
        self._directory.complete_save(step)

    def _tell_queue(self, rest: Contents) -> None:
        try:
            rest.saved()
        except AsyncFlowError as error:  # the next checkpoint's release covers this one
            logger.warning("the queue was not told of a checkpoint: %s", error)

    def _first_rank(self, target: Path, part: Callable[[], None]) -> None:
        self._gather_parts(target, part if self._rank == 0 else lambda: None)

    def _gather_parts(self, target: Path, part: Callable[[], Any]) -> list[Any]:
        """Do this rank's part; returns the results of all ranks, or raises CheckpointError on all of them."""
        try:
            mine = [part(), ""]
        except (Exception, dcp.CheckpointException) as error:  # others wait for us; dcp's is a BaseException
            expected = isinstance(error, OSError)
            logger.warning("checkpoint %s: rank %d gives up", target, self._rank, exc_info=None if expected else error)
            mine = [None, self._describe_error(error)]
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

    def _describe_error(self, error: BaseException) -> str:
        """Return one line. PyTorch's message holds every rank's traceback and does not say that a disk is full."""
        rank = self._rank
        if isinstance(error, dcp.CheckpointException):
            rank, (error, _) = next(iter(error.failures.items()))
        remedy = ": make room" if isinstance(error, OSError) and error.errno in DISK_FULL else ""
        try:
            free = f"; {self._directory.free_bytes() / 1e6:.0f} MB are free there"
        except OSError:
            free = ""
        return f"rank {rank}: {one_line(error)}{free}{remedy}"


def _make_anew(directory: Path) -> None:
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir()


def _link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system
        shutil.copy2(source, target)


# Saves the actor while it trains on, and restores it. One object per rank; all act alike at the same steps.
#
#     training      step 20 -> begin(20) -> step 21: forward, backward -> before_update() -> update -> ...
#                     |        copies of the state begin |                waits for the copies
#     saving thread   |        '-- queue's samples, shards, checksums ... into place -> hf/; older ones are removed
#     step 40 -> begin(40): waits until 20 is written, then the same again
#
# So saving delays training in three places: while the copy begins, until the copy is complete before the weights
# change, and while a save is still being written when the next is due. A failed save costs only a warning: older
# checkpoints stay, and the next save is tried when due. `asyncflow.checkpoint_files` describes the directory.
#
# Once the run is stopping, no rank begins a piece of `hf/` any more: the checkpoint stays without it, as a warning
# says. A start that continues from such a checkpoint adds it beside training.

_LOOK_S = 1.0


def _parts(engine: SavedEngine, critic: SavedEngine | None) -> dict[str, SavedEngine]:
    return {DCP: engine} if critic is None else {DCP: engine, CRITIC: critic}


class Checkpointer:
    """Saves and restores one rank of the actor; all ranks construct and call it together.

    The constructor removes what an interrupted save or removal left behind. `waits` is called every second while
    training waits for a save; `warn`, in the saving thread, when a save fails, and with "" when one succeeds after a
    failure. `export` writes `hf/` (None: no export), until `stopping` is true.
    """

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
        export: Export | None = None,
        stopping: Callable[[], bool] = lambda: False,
    ) -> None:
        self._config = config
        self._export = export
        self._stopping = stopping
        self._device = device
        self._timeline = timeline or NoTimeline()
        self._waits = waits
        self._warn = warn
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=config.timeout_s))
        directory = CheckpointDirectory(run_dir, config, restored_from=restored_from)
        if dist.get_rank() == 0:
            directory.clean_leftovers()
        self._writer = CheckpointWriter(directory, facts, group=self._group, timeout_s=config.timeout_s)
        self._copy = HostCopy(device)
        self._thread: threading.Thread | None = None
        self._export_is_late = threading.Event()
        self._step = 0
        self._stalled_s = 0.0
        self._warned = False
        # Newest step that was saved or restored; 0: none.
        self.saved_step = 0
        # Why the last save failed; None: it succeeded.
        self.failure: CheckpointError | None = None
        self.num_failures = 0

    @property
    def busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def begin(self, engine: SavedEngine, step: int, rest: Contents, *, critic: SavedEngine | None = None) -> None:
        """Begin to save the current state: the one after `step`, the last completed step. Raises CheckpointError if an
        earlier save is still not written after `checkpoint.timeout_s`.

        Engine and critic, which the same ranks train, may keep computing, but not update before `before_update`
        returned.
        """
        self.wait()
        began = time.monotonic()
        with self._timeline.span("checkpoint", step=step):
            state = self._copy.begin({name: one.state_dict() for name, one in _parts(engine, critic).items()})
            self._step = step
            self._start_thread(partial(self._write_checkpoint, step, state, rng_states(self._device), rest))
        self._stalled_s += time.monotonic() - began

    def before_update(self) -> None:
        """Wait until the state is copied and may change."""
        began = time.monotonic()
        self._copy.wait()
        self._stalled_s += time.monotonic() - began

    def wait(self) -> None:
        """Wait until the last save is written or has failed (see `failure`). Raises CheckpointError at the deadline; an
        export that is late then is left out."""
        if self._thread is None:
            return
        began = time.monotonic()
        if self.busy:
            with self._timeline.span("wait for checkpoint", step=self._step):
                self._join_thread(self._thread)
        self._thread = None
        self._stalled_s += time.monotonic() - began

    def take_stalled_s(self) -> float:
        """Return how long saving held up training since the last call (s)."""
        stalled_s, self._stalled_s = self._stalled_s, 0.0
        return stalled_s

    def restore_checkpoint(
        self, engine: SavedEngine, source: Path, *, seed: int, critic: SavedEngine | None = None
    ) -> CheckpointMeta:
        """Load a checkpoint into engine and critic; returns its metadata. Raises CheckpointError if it cannot be read.

        The ranks continue with their saved random states if there are as many as saved them. Otherwise they start new
        ones, seeded by seed, step and rank. If the checkpoint lacks its export, it is written from here on, beside
        training.
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
            seed_rank(seed, meta.step, dist.get_rank())
        if self._export is not None and not meta.has_export:
            self._step = meta.step
            self._start_thread(partial(self._write_export, source, meta.step))
        return meta

    def close(self) -> None:
        self._copy.close()

    def _start_thread(self, work: Callable[[], None]) -> None:
        self._export_is_late.clear()
        self._thread = threading.Thread(target=work, name="checkpoint", daemon=True)
        self._thread.start()

    def _join_thread(self, thread: threading.Thread) -> None:
        deadline = time.monotonic() + self._config.timeout_s
        while thread.is_alive():
            self._waits()
            thread.join(max(0.0, min(_LOOK_S, deadline - time.monotonic())))
            if not thread.is_alive() or time.monotonic() < deadline:
                continue
            if self.saved_step == self._step and not self._export_is_late.is_set():
                # Only `hf/` is missing; it has as long again to come to the end of a piece.
                self._export_is_late.set()
                deadline += self._config.timeout_s
            else:
                raise CheckpointError(
                    f"the checkpoint of step {self._step} is not written after {self._config.timeout_s:g} s "
                    f"(checkpoint.timeout_s); check whether the file system responds"
                )

    def _write_checkpoint(self, step: int, state: dict[str, Any], rng: dict[str, Tensor], rest: Contents) -> None:
        def copied() -> dict[str, Any]:
            self._copy.wait()
            return state

        try:
            with self._timeline.span("write checkpoint", step=step):
                self._writer.write(step, copied, num_bytes=self._copy.num_bytes, rng=rng, rest=rest)
        except CheckpointError as error:
            self._record_failure(error)
        except Exception as error:  # thread boundary: the failure must reach `failure`
            logger.exception("saving step %d failed", step)
            self._record_failure(CheckpointError(f"checkpoint of step {step}: {type(error).__name__}: {error}"))
        else:
            self.failure, self.saved_step = None, step
            if self._warned:  # and it is over
                self._warned = False
                self._warn("")
            if self._export is not None:
                self._write_export(self._writer.checkpoint_of(step), step)
            self._writer.prune_checkpoints()

    def _write_export(self, checkpoint: Path, step: int) -> None:
        """Add the Hugging Face export; the checkpoint is good without it, so a failure is only told."""
        assert self._export is not None
        try:
            with self._timeline.span("write export", step=step):
                if self._writer.write_export(
                    checkpoint, self._export, stop=lambda: self._stopping() or self._export_is_late.is_set()
                ):
                    return
                late = f"training waited for it for {self._config.timeout_s:g} s, checkpoint.timeout_s"
                why = late if self._export_is_late.is_set() else "the run was stopped"
        except CheckpointError as error:
            why = str(error)
        except Exception as error:  # thread boundary
            logger.exception("the export of step %d failed", step)
            why = f"{type(error).__name__}: {error}"
        self._tell_user(
            f"the checkpoint of step {step} has no hf/ ({why}); a resume adds it, or `asyncflow export {checkpoint}`"
        )

    def _record_failure(self, error: CheckpointError) -> None:
        self.failure = error
        self.num_failures += 1
        newest = f"its newest checkpoint is of step {self.saved_step}" if self.saved_step else "it has no checkpoint"
        self._tell_user(f"{error}; the run goes on, {newest}")

    def _tell_user(self, text: str) -> None:
        self._warned = True
        self._warn(text)
