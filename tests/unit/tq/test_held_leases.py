"""What a client remembers of its leases."""

from tq.client.session import HeldLeases
from tq.messages import FetchRound, FetchRows, LeaseGrant


def granted(token: int, rows: list[int], partition: int = 1, *, task: str = "train", **more: object) -> LeaseGrant:
    return LeaseGrant(task, token, partition, rows, [0] * len(rows), ["storage-0"] * len(rows), **more)  # type: ignore[arg-type]


def fetch(task: str = "score") -> FetchRows:
    return FetchRows(task, "me", 4, 0, 1.0)


def round_of(partition: int, index: int) -> FetchRound:
    return FetchRound("train", "me", partition, index, 2, 1, 4, 1.0)


def test_a_lease_is_held_until_its_last_row_is_done() -> None:
    held = HeldLeases()
    held.granted(fetch(), granted(7, [1, 2], task="score"))
    held.done(granted(7, [1, 2], task="score"), [1])
    assert [(lease.token, lease.rows) for lease in held.of_tasks(["score"])] == [(7, [2])]
    held.done(granted(7, [1, 2], task="score"), [2])
    assert held.of_tasks(["score"]) == []


def test_the_same_grant_again_does_not_bring_done_rows_back() -> None:
    held = HeldLeases()
    for _ in range(2):
        held.granted(round_of(1, 0), granted(7, [1, 2], largest_slice=2))
        held.done(granted(7, [1, 2]), [1])
    assert [lease.rows for lease in held.of_tasks(["train"])] == [[2]]


def test_a_share_of_a_round_carries_its_place_and_stays_when_empty() -> None:
    held = HeldLeases()
    held.granted(round_of(3, 5), granted(9, [], partition=3, largest_slice=2, last=True))
    (lease,) = held.of_tasks(["train"])
    assert (lease.partition, lease.round_index, lease.rank, lease.num_ranks) == (3, 5, 1, 4)
    assert (lease.largest_slice, lease.last) == (2, True)


def test_a_share_of_a_step_is_held_until_two_steps_later_whichever_partition_its_rows_are_of() -> None:
    held = HeldLeases()
    held.granted(round_of(1, 0), granted(1, [4], partition=2, total_rows=4))
    held.done(granted(1, [4]), [4])
    held.granted(round_of(2, 0), granted(2, [0], partition=1))
    (first, second) = held.of_tasks(["train"])
    assert (first.step, first.partition, first.rows, first.slice_rows, first.total_rows) == (1, 2, [], 1, 4)
    assert (second.step, second.partition) == (2, 1)
    held.granted(round_of(3, 0), granted(3, [1], partition=3))
    assert [one.step for one in held.of_tasks(["train"])] == [2, 3]


def test_rounds_are_forgotten_two_partitions_later() -> None:
    held = HeldLeases()
    held.granted(round_of(1, 0), granted(1, [], partition=1))
    held.granted(round_of(2, 0), granted(2, [], partition=2))
    held.granted(round_of(3, 0), granted(3, [], partition=3))
    assert [lease.partition for lease in held.of_tasks(["train"])] == [2, 3]


def test_lease_that_another_reader_answers_for_is_forgotten() -> None:
    held = HeldLeases()
    held.granted(round_of(1, 0), granted(7, [1, 2]))
    held.forget_lease(granted(7, [1, 2]))
    assert held.of_tasks(["train"]) == []


def test_void_tokens_of_other_tasks_stay() -> None:
    held = HeldLeases()
    held.granted(fetch("score"), granted(7, [1]))
    held.granted(fetch("ref"), granted(7, [1]))
    held.void(["score"], [7])
    assert [lease.task for lease in held.of_tasks(["score", "ref"])] == ["ref"]
