"""The reference policy, which may follow the trained one: every N steps it becomes a copy of the policy.

Called by the `ref` role, or by the actor that hosts it. Which weights are the reference of a step is a pure function of
the step, so it does not depend on which process computes it or when:

    N = 4    steps 1-4: the initial model    steps 5-8: weights of step 4    steps 9-12: weights of step 8 ...

The first process that loads new weights also writes them to the run directory, for the checkpoints that need them.
"""

import logging
import os
import shutil
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path

from torch import Tensor

from asyncflow.errors import ConfigError, WeightSyncError
from weightsync.receiver import WeightReceiver
from weightsync.version import Version
from workers.data.model_files import vocabulary_size
from workers.engines.base import FrozenEngine, TopTokensEngine
from workers.engines.load_engine import load_frozen_model
from workers.engines.weight_path import open_receiver
from workers.rank.context import LOADING, STARTING, WorkerContext
from workers.rank.peers import all_ranks, max_over_ranks
from workers.rows.packed_rows import Sequences

logger = logging.getLogger(__name__)

# In the run directory: the last references; in a checkpoint: the one that its next step needs.
DIRECTORY = "reference"
_KEPT = 2


def reference_step(step: int, interval: int) -> int:
    """Return the step whose weights are the reference of `step` (from 1); 0: the initial model. Interval 0: it never
    changes."""
    return 0 if interval == 0 else (step - 1) // interval * interval


def tokens_of(model_dir: str) -> int:
    """Return how many tokens a model's embeddings have; more than any has, where config.json does not say."""
    return vocabulary_size(Path(model_dir)) or 2**31 - 1


def saved_reference(context: WorkerContext, completed: int) -> Path | None:
    """Return the reference directory that a checkpoint of step `completed` must include; None: it needs none."""
    step = reference_step(completed + 1, context.config.algorithm.ref_update_interval)
    # The next step's reference is the initial model, the checkpoint's own weights, or in that directory, which was
    # written before the step's rows could be trained.
    if context.config.algorithm.kl_coef == 0 or step in (0, completed):
        return None
    if step < context.start_step:
        return Path(context.job.resume_from) / DIRECTORY
    return _kept_as(context, step)


