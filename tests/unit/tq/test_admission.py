"""Admission: contiguous ids, each once, and the staleness bound for every admitted group."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncflow.errors import NothingToLearn, TooManyFailures
from tq.refill import RemovalCause
from workers.admission.admission_state import AdmissionState, AdmittedGroup
from workers.settings.rollout import RolloutConfig
from workers.settings.schedule import Fill, ScheduleConfig, ScheduleMode


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
    version = start
    groups: list[int] = []
    rows: list[int] = []
    for skip in [0, *skips, num_steps]:
        version = min(version + skip, last_step)
        state.note_published(version)
        for step in state.admit_steps():
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
    assert state.admit_steps() == [1, 2]
    assert state.admit_steps() == []
    state.note_published(1)
    assert state.admit_steps() == [3]


def test_sync_admits_a_step_only_on_the_weights_right_before_it() -> None:
    state = AdmissionState(schedule(max_staleness=0), version=0, last_step=60)
    assert state.admit_steps() == [1]
    state.note_published(1)
    assert state.admit_steps() == [2]


def test_an_old_version_that_is_announced_late_changes_nothing() -> None:
    state = AdmissionState(schedule(), version=5, last_step=60)
    assert state.admit_steps() == [6, 7]
    state.note_published(3)
    assert state.admit_steps() == []


def test_nothing_is_admitted_beyond_the_last_step() -> None:
    state = AdmissionState(schedule(), version=0, last_step=1)
    assert state.admit_steps() == [1]
    state.note_published(1)
    assert state.admit_steps() == []


def test_group_among_dead_letters_is_replaced_in_its_step_and_later_steps_go_on_behind() -> None:
    state = AdmissionState(schedule(max_staleness=1, batch=2), version=0, last_step=60)
    assert state.admit_steps() == [1, 2]
    refill = state.refill_group(1, 1)
    assert refill is not None and (refill.group, refill.step, refill.rows) == (4, 1, (8, 9))
    assert state.refill_group(1, 1) is None
    state.note_published(1)
    assert state.admit_steps() == [3]
    assert [[group.group for group in state.groups_of(step)] for step in (1, 2, 3)] == [[0, 4], [2, 3], [5, 6]]
    assert state.admitted_groups == 7
    assert [state.step_of(group) for group in range(7)] == [1, 1, 2, 2, 1, 3, 3]


@given(
    batch=st.integers(1, 3),
    staleness=st.integers(0, 2),
    events=st.lists(st.tuples(st.booleans(), st.integers(0, 30)), max_size=20),
)
def test_ids_stay_contiguous_and_every_step_is_full_whatever_is_a_dead_letter(
    batch: int, staleness: int, events: list[tuple[bool, int]]
) -> None:
    state = AdmissionState(schedule(staleness, batch), version=0, last_step=9)
    version, steps = 0, []
    for publish, number in events:
        steps += state.admit_steps()
        if publish:
            version += 1
            state.note_published(version)
        elif state.admitted_groups:
            group = number % state.admitted_groups
            state.refill_group(state.step_of(group), group)
        state = AdmissionState(schedule(staleness, batch), version=0, last_step=9).restore_mark(state.make_mark())
    groups = [group for step in steps for group in state.groups_of(step)]
    assert {group.group for group in groups} | state.replaced == set(range(state.admitted_groups))
    assert all(len(state.groups_of(step)) == batch for step in steps)
    assert all(state.step_of(group.group) == group.step for group in groups)


def test_what_is_missing_after_a_restart_is_put_again_row_by_row() -> None:
    state = AdmissionState(schedule(max_staleness=1, batch=2), version=0, last_step=60)
    state.admit_steps()
    state.refill_group(1, 0)
    missing = state.missing_groups({1: [2, 3, 8], 2: [4, 5]})
    assert [(group.group, group.step, group.rows) for group in missing] == [(4, 1, (9,)), (3, 2, (6, 7))]
    state.note_published(1)
    assert [group.step for group in state.missing_groups({2: [4, 5]})] == [2]


def test_lost_rows_are_found_in_their_groups_without_those_among_dead_letters() -> None:
    state = AdmissionState(schedule(max_staleness=1, batch=2), version=0, last_step=60)
    state.admit_steps()
    state.refill_group(1, 1)
    assert [(group.group, group.rows) for group in state.groups_of_rows([9, 2, 0, 400])] == [(0, (0,)), (4, (9,))]


FIRST_READY = ScheduleConfig(rollout_batch_size=2, n_samples_per_prompt=1, max_staleness=2, fill=Fill.FIRST_READY)


def test_first_ready_admits_a_step_less_ahead_because_groups_may_be_trained_a_step_late() -> None:
    state = AdmissionState(FIRST_READY, version=0, last_step=60)
    assert state.admit_steps() == [1, 2]
    state.note_published(1)
    assert state.admit_steps() == [3]


FILTERED = RemovalCause("reward", filtered=True)
IN_ORDER = ScheduleConfig(rollout_batch_size=2, n_samples_per_prompt=1, max_staleness=1)


@pytest.mark.parametrize("schedule", [IN_ORDER, FIRST_READY], ids=["in_order", "first_ready"])
def test_groups_that_were_not_trained_fill_the_steps_after_a_resume(schedule: ScheduleConfig) -> None:
    state = AdmissionState(schedule, version=1, last_step=3, trained={0, 4})
    admitted = {step: [group.group for group in state.groups_of(step)] for step in state.admit_steps()}
    assert admitted == {2: [1, 2], 3: [3, 5]}
    assert [state.step_of(group) for group in (1, 2, 3, 5)] == [2, 2, 3, 3]
    assert state.admitted_groups == 6


def test_resumed_run_whose_groups_were_trained_in_order_goes_on_behind_them() -> None:
    state = AdmissionState(FIRST_READY, version=2, last_step=4, trained={0, 1, 2, 3})
    assert state.admit_steps() == [3, 4]


def test_refill_never_takes_the_id_of_a_group_that_was_trained() -> None:
    state = AdmissionState(FIRST_READY, version=1, last_step=4, trained={0, 5})
    assert state.admit_steps() == [2, 3]
    refill = state.refill_group(2, 2)
    assert refill is not None and (refill.group, refill.step) == (6, 2)
    assert [group.group for group in state.groups_of(2)] == [1, 6]
    state.note_published(2)
    assert [group.group for step in state.admit_steps() for group in state.groups_of(step)] == [7, 8]
    assert [state.step_of(group) for group in (1, 6, 3, 4, 7, 8)] == [2, 2, 3, 3, 4, 4]


def test_restarted_admission_looks_at_steps_whose_groups_may_be_late() -> None:
    state = AdmissionState(FIRST_READY, version=0, last_step=60, trained=())
    state.admit_steps()
    state.note_published(2)
    state.admit_steps()
    mark = state.make_mark()
    again = AdmissionState(FIRST_READY, version=0, last_step=60).restore_mark(mark)
    assert again.untrained_steps() == range(2, 5)
    missing = again.missing_groups({2: [2, 3], 3: [4], 4: [6, 7]})
    assert [(group.group, group.step) for group in missing] == [(5, 3)]


def test_restarted_admission_of_a_resumed_run_leaves_trained_groups_alone() -> None:
    trained = {0, 1, 3, 4}
    mark = AdmissionState(FIRST_READY, version=2, last_step=3, trained=trained)
    mark.admit_steps()
    again = AdmissionState(FIRST_READY, version=0, last_step=3, trained=trained).restore_mark(mark.make_mark())
    assert [(group.group, group.step) for group in again.missing_groups({})] == [(2, 3), (5, 3)]
    assert again.groups_of_rows([0, 2, 3]) == [AdmittedGroup(2, 3, (2,))], "trained groups have no rows here"


@given(batch=st.integers(1, 3), completed=st.integers(0, 3), last=st.integers(4, 7), data=st.data())
def test_resumed_run_trains_every_group_once(batch: int, completed: int, last: int, data: st.DataObject) -> None:
    schedule = FIRST_READY.model_copy(update={"rollout_batch_size": batch})
    ids = list(range(max(0, (completed - 1) * batch), (completed + 1) * batch))
    swapped = data.draw(st.permutations(ids))[: min(batch, completed * batch)]
    trained = {*range(max(0, (completed - 1) * batch)), *swapped}
    state = AdmissionState(schedule, version=completed, last_step=last, trained=trained)
    admitted = []
    for version in range(completed, last + 1):
        state.note_published(version)
        admitted += [group.group for step in state.admit_steps() for group in state.groups_of(step)]
    assert sorted([*admitted, *trained]) == list(range(last * batch))


def test_filtered_groups_are_passed_over_after_a_resume() -> None:
    state = AdmissionState(IN_ORDER, version=1, last_step=3, trained={0, 4}, filtered={2, 5})
    admitted = {step: [group.group for group in state.groups_of(step)] for step in state.admit_steps()}
    assert admitted == {2: [1, 3], 3: [6, 7]}
    assert [state.step_of(group) for group in (1, 3, 6, 7)] == [2, 2, 3, 3]
    assert state.refill_group(2, 2, FILTERED) is None and state.groups_of_rows([2, 5]) == []
    refill = state.refill_group(2, 3, FILTERED)
    assert refill is not None and (refill.group, refill.step) == (8, 2)
    again = AdmissionState(IN_ORDER, version=0, last_step=3, trained={0, 4}, filtered={2, 5}).restore_mark(
        state.make_mark()
    )
    assert [(group.group, group.step) for group in again.missing_groups({})] == [(1, 2), (8, 2), (6, 3), (7, 3)]


def test_a_step_for_which_too_many_groups_are_filtered_out_is_an_error() -> None:
    state = AdmissionState(IN_ORDER, version=0, last_step=9, max_filtered=2)
    state.admit_steps()
    assert state.refill_group(1, 0, FILTERED) is not None
    assert state.refill_group(1, 1, RemovalCause("reward", 3)) is not None, "those that are dead letters do not count"
    assert state.refill_group(2, 2, FILTERED) is not None, "other steps have their own count"
    assert state.refill_group(1, 4, FILTERED) is not None
    again = AdmissionState(IN_ORDER, version=0, last_step=9, max_filtered=2).restore_mark(state.make_mark())
    for one in (state, again):
        with pytest.raises(NothingToLearn, match="step 1: 3 groups, 60% of those .* refused by .* or skipped"):
            one.refill_group(1, 5, FILTERED)


def test_a_step_of_which_too_many_groups_are_dead_letters_is_an_error() -> None:
    state = AdmissionState(IN_ORDER, version=0, last_step=9, max_dead_letters=2)
    state.admit_steps()
    cause = RemovalCause("actor_rollout", 3)
    assert state.refill_group(1, 0, cause) is not None
    assert state.refill_group(1, 1, FILTERED) is not None, "those that are filtered out do not count"
    assert state.refill_group(2, 2, cause) is not None, "other steps have their own count"
    assert state.refill_group(1, 4, cause) is not None
    again = AdmissionState(IN_ORDER, version=0, last_step=9, max_dead_letters=2).restore_mark(state.make_mark())
    for one in (state, again):
        with pytest.raises(TooManyFailures, match="step 1: 3 of its 5 groups .* after 3 deliveries to actor_rollout"):
            one.refill_group(1, 5, cause)


@pytest.mark.parametrize(
    ("batch", "share", "most"), [(4, 0.5, 15), (32, 0.5, 64), (32, 0.75, 174), (32, 0.0, 8), (4, 0.1, 8)]
)
def test_as_many_may_be_dead_letters_as_the_largest_share_gives_with_chance(
    batch: int, share: float, most: int
) -> None:
    config = RolloutConfig(max_response_tokens=8, max_failed_share=share)
    assert config.max_dead_letters(batch) == most
    assert config.model_copy(update={"max_failed_share": 1.0}).max_dead_letters(batch) is None


@given(events=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 40)), max_size=40), batch=st.integers(1, 3))
def test_every_group_is_trained_or_filtered_once_over_resumes(events: list[tuple[int, int]], batch: int) -> None:
    """Steps are trained in order; groups are filtered, and the run resumed, at any time."""
    schedule = IN_ORDER.model_copy(update={"rollout_batch_size": batch})
    trained, filtered = set[int](), set[int]()
    completed = 0
    state = AdmissionState(schedule, version=0, last_step=99)
    for kind, number in events:
        state.admit_steps()
        if kind == 0:
            completed += 1
            groups = {group.group for group in state.groups_of(completed)}
            assert len(groups) == batch and not groups & (trained | filtered)
            trained |= groups
            state.note_published(completed)
        elif kind == 1:
            live = [group.group for step in state.untrained_steps() for group in state.groups_of(step)]
            live = [group for group in live if group not in trained]
            group = live[number % len(live)]
            assert state.refill_group(state.step_of(group), group, FILTERED) is not None
            filtered.add(group)
        else:
            state = AdmissionState(schedule, version=completed, last_step=99, trained=trained, filtered=filtered)
    state.admit_steps()
    to_come = {group.group for step in state.untrained_steps() for group in state.groups_of(step)} - trained
    assert trained | filtered | to_come == set(range(len(trained) + len(filtered) + len(to_come)))


@given(refills=st.lists(st.integers(0, 60), max_size=30), over=st.sets(st.integers(0, 30), max_size=12))
def test_ids_in_data_order_are_those_that_nobody_else_has(refills: list[int], over: set[int]) -> None:
    """Against counting one by one."""
    schedule = IN_ORDER.model_copy(update={"rollout_batch_size": 1})
    state = AdmissionState(schedule, version=0, last_step=40, filtered=over)
    state.note_published(39)
    state.admit_steps()
    for number in refills:
        group = number % state.admitted_groups
        if group not in over:
            state.refill_group(state.step_of(group), group)
    taken = over | {refill.group for refill in state.list_refills()}
    in_order = [group for group in range(200) if group not in taken]
    places = [state._in_order(place) for place in range(40)]
    assert places == in_order[:40]


@given(
    max_staleness=st.integers(0, 2),
    batch=st.integers(1, 3),
    arrivals=st.lists(st.integers(0, 4), min_size=1, max_size=12),
    refilled=st.sets(st.integers(0, 8), max_size=3),
)
def test_fed_groups_are_admitted_once_there_is_a_row_for_each_until_the_feed_ends(
    max_staleness: int, batch: int, arrivals: list[int], refilled: set[int]
) -> None:
    state = AdmissionState(schedule(max_staleness, batch), version=0, last_step=99, num_fed=0)
    num_fed, steps = 0, 0
    for number in arrivals:
        num_fed += number
        state.note_fed(num_fed, ended=False)
        while admitted := state.admit_steps():
            assert admitted == list(range(steps + 1, admitted[-1] + 1))
            steps = admitted[-1]
            state.note_published(steps)
            assert state.admitted_groups <= num_fed
        for group in sorted(refilled & set(range(state.admitted_groups))):
            if state.can_refill:
                state.refill_group(state.step_of(group), group)
        assert state.ended_at is None, "more may come"
        assert state.num_left == num_fed - state.admitted_groups
    assert state.num_left < batch
    state.note_fed(num_fed, ended=True)
    assert state.admit_steps() == []
    assert state.ended_at == steps


def test_feed_that_ended_replaces_a_group_with_what_is_left_of_it_and_then_from_its_first_row_on() -> None:
    state = AdmissionState(schedule(max_staleness=1, batch=2), version=0, last_step=9, num_fed=4)
    assert state.admit_steps() == [1, 2]
    assert not state.can_refill, "the group waits for a row"
    state.note_fed(5, ended=True)
    assert (state.ended_at, state.num_left) == (2, 1)
    assert [state.refill_group(1, group) for group in (0, 1)] == [
        AdmittedGroup(4, 1, (8, 9)),
        AdmittedGroup(5, 1, (10, 11)),  # the feed's reader begins again: row 5 of 5 is row 0
    ]
    assert (state.can_refill, state.ended_at, state.num_left) == (True, 2, 0)


def test_feed_that_has_a_row_for_every_group_of_the_run_does_not_end_it_early() -> None:
    state = AdmissionState(schedule(max_staleness=1, batch=2), version=0, last_step=2, num_fed=0)
    state.note_fed(4, ended=True)
    assert state.admit_steps() == [1, 2]
    assert state.ended_at is None


def test_resumed_run_admits_the_fed_rows_that_were_not_trained() -> None:
    state = AdmissionState(schedule(max_staleness=1, batch=2), version=1, last_step=9, trained={0, 3}, num_fed=0)
    state.note_fed(5, ended=True)
    assert state.admit_steps() == [2]
    assert [group.group for group in state.groups_of(2)] == [1, 2]
    assert (state.ended_at, state.num_left) == (2, 1)
