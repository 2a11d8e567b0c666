"""Boxes against brute force: every answer is compared with a mask of the elements."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from weightsync.plan import Box, first_overlap

SHAPES = st.lists(st.integers(0, 5), max_size=3).map(tuple)


@st.composite
def boxes_of(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    """A box inside of a shape."""
    starts = tuple(draw(st.integers(0, length)) for length in shape)
    return Box(starts, tuple(draw(st.integers(0, length - start)) for start, length in zip(starts, shape, strict=True)))


@st.composite
def shaped_boxes(draw: st.DrawFn, most: int = 6) -> tuple[tuple[int, ...], list[Box]]:
    """A shape and boxes in it."""
    shape = draw(SHAPES)
    return shape, draw(st.lists(boxes_of(shape), min_size=1, max_size=most))


@st.composite
def tilings(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Box]]:
    """A shape and boxes that cover it once, made by cutting again and again."""
    shape = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=3)))
    boxes = [Box.from_shape(shape)]
    for _ in range(draw(st.integers(0, 6))):
        box = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        axis = draw(st.integers(0, len(shape) - 1))
        at = draw(st.integers(0, box.size[axis]))
        boxes.extend(part for part in (narrowed(box, axis, 0, at), narrowed(box, axis, at, box.size[axis])))
    return shape, draw(st.permutations(boxes))


def narrowed(box: Box, axis: int, start: int, stop: int) -> Box:
    offset, size = list(box.offset), list(box.size)
    offset[axis] += start
    size[axis] = stop - start
    return Box(tuple(offset), tuple(size))


def mask(shape: tuple[int, ...], *boxes: Box) -> NDArray[np.int64]:
    """How many of the boxes have each element."""
    counts = np.zeros(shape, np.int64)
    for box in boxes:
        counts[box.slices] += 1
    return counts


def places(shape: tuple[int, ...], box: Box) -> list[int]:
    """The box's elements in the flattened tensor, in the box's order."""
    numbers: list[int] = np.arange(math.prod(shape)).reshape(shape)[box.slices].ravel().tolist()
    return numbers


@given(shaped_boxes())
def test_number_of_elements_and_slices_are_those_of_the_mask(drawn: tuple[tuple[int, ...], list[Box]]) -> None:
    shape, boxes = drawn
    for box in boxes:
        assert box.fits_shape(shape)
        assert box.numel == mask(shape, box).sum() == len(places(shape, box))
    assert Box.from_shape(shape).numel == math.prod(shape)


@given(shaped_boxes())
def test_run_is_given_exactly_where_the_elements_follow_each_other(drawn: tuple[tuple[int, ...], list[Box]]) -> None:
    shape, boxes = drawn
    for box in boxes:
        elements, run = places(shape, box), box.contiguous_run(shape)
        consecutive = all(b == a + 1 for a, b in itertools.pairwise(elements))
        if run is None:
            assert not consecutive
        else:
            assert consecutive
            assert run[1] == len(elements)
            assert not elements or run[0] == elements[0]


@given(shaped_boxes(), st.integers(1, 30))
def test_cut_gives_the_elements_in_order_in_small_parts(drawn: tuple[tuple[int, ...], list[Box]], most: int) -> None:
    shape, boxes = drawn
    parts = list(boxes[0].cut_parts(most))
    assert all(0 < part.numel <= most for part in parts)
    assert [place for part in parts for place in places(shape, part)] == places(shape, boxes[0])


@given(shaped_boxes(), st.integers(0, 130))
def test_split_gives_the_first_rows_and_the_rest(drawn: tuple[tuple[int, ...], list[Box]], first: int) -> None:
    shape, boxes = drawn
    box = boxes[0]
    head, rest = box.split(first)
    assert [k for part in (head, rest) if part is not None for k in places(shape, part)] == places(shape, box)
    assert head is None or head.numel <= first
    if rest is not None:
        row = box.numel // next((size for size in box.size if size > 1), 1)
        assert first - row < (head.numel if head is not None else 0) == box.numel - rest.numel


def test_split_of_a_single_element_does_not_give_less() -> None:
    for box in (Box((), ()), Box((2, 0), (1, 1))):
        assert box.split(0) == (None, box)
        assert box.split(1) == (box, None)


@given(shaped_boxes(most=2))
def test_overlap_of_two_is_that_of_their_masks(drawn: tuple[tuple[int, ...], list[Box]]) -> None:
    shape, boxes = drawn
    one, other = boxes[0], boxes[-1]
    assert one.overlaps_box(other) == other.overlaps_box(one) == bool((mask(shape, one) * mask(shape, other)).any())


@given(shaped_boxes(most=2))
def test_overlap_and_hull_of_two_are_those_of_their_masks(drawn: tuple[tuple[int, ...], list[Box]]) -> None:
    shape, boxes = drawn
    one, other = boxes[0], boxes[-1]
    both, hull = one.overlap(other), one.hull(other)
    shared = mask(shape, one) * mask(shape, other)
    assert (both is None) == (not shared.any())
    assert both is None or np.array_equal(mask(shape, both), shared)
    assert one.relative_to(hull) is not None and other.relative_to(hull) is not None
    corners = zip(one.offset, other.offset, one.size, other.size, strict=True)
    assert hull.size == tuple(max(a + m, b + n) - min(a, b) for a, b, m, n in corners)


@given(shaped_boxes(most=2))
def test_box_within_another_selects_the_same_elements_of_it(drawn: tuple[tuple[int, ...], list[Box]]) -> None:
    shape, boxes = drawn
    inner, outer = boxes[0], boxes[-1]
    relative = inner.relative_to(outer)
    if relative is not None:
        whole = np.arange(math.prod(shape)).reshape(shape)
        assert np.array_equal(whole[outer.slices][relative.slices], whole[inner.slices])
    elif inner.numel:
        assert not (mask(shape, inner) <= mask(shape, outer)).all()


@given(shaped_boxes(most=8))
def test_first_overlap_finds_a_pair_exactly_where_there_is_one(drawn: tuple[tuple[int, ...], list[Box]]) -> None:
    shape, boxes = drawn
    found = first_overlap(boxes)
    if found is None:
        assert (mask(shape, *boxes) <= 1).all()
    else:
        assert found[0] < found[1]
        assert boxes[found[0]].overlaps_box(boxes[found[1]])


@given(tilings(), st.data())
def test_first_overlap_tells_a_tiling_from_one_with_a_part_more(
    drawn: tuple[tuple[int, ...], list[Box]], data: st.DataObject
) -> None:
    shape, boxes = drawn
    assert first_overlap(boxes) is None
    more = data.draw(boxes_of(shape))
    assert (first_overlap([*boxes, more]) is not None) == (more.numel > 0)


def test_first_overlap_of_a_pinwheel_that_no_axis_tells_apart() -> None:
    around = [Box((0, 0), (1, 2)), Box((0, 2), (2, 1)), Box((2, 1), (1, 2)), Box((1, 0), (2, 1))]
    assert first_overlap([*around, Box((1, 1), (1, 1))]) is None
    assert first_overlap([*around, Box((1, 1), (2, 1))]) == (2, 4)


def test_first_overlap_of_columns_compares_no_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[Box] = []
    monkeypatch.setattr(Box, "overlaps_box", lambda self, other: compared.append(other))
    assert first_overlap([Box((0, k), (64, 1)) for k in range(64)]) is None
    grid = itertools.product(range(0, 64, 8), range(64))
    assert first_overlap([Box((row, column), (8, 1)) for row, column in grid]) is None
    assert compared == []


def test_box_outside_of_a_shape_is_not_inside() -> None:
    assert not Box((0,), (4,)).fits_shape((3,))
    assert not Box((-1,), (2,)).fits_shape((3,))
    assert not Box((0,), (2,)).fits_shape((3, 1))
    assert not Box((0,), (-1,)).fits_shape((3,))


def test_box_reads_as_slices() -> None:
    assert str(Box((2, 0), (3, 4))) == "[2:5, 0:4]"
    assert Box.rows((8, 4), 2, 5) == Box((2, 0), (3, 4))
