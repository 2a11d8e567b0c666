"""Admission: contiguous ids, each once, and the staleness bound for every admitted group."""

from hypothesis import given
from hypothesis import strategies as st

from tq.admission import AdmissionState
from tq.config import ScheduleConfig, ScheduleMode


def schedule(max_staleness: int = 1, batch: int = 3, size: int = 2) -> ScheduleConfig:
    mode = ScheduleMode.ASYNC if max_staleness else ScheduleMode.SYNC
    return ScheduleConfig(mode=mode, max_staleness=max_staleness, rollout_batch_size=batch, n_samples_per_prompt=size)


@given(
    max_staleness=st.integers(0, 3),
    batch=st.integers(1, 4),
    size=st.integers(1, 3),
    start=st.integers(0, 5),
    num_steps=st.integers(0, 8),
    skips=st.lists(st.integers(0, 3), max_size=12),
)
def test_every_group_is_admitted_once_in_order_and_within_the_bound(
    max_staleness: int, batch: int, size: int, start: int, num_steps: int, skips: list[int]
) -> None:
    last_step = start + num_steps
    state = AdmissionState(schedule(max_staleness, batch, size), version=start, last_step=last_step)
    version, groups, rows = start, [], []
    for skip in [0, *skips, num_steps]:
        version = min(version + skip, last_step)
        state.published(version)
        for step in state.admissible():
            assert (step - 1) - version <= max_staleness
            for group in state.groups_of(step):
                assert group.step == step
                groups.append(group.group)
                rows.extend(group.rows)
        assert state.admitted_groups == start * batch + len(groups)
    assert groups == list(range(start * batch, last_step * batch))
    assert rows == list(range(start * batch * size, last_step * batch * size))


def test_a_version_admits_exactly_one_more_step() -> None:
    state = AdmissionState(schedule(max_staleness=1), version=0, last_step=60)
    assert state.admissible() == [1, 2]
    assert state.admissible() == []
    state.published(1)
    assert state.admissible() == [3]


def test_sync_admits_a_step_only_on_the_weights_right_before_it() -> None:
    state = AdmissionState(schedule(max_staleness=0), version=0, last_step=60)
    assert state.admissible() == [1]
    state.published(1)
    assert state.admissible() == [2]


def test_an_old_version_that_is_announced_late_changes_nothing() -> None:
    state = AdmissionState(schedule(), version=5, last_step=60)
    assert state.admissible() == [6, 7]
    state.published(3)
    assert state.admissible() == []


def test_nothing_is_admitted_beyond_the_last_step() -> None:
    state = AdmissionState(schedule(), version=0, last_step=1)
    assert state.admissible() == [1]
    state.published(1)
    assert state.admissible() == []
