"""`actor.tri_model`: policy, old policy and reference in one layout; log-probabilities of all three in one micro-step.

    micro-batch -> reference, and older policies -> policy, loss, backward

Tokens are weighted against what the generating engine recorded (`algorithm.off_policy`), and the *old* policy is the
one that the step found: before its first update the policy itself, computed once, so the ratio is exactly 1; after that
a copy that the actor keeps, sharded like the policy.

Without such weights (`method: none`) the old policy of a token is the version that drew it, as the trainer computes it.
Where that is the one which is trained now (on-policy, before the first update), it is again the policy itself. Other
versions are copies: as many as may be older (`max_staleness`), and one more for a step of several updates. A version
that is not held (just after a resume) keeps the log-probabilities that the generating engine recorded.

    step 7, max_staleness 1     held: version 5      trained: version 6      before its update 6 replaces 5

The reference is the initial model. Called by `workers.trainer.trainer`; all ranks call alike, with or without rows.

Legend of shapes: A drawn tokens of a micro-batch.
"""

from collections.abc import Callable, Collection, Mapping

import torch
from torch import Tensor

from asyncflow.device import to_device
from tq.columns import Column, PackedBatch
from workers.algorithms.parts import MicroLoss
from workers.engines.base import CopyingEngine, PolicyCopy, TrainEngine
from workers.rows.rows import Sequences, sequences_of
from workers.settings.run import RunConfig

MakeLoss = Callable[[PackedBatch], MicroLoss]
"""(a batch with all columns) -> the algorithm's loss of it."""


class TriModel:
    """The copies of one rank, and which versions they hold."""

    def __init__(self, config: RunConfig, engine: TrainEngine) -> None:
        """Make the copies; collective.

        Args:
            engine: whose policy is trained.
        """
        assert isinstance(engine, CopyingEngine), "the run's graph refuses other engines"
        self._weighs = config.algorithm.off_policy.has_proximal_policy
        self._reference = engine.open_copy(initial=True) if config.algorithm.kl_coef > 0 else None
        self._free = [engine.open_copy() for _ in range(config.num_old_policies)]
        self._held: dict[int, PolicyCopy] = {}

    def versions_of(self, batch: PackedBatch) -> list[int]:
        """Return the versions that drew a batch's tokens, where they are its old policies; ascending."""
        return sorted(set(batch["versions"].values.tolist())) if len(batch) and not self._weighs else []

    def before_update(self, step: int) -> None:
        """Hold the weights that a step found, before its first update changes them: the oldest that are held go."""
        if step - 1 in self._held:
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
            batch: N >= 1 samples; None: this rank has none, and gets None.
            drawn_by: the versions that drew tokens of this round, on any rank.
            step: that is trained.
            updated: the step's first update was made.
            device: where the engine computes.
        """
        sequences = None if batch is None else sequences_of(batch)
        reference_A = None if self._reference is None else self._reference.log_probs(sequences)
        wanted = {version for version in drawn_by if updated or version != step - 1}
        wanted |= {step - 1} if updated and self._weighs else set()
        scored = {v: self._held[v].log_probs(sequences) for v in sorted(wanted & self._held.keys())}
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
        batch: with `ref_log_probs`, and where they are not the policy's own the old policy's log-probabilities.
        sequences: packed once, for all three models.
        drew: the older versions that drew tokens -> float32 [A], all tokens' log-probabilities with them.
    """

    def __init__(
        self,
        batch: PackedBatch,
        sequences: Sequences,
        own_A: Tensor | None = None,
        drew: Mapping[int, Tensor] | None = None,
    ) -> None:
        """Args:
        batch, sequences, drew: see the attributes.
        own_A: bool [A], tokens that the policy which is trained drew; None: it does not matter.
        """
        self.batch = batch
        self.drew = drew or {}
        self.sequences = sequences
        self._own_A = own_A

    def with_own(self, log_probs_A: Tensor) -> PackedBatch:
        """Return the batch with the policy's own log-probabilities where it drew the tokens and is the old policy.

        Args:
            log_probs_A: under the policy, as the loss gets them.
        """
        if self._own_A is None:
            return self.batch
        own_A = log_probs_A.detach().float()
        old_A = torch.where(self._own_A, own_A, self.batch["rollout_log_probs"].values)
        return self.batch.with_columns({"rollout_log_probs": _column(old_A, self.batch)})


class LossOfMicroStep:
    """The algorithm's loss, made when the policy's log-probabilities are there; then holds `stats`."""

    def __init__(self, micro_step: MicroStep, make: MakeLoss) -> None:
        self._micro_step = micro_step
        self._make = make
        self.stats: Mapping[str, Tensor] = {}

    def __call__(self, log_probs_A: Tensor, entropy_A: Tensor) -> Tensor:
        """Return the unnormalised sum, a scalar with gradient."""
        loss = self._make(self._micro_step.with_own(log_probs_A))
        total = loss(log_probs_A, entropy_A)
        self.stats = loss.stats
        return total


def _column(value_A: Tensor, batch: PackedBatch) -> Column:
    return Column(value_A, batch["rollout_log_probs"].lengths)
