"""Settings of the algorithms, a class each, with its tasks and checks. Torch-free: `--dry-run` reads this.

PolicyConfig            what every policy loss has
  |- KlLossConfig       the KL penalty is a term of the loss, unless a setting puts it into the reward
  |    |- DAPOConfig  ReinforcePlusPlusConfig  PPOConfig
  |    '- GroupConfig   rewards are compared inside their group: GRPOConfig  GSPOConfig  CISPOConfig  DPPOConfig
  '- RLOOConfig         the KL penalty is part of the reward
PPOClipConfig           PPO's clip and the dual one, of all but CISPO and DPPO

A key of another algorithm is refused. Names are in `workers.settings.algorithms`.
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
from workers.settings.dataflow import CRITIC_TRAIN, SAMPLE_COLUMNS, Task, critic_free_tasks

# Section `algorithm.off_policy`, of every algorithm. Torch-free.


class OffPolicyConfig(Settings):
    """Correction for tokens that another policy drew: the generating engine rounds differently from the trainer, and
    its weights may be older. See `workers.algorithms.parts.policy_parts`."""

    method: Literal["none", "truncated_is", "decoupled", "icepop"] | None = "truncated_is"
    """`truncated_is` (TIS; null means this, too): a token's weight is the ratio of the policy that the step found to
    the one that drew it, at most `cap`; PPO's ratio and clip are relative to the policy that the step found.
    `decoupled` (masked importance sampling): tokens whose weight would exceed `cap` are left out instead. `icepop`:
    tokens whose weight is outside [`band_low`, `band_high`] are left out. `none`: no weights; ratio and clip are
    relative to the generating engine. With one update a step only `none` ever clips (`eps_clip`), and the others cost
    nothing; with several, task `actor_log_probs` makes one more forward pass."""
    cap: float = Field(2.0, ge=1)
    """Largest weight of a token (C), of `truncated_is` and `decoupled`."""
    band_low: float = Field(0.5, ge=0, le=1)
    """`icepop`: least weight of a token (alpha of arXiv 2510.18855)."""
    band_high: float = Field(5.0, ge=1)
    """`icepop`: largest weight of a token (beta)."""
    mask: Literal["sequence", "geometric"] | None = None
    """With any `method`: whole samples are left out whose weight is too far from 1: `sequence`: the product of their
    tokens' weights, `geometric`: the geometric mean of these; null: none is."""
    sequence_log_ratio: float | None = Field(None, gt=0)
    """`mask: sequence`: how far, up and down, the sum of a sample's log weights may be (nats); others use 0.7 to 2.3 (a
    factor of 2 to 10). null: as far as rounding in bfloat16 takes it, which grows with its length; see
    `workers.algorithms.parts.rounding_bound`."""
    geometric_log_ratio: float | None = Field(None, gt=0)
    """`mask: geometric`: how far, up and down, their mean may be (nats a token); others use 0.0002 to 0.001. null: as
    far as rounding in bfloat16 takes it: the bound of `sequence_log_ratio` by the sample's length."""

    @field_validator("method", mode="before")
    @classmethod
    def _name_the_mask(cls, method: object) -> object:
        if method == "sequence_mask":
            raise ValueError("give algorithm.off_policy.mask: geometric, which it was, and leave method out")
        return method

    @model_validator(mode="before")
    @classmethod
    def _name_the_bound(cls, section: object) -> object:
        if isinstance(section, Mapping) and "mask_log_ratio" in section:
            if section.get("mask") is None and section["mask_log_ratio"] == 0.5:  # a default that a run wrote down
                return {name: value for name, value in section.items() if name != "mask_log_ratio"}
            raise ValueError(
                "mask_log_ratio was one bound of a sum and of a mean; give sequence_log_ratio or geometric_log_ratio, "
                "or leave it out"
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
            if unread and getattr(self, name) != type(self).model_fields[name].default:  # a run writes defaults down
                raise ValueError(f"{name} is for {reader}; set that, or leave {name} out")
        return self

    @property
    def has_proximal_policy(self) -> bool:
        """Whether PPO's old policy is another one than that which drew the tokens."""
        return self.method != "none"


KlEstimator = Literal["k1", "k2", "k3"]


class PPOClipConfig(Settings):
    """PPO's clip and the dual one: the parts `PPOClip` and `DualClip`."""

    ratio_bounds: ClassVar[tuple[str, ...]] = ("eps_clip", "eps_clip_high", "dual_clip")
    eps_clip: float = Field(0.2, gt=0, lt=1)
    """Lower clip: the ratio counts down to 1 - eps_clip."""
    eps_clip_high: float | None = Field(None, gt=0)
    """Upper clip: the ratio counts up to 1 + eps_clip_high; null: `eps_clip`."""
    dual_clip: float | None = Field(3.0, gt=1)
    """Where the advantage is negative the ratio counts up to this (arXiv 1912.09729, eq. 5); null: without bound."""

    @model_validator(mode="after")
    def _dual_clip_is_beyond_the_upper_one(self) -> Self:
        default = type(self).model_fields["dual_clip"].default  # a run writes it down
        if self.dual_clip not in (None, default) and self.dual_clip <= 1 + self.upper_clip:
            raise ValueError(
                f"dual_clip {self.dual_clip} must be greater than 1 + eps_clip_high = {1 + self.upper_clip}"
            )
        return self

    @property
    def upper_clip(self) -> float:
        """`eps_clip_high`, or what it stands for."""
        return self.eps_clip if self.eps_clip_high is None else self.eps_clip_high


class PolicyConfig(Settings):
    """What every policy loss has."""

    implementation: ClassVar[str] = ""
    """`module:Class` of the algorithm; here a name, so that reading the configuration imports no torch."""
    ratio_bounds: ClassVar[tuple[str, ...]] = ()
    """Settings that bound the ratio of the policy in training to its base, and so do nothing where that is 1."""
    name: str = ""
    """Which algorithm."""
    kl_coef: float = Field(0.0, ge=0)
    """Weight of the KL penalty to the reference policy; 0 drops the reference task."""
    max_kl: float | None = Field(5.0, gt=0)
    """The run ends with an error when the metric `kl` of a step is beyond this (nats per token); beyond 1 there is a
    warning. A policy that is still of use is within a nat of its reference; e^5 is 150 times as likely, or unlikely, a
    token. null: never."""
    engine_gap: Literal["end", "warn"] = "end"
    """What follows when the log-probabilities of the generating engine and the trainer's differ by more than rounding
    and updates explain. The first step says so; `end`: the second in a row ends the run with an error, since one of
    the two computes wrongly; `warn`: it goes on, for a generating engine that is rougher on purpose (quantised)."""
    entropy_coef: float = Field(0.0, ge=0)
    """Weight of the entropy of the tempered distribution at each drawn token, which the loss maximises too, averaged as
    `loss_normalization` says. 0: it is measured only."""
    ref_update_interval: int = Field(0, ge=0)
    """After every so many steps the reference becomes a copy of the policy; 0: it stays the initial model."""
    off_policy: OffPolicyConfig = OffPolicyConfig()
    """Correction for tokens of older weights."""
    loss_normalization: Literal["token", "sequence", "constant"] = "token"
    """`token`: mean over all drawn tokens of the step; `sequence`: mean per rollout, then over rollouts (GRPO's paper);
    `constant`: sum over tokens / (rollouts x `rollout.max_response_tokens`, or `max_drawn_tokens` where that is set
    for rollouts of several turns) (Dr. GRPO, arXiv 2503.20783)."""
    group_filter: str | None = None
    """Groups that it refuses are not trained, and the next prompt takes their place in the step; each has its ledger
    line, `filtered`. `zero_variance`: groups whose rewards are all equal teach nothing; `module:function` of yours:
    rewards -> whether to train; null: all groups are trained."""
    max_filtered_share: float = Field(0.9, gt=0, lt=1)
    """The run ends with an error when more than this share of the groups generated for a step were refused."""

    @property
    def kl_in_reward(self) -> bool:
        """Whether the KL penalty is part of the reward; else it is a term of the loss."""
        return True

    @property
    def has_reward_penalty(self) -> bool:
        """Whether rewards are charged for the KL divergence, so that it must be known before the loss."""
        return self.kl_in_reward and self.kl_coef > 0

    @property
    def kl_loss(self) -> tuple[float, KlEstimator]:
        """Weight of the KL term inside the loss, and its estimator; with weight 0 it is only measured."""
        return 0.0, "k3"

    @property
    def min_group_size(self) -> int:
        """Responses per prompt that it needs to compare."""
        return 2

    @property
    def has_critic(self) -> bool:
        """Whether a critic is trained beside the policy (section `critic`)."""
        return False

    @property
    def whole_step(self) -> bool:
        """Whether advantages are normalised over the step, so that nothing trains before its last row is there."""
        return False

    @property
    def filters_groups(self) -> bool:
        """Whether some groups may be replaced, not trained."""
        return self.group_filter is not None

    def max_filtered(self, batch: int) -> int:
        """Return how many groups of a step with so many may be: with the step's own, they make up the largest share."""
        return int(batch * self.max_filtered_share / (1 - self.max_filtered_share) + 1e-6)

    @property
    def advantage_inputs(self) -> tuple[str, ...]:
        """Columns that advantages are computed from."""
        return ("rewards", "old_log_probs", "ref_log_probs") if self.has_reward_penalty else ("rewards",)

    def tasks(self, *, old_log_probs: bool = False) -> tuple[Task, ...]:
        """Return the algorithm's dataflow graph, producers before consumers; the last task trains the policy.

        Args:
            old_log_probs: loss or reward need log-probabilities under the weights that the step found.
        """
        return critic_free_tasks(
            self.advantage_inputs,
            whole_groups=self.filters_groups,
            reference=self.kl_coef > 0,
            old_log_probs=old_log_probs,
        )

    def check(self, run: Any) -> None:
        """Refuse other settings of the run (a `RunConfig`) that the algorithm cannot be trained with.

        Raises:
            ConfigError: says which.
        """


class KlLossConfig(PolicyConfig):
    """An algorithm whose KL penalty is a term of the loss, unless `kl_in_reward` says otherwise."""

    kl_estimator: KlEstimator = "k3"
    """Schulman's estimators. k3 is GRPO's; k2 has the exact gradient of KL(policy || reference); the gradient of k1
    averages to zero, so it measures and does not restrain. See `workers.algorithms.parts.kl_divergence`."""

    @property
    def kl_in_reward(self) -> bool:
        """A term of the loss."""
        return False

    @property
    def kl_loss(self) -> tuple[float, KlEstimator]:
        """Weight of the KL term inside the loss, and its estimator."""
        return 0.0 if self.kl_in_reward else self.kl_coef, self.kl_estimator


class GroupConfig(KlLossConfig):
    """Advantages relative to the group: Shao et al. 2024 (arXiv 2402.03300)."""

    scale_advantages_by_std: bool = True
    """Divide the centred rewards by the group's standard deviation; Dr. GRPO does not."""
    advantage_eps: float = Field(1e-6, gt=0)
    """Added to the deviation, so that a group of equal rewards yields zeros."""


class GRPOConfig(PPOClipConfig, GroupConfig):
    """Group-relative policy optimisation: Shao et al. 2024 (arXiv 2402.03300).

    Dr. GRPO (Liu et al. 2025, arXiv 2503.20783) is `loss_normalization: constant`, `scale_advantages_by_std: false`.
    """

    implementation = "workers.algorithms.algorithm:GRPO"
    name: Literal["grpo"] = "grpo"
    """Which algorithm."""


class CISPOConfig(GroupConfig):
    """GRPO whose ratio is a clipped weight, so that no token loses its gradient: MiniMax 2025 (arXiv 2506.13585)."""

    implementation = "workers.algorithms.algorithm:CISPO"
    ratio_bounds = ("eps_clip", "eps_clip_high")
    name: Literal["cispo"] = "cispo"
    """Which algorithm."""
    eps_clip: float = Field(1.0, gt=0, le=1)
    """The weight is at least 1 - eps_clip; 1, as in the paper: there is no lower bound."""
    eps_clip_high: float = Field(1.0, gt=0)
    """The weight is at most 1 + eps_clip_high. The paper tunes this and gives no number; 1: twice, as `cap`."""


class DPPOConfig(GroupConfig):
    """GRPO whose trust region is a divergence of probabilities, not a ratio: Qi et al. 2026 (arXiv 2602.04879).

    The divergence is from the policy that drew the token, whatever `off_policy.method`; the authors also measure the
    ratio against it, which is `method: none`.
    """

    implementation = "workers.algorithms.algorithm:DPPO"
    ratio_bounds = ("max_ratio",)
    name: Literal["dppo"] = "dppo"
    """Which algorithm."""
    divergence: Literal["tv", "kl"] = "tv"
    """Of this token against any other: total variation, or KL(drew it || policy)."""
    max_divergence: float | None = Field(None, gt=0)
    """A token further away is left out where it would move on; null: the authors' 0.15 of `tv`, 0.05 of `kl`."""
    max_ratio: float = Field(20.0, ge=1)
    """The ratio, a weight without gradient, counts up to this (the authors' code)."""

    @model_validator(mode="after")
    def _bound_can_be_reached(self) -> Self:
        if self.divergence == "tv" and (self.max_divergence or 0) > 1:
            raise ValueError(f"max_divergence {self.max_divergence}: total variation is 1 at most; set it below that")
        return self


class DAPOConfig(PPOClipConfig, KlLossConfig):
    """GRPO with a higher upper clip, groups that teach, and a price for overlong responses: arXiv 2503.14476."""

    implementation = "workers.algorithms.algorithm:DAPO"
    name: Literal["dapo"] = "dapo"
    """Which algorithm."""
    eps_clip_high: float | None = Field(0.28, gt=0)
    """Upper clip: the ratio counts up to 1 + eps_clip_high, so that unlikely tokens may grow (eq. 10)."""
    group_filter: str | None = "zero_variance"
    """Dynamic sampling (eq. 11): groups that it refuses are not trained, and the next prompt takes their place in the
    step; each has its ledger line, `filtered`. See the other algorithms'."""
    overlong_buffer_tokens: int = Field(0, ge=0)
    """L_cache of eq. 13: from `max_response_tokens` minus this on, a response's reward falls linearly, by 1 for one
    that was cut; `rollout.max_drawn_tokens` counts for rollouts of several turns. 0: length costs nothing."""
    advantage_eps: float = Field(1e-6, gt=0)
    """Added to the deviation."""

    @property
    def advantage_inputs(self) -> tuple[str, ...]:
        """Columns that advantages are computed from."""
        return ("rewards", "response_mask") if self.overlong_buffer_tokens else ("rewards",)

    def check(self, run: Any) -> None:
        """Refuse a buffer for long responses that begins before their first token: it would price all of them alike."""
        rollout, tokens = run.rollout, self.overlong_buffer_tokens
        if tokens and rollout.is_own and not rollout.max_drawn_tokens:
            raise ConfigError(
                f"algorithm.overlong_buffer_tokens: {tokens} is a price of long rollouts, but rollout.max_drawn_tokens "
                f"0 sets them no limit; set that, or overlong_buffer_tokens to 0"
            )
        if tokens > rollout.longest_rollout:
            limit = "max_drawn_tokens" if rollout.is_own else "max_response_tokens"
            raise ConfigError(
                f"algorithm.overlong_buffer_tokens: {tokens} are more than the longest response (rollout.{limit} "
                f"{rollout.longest_rollout}); set it below that"
            )


class GSPOConfig(PPOClipConfig, GroupConfig):
    """GRPO whose ratio and clip are those of whole samples: Zheng et al. 2025 (arXiv 2507.18071)."""

    implementation = "workers.algorithms.algorithm:GSPO"
    name: Literal["gspo"] = "gspo"
    """Which algorithm."""
    eps_clip: float = Field(3e-4, gt=0, lt=1)
    """Lower clip of the response's ratio, which is a mean over its tokens and so far closer to 1 (section 5.1)."""
    eps_clip_high: float | None = Field(4e-4, gt=0)
    """Upper clip."""
    loss_normalization: Literal["token", "sequence", "constant"] = "sequence"
    """`sequence` is the paper's: each rollout counts the same."""

    def check(self, run: Any) -> None:
        """Refuse ratios between two engines that round differently: the clip is as narrow as that gap."""
        if not (self.off_policy.has_proximal_policy or run.actor.tri_model):
            raise ConfigError(
                "algorithm.off_policy.method: none cannot be with algorithm.name gspo, whose clip is as narrow as the "
                "gap between the generating engine's log-probabilities and the trainer's; leave it out, or set "
                "actor.tri_model"
            )


class RLOOConfig(PPOClipConfig, PolicyConfig):
    """Reward minus the mean of the other responses', the KL penalty inside the reward: arXiv 2402.14740."""

    implementation = "workers.algorithms.algorithm:RLOO"
    name: Literal["rloo"] = "rloo"
    """Which algorithm."""
    loss_normalization: Literal["token", "sequence", "constant"] = "constant"
    """`constant` is the paper's sum over a response's tokens, times a constant."""


class ReinforcePlusPlusConfig(PPOClipConfig, KlLossConfig):
    """Advantages normalised over the whole step: Hu et al. 2025 (arXiv 2501.03262).

    Training begins when the step's last response is there, so nothing of a step overlaps with its own generation.
    """

    implementation = "workers.algorithms.algorithm:ReinforcePlusPlus"
    name: Literal["reinforce_plus_plus"] = "reinforce_plus_plus"
    """Which algorithm."""
    baseline: Literal["none", "group"] = "none"
    """`group`: the group's mean reward is subtracted first, and the KL penalty is a term of the loss (section 3.2);
    `none`: the KL penalty is part of each token's reward."""
    kl_estimator: KlEstimator = "k2"
    """Of the KL term of the loss, with `baseline: group`."""
    advantage_eps: float = Field(1e-4, gt=0)
    """Least deviation that advantages are divided by."""

    @property
    def whole_step(self) -> bool:
        """See `PolicyConfig`."""
        return True

    @property
    def kl_in_reward(self) -> bool:
        """With a baseline it is a term of the loss."""
        return self.baseline == "none"

    @property
    def advantage_inputs(self) -> tuple[str, ...]:
        """Columns that advantages are computed from."""
        inputs = super().advantage_inputs
        return (*inputs, "sample_lengths", "response_mask") if self.has_reward_penalty else inputs

    @property
    def min_group_size(self) -> int:
        """Without a baseline nothing is compared inside a group."""
        return 2 if self.baseline == "group" else 1


class PPOConfig(PPOClipConfig, KlLossConfig):
    """A critic, trained beside the policy, and generalized advantages of every token: arXiv 1707.06347, 1506.02438."""

    implementation = "workers.algorithms.algorithm:PPO"
    ratio_bounds = (*PPOClipConfig.ratio_bounds, "value_clip")
    name: Literal["ppo"] = "ppo"
    """Which algorithm."""
    gamma: float = Field(1.0, gt=0, le=1)
    """Discount of rewards per token."""
    lam: float = Field(0.95, ge=0, le=1)
    """GAE's lambda. 0: one-step errors, which believe the critic; 1: the whole response's reward minus its value."""
    whiten_advantages: bool = True
    """Advantages of the whole step get mean 0 and variance 1. The policy's training then begins when the step's last
    response is there, so within a step nothing of it overlaps with generation; `false` streams."""
    advantage_eps: float = Field(1e-8, gt=0)
    """Added to the variance that advantages are whitened by."""
    kl_placement: Literal["loss", "reward"] = "loss"
    """Where the KL penalty is: a term of the loss (`kl_estimator`), or part of each token's reward (k1, of the policy
    that the step found), as in InstructGPT; that costs a forward pass (task `actor_log_probs`)."""
    value_clip: float | None = Field(0.2, gt=0)
    """How far a value may move in a step and still be trained; null: any distance."""
    value_loss_coef: float = Field(1.0, gt=0)
    """Multiplies the critic's loss. The critic has its own optimizer, so this only changes how soon `critic.grad_clip`
    acts."""

    @property
    def whole_step(self) -> bool:
        """See `PolicyConfig`."""
        return self.whiten_advantages

    @property
    def kl_in_reward(self) -> bool:
        """Whether the KL penalty is in the reward, as `kl_placement` says."""
        return self.kl_placement == "reward"

    @property
    def min_group_size(self) -> int:
        """Responses are compared with values, not with each other."""
        return 1

    @property
    def has_critic(self) -> bool:
        """Whether there is a critic: always."""
        return True

    @property
    def advantage_inputs(self) -> tuple[str, ...]:
        """Columns that advantages are computed from."""
        return (*super().advantage_inputs, "values", "sample_lengths", "response_mask")

    def tasks(self, *, old_log_probs: bool = False) -> tuple[Task, ...]:
        """A critic computes values, advantages and returns, passes the advantages on, and trains on the returns.

        Source: Schulman et al. 2017 (arXiv 1707.06347), algorithm 1.
        """
        *others, advantages, train = super().tasks(old_log_probs=old_log_probs)
        values = Task(
            name="values",
            role="critic",
            host="actor",
            inputs=SAMPLE_COLUMNS,
            outputs=("values",),
        )
        advantages = replace(advantages, role="critic", outputs=("advantages", "returns"), whole_groups=False)
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


# Which algorithms there are, and the settings of section `algorithm`, whose `name` chooses its class. Torch-free.

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
    }
)
"""Name -> settings, which name the class."""

