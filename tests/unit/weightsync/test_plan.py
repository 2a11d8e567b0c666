"""Transfer plans: every element travels exactly once, from a rank that holds it, in buckets of bounded size."""

import itertools
import math
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncflow.errors import PlanError
from asyncflow.transport.frame import Limits
from weightsync.plan import (
    DTYPE_BYTES,
    Box,
    Bucket,
    Need,
    Piece,
    ShardSpec,
    TensorSpec,
    TransferPlan,
    buckets_of,
    match_needs,
    plan_digest,
    plan_transfer,
)
from weightsync.slot_memory import RegionLayout

DTYPES = st.sampled_from(sorted(DTYPE_BYTES))
Held = list[list[ShardSpec]]


@st.composite
def held_shards(draw: st.DrawFn) -> Held:
    """Tensors cut along any axes, again and again; each part, empty ones too, is with one rank or several."""
    held: Held = [[] for _ in range(draw(st.integers(1, 4)))]
    ranks = st.lists(st.integers(0, len(held) - 1), min_size=1, max_size=3)
    for k, shape in enumerate(
        draw(st.lists(st.lists(st.integers(0, 6), max_size=3).map(tuple), min_size=1, max_size=5))
    ):
        dtype = draw(DTYPES)
        for box in cut_up(draw, Box.from_shape(shape)):
            for rank in draw(ranks):
                held[rank].append(ShardSpec(f"p{k}", shape, dtype, box))
    return held


def cut_up(draw: st.DrawFn, box: Box) -> Iterator[Box]:
    if not box.size or not draw(st.booleans()):
        yield box
        return
    axis = draw(st.integers(0, len(box.size) - 1))
    at = draw(st.integers(0, box.size[axis]))
    for start, stop in ((0, at), (at, box.size[axis])):
        offset, size = list(box.offset), list(box.size)
        offset[axis] += start
        size[axis] = stop - start
        yield from cut_up(draw, Box(tuple(offset), tuple(size)))


