"""One rank of the benchmark: steps of about a second, saves after some of them, ours and a synchronous one in turn."""

import logging
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from asyncflow.checkpoint_files import sync_tree
from benchmarks.checkpoint.state import SyntheticEngine
from workers.checkpoint.writer import Checkpointer, Contents, RunFacts
from workers.rank.peers import gather
from workers.settings.run import CheckpointConfig

_SIDE = 512


@dataclass(frozen=True)
class Options:
    """Of one run of the benchmark.

    Attributes:
        state_bytes: on all ranks together.
        num_ranks: of the trainer.
        rounds: saves of each kind that are measured.
        step_s: about the length of a step (s).
        directory: on the disk to measure.
    """

    state_bytes: int
    num_ranks: int
    rounds: int
    step_s: float
    directory: Path


def run_rank(rank: int, options: Options, results: Any) -> None:
    """Measure; rank 0 puts what it found into `results`: kind -> seconds of every round, the slowest rank's."""
    logging.basicConfig(level=logging.WARNING)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    store = dist.FileStore(str(options.directory / "store"), options.num_ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=options.num_ranks)
    bench = RankBench(options)
    measured: dict[str, list[float]] = {}
    for number in range(options.rounds + 1):
        for kind, value in bench.round(number).items():
            slowest = max(gather(value))
            if number:  # the first touches memory for the first time
                measured.setdefault(kind, []).append(slowest)
    bench.close()
    if rank == 0:
        results.put(measured)
    dist.barrier()
    dist.destroy_process_group()


class RankBench:
    """This rank's state, savers and work."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._engine = SyntheticEngine(options.state_bytes, options.num_ranks)
        self._warm = [torch.empty_like(tensor) for tensor in self._engine.local]
        config = options.directory / "config.yaml"
        config.touch()
        facts = RunFacts(lineage=0, model_fingerprint="", data_hash="", config=config)
        settings = CheckpointConfig(keep_last=1, export_hf=False)
        self._saver = Checkpointer(options.directory, settings, facts=facts, device=torch.device("cpu"))
        self._beside = Contents(make_durable=lambda: None)
        self._factors = torch.rand(2, _SIDE, _SIDE)
        self._products = 20
        self._step()
        self._products = max(1, round(self._products * options.step_s / _timed(self._step)))

    def round(self, number: int) -> dict[str, float]:
        """Return seconds: of a copy of the state, of a synchronous save, of what ours costs training and processors."""
        found = {"memcpy_s": _timed(self._copy)}
        self._step()
        found["sync_stall_s"] = _timed(self._save_synchronously)
        found["step_s"] = _timed(self._step)
        step = 2 * number + 1
        used = time.process_time()
        self._begin(step)
        self._saver.wait()
        found["cpu_s"] = time.process_time() - used
        self._step()
        step += 1
        self._saver.take_stalled_s()
        began = time.monotonic()
        self._begin(step)
        found["step_beside_s"] = _timed(self._step)
        found["stall_s"] = self._saver.take_stalled_s()
        self._saver.wait()
        found["written_s"] = time.monotonic() - began
        assert self._saver.saved_step == step, self._saver.failure
        return found

    def _begin(self, step: int) -> None:
        self._saver.begin(self._engine, step, self._beside)  # type: ignore[arg-type]  # no whole engine

    def close(self) -> None:
        """End threads."""
        self._saver.close()

    def _step(self) -> None:
        """Compute, and update: the state must not be read by then."""
        one, other = self._factors
        for _ in range(self._products):
            torch.mm(one, other)
        self._saver.before_update()
        self._engine.update()
        dist.barrier()

    def _copy(self) -> None:
        torch._foreach_copy_(self._warm, self._engine.local)

    def _save_synchronously(self) -> None:
        """As training would have to without a thread: every rank writes, and all wait for the slowest disk."""
        target = self._options.directory / "synchronous"
        dcp.save(self._engine.state_dict(), checkpoint_id=target)
        if dist.get_rank() == 0:
            sync_tree(target)
            shutil.rmtree(target)
        dist.barrier()


def _timed(work: Callable[[], None]) -> float:
    began = time.monotonic()
    work()
    return time.monotonic() - began
