"""Connects trainer ranks, and the roles that hold the policy, to the configured weight path."""

import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from functools import partial

import msgspec
from torch import Tensor

from asyncflow.decoding import msgpack_decoder
from asyncflow.errors import WeightsLate
from asyncflow.vendors import vendor_of
from weightsync.broadcast_group import STALL_S, Broadcaster, BroadcastMember
from weightsync.plan import Need, ShardSpec, plan_transfer
from weightsync.receiver import RanksEngine, RanksReceiver, SharedReceiver, WeightReceiver
from weightsync.sender import Shard, WeightSender, describe
from weightsync.version import Version
from workers.engines.base import GenerateEngine
from workers.engines.delivery import DeliveryCheck
from workers.rank.context import WorkerContext
from workers.rank.peers import gather
from workers.settings.dataflow import WEIGHTS


def open_sender(context: WorkerContext, shards: Iterable[Shard]) -> WeightSender:
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
        device=context.device, timeout_s=config.timeout_s, broadcaster=broadcaster,
        on_device=hands_over_on_device(context), timeline=context.timeline,
    )  # fmt: skip


def hands_over_on_device(context: WorkerContext) -> bool:
    """Return whether the trainer's ranks keep versions on their devices for the rollouts that share these."""
    return context.shares_devices and vendor_of(context.device.type).has_ipc


def open_receiver(
    context: WorkerContext,
    needs: Mapping[str, Need],
    *,
    adopts: bool,
    arrived: Callable[[], None] = lambda: None,
    purpose: str = "",
    wanted: Callable[[Version], bool] | None = None,
    least: Callable[[], Version] | None = None,
    best_effort: bool = False,
    keeps_on_host: bool = False,
    on_device: bool = False,
    whole: bool = True,
) -> WeightReceiver:
    """Return a receiver of what the trainer publishes.

    Args:
        adopts: the engine can compute with given tensors in place; used only if element types match, and the role has
            devices of its own: that memory would stay there while the engine sleeps.
        arrived: called from another thread when a newer version is ready.
        purpose: of a receiver beside this rank's main one.
        wanted: selects versions; None: all. With it, the receiver joins no broadcasts unless there is `least`, too.
        least: returns the next version that is wanted.
        best_effort: the trainer does not wait until it has read a version.
        keeps_on_host, on_device: see `WeightReceiver`.
        whole: the engine takes the whole model; False: this gang's ranks share it. They read the agent's single copy on
            the node, and join broadcasts together: then whatever they compute together is inside `computing`.
    """
    config = context.config.weightsync
    suffix = f"-{purpose}" if purpose else ""
    name, member = context.name + suffix, None
    if config.path == "broadcast" and (wanted is None or least is not None):
        store = context.new_store(min(config.timeout_s, STALL_S))
        member = BroadcastMember(store, name, context.device)
    kind: Callable[..., WeightReceiver] = WeightReceiver
    if not whole:
        gang = context.gang
        together = [f"{gang.name}/{rank}{suffix}" for rank in range(gang.num_ranks)]
        kind = partial(SharedReceiver, together=together)
    return kind(
        context.job_credentials(), _agent(context), name, needs,
        device=context.reading_device,
        adopts=adopts and config.dtype in (None, context.config.model.dtype) and not context.shares_devices,
        arrived=arrived,
        takes_turns=config.max_updating is not None and wanted is None, wanted=wanted, least=least,
        best_effort=best_effort, member=member, lead=_lead(context), keeps_on_host=keeps_on_host,
        on_device=on_device, timeout_s=config.timeout_s, timeline=context.timeline,
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
            on_device=hands_over_on_device(context), timeline=context.timeline,
        )  # fmt: skip
        return HeldWeights(
            context, ranks, lambda _: engine.load_held(), check=check, loaded=loaded, defers=context.shares_devices
        )
    receiver = open_receiver(
        context, engine.weight_needs(), adopts=engine.adopts_weights, arrived=arrived,
        keeps_on_host=config.rollout.engine == "openai",  # it passes them on to other processes
        on_device=hands_over_on_device(context),
    )  # fmt: skip
    load = partial(engine.load_weights, adopt=receiver.adopts)
    return HeldWeights(context, receiver, load, check=check, loaded=loaded, defers=context.shares_devices)


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
    each swap and raises if the engine does not have the version; then `loaded` is. `defers`: an engine that has just
    loaded cannot compute yet, and the caller says when it can (`check_delivery`).
    """

    def __init__(
        self,
        context: WorkerContext,
        receiver: WeightReceiver,
        load: Callable[[Mapping[str, Tensor]], None],
        *,
        check: Callable[[Version], None] = lambda _: None,
        loaded: Callable[[Version], None] = lambda _: None,
        defers: bool = False,
    ) -> None:
        self.version: Version | None = None
        self._context = context
        self._defers = defers
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
    def newest(self) -> Version | None:
        """The newest version that is ready."""
        return self._receiver.newest

    @property
    def has_newer(self) -> bool:
        return self._receiver.newest not in (None, self.version)

    def computing(self) -> AbstractContextManager[None]:
        """Enter while the engine computes together with other ranks; see `SharedReceiver`."""
        return self._receiver.computing()

    @property
    def abandoned(self) -> bool:
        """Whether the trainer went back to an earlier checkpoint, which makes work with these weights useless."""
        newest = self._receiver.newest
        return newest is not None and self.version is not None and newest.lineage > self.version.lineage

    def load_newest(self, *, wait_s: float = 0.0, again: bool = False) -> bool:
        """Load the version that is ready if it is newer and this engine's turn; return whether it was loaded.
        `again`: also if the engine had it, since it has lost its weights."""

        def load(weights: Mapping[str, Tensor]) -> None:
            with self._context.timeline.span("load weights"):
                self._load(weights)

        version = self._receiver.load(load, newer_than=None if again else self.version, wait_s=wait_s)
        if version is None:
            return False
        # Before any response that was drawn with them can leave the engine, which gives them to this thread alone.
        if not self._defers:
            self._check(version)
        self.version = version
        self._loaded(version)
        return True

    def check_delivery(self) -> None:
        """Check the version that was loaded last, now that the engine can compute with it."""
        assert self.version is not None, "a version was loaded"
        self._check(self.version)

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
