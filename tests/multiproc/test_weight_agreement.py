"""How trainer ranks agree on a plan: over channels, whatever its size, and all of them or none."""

from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import peers
import pytest
from torch.distributed import TCPStore

from asyncflow.errors import PlanError, WeightsLate
from asyncflow.transport.meeting import Credentials
from weightsync.agreement import agree_on_plan
from weightsync.plan import Box, ShardSpec

NUM_RANKS = 3
LARGEST_VALUE = 2**20


@pytest.fixture(name="credentials")
def _credentials(store: TCPStore) -> Credentials:
    mine = peers.credentials(store.port)
    return Credentials(mine.store, mine.secret, 20)


def rows(name: str, rank: int) -> ShardSpec:
    return ShardSpec(name, (NUM_RANKS, 8), "float32", Box.rows((NUM_RANKS, 8), rank, rank + 1))


def agree(credentials: Credentials, held: dict[int, list[ShardSpec]]) -> list["Future[Any]"]:
    """Let ranks that hold something agree; returns what comes out for each."""

    def run(rank: int) -> Any:
        return agree_on_plan(
            credentials, "0.0", rank, held[rank], num_ranks=NUM_RANKS, bucket_bytes=2**20, dtype="bfloat16"
        )

    with ThreadPoolExecutor(NUM_RANKS) as pool:
        return [pool.submit(run, rank) for rank in held]


@pytest.mark.gate
def test_plan_of_a_large_model_does_not_go_through_the_store(credentials: Credentials) -> None:
    names = [f"model.layers.{k}." + "long_name." * 20 + "weight" for k in range(6000)]
    plans = [
        future.result() for future in agree(credentials, {r: [rows(n, r) for n in names] for r in range(NUM_RANKS)})
    ]
    assert len({plan.digest() for plan in plans}) == 1
    assert list(plans[2].tensors) == names and plans[2].num_senders == NUM_RANKS
    assert len(plans[0].encode()) > LARGEST_VALUE, "else this says nothing"
    store = credentials.own_store()
    assert sum(len(store.get(key)) for key in store.list_keys()) < LARGEST_VALUE


def test_ranks_whose_shards_do_not_make_one_model_all_hear_why(credentials: Credentials) -> None:
    held = {rank: [rows("w", rank % 2)] for rank in range(NUM_RANKS)}
    for future in agree(credentials, held):
        with pytest.raises(PlanError, match="w: 24 elements, but the trainer ranks hold 16"):
            future.result()


def test_rank_that_does_not_come_is_named_and_nobody_goes_on(credentials: Credentials) -> None:
    hasty = Credentials(credentials.store, credentials.secret, 1.0)
    first, last = agree(hasty, {rank: [rows("w", rank)] for rank in (0, 2)})
    with pytest.raises(WeightsLate, match="trainer rank 1 did not say what it holds within 1 s"):
        first.result()
    with pytest.raises(WeightsLate, match="trainer rank 0"):
        last.result()
