"""What a controller keeps in the job store: no large value, and no more bytes a change than the change is worth."""

import itertools

import pytest
from counting_store import CountingStore, memory_in

from tq.control.events import RecalledLosses, RecalledRemoved
from tq.control.row_table import Losses, RowSet
from tq.messages import RowRecords
from tq.refill import AdmissionMark, Refill, RemovalCause
from workers.admission.admission_state import AdmissionState
from workers.settings.schedule import ScheduleConfig

SCHEDULE = ScheduleConfig(rollout_batch_size=64, n_samples_per_prompt=2)
CAUSE = RemovalCause("a_task_with_quite_a_long_name", 3, True)
LARGEST_VALUE = 2**20
ROWS = range(2**40, 2**40 + 1_000_000)
NUM_REFILLS = 100_000


@pytest.fixture(name="store")
def _store() -> CountingStore:
    return CountingStore()


def described(parts: dict[int, list[int]]) -> dict[int, list[RowRecords]]:
    return {
        part: [RowRecords(1, rows, rows, [8] * len(rows), rows, [0] * len(rows), ["x"], [])] if rows else []
        for part, rows in parts.items()
    }


def lost_in(store: CountingStore) -> list[int]:
    """Return the lost rows that the next incarnation is told of."""
    told = [event for event in memory_in(store).replay_events() if isinstance(event, RecalledLosses)]
    return sorted(row for event in told for record in event.records for row in record.rows)


def refills(number: int) -> list[Refill]:
    return [Refill(1000 + k, 7, k, CAUSE) for k in range(number)]


def refills_in(store: CountingStore) -> list[Refill]:
    """Return the refills that the next incarnation knows of."""
    mark = memory_in(store).admission
    return [] if mark is None else AdmissionState(SCHEDULE, version=0, last_step=9).restore_mark(mark).list_refills()


@pytest.mark.slow  # a million rows
def test_no_value_is_large_after_a_million_rows_and_a_hundred_thousand_filtered_groups(store: CountingStore) -> None:
    memory, lost = memory_in(store), Losses(1)
    lost.lose(ROWS)
    memory.remember_losses(lambda: ({1: RowSet(range(0, 2_000_000, 2))}, described(lost.take_changed_parts())))
    memory.remember_admission(AdmissionMark(0, 9, refills(NUM_REFILLS)))
    assert max(store.written.values()) < LARGEST_VALUE
    assert lost_in(store) == list(ROWS)
    assert refills_in(store) == refills(NUM_REFILLS)


def test_rows_that_a_partition_lacks_are_written_in_parts_and_only_where_they_changed(store: CountingStore) -> None:
    memory, removed = memory_in(store), RowSet(range(0, 1_000_000, 2))
    memory.remember_removed(1, lambda _: removed.copy())
    assert max(store.written.values()) < LARGEST_VALUE
    before = store.written_bytes
    removed.add(999_999)
    memory.remember_removed(1, lambda _: removed.copy())
    assert store.written_bytes - before < LARGEST_VALUE
    told = RowSet()
    for event in memory_in(store).replay_events():
        assert isinstance(event, RecalledRemoved) and event.partition == 1
        told.merge_rows(event.rows)
    assert told == removed


def test_filtered_groups_do_not_cost_more_the_more_there_were(store: CountingStore) -> None:
    memory, known = memory_in(store), refills(20_000)
    memory.remember_admission(AdmissionMark(0, 9, known[:-200]))
    for number in range(len(known) - 200, len(known)):
        before = store.written_bytes
        memory.remember_admission(AdmissionMark(0, 9, known[: number + 1]))
        assert store.written_bytes - before < 2**15
    assert refills_in(store) == known


@pytest.mark.parametrize("number", [0, 1, 255, 256, 257])
def test_refills_go_on_after_a_restart(store: CountingStore, number: int) -> None:
    memory_in(store).remember_admission(AdmissionMark(0, 9, refills(number)))
    memory_in(store).remember_admission(AdmissionMark(0, 9, refills(number + 1)))
    assert refills_in(store) == refills(number + 1)


def test_rows_that_are_lost_no_more_leave_the_store_part_by_part(store: CountingStore) -> None:
    memory, lost = memory_in(store), Losses(1)
    lost.lose(range(100_000))
    memory.remember_losses(lambda: ({}, described(lost.take_changed_parts())))
    store.written.clear()
    for number in itertools.chain(range(50_000), [70_000]):
        lost.end(number)
    memory.remember_losses(lambda: ({}, described(lost.take_changed_parts())))
    assert lost_in(store) == [number for number in range(50_000, 100_000) if number != 70_000]
    assert len(store.written) == 2, "the part that is over in half, and the one of row 70,000"
    lost.note_put_again(90_000)
    assert not lost.changed, "the unit may not know yet who was done with it"
    lost.end(90_000)
    assert lost.changed
