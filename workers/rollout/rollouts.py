"""Rollouts in progress on one engine, driven by the rollout loop and the evaluation: single turns or a user's function.

    begin(requests) -> step() ... step() -> finished rollouts, each as soon as it ends

`SingleTurn` generates one response per prompt. `workers.rollout.functions` runs users' functions and agents.

Shapes: T tokens of all samples of a rollout, A those that the policy drew.
"""

import threading
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from asyncflow.errors import ConfigError
from workers.engines.base import GenerateEngine, GenerateRequest, Generation, SleepingGenerator
from workers.engines.stop_strings import StopStrings
from workers.rows.finished import FinishedRollout, RolloutRequest

ASLEEP_S = 0.5
"""How long a step of an engine that sleeps waits for `wake` (s)."""


class Rollouts(Protocol):
    """Rollouts in progress; for one thread."""

    @property
    def num_running(self) -> int:
        """Rollouts that began and have not finished."""

    @property
    def num_drawing(self) -> int:
        """Responses that the engine is generating."""

    @property
    def free_slots(self) -> int:
        """How many rollouts may begin now."""

    @property
    def needs_engine(self) -> bool:
        """Whether responses are being drawn, or wait to be."""

    def figures(self) -> dict[str, float]:
        """Return what `asyncflow status` shows; empty for single turns.

        Current: `live` rollouts; `drawing` and `waiting` calls (waiting for the engine); rollouts `in_tools`, i.e.
        other user code. Since the start: `turns`; and `drawing_s`, `waiting_s`, `in_tools_s`, summed over rollouts (s).
        """

    def begin(self, requests: Sequence[RolloutRequest]) -> None:
        """Begin rollouts, at most `free_slots`; raises BadRequest as `GenerateEngine.submit` does."""

    def step(self, wake: threading.Event, *, hold: bool = False, asleep: bool = False) -> list[FinishedRollout]:
        """Continue until rollouts finish, a token was drawn, or `wake` is set; return the finished ones. `hold`: start
        no new responses, so that the engine becomes idle for new weights. `asleep`: draw nothing, since the engine
        sleeps; users' code continues."""

    def abort(self) -> None:
        """Drop all rollouts."""

    def close(self) -> None:
        """Release everything but the engine; idempotent."""


class SingleTurn:
    """One response per prompt; `stop` strings end a response, and stay part of it."""

    def __init__(self, engine: GenerateEngine, stop: StopStrings | None = None) -> None:
        self._engine = engine
        self._stop = stop
        self._prompts: dict[int, Tensor] = {}

    @property
    def num_running(self) -> int:
        return self._engine.num_running

    @property
    def num_drawing(self) -> int:
        return self._engine.num_running

    @property
    def free_slots(self) -> int:
        return self._engine.free_slots

    @property
    def needs_engine(self) -> bool:
        return self._engine.num_running > 0

    def figures(self) -> dict[str, float]:
        return {}

    def begin(self, requests: Sequence[RolloutRequest]) -> None:
        self._prompts |= {one.ticket: one.prompt_P for one in requests}
        self._engine.submit(
            [
                GenerateRequest(one.index, one.prompt_P, one.seed, one.ticket, one.max_tokens, stop=self._stop)
                for one in requests
            ]
        )

    def step(self, wake: threading.Event, *, hold: bool = False, asleep: bool = False) -> list[FinishedRollout]:
        if asleep:
            wake.wait(ASLEEP_S)
            return []
        ended = (one.until(self._stop)[0] for one in self._engine.step(wake))
        return [single_turn(self._prompts.pop(one.ticket), one) for one in ended]

    def abort(self) -> None:
        self._engine.abort()
        self._prompts.clear()

    def close(self) -> None:
        """Nothing to release."""


def sleeping(engine: GenerateEngine, name: str, roles: str) -> SleepingGenerator:
    """Return an engine that can sleep; `name` and `roles` are for the ConfigError if it cannot."""
    if not isinstance(engine, SleepingGenerator):
        raise ConfigError(
            f"{name}: cannot free its device memory and take it back, which roles {roles} need; give each of them "
            f"devices of its own (--roles rollout:N,actor:N)"
        )
    return engine


def single_turn(prompt_P: Tensor, generation: Generation) -> FinishedRollout:
    """Return a single-turn rollout, whose one sample is prompt and response."""
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
        kept=generation.kept,
        top=generation.top,
    )
