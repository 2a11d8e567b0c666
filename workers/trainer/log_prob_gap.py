"""How far the generating engine's log-probabilities are from the trainer's, for the same tokens under the same weights.

Before its first update, step s computes with the weights of step s - 1. For the tokens that these weights drew the two
must agree but for rounding; a larger difference is an error in one of the engines. Tokens of older weights say nothing
about that, so a step without any of the newest has no figure.

Legend of shapes: A drawn tokens, packed.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tq.batch import PackedBatch
from workers.engines.base import LossFunction
from workers.records.step_totals import numbers

WRONG_MEAN = 0.5
"""Mean difference (nats) that no rounding explains: bfloat16 kernels of two engines are some hundredths apart."""


@dataclass
class LogProbGap:
    """The difference over some tokens; plain numbers, so that they travel as JSON.

    Attributes:
        tokens: that were compared.
        total: sum of the absolute differences.
        largest: of them.
    """

    tokens: int = 0
    total: float = 0.0
    largest: float = 0.0

    def add(self, other: "LogProbGap") -> None:
        """Add tokens."""
        self.tokens += other.tokens
        self.total += other.total
        self.largest = max(self.largest, other.largest)

    @staticmethod
    def merged(parts: Iterable["LogProbGap"]) -> "LogProbGap":
        """Return the gap over several ranks."""
        whole = LogProbGap()
        for part in parts:
            whole.add(part)
        return whole

    @property
    def mean(self) -> float | None:
        """Mean difference (nats); None: no token was compared."""
        return self.total / self.tokens if self.tokens else None

    @property
    def complaint(self) -> str:
        """What to tell the user; "": nothing is wrong."""
        mean = self.mean
        if mean is None or mean <= WRONG_MEAN:
            return ""
        return (
            f"the generating engine's log-probabilities are {mean:.2g} nats from the trainer's on "
            "average, for tokens of the same weights: one of the two computes wrongly (rollout_log_prob_diff_mean)"
        )

    def metrics(self) -> dict[str, float | None]:
        """Return mean and largest difference under their public names; null: no token was compared."""
        return {
            "rollout_log_prob_diff_mean": self.mean,
            "rollout_log_prob_diff_max": self.largest if self.tokens else None,
        }


@dataclass
class Comparison:
    """Compares the tokens of one micro-batch that the newest weights drew.

    Attributes:
        rollout_A: float32 [A], of the generating engine.
        same_A: bool [A]: the weights that drew the token are those that the trainer has.
        stats: set by the loss: `tokens`, `total`, `largest`, scalars on the device.
    """

    rollout_A: Tensor
    same_A: Tensor
    stats: dict[str, Tensor] = field(default_factory=dict)

    @staticmethod
    def of(batch: PackedBatch, *, step: int) -> "Comparison | None":
        """Return the comparison for a micro-batch; None: no token of it is of the newest weights.

        Args:
            batch: columns `rollout_log_probs`, `versions`.
            step: that trains it, before its first update.
        """
        same_A = batch["versions"].values == step - 1
        return Comparison(batch["rollout_log_probs"].values, same_A) if bool(same_A.any()) else None

    def before(self, loss: LossFunction) -> LossFunction:
        """Return a loss that compares, and is `loss`."""

        def compare_and_lose(log_probs_A: Tensor, entropy_A: Tensor) -> Tensor:
            self._compare(log_probs_A)
            return loss(log_probs_A, entropy_A)

        return compare_and_lose

    def gap(self) -> LogProbGap:
        """Return what was found, after the loss was called."""
        found = numbers(self.stats)
        return LogProbGap(int(found["tokens"]), found["total"], found["largest"])

    @torch.no_grad()
    def _compare(self, log_probs_A: Tensor) -> None:
        same_A = self.same_A.to(log_probs_A.device)
        gap_A = (log_probs_A.float() - self.rollout_A.to(log_probs_A.device)).abs()
        gap_A = torch.where(same_A, gap_A, 0.0)
        self.stats = {"tokens": same_A.sum(), "total": gap_A.sum(), "largest": gap_A.amax()}
