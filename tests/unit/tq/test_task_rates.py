"""How fast tasks get on."""

from tq.control.controller import TaskRates
from tq.messages import TaskStats


def rate(rates: TaskRates, acked: int, now: float) -> float:
    stats = TaskStats("ref", 0, 0, 0, 0, 0, acked=acked)
    rates.note_rates([stats], now)
    return stats.rows_per_s


def test_rate_is_that_of_the_last_seconds() -> None:
    rates = TaskRates(100.0)
    assert rate(rates, 20, 104.0) == 5.0
    assert rate(rates, 40, 120.0) == 2.0, "the window ends here"
    assert rate(rates, 70, 130.0) == 3.0
    assert rate(rates, 70, 140.0) == 1.5
    assert rate(rates, 70, 141.0) == 0.0
