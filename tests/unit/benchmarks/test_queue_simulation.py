"""The simulation of many queue clients agrees with queueing theory where theory has an answer."""

from dataclasses import replace

import pytest
from transferqueue_parts.queue_simulation import Load, ServiceTimes, fewest_services, simulate

TIMES = ServiceTimes(unit_put=4e-4, unit_get=3e-4, unit_ack=2e-4, controller_notice=1e-4, controller_fetch=2e-4)
IDLE = Load(num_clients=10, rate=1.0, num_units=2, num_controllers=1)


def test_an_idle_queue_takes_the_sum_of_its_service_times() -> None:
    outcome = simulate(IDLE, TIMES, seconds=400)
    assert outcome.mean_s == pytest.approx(4e-4 + 1e-4 + 2e-4 + 3e-4 + 2e-4 + 1e-4, rel=0.05)
    assert outcome.completed == pytest.approx(outcome.offered, rel=0.05)


def test_three_visits_to_one_busy_server_wait_as_in_m_m_1() -> None:
    only_units = ServiceTimes(unit_put=1e-3, unit_get=1e-3, unit_ack=1e-3, controller_notice=0, controller_fetch=0)
    outcome = simulate(Load(250, 1.0, num_units=1, num_controllers=1), only_units, seconds=200)
    assert outcome.unit_busy == pytest.approx(0.75, rel=0.05)
    assert outcome.mean_s == pytest.approx(3 * 1e-3 / (1 - 0.75), rel=0.15)


def test_an_overloaded_unit_completes_what_it_can() -> None:
    outcome = simulate(Load(1000, 5.0, num_units=1, num_controllers=1), TIMES, seconds=10)
    assert outcome.unit_busy > 0.99
    assert outcome.completed < outcome.offered / 2


def test_more_units_are_less_busy_but_every_controller_hears_every_notice() -> None:
    load = Load(1000, 1.0, num_units=2, num_controllers=1)
    few = simulate(load, TIMES)
    many = simulate(replace(load, num_units=8, num_controllers=4), TIMES)
    assert many.unit_busy < few.unit_busy / 2
    assert many.controller_busy == pytest.approx(1000 * (2 * 1e-4 + 2e-4 / 4), rel=0.15)


def test_the_same_seed_gives_the_same_run() -> None:
    assert simulate(IDLE, TIMES, seed=3) == simulate(IDLE, TIMES, seed=3)
    assert simulate(IDLE, TIMES, seed=3) != simulate(IDLE, TIMES, seed=4)


def test_the_fewest_services_keep_up_and_one_unit_less_does_not() -> None:
    found = fewest_services(1000, 2.0, TIMES)
    assert found is not None
    enough = simulate(found, TIMES)
    assert enough.unit_busy < 0.8
    assert enough.completed == pytest.approx(enough.offered, rel=0.05)
    assert simulate(replace(found, num_units=found.num_units - 1), TIMES).unit_busy > 0.7


def test_a_rate_that_notices_alone_exceed_cannot_be_served() -> None:
    assert fewest_services(1000, 4.0, TIMES) is None
