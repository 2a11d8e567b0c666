"""How the trainer's ranks come to one plan: each publishes what it holds in the job store, rank 0 plans, all read."""

from collections.abc import Sequence

import msgspec

from asyncflow.decoding import msgpack_decoder
from asyncflow.errors import PlanError, WeightsLate
from asyncflow.sealed_store import SealedStore
from weightsync.plan import ShardSpec, TransferPlan, plan_transfer


class _Published(msgspec.Struct):
    plan: TransferPlan | None
    error: str


def agree_on_plan(
    store: SealedStore,
    epoch: str,
    rank: int,
    held: Sequence[ShardSpec],
    *,
    num_ranks: int,
    bucket_bytes: int,
    dtype: str,
) -> TransferPlan:
    """Publish what this rank holds; every rank returns the same plan.

    Args:
        store: the job store; its timeout bounds the wait for the other ranks.
        epoch: of the trainer's gang; keeps the keys of different starts apart.
        rank, num_ranks: of this process among the trainer's.
        held: what it holds.
        bucket_bytes, dtype: see `plan_transfer`.

    Raises:
        WeightsLate: a rank did not publish in time.
        PlanError: see `plan_transfer`; on every rank.
    """
    keys = store.under(f"weights/plan/{epoch}")
    keys.set(f"held/{rank}", msgspec.msgpack.encode(list(held)))
    if rank == 0:
        everybody = [
            msgpack_decoder(list[ShardSpec]).decode(
                wait_for_key(keys, f"held/{k}", f"trainer rank {k}", "what it holds")
            )
            for k in range(num_ranks)
        ]
        try:
            published = _Published(plan_transfer(everybody, bucket_bytes=bucket_bytes, dtype=dtype), "")
        except PlanError as error:
            published = _Published(None, str(error))
        keys.set("plan", msgspec.msgpack.encode(published))
    agreed = msgpack_decoder(_Published).decode(wait_for_key(keys, "plan", "trainer rank 0", "the plan"))
    if agreed.plan is None:
        raise PlanError(agreed.error)
    return agreed.plan


def wait_for_key(store: SealedStore, key: str, who: str, what: str) -> bytes:
    """Return a key's value once it is there.

    Args:
        store, key: where.
        who, what: should have written it, and what it is, for the error.

    Raises:
        WeightsLate: not within the store's timeout; names who should have written it.
    """
    try:
        return store.get(key)
    except RuntimeError as error:
        within = f"{store.timeout.total_seconds():g} s"
        raise WeightsLate(f"weights: {who} did not say {what} within {within}") from error
