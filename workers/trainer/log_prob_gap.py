"""How far the generating engine's log-probabilities are from the trainer's, for the same tokens, by the tokens' age.

Before its first update, step s computes with the weights of step s - 1. For the tokens that these weights drew (age 0)
the two must agree but for rounding; a larger difference is an error in one of the engines. A token of version v has the
age s - 1 - v, and its weights differ, too: how much off-policy data of each age is, is what the mismatch says.

Legend of shapes: A drawn tokens, packed.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from asyncflow.device import to_device
from tq.columns import PackedBatch
from workers.algorithms.losses import kl_divergence
from workers.algorithms.parts import bounded_ratio
from workers.engines.base import LossFunction
from workers.records.step_totals import effective_sample_size

WRONG_MEAN = 0.5
"""Mean difference (nats) that no rounding explains: bfloat16 kernels of two engines are some hundredths apart."""


@dataclass
class LogProbGap:
    """The difference over some tokens; plain numbers, so that they travel as JSON.

    Attributes:
        ages: of tokens -> sums over these: `tokens`, `total` (of the absolute differences), `k3`, `ratio` and
            `ratio_squared` (of the trainer's policy to the generating one), and `largest`, the largest difference.
    """

    ages: dict[str, dict[str, float]] = field(default_factory=dict)

    @staticmethod
    def of(stats: Mapping[str, float]) -> "LogProbGap":
        """Return the gap over one micro-batch, from the numbers of `Comparison.stats`."""
        gap = LogProbGap()
        for key, value in stats.items():
            age, _, name = key.partition("/")
            gap.ages.setdefault(age, {})[name] = value
        return gap

    def add(self, other: "LogProbGap") -> None:
        """Add tokens."""
        for age, sums in other.ages.items():
            own = self.ages.setdefault(age, {})
            for name, value in sums.items():
                before = own.get(name, 0.0)
                own[name] = max(before, value) if name == "largest" else before + value

    @staticmethod
    def merged(parts: Iterable["LogProbGap"]) -> "LogProbGap":
        """Return the gap over several ranks."""
        whole = LogProbGap()
        for part in parts:
            whole.add(part)
        return whole

    @property
    def mean(self) -> float | None:
        """Mean difference (nats) of the tokens of the newest weights; None: there was none."""
        newest = self.ages.get("0")
        return newest["total"] / newest["tokens"] if newest else None

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
        """Return mean and largest difference under their public names (null: no token of the newest weights), and what
        each age has of mismatch."""
        found: dict[str, float | None] = {
            "rollout_log_prob_diff_mean": self.mean,
            "rollout_log_prob_diff_max": self.ages["0"]["largest"] if "0" in self.ages else None,
        }
        for age, sums in sorted(self.ages.items(), key=lambda item: int(item[0])):
            found[f"mismatch/age_{age}_k3"] = sums["k3"] / sums["tokens"]
            found[f"mismatch/age_{age}_max"] = sums["largest"]
            share = effective_sample_size(sums["ratio"], sums["ratio_squared"], sums["tokens"])
            found[f"mismatch/age_{age}_ess"] = share
        return found


@dataclass
class Comparison:
    """Compares the tokens of one micro-batch.

    Attributes:
        rollout_A: float32 [A], of the generating engine.
        age_A: integer [A]: versions between the weights that drew the token and those that the trainer has.
        stats: set by the loss: `AGE/NAME` of `LogProbGap.ages`, scalars on the device.
    """

    rollout_A: Tensor
    age_A: Tensor
    stats: dict[str, Tensor] = field(default_factory=dict)

    @staticmethod
    def of(batch: PackedBatch, *, step: int) -> "Comparison":
        """Return the comparison for a micro-batch.

        Args:
            batch: columns `rollout_log_probs`, `versions`.
            step: that trains it, before its first update.
        """
        return Comparison(batch["rollout_log_probs"].values, step - 1 - batch["versions"].values)

    def before(self, loss: LossFunction) -> LossFunction:
        """Return a loss that compares, and is `loss`."""

        def compare_and_lose(log_probs_A: Tensor, entropy_A: Tensor) -> Tensor:
            self._compare(log_probs_A)
            return loss(log_probs_A, entropy_A)

        return compare_and_lose

    @torch.no_grad()
    def _compare(self, log_probs_A: Tensor) -> None:
        log_probs_A = log_probs_A.float()
        rollout_A, age_A = to_device([self.rollout_A, self.age_A], log_probs_A.device)
        gap_A = (log_probs_A - rollout_A).abs()
        ratio_A = bounded_ratio(log_probs_A - rollout_A)
        sums = {
            "tokens": torch.ones_like(gap_A),
            "total": gap_A,
            "k3": kl_divergence(rollout_A, log_probs_A, "k3"),
            "ratio": ratio_A,
            "ratio_squared": ratio_A.square(),
        }
        for age in sorted(set(self.age_A.tolist())):
            here_A = age_A == age
            # Masked, not selected: how many there are is known to the device alone, and asking would wait for it.
            self.stats |= {f"{age}/{name}": torch.where(here_A, value_A, 0.0).sum() for name, value_A in sums.items()}
            self.stats[f"{age}/largest"] = torch.where(here_A, gap_A, 0.0).amax()
