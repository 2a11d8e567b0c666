"""The verdict over a storm's ledgers counts acks, not deliveries, and finds every way to break exactly-once."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks.transferqueue.storm_ledger import (
    Deed,
    Kill,
    LedgerFile,
    Record,
    Verdict,
    judge,
    read_ledger,
    unfinished_puts,
)

PUT = [Record(Deed.PUT, [1, 2]), Record(Deed.PUT_DONE, [1, 2])]


def ack(task: str, row: int, token: int = 7, *, deed: Deed = Deed.CONFIRMED) -> list[Record]:
    return [Record(Deed.INTENT, [row], task, token), Record(deed, [row], task, token)]


def verdict(*records: Record, kills: Sequence[Kill] = ()) -> Verdict:
    return judge([*PUT, *records], tasks=("score", "train"), writers={"score"}, kills=kills)


def acked(*rows: int) -> list[Record]:
    return [record for row in rows for task in ("score", "train") for record in ack(task, row)]


def faults(found: Verdict) -> tuple[int, int, int]:
    return found.lost, found.twice, found.corrupt


def test_rows_acked_once_per_task_are_faultless() -> None:
    found = verdict(*acked(1, 2))
    assert faults(found) == (0, 0, 0)
    assert (found.rows, found.deliveries) == (2, 4)


def test_a_row_without_an_ack_is_lost() -> None:
    assert faults(verdict(*acked(1), *ack("score", 2))) == (1, 0, 0)


def test_a_second_confirmed_ack_is_one_too_many() -> None:
    assert faults(verdict(*acked(1, 2), *ack("train", 2, token=9))) == (0, 1, 0)


def test_a_refused_ack_does_not_count() -> None:
    found = verdict(*acked(1), *ack("score", 2), *ack("train", 2, deed=Deed.FENCED))
    assert faults(found) == (1, 0, 0)
    assert found.fenced == 1


def test_a_client_that_died_before_the_answer_may_have_acked() -> None:
    found = verdict(*acked(1), *ack("score", 2), Record(Deed.INTENT, [2], "train", 7))
    assert faults(found) == (0, 0, 0)
    assert found.open_intents == 1


@pytest.mark.parametrize(("task", "twice"), [("score", 0), ("train", 1)])
def test_work_whose_result_went_with_a_unit_may_be_repeated_but_only_that(task: str, twice: int) -> None:
    found = verdict(*acked(1, 2), Record(Deed.REPUT, [2]), *ack(task, 2, token=9))
    assert faults(found) == (0, twice, 0)


def test_outputs_of_a_refused_put_must_never_be_seen() -> None:
    late = ack("score", 2, token=5, deed=Deed.FENCED)
    assert faults(verdict(*late, *acked(1, 2), Record(Deed.SEEN, [2], "train", 7))) == (0, 0, 0)
    assert faults(verdict(*late, *acked(1, 2), Record(Deed.SEEN, [2], "train", 5))) == (0, 0, 1)


@pytest.mark.parametrize(("reput", "seen_at", "corrupt"), [(True, 1.0, 0), (True, 3.0, 1), (False, 1.0, 1)])
def test_outputs_that_were_seen_and_lost_before_the_refusal_are_no_fault(
    reput: bool, seen_at: float, corrupt: int
) -> None:
    refused = Record(Deed.FENCED, [2], "score", 5, at=2.0)
    seen = Record(Deed.SEEN, [2], "train", 5, at=seen_at)
    lost = [Record(Deed.REPUT, [2], at=1.5)] if reput else []
    assert faults(verdict(*acked(1, 2), seen, refused, *lost)) == (0, 0, corrupt)


# A unit takes a try at 1 s and is killed before it answers; the next try is refused at 3 s.
UNIT_KILLED = Kill("storage-0", 1.9, 2.0)
CONTROLLER_KILLED = Kill("controller-1", 1.8, 1.9)
SEEN_BEFORE = Record(Deed.SEEN, [2], "train", 5, at=1.5)
SEEN_AFTER = Record(Deed.SEEN, [2], "train", 5, at=3.5)


def refused(task: str, row: int = 2) -> list[Record]:
    return [
        Record(Deed.INTENT, [row], task, 5, at=1.0, unit="storage-0"),
        Record(Deed.FENCED, [row], task, 5, at=3.0, unit="storage-0"),
    ]


@pytest.mark.parametrize("seen", [True, False])
def test_a_write_is_open_if_its_unit_was_killed_before_it_answered(seen: bool) -> None:
    records = [*acked(1), *refused("score"), *ack("train", 2), *([SEEN_BEFORE] if seen else [])]
    found = verdict(*records, kills=[UNIT_KILLED])
    assert faults(found) == (0, 0, 0)
    assert found.open_intents == (not seen)  # outputs that were seen prove that it counted
    assert faults(verdict(*records)) == (1, 0, seen)


@pytest.mark.parametrize(
    "kill", [Kill("storage-1", 1.9, 2.0), Kill("storage-0", 0.8, 0.9), Kill("storage-0", 3.1, 3.2), CONTROLLER_KILLED]
)
def test_a_refusal_counts_if_its_unit_was_not_killed_in_between(kill: Kill) -> None:
    records = [*acked(1), *refused("score"), SEEN_BEFORE, *ack("train", 2)]
    assert faults(verdict(*records, kills=[kill])) == (1, 0, 1)


def test_a_write_of_unknown_outcome_hides_no_row_that_the_queue_lost() -> None:
    """Its row was never trained, whether or not the write worked."""
    found = verdict(*acked(1), *refused("score"), kills=[UNIT_KILLED])
    assert faults(found) == (1, 0, 0)
    assert found.examples == ["row 2 was never acked for train"]


@pytest.mark.parametrize("reput", [False, True])
def test_a_row_whose_outputs_were_seen_is_handed_out_again_only_if_it_was_put_again(reput: bool) -> None:
    again = [Record(Deed.REPUT, [2], at=2.5)] if reput else []
    found = verdict(*refused("score"), SEEN_BEFORE, *again, *acked(1, 2), kills=[UNIT_KILLED])
    assert faults(found) == (0, not reput, 0)
    assert found.redone == reput


def test_outputs_that_are_seen_after_their_unit_died_and_they_were_refused_are_corrupt() -> None:
    assert faults(verdict(*refused("score"), SEEN_AFTER, *acked(1, 2), kills=[UNIT_KILLED])) == (0, 0, 1)


@pytest.mark.parametrize("kills", [[UNIT_KILLED], [CONTROLLER_KILLED], [UNIT_KILLED, CONTROLLER_KILLED]])
def test_an_ack_without_outputs_is_open_only_if_a_controller_was_killed_as_well(kills: list[Kill]) -> None:
    found = verdict(*acked(1), *ack("score", 2), *refused("train"), kills=kills)
    open_intents = len(kills) == 2
    assert (faults(found), found.open_intents) == ((not open_intents, 0, 0), open_intents)


def test_damaged_rows_are_counted_and_named() -> None:
    found = verdict(*acked(1, 2), Record(Deed.CORRUPT, [2], "train"))
    assert faults(found) == (0, 0, 1)
    assert "[2]" in found.examples[0]


def test_a_ledger_tells_a_restarted_producer_what_it_does_not_know(tmp_path: Path) -> None:
    path = tmp_path / "producer.ledger"
    assert unfinished_puts(read_ledger(path)) == ([], -1)
    ledger = LedgerFile(path)
    for record in (*PUT, Record(Deed.PUT, [3, 4]), Record(Deed.REPUT, [1])):
        ledger.write(record)
    assert unfinished_puts(read_ledger(path)) == ([[3, 4]], 4)
