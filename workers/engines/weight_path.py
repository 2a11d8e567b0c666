"""Connects trainer ranks, and the roles that hold the policy, to the configured weight path."""

import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial

import msgspec
from torch import Tensor

from asyncflow.decoding import msgpack_decoder
from asyncflow.errors import WeightsLate
from weightsync.broadcast_group import STALL_S, Broadcaster, BroadcastMember
from weightsync.plan import Need, ShardSpec, plan_transfer
from weightsync.receiver import RanksEngine, RanksReceiver, WeightReceiver
from weightsync.sender import WeightSender, describe
from weightsync.version import Version
from workers.engines.base import GenerateEngine, LocalShard
from workers.engines.delivery import DeliveryCheck
from workers.rank.context import WorkerContext
from workers.rank.peers import gather
from workers.settings.dataflow import WEIGHTS


def open_sender(context: WorkerContext, shards: Iterable[LocalShard]) -> WeightSender:
    """Plan with the other trainer ranks who sends what; return this rank's sender of its `shards`. Collective.

    Raises:
        PlanError: the ranks' shards do not form one model; raised on every rank.
        DeadlineExceeded: a rank does not come, or left.
    """
    config, epoch = context.config.weightsync, f"{context.job.lineage}.{context.attempt}"
    # Every rank computes the same plan from what all hold.
    decoder = msgpack_decoder(list[ShardSpec])
    held = [decoder.decode(part) for part in gather(msgspec.msgpack.encode(describe(shards)))]
    plan = plan_transfer(held, bucket_bytes=config.bucket_bytes, dtype=config.dtype or context.config.model.dtype)
    broadcaster = None
    if config.path == "broadcast":
        broadcaster = Broadcaster(
            context.job_credentials(), _lead(context), context.name, plan, context.rank,
            device=context.device, epoch=epoch, timeout_s=config.timeout_s,
        )  # fmt: skip
    return WeightSender(
        context.job_credentials(), _agent(context), context.name, plan, context.rank,
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
    best_effort: bool = False,
    keeps_on_host: bool = False,
    whole: bool = True,
) -> WeightReceiver:
    """Return a receiver of what the trainer publishes.

    Args:
        adopts: the engine can compute with given tensors in place; used only if element types match.
        arrived: called from another thread when a newer version is ready.
        purpose: of a receiver beside this rank's main one.
        wanted: selects versions; None: all. With it, the receiver joins no broadcasts.
        best_effort: the trainer does not wait until it has read a version.
        keeps_on_host: see `WeightReceiver`.
        whole: the engine takes the whole model; False: its ranks share it and read the agent's single copy on the node,
            and the receiver joins no broadcasts.
    """
    config = context.config.weightsync
    name = f"{context.name}-{purpose}" if purpose else context.name
    member = None
    if config.path == "broadcast" and wanted is None and whole:
        store = context.new_store(min(config.timeout_s, STALL_S))
        member = BroadcastMember(store, name, context.device)
    return WeightReceiver(
        context.job_credentials(), _agent(context), name, needs,
        device=context.reading_device,
        adopts=adopts and config.dtype in (None, context.config.model.dtype), arrived=arrived,
        takes_turns=config.max_updating is not None and wanted is None, wanted=wanted, best_effort=best_effort,
        whole=whole, member=member, lead=_lead(context), keeps_on_host=keeps_on_host, timeout_s=config.timeout_s,
        timeline=context.timeline,
    )  # fmt: skip


