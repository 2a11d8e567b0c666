"""Writes one checkpoint: every rank its shards, rank 0 the rest. Collective, in the thread that saves, beside training.

    all     bytes needed -> [rank 0: room? reference/, queue/] -> dcp/ -> rng/, own checksums
    rank 0  config.yaml, hf/ -> ledger durable -> meta.json -> into place -> older ones go

After each part the ranks agree whether all could do theirs: a save fails on all of them or on none, and no rank
waits for one that gave up. Collectives go over a group of the saving thread's own; training uses the default one.
"""

import logging
import os
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import Tensor

from asyncflow.errors import AsyncFlowError, CheckpointError, one_line
from asyncflow.json_lines import DISK_FULL, sync
from asyncflow.run_files import (
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
from workers.checkpoint.directory import CheckpointDirectory, beside
from workers.checkpoint.saved_shards import own_shards, save_shards
from workers.rank.actor_critic_channel import ActorCriticChannel
from workers.rank.peers import gather

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
