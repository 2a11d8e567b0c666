"""Settings of the algorithms: one class each, with its tasks and checks. Torch-free: `--dry-run` reads this.

PolicyConfig            what every policy loss has
  |- TurnCreditConfig   turns of a rollout may be credited by themselves: all but GSPO, SFT and Distill
  |- SFTConfig          no rollouts: the data hold what is trained
  |- DistillConfig      each token is compared with a teacher
  |- KlLossConfig       the KL penalty is a term of the loss, unless a setting moves it into the reward
  |    |- DAPOConfig  ReinforcePlusPlusConfig  PPOConfig
  |    '- GroupConfig   rewards are compared within their group: GRPOConfig  GSPOConfig  CISPOConfig  DPPOConfig
  '- RLOOConfig         the KL penalty is part of the reward
PPOClipConfig           PPO's clip and the dual clip, for all but CISPO, DPPO and SFT

A key of another algorithm is refused.
"""

import contextlib
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self, Union

from pydantic import AfterValidator, ConfigDict, Discriminator, Field, Tag, field_validator, model_validator

from asyncflow.errors import ConfigError
from asyncflow.registry import Registry
from asyncflow.settings import Settings
from workers.settings.dataflow import (
    ACTOR_TRAIN,
    ADVANTAGES,
    CRITIC_TRAIN,
    REF_TOP_COLUMNS,
    ROLLOUT_TOP_COLUMNS,
    SAMPLE_COLUMNS,
    TEACHER,
    TEACHER_TOP_COLUMNS,
    TURN_IDS,
    TURN_REWARDS,
    Task,
    critic_free_tasks,
)


class OffPolicyConfig(Settings):
    """Correction for tokens that another policy drew: the generating engine rounds differently from the trainer, and
    its weights may be older. See `workers.algorithms.parts.policy_parts`."""

    method: Literal["none", "truncated_is", "decoupled", "icepop"] | None = "truncated_is"
    """`truncated_is` (TIS; also null): a token's weight is the ratio of the policy at the start of the step to the
    policy that drew the token, at most `cap`; PPO's ratio and clip are relative to the policy at the start of the step.
    `decoupled` (masked importance sampling): drops tokens whose weight would exceed `cap`. `icepop`: drops tokens whose
    weight is outside [`band_low`, `band_high`]. `none`: no weights; ratio and clip are relative to the generating
    engine. With one update per step, only `none` ever clips (`eps_clip`), and the others cost nothing; with several
    updates, task `actor_log_probs` makes one more forward pass."""
    cap: float = Field(2.0, ge=1)
    """Largest weight of a token (C), for `truncated_is` and `decoupled`."""
    band_low: float = Field(0.5, ge=0, le=1)
    """`icepop`: smallest weight of a token (alpha of arXiv 2510.18855)."""
    band_high: float = Field(5.0, ge=1)
    """`icepop`: largest weight of a token (beta)."""
    mask: Literal["sequence", "geometric"] | None = None
    """With any `method`: drops whole samples whose weight is too far from 1. `sequence`: the product of their tokens'
    weights; `geometric`: the geometric mean of these; null: drops none."""
    sequence_log_ratio: float | None = Field(None, gt=0)
    """`mask: sequence`: how far the sum of a sample's log weights may be from 0, either way (nats); other systems use
    0.7 to 2.3 (a factor of 2 to 10). null: as far as rounding in bfloat16 may take it, which grows with the sample's
    length; see `workers.algorithms.parts.rounding_bound`."""
    geometric_log_ratio: float | None = Field(None, gt=0)
    """`mask: geometric`: how far the mean of a sample's log weights may be from 0, either way (nats per token); other
    systems use 0.0002 to 0.001. null: as far as rounding in bfloat16 may take it: the bound of `sequence_log_ratio`
    divided by the sample's length."""

    @field_validator("method", mode="before")
    @classmethod
    def _name_the_mask(cls, method: object) -> object:
        if method == "sequence_mask":
            raise ValueError("give algorithm.off_policy.mask: geometric, its new name, and leave method out")
        return method

    @model_validator(mode="before")
    @classmethod
    def _name_the_bound(cls, section: object) -> object:
        if isinstance(section, Mapping) and "mask_log_ratio" in section:
            # A saved config.yaml may hold this former default.
            if section.get("mask") is None and section["mask_log_ratio"] == 0.5:
                return {name: value for name, value in section.items() if name != "mask_log_ratio"}
            raise cls.refusal_of(
                ("mask_log_ratio",),
                section["mask_log_ratio"],
                "it was one bound of a sum and of a mean; give sequence_log_ratio or geometric_log_ratio, or leave it "
                "out",
            )
        return section

    @model_validator(mode="after")
    def _has_no_idle_setting(self) -> Self:
        if self.method == "icepop" and self.band_low == self.band_high:
            raise ValueError("icepop leaves out all tokens but those of weight 1; set band_high above band_low")
        idle = {
            "cap": (self.method in ("icepop", "none"), "method truncated_is or decoupled"),
            "band_low": (self.method != "icepop", "method icepop"),
            "band_high": (self.method != "icepop", "method icepop"),
            "sequence_log_ratio": (self.mask != "sequence", "mask sequence"),
            "geometric_log_ratio": (self.mask != "geometric", "mask geometric"),
        }
        for name, (unread, reader) in idle.items():
            # Defaults pass: a saved config.yaml contains them all.
            if unread and getattr(self, name) != type(self).model_fields[name].default:
                raise self.refusal(name, f"it is for {reader}; set that, or leave {name} out")
        return self

    @property
    def has_proximal_policy(self) -> bool:
        """Whether PPO's old policy differs from the one that drew the tokens."""
        return self.method != "none"