def follow_policy(
    context: WorkerContext, engine: GenerateEngine, *, arrived: Callable[[], None], loaded: Callable[[Version], None]
) -> "HeldWeights":
    """Return what keeps a rollout's engine up to date with the trainer's weights.

    `arrived` is called from another thread when a newer version is ready, `loaded` after each swap.
    """
    config = context.config
    broadcast = config.weightsync.path == "broadcast"
    check = DeliveryCheck(context, engine, config.rollout).check_loaded
    if isinstance(engine, RanksEngine):
        ranks = RanksReceiver(
            context.job_credentials(), _agent(context), context.name, engine,
            run_dir=context.run_dir, lead=_lead(context) if broadcast else "", arrived=arrived,
            takes_turns=config.weightsync.max_updating is not None, timeout_s=config.weightsync.timeout_s,
            timeline=context.timeline,
        )  # fmt: skip
        return HeldWeights(context, ranks, lambda _: engine.load_held(), check=check, loaded=loaded)
    receiver = open_receiver(
        context, engine.weight_needs(), adopts=engine.adopts_weights, arrived=arrived,
        keeps_on_host=config.rollout.engine == "openai",  # it passes them on to other processes
    )  # fmt: skip
    load = partial(engine.load_weights, adopt=receiver.adopts)
    return HeldWeights(context, receiver, load, check=check, loaded=loaded)


def _agent(context: WorkerContext) -> str:
    return next(gang.name for gang in context.job.of_role(WEIGHTS) if context.node in gang.parts)


def _lead(context: WorkerContext) -> str:
    """Return the agent, the same for all nodes, that decides which receivers join broadcasts."""
    return context.job.of_role(WEIGHTS)[0].name


# How long a wait for a turn to swap lasts before it checks whether the run is stopping.
_TURN_WAIT_S = 1.0


class HeldWeights:
    """The weights that one engine computes with: waits for newer ones, asks for a turn, loads. Used by one thread.

    `weightsync.receiver` handles arrival and checks; the receiver is closed with this object. `check` is called after
    each swap and raises if the engine does not have the version; then `loaded` is.
    """

    def __init__(
        self,
        context: WorkerContext,
        receiver: WeightReceiver,
        load: Callable[[Mapping[str, Tensor]], None],
        *,
        check: Callable[[Version], None] = lambda _: None,
        loaded: Callable[[Version], None] = lambda _: None,
    ) -> None:
        self.version: Version | None = None
        self._context = context
        self._receiver = receiver
        self._load = load
        self._check = check
        self._loaded = loaded
        self._timeout_s = context.config.weightsync.timeout_s

    @property
    def step(self) -> int:
        """Step of the loaded weights; 0 before the first."""
        return 0 if self.version is None else self.version.step

    @property
    def has_newer(self) -> bool:
        return self._receiver.newest not in (None, self.version)

    @property
    def abandoned(self) -> bool:
        """Whether the trainer went back to an earlier checkpoint, which makes work with these weights useless."""
        newest = self._receiver.newest
        return newest is not None and self.version is not None and newest.lineage > self.version.lineage

    def load_newest(self, *, wait_s: float = 0.0) -> bool:
        """Load the version that is ready if it is this engine's turn; return whether it was loaded."""

        def load(weights: Mapping[str, Tensor]) -> None:
            with self._context.timeline.span("load weights"):
                self._load(weights)

        version = self._receiver.load(load, newer_than=self.version, wait_s=wait_s)
        if version is None:
            return False
        # Before any response that was drawn with them can leave the engine, which gives them to this thread alone.
        self._check(version)
        self.version = version
        self._loaded(version)
        return True

    def wait_for(self, needed: Version) -> None:
        """Load weights of `needed` or later; returns without them only if the run stops. Raises WeightsLate."""
        context, timeout_s = self._context, self._timeout_s
        deadline = time.monotonic() + timeout_s
        while (self.version is None or self.version < needed) and not context.stopping.is_set():
            context.report_state("waiting for weights")
            with context.timeline.span("wait for weights", step=needed.step):
                if not self._receiver.wait_for(
                    needed.step, lineage=needed.lineage, timeout_s=timeout_s, stop=context.stopping
                ):
                    return
                loaded = self.load_newest(wait_s=_TURN_WAIT_S)
            if not loaded and time.monotonic() > deadline:
                raise WeightsLate(
                    f"weights of {needed} are ready, but no turn to load them came within {timeout_s:g} s: an "
                    f"instance that is swapping does not finish"
                )

    def close(self) -> None:
        self._receiver.close()
