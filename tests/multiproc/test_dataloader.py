"""Loaders of a data-parallel replica: real processes on Gloo, a fake queue."""

import signal
from collections.abc import Callable
from typing import Any

import pytest
from loader_peers import closing_rank, dying_rank, read_rank, surviving_rank

Start = Callable[..., Any]


def read_all(start: Start, size: int, fetch: str = "broadcast", **behaviour: int) -> list[Any]:
    """Let a replica of `size` ranks read everything; return what each rank says."""
    ranks = [start(read_rank, rank, size, fetch, behaviour) for rank in range(size)]
    heard = [rank.hear() for rank in ranks]
    for rank in ranks:
        rank.tell("leave")
    assert [rank.end() for rank in ranks] == [0] * size
    return heard


@pytest.mark.parametrize(
    ("size", "fetch"),
    [
        (1, "broadcast"),
        pytest.param(2, "broadcast", marks=pytest.mark.gate),
        (3, "broadcast"),
        (1, "device"),
        (3, "device"),
    ],
)
def test_ranks_of_a_replica_get_identical_rounds_from_one_fetch(start: Start, size: int, fetch: str) -> None:
    heard = read_all(start, size, fetch, late=2)
    rounds, stopped, error, acked, requests, left = heard[0]
    assert [entry[:2] for entry in rounds] == [
        (1, (100, 101, 102)),
        (2, (200, 201, 202)),
        (2, ()),
        (3, (300, 301, 302)),
        (3, ()),
        (3, (320, 321, 322)),
    ]
    assert rounds[0][2:] == (3, (100, 101, 102), ["tokens", "ids", "rewards", "texts"])
    assert (stopped, error, left) == (False, "", [])
    assert acked == [row for entry in rounds for row in entry[1]]
    assert requests == 2 + 9 + 4  # deadlines, fetches, reads
    for other in heard[1:]:
        assert other == (rounds, False, "", [], 0, [])


def test_ranks_may_each_fetch_for_themselves_columns_of_their_own(start: Start) -> None:
    first, second = read_all(start, 2, "each")
    assert [entry[:4] for entry in first[0]] == [entry[:4] for entry in second[0]]
    assert second[0][0][4] == ["ids"]
    assert (first[3], second[3]) == ([row for entry in first[0] for row in entry[1]], [])
    assert first[4] == second[4] == 9 + 4


def test_every_stage_fetches_once_and_the_first_one_acks(start: Start) -> None:
    heard = read_all(start, 4, "stage")
    assert [len(rounds) for rounds, *_ in heard] == [6] * 4
    assert all(rounds == heard[0][0] for rounds, *_ in heard)
    assert [requests for *_, requests, _ in heard] == [9 + 4, 0, 9 + 4, 0]
    assert [len(acked) for *_, acked, _, _ in heard] == [4 * 3, 0, 0, 0]


@pytest.mark.parametrize("fetch", [pytest.param("broadcast", marks=pytest.mark.gate), "device", "stage"])
def test_stop_reaches_every_rank_at_the_same_place(start: Start, fetch: str) -> None:
    heard = read_all(start, 4 if fetch == "stage" else 3, fetch, stop_at=3)[:3]
    assert [len(rounds) for rounds, *_ in heard] == [3, 3, 3]
    assert [(stopped, error, left) for _, stopped, error, _, _, left in heard] == [(True, "", [])] * 3


@pytest.mark.parametrize("fetch", [pytest.param("broadcast", marks=pytest.mark.gate), "device"])
def test_failure_of_rank_0_is_raised_on_every_rank(start: Start, fetch: str) -> None:
    heard = read_all(start, 3, fetch, fail_at=2)
    assert [len(rounds) for rounds, *_ in heard] == [1, 1, 1]
    assert [error for _, _, error, *_ in heard] == ["TransportError: controller-0 is gone"] + [
        "TransportError: controller-0 is gone (at rank 0 of replica 0)"
    ] * 2


@pytest.mark.parametrize(("victim", "fetch"), [(0, "broadcast"), (2, "broadcast"), (0, "device"), (2, "device")])
def test_rank_that_dies_is_an_error_on_the_others(start: Start, victim: int, fetch: str) -> None:
    ranks = [start(dying_rank if rank == victim else surviving_rank, rank, 3, fetch) for rank in range(3)]
    assert [rank.hear() for rank in ranks] == [(100, 101, 102)] * 3
    ranks[victim].signal(signal.SIGKILL)
    ranks[victim].end_by_signal()
    others = [rank for number, rank in enumerate(ranks) if number != victim]
    for rank in others:
        rank.tell("go on")
    for rank in others:
        text, seconds = rank.hear()
        assert text.startswith("replica 0: a broadcast among its 3 ranks failed at rank")
        assert seconds < 15  # of the group's 20 s
    assert [rank.end() for rank in others] == [0, 0]


def test_close_at_rank_0_is_an_error_on_ranks_that_go_on(start: Start) -> None:
    leader, other = start(closing_rank, 0, 2), start(surviving_rank, 1, 2)
    assert [leader.hear(), other.hear()] == [[(100, 101, 102)], (100, 101, 102)]
    other.tell("go on")
    leader.tell("close")
    text, seconds = other.hear()
    assert text.startswith("replica 0: a broadcast among its 2 ranks failed at rank 1")
    assert seconds < 15  # of the group's 20 s
    assert [leader.hear(), leader.end(), other.end()] == [True, 0, 0]


def test_close_leaves_no_thread_in_the_group(start: Start) -> None:
    ranks = [start(closing_rank, rank, 2) for rank in range(2)]
    assert [rank.hear() for rank in ranks] == [[(100, 101, 102)]] * 2
    for rank in reversed(ranks):
        rank.tell("close")
        assert rank.hear() is True
    assert [rank.end() for rank in ranks] == [0, 0]
