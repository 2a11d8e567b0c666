"""The ablation's workloads: lengths of responses, and how long each role takes. Times are in periods T of one step."""

from dataclasses import dataclass, replace
from typing import Any

from workers.settings.sim import SimConfig

MEAN_TOKENS = 200
MICRO_BATCH = 8
"""Samples that a rank of the actor trains together."""
SCHEDULES: dict[str, dict[str, Any]] = {
    "sync": {"mode": "sync", "max_staleness": 0},
    "streaming": {"mode": "periodic", "max_staleness": 0},
    "async": {"mode": "async", "max_staleness": 1},
    "async2": {"mode": "async", "max_staleness": 2},
    "substep": {"mode": "substep", "max_staleness": 1},
    "substep2": {"mode": "substep", "max_staleness": 2},
}


@dataclass(frozen=True)
class Cluster:
    """How many processes of each role."""

    rollout: int = 8
    actor: int = 4
    ref: int = 2

    @property
    def round(self) -> int:
        """Samples that the actor's ranks train together."""
        return self.actor * MICRO_BATCH

    def times(self, factor: int) -> "Cluster":
        """Return so many times as many of each."""
        return Cluster(self.rollout * factor, self.actor * factor, self.ref * factor)


@dataclass(frozen=True)
class Workload:
    """One of them.

    Attributes:
        sigma, clip: of the lengths' log-normal distribution; the longest, in means.
        slots: responses at a time, over all instances.
        rollout, ref, actor: time of a step's work on all of the role's processes (T).
        samples: of a step.
        period_s: T (s).
        cluster: that does it.
    """

    sigma: float
    clip: float
    slots: int
    rollout: float = 1.0
    ref: float = 0.4
    actor: float = 1.0
    samples: int = 256
    period_s: float = 4.0
    cluster: Cluster = Cluster()

    def times(self, factor: int) -> "Workload":
        """Return the same work for every process of a cluster so many times as large."""
        samples, slots = self.samples * factor, self.slots * factor
        return replace(self, samples=samples, slots=slots, cluster=self.cluster.times(factor))

    def sim(self) -> dict[str, Any]:
        """Return the run's section `sim`."""
        per_sample_s = self.period_s / self.samples / MEAN_TOKENS
        return {
            "lengths": "lognormal",
            "sigma": self.sigma,
            "clip": self.clip,
            "mean_tokens": MEAN_TOKENS,
            "decode_s_per_token": self.rollout * self.slots * per_sample_s,
            "ref_s_per_token": self.ref * self.cluster.ref * per_sample_s,
            "train_s_per_token": self.actor * self.cluster.actor * per_sample_s,
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
UNIT = replace(WORKLOADS["w2"], slots=8, samples=32, cluster=Cluster(1, 1, 1))
"""What scaling multiplies: one process of each role, and w2's work for it."""
