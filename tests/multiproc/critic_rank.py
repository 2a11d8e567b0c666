"""One rank of test_critic_ranks: two updates, a checkpoint, another one, values; or resumes and makes the last update.

python critic_rank.py DIR MODE RANK NUM_RANKS      MODE: train, resume
"""

import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from workers.checkpoint.saved_shards import HostCopy, load_shards, save_shards
from workers.engines.fsdp.sharding import FsdpValueEngine
from workers.rows.packed_rows import Sequences
from workers.settings.engines import ActorConfig, CriticConfig

CPU = torch.device("cpu")


def make_sequences(rows: list[int]) -> Sequences | None:
    """The named ones of six samples."""
    if not rows:
        return None
    samples = [torch.randint(2, 13, (4 + row,), generator=torch.Generator().manual_seed(row)) for row in rows]
    cuts = [2 + row % 2 for row in rows]
    return Sequences.from_turns(
        [sample[:cut] for sample, cut in zip(samples, cuts, strict=True)],
        [sample[cut:] for sample, cut in zip(samples, cuts, strict=True)],
    )


def square_loss(value_A: Tensor) -> Tensor:
    return (value_A - 1).square().sum()


def update(engine: FsdpValueEngine, number: int, rank: int, num_ranks: int) -> None:
    """Update with six samples; in the second update rank 0 has them all."""
    rows = list(range(rank, 6, num_ranks)) if number != 2 else list(range(6)) if rank == 0 else []
    engine.forward_backward(make_sequences(rows), square_loss)
    engine.step(1 / 16)


def main() -> None:
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    root, mode, rank, num_ranks = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    store = dist.FileStore(str(root / f"store-{mode}-{num_ranks}"), num_ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks)
    group = dist.new_group(backend="gloo")
    # With the usual tiny eps AdamW would hide a wrong factor on the gradients.
    training = CriticConfig(lr=1e-2, eps=0.05, grad_clip=4.0).training(ActorConfig()).for_run(10)
    path = root / "model"
    engine = FsdpValueEngine(path, training, device=CPU, seed=0)
    if mode == "resume":
        load_shards(engine, root / "critic", group=group)
    else:
        for number in (1, 2):
            update(engine, number, rank, num_ranks)
        if num_ranks == 2:
            copy = HostCopy(CPU)
            state = copy.begin(engine.state_dict())
            copy.wait()
            save_shards(state, root / "critic", group=group)
            copy.close()
    update(engine, 3, rank, num_ranks)
    values = engine.values(make_sequences(list(range(6)) if rank == 0 else []))
    if rank == 0:
        torch.save((engine.optimizer_updates, values), root / f"values-{mode}-{num_ranks}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
