"""The rollout loop: fill free places, generate, score and put each response as it ends, take newer weights.

    fill -> step -> fill -> step, a response ended -> outbox ... newer weights ready -> swap, if the schedule says so

Prompts are leased by the `Feeder`'s thread and responses put by the `Outbox`'s, so neither holds up generation. Called
by `workers.roles.main`. Never decides which groups may start: admission does.
"""

import itertools
import logging
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial

import numpy as np

from asyncflow.errors import TrainingDiverged
from weightsync.version import Version
from workers.engines.load import load_generate_engine
from workers.engines.weight_path import follow_policy
from workers.rank.context import WorkerContext
from workers.records.samples import SampleLog
from workers.rewards.group import GroupReward
from workers.rewards.group_filter import load_group_filter
from workers.rewards.scorer import Scorer
from workers.rollout.feeder import Feeder
from workers.rollout.functions import open_rollouts
from workers.rollout.outbox import Outbox, RolloutLease
from workers.rows.finished import FinishedRollout, RolloutRequest
from workers.settings.dataflow import TASKS
from workers.tasks.graph import task_of

logger = logging.getLogger(__name__)

_RETRY_S = 0.05
"""After a refused turn, while responses run, before the next is asked for (s)."""
_LOOK_S = 0.5
"""How often an idle instance looks whether the run stops (s)."""


def run_rollout(context: WorkerContext) -> None:
    """Generate until the queue stops."""
    rollout = Rollout(context)
    rollout.generate_until_stopped()
    rollout.close()