KlEstimator = Literal["k1", "k2", "k3"]
# The filter of `group_filter` that refuses groups of equal rewards.
ZERO_VARIANCE = "zero_variance"


class PPOClipConfig(Settings):
    """PPO's clip and the dual clip: the parts `PPOClip` and `DualClip`."""

    ratio_bounds: ClassVar[tuple[str, ...]] = ("eps_clip", "eps_clip_high", "dual_clip")
    eps_clip: float = Field(0.2, gt=0, lt=1)
    """Lower clip: the ratio counts down to 1 - eps_clip."""
    eps_clip_high: float | None = Field(None, gt=0)
    """Upper clip: the ratio counts up to 1 + eps_clip_high; null: `eps_clip`."""
    dual_clip: float | None = Field(3.0, gt=1)
    """Where the advantage is negative, the ratio counts up to this (arXiv 1912.09729, eq. 5); null: no bound."""

    @model_validator(mode="after")
    def _dual_clip_is_beyond_the_upper_one(self) -> Self:
        default = type(self).model_fields["dual_clip"].default  # passes: a saved config.yaml contains it
        if self.dual_clip not in (None, default) and self.dual_clip <= 1 + self.upper_clip:
            raise self.refusal("dual_clip", f"it must be greater than 1 + eps_clip_high = {1 + self.upper_clip}")
        return self

    @property
    def upper_clip(self) -> float:
        """`eps_clip_high`, or `eps_clip` if that is null."""
        return self.eps_clip if self.eps_clip_high is None else self.eps_clip_high


class PolicyConfig(Settings):
    """What every policy loss has."""

    implementation: ClassVar[str] = ""
    """`module:Class` of the algorithm; a name, so that reading the configuration does not import torch."""
    ratio_bounds: ClassVar[tuple[str, ...]] = ()
    """Settings that bound the ratio of the policy in training to its base; they do nothing where that ratio is 1."""
    refused: ClassVar[frozenset[str]] = frozenset()
    """Settings of every algorithm that this one has no use for."""
    name: str = ""
    """Name of the algorithm."""
    kl_coef: float = Field(0.0, ge=0)
    """Weight of the KL penalty to the reference policy; 0 drops the reference task."""
    max_kl: float | None = Field(5.0, gt=0)
    """The run ends with an error when a step's metric `kl` exceeds this (nats per token); above 1 there is a warning. A
    useful policy stays within a nat of its reference; at 5 nats a token is e^5 = 150 times as likely, or as unlikely.
    null: never."""
    engine_gap: Literal["end", "warn"] = "end"
    """What to do when the log-probabilities of the generating engine and the trainer differ by more than rounding and
    updates explain. The first such step warns. `end`: the second in a row ends the run with an error, since one of the
    two engines computes wrongly; `warn`: the run continues, for a generating engine that is less precise on purpose
    (quantized)."""
    entropy_coef: float = Field(0.0, ge=0)
    """Weight of an entropy bonus in the loss: the entropy of the tempered distribution at each drawn token, averaged as
    `loss_normalization` says. 0: it is only measured."""
    ref_update_interval: int = Field(0, ge=0)
    """Every `ref_update_interval` steps the reference becomes a copy of the policy; 0: it stays the initial model."""
    off_policy: OffPolicyConfig = OffPolicyConfig()
    """Correction for tokens of older weights."""
    loss_normalization: Literal["token", "sequence", "constant"] = "token"
    """`token`: mean over all drawn tokens of the step; `sequence`: mean per rollout, then over rollouts (GRPO's paper);
    `constant`: sum over tokens / (rollouts x `rollout.max_response_tokens`, or `max_drawn_tokens` if that is set for
    rollouts of several turns) (Dr. GRPO, arXiv 2503.20783)."""
    group_filter: str | None = None
    """Groups that it refuses are not trained; the next prompt takes their place in the step, and each has a ledger line
    `filtered`. `zero_variance`: refuses groups whose rewards are all equal, since they teach nothing; `module:function`
    of your own: maps rewards to whether to train; null: trains all groups."""
    max_filtered_share: float = Field(0.9, gt=0, lt=1)
    """The run ends with an error when more than this share of the groups generated for a step were refused."""

    @field_validator("group_filter")
    @classmethod
    def _is_a_filter(cls, name: str | None) -> str | None:
        if name is not None and name != ZERO_VARIANCE and ":" not in name:
            raise ValueError(f"it is not a filter; give {ZERO_VARIANCE}, module:function, or null")
        return name

    @property
    def kl_in_reward(self) -> bool:
        """Whether the KL penalty is part of the reward instead of a term of the loss."""
        return True

    @property
    def has_reward_penalty(self) -> bool:
        """Whether rewards are charged for the KL divergence, which must then be known before the loss."""
        return self.kl_in_reward and self.kl_coef > 0

    @property
    def kl_loss(self) -> tuple[float, KlEstimator]:
        """Weight of the KL term in the loss, and its estimator; with weight 0 it is only measured."""
        return 0.0, "k3"

    @property
    def min_group_size(self) -> int:
        """Responses per prompt that the algorithm needs for its comparison."""
        return 2

    @property
    def has_critic(self) -> bool:
        """Whether a critic is trained beside the policy (section `critic`)."""
        return False

    @property
    def follows_reference(self) -> bool:
        """Whether the reference is a teacher, which the policy is far from at first."""
        return False

    @property
    def is_supervised(self) -> bool:
        """Whether the data hold what is trained, so that nothing is generated and nothing is rewarded."""
        return False

    @property
    def uses_rewards(self) -> bool:
        """Whether rewards say what is learned; otherwise they are only measured, and may be missing."""
        return not self.is_supervised

    @property
    def whole_step(self) -> bool:
        """Whether advantages are normalized over the step, so that training waits for the step's last row."""
        return False

    @property
    def credits_turns(self) -> bool:
        """Whether a turn's tokens are credited with the rewards from that turn on, instead of the rollout's."""
        return False

    @property
    def in_turn_order(self) -> bool:
        """Whether a token's advantage depends on tokens that its rollout drew later, in whichever sample."""
        return self.credits_turns

    @property
    def filters_groups(self) -> bool:
        return self.group_filter is not None

    @property
    def num_top_log_probs(self) -> int:
        """How many of the likeliest tokens the generating engine reports where it draws one; 0: none."""
        return 0

    def max_filtered(self, batch: int) -> int:
        """Return how many groups may be filtered from a step of `batch` groups: the largest share of all that are
        generated."""
        return int(batch * self.max_filtered_share / (1 - self.max_filtered_share) + 1e-6)

    @property
    def advantage_inputs(self) -> tuple[str, ...]:
        return ("rewards", "old_log_probs", "ref_log_probs") if self.has_reward_penalty else ("rewards",)

    def tasks(self, *, old_log_probs: bool = False) -> tuple[Task, ...]:
        """Return the algorithm's dataflow graph, producers before consumers; the last task trains the policy.
        `old_log_probs`: loss or reward need log-probabilities under the weights at the start of the step."""
        return critic_free_tasks(
            self.advantage_inputs,
            whole_groups=self.filters_groups,
            reference=self.kl_coef > 0,
            old_log_probs=old_log_probs,
        )

    def check(self, run: Any) -> None:
        """Raise ConfigError for other settings of the run (a `RunConfig`) that the algorithm cannot train with."""


