"""What a unit told outlives it: the next life knows which rows went, who was done with them, and of no others."""

import contextlib
import mmap
import os
from collections.abc import Iterator

import pytest
from counting_store import CountingStore

from asyncflow.errors import TransportError
from asyncflow.sealed_store import SealedStore
from asyncflow.transport.meeting import Credentials
from tq.messages import (
    OutputsWritten,
    RegisterUnit,
    RemovalReason,
    RowRecords,
    RowsConfirmed,
    RowsCreated,
    RowsRemoved,
)
from tq.refill import RemovalCause
from tq.unit import row_journal
from tq.unit.row_journal import Change, JournalMemory, Life, RowJournal, confirmation

UNIT = "storage-0"


def created(*rows: int, partition: int = 1, values: bytes = b"") -> RowsCreated:
    groups = [row // 2 for row in rows]
    return RowsCreated(UNIT, partition, list(rows), groups, ["x"], [3] * len(rows), 5, 2, values=values)


def confirmed(*rows: int) -> RowsConfirmed:
    return RowsConfirmed(UNIT, list(rows))


def written(task: str, *rows: int) -> OutputsWritten:
    return OutputsWritten(UNIT, task, list(rows), [f"of_{task}"], [2] * len(rows), 2 * len(rows))


def removed(reason: RemovalReason, *rows: int, partition: int = 1) -> RowsRemoved:
    return RowsRemoved(UNIT, partition, list(rows), reason, RemovalCause("work", 3))


def life(*changes: Change) -> Life:
    told = Life(RegisterUnit(UNIT, "1", [], {}))
    for change in changes:
        told.apply_change(change)
    return told


class Starter:
    """The process that outlives a unit, and what the unit holds in each of its lives."""

    def __init__(self) -> None:
        self.store = SealedStore(CountingStore(), b"secret")
        self.memory = JournalMemory(self.store, UNIT)
        self.failures: list[Exception] = []
        self.holds = RegisterUnit(UNIT, "0", [], {})
        self.journals: list[RowJournal] = []

    def start_unit(self, *, lineage: int = 0) -> RowJournal:
        self.holds = RegisterUnit(UNIT, str(int(self.holds.incarnation) + 1), [], {})
        credentials = Credentials(None, b"secret")  # type: ignore[arg-type]
        credentials._idle.append(self.store)
        self.journals.append(
            RowJournal(credentials, UNIT, lineage=lineage, inventory=lambda: self.holds, failed=self.failures.append)
        )
        return self.journals[-1]

    @property
    def num_bytes(self) -> int:
        """What the memory takes."""
        return sum(os.fstat(fd).st_size for fd in self.memory._fds)


@pytest.fixture(name="starter")
def _starter() -> Iterator[Starter]:
    starter = Starter()
    with starter.memory:
        yield starter
    for journal in starter.journals:
        journal.close()


def rows_of(inventory: RegisterUnit) -> list[int]:
    return sorted(row for record in inventory.records for row in record.rows)


def test_rows_are_told_with_all_that_is_needed_to_put_them_again() -> None:
    told = life(created(4, 5), confirmed(4, 5), written("ref", 5)).inventory()
    assert told == RegisterUnit(
        UNIT,
        "1",
        [
            RowRecords(1, [4], [2], [2], [3], [3], ["x"], []),
            RowRecords(1, [5], [2], [2], [5], [4], ["of_ref", "x"], ["ref"]),
        ],
        {},
    )


def test_put_that_was_not_confirmed_is_told_only_if_a_task_worked_on_it() -> None:
    assert life(created(1, 2)).empty
    assert rows_of(life(created(1, 2), written("look", 2)).inventory()) == [2]


def test_what_controllers_know_to_be_done_is_done() -> None:
    told = life(created(1, 2), confirmed(1, 2), confirmation(UNIT, {"look": [2], "ref": [2, 1]})).inventory()
    assert {tuple(record.rows): record.done for record in told.records} == {(1,): ["ref"], (2,): ["look", "ref"]}


def test_rows_that_left_are_not_told_and_their_groups_are() -> None:
    told = life(
        created(*range(8)),
        confirmed(*range(8)),
        removed(RemovalReason.REFUSED, 0),
        removed(RemovalReason.DROPPED, 1),
        removed(RemovalReason.REMOVED, 2),
        removed(RemovalReason.GROUP_LEFT, 4, 5),
        removed(RemovalReason.GROUP_LEFT, 6, 7),
        created(6, 7),  # tried again
        confirmed(6, 7),
    ).inventory()
    assert rows_of(told) == [3, 6, 7]
    assert told.removed_groups == [removed(RemovalReason.GROUP_LEFT, 4, 5)]


def test_cleared_partition_leaves_nothing_not_even_what_was_done_in_it() -> None:
    changes = created(1, 2), confirmed(1, 2), written("look", 2), removed(RemovalReason.GROUP_LEFT, 1)
    assert life(*changes, removed(RemovalReason.CLEARED)).empty
    assert not life(*changes, removed(RemovalReason.CLEARED, partition=2)).empty


def test_changes_that_the_inventory_has_already_change_nothing() -> None:
    changes = created(4, 5), confirmed(4, 5), written("ref", 5)
    before = life(*changes).inventory()
    for number in range(len(changes)):
        again = Life(life(*changes).inventory())
        for change in changes[number:]:
            if not isinstance(change, RowsCreated):  # one that is in the inventory was just made
                again.apply_change(change)
        assert again.inventory() == before


def test_next_life_tells_of_the_earlier_ones_until_all_controllers_know(starter: Starter) -> None:
    first = starter.start_unit()
    assert first.earlier == []
    for change in (created(4, 5, values=b"a" * 999), confirmed(4, 5)):
        first.append(change)
    second = starter.start_unit()
    assert [(one.incarnation, rows_of(one)) for one in second.earlier] == [("1", [4, 5])]
    for change in (created(6), confirmed(6)):
        second.append(change)
    third = starter.start_unit()
    assert [(one.incarnation, rows_of(one)) for one in third.earlier] == [("1", [4, 5]), ("2", [6])]
    third.forget_earlier()
    assert starter.start_unit().earlier == []


def test_life_that_ended_before_it_held_anything_hides_none(starter: Starter) -> None:
    first = starter.start_unit()
    first.append(created(4))
    first.append(confirmed(4))
    for _ in range(3):
        last = starter.start_unit()
    assert [rows_of(one) for one in last.earlier] == [[4]]


def test_new_lineage_begins_without_the_rows_of_the_one_before(starter: Starter) -> None:
    first = starter.start_unit()
    first.append(created(4))
    first.append(confirmed(4))
    assert starter.start_unit(lineage=1).earlier == []


@pytest.mark.parametrize("torn", [1, 7, 12, 40])
def test_change_that_a_kill_tore_is_left_out_and_those_before_it_are_not(starter: Starter, torn: int) -> None:
    first = starter.start_unit()
    for change in (created(4), confirmed(4), created(5)):
        first.append(change)
    before = first._end
    first.append(confirmed(5))
    torn = min(before + torn, first._end - 1)
    os.pwrite(first._files[0], bytes(first._end - torn), torn)
    second = starter.start_unit()
    assert [rows_of(one) for one in second.earlier] == [[4]]


@pytest.mark.parametrize("calls", range(4))
def test_rewrite_that_a_kill_ended_leaves_what_was_there_or_what_is_now(
    starter: Starter, calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = starter.start_unit()
    first.append(created(4))
    first.append(confirmed(4))
    starter.holds.records = life(created(4), confirmed(4)).inventory().records
    left = calls

    class Killed(mmap.mmap):
        """The process ends before this write."""

        def __setitem__(self, place: object, data: object) -> None:
            nonlocal left
            left -= 1
            if left < 0:
                raise KeyboardInterrupt
            super().__setitem__(place, data)  # type: ignore[call-overload]

    def cut(_: int) -> None:
        if calls < 3:
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(row_journal.mmap, "mmap", Killed)
        patched.setattr(
            RowJournal, "_cut_file", lambda self, fd: cut(fd) if fd == self._files[1] and left == 0 else None
        )
        with contextlib.suppress(KeyboardInterrupt):
            first.forget_finished()
    assert [rows_of(one) for one in starter.start_unit().earlier] == [[4]]


def test_memory_does_not_grow_with_the_rows_that_went_through(
    starter: Starter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_journal, "_LEAST_BYTES", 4096)
    journal = starter.start_unit()
    for row in range(3000):
        for change in (created(row), confirmed(row), written("look", row)):
            journal.append(change)
        starter.holds.records = [RowRecords(1, [row], [row // 2], [2], [5], [7], ["of_look", "x"], ["look"])]
        assert starter.num_bytes < 6 * 4096
    (last,) = starter.start_unit().earlier
    assert 2999 in rows_of(last) and len(rows_of(last)) < 100


def test_open_commit_is_not_noted_by_a_rewrite_unless_the_file_gets_far_too_large(
    starter: Starter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its holder has not heard that it counts, and acks again: it must find its lease."""
    monkeypatch.setattr(row_journal, "_LEAST_BYTES", 4096)
    journal = starter.start_unit()
    journal.append(created(4))
    journal.append(confirmed(4))
    starter.holds.records = [RowRecords(1, [4], [2], [2], [5], [7], ["of_look", "x"], ["look"])]
    journal.open_commits += 1
    journal.forget_finished()
    while journal._end < 2 * 4096:
        journal.append(confirmed(4))
    assert [record.done for one in starter.start_unit().earlier for record in one.records] == [[]]
    journal = starter.journals[-1]
    journal.open_commits += 1
    for _ in range(3000):
        journal.append(confirmed(4))
    assert starter.num_bytes < 16 * 4096


def test_unit_that_cannot_note_a_change_has_failed(starter: Starter, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = starter.start_unit()

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "ftruncate", full)
    journal._memory = None
    with pytest.raises(TransportError, match="storage-0: its journal of rows cannot grow"):
        journal.append(created(4))
    assert len(starter.failures) == 1


def test_unit_that_nobody_keeps_memory_for_keeps_no_journal(starter: Starter, caplog: pytest.LogCaptureFixture) -> None:
    starter.memory.close()  # the process that offered it is gone, say
    journal = starter.start_unit()
    assert "no row journal: rows will be forgotten if it dies together with all controllers" in caplog.text
    starter.store.delete_key("tq/journal/storage-0")
    caplog.clear()
    for one in (journal, starter.start_unit()):
        one.append(created(4))
        one.forget_finished()
        assert one.earlier == []
    assert not caplog.text
