"""The rollout loop: fill free places, generate, score and put each answer as it ends, take newer weights.

    fill -> step -> fill -> step, an answer ended -> outbox ... newer weights at hand -> swap, if the schedule says so

Prompts are leased by the `Feeder`'s thread and answers put by the `Outbox`'s, so neither holds up generation. Called by
`workers.main`. Never decides which groups may start: admission does.
"""

import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path

import numpy as np
from torch import Tensor

from asyncflow.errors import WeightSyncError
from tq.config import ScheduleMode
from weightsync.version import Version
from workers.context import WorkerContext
from workers.engines.base import GenerateRequest
from workers.engines.load import load_generate_engine
from workers.feeder import Feeder
from workers.outbox import Outbox, RolloutLease
from workers.rewards.scorer import Scorer
from workers.samples import SampleLog
from workers.tasks import task_of
from workers.tokenizer import load_tokenizer
from workers.weight_path import open_receiver

logger = logging.getLogger(__name__)

_TURN_PATIENCE_S = 1.0
"""How long an idle instance waits for a turn to swap before it looks again whether the run stops (s)."""
_RETRY_S = 0.05
"""After a refused turn, while answers run, before the next is asked for (s)."""
_LOOK_S = 0.5
"""How often an idle instance looks whether the run stops (s)."""


def run_rollout(context: WorkerContext) -> None:
    """Generate until the queue stops."""
    rollout = Rollout(context)
    rollout.wait_for_weights(context.start_step)
    rollout.generate_until_stopped()
    rollout.close()


def may_swap(mode: ScheduleMode, *, interruptible: bool, num_running: int, boundary: bool) -> bool:
    """Return whether an instance takes newer weights now.

    Args:
        mode: of the schedule.
        interruptible: the engine goes on with answers that run.
        num_running: answers that run.
        boundary: the next answers are of a later step than those that run, or need newer weights.
    """
    return num_running == 0 or (interruptible and (boundary or mode is ScheduleMode.SUBSTEP))