class KlLossConfig(PolicyConfig):
    """An algorithm whose KL penalty is a term of the loss, unless `kl_in_reward` says otherwise."""

    kl_estimator: KlEstimator = "k3"
    """One of Schulman's estimators. k3 is GRPO's; k2 has the exact gradient of KL(policy || reference); the gradient of
    k1 averages to zero, so k1 measures but does not restrain. See `workers.algorithms.parts.kl_divergence`."""

    @property
    def kl_in_reward(self) -> bool:
        return False

    @property
    def kl_loss(self) -> tuple[float, KlEstimator]:
        return 0.0 if self.kl_in_reward else self.kl_coef, self.kl_estimator


class TurnCreditConfig(PolicyConfig):
    """What the tokens of a rollout of several turns are credited with."""

    credit: Literal["rollout", "turn"] = "rollout"
    """What the tokens of a rollout of several turns are credited with. `rollout`: its reward, the sum of its turns'
    rewards; `turn`: the rewards of their own turn and of later ones (docs/agents.md)."""
    gamma: float = Field(1.0, gt=0, le=1)
    """With `credit: turn`: discount of a later turn's reward, per turn."""

    @model_validator(mode="after")
    def _gamma_is_read(self) -> Self:
        if self.gamma != 1 and not self.discounts:
            raise self.refusal("gamma", "it discounts later turns, with credit turn; set that, or leave gamma out")
        return self

    @property
    def discounts(self) -> bool:
        """Whether `gamma` acts."""
        return self.credits_turns

    @property
    def credits_turns(self) -> bool:
        return self.credit == "turn"

    @property
    def advantage_inputs(self) -> tuple[str, ...]:
        inputs = super().advantage_inputs
        return (*inputs, TURN_IDS, TURN_REWARDS) if self.credits_turns else inputs


class GroupConfig(KlLossConfig):
    """Advantages relative to the group: Shao et al. 2024 (arXiv 2402.03300)."""

    scale_advantages_by_std: bool = True
    """Divide the centered rewards by the group's standard deviation; Dr. GRPO does not."""
    advantage_eps: float = Field(1e-6, gt=0)
    """Added to the deviation, so that a group with equal rewards yields zeros."""


