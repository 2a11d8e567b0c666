"""The rollout loop: lease whole groups, generate, score each answer as it finishes, put, swap weights in between.

    take newest weights -> fetch groups -> generate ... put finished answers ... -> take newest weights -> ...

While a generation runs, a thread stages newer weights; they are swapped in at its end (delayed update). Called by
`workers.main`. Never mixes versions inside a lease, and never decides which groups may start: admission does.
"""

import logging
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np

from tq.batch import PackedBatch
from tq.messages import Granted, NoRowsReason
from weightsync.version import Version
from workers.context import WorkerContext
from workers.engines.base import GenerateRequest
from workers.engines.load import load_generate_engine
from workers.outbox import Outbox, RolloutLease
from workers.rewards.scorer import Scorer
from workers.samples import SampleLog
from workers.tasks import launched_tasks
from workers.tokenizer import load_tokenizer
from workers.weight_path import open_receiver

logger = logging.getLogger(__name__)

_TURN_PATIENCE_S = 1.0
"""How long to wait for a turn to swap before looking again whether the run stops (s)."""


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
        self._receiver = open_receiver(context, self._engine.weight_needs(), adopts=self._engine.adopts_weights)
        self._version: Version | None = None

    def swap_weights(self, *, at_least: int) -> None:
        """Load the newest weights at hand, if it is this instance's turn; wait until it has some of step `at_least`.

        Raises:
            WeightSyncError: they do not come.
        """
        context, timeout_s = self._context, self._config.weightsync.timeout_s
        while self._version is None or self._version.step < at_least:
            context.report("waiting for weights")
            with context.timeline.span("wait for weights", step=at_least):
                if not self._receiver.wait_for(at_least, timeout_s=timeout_s, stop=context.stopping):
                    return
            self._load_newest(patience_s=_TURN_PATIENCE_S)
        self._load_newest(patience_s=0.0)

    def _load_newest(self, *, patience_s: float) -> None:
        if self._receiver.newest in (None, self._version):
            return
        with self._context.timeline.span("load weights"):
            load = partial(self._engine.load_weights, adopt=self._receiver.adopts)
            loaded = self._receiver.load(load, newer_than=self._version, patience_s=patience_s)
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
        """Leave the queue and the weight agent."""
        self._samples.close()
        if self._scorer is not None:
            self._scorer.close()
        self._client.close()
        self._receiver.close()

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