def rows_of(name: str, shape: tuple[int, ...], *, num_ranks: int) -> Held:
    """Rows dealt out as FSDP2 does."""
    step = -(-shape[0] // num_ranks)
    cuts = [min(rank * step, shape[0]) for rank in range(num_ranks + 1)]
    return [[ShardSpec(name, shape, "float32", Box.rows(shape, *cut))] for cut in itertools.pairwise(cuts)]


def loads(plan: TransferPlan) -> list[int]:
    return [sum(bucket.num_bytes for bucket in plan.of_sender(rank)) for rank in range(plan.num_senders)]


@given(held=held_shards(), bucket_bytes=st.integers(1, 200), dtype=st.sampled_from(["float32", "bfloat16"]))
def test_every_element_travels_once_in_buckets_of_bounded_size(held: Held, bucket_bytes: int, dtype: str) -> None:
    plan = plan_transfer(held, bucket_bytes=bucket_bytes, dtype=dtype)
    travelled = {name: np.zeros(tensor.shape, np.int64) for name, tensor in plan.tensors.items()}
    for index, bucket in enumerate(plan.buckets):
        names = [plan.names[piece.tensor] for piece in bucket.pieces]
        sizes = [
            piece.box.numel * DTYPE_BYTES[plan.tensors[name].dtype]
            for name, piece in zip(names, bucket.pieces, strict=True)
        ]
        assert bucket.index == index
        assert bucket.num_bytes == sum(sizes) > 0
        assert bucket.num_bytes <= bucket_bytes or [piece.box.numel for piece in bucket.pieces] == [1]
        for name, piece in zip(names, bucket.pieces, strict=True):
            assert any(spec.name == name and piece.box.relative_to(spec.box) for spec in held[bucket.sender])
            travelled[name][piece.box.slices] += 1
    assert all((counts == 1).all() for counts in travelled.values())
    assert travelled.keys() == {spec.name for specs in held for spec in specs}
    assert sum(loads(plan)) == plan.num_bytes


@given(held=held_shards(), dtype=st.sampled_from(["float32", "bfloat16"]))
def test_floats_are_cast_and_other_types_travel_as_they_are(held: Held, dtype: str) -> None:
    plan = plan_transfer(held, bucket_bytes=64, dtype=dtype)
    for spec in itertools.chain.from_iterable(held):
        expected = dtype if "float" in spec.dtype else spec.dtype
        assert plan.tensors[spec.name] == TensorSpec(spec.shape, expected)


@given(held=held_shards())
def test_tensors_lie_aligned_one_after_another_in_a_region(held: Held) -> None:
    plan = plan_transfer(held, bucket_bytes=64, dtype="bfloat16")
    layout, end = RegionLayout(plan), 0
    for number, tensor in enumerate(plan.tensors.values()):
        start, num_bytes = layout.tensor_extent(number)
        assert start % 64 == 0
        assert end <= start < end + 64
        assert num_bytes == tensor.num_bytes
        end = start + num_bytes
    assert end <= layout.num_bytes == plan.region_bytes < end + 64


@given(sizes=st.lists(st.integers(1, 50), min_size=1, max_size=30), num_ranks=st.integers(1, 6))
def test_replicas_are_sent_once_and_spread_over_the_ranks(sizes: list[int], num_ranks: int) -> None:
    everything = [ShardSpec(f"p{k}", (size,), "float32", Box.from_shape((size,))) for k, size in enumerate(sizes)]
    plan = plan_transfer([everything] * num_ranks, bucket_bytes=64, dtype="float32")
    assert sum(loads(plan)) == 4 * sum(sizes)
    assert max(loads(plan)) <= 4 * sum(sizes) / num_ranks + 4 * max(sizes)


def test_replica_is_sent_by_the_rank_that_has_least_of_its_own() -> None:
    held = rows_of("w", (5, 4), num_ranks=2)
    for specs in held:
        specs.append(ShardSpec("norm", (4,), "float32", Box.from_shape((4,))))
    plan = plan_transfer(held, bucket_bytes=1024, dtype="float32")
    assert [(bucket.sender, [plan.names[piece.tensor] for piece in bucket.pieces]) for bucket in plan.buckets] == [
        (0, ["w"]),
        (1, ["norm", "w"]),
    ]


def test_shard_that_a_rank_names_twice_travels_once() -> None:
    twice = [ShardSpec("tied", (4,), "float32", Box.from_shape((4,)))] * 2
    assert plan_transfer([twice], bucket_bytes=64, dtype="float32").buckets[0].pieces == (Piece(0, Box((0,), (4,))),)


def test_senders_take_turns() -> None:
    plan = plan_transfer(rows_of("w", (12,), num_ranks=2), bucket_bytes=12, dtype="float32")
    assert [bucket.sender for bucket in plan.buckets] == [0, 1, 0, 1]


def test_scalars_and_single_elements_travel() -> None:
    held = [[ShardSpec("a", (), "float32", Box((), ())), ShardSpec("b", (1, 1), "int64", Box.from_shape((1, 1)))]]
    plan = plan_transfer(held, bucket_bytes=1024, dtype="bfloat16")
    assert [bucket.num_bytes for bucket in plan.buckets] == [10]
    layout = RegionLayout(plan)
    assert (plan.names, [layout.tensor_extent(number)[0] for number in (0, 1)]) == (("a", "b"), [0, 64])


def test_tensor_without_elements_is_known_and_takes_no_bytes() -> None:
    plan = plan_transfer(
        [[ShardSpec("none", (0, 4), "float32", Box.from_shape((0, 4)))]], bucket_bytes=64, dtype="float32"
    )
    assert plan.tensors == {"none": TensorSpec((0, 4), "float32")}
    assert (plan.buckets, plan.num_bytes, plan.region_bytes) == ((), 0, 0)


def test_row_larger_than_a_bucket_is_cut_and_what_is_left_of_it_gets_company() -> None:
    plan = plan_transfer(rows_of("w", (3, 10), num_ranks=1), bucket_bytes=32, dtype="float32")
    assert [bucket.num_bytes for bucket in plan.buckets] == [32, 32, 32, 24]


def test_bucket_that_is_nearly_full_is_not_given_a_crumb() -> None:
    held = [[*rows_of("a", (13,), num_ranks=1)[0], *rows_of("b", (16,), num_ranks=1)[0]]]
    plan = plan_transfer(held, bucket_bytes=64, dtype="float32")
    assert [[plan.names[piece.tensor] for piece in bucket.pieces] for bucket in plan.buckets] == [["a"], ["b"]]


def test_plans_differ_in_their_digest_exactly_where_they_differ() -> None:
    plans = [plan_transfer(rows_of("w", (8, 2), num_ranks=n), bucket_bytes=32, dtype="float32") for n in (1, 2, 2)]
    assert plans[0].digest() != plans[1].digest() == plans[2].digest()


def spec(
    name: str, shape: tuple[int, ...], offset: tuple[int, ...], size: tuple[int, ...], dtype: str = "float32"
) -> ShardSpec:
    return ShardSpec(name, shape, dtype, Box(offset, size))


@pytest.mark.parametrize(
    ("held", "message"),
    [
        ([[spec("w.gap", (4,), (0,), (2,))], [spec("w.gap", (4,), (3,), (1,))]], "w.gap: 4 elements, but .* hold 3"),
        ([[spec("w.none", (4,), (0,), (0,))]], "w.none: 4 elements, but .* hold 0"),
        (
            [[spec("w.twice", (4, 2), (0, 0), (3, 2))], [spec("w.twice", (4, 2), (2, 0), (2, 2))]],
            r"w.twice: .* hold \[0:3, 0:2\] and \[2:4, 0:2\], which overlap",
        ),
        (
            [[spec("w.even", (4,), (0,), (2,))], [spec("w.even", (4,), (1,), (2,))]],
            r"w.even: .* hold \[0:2\] and \[1:3\], which overlap",
        ),
        (
            [[spec("w.shape", (4,), (0,), (4,))], [spec("w.shape", (2, 2), (0, 0), (0, 0))]],
            r"w.shape: trainer ranks disagree on its shape: \(4,\), \(2, 2\)",
        ),
        (
            [[spec("w.type", (4,), (0,), (4,))], [spec("w.type", (4,), (0,), (0,), "int64")]],
            "w.type: trainer ranks disagree on its type: bfloat16, int64",
        ),
        ([[spec("w.out", (4,), (2,), (3,))]], r"w.out: a rank holds \[2:5\], outside of shape \(4,\)"),
        ([[spec("w.flat", (2, 2), (0,), (4,))]], r"w.flat: a rank holds \[0:4\], outside of shape \(2, 2\)"),
        ([[spec("w.odd", (4,), (0,), (4,), "float8_e4m3fn")]], "w.odd: element type float8_e4m3fn cannot travel"),
    ],
)
def test_tensor_that_cannot_travel_exactly_once_is_named(held: Held, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        plan_transfer(held, bucket_bytes=1024, dtype="bfloat16")


def make_plan() -> TransferPlan:
    held = [[*rows_of("embed", (6, 4), num_ranks=1)[0], *rows_of("norm", (4,), num_ranks=1)[0]]]
    return plan_transfer(held, bucket_bytes=1024, dtype="float32")


def test_receiver_of_the_whole_model_gets_every_tensor() -> None:
    needs = {"norm": Need((4,)), "embed": Need((6, 4))}
    assert match_needs(make_plan(), needs) == {
        "norm": Piece(1, Box.from_shape((4,))),
        "embed": Piece(0, Box.from_shape((6, 4))),
    }


def test_tied_weights_are_found_by_any_of_their_names() -> None:
    tied = Piece(0, Box.from_shape((6, 4)))
    needs = {"head": Need((6, 4), aliases=("lm_head", "embed")), "norm": Need((4,))}
    assert match_needs(make_plan(), needs)["head"] == tied
    both = match_needs(make_plan(), needs | {"embed": Need((6, 4), aliases=("head",))})
    assert both["head"] == both["embed"] == tied


def test_receiver_that_shares_the_model_gets_its_boxes() -> None:
    half = Box.rows((6, 4), 3, 6)
    assert match_needs(make_plan(), {"embed": Need((6, 4), box=half)}, whole=False) == {"embed": Piece(0, half)}


@given(held=held_shards(), bucket_bytes=st.integers(1, 200), data=st.data())
def test_buckets_of_a_box_are_those_with_its_elements(held: Held, bucket_bytes: int, data: st.DataObject) -> None:
    plan = plan_transfer(held, bucket_bytes=bucket_bytes, dtype="bfloat16")
    number = data.draw(st.integers(0, len(plan.names) - 1))
    shape = plan.tensors[plan.names[number]].shape
    offset = tuple(data.draw(st.integers(0, length)) for length in shape)
    size = tuple(data.draw(st.integers(0, length - start)) for start, length in zip(offset, shape, strict=True))
    wanted = np.zeros(shape, dtype=bool)
    wanted[Box(offset, size).slices] = True
    expected = {
        bucket.index
        for bucket in plan.buckets
        if any(piece.tensor == number and wanted[piece.box.slices].any() for piece in bucket.pieces)
    }
    assert buckets_of(plan, [Piece(number, Box(offset, size))]) == expected


@pytest.mark.parametrize(
    ("needs", "message"),
    [
        ({"embed": Need((6, 4))}, "norm: the trainer has it, the receiver does not"),
        ({"head": Need((1,), aliases=("lm_head",))}, "head: the receiver needs it, the trainer does not have it"),
        ({"embed": Need((4, 6))}, r"embed: shape \(4, 6\) at the receiver, \(6, 4\) at the trainer"),
        ({"embed": Need((6, 4), box=Box((4, 0), (3, 4)))}, r"embed: the receiver wants \[4:7, 0:4\] of shape \(6, 4\)"),
    ],
)
def test_receiver_with_another_model_is_told_which_tensor(needs: dict[str, Need], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        match_needs(make_plan(), needs)


def test_large_cluster_takes_few_pieces() -> None:
    shape = (1024, 512)
    held = [
        [ShardSpec("w", shape, "float32", Box((row, column), (8, 64)))]
        for row, column in itertools.product(range(0, 1024, 8), range(0, 512, 64))
    ]
    plan = plan_transfer(held, bucket_bytes=2**20, dtype="bfloat16")
    assert len(plan.buckets) == plan.num_senders == 1024
    assert {bucket.num_bytes for bucket in plan.buckets} == {8 * 64 * 2}
    assert plan.num_bytes == 2 * math.prod(shape)


@given(held=held_shards(), bucket_bytes=st.integers(1, 200))
def test_plan_is_the_same_after_it_travelled(held: Held, bucket_bytes: int) -> None:
    plan = plan_transfer(held, bucket_bytes=bucket_bytes, dtype="bfloat16")
    data = plan.encode()
    arrived = TransferPlan.decode(data)
    assert (arrived, arrived.names) == (plan, plan.names)
    assert plan_digest(data) == plan.digest() == arrived.digest()


def test_bytes_that_are_no_plan_are_refused() -> None:
    with pytest.raises(PlanError, match="a plan of 5 bytes cannot be read"):
        TransferPlan.decode(b"plan?")


def test_plan_of_twenty_thousand_tensors_on_64_ranks_fits_a_message() -> None:
    """Mixtures of experts have that many; a name is told once, not once a rank."""
    shape, num_tensors, num_ranks = (768, 2048), 20_000, 64
    rows = [Box.rows(shape, rank * 12, rank * 12 + 12) for rank in range(num_ranks)]
    tensors = {
        f"model.layers.47.mlp.experts.127.down_proj.weight.{k}": TensorSpec(shape, "bfloat16")
        for k in range(num_tensors)
    }
    per_bucket = num_tensors // 200
    pieces = [[Piece(k, rows[rank]) for k in range(num_tensors)] for rank in range(num_ranks)]
    buckets = [
        Bucket(rank * 200 + k, rank, 2**26, tuple(pieces[rank][k * per_bucket : (k + 1) * per_bucket]))
        for rank in range(num_ranks)
        for k in range(200)
    ]
    assert len(TransferPlan(num_ranks, tensors, tuple(buckets)).encode()) < Limits().meta_bytes / 2