class GRPOConfig(PPOClipConfig, TurnCreditConfig, GroupConfig):
    """Group-relative policy optimization: Shao et al. 2024 (arXiv 2402.03300).

    Dr. GRPO (Liu et al. 2025, arXiv 2503.20783) is `loss_normalization: constant` with `scale_advantages_by_std:
    false`.
    """

    implementation = "workers.algorithms.algorithm:GRPO"
    name: Literal["grpo"] = "grpo"
    """Name of the algorithm."""


class CISPOConfig(TurnCreditConfig, GroupConfig):
    """GRPO with the ratio as a clipped weight, so that no token loses its gradient: MiniMax 2025 (arXiv 2506.13585)."""

    implementation = "workers.algorithms.algorithm:CISPO"
    ratio_bounds = ("eps_clip", "eps_clip_high")
    name: Literal["cispo"] = "cispo"
    """Name of the algorithm."""
    eps_clip: float = Field(1.0, gt=0, le=1)
    """The weight is at least 1 - eps_clip; 1, as in the paper, means no lower bound."""
    eps_clip_high: float = Field(1.0, gt=0)
    """The weight is at most 1 + eps_clip_high. The paper tunes this and gives no number; 1 allows a weight of 2, like
    `cap`."""


class DPPOConfig(TurnCreditConfig, GroupConfig):
    """GRPO with a trust region on a divergence of probabilities instead of a ratio: Qi et al. 2026 (arXiv 2602.04879).

    The divergence is from the policy that drew the token, whatever `off_policy.method` says. The authors also measure
    the ratio against that policy, which is `method: none`.
    """

    implementation = "workers.algorithms.algorithm:DPPO"
    ratio_bounds = ("max_ratio",)
    name: Literal["dppo"] = "dppo"
    """Name of the algorithm."""
    divergence: Literal["tv", "kl"] = "tv"
    """Divergence of this token against all others: total variation (`tv`), or KL(policy that drew it || policy)."""
    divergence_top_k: int = Field(0, ge=0)
    """K: the divergence is over the K likeliest tokens of the policy that drew, the drawn one, and all others as one;
    the generating engine reports them (`hf`, `vllm`), and 8 K bytes per drawn token travel. 0: this token against all
    others."""
    max_divergence: float | None = Field(None, gt=0)
    """A token further away is dropped where the update would move it on; null: the authors' 0.15 for `tv`, 0.05 for
    `kl`."""
    max_ratio: float = Field(20.0, ge=1)
    """The ratio, a weight without gradient, counts up to this (the authors' code)."""

    @model_validator(mode="after")
    def _bound_can_be_reached(self) -> Self:
        if self.divergence == "tv" and (self.max_divergence or 0) > 1:
            raise self.refusal("max_divergence", "total variation is 1 at most; set it below that")
        return self

    @property
    def num_top_log_probs(self) -> int:
        return self.divergence_top_k

    def tasks(self, *, old_log_probs: bool = False) -> tuple[Task, ...]:
        rollout, *others, train = super().tasks(old_log_probs=old_log_probs)
        if not self.divergence_top_k:
            return (rollout, *others, train)
        rollout = replace(rollout, outputs=(*rollout.outputs, *ROLLOUT_TOP_COLUMNS))
        return (rollout, *others, replace(train, inputs=(*train.inputs, *ROLLOUT_TOP_COLUMNS)))

    def check(self, run: Any) -> None:
        """Refuse `divergence_top_k` where the likeliest tokens are not reported, or not scored in training."""
        for key, given, able in (
            ("rollout.engine", run.rollout.engine, ("hf", "vllm")),
            ("actor.engine", run.actor.engine, ("fsdp",)),
            ("actor.tri_model", run.actor.tri_model, (False,)),
            ("rollout.keep_sampling_mask", run.rollout.keeps_mask, (False,)),
        ):
            if self.divergence_top_k and given not in able:
                raise _refused_for_tokens(key, given, able, "divergence_top_k")
        if self.divergence_top_k and (run.rollout.is_own or run.roles.get("rollout") == 0):
            what = run.rollout.own_name if run.rollout.is_own else "roles: rollout:0"
            raise ConfigError(
                f"{what} cannot be used with algorithm.divergence_top_k, since only an engine's one response to each "
                f"prompt comes with the likeliest tokens; leave it out, or set divergence_top_k to 0"
            )


