"""Rollouts in progress on one engine: what the rollout loop and the evaluation drive, single-turn or a user's function.

    begin(requests) -> step() ... step() -> finished rollouts, each as soon as it ends

`SingleTurn` generates one response to each prompt. `workers.rollout.functions` runs users' functions and agents.

Legend of shapes: T tokens of all samples of a rollout, A those that the policy drew.
"""

import threading
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from workers.engines.base import GenerateEngine, GenerateRequest, Generation
from workers.engines.stop_strings import StopStrings
from workers.rows.finished import FinishedRollout, RolloutRequest


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
        return [single_turn(self._prompts.pop(one.ticket), one) for one in ended]

    def abort(self) -> None:
        """See `Rollouts`."""
        self._engine.abort()
        self._prompts.clear()

    def close(self) -> None:
        """See `Rollouts`."""


def single_turn(prompt_P: Tensor, generation: Generation) -> FinishedRollout:
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
