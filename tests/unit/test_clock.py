"""One clock for the timelines of several hosts."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncflow.clock import HostClock, RoundTrip

OFFSET_S = 1.7e9


def trip(asked: float, there_s: float, back_s: float, busy_s: float = 0.0) -> RoundTrip:
    """A question at `asked`, with these times on the way, to a host whose clock is OFFSET_S ahead."""
    arrived = asked + there_s + OFFSET_S
    return RoundTrip(asked, arrived, arrived + busy_s, asked + there_s + busy_s + back_s)


def test_equal_ways_give_the_exact_offset() -> None:
    assert trip(5.0, 0.001, 0.001, busy_s=2.0).offset_s == pytest.approx(OFFSET_S)
    assert trip(5.0, 0.001, 0.001, busy_s=2.0).delay_s == pytest.approx(0.002)


def test_trip_with_the_least_delay_counts() -> None:
    trips = [trip(1.0, 0.5, 0.0), trip(2.0, 0.0001, 0.0001), trip(3.0, 0.0, 0.9)]
    assert HostClock.from_round_trips(trips).offset_s == pytest.approx(OFFSET_S, abs=1e-6)


@given(st.lists(st.tuples(st.floats(0, 2), st.floats(0, 2), st.floats(0, 5)), min_size=1, max_size=8))
def test_error_is_at_most_half_the_least_delay(ways: list[tuple[float, float, float]]) -> None:
    trips = [trip(10.0 * k, *way) for k, way in enumerate(ways)]
    error_s = abs(HostClock.from_round_trips(trips).offset_s - OFFSET_S)
    assert error_s <= min(there + back for there, back, _ in ways) / 2 + 1e-5


def test_host_takes_its_own_clock_of_several() -> None:
    other, own = HostClock("another boot", 1.0), HostClock.from_round_trips([trip(0.0, 0.0, 0.0)])
    assert HostClock.of_this_host([other, own]) is own
    assert HostClock.of_this_host([other], wall=lambda: 10_000.0).now() == pytest.approx(10_000, abs=60)
