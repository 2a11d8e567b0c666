"""Settings of the `sim` engines. Torch-free, and read by every command."""

from bisect import bisect_left
from typing import Literal, Self

from pydantic import Field, model_validator

from asyncflow.settings import Settings


class SimConfig(Settings):
    """Engines that sleep (`rollout.engine: sim`, `actor.engine: sim`, `ref.engine: sim`)."""

    lengths: Literal["constant", "lognormal", "pareto", "file"] = "lognormal"
    """Distribution of response lengths, scaled in each step to the mean `mean_tokens`. `file`: one number per line, in
    the order of the samples, repeated."""
    mean_tokens: int = Field(200, ge=1)
    """Mean response length in each step (tokens)."""
    sigma: float = Field(0.5, gt=0)
    """`lognormal`: standard deviation of the logarithm. `pareto`: 1 / shape, below 1; larger means a heavier tail."""
    clip: float = Field(6.0, gt=1)
    """Longest response, in multiples of the distribution's mean."""
    lengths_file: str = ""
    """For `lengths: file`. A relative path is in the working directory."""
    prefill_s_per_token: float = Field(0.0, ge=0)
    """Time per prompt token; delays what is generated at the same time (s)."""
    decode_s_per_token: float = Field(0.005, ge=0)
    """Time per response token (s); concurrent responses do not slow each other down."""
    decode_s_by_batch: dict[int, float] = Field({})
    """Instead of `decode_s_per_token`: seconds per token of each response, by how many an instance generates at the
    same time, e.g. `{1: 0.01, 64: 0.02}`; linear in between, constant outside. Empty: `decode_s_per_token`."""
    ref_s_per_token: float = Field(0.0001, ge=0)
    """Reference: time per response token on one rank (s)."""
    train_s_per_token: float = Field(0.0001, ge=0)
    """Forward and backward pass: time per response token on one rank (s)."""
    forward_s_per_token: float | None = Field(None, ge=0)
    """Forward pass of the policy alone (`actor_log_probs`): time per response token on one rank (s); null: a third of
    `train_s_per_token`."""
    optimizer_s: float = Field(0.0, ge=0)
    """Time of each update (s)."""
    switch_s: float = Field(0.0, ge=0)
    """Colocated roles: time of a switch from one side to the other (s). Each side takes half of it, one to fall asleep,
    the other to wake."""
    parameters: int = Field(1_000_000, ge=1)
    """Number of model parameters, which sets how much a weight transfer moves."""

    @property
    def policy_forward_s_per_token(self) -> float:
        return self.train_s_per_token / 3 if self.forward_s_per_token is None else self.forward_s_per_token

    def decode_s(self, num_running: int) -> float:
        """Return the time per token of each of `num_running` concurrent responses (s)."""
        table = sorted(self.decode_s_by_batch.items())
        if not table:
            return self.decode_s_per_token
        above = bisect_left(table, (num_running, 0.0))
        if above in (0, len(table)):
            return table[min(above, len(table) - 1)][1]
        (low, fast), (high, slow) = table[above - 1 : above + 1]
        return fast + (slow - fast) * (num_running - low) / (high - low)

    @model_validator(mode="after")
    def _decoding_takes_time(self) -> Self:
        for number, seconds in self.decode_s_by_batch.items():
            if number < 1 or seconds <= 0:
                raise ValueError(
                    f"decode_s_by_batch {{{number}: {seconds:g}}}: give 1 or more responses, and times above 0"
                )
        return self

    @model_validator(mode="after")
    def _lengths_can_be_drawn(self) -> Self:
        if self.lengths == "pareto" and self.sigma >= 1:
            raise ValueError(f"sigma {self.sigma:g} gives a Pareto distribution without a mean; set it below 1")
        if self.lengths == "file" and not self.lengths_file:
            raise ValueError("lengths: file needs lengths_file, a text file with one number per line")
        return self
