"""What an algorithm is to the loops that run it, and what all of them share. Tensors in, tensors out; no processes.

The column task asks for the `advantages` of whole groups. The trainer asks for `moments` and `normalized`, where
advantages are normalised over the step, then for `counts` and `loss` of every micro-batch, and for `scale` once per
update:

    rounds arrive    advantages -> loss loss loss ............................ -> scale     streams
                     advantages -> moments ... the last is there -> normalized -> loss loss loss -> scale   whole step

To add one: a subclass with its `Config`, anywhere (`algorithm.name: module:Class`). One of the package has its settings
in `workers.settings.algorithms`, and its name in `registry`.

Legend of shapes: N samples, A drawn tokens of these, packed.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar, Generic, TypeVar

import torch
from torch import Tensor

from asyncflow.device import to_device
from tq.columns import Column, PackedBatch
from workers.algorithms.losses import PolicyLoss
from workers.algorithms.parts import (
    Clip,
    DualClip,
    LossCounts,
    PolicyParts,
    PPOClip,
    loss_scale,
    policy_parts,
    token_weights,
)
from workers.rows.rows import ROW_BEGINS, ROW_DRAWN, SAMPLE_DRAWN
from workers.settings.algorithms import PolicyConfig, PPOClipConfig
from workers.settings.dataflow import LOSS_WEIGHTS

SettingsT = TypeVar("SettingsT", bound=PolicyConfig)


class Algorithm(ABC, Generic[SettingsT]):
    """An objective of the actor: a loss made of `parts`, optionally a KL penalty; each adds how it compares responses.

    Source: Schulman et al. 2017 (arXiv 1707.06347), eq. 7, with the clips of `PPOClipConfig`.
    """

    Config: ClassVar[type[PolicyConfig]]
    """Its settings, where it is outside the package."""
    whole_step = False
    """Advantages are normalised over the step, so nothing trains before its last row is there."""
    whole_samples: ClassVar[bool] = False
    """The ratio is one of whole samples."""

    def __init__(self, config: SettingsT, *, max_response_tokens: int, mask_truncated: bool) -> None:
        """Keep the settings.

        Args:
            max_response_tokens: longest response, of a rollout of several turns all together.
            mask_truncated: rows that were cut do not count.
        """
        self._config = config
        self._max_response_tokens = max_response_tokens
        self._mask_truncated = mask_truncated
        self._parts = self.parts()

    def parts(self) -> PolicyParts:
        """Return what the policy's loss is made of."""
        config = self._config
        return policy_parts(
            self.clips(), config.off_policy, config.loss_normalization, whole_samples=self.whole_samples
        )

    def clips(self) -> tuple[Clip, ...]:
        """Return what bounds the step of a token: PPO's clip, then the dual one."""
        config = self._config
        assert isinstance(config, PPOClipConfig), f"{type(self).__name__} says its own clips"
        dual = () if config.dual_clip is None else (DualClip(config.dual_clip),)
        return (PPOClip(config.eps_clip, config.upper_clip), *dual)

    @abstractmethod
    def advantages(self, batch: PackedBatch, *, group_size: int) -> Mapping[str, Column]:
        """Return the outputs of task `compute_advantages_and_returns`, at least `advantages`.

        Args:
            batch: the task's inputs; whole groups, the responses of a prompt are neighbours.
            group_size: G.
        Returns:
            float32 columns, one value per row or one per drawn token.
        """

    def moments(self, batch: PackedBatch) -> "Moments":
        """Return what samples add to the moments of the step's advantages, over all tokens that count."""
        counts_A = self._weights(batch).repeat_interleave(drawn(batch)) > 0
        return Moments.of(token_advantages(batch)[counts_A])

    def normalized(self, batch: PackedBatch, moments: "Moments") -> PackedBatch:
        """Return the batch with normalised `advantages`; only algorithms with `whole_step` do.

        Args:
            batch: of this rank.
            moments: over all ranks' rows of the step.
        """
        raise AssertionError(f"{type(self).__name__} normalises nothing over a step")

    def counts(self, batch: PackedBatch) -> LossCounts:
        """Return what a micro-batch of samples adds to the divisor; a row counts with its first sample.

        Reads `truncated`, `rewards` and, if there, `loss_weights`.
        """
        keep_N, begins_N = self._weights(batch) > 0, batch[ROW_BEGINS].values
        return LossCounts(
            tokens=int(drawn(batch)[keep_N].sum()),
            sequences=int((keep_N & begins_N).sum()),
            responses=int((has_reward(batch) & begins_N).sum()),
        )

    def loss(self, batch: PackedBatch, *, device: torch.device) -> PolicyLoss:
        """Return the loss of a micro-batch.

        Args:
            batch: of samples (`workers.rows.rows.samples_of`), columns `rollout_log_probs`, `advantages` (one per
                row or token), `truncated`, `rewards`, with a KL penalty `ref_log_probs`; where a task writes them also
                `old_log_probs`, of the policy that the step found (without them: the one in training), and
                `loss_weights`, one per row.
            device: where the engine computes.
        """
        names = ["rollout_log_probs"]
        names += ["ref_log_probs"] if self._config.kl_coef > 0 else []
        names += ["old_log_probs"] if "old_log_probs" in batch.columns else []
        own = [drawn(batch), self._token_weights(batch), token_advantages(batch)]
        length_N, weight_A, advantage_A, *rest = to_device([*own, *(batch[name].values for name in names)], device)
        columns = dict(zip(names, rest, strict=True))
        return PolicyLoss(
            parts=self._parts,
            kl=self._config.kl_loss,
            length_N=length_N,
            weight_A=weight_A,
            advantage_A=advantage_A,
            rollout_log_probs_A=columns["rollout_log_probs"],
            ref_log_probs_A=columns.get("ref_log_probs"),
            old_log_probs_A=columns.get("old_log_probs"),
            entropy_coef=self._config.entropy_coef,
        )

    def scale(self, counts: LossCounts) -> float:
        """Return the factor for `TrainEngine.step`, from the counts of the update's micro-batches on all ranks."""
        return loss_scale(self._parts.aggregate, counts, max_response_tokens=self._max_response_tokens)

    def _token_weights(self, batch: PackedBatch) -> Tensor:
        weight_N, row_N = self._weights(batch), batch[ROW_DRAWN].values
        return token_weights(self._parts.aggregate, drawn(batch), weight_N, row_N)

    def _weights(self, batch: PackedBatch) -> Tensor:
        """Return float32 [N]: the weight of each sample's row."""
        truncated_N = batch["truncated"].values.bool()
        weight_N = torch.ones(len(batch)) if LOSS_WEIGHTS not in batch.columns else batch[LOSS_WEIGHTS].values.float()
        weight_N = weight_N * has_reward(batch)
        return weight_N * ~truncated_N if self._mask_truncated else weight_N