class DAPOConfig(PPOClipConfig, TurnCreditConfig, KlLossConfig):
    """GRPO with a higher upper clip, dynamic sampling of groups, and a penalty for overlong responses: arXiv
    2503.14476."""

    implementation = "workers.algorithms.algorithm:DAPO"
    name: Literal["dapo"] = "dapo"
    """Name of the algorithm."""
    eps_clip_high: float | None = Field(0.28, gt=0)
    """Upper clip: the ratio counts up to 1 + eps_clip_high, which lets unlikely tokens grow (eq. 10)."""
    group_filter: str | None = "zero_variance"
    """Dynamic sampling (eq. 11): groups that it refuses are not trained; the next prompt takes their place in the step,
    and each has a ledger line `filtered`. Values are those of the other algorithms."""
    overlong_buffer_tokens: int = Field(0, ge=0)
    """L_cache of eq. 13: from `max_response_tokens` minus this on, a response's reward falls linearly, by 1 for a
    response that was cut; rollouts of several turns use `rollout.max_drawn_tokens`. 0: length costs nothing."""
    advantage_eps: float = Field(1e-6, gt=0)
    """Added to the deviation."""

    @property
    def advantage_inputs(self) -> tuple[str, ...]:
        inputs = super().advantage_inputs
        return (*inputs, "response_mask") if self.overlong_buffer_tokens else inputs

    def check(self, run: Any) -> None:
        """Refuse an overlong buffer that begins before the first token: it would penalize all responses alike."""
        rollout, tokens = run.rollout, self.overlong_buffer_tokens
        if tokens and rollout.is_own and not rollout.max_drawn_tokens:
            raise ConfigError(
                f"algorithm.overlong_buffer_tokens: {tokens} penalizes long rollouts, but rollout.max_drawn_tokens 0 "
                f"sets them no limit; set that, or overlong_buffer_tokens to 0"
            )
        if tokens > rollout.longest_rollout:
            limit = "max_drawn_tokens" if rollout.is_own else "max_response_tokens"
            raise ConfigError(
                f"algorithm.overlong_buffer_tokens: {tokens} are more than the longest response (rollout.{limit} "
                f"{rollout.longest_rollout}); set it below that"
            )


class GSPOConfig(PPOClipConfig, GroupConfig):
    """GRPO with ratio and clip per sample instead of per token: Zheng et al. 2025 (arXiv 2507.18071)."""

    implementation = "workers.algorithms.algorithm:GSPO"
    name: Literal["gspo"] = "gspo"
    """Name of the algorithm."""
    eps_clip: float = Field(3e-4, gt=0, lt=1)
    """Lower clip of the response's ratio, which is a mean over its tokens and so much closer to 1 (section 5.1)."""
    eps_clip_high: float | None = Field(4e-4, gt=0)
    """Upper clip."""
    loss_normalization: Literal["token", "sequence", "constant"] = "sequence"
    """The paper's is `sequence`: each rollout counts the same."""

    def check(self, run: Any) -> None:
        """Refuse ratios between two engines that round differently: the clip is as narrow as that gap."""
        if not (self.off_policy.has_proximal_policy or run.actor.tri_model):
            raise ConfigError(
                "algorithm.off_policy.method: none cannot be used with algorithm.name gspo, whose clip is as narrow as "
                "the gap between the generating engine's log-probabilities and the trainer's; leave it out, or set "
                "actor.tri_model"
            )


class RLOOConfig(PPOClipConfig, TurnCreditConfig):
    """Reward minus the mean reward of the prompt's other responses, with the KL penalty in the reward: arXiv
    2402.14740."""

    implementation = "workers.algorithms.algorithm:RLOO"
    name: Literal["rloo"] = "rloo"
    """Name of the algorithm."""
    loss_normalization: Literal["token", "sequence", "constant"] = "constant"
    """`constant` is the paper's sum over a response's tokens, times a constant."""


class ReinforcePlusPlusConfig(PPOClipConfig, TurnCreditConfig, KlLossConfig):
    """Advantages normalized over the whole step: Hu et al. 2025 (arXiv 2501.03262).

    Training begins after the step's last response, so none of a step's training overlaps with its own generation.
    """

    implementation = "workers.algorithms.algorithm:ReinforcePlusPlus"
    name: Literal["reinforce_plus_plus"] = "reinforce_plus_plus"
    """Name of the algorithm."""
    baseline: Literal["none", "group"] = "none"
    """`group`: subtracts the group's mean reward first, and the KL penalty is a term of the loss (section 3.2); `none`:
    the KL penalty is part of each token's reward."""
    kl_estimator: KlEstimator = "k2"
    """Estimator of the KL term in the loss, with `baseline: group`."""
    advantage_eps: float = Field(1e-4, gt=0)
    """Smallest deviation that advantages are divided by."""

    @property
    def whole_step(self) -> bool:
        return True

    @property
    def kl_in_reward(self) -> bool:
        return self.baseline == "none"

    @property
    def in_turn_order(self) -> bool:
        return self.credits_turns or self.has_reward_penalty

    @property
    def min_group_size(self) -> int:
        """Without a baseline, 1: nothing is compared within a group."""
        return 2 if self.baseline == "group" else 1


