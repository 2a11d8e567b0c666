"""How the trainer's ranks agree on a plan: each tells rank 0 what it holds, rank 0 plans, and all get the plan."""

#     rank k   HoldShards parks at rank 0 ................ AgreedPlan
#     rank 0   serves until all have told it, or the deadline; plans
#
# This uses channels of this start of the gang, not the job store: both messages grow with the model, and the store
# refuses values beyond 8 MiB.

import threading
from collections.abc import Sequence

import msgspec

from asyncflow.errors import PlanError, TransportError, WeightsLate
from asyncflow.transport.meeting import Credentials
from asyncflow.transport.server import Call, ChannelServer, Connection, Session
from weightsync.plan import ShardSpec, TransferPlan, plan_transfer

# How long rank 0 waits until the others have read their answers (s).
_LEAVE_S = 10.0


class HoldShards(msgspec.Struct, tag=True):
    """A trainer rank says what it holds. -> `AgreedPlan`, once all have."""

    rank: int
    held: list[ShardSpec]


class AgreedPlan(msgspec.Struct, tag=True):
    """The plan that follows from what all ranks hold."""

    plan: bytes  # `TransferPlan.encode`; empty: there is none
    error: str = ""  # why there is none


def agree_on_plan(
    credentials: Credentials,
    epoch: str,
    rank: int,
    held: Sequence[ShardSpec],
    *,
    num_ranks: int,
    bucket_bytes: int,
    dtype: str,
) -> TransferPlan:
    """Tell what this rank holds; every rank returns the same plan.

    Args:
        credentials: their deadline also bounds the wait for the other ranks.
        epoch: of the trainer's gang; keeps different starts apart.
        bucket_bytes, dtype: see `plan_transfer`.

    Raises:
        WeightsLate: a rank did not tell in time, or rank 0 is gone.
        PlanError: see `plan_transfer`; on every rank.
    """
    service = f"weight-plan/{epoch}"
    if rank > 0:
        return _ask(credentials, service, HoldShards(rank, list(held)))
    if num_ranks == 1:
        return plan_transfer([held], bucket_bytes=bucket_bytes, dtype=dtype)
    others = _OtherRanks(num_ranks - 1)
    server = ChannelServer(credentials, service, HoldShards, others)
    try:
        calls = others.wait(credentials.timeout_s)
        everybody = [held, *(calls[other].message.held for other in sorted(calls))]
        plan = plan_transfer(everybody, bucket_bytes=bucket_bytes, dtype=dtype)
        others.answer(AgreedPlan(plan.encode()))
    except PlanError as error:
        others.answer(AgreedPlan(b"", str(error)))
        raise
    finally:
        server.close()
    return plan


class _OtherRanks:
    def __init__(self, number: int) -> None:
        self._number = number
        self._calls: dict[int, Call] = {}
        self._changed = threading.Condition()

    def handle(self, call: Call) -> None:
        with self._changed:
            self._calls[call.message.rank] = call
            self._changed.notify_all()

    def disconnected(self, session: Session) -> None:
        with self._changed:
            self._calls = {rank: call for rank, call in self._calls.items() if call.session != session}
            self._changed.notify_all()

    def wait(self, timeout_s: float) -> dict[int, Call]:
        with self._changed:
            if not self._changed.wait_for(lambda: len(self._calls) == self._number, timeout_s):
                missing = " ".join(str(rank) for rank in range(1, self._number + 1) if rank not in self._calls)
                raise WeightsLate(f"weights: trainer rank {missing} did not say what it holds within {timeout_s:g} s")
            return dict(self._calls)

    def answer(self, agreed: AgreedPlan) -> None:
        """Answer all, and let them leave first."""
        with self._changed:
            calls = list(self._calls.values())
        for call in calls:
            call.reply(agreed)
        with self._changed:
            self._changed.wait_for(lambda: not self._calls, _LEAVE_S)


def _ask(credentials: Credentials, service: str, told: HoldShards) -> TransferPlan:
    try:
        connection = Connection(credentials, service, f"trainer-{told.rank}", AgreedPlan)
        try:
            # Rank 0 waits for the others as long as this rank for rank 0, and then still has to plan.
            agreed, _ = connection.call(told, timeout_s=2 * credentials.timeout_s)
        finally:
            connection.close()
    except TransportError as error:
        raise WeightsLate(f"weights: trainer rank 0 did not send the plan ({error})") from error
    if agreed.error:
        raise PlanError(agreed.error)
    return TransferPlan.decode(agreed.plan)
