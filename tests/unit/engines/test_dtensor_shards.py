"""Boxes read off DTensor placements: six Gloo ranks against the whole tensors, and the cutting itself against torch."""

import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from asyncflow.errors import PlanError
from weightsync.plan import Box, ShardSpec, plan_transfer
from workers.engines.fsdp.dtensor_shards import MeshCut, local_runs, local_shards

SCRIPT = Path(__file__).parents[2] / "multiproc" / "sharded_ranks.py"
NUM_RANKS = 6
DEADLINE_S = 240


@pytest.fixture(scope="module")
def held(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, list[Any]]]:
    """What each rank says it holds of each case."""
    root = tmp_path_factory.mktemp("ranks")
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    subprocess.run([sys.executable, SCRIPT, root, str(NUM_RANKS)], env=environment, check=True, timeout=DEADLINE_S)
    return [torch.load(root / f"rank-{rank}.pt") for rank in range(NUM_RANKS)]


def test_boxes_and_values_of_all_ranks_are_the_whole_tensor(held: list[dict[str, list[Any]]]) -> None:
    for name in held[0]:
        shapes = {shape for shards in held for shape, *_ in shards[name]}
        assert len(shapes) == 1, name
        whole = torch.arange(torch.Size(shapes.pop()).numel(), dtype=torch.float32)
        for shards in held:
            for shape, offset, size, values in shards[name]:
                assert values.equal(whole.reshape(shape)[Box(offset, size).slices]), name


def test_plan_accepts_what_the_ranks_hold(held: list[dict[str, list[Any]]]) -> None:
    specs = [
        [
            ShardSpec(name, shape, "float32", Box(offset, size))
            for name in shards
            for shape, offset, size, _ in shards[name]
        ]
        for shards in held
    ]
    plan = plan_transfer(specs, bucket_bytes=64, dtype="float32")
    assert plan.tensors.keys() == held[0].keys()


def test_only_fused_tensors_are_several_runs(held: list[dict[str, list[Any]]]) -> None:
    several = {name for shards in held for name in shards if len(shards[name]) > 1}
    assert several == {"fused in two"}
    assert [len(shards["some ranks"]) for shards in held] == [1, 1, 0, 0, 0, 0]


def test_fsdp_over_tensor_parallelism_cuts_by_tensor_parallelism_first(held: list[dict[str, list[Any]]]) -> None:
    rows = [(offset[0], size[0]) for shards in held for _, offset, size, _ in shards["fsdp over tp, 7 rows"]]
    assert rows == [(0, 2), (4, 1), (2, 2), (5, 1), (0, 0), (6, 1)]


PARTS = st.lists(st.integers(1, 4), min_size=1, max_size=3)


@given(parts=PARTS, length=st.integers(0, 40), data=st.data())
def test_plain_cuts_are_those_of_torch_also_where_uneven(parts: list[int], length: int, data: st.DataObject) -> None:
    index = [data.draw(st.integers(0, count - 1)) for count in parts]
    runs = local_runs(length, [MeshCut(count, k) for count, k in zip(parts, index, strict=True)])
    assert indices(runs) == split_by_torch(length, [Shard(0)] * len(parts), parts, index)
    assert runs is not None and len(runs) == 1


@given(count=st.integers(1, 4), factor=st.integers(1, 5), length=st.integers(0, 40), data=st.data())
def test_strided_cut_is_that_of_torch_also_where_uneven(
    count: int, factor: int, length: int, data: st.DataObject
) -> None:
    index = data.draw(st.integers(0, count - 1))
    runs = local_runs(length, [MeshCut(count, index, factor)])
    assert indices(runs) == split_by_torch(length, [_StridedShard(0, split_factor=factor)], [count], [index])


@given(parts=PARTS, rows=st.integers(0, 3), data=st.data())
def test_plain_cut_behind_later_ones_is_that_of_torch_where_even(
    parts: list[int], rows: int, data: st.DataObject
) -> None:
    index = [data.draw(st.integers(0, count - 1)) for count in parts]
    factors = [math.prod(parts[1:]), *[1] * (len(parts) - 1)]
    length = rows * math.prod(parts)
    placements = [_StridedShard(0, split_factor=factor) for factor in factors]
    runs = local_runs(length, [MeshCut(*cut) for cut in zip(parts, index, factors, strict=True)])
    assert indices(runs) == split_by_torch(length, placements, parts, index)


def test_several_cuts_of_a_fused_dimension_are_not_told_apart() -> None:
    assert local_runs(16, [MeshCut(2, 0, split_factor=2), MeshCut(2, 0, split_factor=2)]) is None


def indices(runs: list[tuple[int, int]] | None) -> list[int]:
    assert runs is not None
    return [index for start, size in runs for index in range(start, start + size)]


def split_by_torch(length: int, placements: list[Any], parts: list[int], index: list[int]) -> list[int]:
    left = torch.arange(length)
    for placement, count, k in zip(placements, parts, index, strict=True):
        left = placement._split_tensor(left, count, with_padding=False)[0][k]
    numbers: list[int] = left.tolist()
    return numbers


@pytest.fixture
def group(tmp_path: Path) -> Any:
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def placed(local: Tensor, placement: Placement) -> DTensor:
    tensor: DTensor = DTensor.from_local(
        local, init_device_mesh("cpu", (1,)), [placement], run_check=False, shape=torch.Size((3, 2)), stride=(2, 1)
    )
    return tensor


def test_values_are_views_without_gradient(group: None) -> None:
    weight = torch.nn.Parameter(torch.zeros(3, 2))
    for tensor in (weight, placed(weight, Shard(0))):
        [shard] = local_shards([("w", tensor)])
        assert shard.values.data_ptr() == weight.data_ptr()
        assert not shard.values.requires_grad


def test_partial_sum_is_refused(group: None) -> None:
    with pytest.raises(PlanError, match="w: a partial sum over mesh dimension 0"):
        list(local_shards([("w", placed(torch.zeros(3, 2), Partial()))]))


def test_local_shape_that_contradicts_the_placements_is_refused(group: None) -> None:
    with pytest.raises(PlanError, match=r"w: which part of \(3, 2\) is \(2, 2\) at \(0,\)"):
        list(local_shards([("w", placed(torch.zeros(2, 2), Shard(0)))]))
