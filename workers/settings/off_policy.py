"""Section `algorithm.off_policy`, of every algorithm. Torch-free."""

from collections.abc import Mapping
from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from asyncflow.settings import Settings


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