class Rollout:
    """One generating instance."""

    def __init__(self, context: WorkerContext) -> None:
        config = context.config
        self._context = context
        self._config = config
        self._engine = load_generate_engine(config, device=context.device)
        task = task_of("rollout", config, context.job)
        self._scorer = None
        if "rewards" in task.fused:
            self._scorer = Scorer(config.reward, load_tokenizer(Path(config.model.path)))
        self._samples = SampleLog(context.run_dir, context.gang.name, config)
        self._client = context.queue_client()
        self._wake = threading.Event()
        self._receiver = open_receiver(
            context, self._engine.weight_needs(), adopts=self._engine.adopts_weights, arrived=self._wake.set
        )
        self._version: Version | None = None
        self._feeder = Feeder(self._client, wake=self._wake)
        self._outbox = Outbox(
            self._client,
            scorer=self._scorer,
            samples=self._samples,
            rows_per_put=config.schedule.n_samples_per_prompt,
            failed=self._wake.set,
        )
        self._waiting: deque[tuple[RolloutLease, GenerateRequest]] = deque()
        self._running: dict[int, RolloutLease] = {}
        self._tickets = itertools.count()
        self._step = 0
        self._busy = ExitStack()
        self._noted: tuple[int, int] | None = None

    def wait_for_weights(self, step: int) -> None:
        """Load weights of `step` or later; returns without them only when the run stops.

        Raises:
            WeightSyncError: they do not come.
        """
        context, timeout_s = self._context, self._config.weightsync.timeout_s
        deadline = time.monotonic() + timeout_s
        while (self._version is None or self._version.step < step) and not context.stopping.is_set():
            context.report("waiting for weights")
            with context.timeline.span("wait for weights", step=step):
                if not self._receiver.wait_for(step, timeout_s=timeout_s, stop=context.stopping):
                    return
                loaded = self._load_newest(patience_s=_TURN_PATIENCE_S)
            if not loaded and time.monotonic() > deadline:
                raise WeightSyncError(
                    f"weights of step {step} are at hand, but no turn to load them came within {timeout_s:g} s: an "
                    f"instance that swaps does not end"
                )

    def generate_until_stopped(self) -> None:
        """Fill, step, put, swap."""
        while not self._context.stopping.is_set():
            self._wake.clear()
            self._outbox.check()
            self._take_leases()
            self._swap_if_due()
            self._fill()
            if self._engine.num_running:
                self._generate()
            elif self._feeder.stopped:
                break
            else:
                self._wait()
        self._engine.abort()
        self._busy.close()

    def close(self) -> None:
        """Put what is finished; leave the queue and the weight agent."""
        self._feeder.close()
        self._outbox.close(stop=self._context.stopping)
        self._samples.close()
        if self._scorer is not None:
            self._scorer.close()
        self._client.close()
        self._receiver.close()

    def _swap_if_due(self) -> None:
        if self._receiver.newest in (None, self._version):
            return
        boundary = any(lease.granted.partition > self._step for lease, _ in self._waiting)
        due = may_swap(
            self._config.schedule.mode,
            interruptible=self._engine.interruptible,
            num_running=self._engine.num_running,
            boundary=boundary or self._feeder.needed_version() is not None,
        )
        if due and not self._load_newest(patience_s=0.0):
            retry = threading.Timer(_RETRY_S, self._wake.set)  # others are swapping
            retry.daemon = True
            retry.start()

    def _load_newest(self, *, patience_s: float) -> bool:
        """Load what is at hand, if it is this instance's turn; returns whether it was."""

        def load(weights: Mapping[str, Tensor]) -> None:
            with self._context.timeline.span("load weights"):
                self._engine.load_weights(weights, adopt=self._receiver.adopts)

        loaded = self._receiver.load(load, newer_than=self._version, patience_s=patience_s)
        if loaded is None:
            return False
        self._version = loaded
        self._engine.version = loaded.step
        self._context.report("generating" if self._running else "idle", version=loaded.step)
        if self._running:
            self._note_busy(self._step)
        return True

    def _take_leases(self) -> None:
        for lease in self._feeder.take():
            self._waiting.extend((lease, request) for request in self._requests(lease))

    def _fill(self) -> None:
        """Give the engine what waits, and ask for what there is room for."""
        number = min(self._engine.free_slots, len(self._waiting))
        if number:
            taken = [self._waiting.popleft() for _ in range(number)]
            self._running |= {request.ticket: lease for lease, request in taken}
            self._note_busy(max(lease.granted.partition for lease, _ in taken))
            self._engine.submit([request for _, request in taken])
        self._feeder.want(self._engine.free_slots - len(self._waiting), version=self._held)

    def _generate(self) -> None:
        for generation in self._engine.step(self._wake):
            self._outbox.add(self._running.pop(generation.ticket), generation)

    def _wait(self) -> None:
        """Nothing runs: wait for prompts, or for the weights that they need."""
        self._note_idle()
        needed = self._feeder.needed_version()
        if needed is not None:
            self.wait_for_weights(needed)
            return
        self._context.report("waiting for prompts")
        with self._context.timeline.span("wait for prompts"):
            while not self._wake.wait(_LOOK_S) and not self._context.stopping.is_set():
                pass

    def _note_busy(self, step: int) -> None:
        """Begin a span of the timeline when the step or the weights change."""
        self._step = step = max(step, self._step)
        if self._noted == (step, self._held):
            return
        self._note_idle()
        self._noted = step, self._held
        self._context.report("generating", f"{len(self._running)} answers", step=step)
        self._busy.enter_context(self._context.timeline.span("generate", step=step, version=self._held))

    def _note_idle(self) -> None:
        self._busy.close()
        self._noted = None

    @property
    def _held(self) -> int:
        return 0 if self._version is None else self._version.step

    def _requests(self, lease: RolloutLease) -> Iterator[GenerateRequest]:
        for index, prompt in zip(lease.batch.indices, lease.prompts, strict=True):
            yield GenerateRequest(index, prompt, _seed(self._config.seed, index), next(self._tickets))


def _seed(run_seed: int, index: int) -> int:
    """Mix (run seed, row index) into 64 bits; the row index holds group and sample."""
    return int(np.random.SeedSequence([run_seed, index]).generate_state(1, np.uint64)[0])
