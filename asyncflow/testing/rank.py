"""One rank of a training engine: does what the suite asks for, and writes the results.

python -m asyncflow.testing.rank MODULE:ADAPTER LAYOUT RANK ROOT

ROOT holds a model per family; results are ROOT/LAYOUT/FAMILY/rank-RANK.pt.
"""

import importlib
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.tensor.debug import CommDebugMode

from asyncflow.errors import BadRequest
from asyncflow.testing import training_samples as samples
from asyncflow.testing.train_adapter import TrainAdapter
from workers.checkpoint.saved_shards import ExportShare
from workers.engines.base import RankedExportEngine, SleepingTrainer, TrainEngine
from workers.rows.packed_rows import Sequences

Open = Callable[[], TrainEngine]


def run(adapter: TrainAdapter, layout: str, model_dir: Path, out: Path) -> dict[str, Any]:
    def open_engine() -> TrainEngine:
        return adapter.open(model_dir, samples.ACTOR, temperature=samples.TEMPERATURE, layout=layout)

    replica = adapter.replica(layout)
    engine = open_engine()
    results: dict[str, Any] = {"replica": replica, "refused": refused(engine)}
    results["log_probs"] = log_probs(engine, *replica)
    results["abandoned"] = abandoned(engine, *replica)
    results["initial"] = pieces(engine)
    results["updates"] = [update(engine, number, *replica) for number in range(1, samples.UPDATES + 1)]
    results["counted"] = engine.optimizer_updates
    results["trained"] = pieces(engine)
    results["trained_log_probs"] = log_probs(engine, *replica)
    dcp.save(engine.state_dict(), checkpoint_id=out / "saved")
    other = open_engine()
    results["resumed"] = resumed(engine, other, out / "saved", *replica)
    results["slept"] = slept(engine, other, *replica) if isinstance(engine, SleepingTrainer) else None
    if dist.get_rank() == 0:
        engine.export_hf(out / "export", out / "saved")
    if isinstance(engine, RankedExportEngine):
        share = ExportShare(dist.get_rank(), dist.get_world_size())
        assert engine.export_share(out / "shared", out / "saved", share), "it was told to stop"
    dist.barrier()
    return results


def log_probs(engine: TrainEngine, replica: int, num_replicas: int) -> list[tuple[list[int], Tensor]]:
    """Of this replica's samples, then of all samples on the first replica alone."""
    asked = [list(range(replica, 8, num_replicas)), list(range(8)) if replica == 0 else []]
    return [(rows, engine.log_probs(samples.sequences(rows)).cpu()) for rows in asked]


def update(engine: TrainEngine, number: int, replica: int, num_replicas: int) -> tuple[float, float]:
    for rows in samples.micro_batches(number, replica, num_replicas):
        engine.forward_backward(samples.sequences(rows), samples.loss)
    stats = engine.step(samples.SCALE)
    return stats.grad_norm, stats.lr


def abandoned(engine: TrainEngine, replica: int, num_replicas: int) -> float:
    """Return how much an abandoned step changes log-probabilities; the last forward pass has no backward pass."""
    rows = list(range(replica, 8, num_replicas))
    before = engine.log_probs(samples.sequences(rows))
    engine.forward_backward(samples.sequences(rows), samples.loss)
    engine.zero_grad()
    return float((engine.log_probs(samples.sequences(rows)) - before).abs().sum())


def pieces(engine: TrainEngine) -> list[tuple[str, tuple[int, ...], tuple[slice, ...], Tensor]]:
    """Return this rank's shards; listing them must need no collective."""
    with CommDebugMode() as collectives:  # type: ignore[no-untyped-call]
        shards = [(s.name, s.shape, s.box.slices, s.values.detach().cpu().clone()) for s in engine.shards()]
    assert collectives.get_total_counts() == 0, "shards() is called for every version and must gather nothing"
    return [
        (name, shape, slices, values.reshape([s.stop - s.start for s in slices]))
        for name, shape, slices, values in shards
    ]


