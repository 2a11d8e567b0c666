"""The ablation's workloads: how long answers are, and how long each role takes. Times are in periods T of one step."""

from dataclasses import dataclass
from typing import Any

from workers.engines.sim_config import SimConfig

INSTANCES, ACTORS, REFS = 8, 4, 2
ROUND = 32
"""Samples that the actor's ranks train together."""
MEAN_TOKENS = 200
SCHEDULES: dict[str, dict[str, Any]] = {
    "sync": {"mode": "sync", "max_staleness": 0},
    "streaming": {"mode": "periodic", "max_staleness": 0},
    "async": {"mode": "async", "max_staleness": 1},
    "substep": {"mode": "substep", "max_staleness": 1},
    "substep2": {"mode": "substep", "max_staleness": 2},
}


@dataclass(frozen=True)
class Workload:
    """One of them.

    Attributes:
        sigma, clip: of the lengths' log-normal distribution; the longest, in means.
        slots: answers at a time, over all instances.
        rollout, ref, actor: time of a step's work on all of the role's processes (T).
        samples: of a step.
        period_s: T (s).
    """

    sigma: float
    clip: float
    slots: int
    rollout: float = 1.0
    ref: float = 0.4
    actor: float = 1.0
    samples: int = 256
    period_s: float = 4.0

    def sim(self) -> dict[str, Any]:
        """Return the run's section `sim`."""
        per_sample_s = self.period_s / self.samples / MEAN_TOKENS
        return {
            "lengths": "lognormal",
            "sigma": self.sigma,
            "clip": self.clip,
            "mean_tokens": MEAN_TOKENS,
            "decode_s_per_token": self.rollout * self.slots * per_sample_s,
            "ref_s_per_token": self.ref * REFS * per_sample_s,
            "train_s_per_token": self.actor * ACTORS * per_sample_s,
        }

    def sim_config(self) -> SimConfig:
        """Return it checked."""
        return SimConfig.model_validate(self.sim())


WORKLOADS = {
    "w0": Workload(sigma=0.3, clip=4, slots=64, ref=0.7),
    "w1": Workload(sigma=0.3, clip=4, slots=64),
    "w2": Workload(sigma=0.8, clip=6, slots=64),
    "w3": Workload(sigma=1.0, clip=8, slots=128),
    "w4": Workload(sigma=0.8, clip=6, slots=64, rollout=0.8),
}
