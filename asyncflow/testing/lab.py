"""An engine under test, with what a test does to it: ask, step, swap, compare with the reference.

Every wait has a deadline, so an engine that hangs fails its test.
"""

import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch

from asyncflow.testing.adapter import Adapter
from asyncflow.testing.tiny_model import Reference
from workers.engines.base import GenerateEngine, GenerateRequest, Generation
from workers.settings.rollout import SamplingConfig

DEADLINE_S = 120.0


@dataclass
class Lab:
    """Attributes:
    adapter: of the engine.
    engine: under test.
    sampling: how it draws.
    old, new: directories of two models of the same shape; `old` is loaded when a test begins.
    """

    adapter: Adapter
    engine: GenerateEngine
    sampling: SamplingConfig
    old: Path
    new: Path

    def reset(self) -> "Lab":
        """Make the engine idle, with the old weights, as version 0."""
        self.engine.abort()
        if self.adapter.loads_weights:
            self.swap(self.old, version=0)
        return self

    def swap(self, path: Path, *, version: int) -> None:
        """Load the weights of a directory, as the rollout does."""
        self.engine.load_weights(self.adapter.weights(path))
        self.engine.version = version

    @cached_property
    def references(self) -> dict[int, Reference]:
        """Old and new weights as versions 0 and 1."""
        return {
            version: Reference(path, temperature=self.sampling.temperature)
            for version, path in enumerate((self.old, self.new))
        }

    def requests(self, num: int, *, first: int = 0, group: int = 2) -> list[GenerateRequest]:
        """Return groups of responses, as they come from the queue; prompts of one to nineteen tokens."""
        made = []
        for row in range(first, first + num):
            length = 1 + 6 * (row // group % 4)
            prompt = 2 + (torch.arange(length) + row // group) % 11
            made.append(GenerateRequest(row, prompt, seed=1000 + row, ticket=row))
        return made

    def step_until_some(self) -> list[Generation]:
        """Step until at least one response is finished."""
        deadline = time.monotonic() + DEADLINE_S
        never = threading.Event()
        while not (finished := self.engine.step(never)):
            assert time.monotonic() < deadline, "no response ended"
            assert self.engine.num_running, "responses were lost"
        return finished

    def drain(self, requests: Sequence[GenerateRequest] = ()) -> list[Generation]:
        """Answer `requests`, filling places as they get free, and what runs; returns the responses by ticket."""
        waiting, responses = deque(requests), []
        while waiting or self.engine.num_running:
            number = min(self.engine.free_slots, len(waiting))
            if number:
                self.engine.submit([waiting.popleft() for _ in range(number)])
            responses += self.step_until_some()
        return sorted(responses, key=lambda response: response.ticket)

    def assert_like_reference(self, request: GenerateRequest, response: Generation) -> None:
        """Compare the log-probability of every token with the float64 reference of the weights that drew it."""
        versions = set(response.versions_R.tolist())
        for version in versions:
            drawn = response.versions_R == version
            expected = self.references[version].log_probs(request.prompt_P, response.response_R)
            if version == 0 or len(versions) == 1 or not self.adapter.keeps_cache:
                torch.testing.assert_close(
                    response.log_probs_R[drawn].double(), expected[drawn], rtol=0, atol=self.adapter.tolerance
                )
