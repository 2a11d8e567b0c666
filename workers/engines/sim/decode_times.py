"""Responses that are generated together: the more there are, the longer each token takes. Pure.

Used by the `sim` engine with real time, and by the planner with simulated time.
"""

import heapq
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from workers.settings.sim import SimConfig

# Time is counted in work: the seconds that a response would take on its own. With n responses, each second of work
# takes decode_s(n) / decode_s(1) seconds for all of them alike, so the order in which they end never changes and one
# heap suffices.
#
#     two responses of 2 s and 3 s of work; two at a time are 1.5 times as slow
#     seconds   0 ............ 3.0 ... 4.0        the first ends after 2 x 1.5 s, the other does its last second alone
#     clock     0 ............ 2.0 ... 3.0
#
# Prompts that enter stall everybody while they are computed.


class Decoding:
    """What one engine generates at the same time.

    `decode_s` maps the number of responses to the seconds that one token of each takes. Times are seconds, and never go
    backwards.
    """

    def __init__(self, decode_s: Callable[[int], float], *, now: float = 0.0) -> None:
        self._decode_s = decode_s
        self._now = now
        self._clock = 0.0
        self._ends: list[tuple[float, int]] = []
        self._cancelled: set[int] = set()
        self._over: list[int] = []
        self._over_since = now
        self._alone_s = decode_s(1)
        self._rate = 1.0  # seconds that pass per second of work
        self._num_running = 0
        self._paused = False

    @property
    def next_end(self) -> float | None:
        """When the next response ends, unless another one starts before (s); None: nothing runs."""
        return self._over_since if self._over else self._first_end()

    def clock_at(self, now: float) -> float:
        """Return how much work each response could have done by now (s)."""
        self._advance_clock(now)
        return self._clock

    def begin(self, number: int, work_s: float, now: float) -> float:
        """Start response `number`, which would take `work_s` on its own; return the clock."""
        self._advance_clock(now)
        heapq.heappush(self._ends, (self._clock + work_s, number))
        self._add_running(1)
        return self._clock

    def stall_responses(self, seconds: float, now: float) -> None:
        """Stall all responses while prompts are computed."""
        self._advance_clock(now)
        self._now += seconds

    def pause(self, now: float) -> None:
        """Stop all responses until `resume`; others may begin, which stand still, too."""
        self._advance_clock(now)
        self._paused = True

    def resume(self, now: float) -> None:
        self._paused = False
        self._now = max(self._now, now)

    def cancel_response(self, number: int, now: float) -> None:
        self._advance_clock(now)
        if number in self._over:
            self._over.remove(number)
            return
        self._cancelled.add(number)
        self._add_running(-1)

    def take_ended(self, now: float) -> list[int]:
        """Return the responses that ended since the last call, in order."""
        self._advance_clock(now)
        over, self._over = self._over, []
        return over

    def _advance_clock(self, now: float) -> None:
        if self._paused:
            return
        while (end := self._first_end()) is not None and end <= now:
            self._clock, number = heapq.heappop(self._ends)
            self._add_running(-1)
            self._over_since = self._over_since if self._over else end
            self._over.append(number)
            self._now = max(self._now, end)
        if now > self._now:
            self._clock += (now - self._now) / self._rate
            self._now = now

    def _first_end(self) -> float | None:
        while self._ends and self._ends[0][1] in self._cancelled:
            self._cancelled.discard(heapq.heappop(self._ends)[1])
        return self._now + (self._ends[0][0] - self._clock) * self._rate if self._ends else None

    def _add_running(self, more: int) -> None:
        self._num_running += more
        if self._num_running and self._alone_s:
            self._rate = self._decode_s(self._num_running) / self._alone_s


# Lengths of simulated responses: a pure function of (seed, row). Torch-free: the planner draws the same lengths.


class SimLengths:
    """How many tokens the responses of a run have; `samples_per_step` rows make a step."""

    def __init__(self, config: SimConfig, *, samples_per_step: int, seed: int) -> None:
        self._config = config
        self._samples = samples_per_step
        self._seed = seed
        self._of_step = lru_cache(maxsize=8)(self._draw_lengths)

    def response_length(self, index: int) -> int:
        """Return the length of the response of row `index` (tokens, at least 1)."""
        step, place = divmod(index, self._samples)
        return max(1, round(self._config.mean_tokens * float(self._of_step(step + 1)[place])))

    def _draw_lengths(self, step: int) -> NDArray[np.float64]:
        """Return a step's relative lengths, float64 [samples per step] with mean 1, in data order."""
        config, size = self._config, self._samples
        chance = np.random.default_rng([self._seed, step])
        drawn: NDArray[np.float64]
        match config.lengths:
            case "constant":
                drawn = np.ones(size)
            case "lognormal":
                drawn = np.minimum(chance.lognormal(0.0, config.sigma, size), config.clip * np.exp(config.sigma**2 / 2))
            case "pareto":
                mean = 1 / (1 - config.sigma)  # the mean for shape 1 / sigma
                drawn = np.minimum(1.0 + chance.pareto(1 / config.sigma, size), config.clip * mean)
            case "file":
                numbers = _recorded(config.lengths_file)
                drawn = numbers[(np.arange(size) + (step - 1) * size) % len(numbers)]
        relative: NDArray[np.float64] = drawn / drawn.mean()
        return relative


@lru_cache(maxsize=1)
def _recorded(path: str) -> NDArray[np.float64]:
    return np.array([float(word) for word in Path(path).read_text().split()])
