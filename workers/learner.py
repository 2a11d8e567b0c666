"""What a step trains: a model's engine with its loss. Called by `workers.step_trainer`.

The actor has the policy, and the critic where that has no role of its own; the role `critic` has the critic.

Legend of shapes: A answer tokens of a micro-batch.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

import torch
from torch import Tensor

from tq.batch import PackedBatch
from workers.algorithms.load import load_algorithm
from workers.algorithms.ppo import PPO
from workers.config import RunConfig
from workers.engines.base import TrainedEngine, TrainEngine, ValueEngine
from workers.log_prob_gap import Comparison
from workers.packing import sequences_of
from workers.tri_model import LossOfMicroStep, MicroStep


class Model(StrEnum):
    """Which model a learner has."""

    POLICY = "policy"
    CRITIC = "critic"


class MicroLoss(Protocol):
    """The loss of one micro-batch: called once by the engine, then holds `stats`."""

    @property
    def stats(self) -> Mapping[str, Tensor]:
        """Scalar tensors: `loss` and `tokens`, and further sums over the tokens that count."""

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return the unnormalised sum."""


@dataclass(frozen=True)
class Learner:
    """A model in training.

    Attributes:
        model: which.
        engine: that holds it.
        loss: (micro-batch, device) -> its loss.
        first_step: it is trained from this step on.
    """

    model: Model
    engine: TrainedEngine
    loss: Callable[[PackedBatch, torch.device], MicroLoss]
    first_step: int = 1

    def train(
        self,
        batch: PackedBatch | None,
        device: torch.device,
        scored: MicroStep | None = None,
        comparison: Comparison | None = None,
    ) -> Mapping[str, Tensor]:
        """Accumulate the gradient of a micro-batch; collective.

        Args:
            batch: None: this rank has no rows.
            device: where the engine computes.
            scored: the micro-batch as older policies and the reference see it, with `actor.tri_model`.
            comparison: is told the policy's log-probabilities.
        Returns:
            The loss's `stats`; none without rows.
        """
        if batch is None:
            self.engine.forward_backward(None, _no_loss)
            return {}
        if scored is None:
            loss: MicroLoss = self.loss(batch, device)
            sequences = sequences_of(batch)
        else:
            loss = LossOfMicroStep(scored, lambda whole: self.loss(whole, device))
            sequences = scored.sequences
        self.engine.forward_backward(sequences, loss if comparison is None else comparison.before(loss))
        return loss.stats


def policy_learner(config: RunConfig, engine: TrainEngine) -> Learner:
    """Return the policy in training: from the first step on, or after those of the critic alone."""
    algorithm = load_algorithm(config.algorithm, config.rollout)
    return Learner(
        Model.POLICY,
        engine,
        lambda batch, device: algorithm.loss(batch, device=device),
        first_step=1 + config.critic_only_steps,
    )


def critic_learner(config: RunConfig, engine: ValueEngine) -> Learner:
    """Return the critic in training."""
    algorithm = load_algorithm(config.algorithm, config.rollout)
    assert isinstance(algorithm, PPO), f"{config.algorithm.name} has no critic"
    return Learner(Model.CRITIC, engine, lambda batch, device: algorithm.value_loss(batch, device=device))


def _no_loss(*_: Tensor) -> Tensor:
    raise AssertionError("a rank without rows has no loss")
