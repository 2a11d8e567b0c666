"""All ranks of test_dtensor_shards: shard known tensors in many ways, write down what `local_shards` says of them.

python sharded_ranks.py DIR NUM_RANKS     forks one process a rank; each writes DIR/rank-R.pt: {case: [shard, ...]}
"""

import multiprocessing
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.placement_types import _StridedShard

from workers.engines.fsdp.dtensor_shards import local_shards

DEADLINE_S = 200


def numbered(*shape: int) -> Tensor:
    """Tensor whose elements are their own places."""
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)


def with_fsdp(full: Tensor, mesh: DeviceMesh, tp: DeviceMesh | None = None, cut: Placement | None = None) -> Tensor:
    """A parameter under FSDP2, cut by tensor parallelism before."""
    module = nn.Module()
    module.weight = nn.Parameter(distribute_tensor(full, tp, [cut or Replicate()]) if tp else full.clone())
    fully_shard(module, mesh=mesh)
    weight: Tensor = module.weight
    return weight


def cases(num_ranks: int) -> Iterator[tuple[str, Tensor]]:
    """Named tensors, sharded."""
    line = init_device_mesh("cpu", (num_ranks,), mesh_dim_names=("all",))
    grid = init_device_mesh("cpu", (num_ranks // 2, 2), mesh_dim_names=("dp", "tp"))
    yield "plain", numbered(3, 2)
    yield "scalar buffer", numbered()
    yield "rows", distribute_tensor(numbered(12, 2), line, [Shard(0)])
    yield "uneven rows", distribute_tensor(numbered(7, 3), line, [Shard(0)])
    yield "columns of three dimensions", distribute_tensor(numbered(3, 8, 2), line, [Shard(1)])
    yield "replicated scalar", distribute_tensor(numbered(), line, [Replicate()])
    yield "no elements", distribute_tensor(numbered(0, 3), line, [Shard(0)])
    yield "grid", distribute_tensor(numbered(7, 5), grid, [Shard(0), Shard(1)])
    yield "grid across", distribute_tensor(numbered(7, 5), grid, [Shard(1), Shard(0)])
    yield "rows twice", distribute_tensor(numbered(13, 2), grid, [Shard(0), Shard(0)])
    yield "replicas", distribute_tensor(numbered(5, 4), grid, [Replicate(), Shard(1)])
    yield "fused in two", distribute_tensor(numbered(24, 2), line, [_StridedShard(0, split_factor=2)])
    yield "some ranks", distribute_tensor(numbered(5, 2), DeviceMesh("cpu", [0, 1]), [Shard(0)])
    yield "fsdp", with_fsdp(numbered(7, 3), line)
    yield "hsdp", with_fsdp(numbered(7, 3), grid)
    for rows in (1, 7, 12):
        yield f"fsdp over tp, {rows} rows", with_fsdp(numbered(rows, 2), grid["dp"], grid["tp"], Shard(0))
    yield "fsdp over tp by columns", with_fsdp(numbered(7, 5), grid["dp"], grid["tp"], Shard(1))
    yield "fsdp over replicas", with_fsdp(numbered(7), grid["dp"], grid["tp"], Replicate())


def run(root: Path, rank: int, num_ranks: int) -> None:
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", store=dist.FileStore(str(root / "store"), num_ranks), rank=rank, world_size=num_ranks
    )
    tensors = dict(cases(num_ranks))
    held: dict[str, list[Any]] = {name: [] for name in tensors}
    with CommDebugMode() as collectives:
        for shard in local_shards(tensors.items()):
            held[shard.name].append((shard.shape, shard.box.offset, shard.box.size, shard.values.clone()))
    assert collectives.get_total_counts() == 0, "shards are read for every version and must gather nothing"
    torch.save(held, root / f"rank-{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    root, num_ranks = Path(sys.argv[1]), int(sys.argv[2])
    context = multiprocessing.get_context("fork")  # one import of torch for all; no thread has run yet
    ranks = [context.Process(target=run, args=(root, rank, num_ranks), daemon=True) for rank in range(num_ranks)]
    for process in ranks:
        process.start()
    deadline = time.monotonic() + DEADLINE_S
    for process in ranks:
        process.join(max(0.0, deadline - time.monotonic()))
    sys.exit(any(process.exitcode != 0 for process in ranks))  # ends, as daemons, those that still run


if __name__ == "__main__":
    main()
