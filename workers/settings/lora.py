"""Settings of low-rank adapters (Hu et al. 2021, arXiv 2106.09685). Torch-free."""

import math
import re
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from asyncflow.settings import Settings

ALL_LINEAR: Literal["all-linear"] = "all-linear"
# peft's initializations that change the base, or are not of the plain form: a generator that holds the model's own
# files would compute another policy.
_REWRITES_BASE = re.compile(r"pissa(_niter_\d+)?|olora|loftq|eva|corda|orthogonal|mica|lora_ga", re.IGNORECASE)
# peft's names of what has another name here, or is not built.
_PEFT_NAMES = {"r": "rank", "lora_alpha": "alpha", "lora_dropout": "dropout", "target_modules": "targets",
               "init_lora_weights": "init"}  # fmt: skip
_NOT_BUILT = ("use_dora", "bias", "rank_pattern", "alpha_pattern", "layers_to_transform", "exclude_modules")


class LoraConfig(Settings):
    """Train an adapter of low rank beside a frozen model: y = x W + scaling x A B, with A and B trained
    (docs/lora.md). The files are peft's."""

    rank: int = Field(ge=1)
    """Rank of every adapted weight's change (peft: `r`)."""
    alpha: float | None = Field(None, gt=0)
    """The change is scaled by alpha / rank (peft: `lora_alpha`); null: the rank, so the scale is 1, as with peft's
    defaults (`r` 8, `lora_alpha` 8). peft's own default is 8 whatever the rank."""
    use_rslora: bool = False
    """Scale by alpha / sqrt(rank) instead (Kalajdzievski 2023, arXiv 2312.03732)."""
    dropout: float = Field(0.0, ge=0, lt=1)
    """Share of the adapter's inputs set to 0 in passes with gradient (peft: `lora_dropout`). Above 0 the policy in
    training is not the one that generated: ratios differ from 1 even on-policy."""
    targets: tuple[str, ...] | Literal["all-linear"] = ALL_LINEAR
    """Which linear layers of the decoder layers get an adapter (peft: `target_modules`): ends of module names, such as
    `[q_proj, v_proj]`, or `all-linear`: those of attention and MLP."""
    init: Literal["default", "gaussian"] = "default"
    """How A begins: `default` as peft's, uniform within 1 / sqrt(inputs); `gaussian`: normal with deviation 1 / rank.
    B begins at 0."""
    modules_to_save: tuple[str, ...] = ()
    """Modules that are trained whole beside the adapter, such as `[norm]`, by ends of names. Needs `weightsync.lora:
    merged`; the reference is then a copy of the model."""
    path: str | None = None
    """Directory of an adapter in peft's form to begin with; `rank`, `alpha`, `use_rslora` and `targets` must be its
    own. null: a new one. A relative path is looked up beside the config file, then in the working directory."""

    @model_validator(mode="before")
    @classmethod
    def _has_our_names(cls, given: Any) -> Any:
        if isinstance(given, dict):
            for name in given:
                if name in _PEFT_NAMES:
                    raise cls.refusal_of((name,), given[name], f"it is called {_PEFT_NAMES[name]} here; rename it")
                if name in _NOT_BUILT:
                    raise cls.refusal_of((name,), given[name], "it is not supported; remove it")
        return given

    @field_validator("init", mode="before")
    @classmethod
    def _leaves_the_base_alone(cls, given: Any) -> Any:
        if isinstance(given, str) and _REWRITES_BASE.fullmatch(given):
            raise ValueError(
                f"{given} rewrites the base model or needs data of its own, while generators and the reference keep "
                "the model's files; use default or gaussian"
            )
        return given

    @field_validator("targets", mode="before")
    @classmethod
    def _is_a_list_or_all(cls, given: Any) -> Any:
        if isinstance(given, str) and given != ALL_LINEAR:
            raise ValueError(f"give {ALL_LINEAR}, or ends of module names as a list, such as [q_proj, v_proj]")
        if isinstance(given, list | tuple) and ALL_LINEAR in given:
            raise ValueError(f"{ALL_LINEAR} stands alone; give it without the list, or name modules")
        return given

    @field_validator("targets", "modules_to_save")
    @classmethod
    def _names_some(cls, given: Any) -> Any:
        if given != ALL_LINEAR and (any(not name for name in given) or len(set(given)) < len(given)):
            raise ValueError("names are empty or given twice; name each once")
        return given

    @field_validator("targets")
    @classmethod
    def _targets_something(cls, given: Any) -> Any:
        if not given:
            raise ValueError("no layer is named; name some, or use all-linear")
        return given

    @property
    def alpha_or_rank(self) -> float:
        """`alpha`; where it is null, the rank."""
        return self.rank if self.alpha is None else self.alpha

    @property
    def scaling(self) -> float:
        """Factor of B A in the adapted weight."""
        return self.alpha_or_rank / (math.sqrt(self.rank) if self.use_rslora else self.rank)
