"""Connects a run's trainer ranks, and the roles that hold the policy, to the weight path that is configured."""

from collections.abc import Callable, Iterable, Mapping

from weightsync.agreement import agree_on_plan
from weightsync.broadcast import STALL_S, Broadcaster, BroadcastMember
from weightsync.plan import Need
from weightsync.receiver import WeightReceiver
from weightsync.sender import WeightSender
from weightsync.shard_writer import describe
from weightsync.version import Version
from workers.context import WorkerContext
from workers.engines.base import LocalShard
from workers.tasks.dataflow import WEIGHTS


def open_sender(context: WorkerContext, shards: Iterable[LocalShard]) -> WeightSender:
    """Agree with the other trainer ranks on a plan; returns this rank's sender.

    Args:
        shards: what it holds.

    Raises:
        PlanError: the ranks' shards do not make one model.
        WeightSyncError: another rank did not say what it holds in time.
    """
    config, epoch = context.config.weightsync, f"{context.job.lineage}.{context.attempt}"
    plan = agree_on_plan(
        context.credentials(),
        epoch,
        context.rank,
        describe(shards),
        num_ranks=context.gang.num_ranks,
        bucket_bytes=config.bucket_bytes,
        dtype=config.dtype or context.config.model.dtype,
    )
    broadcaster = None
    if config.path == "broadcast":
        broadcaster = Broadcaster(
            context.credentials(), _lead(context), context.name, plan, context.rank,
            device=context.device, epoch=epoch, timeout_s=config.timeout_s,
        )  # fmt: skip
    return WeightSender(
        context.credentials(), _agent(context), context.name, plan, context.rank,
        device=context.device, timeout_s=config.timeout_s, broadcaster=broadcaster, timeline=context.timeline,
    )  # fmt: skip


def open_receiver(
    context: WorkerContext,
    needs: Mapping[str, Need],
    *,
    adopts: bool,
    arrived: Callable[[], None] = lambda: None,
    purpose: str = "",
    wanted: Callable[[Version], bool] | None = None,
    guest: bool = False,
) -> WeightReceiver:
    """Return a receiver of what the trainer publishes.

    Args:
        needs: what the engine wants.
        adopts: the engine can compute with what it is given, in place; it does where the element types are the same.
        arrived: called, by another thread, when a newer version is ready.
        purpose: of a receiver beside the one of this rank's main engine.
        wanted: passes other versions over; None: everything is wanted. Such a receiver takes part in no broadcast.
        guest: the trainer does not wait for the memory that it reads.
    """
    config = context.config.weightsync
    name = f"{context.name}-{purpose}" if purpose else context.name
    member = None
    if config.path == "broadcast" and wanted is None:
        store = context.new_store(min(config.timeout_s, STALL_S))
        member = BroadcastMember(store, name, context.device)
    return WeightReceiver(
        context.credentials(), _agent(context), name, needs,
        device=context.device, adopts=adopts and config.dtype in (None, context.config.model.dtype), arrived=arrived,
        takes_turns=config.max_updating is not None and wanted is None, wanted=wanted, best_effort=guest,
        member=member, lead=_lead(context), timeout_s=config.timeout_s, timeline=context.timeline,
    )  # fmt: skip


def _agent(context: WorkerContext) -> str:
    """Return this node's weight agent."""
    return next(gang.name for gang in context.job.of_role(WEIGHTS) if context.node in gang.parts)


def _lead(context: WorkerContext) -> str:
    """Return the agent that says which receivers take part in broadcasts, the same one for all nodes."""
    return context.job.of_role(WEIGHTS)[0].name
