"""A version in memory: whatever is packed into buckets is unpacked to the same place, and checksums see every bit."""

import itertools

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from weightsync.plan import Box, Need, Piece, ShardSpec, TransferPlan, match_needs, plan_transfer
from weightsync.slot_memory import Region, RegionLayout, version_checksum

SHAPES = {"w": (6, 8), "cube": (4, 3, 5), "norm": (7,), "scalar": ()}
TYPES = {"w": "float32", "cube": "float32", "norm": "int64", "scalar": "bool"}


def tensor_of(region: Region, name: str) -> torch.Tensor:
    return region.view_tensor(region.layout.plan.names.index(name))


def make_plan(axis: int, num_ranks: int, bucket_bytes: int, dtype: str = "float32") -> TransferPlan:
    """Tensors cut along an axis where they have it."""
    held: list[list[ShardSpec]] = [[] for _ in range(num_ranks)]
    for name, shape in SHAPES.items():
        if axis >= len(shape):
            held[-1].append(ShardSpec(name, shape, TYPES[name], Box.from_shape(shape)))
            continue
        cuts = [shape[axis] * k // num_ranks for k in range(num_ranks + 1)]
        for rank, (start, stop) in enumerate(itertools.pairwise(cuts)):
            offset, size = [0] * len(shape), list(shape)
            offset[axis], size[axis] = start, stop - start
            held[rank].append(ShardSpec(name, shape, TYPES[name], Box(tuple(offset), tuple(size))))
    return plan_transfer(held, bucket_bytes=bucket_bytes, dtype=dtype)


def filled(plan: TransferPlan) -> Region:
    region = Region(torch.zeros(plan.region_bytes, dtype=torch.uint8), RegionLayout(plan))
    for k, name in enumerate(SHAPES):
        tensor = tensor_of(region, name)
        tensor.copy_((torch.arange(tensor.numel()).reshape(tensor.shape) + k) * 3 + 1)
    return region


PLANS = st.builds(
    make_plan, st.integers(0, 2), st.integers(1, 3), st.sampled_from([32, 100, 4096]),
    st.sampled_from(["float32", "bfloat16"]),
)  # fmt: skip


@given(plan=PLANS)
def test_pieces_that_are_sent_one_by_one_land_in_their_places(plan: TransferPlan) -> None:
    source = filled(plan)
    target = Region(torch.zeros(plan.region_bytes, dtype=torch.uint8), RegionLayout(plan))
    for bucket in plan.buckets:
        landed = target.landing(bucket)
        for memory, part in zip(landed, source.list_parts(bucket), strict=True):
            memory.copy_(part)
        target.settle(bucket, landed)
        assert target.bucket_checksum(bucket) == source.bucket_checksum(bucket)
    assert all(tensor_of(target, name).equal(tensor_of(source, name)) for name in SHAPES)


@given(plan=PLANS)
def test_what_is_packed_is_unpacked_to_its_place(plan: TransferPlan) -> None:
    source = filled(plan)
    target = Region(torch.zeros(plan.region_bytes, dtype=torch.uint8), RegionLayout(plan))
    for bucket in plan.buckets:
        packed = source.packed(bucket)
        assert packed.dtype == torch.uint8 and packed.shape == (bucket.num_bytes,)
        out = torch.empty(bucket.num_bytes, dtype=torch.uint8)
        source.pack_pieces(bucket.pieces, out)
        assert out.equal(packed)
        target.unpack(bucket.pieces, packed)
        assert target.bucket_checksum(bucket) == source.bucket_checksum(bucket)
    for name in SHAPES:
        assert tensor_of(target, name).equal(tensor_of(source, name))


@given(plan=PLANS, data=st.data())
def test_changed_bit_changes_the_checksum_of_its_bucket_alone(plan: TransferPlan, data: st.DataObject) -> None:
    region = filled(plan)
    before = [region.bucket_checksum(bucket) for bucket in plan.buckets]
    name = data.draw(st.sampled_from(sorted(SHAPES)))
    flat = tensor_of(region, name).view(-1).view(torch.uint8)
    flat[data.draw(st.integers(0, flat.numel() - 1))] ^= 1
    after = [region.bucket_checksum(bucket) for bucket in plan.buckets]
    changed = [bucket for bucket in plan.buckets if before[bucket.index] != after[bucket.index]]
    assert len(changed) == 1
    assert name in {plan.names[piece.tensor] for piece in changed[0].pieces}
    assert version_checksum(before) != version_checksum(after)


def test_checksum_is_that_of_the_packed_bytes_whatever_the_cut() -> None:
    rows, columns = make_plan(0, 2, 4096), make_plan(1, 2, 4096)
    for plan in (rows, columns):
        region = filled(plan)
        for bucket in plan.buckets:
            copy = Region(torch.zeros(plan.region_bytes, dtype=torch.uint8), region.layout)
            copy.unpack(bucket.pieces, region.packed(bucket))
            assert copy.bucket_checksum(bucket) == region.bucket_checksum(bucket)


def test_views_are_of_the_memory_itself_in_the_receivers_names() -> None:
    plan = make_plan(0, 2, 4096)
    region = filled(plan)
    needs = {"half": Need((6, 8), ("w",), Box((0, 4), (6, 4))), "scalar": Need(())}
    views = region.view_matched(match_needs(plan, needs, whole=False))
    assert views["half"].equal(tensor_of(region, "w")[:, 4:])
    tensor_of(region, "w")[2, 5] = -1.0
    assert views["half"][2, 1] == -1.0
    assert views["scalar"].shape == ()


@pytest.mark.parametrize(("box", "run"), [(Box((2, 0), (3, 8)), (64, 96)), (Box((1, 2), (1, 3)), (40, 12))])
def test_run_is_where_the_bytes_of_a_piece_lie_together(box: Box, run: tuple[int, int]) -> None:
    plan = make_plan(0, 1, 4096)
    piece = match_needs(plan, {"w": Need((6, 8), box=box)}, whole=False)["w"]
    assert RegionLayout(plan).piece_run(piece) == run
    across = match_needs(plan, {"w": Need((6, 8), box=Box((0, 1), (2, 3)))}, whole=False)["w"]
    assert RegionLayout(plan).piece_run(across) is None


def test_a_share_of_boxes_has_room_for_them_alone_and_finds_its_part_of_any_piece() -> None:
    plan = make_plan(0, 2, 100)
    number = plan.names.index("w")
    held = Box((1, 2), (4, 3))
    whole, layout = filled(plan), RegionLayout(plan, {number: held})
    share = Region(torch.zeros(layout.num_bytes, dtype=torch.uint8), layout)
    spec = plan.tensors["w"]
    assert layout.num_bytes == msgspec.structs.replace(spec, shape=held.size).room_bytes < spec.room_bytes
    for bucket in plan.buckets:
        for piece in bucket.pieces:
            found = share.view_overlap(piece)
            if found is not None:
                found[1].copy_(whole.view_piece(piece)[found[0]])
    assert share.view_piece(Piece(number, held)).equal(whole.view_piece(Piece(number, held)))
    inside = Piece(number, Box((2, 3), (2, 1)))
    assert share.view_piece(inside).equal(whole.view_piece(inside))
    assert share.view_overlap(Piece(number, Box((0, 5), (6, 3)))) is None
    other = next(k for k in range(len(plan.names)) if k != number)
    assert share.view_overlap(Piece(other, Box.from_shape(layout.tensor_spec(other).shape))) is None


def test_a_share_has_room_for_its_own_tensors_alone() -> None:
    plan = make_plan(0, 2, 100)
    shares = {number: Box.from_shape(plan.tensors[plan.names[number]].shape) for number in (0, 2)}
    whole, layout = filled(plan), RegionLayout(plan, shares)
    share = Region(torch.zeros(layout.num_bytes, dtype=torch.uint8), layout)
    assert layout.num_bytes == sum(plan.tensors[plan.names[number]].room_bytes for number in (0, 2))
    for number in (0, 2):
        share.view_tensor(number).copy_(whole.view_tensor(number))
    for number in range(4):
        mine, expected = share.view_tensor(number), whole.view_tensor(number)
        assert (mine.shape, mine.dtype, mine.is_meta) == (expected.shape, expected.dtype, number not in (0, 2))
        assert mine.is_meta or mine.equal(expected)