class DistillConfig(PPOClipConfig, PolicyConfig):
    """On-policy distillation from a teacher: Gu et al. 2023 (arXiv 2306.08543), Agarwal et al. 2023 (arXiv
    2306.13649). It is the reference that `ref.path` names or, beside a reference, the model of section `teacher`."""

    implementation = "workers.algorithms.algorithm:Distill"
    name: Literal["distill"] = "distill"
    """Name of the algorithm."""
    kl_coef: float = Field(1.0, ge=0)
    """Weight of the divergence from the reference, which is the teacher. With `teacher_coef` it is not: then this is
    the weight of the loss's KL term (k3), as in GRPO, and 0 unless it is given."""
    teacher_coef: float = Field(0.0, ge=0)
    """Weight of the divergence from the teacher that section `teacher` names, with role `teacher`. 0: the reference is
    the teacher."""
    top_k: int = Field(0, ge=0)
    """How many tokens of the teacher's distribution are compared at each place. 0: the drawn token, whose advantage has
    log (teacher / policy). K: the loss has the reverse KL divergence over the teacher's K most likely tokens, with all
    others as one; it has less noise and needs no pass for the policy at the start of the step, and 8 K bytes per token
    travel."""
    reward_coef: float = Field(0.0, ge=0)
    """Weight of GRPO's advantage from the rewards, which is added; 0: rewards are only measured."""
    max_kl: float | None = Field(None, gt=0)
    """The run ends with an error when a step's metric `kl`, to the reference, exceeds this (nats per token); null:
    never. A student begins far from its teacher."""
    advantage_eps: float = Field(1e-6, gt=0)
    """Added to the group's deviation of rewards."""

    @model_validator(mode="before")
    @classmethod
    def _has_one_teacher(cls, section: Any) -> Any:
        own = isinstance(section, Mapping) and section.get("teacher_coef")
        return {"kl_coef": 0.0, **section} if own else section

    @model_validator(mode="after")
    def _has_a_teacher(self) -> Self:
        if not (self.kl_coef or self.teacher_coef):
            raise self.refusal("kl_coef", "teacher_coef is 0, too, so nothing is learned from a teacher; set one")
        return self

    @property
    def has_own_teacher(self) -> bool:
        """Whether the teacher is another model than the reference."""
        return self.teacher_coef > 0

    @property
    def teacher_column(self) -> str:
        """The teacher's log-probabilities of drawn tokens."""
        return TEACHER if self.has_own_teacher else "ref_log_probs"

    @property
    def top_columns(self) -> tuple[str, str]:
        """The teacher's most likely tokens: ids, log-probabilities."""
        return TEACHER_TOP_COLUMNS if self.has_own_teacher else REF_TOP_COLUMNS

    @property
    def teacher_weight(self) -> float:
        return self.teacher_coef or self.kl_coef

    @property
    def follows_reference(self) -> bool:
        return not self.has_own_teacher

    @property
    def has_reward_penalty(self) -> bool:
        """Whether the policy at the start of the step is compared with the teacher before the loss."""
        return self.top_k == 0

    @property
    def kl_loss(self) -> tuple[float, KlEstimator]:
        return self.kl_coef if self.has_own_teacher else 0.0, "k3"

    @property
    def advantage_inputs(self) -> tuple[str, ...]:
        return ("rewards", "old_log_probs", self.teacher_column) if self.has_reward_penalty else ("rewards",)

    @property
    def min_group_size(self) -> int:
        return 2 if self.reward_coef else 1

    @property
    def uses_rewards(self) -> bool:
        return self.reward_coef > 0

    def tasks(self, *, old_log_probs: bool = False) -> tuple[Task, ...]:
        tasks = super().tasks(old_log_probs=old_log_probs)
        if self.has_own_teacher:
            *others, advantages, train = tasks
            teacher = Task(TEACHER, "teacher", "teacher", inputs=SAMPLE_COLUMNS, outputs=(TEACHER,))
            assert advantages.name == ADVANTAGES
            tasks = (*others, teacher, advantages, replace(train, inputs=(*train.inputs, TEACHER)))
        return tuple(self._with_top_tokens(task) for task in tasks) if self.top_k else tasks

    def check(self, run: Any) -> None:
        if self.has_own_teacher:
            self._check_teacher(run)
        elif run.ref.path is None:
            raise ConfigError(
                "ref.path: null, but algorithm.name distill learns from a teacher; set it to the directory or "
                "the name on the Hub of one"
            )
        for key, given, able in (
            ("actor.engine", run.actor.engine, ("fsdp",)),
            ("ref.engine", "hf" if self.has_own_teacher else run.ref.engine, ("hf", "fsdp")),
            ("actor.tri_model", run.actor.tri_model, (False,)),
        ):
            if self.top_k and given not in able:
                raise _refused_for_tokens(key, given, able, "top_k")
        role = "teacher" if self.has_own_teacher else "ref"
        if self.top_k and run.roles.get(role) == 0:
            raise ConfigError(
                f"roles: {role}:0 cannot be used with algorithm.top_k, since processes outside put log-probabilities "
                f"of drawn tokens; launch {role}:1, or set top_k to 0"
            )

    def _with_top_tokens(self, task: Task) -> Task:
        """Return the task with the teacher's most likely tokens in place of its log-probabilities of drawn ones."""

        def swapped(names: tuple[str, ...]) -> tuple[str, ...]:
            found = ((self.top_columns if name == self.teacher_column else (name,)) for name in names)
            return tuple(part for names in found for part in names)

        return replace(task, inputs=swapped(task.inputs), outputs=swapped(task.outputs))

    def _check_teacher(self, run: Any) -> None:
        teacher, sources = run.teacher, run.data.source_names if run.data.mixture else ()
        unknown = [name for name in teacher.sources if name not in sources]
        missing = [name for name in sources if name not in teacher.sources]
        if unknown:
            known = " ".join(sources) or "none"
            raise ConfigError(
                f"teacher.sources: {unknown[0]!r} is no source of data.mixture (sources: {known}); correct the name"
            )
        is_outside = run.roles.get("teacher") == 0  # a process of the user's, which has the teacher (docs/outside.md)
        if teacher.path is None and (missing or not sources) and not is_outside:
            of = f" of the rows of {missing[0]}" if sources and teacher.sources else ""
            raise ConfigError(
                f"teacher.path: null, but algorithm.teacher_coef {self.teacher_coef:g} needs a teacher{of}; set it to "
                f"the directory or the name on the Hub of one"
            )
        if "teacher" not in run.roles:
            raise ConfigError(
                f"roles: 'teacher' is missing, which computes for algorithm.teacher_coef; add it (--roles "
                f"{run.roles_text},teacher:{run.teacher.ranks_per_copy})"
            )
        if teacher.engine == "fsdp" and teacher.shards == 1:
            raise ConfigError("teacher.engine: fsdp divides a copy over ranks; set teacher.shards to 2 or more, or hf")


