"""Settings of the algorithms. Torch-free: `--dry-run` reads this."""

from typing import Literal, Self

from pydantic import Field

from asyncflow.settings import Settings


class OffPolicyConfig(Settings):
    """What is done about tokens that an older policy drew; see `workers.algorithms.off_policy`."""

    method: Literal["none", "truncated_is", "decoupled", "sequence_mask"] | None = None
    """`none`: the older policy is PPO's old one, whose ratio is clipped. `decoupled`: tokens are weighted by the ratio
    of the two policies, clipping is relative to the newest one. `truncated_is`: the same with weights of at most `cap`.
    `sequence_mask`: also without answers that the newest policy would hardly have given. null: `truncated_is` where
    the schedule lets weights be older, else `none`. With one update a step only `none` ever clips (`eps_clip`); with
    several, the newest policy is the one that the step found (task `actor_log_probs`)."""
    cap: float = Field(2.0, ge=1)
    """Largest weight of a token (C)."""
    mask_log_ratio: float = Field(0.5, gt=0)
    """`sequence_mask`: largest mean of an answer's log ratios, up and down (nats per token)."""

    @property
    def has_proximal_policy(self) -> bool:
        """Whether PPO's old policy is another one than that which drew the tokens."""
        return self.method not in (None, "none")

    def settled(self, staleness_bound: int) -> Self:
        """Return this with the method that `None` stands for under a schedule with such a bound."""
        if self.method is not None:
            return self
        return self.model_copy(update={"method": "truncated_is" if staleness_bound else "none"})


class AlgorithmConfig(Settings):
    """Objective of the actor."""

    name: Literal["grpo"] = "grpo"
    """Which algorithm; GRPO: Shao et al. 2024 (arXiv 2402.03300)."""
    eps_clip: float = Field(0.2, gt=0, lt=1)
    """Lower clip: the ratio counts down to 1 - eps_clip."""
    eps_clip_high: float | None = Field(None, gt=0)
    """Upper clip: the ratio counts up to 1 + eps_clip_high; unset: `eps_clip` (DAPO uses 0.28)."""
    kl_coef: float = Field(0.0, ge=0)
    """Weight of the KL penalty to the reference policy inside the loss; 0 drops the reference task."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """Schulman's estimators. k3 is GRPO's; k2 has the exact gradient of KL(policy || reference); the gradient of k1
    averages to zero, so it measures and does not restrain. See `workers.algorithms.losses.kl_divergence`."""
    ref_update_interval: int = Field(0, ge=0)
    """After every so many steps the reference becomes a copy of the policy; 0: it stays the initial model."""
    off_policy: OffPolicyConfig = OffPolicyConfig()
    """Correction for tokens of older weights."""
    loss_normalization: Literal["token", "sequence", "constant"] = "token"
    """`token`: mean over all answer tokens of the step; `sequence`: mean per answer, then over answers (GRPO's paper);
    `constant`: sum over tokens / (answers x max_response_tokens) (Dr. GRPO, arXiv 2503.20783)."""
    scale_advantages_by_std: bool = True
    """Divide the centred rewards by the group's standard deviation; Dr. GRPO does not."""
    advantage_eps: float = Field(1e-6, gt=0)
    """Added to the deviation, so that a group of equal rewards yields zeros."""