class Rollout:
    """One generating instance."""

    def __init__(self, context: WorkerContext) -> None:
        config = context.config
        self._context = context
        self._config = config
        self._engine = load_generate_engine(config, config.rollout, device=context.device)
        task = task_of("rollout", config, context.job)
        self._scorer, tokenizer = None, None
        if "rewards" in task.fused:
            tokenizer = context.load_tokenizer()
            parts = config.has_reward_parts
            self._scorer = Scorer(config.reward, tokenizer, failed=context.reward_failed, has_parts=parts)
        size = config.schedule.n_samples_per_prompt
        self._filter = load_group_filter(config.algorithm, group_size=size) if self._scorer else None
        self._group_reward = None
        if self._scorer is not None and config.reward.group_function is not None:
            self._group_reward = GroupReward(config.reward, group_size=size, failed=context.reward_failed)
        self._samples = SampleLog(
            context.run_dir, context.gang.name,
            shown=config.rollout.samples_per_step, groups_per_step=config.schedule.rollout_batch_size,
            tokenizer=tokenizer,
        )  # fmt: skip
        self._client = context.queue_client()
        self._client.declare_outputs(task.outputs)  # a first rollout may take long
        self._wake = threading.Event()
        context.wake_to_stop(self._wake)  # an engine may wait long for a server that says nothing
        self._weights = follow_policy(context, self._engine, arrived=self._wake.set, loaded=self._loaded)
        columns = ("prompts", "ground_truth", *((TASKS,) if config.sends_tasks else ()))
        self._feeder = Feeder(self._client, columns=columns, wake=self._wake)
        self._rollouts = open_rollouts(context, self._engine, config.rollout, wake=self._wake)
        self._outbox = Outbox(
            scorer=self._scorer,
            samples=self._samples,
            # A lease that ends early is generated again as a whole, so that the same responses share a batch.
            rows_per_put=config.rollout.batch_size if config.deterministic else config.schedule.n_samples_per_prompt,
            group_filter=self._filter,
            group_reward=self._group_reward,
            failed=self._wake.set,
        )
        self._waiting: deque[tuple[RolloutLease, RolloutRequest]] = deque()
        self._running: dict[int, RolloutLease] = {}
        self._tickets = itertools.count()
        self._step = 0
        self._lineage = 0
        self._draining = False
        self._busy = ExitStack()
        self._noted: tuple[int, int] | None = None

    def generate_until_stopped(self) -> None:
        """Fill, step, put, swap."""
        self._weights.wait_for(Version(self._context.job.lineage, self._context.start_step))
        while not self._context.stopping.is_set():
            self._wake.clear()
            self._outbox.check()
            self._take_leases()
            self._swap_if_due()
            self._fill()
            if self._rollouts.num_running:
                self._generate()
            elif self._feeder.stopped:
                break
            else:
                self._wait()
        self._rollouts.abort()
        self._busy.close()

    def close(self) -> None:
        """Put what is finished; leave the queue and the weight agent."""
        self._feeder.close()
        self._outbox.close(stop=self._context.stopping)
        self._samples.close()
        if self._scorer is not None:
            self._scorer.close()
        for users in (self._filter, self._group_reward):
            if users is not None:
                users.close()
        self._client.close()
        self._rollouts.close()
        self._engine.close()
        self._weights.close()

    def _swap_if_due(self) -> None:
        self._draining = False
        if not self._weights.has_newer:
            return
        if self._weights.abandoned:
            self._abandon()
        boundary = any(lease.partition > self._step for lease, _ in self._waiting)
        may = partial(
            self._config.schedule.mode.may_swap,
            num_running=self._rollouts.num_drawing,
            boundary=boundary or self._feeder.needed_version() is not None,
        )
        due = may(interruptible=self._engine.interruptible)
        # An engine that cannot be interrupted would never be idle while others take the places of what ended.
        self._draining = not due and may(interruptible=True)
        if due and not self._weights.load_newest():
            retry = threading.Timer(_RETRY_S, self._wake.set)  # others are swapping
            retry.daemon = True
            retry.start()

    def _abandon(self) -> None:
        """The trainer went back to a checkpoint: what runs, waits or is not put is of a queue that is no more."""
        dropped = self._feeder.take()
        number = len(self._running) + len(self._waiting) + sum(len(lease.batch) for lease in dropped)
        logger.warning("the trainer went back to a checkpoint: %d responses are abandoned", number)
        self._rollouts.abort()
        self._running.clear()
        self._waiting.clear()
        self._outbox.abandon()
        self._step = 0
        self._note_idle()

    def _loaded(self, version: Version) -> None:
        if self._running and version.lineage > self._lineage:
            self._abandon()
        self._lineage = version.lineage
        self._engine.version = version.step
        self._context.report("generating" if self._running else "idle", version=version.step)
        if self._running:
            self._note_busy(self._step)

    def _take_leases(self) -> None:
        for lease in self._feeder.take():
            self._waiting.extend((lease, request) for request in self._requests(lease))

    def _fill(self) -> None:
        """Give the engine what waits, and ask for what there is room for."""
        room = self._room()
        number = min(room, len(self._waiting))
        if number:
            taken = [self._waiting.popleft() for _ in range(number)]
            self._running |= {request.ticket: lease for lease, request in taken}
            self._note_busy(max(lease.partition for lease, _ in taken))
            self._rollouts.begin([request for _, request in taken])
        version = self._weights.version
        assert version is not None, "no prompts are asked for before there are weights"
        self._feeder.want(self._room() - len(self._waiting), version=version)

    def _room(self) -> int:
        """Return how many responses may begin; with `deterministic`, responses that began together share all steps."""
        if self._rollouts.num_running and (self._config.deterministic or self._draining):
            return 0
        return self._rollouts.free_slots

    def _generate(self) -> None:
        self._context.progress()
        if figures := self._rollouts.figures():
            self._context.report("generating", f"{len(self._running)} rollouts", rollouts=figures)
        for rollout in self._rollouts.step(self._wake, hold=self._draining):
            _check_finite(rollout)
            self._outbox.add(self._running.pop(rollout.ticket), rollout)

    def _wait(self) -> None:
        """Nothing runs: wait for prompts, or for the weights that they need."""
        self._note_idle()
        needed = self._feeder.needed_version()
        if needed is not None:
            self._weights.wait_for(needed)
            return
        self._context.report("waiting for prompts", rollouts=self._rollouts.figures())
        with self._context.timeline.span("wait for prompts"):
            while not self._wake.wait(_LOOK_S) and not self._context.stopping.is_set():
                pass

    def _note_busy(self, step: int) -> None:
        """Begin a span of the timeline when the step or the weights change."""
        self._step = step = max(step, self._step)
        if self._noted == (step, self._weights.step):
            return
        self._note_idle()
        self._noted = step, self._weights.step
        self._context.report("generating", f"{len(self._running)} responses", step=step)
        self._busy.enter_context(self._context.timeline.span("generate", step=step, version=self._weights.step))

    def _note_idle(self) -> None:
        self._busy.close()
        self._noted = None

    def _requests(self, lease: RolloutLease) -> Iterator[RolloutRequest]:
        rows = zip(lease.batch.indices, lease.prompts, lease.tasks, lease.lease.groups, strict=True)
        for index, prompt, task, group in rows:
            yield RolloutRequest(
                index=index,
                ticket=next(self._tickets),
                seed=_seed(self._config.seed, index),
                prompt_P=prompt,
                task=task,
                group=group,
                member=index % self._config.schedule.n_samples_per_prompt,
            )


def _check_finite(rollout: FinishedRollout) -> None:
    """Weights that are not numbers, or overflow, come from an update that went wrong; another start has the same ones.

    Raises:
        TrainingDiverged: its tokens have no probabilities.
    """
    if not bool(rollout.log_probs_A.isfinite().all()):
        raise TrainingDiverged(
            f"the weights of step {int(rollout.versions_A[-1])} give probabilities that are not finite; go back to "
            f"a checkpoint before it with a smaller actor.lr"
        )


def _seed(run_seed: int, index: int) -> int:
    """Mix (run seed, row index) into 64 bits; the row index holds group and sample."""
    return int(np.random.SeedSequence([run_seed, index]).generate_state(1, np.uint64)[0])