class ReferencePolicy:
    """Computes log-probabilities under the reference of each step. Steps may only increase.

    A role of its own gets only rows of the steps whose reference it holds (`TaskSpec.version_interval`), so with rows
    in hand it waits for nothing. It takes newer weights when it is told of them. They are of step R, so all rows of
    steps up to R were trained, and no row is left for an earlier reference:

        N = 1   holds 4: rows of step 5 ... | version 5 is published: rows of step 6 are ready -> take_weights(5)

    The actor, as a host, requests rows of the step that it trains next, whose reference it made itself.

    Ranks that share a reference make the same calls, and change it together. In a role of its own it takes part in the
    broadcasts of the versions that it becomes.

    Args:
        hosted: by the actor.

    Raises:
        ConfigError: the model's directory, or the checkpoint's copy of the reference, cannot be used.
    """

    def __init__(self, context: WorkerContext, *, hosted: bool = False) -> None:
        config = context.config
        self._interval = config.algorithm.ref_update_interval
        self._timeout_s = config.weightsync.timeout_s
        self._context = context
        self._leads = context.rank == 0
        self._shared = config.ref.ranks_per_copy > 1
        first = reference_step(context.start_step + 1, self._interval)
        # Neither the initial model nor the checkpoint's own weights: the checkpoint holds it as a directory.
        restored = 0 < first < context.start_step
        self._step = first if restored else 0
        weights_dir = Path(context.job.resume_from) / DIRECTORY if restored else None
        context.report_state(STARTING, LOADING)
        self._model = load_frozen_model(config, device=context.device, weights_dir=weights_dir)
        self._num_tokens = tokens_of(config.ref.path) if config.ref.path is not None else None
        self._receiver: WeightReceiver | None = None
        if self._interval:
            needs = self._model.weight_needs()
            self._receiver = open_receiver(
                context,
                needs,
                adopts=self._model.adopts_weights,
                purpose="reference",
                wanted=self._wants_version,
                # A host's device sends in the same broadcasts.
                least=None if hosted else self._next_wanted,
                whole=not self._shared,
            )

    @property
    def model(self) -> FrozenEngine:
        return self._model

    @property
    def version(self) -> int | None:
        """Step of the weights that it computes with; None: they never change."""
        return self._step if self._interval else None

    def log_probs(self, batch: Sequences, *, step: int) -> Tensor:
        """Return float32 [A]: log-probabilities of the drawn tokens under the reference of `step`.

        Waits for that reference, which the caller must have published; raises WeightSyncError if it does not arrive in
        time.
        """
        needed = reference_step(step, self._interval)
        if needed > self._step and self._receiver is not None and self._wait_for(self._receiver, needed):
            self._load_weights(self._receiver, needed)
        with self.computing():
            return self._model.log_probs(self._known(batch))

    def top_log_probs(self, batch: Sequences, k: int, *, num_tokens: int) -> tuple[Tensor, Tensor]:
        """See `TopTokensEngine`; only for a reference that stays the same."""
        assert isinstance(self._model, TopTokensEngine), "the algorithm's check refuses other engines"
        with self.computing():
            return self._model.top_log_probs(self._known(batch), k, num_tokens=num_tokens)

    def _known(self, batch: Sequences) -> Sequences:
        return batch if self._num_tokens is None else batch.clamped(self._num_tokens)

    def computing(self) -> AbstractContextManager[None]:
        """Enter while ranks that share the model compute together; see `SharedReceiver`."""
        return nullcontext() if self._receiver is None else self._receiver.computing()

    def take_weights(self, step: int) -> None:
        """Become the reference of step `step` + 1, or a later one if that is gone; no rows may be in hand. Returns
        early if the run stops; raises WeightSyncError if the weights do not arrive in time or are gone."""
        receiver = self._receiver
        assert receiver is not None, "a reference that stays the same waits for no weights"
        while self._wait_for(receiver, step):
            best = self._newest_there(receiver, step)
            if self._shared:
                best = max_over_ranks(best)  # a rank may know of later ones
            if best == step:
                self._load_weights(receiver, step)
                return
            step = best

    def close(self) -> None:
        if self._receiver is not None:
            self._receiver.close()

    def _wait_for(self, receiver: WeightReceiver, step: int) -> bool:
        context = self._context
        with context.reporting("waiting for weights"), context.timeline.span("wait for weights", step=step):
            came = receiver.wait_for(
                step, lineage=context.job.lineage, timeout_s=self._timeout_s, stop=context.stopping
            )
            return self._true_on_all_ranks(came)

    def _newest_there(self, receiver: WeightReceiver, least: int) -> int:
        lineage, newest = self._context.job.lineage, receiver.newest
        steps = [least, *_kept_steps(self._context)]
        if newest is not None and newest.lineage == lineage and newest.step % self._interval == 0:
            steps.append(newest.step)
        return max(steps)

    def _load_weights(self, receiver: WeightReceiver, needed: int) -> None:
        with self._context.timeline.span("load weights", step=needed):
            loaded = None
            if receiver.newest is not None and receiver.newest.step == needed:
                loaded = receiver.load(partial(self._model.load_weights, adopt=receiver.adopts), newer_than=None)
                receiver.drop()
            # The trainer is ahead, so another process served this reference and wrote it.
            if loaded is None or loaded.step != needed:
                self._read_reference(needed)
        self._step = needed
        target = _kept_as(self._context, needed)
        if (self._leads or self._shared) and self._true_on_all_ranks(not target.exists()):
            self._write_reference(target)

    def _true_on_all_ranks(self, value: bool) -> bool:
        return all_ranks(value) if self._shared else value

    def _read_reference(self, needed: int) -> None:
        """Load the weights that another reference process wrote; no other weights are the reference of these steps."""
        try:
            self._model.read_weights(_kept_as(self._context, needed))
        except ConfigError as error:
            raise WeightSyncError(
                f"the reference of step {needed} is gone: newer weights came before it was loaded ({error})"
            ) from error

    def _wants_version(self, version: Version) -> bool:
        """Return whether a version is the first at or after a refresh; the receiver asks about versions in order."""
        wanted = self._next_wanted()
        return version.lineage >= wanted.lineage and version.step >= wanted.step

    def _next_wanted(self) -> Version:
        newest = self._receiver.newest if self._receiver is not None else None
        last = self._step if newest is None else max(self._step, newest.step)
        return Version(self._context.job.lineage, (last // self._interval + 1) * self._interval)

    def _write_reference(self, target: Path) -> None:
        beside = target.with_name(f".{target.name}.{os.getpid()}.tmp")
        try:
            self._model.save_weights(beside)
            if not self._leads:
                return
            # Atomic: other processes see all of it or nothing.
            beside.rename(target)
        except OSError as error:
            shutil.rmtree(beside, ignore_errors=True)
            if not target.exists():  # otherwise another process was faster
                logger.warning("%s cannot be written (%s): checkpoints before the next refresh lack it", target, error)
        for old in sorted(target.parent.glob("lineage*"))[:-_KEPT]:
            shutil.rmtree(old, ignore_errors=True)


def _kept_as(context: WorkerContext, step: int) -> Path:
    return context.run_dir / DIRECTORY / f"lineage{context.job.lineage:04d}-step_{step:06d}"


def _kept_steps(context: WorkerContext) -> list[int]:
    directories = (context.run_dir / DIRECTORY).glob(f"lineage{context.job.lineage:04d}-step_*")
    return [int(path.name.rpartition("_")[2]) for path in directories]
