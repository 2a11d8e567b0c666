"""One rank of test_checkpoint_ranks: saves while the gang's default group is busy; or restores.

python checkpoint_rank.py DIR MODE RANK NUM_RANKS      MODE: save, restore
"""

import json
import resource
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from workers.checkpoint.writer import Checkpointer, Contents, RunFacts
from workers.settings.run import CheckpointConfig

ROWS = 5
"""Do not divide by two."""
COLUMNS = 50_000
CPU = torch.device("cpu")


class Engine:
    """Rows over the ranks, a moment of each, a number that all have."""

    def __init__(self) -> None:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        whole = torch.arange(ROWS * COLUMNS, dtype=torch.float32).reshape(ROWS, COLUMNS)
        self.weight = distribute_tensor(whole, mesh, [Shard(0)])
        self.moment = distribute_tensor(torch.zeros(ROWS, COLUMNS), mesh, [Shard(0)])
        self.step = torch.tensor(0)

    def state_dict(self) -> dict[str, Any]:
        return {"model": {"w": self.weight}, "optimizer": {"state": {"w": {"m": self.moment}}}, "num_steps": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["model"]["w"] is self.weight
        self.step = state["num_steps"]

    def update(self) -> None:
        for tensor in (self.weight, self.moment):
            tensor.to_local().add_(1)
        self.step += 1


def open_saver(root: Path) -> Checkpointer:
    facts = RunFacts(lineage=0, model_fingerprint="f", data_hash="d", config=root / "config.yaml")
    return Checkpointer(root, CheckpointConfig(export_hf=False), facts=facts, device=CPU, warn=lambda _: None)


def train_beside(saver: Checkpointer, engine: Engine) -> None:
    """Collectives of training while the checkpoint is written."""
    saver.before_update()
    total = torch.ones(1)
    going_on = torch.ones(1)
    while going_on:
        engine.update()
        dist.all_reduce(total)
        going_on.fill_(saver.busy)
        dist.all_reduce(going_on, op=dist.ReduceOp.MAX)


def save(root: Path, rank: int) -> dict[str, Any]:
    engine = Engine()
    saver = open_saver(root)
    told: dict[str, Any] = {}
    contents = Contents(make_durable=lambda: None)
    for step in (1, 2, 3):
        if step == 2 and rank == 1:  # what a full quota looks like to this rank alone
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, resource.RLIM_INFINITY))
        engine.weight.to_local().fill_(step)
        saver.begin(engine, step, contents)  # type: ignore[arg-type]  # no whole engine
        train_beside(saver, engine)
        saver.wait()
        told[str(step)] = str(saver.failure or "saved")
        if step == 2 and rank == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    saver.close()
    return told


def restore(root: Path) -> dict[str, Any]:
    engine = Engine()
    saver = open_saver(root)
    saver.restore_checkpoint(engine, root / "checkpoints" / "step_000003", seed=0)  # type: ignore[arg-type]  # no whole engine
    saver.close()
    assert isinstance(engine.weight, DTensor)
    return {"weight": engine.weight.full_tensor().unique().tolist(), "num_steps": int(engine.step)}


def main() -> None:
    root, mode, rank, num_ranks = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    torch.set_num_threads(1)
    store = dist.FileStore(str(root / f"store-{mode}-{num_ranks}"), num_ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks)
    told = save(root, rank) if mode == "save" else restore(root)
    (root / f"{mode}-{num_ranks}-{rank}.json").write_text(json.dumps(told))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
