"""An algorithm of your own in one file: soft gates instead of a clip (SAPO, arXiv 2511.20347), and a median baseline.

    cd examples && asyncflow-launch quickstart --set algorithm.name=custom_algorithm:SoftGated

A class says how responses compare (`advantages`) and what bounds a token's step (`clips`); its `Config` is the section
`algorithm`, checked before anything starts. All else is of every algorithm: KL term, `off_policy`, normalisation,
`group_filter`, metrics. The other parts that a loss is made of are in workers/algorithms/parts.py.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from pydantic import Field
from torch import Tensor

from tq.columns import Column, PackedBatch
from workers.algorithms.algorithm import Algorithm
from workers.algorithms.parts import Clip, Tokens
from workers.settings.algorithms import KlLossConfig


class SoftGatedConfig(KlLossConfig):
    """Its settings, beside those of every algorithm."""

    tau_positive: float = Field(1.0, gt=0)
    """How sharply tokens of good responses are let go where their ratio leaves 1."""
    tau_negative: float = Field(1.05, gt=0)
    """The same of bad responses."""


@dataclass(frozen=True)
class SoftGate:
    """A part: the ratio r counts 4 / tau sigmoid(tau (r - 1)), whose slope is 1 at r = 1 and falls on both sides."""

    tau_positive: float
    tau_negative: float

    def __call__(self, tokens: Tokens, ratio_A: Tensor, surrogate_A: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gated surrogate, and where a gate has taken half of the slope."""
        tau_A = torch.where(tokens.advantage_A > 0, self.tau_positive, self.tau_negative)
        open_A = torch.sigmoid(tau_A * (ratio_A - 1))
        return 4 / tau_A * open_A * tokens.advantage_A, (4 * open_A * (1 - open_A) < 0.5).detach()


class SoftGated(Algorithm[SoftGatedConfig]):
    """What `algorithm.name` names."""

    Config = SoftGatedConfig

    def advantages(self, batch: PackedBatch, *, group_size: int) -> Mapping[str, Column]:
        """Return each response's reward minus the median of its group, in mean absolute deviations."""
        reward_BG = batch["rewards"].values.double().reshape(-1, group_size)
        apart_BG = reward_BG - reward_BG.nanmedian(1, keepdim=True).values
        scale_B1 = apart_BG.abs().nanmean(1, keepdim=True) + 1e-6
        return {"advantages": Column.of_scalars((apart_BG / scale_B1).nan_to_num(nan=0.0).float())}

    def clips(self) -> tuple[Clip, ...]:
        """Return the gate, in place of PPO's clip."""
        return (SoftGate(self._config.tau_positive, self._config.tau_negative),)
