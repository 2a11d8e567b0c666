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

from workers.rows.packed_rows import TokenSets, TopTokens


@dataclass(frozen=True, eq=False)
class RolloutRequest:
    index: int  # Global row index
    ticket: int  # Identifies the request; a lost row may be requested again
    seed: int  # Seed of its random numbers, 64 bits
    prompt_P: Tensor  # int64 [P], of a single-turn rollout
    task: str = "{}"  # The data row as JSON, for a user's function
    # The row's group, and its place in it
    group: int = 0
    member: int = 0
    max_tokens: int | None = None  # Longest response of a single-turn rollout; None: as long as the engine allows


@dataclass(frozen=True, eq=False)
class FinishedRollout:
    # From the request
    index: int
    ticket: int
    tokens_T: Tensor  # int64 [T], one sample after the other
    sample_lengths: Sequence[int]  # Tokens of each sample
    response_mask_T: Tensor  # uint8 [T], 1 where the policy drew
    log_probs_A: Tensor  # float32 [A], natural log of the tempered distribution; see `Generation.log_probs_R`
    versions_A: Tensor  # int32 [A], step of the weights that drew each token
    truncated: bool  # Its response was cut, or a limit ended it
    # See `Generation`
    kept: TokenSets | None = None
    top: TopTokens | None = None
    reward: float | None = None  # From its function; None: `reward.function` decides. NaN: there is none.
    response: str | None = None  # Text to be scored; None: the drawn tokens' text
    turn_ids_A: Tensor | None = None  # int32 [A], the turn that drew each token (`TURN_IDS`); None: there is one
    num_trained_turns: int = 1
    turn_rewards: Sequence[float] | None = None  # From its function, of each of them; `reward` is their sum
    turn_messages: Sequence[Sequence[Mapping[str, Any]]] = ()  # See `Finished`
    metrics: Mapping[str, float] = field(default_factory=dict)  # Numbers from its function, by name
    conversations: Sequence[Sequence[Mapping[str, Any]]] = ()  # Messages of each sample, for people to read
    turns: int = 1  # Calls of the policy
    tool_s: float = 0.0  # Time since the first call in which it did not wait for the policy (s)
    bridge_failures: int = 0  # Turns that began a new sample although they continued a reply
    # See `Finished`; plus that of the rollout's process beside the engine since its last rollout ended (s)
    cpu_s: float = 0.0
    failure: str = ""  # Why the rollout failed; "" if it did not
    leaves: bool = False  # Its group leaves the run, and the next prompt takes its place
    failures: int = 0  # How often it failed, if it leaves for that

    @property
    def skipped(self) -> bool:
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
