"""`actor.tri_model`: policy, old policy and reference in one layout; all three score a micro-batch in one micro-step.

    micro-batch -> reference, and older policies -> policy, loss, backward

With `algorithm.off_policy`, tokens are weighted against the generating engine's recorded log-probabilities, and the
*old* policy is the one at the start of the step. Before the step's first update that is the policy itself, computed
once, so the ratio is exactly 1; afterwards it is a copy that the actor keeps, sharded like the policy.

Without these weights (`method: none`), a token's old policy is the version that drew it, as the trainer computes it. If
that is the version in training (on-policy, before the first update), it is again the policy itself. Other versions are
copies: as many as tokens may be versions old (`max_staleness`), plus one for a step with several updates. If a version
is missing (just after a resume), its tokens keep the log-probabilities that the generating engine recorded.

    step 7, max_staleness 1     held: version 5      trained: version 6      before its update 6 replaces 5

The reference is the initial model. Called by `step_trainer`; all ranks make the same calls, with or without rows.

Legend of shapes: A drawn tokens of a micro-batch.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from asyncflow.device import to_device
from tq.columns import Column, PackedBatch
from workers.algorithms.parts import MicroLoss, PolicyLoss
from workers.engines.base import CopyingEngine, LossFunction, PolicyCopy, TrainEngine
from workers.rows.packed_rows import Sequences, sequences_of
from workers.settings.run import RunConfig

# (a batch with all columns) -> the algorithm's loss for it.
MakeLoss = Callable[[PackedBatch], MicroLoss]


class TriModel:
    """One rank's copies, and the versions that they hold. The constructor makes the copies and is collective."""

    def __init__(self, config: RunConfig, engine: TrainEngine) -> None:
        assert isinstance(engine, CopyingEngine), "the run's graph refuses other engines"
        self._weighs = config.algorithm.off_policy.has_proximal_policy
        self._reference = engine.open_copy(initial=True) if config.algorithm.kl_coef > 0 else None
        self._free = [engine.open_copy() for _ in range(config.num_old_policies)]
        self._held: dict[int, PolicyCopy] = {}

    def versions_of(self, batch: PackedBatch) -> list[int]:
        """Return the versions that drew a batch's tokens, ascending; empty if versions are not the old policies."""
        return sorted(set(batch["versions"].values.tolist())) if len(batch) and not self._weighs else []

    def before_update(self, step: int) -> None:
        """Before the step's first update, copy the weights that the step started with, replacing the oldest copy."""
        if step - 1 in self._held:  # not the step's first update
            return
        if not self._free and self._held:
            self._free.append(self._held.pop(min(self._held)))
        if self._free:
            self._held[step - 1] = copy = self._free.pop()
            copy.take()

    def micro_step(
        self, batch: PackedBatch | None, drawn_by: Collection[int], *, step: int, updated: bool, device: torch.device
    ) -> "MicroStep | None":
        """Score a micro-batch with the reference and the older policies; collective. The results stay on the device.

        Args:
            batch: N >= 1 samples; None if this rank has none, which returns None.
            drawn_by: versions that drew tokens of this round, on any rank.
        """
        sequences = None if batch is None else sequences_of(batch)
        reference_A = None if self._reference is None else self._reference.log_probs(sequences)
        wanted = {version for version in drawn_by if updated or version != step - 1}
        wanted |= {step - 1} if updated and self._weighs else set()
        scored = {v: self._held[v].log_probs(sequences) for v in sorted(wanted & self._held.keys())}
        # Not earlier: scoring is collective.
        if batch is None or sequences is None:
            return None
        columns = {} if reference_A is None else {"ref_log_probs": _column(reference_A, batch)}
        if self._weighs:
            columns |= {"old_log_probs": _column(scored[step - 1], batch)} if updated else {}
            return MicroStep(batch.with_columns(columns), sequences)
        version_A, old_A = to_device([batch["versions"].values, batch["rollout_log_probs"].values], device)
        for version, log_probs_A in scored.items():
            old_A = torch.where(version_A == version, log_probs_A, old_A)
        columns["rollout_log_probs"] = _column(old_A, batch)
        own_A = (version_A == step - 1) & (not updated)
        return MicroStep(batch.with_columns(columns), sequences, own_A, scored)


class MicroStep:
    """A scored micro-batch.

    Attributes:
        batch: with `ref_log_probs`, and the old policy's log-probabilities where they differ from the policy's own.
        sequences: packed once for all three models.
        drew: older version that drew tokens -> float32 [A], its log-probabilities of all tokens.

    Args:
        own_A: bool [A], the tokens that the policy in training drew; None if nothing depends on them.
    """

    def __init__(
        self,
        batch: PackedBatch,
        sequences: Sequences,
        own_A: Tensor | None = None,
        drew: Mapping[int, Tensor] | None = None,
    ) -> None:
        self.batch = batch
        self.drew = drew or {}
        self.sequences = sequences
        self._own_A = own_A

    def cut_own(self, drawn: Sequence[int]) -> Sequence[Tensor | None]:
        """Return `own_A` of neighbouring parts with `drawn` tokens each."""
        return [None] * len(drawn) if self._own_A is None else torch.split(self._own_A, list(drawn))

    def with_own(self, log_probs_A: Tensor) -> PackedBatch:
        """Return the batch with the policy's own log-probabilities (those passed to the loss) where it drew the tokens
        and is the old policy."""
        if self._own_A is None:
            return self.batch
        own_A = log_probs_A.detach().float()
        old_A = torch.where(self._own_A, own_A, self.batch["rollout_log_probs"].values)
        return self.batch.with_columns({"rollout_log_probs": _column(old_A, self.batch)})


class LossOfMicroStep:
    """The algorithm's loss, built once the policy's log-probabilities are known; calling it sets `stats`."""

    def __init__(self, micro_step: MicroStep, make: MakeLoss) -> None:
        self._micro_step = micro_step
        self._make = make
        self.stats: Mapping[str, Tensor] = {}

    def __call__(self, log_probs_A: Tensor, entropy_A: Tensor) -> Tensor:
        """Return the unnormalized sum, a scalar with gradient."""
        loss = self._make(self._micro_step.with_own(log_probs_A))
        total = loss(log_probs_A, entropy_A)
        self.stats = loss.stats
        return total

    def cut_loss(self, sizes: Sequence[tuple[int, int]]) -> Sequence[LossFunction] | None:
        """See `DivisibleLoss`."""
        whole = self._make(self._micro_step.batch)
        parts = whole.cut_loss(sizes) if isinstance(whole, PolicyLoss) else None
        if parts is None:
            return None
        own = self._micro_step.cut_own([drawn for _, drawn in sizes])
        return [
            part if own_A is None else partial(_lose_with_own, part, own_A)
            for part, own_A in zip(parts, own, strict=True)
        ]


def _lose_with_own(loss: PolicyLoss, own_A: Tensor, log_probs_A: Tensor, entropy_A: Tensor) -> Tensor:
    """Evaluate a part of a loss as `MicroStep.with_own` has the whole one evaluated."""
    old_A = torch.where(own_A, log_probs_A.detach().float(), loss.rollout_log_probs_A)
    return replace(loss, rollout_log_probs_A=old_A)(log_probs_A, entropy_A)


def _column(value_A: Tensor, batch: PackedBatch) -> Column:
    return Column(value_A, batch["rollout_log_probs"].lengths)
