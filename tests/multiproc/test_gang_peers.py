"""Ranks of a gang that wait for one that does not come, or leaves: an error names who waited for whom."""

import re
import signal
from collections.abc import Callable
from typing import Any

import pytest
from gang_ranks import gang_rank
from torch.distributed import TCPStore

Start = Callable[..., Any]
LARGE = "what a rank holds of a large model " * 2**15

DEVICES = pytest.mark.parametrize("device", ["cpu", "cuda"])
"""The second one's backend blocks as NCCL's does, see `gang_ranks`."""


@pytest.mark.gate
@DEVICES
def test_ranks_that_all_come_hear_from_each_other(start: Start, device: str) -> None:
    ranks = [start(gang_rank, rank, 2, 60.0, device) for rank in range(2)]
    assert [rank.hear() for rank in ranks] == ["ready"] * 2
    for rank in ranks:
        rank.tell("gather")
    assert [rank.hear() for rank in ranks] == [[[0, "gather"], [1, "gather"]]] * 2


@pytest.mark.gate
def test_what_ranks_gather_does_not_go_through_the_store(start: Start, store: TCPStore) -> None:
    ranks = [start(gang_rank, rank, 2, 60.0) for rank in range(2)]
    assert [rank.hear() for rank in ranks] == ["ready"] * 2
    for rank in ranks:
        rank.tell(LARGE)
    assert [rank.hear() for rank in ranks] == [[[0, LARGE], [1, LARGE]]] * 2
    assert sum(len(store.get(key)) for key in store.list_keys()) < len(LARGE)


@pytest.mark.parametrize("end", [pytest.param(signal.SIGKILL, marks=pytest.mark.gate), signal.SIGSTOP])
def test_collective_that_a_rank_does_not_come_to_names_all_that_were_waited_for(
    start: Start, end: signal.Signals
) -> None:
    ranks = [start(gang_rank, rank, 3, 4.0) for rank in range(3)]
    assert [rank.hear() for rank in ranks] == ["ready"] * 3
    ranks[2].signal(end)
    for rank in ranks[:2]:
        rank.tell("gather")
    kind, text = ranks[0].hear()
    assert kind == "DeadlineExceeded"
    assert re.match(r"rank 0 waited \d+ s in an exchange of all ranks' figures for ranks 1 2, in vain: .", text)


@pytest.mark.gate
@DEVICES
def test_rank_that_never_comes_to_the_meeting_is_named(start: Start, device: str) -> None:
    """Gloo meets first: a device's backend would be waited for without end."""
    alone = start(gang_rank, 1, 2, 2.0, device)
    kind, text = alone.hear()
    assert kind == "DeadlineExceeded"
    assert re.match(r"actor rank 1 waited \d+ s to meet for rank 0, in vain: .", text)
