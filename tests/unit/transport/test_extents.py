"""The allocator never hands out the same bytes twice, and ends as it began."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncflow.transport.frame import ALIGN_BYTES, Extents

SPAN = 64 * ALIGN_BYTES


@given(st.lists(st.one_of(st.integers(0, SPAN // 3), st.floats(0, 1, exclude_max=True)), max_size=60))
def test_part_is_the_lowest_that_fits_between_the_parts_in_use(steps: list[int | float]) -> None:
    extents = Extents(SPAN)
    used: dict[int, int] = {}
    for step in steps:
        if isinstance(step, float):
            if used:
                start = sorted(used)[int(step * len(used))]
                extents.free_extent(start)
                del used[start]
            continue
        size = max(1, -(-step // ALIGN_BYTES)) * ALIGN_BYTES
        ends = sorted([0, *(start + length for start, length in used.items())])
        fitting = (end for end, start in zip(ends, [*sorted(used), SPAN], strict=True) if start - end >= size)
        expected = next(fitting, None)
        assert extents.allocate_extent(step) == expected
        if expected is not None:
            used[expected] = size
        assert extents.in_use == len(used)
    for start in used:
        extents.free_extent(start)
    assert extents.allocate_extent(SPAN) == 0


def test_lowest_address_that_fits_is_used_again() -> None:
    extents = Extents(SPAN)
    first, second, third = (extents.allocate_extent(size) for size in (128, 256, 64))
    assert (first, second, third) == (0, 128, 384)
    extents.free_extent(128)
    extents.free_extent(0)
    assert extents.allocate_extent(384) == 0
    assert extents.highest == 448


def test_what_does_not_fit_is_refused() -> None:
    extents = Extents(SPAN)
    assert extents.allocate_extent(SPAN + 1) is None
    assert extents.allocate_extent(SPAN) == 0
    assert extents.allocate_extent(0) is None
    extents.free_extent(0)
    assert Extents(ALIGN_BYTES - 1).allocate_extent(1) is None


def test_only_what_is_in_use_can_be_freed() -> None:
    extents = Extents(SPAN)
    extents.allocate_extent(100)
    extents.free_extent(0)
    for start in (0, 64, SPAN):
        with pytest.raises(KeyError):
            extents.free_extent(start)
