"""How long a unit may be away."""

from fake_timers import FakeTimers

from tq.control.connected import UnitGraces


def test_time_of_an_earlier_break_does_not_count_for_a_later_one() -> None:
    timers, expired = FakeTimers(), list[tuple[str, int]]()
    graces = UnitGraces(timers, 30.0, lambda unit, number: expired.append((unit, number)))
    graces.begin("storage-0")
    first = timers.set[0][1].callback
    assert first is not None
    graces.end("storage-0")
    assert timers.live() == []
    graces.begin("storage-0")
    first()  # it was about to run when it was cancelled
    assert not graces.is_grace_over(*expired[-1])
    second = timers.set[1][1].callback
    assert second is not None
    second()
    assert graces.is_grace_over(*expired[-1])
    assert not graces.is_grace_over(*expired[-1])


def test_units_are_away_each_for_itself() -> None:
    timers, expired = FakeTimers(), list[tuple[str, int]]()
    graces = UnitGraces(timers, 30.0, lambda unit, number: expired.append((unit, number)))
    graces.begin("storage-0")
    graces.begin("storage-1")
    graces.end("storage-1")
    graces.end("storage-2")
    assert timers.live() == [30.0]
    assert timers.set[0][1].callback is not None
    timers.set[0][1].callback()
    assert graces.is_grace_over(*expired[-1])