class PPOConfig(PPOClipConfig, TurnCreditConfig, KlLossConfig):
    """A critic trained beside the policy, and generalized advantages (GAE) per token: arXiv 1707.06347, 1506.02438."""

    implementation = "workers.algorithms.algorithm:PPO"
    ratio_bounds = (*PPOClipConfig.ratio_bounds, "value_clip")
    name: Literal["ppo"] = "ppo"
    """Name of the algorithm."""
    credit: Literal["rollout", "turn"] = "rollout"
    """Where the rewards of a rollout of several turns are paid. `rollout`: their sum at its last token; `turn`: each at
    the last token of its turn (docs/agents.md)."""
    gae_timestep_unit: Literal["token", "turn"] = "token"
    """A step of GAE, which `gamma` and `lam` refer to: a drawn token, or a whole turn of a rollout of several, whose
    tokens then have one advantage."""
    gamma: float = Field(1.0, gt=0, le=1)
    """Discount of rewards per step of GAE: per token, or per turn (`gae_timestep_unit`)."""
    lam: float = Field(0.95, ge=0, le=1)
    """GAE's lambda. 0: one-step errors, which trust the critic; 1: the whole response's reward minus its value."""
    whiten_advantages: bool = True
    """Scale the advantages of the whole step to mean 0 and variance 1. The policy's training then begins after the
    step's last response, so within a step none of it overlaps with generation; `false` streams."""
    advantage_eps: float = Field(1e-8, gt=0)
    """Added to the variance when advantages are whitened."""
    kl_placement: Literal["loss", "reward"] = "loss"
    """Where the KL penalty goes: a term of the loss (`kl_estimator`), or part of each token's reward, as in InstructGPT
    (k1, of the policy at the start of the step), which costs a forward pass (task `actor_log_probs`)."""
    value_clip: float | None = Field(0.2, gt=0)
    """How far a value may move within a step and still be trained; null: any distance."""
    value_loss_coef: float = Field(1.0, gt=0)
    """Factor on the critic's loss. The critic has its own optimizer, so this only changes how soon `critic.grad_clip`
    acts."""

    @property
    def discounts(self) -> bool:
        return True  # GAE does, always

    @property
    def in_turn_order(self) -> bool:
        return True

    @property
    def whole_step(self) -> bool:
        return self.whiten_advantages

    @property
    def kl_in_reward(self) -> bool:
        return self.kl_placement == "reward"

    @property
    def min_group_size(self) -> int:
        return 1

    @property
    def has_critic(self) -> bool:
        return True

    @property
    def advantage_inputs(self) -> tuple[str, ...]:
        return (*super().advantage_inputs, "values")

    def tasks(self, *, old_log_probs: bool = False) -> tuple[Task, ...]:
        """Return the tasks (arXiv 1707.06347, algorithm 1): a critic computes values, trains on the returns, and hosts
        the task between the two if no role `advantages` was launched."""
        *others, advantages, train = super().tasks(old_log_probs=old_log_probs)
        values = Task(
            name="values",
            role="critic",
            host="actor",
            inputs=SAMPLE_COLUMNS,
            outputs=("values",),
            goes_ahead=True,
        )
        advantages = replace(advantages, host="critic", outputs=("advantages", "returns"), whole_groups=False)
        critic = Task(
            name=CRITIC_TRAIN,
            role="critic",
            host="actor",
            inputs=(*SAMPLE_COLUMNS, "values", "returns", "truncated", "rewards"),
            outputs=(),
            whole_groups=True,
            passes_on=True,
        )
        return (*others, values, advantages, critic, train)