def drawn(batch: PackedBatch) -> Tensor:
    """Return int64 [N]: drawn tokens of each sample."""
    return batch[SAMPLE_DRAWN].values.long()


def has_reward(batch: PackedBatch) -> Tensor:
    """Return bool [N]: whether a sample's row has a reward; where scoring failed it is NaN, and nothing counts."""
    return batch["rewards"].values.isfinite()


def token_advantages(batch: PackedBatch) -> Tensor:
    """Return float32 [A]: the advantage of each drawn token, from a column with one per row or per token."""
    column, length_N = batch["advantages"], drawn(batch)
    if torch.equal(column.lengths.long(), length_N):
        return column.values.float()
    return column.values.float().repeat_interleave(length_N)


@dataclass(frozen=True)
class Moments:
    """Mean and deviation of numbers that come in parts. Plain numbers, so that they travel as JSON.

    Attributes:
        count: how many.
        mean: 0 without any.
        squares: sum of the squared distances from the mean.
    """

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0

    @staticmethod
    def of(values: Tensor) -> "Moments":
        """Return the moments of a tensor, computed in float64."""
        if not values.numel():
            return Moments()
        values = values.double()
        mean = values.mean()
        return Moments(values.numel(), float(mean), float((values - mean).square().sum()))

    @staticmethod
    def merged(parts: Iterable["Moments"]) -> "Moments":
        """Return the moments of all numbers together.

        Source: Chan, Golub, LeVeque 1983, eq. 2.1.
        """
        count, mean, squares = 0, 0.0, 0.0
        for part in parts:
            total = count + part.count
            if part.count:
                apart = part.mean - mean
                squares += part.squares + apart**2 * count * part.count / total
                mean += apart * part.count / total
            count = total
        return Moments(count, mean, squares)

    @property
    def deviation(self) -> float:
        """Population standard deviation; 0 without any numbers."""
        return math.sqrt(self.squares / self.count) if self.count else 0.0
