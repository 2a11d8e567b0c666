"""Rollouts in progress on one engine: what the rollout loop and the evaluation drive, single-turn or a user's function.

    begin(requests) -> step() ... step() -> finished rollouts, each as soon as it ends

`SingleTurn` generates one response to each prompt. `workers.rollout.functions` runs users' functions and agents.

Legend of shapes: T tokens of all samples of a rollout, A those that the policy drew.
"""

import math
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor

from workers.agents.wire import Finished
from workers.engines.base import GenerateEngine, GenerateRequest, Generation
from workers.engines.stop_strings import StopStrings


@dataclass(frozen=True, eq=False)
class RolloutRequest:
    """One rollout to make.

    Attributes:
        index: global row index.
        ticket: names it; a row that was lost may be requested again.
        seed: of its random numbers, 64 bits.
        prompt_P: int64 [P], of a single-turn rollout.
        task: the data row, JSON, of a user's function.
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
        truncated: its response was cut, or a budget ended it.
        reward: of its function; None: `reward.function` says. NaN: there is none.
        response: text to be scored; None: the drawn tokens' text.
        metrics: numbers of its function, by name.
        conversations: messages of each sample, for people.
        turns: calls of the policy; `tool_s`: time since the first in which it waited for none (s).
        bridge_failures: turns that began a new sample though they went on from a reply.
        cpu_s: see `Finished`; and of the rollout's process beside the engine, since its last rollout ended (s).
        failure: why there is none; "" if there is one.
        leaves: its group leaves the run, and the next prompt takes its place.
        failures: how often it failed, where it leaves for that.
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
        """int64 [P]: the first sample's tokens before the first that was drawn."""
        drawn = self.response_mask_T[: self.sample_lengths[0]].nonzero()
        return self.tokens_T[: int(drawn[0]) if len(drawn) else self.sample_lengths[0]]

    @cached_property
    def drawn(self) -> Tensor:
        """int64 [A]: the tokens that the policy drew."""
        return self.tokens_T[self.response_mask_T.bool()]

    @staticmethod
    def of(prompt_P: Tensor, generation: Generation) -> "FinishedRollout":
        """Return a single-turn rollout: the sample is prompt and response."""
        drawn = len(generation.response_R)
        mask_T = torch.zeros(len(prompt_P) + drawn, dtype=torch.uint8)
        mask_T[len(prompt_P) :] = 1
        return FinishedRollout(
            index=generation.index,
            ticket=generation.ticket,
            tokens_T=torch.cat([prompt_P, generation.response_R]),
            sample_lengths=[len(mask_T)],
            response_mask_T=mask_T,
            log_probs_A=generation.log_probs_R,
            versions_A=generation.versions_R,
            truncated=generation.truncated,
        )

    @staticmethod
    def told(request: RolloutRequest, message: Finished, *, beside_s: float = 0.0) -> "FinishedRollout":
        """Return a rollout of which the session service told; `beside_s` is in `cpu_s`, too."""
        samples = message.samples
        return FinishedRollout(
            index=request.index,
            ticket=request.ticket,
            tokens_T=torch.tensor([token for one in samples for token in one.token_ids], dtype=torch.int64),
            sample_lengths=[len(one.token_ids) for one in samples],
            response_mask_T=torch.tensor([bit for one in samples for bit in one.response_mask], dtype=torch.uint8),
            log_probs_A=torch.tensor([number for one in samples for number in one.log_probs], dtype=torch.float32),
            versions_A=torch.tensor([step for one in samples for step in one.versions], dtype=torch.int32),
            truncated=message.truncated,
            reward=message.reward,
            response=message.response,
            metrics=message.metrics,
            conversations=message.conversations,
            turns=message.turns,
            tool_s=message.tool_s,
            bridge_failures=message.bridge_failures,
            cpu_s=message.cpu_s + beside_s,
        )

    @staticmethod
    def without_tokens(request: RolloutRequest, *, reward: float = math.nan, why: str = "") -> "FinishedRollout":
        """Return a rollout in which nothing was drawn that could be trained; it only has a reward, or none (NaN)."""
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


class Rollouts(Protocol):
    """Rollouts in progress; used by one thread."""

    @property
    def num_running(self) -> int:
        """Rollouts that began and have not finished."""

    @property
    def num_drawing(self) -> int:
        """Responses that the engine is generating."""

    @property
    def free_slots(self) -> int:
        """How many rollouts may begin now."""

    def figures(self) -> dict[str, float]:
        """Return what `asyncflow status` shows of them; nothing of rollouts with one turn.

        Now: `live` rollouts, `drawing` and `waiting` calls (for the engine's room), rollouts `in_tools` or other users'
        code. Since the start: `turns`, and `drawing_s`, `waiting_s`, `in_tools_s`, summed over rollouts (s).
        """

    def begin(self, requests: Sequence[RolloutRequest]) -> None:
        """Begin rollouts, at most `free_slots`.

        Raises:
            BadRequest: see `GenerateEngine.submit`.
        """

    def step(self, wake: threading.Event, *, hold: bool = False) -> list[FinishedRollout]:
        """Go on until rollouts finish, a token was drawn, or `wake` is set; return those that finished.

        Args:
            wake: ends the wait.
            hold: begin no response that has not begun, so that the engine gets idle: weights wait.
        """

    def abort(self) -> None:
        """Drop all."""

    def close(self) -> None:
        """End what runs them, but not the engine; idempotent."""


class SingleTurn:
    """One response to each prompt."""

    def __init__(self, engine: GenerateEngine, stop: StopStrings | None = None) -> None:
        """Args:
        engine: draws.
        stop: strings that end a response, and stay part of it.
        """
        self._engine = engine
        self._stop = stop
        self._prompts: dict[int, Tensor] = {}

    @property
    def num_running(self) -> int:
        """See `Rollouts`."""
        return self._engine.num_running

    @property
    def num_drawing(self) -> int:
        """See `Rollouts`."""
        return self._engine.num_running

    @property
    def free_slots(self) -> int:
        """See `Rollouts`."""
        return self._engine.free_slots

    def figures(self) -> dict[str, float]:
        """See `Rollouts`."""
        return {}

    def begin(self, requests: Sequence[RolloutRequest]) -> None:
        """See `Rollouts`."""
        self._prompts |= {one.ticket: one.prompt_P for one in requests}
        self._engine.submit(
            [GenerateRequest(one.index, one.prompt_P, one.seed, one.ticket, stop=self._stop) for one in requests]
        )

    def step(self, wake: threading.Event, *, hold: bool = False) -> list[FinishedRollout]:
        """See `Rollouts`."""
        ended = (one.until(self._stop)[0] for one in self._engine.step(wake))
        return [FinishedRollout.of(self._prompts.pop(one.ticket), one) for one in ended]

    def abort(self) -> None:
        """See `Rollouts`."""
        self._engine.abort()
        self._prompts.clear()

    def close(self) -> None:
        """See `Rollouts`."""
