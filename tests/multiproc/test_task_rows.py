"""How ranks that share a reference get its rows: real processes on Gloo, a fake queue."""

import importlib.util
from collections.abc import Callable
from typing import Any

import pytest
from task_peers import task_rank

Start = Callable[..., Any]
FSDP = {"engine": "fsdp", "shards": 2}
STAGES = {"engine": "megatron", "megatron": {"tensor_parallel": 2, "pipeline_parallel": 2}}
TOKENS = {"engine": "megatron", "megatron": {"context_parallel": 2, "pipeline_parallel": 2}}
FIRST, SECOND = tuple(range(100, 103)), tuple(range(300, 303))
ALL = [FIRST, "newer_version", SECOND, tuple(range(420, 423)), tuple(range(500, 503))]


def take_all(start: Start, ref: dict[str, Any], failing: int = -1, **settings: str) -> list[Any]:
    """Let all ranks take all rows; return what each says."""
    size = 2 if ref is FSDP else 4
    ranks = [start(task_rank, rank, size, settings, ref, failing) for rank in range(size)]
    heard = [rank.hear() for rank in ranks]
    for rank in ranks:
        rank.tell("leave")
    assert [rank.end() for rank in ranks] == [0] * size
    return heard


@pytest.mark.parametrize("broadcast", ["host", "device"])
@pytest.mark.parametrize(
    ("fetch", "ref", "reads"),
    [
        ("broadcast", FSDP, [4, 0]),
        ("stage", FSDP, [4, 0]),
        ("each", FSDP, [4, 4]),
        ("broadcast", STAGES, [4, 0, 0, 0]),
        ("stage", STAGES, [4, 0, 4, 0]),
        ("each", STAGES, [4, 4, 4, 4]),
        ("broadcast", TOKENS, [4, 0, 0, 0]),
        ("stage", TOKENS, [4, 0, 4, 0]),
    ],
)
def test_ranks_of_a_shared_model_take_the_same_rows(
    start: Start, fetch: str, ref: dict[str, Any], reads: list[int], broadcast: str
) -> None:
    if ref is not FSDP and importlib.util.find_spec("megatron") is None:
        pytest.skip("needs megatron-core")
    heard = take_all(start, ref, replica_fetch=fetch, replica_broadcast=broadcast)
    assert [taken for taken, *_ in heard] == [ALL] * len(heard)
    assert [leases for _, leases, *_ in heard] == [6, *([0] * (len(heard) - 1))], "the lead alone leases"
    assert [count for _, _, count, *_ in heard] == reads


def test_rows_that_one_rank_cannot_read_are_returned_by_the_lead(start: Start) -> None:
    """All ranks skip them, or their collectives would not match any more."""
    heard = take_all(start, FSDP, failing=1, replica_fetch="each")
    assert [taken for taken, *_ in heard] == [[one for one in ALL if one != SECOND]] * 2
    assert [released for *_, released, _ in heard] == [list(SECOND), []]
    assert [closed for *_, closed in heard] == [False, True], "only the lead's client goes on"
