"""The staleness bound holds for every sample, whatever dies, and every sample is trained once."""

import pytest

from benchmarks.ablation.staleness import under_fire
from workers.settings.schedule import Fill, ScheduleMode


@pytest.mark.parametrize(
    ("mode", "bound", "fill"),
    [
        (ScheduleMode.PERIODIC, 0, Fill.IN_ORDER),
        (ScheduleMode.ASYNC, 1, Fill.IN_ORDER),
        (ScheduleMode.SUBSTEP, 4, Fill.IN_ORDER),
        (ScheduleMode.ASYNC, 2, Fill.FIRST_READY),
    ],
)
def test_no_sample_is_older_than_the_bound_and_none_is_missing(mode: ScheduleMode, bound: int, fill: Fill) -> None:
    fire = under_fire(mode, bound, samples=12_000, seed=bound, fill=fill)
    assert fire.kills > 10
    assert fire.resumes >= 1
    assert (fire.violations, fire.missing, fire.twice) == (0, 0, 0)
    assert max(fire.staleness) == bound
