"""What a call of a user's function costs in a child process, against calling it in place.

    python benchmarks/user_functions.py [--json [FILE]] [--calls 2000] [--rounds 5]

Ten seconds on two cores. The function compares two texts of some 500 characters, as a short reward does; medians of
rounds, one way after the other in each round:

    direct_us               the function, called in place (microseconds a call)
    child_us                one call after the other in a child (a `def`)
    async_us                64 calls at a time in one child (an `async def`)
    child_ratio             child_us / direct_us
    async_ratio             async_us / direct_us
    start_ms                from the pool to its first answer
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the clone, for `benchmarks` and its packages

from benchmarks.json_option import add_json_option, report
from workers.calls.pool import CallPool, Entry

SOURCE = """
def score(prompt, response, ground_truth):
    return float(response.rstrip().endswith(ground_truth))

async def score_async(prompt, response, ground_truth):
    return score(prompt, response, ground_truth)
"""
TEXTS = ("What is 6 x 7? " * 16, "Six times seven, step by step: " * 16 + "42", "42")
IN_FLIGHT = 64


def open_pool(name: str) -> CallPool:
    """Return a pool whose children call a reward of the module that `main` writes."""
    return CallPool(
        Entry("workers.rewards.pooled:user_reward", {"name": f"timed_rewards:{name}"}),
        what=name,
        limit="the benchmark's",
        timeout_s=60,
        concurrency=IN_FLIGHT,
    )


def direct_us(num_calls: int) -> float:
    """Time calls in place."""
    space: dict[str, Callable[..., float]] = {}
    exec(SOURCE, space)
    return _us(num_calls, lambda: [space["score"](*TEXTS) for _ in range(num_calls)])


def child_us(pool: CallPool, num_calls: int) -> float:
    """Time one call after the other."""
    return _us(num_calls, lambda: [pool.call_and_wait(*TEXTS, on="it") for _ in range(num_calls)])


def async_us(pool: CallPool, num_calls: int) -> float:
    """Time calls of which `IN_FLIGHT` are under way."""

    def run() -> None:
        waiting: deque[Future[Any]] = deque()
        for _ in range(num_calls):
            if len(waiting) == IN_FLIGHT:
                waiting.popleft().result()
            waiting.append(pool.submit(*TEXTS, on="it"))
        while waiting:
            waiting.popleft().result()

    return _us(num_calls, run)


def start_ms() -> float:
    """Time a pool's first answer."""
    began = time.perf_counter()
    pool = open_pool("score")
    pool.call_and_wait(*TEXTS, on="it")
    taken = time.perf_counter() - began
    pool.close()
    return 1e3 * taken


def measure(num_calls: int, rounds: int) -> dict[str, float]:
    """Return the medians."""
    plain, several = open_pool("score"), open_pool("score_async")
    for pool in (plain, several):
        pool.until_ready()
    times: dict[str, list[float]] = {"direct_us": [], "child_us": [], "async_us": [], "start_ms": []}
    for _ in range(rounds):
        times["direct_us"].append(direct_us(num_calls))
        times["child_us"].append(child_us(plain, num_calls))
        times["async_us"].append(async_us(several, num_calls))
        times["start_ms"].append(start_ms())
    for pool in (plain, several):
        pool.close()
    medians = {name: statistics.median(values) for name, values in times.items()}
    ratios = {f"{name}_ratio": medians[f"{name}_us"] / medians["direct_us"] for name in ("child", "async")}
    return medians | ratios


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_json_option(parser)
    parser.add_argument("--calls", type=int, default=2000, help="calls a round")
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "timed_rewards.py").write_text(SOURCE)
        sys.path.append(directory)  # children seek modules where their parent does
        figures = measure(given.calls, given.rounds)
    report(given.json, figures, "\n".join(f"{name:14} {value:8.3g}" for name, value in figures.items()))


def _us(num_calls: int, run: Callable[[], object]) -> float:
    began = time.perf_counter()
    run()
    return 1e6 * (time.perf_counter() - began) / num_calls


if __name__ == "__main__":
    main()
