"""What the ranks tell each other about a published step."""

from workers.records import StepRecord


def test_all_ranks_hold_the_same_after_joining_and_stop_together() -> None:
    """A dead receiver may be seen by one sender a step earlier than by the other; none may go on alone."""
    records = [StepRecord(3, ledger=[{"group": rank}], sync_bytes=10 + rank, stopped=rank == 1) for rank in range(3)]
    shares = [record.share() for record in records]
    for record in records:
        record.join(shares)
    assert [record.stopped for record in records] == [True] * 3
    assert [record.sync_bytes for record in records] == [33] * 3
    assert records[0].ledger == [{"group": 0}, {"group": 1}, {"group": 2}]


def test_without_a_stop_all_go_on() -> None:
    record = StepRecord(1)
    record.join([record.share(), StepRecord(1).share()])
    assert not record.stopped