class SFTConfig(PolicyConfig):
    """Supervised fine-tuning: cross entropy on the completions, or the assistant's messages, that the data hold.

    There is no role `rollout`: the queue hands the data's rows to the trainer (docs/sft.md). Of the settings that all
    algorithms have, only `loss_normalization` applies.
    """

    implementation = "workers.algorithms.algorithm:SFT"
    refused = frozenset(PolicyConfig.model_fields) - {"name", "loss_normalization"}
    name: Literal["sft"] = "sft"
    """Name of the algorithm."""
    loss_normalization: Literal["token", "sequence"] = "token"
    """`token`: mean over all trained tokens of the step; `sequence`: mean per row, then over rows."""

    @model_validator(mode="after")
    def _has_no_idle_setting(self) -> Self:
        for name, field in PolicyConfig.model_fields.items():
            given, default = getattr(self, name), field.get_default()
            # Defaults pass: a saved config.yaml contains them all.
            if name not in self.refused or given == default:
                continue
            keys: tuple[str, ...] = (name,)
            if isinstance(given, Settings):
                inner = next(key for key, value in given if value != getattr(default, key))
                keys, given = (name, inner), getattr(given, inner)
            raise self.refusal_of(keys, given, "it is for algorithms that generate; leave it out")
        return self

    @property
    def min_group_size(self) -> int:
        return 1

    @property
    def is_supervised(self) -> bool:
        return True

    def tasks(self, *, old_log_probs: bool = False) -> tuple[Task, ...]:
        inputs = ("prompts", *SAMPLE_COLUMNS, "epochs")
        return (Task(name=ACTOR_TRAIN, role="actor", host="actor", inputs=inputs, outputs=(), whole_groups=True),)

    def check(self, run: Any) -> None:
        for key, given, wanted in (
            ("schedule.n_samples_per_prompt", run.schedule.n_samples_per_prompt, 1),
            ("rollout.temperature", run.rollout.temperature, 1.0),
            ("actor.ppo_epochs", run.actor.ppo_epochs, 1),
            ("actor.tri_model", run.actor.tri_model, False),
            ("data.sampler", run.data.sampler, None),
        ):
            if given != wanted:
                raise ConfigError(
                    f"{key}: {given} cannot be used with algorithm.name sft, which generates nothing; "
                    f"{'remove it' if wanted is None else f'set it to {str(wanted).lower()}'}"
                )
        if run.data.completion_field is None:
            raise ConfigError(
                "data.completion_field: null, but algorithm.name sft trains what the data hold; set it to the field of "
                "the completion or of the conversation"
            )
        if run.rollout.is_own:
            raise ConfigError(
                f"{run.rollout.own_name}: cannot be used with algorithm.name sft, which generates nothing; remove it"
            )


def _refused_for_tokens(key: str, given: object, able: tuple[object, ...], setting: str) -> ConfigError:
    return ConfigError(
        f"{key}: {str(given).lower()} cannot be used with algorithm.{setting}, which needs log-probabilities of tokens "
        f"that were not drawn; set it to {' or '.join(map(str, able)).lower()}, or {setting} to 0"
    )


# Section `algorithm`: its `name` chooses one of these classes.

# Name -> settings, which name the class of the algorithm.
ALGORITHMS: Mapping[str, type[PolicyConfig]] = MappingProxyType(
    {
        "grpo": GRPOConfig,
        "dapo": DAPOConfig,
        "rloo": RLOOConfig,
        "reinforce_plus_plus": ReinforcePlusPlusConfig,
        "gspo": GSPOConfig,
        "cispo": CISPOConfig,
        "dppo": DPPOConfig,
        "ppo": PPOConfig,
        "sft": SFTConfig,
        "distill": DistillConfig,
    }
)

# Valid values of `algorithm.name`.
NAMES = Registry("asyncflow.algorithms", {name: kind.implementation for name, kind in ALGORITHMS.items()})


class OutsideConfig(KlLossConfig):
    """An algorithm of your own: a class outside the package, with settings of its own beside those of every algorithm.

    The launcher imports it in a child process and asks its `Config` (`workers.roles.own_classes`); this holds the
    answers.
    """

    model_config = ConfigDict(extra="allow")
    name: Annotated[str, AfterValidator(NAMES.resolve_name)] = "module:Class"
    """`module:Class`, a `workers.algorithms.algorithm.Algorithm`."""
    dataflow: tuple[Task, ...] = ()
    """Its tasks; leave it out: its `Config` sets it (`tasks`)."""
    needs_group_size: int = 1
    """Responses per prompt that it needs for its comparison; leave it out: its `Config` sets it (`min_group_size`)."""
    needs_whole_step: bool = False
    """Whether training waits for the step's last row; leave it out: the class sets it (`whole_step`)."""

    @property
    def min_group_size(self) -> int:
        return self.needs_group_size

    @property
    def credits_turns(self) -> bool:
        return any(TURN_REWARDS in task.inputs for task in self.dataflow)

    @property
    def whole_step(self) -> bool:
        return self.needs_whole_step

    def tasks(self, *, old_log_probs: bool = False) -> tuple[Task, ...]:
        assert self.dataflow, "the launcher has its child ask for them first"
        return self.dataflow


def _name_of(section: Any) -> Any:
    name = section.get("name", "grpo") if isinstance(section, Mapping) else getattr(section, "name", None)
    with contextlib.suppress(ValueError):  # an unknown name is reported by the discriminator
        return "outside" if isinstance(name, str) and ":" in NAMES.resolve_name(name) else name
    return name


if TYPE_CHECKING:
    AlgorithmConfig = PolicyConfig
else:
    _kinds = {**ALGORITHMS, "outside": OutsideConfig}
    AlgorithmConfig = Annotated[
        Union[tuple(Annotated[kind, Tag(name)] for name, kind in _kinds.items())],  # noqa: UP007
        Discriminator(_name_of),
    ]
    """Objective of the actor: one of the settings above."""
