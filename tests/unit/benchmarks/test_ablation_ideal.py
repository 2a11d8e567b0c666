"""The bound that schedules are measured against, where it is known otherwise."""

from dataclasses import replace

import pytest
from ablation_parts.ideal import step_s
from ablation_parts.workloads import SCHEDULES, WORKLOADS


def test_times_of_the_workloads() -> None:
    """Computed independently: seconds per step, one thing at a time, then for staleness 0, 1, 2."""
    expected = {
        "w0": (11.79, 5.61, 4.00, 4.00),
        "w1": (10.59, 5.60, 4.00, 4.00),
        "w2": (12.88, 8.51, 4.51, 4.00),
        "w3": (21.87, 18.01, 9.17, 6.24),
        "w4": (11.43, 7.06, 4.04, 4.00),
    }
    for name, (sequential, *streamed) in expected.items():
        workload = WORKLOADS[name]
        found = [step_s(workload, max_staleness=bound, seed=0, steps=25, skip=5) for bound in (0, 1, 2)]
        whole = step_s(workload, max_staleness=0, seed=0, steps=25, skip=5, sequential=True)
        assert [whole, *found] == pytest.approx([sequential, *streamed], abs=0.02)


def test_nothing_is_faster_than_the_busiest_role() -> None:
    workload = replace(WORKLOADS["w1"], actor=1.5)
    assert step_s(workload, max_staleness=9, seed=1, steps=25, skip=5) == pytest.approx(6.0, rel=0.01)


def test_every_schedule_is_one_of_the_configuration() -> None:
    assert {schedule["mode"] for schedule in SCHEDULES.values()} == {"sync", "periodic", "async", "substep"}
