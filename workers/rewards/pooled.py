"""Rewards in child processes: users' functions, and built-in ones that may hang in native code. Torch-free."""

from collections.abc import Mapping, Sequence
from concurrent.futures import CancelledError, Future
from typing import Any

from workers.calls.pool import CallPool, Entry
from workers.calls.user_function import excerpt
from workers.rewards.base import NO_FIELDS, NOTHING_DRAWN, DrawnResponse, Score
from workers.rewards.in_child import GROUP_FIELD
from workers.settings.rewards import RewardConfig

CONCURRENCY = 4
"""Calls at a time where the configuration says nothing."""
_ENTRIES = "workers.rewards.in_child"
_MEMORY_BYTES = 4 * 2**30
"""A power tower in a response would otherwise take what the machine has."""


class _RewardPool:
    """A pool of children that call a function of section `reward`, with its deadline and number of calls at a time."""

    def __init__(self, config: RewardConfig, entry: Entry, what: str) -> None:
        """Begin to start the first child."""
        self._pool = CallPool(
            entry,
            what=what,
            limit="reward.timeout_s",
            timeout_s=config.timeout_s,
            concurrency=config.concurrency or CONCURRENCY,
        )

    def until_ready(self) -> None:
        """Wait for the first child.

        Raises:
            ConfigError: the function cannot be imported.
            UserCodeNotStarted: the process did not start, twice.
        """
        try:
            self._pool.until_ready()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the children; scores that are to come are cancelled. Idempotent."""
        self._pool.close()


class PooledReward(_RewardPool):
    """A reward function behind a pool of children. Thread-safe."""

    def __init__(self, config: RewardConfig) -> None:
        """Begin to start the first child.

        Args:
            config: names the function, its deadline and how many calls there are at a time.
        """
        super().__init__(config, _entry(config), f"reward.function: {config.function}")

    def submit(
        self,
        prompt: str,
        response: str,
        ground_truth: str,
        task: str = NO_FIELDS,
        drawn: DrawnResponse = NOTHING_DRAWN,
    ) -> "Future[Score]":
        """Score one response to the data row `task` (JSON); the future raises `UserCodeFailed` if there is no score."""
        score: Future[Score] = Future()
        score.set_running_or_notify_cancel()
        texts = (prompt, response, ground_truth, task)
        facts = (drawn.num_tokens, drawn.truncated, drawn.token_ids)
        pending = self._pool.submit(*texts, *facts, on=f"response {excerpt(response)}")
        pending.add_done_callback(lambda done: _pass_on(done, score))
        return score

    def __call__(
        self,
        prompt: str,
        response: str,
        ground_truth: str,
        task: str = NO_FIELDS,
        drawn: DrawnResponse = NOTHING_DRAWN,
        /,
    ) -> Score:
        """Score one response and wait.

        Raises:
            UserCodeFailed: it raised, hung, or returned neither a number that float32 holds nor a Score of one.
        """
        return self.submit(prompt, response, ground_truth, task, drawn).result()


class GroupPool(_RewardPool):
    """`reward.group_function` behind a pool of children. Thread-safe."""

    def __init__(self, config: RewardConfig) -> None:
        """Begin to start the first child.

        Args:
            config: names the function.
        """
        name = config.group_function
        assert name is not None
        super().__init__(config, Entry(f"{_ENTRIES}:group_reward", {"name": name}), f"{GROUP_FIELD}: {name}")

    def submit(
        self,
        prompt: str,
        ground_truth: str,
        task: str,
        members: Sequence[Mapping[str, Any]],
        token_ids: Sequence[bytes],
    ) -> "Future[list[float]]":
        """Have the members of a group rewarded; the future raises `UserCodeFailed` if they are not.

        Args:
            prompt, ground_truth, task: that they share; the task is the data row, JSON.
            members: see docs/rewards.md.
            token_ids: of each, see `DrawnResponse`.
        """
        on = f"{len(members)} responses to {excerpt(prompt)}"
        return self._pool.submit(prompt, ground_truth, task, list(members), list(token_ids), on=on)


def _entry(config: RewardConfig) -> Entry:
    if config.function == "regex":
        return Entry(f"{_ENTRIES}:last_match", {"pattern": config.pattern}, _MEMORY_BYTES)
    if config.function == "math_verify":
        return Entry(f"{_ENTRIES}:verified_math", memory_bytes=_MEMORY_BYTES)
    return Entry(f"{_ENTRIES}:user_reward", {"name": config.function})


def _pass_on(done: "Future[dict[str, Any]]", score: "Future[Score]") -> None:
    if done.cancelled():
        score.set_exception(CancelledError())
    elif (error := done.exception()) is not None:
        score.set_exception(error)
    else:
        score.set_result(Score(**done.result()))
