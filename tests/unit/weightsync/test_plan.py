"""Transfer plans: every element travels exactly once, from a rank that holds it."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncflow.errors import PlanError
from weightsync.plan import ELEMENT_BYTES, ShardSpec, check_receiver, plan_transfer

SHAPES = st.lists(st.lists(st.integers(0, 7), max_size=3).map(tuple), min_size=1, max_size=6)


@st.composite
def shardings(draw: st.DrawFn) -> list[list[ShardSpec]]:
    """Parameters cut into runs at arbitrary places; each run is held by an arbitrary rank."""
    held: list[list[ShardSpec]] = [[] for _ in range(draw(st.integers(1, 4)))]
    for k, shape in enumerate(draw(SHAPES)):
        numel = math.prod(shape)
        cuts = sorted(draw(st.lists(st.integers(0, numel), max_size=3)))
        for start, end in zip([0, *cuts], [*cuts, numel], strict=True):
            rank = draw(st.integers(0, len(held) - 1))
            held[rank].append(ShardSpec(f"p{k}", shape, start, end - start))
    return held


@given(held=shardings(), bucket_elements=st.integers(1, 40), dtype=st.sampled_from(sorted(ELEMENT_BYTES)))
def test_every_element_travels_once_in_buckets_of_bounded_size(
    held: list[list[ShardSpec]], bucket_elements: int, dtype: str
) -> None:
    plan = plan_transfer(held, bucket_bytes=bucket_elements * ELEMENT_BYTES[dtype], dtype=dtype)
    travelled: dict[str, list[int]] = {name: [0] * math.prod(shape) for name, shape in plan.shapes.items()}
    for index, bucket in enumerate(plan.buckets):
        assert bucket.index == index
        assert 0 < bucket.numel <= bucket_elements
        for piece in bucket.pieces:
            assert any(
                spec.name == piece.name and spec.start <= piece.start
                and piece.start + piece.numel <= spec.start + spec.numel
                for spec in held[bucket.sender]
            )  # fmt: skip
            for element in range(piece.start, piece.start + piece.numel):
                travelled[piece.name][element] += 1
    assert all(count == 1 for counts in travelled.values() for count in counts)
    assert plan.numel == sum(map(len, travelled.values()))
    assert {bucket.sender for bucket in plan.buckets} == {
        k for k, specs in enumerate(held) if any(s.numel for s in specs)
    }
    assert [b for rank in range(len(held)) for b in plan.of_sender(rank)] == sorted(
        plan.buckets, key=lambda bucket: (bucket.sender, bucket.index)
    )


def test_senders_take_turns() -> None:
    held = [[ShardSpec("w", (12,), 0, 6)], [ShardSpec("w", (12,), 6, 6)]]
    plan = plan_transfer(held, bucket_bytes=12, dtype="float32")
    assert [bucket.sender for bucket in plan.buckets] == [0, 1, 0, 1]


def test_offsets_lay_the_parameters_out_without_gaps() -> None:
    held = [[ShardSpec("a", (2, 3), 0, 6), ShardSpec("b", (), 0, 1), ShardSpec("c", (4,), 0, 4)]]
    plan = plan_transfer(held, bucket_bytes=1024, dtype="bfloat16")
    assert plan.offsets() == {"a": 0, "b": 6, "c": 7}
    assert plan.num_bytes == 22


@pytest.mark.parametrize(
    ("held", "message"),
    [
        ([[ShardSpec("w.gap", (4,), 0, 2)], [ShardSpec("w.gap", (4,), 3, 1)]], "w.gap: elements 2 to 3"),
        ([[ShardSpec("w.twice", (4,), 0, 3)], [ShardSpec("w.twice", (4,), 2, 2)]], "w.twice: elements 2 to 3"),
        ([[ShardSpec("w.end", (4,), 0, 3)]], "w.end: 4 elements, but the ranks hold 3"),
        ([[ShardSpec("w.shape", (4,), 0, 4)], [ShardSpec("w.shape", (2, 2), 0, 0)]], "w.shape: trainer ranks disagree"),
        ([[ShardSpec("w.none", (4,), 0, 0)]], "w.none: 4 elements, but the ranks hold 0"),
    ],
)
def test_parameter_that_is_not_covered_exactly_once_is_named(held: list[list[ShardSpec]], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        plan_transfer(held, bucket_bytes=1024, dtype="float32")


def test_receiver_with_another_model_is_told_which_parameter() -> None:
    plan = plan_transfer([[ShardSpec("w", (2, 2), 0, 4), ShardSpec("b", (2,), 0, 2)]], bucket_bytes=64, dtype="float32")
    check_receiver(plan, {"w": (2, 2), "b": (2,)})
    with pytest.raises(PlanError, match=r"w: shape \(4,\) at the receiver"):
        check_receiver(plan, {"w": (4,), "b": (2,)})
    with pytest.raises(PlanError, match="b: the trainer has it"):
        check_receiver(plan, {"w": (2, 2)})
    with pytest.raises(PlanError, match="head: the receiver needs it"):
        check_receiver(plan, {"w": (2, 2), "b": (2,), "head": (1,)})
