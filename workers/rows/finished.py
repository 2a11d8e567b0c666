"""One rollout: the request, and the result.

Legend of shapes: T tokens of all samples of a rollout, A those that the policy drew.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class RolloutRequest:
    """One rollout to make.

    Attributes:
        index: global row index.
        ticket: identifies the request; a lost row may be requested again.
        seed: of its random numbers, 64 bits.
        prompt_P: int64 [P], of a single-turn rollout.
        task: the data row as JSON, for a user's function.
        group, member: of the row.
    """

    index: int
    ticket: int
    seed: int
    prompt_P: Tensor
    task: str = "{}"
    group: int = 0
    member: int = 0


@dataclass(frozen=True, eq=False)
class FinishedRollout:
    """One rollout at its end.

    Attributes:
        index, ticket: of the request.
        tokens_T: int64 [T], one sample after the other.
        sample_lengths: tokens of each sample.
        response_mask_T: uint8 [T], 1 where the policy drew.
        log_probs_A: float32 [A], natural log of the tempered distribution, before top-p and top-k.
        versions_A: int32 [A], step of the weights that drew each token.
        truncated: its response was cut, or a limit ended it.
        reward: from its function; None: `reward.function` decides. NaN: there is none.
        response: text to be scored; None: the drawn tokens' text.
        metrics: numbers from its function, by name.
        conversations: messages of each sample, for people to read.
        turns: calls of the policy.
        tool_s: time since the first call in which it did not wait for the policy (s).
        bridge_failures: turns that began a new sample although they continued a reply.
        cpu_s: see `Finished`; plus that of the rollout's process beside the engine since its last rollout ended (s).
        failure: why the rollout failed; "" if it did not.
        leaves: its group leaves the run, and the next prompt takes its place.
        failures: how often it failed, if it leaves for that.
    """

    index: int
    ticket: int
    tokens_T: Tensor
    sample_lengths: Sequence[int]
    response_mask_T: Tensor
    log_probs_A: Tensor
    versions_A: Tensor
    truncated: bool
    reward: float | None = None
    response: str | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    conversations: Sequence[Sequence[Mapping[str, Any]]] = ()
    turns: int = 1
    tool_s: float = 0.0
    bridge_failures: int = 0
    cpu_s: float = 0.0
    failure: str = ""
    leaves: bool = False
    failures: int = 0

    @property
    def skipped(self) -> bool:
        """Whether it leaves because its function says so."""
        return self.leaves and not self.failures

    @cached_property
    def prompt(self) -> Tensor:
        """int64 [P]: the first sample's tokens before the first drawn one."""
        drawn = self.response_mask_T[: self.sample_lengths[0]].nonzero()
        return self.tokens_T[: int(drawn[0]) if len(drawn) else self.sample_lengths[0]]

    @cached_property
    def drawn(self) -> Tensor:
        """int64 [A]: the tokens that the policy drew."""
        return self.tokens_T[self.response_mask_T.bool()]

    @staticmethod
    def without_tokens(request: RolloutRequest, *, reward: float = math.nan, why: str = "") -> "FinishedRollout":
        """Return a rollout without trainable tokens; it has only a reward, or none (NaN)."""
        return FinishedRollout(
            index=request.index,
            ticket=request.ticket,
            tokens_T=request.prompt_P[:1],
            sample_lengths=[1],
            response_mask_T=torch.zeros(1, dtype=torch.uint8),
            log_probs_A=torch.zeros(0),
            versions_A=torch.zeros(0, dtype=torch.int32),
            truncated=False,
            reward=reward,
            response="",
            failure=why,
        )