def resumed(engine: TrainEngine, other: TrainEngine, saved: Path, replica: int, num_replicas: int) -> bool:
    """Return whether an engine that loaded the state makes the same next update, to the last bit."""
    state = other.state_dict()
    dcp.load(state, checkpoint_id=saved)
    other.load_state_dict(state)
    assert other.optimizer_updates == engine.optimizer_updates
    stats = [update(each, samples.UPDATES + 1, replica, num_replicas) for each in (engine, other)]
    pairs = zip(pieces(engine), pieces(other), strict=True)
    return stats[0] == stats[1] and all(one[3].equal(same[3]) for one, same in pairs)


def slept(engine: Any, other: TrainEngine, replica: int, num_replicas: int) -> dict[str, Any]:
    """Have an engine sleep after each micro-batch of an update and after the update; `other` makes the same update."""
    awake, asleep = engine.resident_bytes, []
    for rows in samples.micro_batches(samples.UPDATES + 2, replica, num_replicas):
        engine.forward_backward(samples.sequences(rows), samples.loss)
        asleep.append(nap(engine))
    stats = engine.step(samples.SCALE)
    asleep.append(nap(engine))
    same = (stats.grad_norm, stats.lr) == update(other, samples.UPDATES + 2, replica, num_replicas)
    rows = list(range(replica, 8, num_replicas))
    first, second = (each.log_probs(samples.sequences(rows)).cpu() for each in (engine, other))
    pairs = zip(pieces(engine), pieces(other), strict=True)
    same &= first.equal(second) and all(one[3].equal(another[3]) for one, another in pairs)
    return {"same": same, "awake": awake, "asleep": max(asleep)}


def nap(engine: SleepingTrainer) -> int:
    """Return the bytes that an engine holds asleep; it is awake again then."""
    for _ in range(2):  # asleep, or awake, already: nothing happens
        engine.sleep()
    resident = engine.resident_bytes
    for _ in range(2):
        engine.wake()
    return resident


def refused(engine: TrainEngine) -> dict[str, str]:
    """Return an engine's refusals of batches that no model can compute; all ranks get the same batches."""
    good = samples.sequences([0])
    assert good is not None
    first = good.tokens_T.clone()
    first[2] = 13
    negative = good.tokens_T.clone()
    negative[0] = -1
    bad = {
        "no prompt": Sequences(good.tokens_T, good.lengths_N, torch.ones_like(good.response_mask_T)),
        "mask": Sequences(good.tokens_T, good.lengths_N, good.response_mask_T[1:]),
        "lengths": Sequences(good.tokens_T, good.lengths_N + 1, good.response_mask_T),
        "unknown token": Sequences(first, good.lengths_N, good.response_mask_T),
        "negative token": Sequences(negative, good.lengths_N, good.response_mask_T),
        "no samples": Sequences(good.tokens_T[:0], good.lengths_N[:0], good.response_mask_T[:0]),
    }
    said = {}
    for name, batch in bad.items():
        for call in (lambda b=batch: engine.log_probs(b), lambda b=batch: engine.forward_backward(b, samples.loss)):
            try:
                call()
                said[name] = ""
                break
            except BadRequest as error:
                said[name] = str(error)
    engine.zero_grad()
    return said


def main() -> None:
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    name, layout, rank, root = sys.argv[1], sys.argv[2], int(sys.argv[3]), Path(sys.argv[4])
    module, _, kind = name.partition(":")
    adapter: TrainAdapter = getattr(importlib.import_module(module), kind)()
    adapter.prepare()
    store = dist.FileStore(str(root / layout / "store"), adapter.num_ranks(layout))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=adapter.num_ranks(layout))
    for family in adapter.families:
        out = root / layout / family
        results = run(adapter, layout, root / "models" / family, out)
        torch.save(results, out / f"rank-{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
