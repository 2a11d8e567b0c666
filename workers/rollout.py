"""The rollout loop: lease whole groups, generate, score each answer as it finishes, put, swap weights in between.

    take newest weights -> fetch groups -> generate ... put finished answers ... -> take newest weights -> ...

While a generation runs, a thread stages newer weights; they are swapped in at its end (delayed update). Called by
`workers.main`. Never mixes versions inside a lease, and never decides which groups may start: admission does.
"""

import logging
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from tq.batch import PackedBatch
from tq.messages import Granted, NoRowsReason
from weightsync.groups import connect_receiver, read_plan
from weightsync.plan import check_receiver
from weightsync.receiver import WeightReceiver
from weightsync.version import Version
from workers.context import WorkerContext
from workers.engines.base import GenerateEngine, GenerateRequest
from workers.engines.load import load_generate_engine
from workers.membership import weight_members
from workers.outbox import Outbox, RolloutLease
from workers.rewards.scorer import Scorer
from workers.samples import SampleLog
from workers.tasks import launched_tasks
from workers.tokenizer import load_tokenizer

logger = logging.getLogger(__name__)


def run_rollout(context: WorkerContext) -> None:
    """Generate until the queue stops."""
    rollout = Rollout(context)
    context.report("waiting for weights")
    rollout.swap_weights(at_least=context.start_step)
    rollout.generate_until_stopped()
    rollout.close()


class Rollout:
    """One generating instance."""

    def __init__(self, context: WorkerContext) -> None:
        config = context.config
        self._context = context
        self._config = config
        self._engine = load_generate_engine(config, device=context.device)
        task = next(task for task in launched_tasks(context.config, context.job) if task.role == "rollout")
        self._scorer = None
        if "rewards" in task.fused:
            self._scorer = Scorer(config.reward, load_tokenizer(Path(config.model.path)))
        self._samples = SampleLog(context.run_dir, context.gang.name, config)
        self._client = context.queue_client()
        self._receiver = _receiver(context, self._engine)
        self._version: Version | None = None

    def swap_weights(self, *, at_least: int) -> None:
        """Load the newest staged weights; wait until there are some of step `at_least`.

        Raises:
            WeightSyncError: they do not come.
        """
        timeline = self._context.timeline
        newest = self._receiver.newest
        if newest is None or newest.step < at_least:
            self._context.report("waiting for weights")
            with timeline.span("wait for weights", step=at_least):
                timeout_s = self._config.weightsync.timeout_s
                if not self._receiver.wait_for(at_least, timeout_s=timeout_s, stop=self._context.stopping):
                    return
        if self._receiver.newest == self._version:
            return
        with timeline.span("load weights"):
            loaded = self._receiver.load(self._engine.load_weights, newer_than=self._version)
        if loaded is not None:
            self._version = loaded
            self._context.report("idle", version=loaded.step)

    def generate_until_stopped(self) -> None:
        """Lease, generate, put; swap weights in between."""
        group_size = self._config.schedule.n_samples_per_prompt
        num_rows = max(1, self._config.rollout.batch_size // group_size) * group_size
        while not self._context.stopping.is_set():
            version = 0 if self._version is None else self._version.step
            self._context.report("waiting for prompts")
            with self._context.timeline.span("wait for prompts"):
                answer = self._client.fetch("actor_rollout", num_rows=num_rows, version=version)
            if isinstance(answer, Granted):
                self._generate(answer, version)
                self.swap_weights(at_least=0)
            elif answer.reason is NoRowsReason.STOP:
                return
            elif answer.reason is NoRowsReason.NEWER_VERSION:
                self.swap_weights(at_least=answer.newest_version)

    def close(self) -> None:
        """Leave the queue and wait for the trainer's last word on weights."""
        self._samples.close()
        if self._scorer is not None:
            self._scorer.close()
        self._client.close()
        self._receiver.join(timeout_s=10)

    def _generate(self, granted: Granted, version: int) -> None:
        step = granted.partition
        self._context.report("generating", f"{len(granted.rows)} answers", step=step)
        with self._context.timeline.span("generate", step=step, rows=len(granted.rows), version=version):
            batch = self._client.get(granted, ["prompts", "answers"])
            outbox = Outbox(
                self._client,
                RolloutLease(granted, batch, version),
                scorer=self._scorer,
                samples=self._samples,
                rows_per_put=self._config.schedule.n_samples_per_prompt,
            )
            for generation in self._engine.generate(list(self._requests(batch)), stop=self._context.stopping):
                outbox.add(generation)
            outbox.close(stop=self._context.stopping)

    def _requests(self, batch: PackedBatch) -> Iterator[GenerateRequest]:
        for index, prompt in zip(batch.indices, batch["prompts"].rows(), strict=True):
            yield GenerateRequest(index, prompt, seed=_seed(self._config.seed, index))


def _seed(run_seed: int, index: int) -> int:
    """Mix (run seed, row index) into 64 bits; the row index holds group and sample."""
    return int(np.random.SeedSequence([run_seed, index]).generate_state(1, np.uint64)[0])


def _receiver(context: WorkerContext, engine: GenerateEngine) -> WeightReceiver:
    members = weight_members(context.job)
    store = context.new_store()
    plan = read_plan(store, members)
    check_receiver(plan, engine.weight_specs())
    groups = connect_receiver(store, members, context.gang.name, context.device)
    return WeightReceiver(groups, plan, context.device)
