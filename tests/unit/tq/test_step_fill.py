"""Where the rounds of a step come from when it trains what is finished first."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from tq.policies import Offer, StepSpec, choose

SPEC = StepSpec(num_rows=16, lateness=1)


def test_oldest_partition_with_a_full_round_comes_first() -> None:
    assert choose(SPEC, 4, 0, [Offer(3, 4, 8), Offer(4, 8, 16), Offer(5, 16, 16)], 8) == Offer(4, 8, 16)


def test_later_partition_is_taken_while_the_older_ones_are_not_ready() -> None:
    assert choose(SPEC, 4, 0, [Offer(3, 4, 8), Offer(4, 4, 16), Offer(5, 12, 16)], 8) == Offer(5, 8, 16)


def test_only_what_is_due_is_taken_once_the_step_has_no_room_for_more() -> None:
    offers = [Offer(3, 4, 8), Offer(4, 16, 16)]
    assert choose(SPEC, 4, 8, offers, 8) is None
    assert choose(SPEC, 4, 8, [Offer(3, 8, 8), Offer(4, 16, 16)], 8) == Offer(3, 8, 8)


def test_round_is_cut_where_a_full_one_would_take_the_room_of_what_is_due() -> None:
    assert choose(SPEC, 4, 4, [Offer(3, 0, 8), Offer(4, 16, 16)], 8) == Offer(4, 4, 16)


def test_rest_of_a_partition_is_taken_though_it_is_no_full_round() -> None:
    assert choose(SPEC, 4, 0, [Offer(3, 2, 2), Offer(4, 0, 16)], 8) == Offer(3, 2, 2)


def test_full_step_takes_nothing() -> None:
    assert choose(SPEC, 4, 16, [Offer(4, 16, 16)], 8) is None


@given(
    lateness=st.integers(1, 2),
    gate=st.integers(0, 2),
    size=st.integers(1, 9),
    full=st.integers(1, 4),
    last=st.integers(1, 6),
    start=st.integers(0, 2),
    data=st.data(),
)
def test_every_row_is_assigned_once_in_full_steps_and_never_too_late(
    lateness: int, gate: int, size: int, full: int, last: int, start: int, data: st.DataObject
) -> None:
    """Rows become ready in any order; a resumed run begins with late rows, and without those that were early."""
    spec = StepSpec(size, lateness)
    left, ready = Counter[int](), Counter[int]()
    early = data.draw(st.integers(0, size)) if start else 0
    left.update({start: early, start + 1: size - early})
    admitted = start + 1
    for step in range(start + 1, start + last + 1):
        while admitted < min(step + gate, start + last):
            admitted += 1
            left[admitted] += size
        assigned = 0
        while assigned < size:
            offers = [Offer(number, ready[number], left[number]) for number in sorted(left) if left[number]]
            chosen = choose(spec, step, assigned, offers, full)
            if chosen is None:
                waiting = [number for number in sorted(left) if ready[number] < left[number]]
                assert waiting, "everything is ready, and nothing is taken"
                ready[data.draw(st.sampled_from(waiting))] += 1
                continue
            assert 0 < chosen.num_ready <= min(full, ready[chosen.partition])
            assert chosen.partition >= step - lateness, "too late"
            left[chosen.partition] -= chosen.num_ready
            ready[chosen.partition] -= chosen.num_ready
            assigned += chosen.num_ready
        assert assigned == size
    assert not +left, "rows were never trained"
