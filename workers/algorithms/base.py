"""What an algorithm is to the loops that run it: tensors in, tensors out, no processes.

Asked for, in this order: `advantages` of whole groups, by their task; by the trainer, where they are normalised over
the step, `moments` and `normalized`; then `counts` and `loss` of every micro-batch, and `scale` once for each update.

    rounds arrive    advantages -> loss loss loss ............................ -> scale     streams
                     advantages -> moments ... the last is there -> normalized -> loss loss loss -> scale   whole step

To add one: its settings in `workers.algorithms.config`, a file beside this one, its name in `workers.algorithms.load`,
and its graph in `workers.algorithms.graph` if that is another than the critic-free one.
"""

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from tq.batch import Column, PackedBatch
from workers.algorithms.losses import LossCounts
from workers.algorithms.moments import Moments


class Loss(Protocol):
    """The loss of one micro-batch: called once by the engine, then holds `stats`."""

    @property
    def stats(self) -> Mapping[str, Tensor]:
        """Scalar tensors: `loss` and `tokens`, and further sums over the tokens that count; see `StepTotals`."""

    def __call__(self, log_probs_A: Tensor, entropy_A: Tensor) -> Tensor:
        """Return the unnormalised sum, a scalar with gradient."""


class Algorithm(Protocol):
    """The objective of the actor."""

    @property
    def whole_step(self) -> bool:
        """Whether advantages are normalised over the step, so that nothing trains before its last row is there."""

    def advantages(self, batch: PackedBatch, *, group_size: int) -> Mapping[str, Column]:
        """Return the outputs of task `compute_advantages_and_returns`, at least `advantages`.

        Args:
            batch: the task's inputs; whole groups, the answers of a prompt are neighbours.
            group_size: G.
        Returns:
            float32 columns, one value per row or one per answer token.
        """

    def moments(self, batch: PackedBatch) -> Moments:
        """Return what a batch adds to the moments of the step's advantages."""

    def normalized(self, batch: PackedBatch, moments: Moments) -> PackedBatch:
        """Return the batch with normalised `advantages`, given the moments over all ranks' rows of the step."""

    def counts(self, batch: PackedBatch) -> LossCounts:
        """Return what a micro-batch adds to the divisor."""

    def loss(self, batch: PackedBatch, *, device: torch.device) -> Loss:
        """Return the loss of a micro-batch, to be computed on `device`."""

    def scale(self, counts: LossCounts) -> float:
        """Return the factor for `TrainEngine.step`, from the counts of the update's micro-batches on all ranks."""