NAMES = Registry("asyncflow.algorithms", {name: kind.implementation for name, kind in ALGORITHMS.items()})
"""What `algorithm.name` may say."""


class OutsideConfig(KlLossConfig):
    """An algorithm of your own: a class outside the package, with settings of its own beside those of every algorithm.

    The launcher has a child import it and ask its `Config` (`workers.roles.own_classes`); here is what that answered.
    """

    model_config = ConfigDict(extra="allow")
    name: Annotated[str, AfterValidator(NAMES.resolve)] = "module:Class"
    """`module:Class`, a `workers.algorithms.algorithm.Algorithm`."""
    dataflow: tuple[Task, ...] = ()
    """Its tasks; leave it out: its `Config` says so (`tasks`)."""
    needs_group_size: int = 1
    """Responses per prompt that it needs to compare; leave it out: its `Config` says so (`min_group_size`)."""
    needs_whole_step: bool = False
    """Whether nothing trains before the step's last row is there; leave it out: the class says so (`whole_step`)."""

    @property
    def min_group_size(self) -> int:
        """As its `Config` says."""
        return self.needs_group_size

    @property
    def whole_step(self) -> bool:
        """As the class says."""
        return self.needs_whole_step

    def tasks(self, *, old_log_probs: bool = False) -> tuple[Task, ...]:
        """As its `Config` says of this run."""
        assert self.dataflow, "the launcher has its child ask for them first"
        return self.dataflow


def _name_of(section: Any) -> Any:
    """Return the algorithm that a section is of; without a name it is GRPO."""
    name = section.get("name", "grpo") if isinstance(section, Mapping) else getattr(section, "name", None)
    with contextlib.suppress(ValueError):  # a name that does not exist has no settings, either
        return "outside" if isinstance(name, str) and ":" in NAMES.resolve(name) else name
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
