"""Rewards of whole groups (`reward.group_function`): tournaments, rankings, diversity.

    responses of a group are scored one by one -> all are there -> the user's function sees them -> their rewards

Called by the outbox of a rollout, which holds a group until all of its members are there. The function runs in child
processes, `reward.concurrency` groups at a time.
"""

import logging
from array import array
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from math import nan
from typing import Any

from asyncflow.errors import UserCodeFailed
from asyncflow.repeated import RepeatedWarnings
from workers.rewards.pooled import GroupPool
from workers.rewards.scorer import ScoredResponse
from workers.rows.finished import FinishedRollout
from workers.settings.rewards import RewardConfig

logger = logging.getLogger(__name__)

_CUT = "the others of its group were put before this process started again"


class GroupReward:
    """The function behind a pool of children."""

    def __init__(self, config: RewardConfig, *, group_size: int, failed: Callable[[str], None]) -> None:
        """Import the function; raises as `PooledReward.until_ready` does.

        Args:
            config: names it.
            group_size: G.
            failed: is told of every group that has no rewards, in one line.
        """
        self._group_size = group_size
        self._failed = failed
        self._warnings = RepeatedWarnings(logger)
        self._pool = GroupPool(config)
        self._pool.until_ready()

    def rewarded(
        self, task: str, rollouts: Sequence[FinishedRollout], scores: Sequence[ScoredResponse]
    ) -> "Future[Sequence[ScoredResponse]]":
        """Have the function reward a group.

        Members that drew nothing or have no reward of their own keep what they have. If the function fails, no member
        has a reward, as where `reward.function` fails; nor has a part of a group, which may be all that is left after
        a crash in the middle of a put.

        Args:
            task: the data row, JSON.
            rollouts, scores: of the members, in their order.
        """
        rewarded: Future[Sequence[ScoredResponse]] = Future()
        seen = [k for k, one in enumerate(scores) if not one.failure and len(rollouts[k].log_probs_A)]
        if not seen or len(scores) < self._group_size:
            rewarded.set_result(_changed(scores, seen, _CUT))
            return rewarded
        first = scores[0]
        members = [_member(rollouts[k], scores[k]) for k in seen]
        token_ids = [array("i", rollouts[k].drawn.tolist()).tobytes() for k in seen]
        pending = self._pool.submit(first.prompt, first.ground_truth, task, members, token_ids)

        def settle(done: "Future[list[float]]") -> None:
            try:
                rewarded.set_result(_changed(scores, seen, done.result()))
            except UserCodeFailed as error:  # costs one group, not the run
                self._warnings.warn(f"{error}; its responses have no weight")
                self._failed(str(error))
                rewarded.set_result(_changed(scores, seen, str(error)))
            except Exception as error:  # noqa: BLE001  the boundary of a thread: the caller of `result` raises it
                rewarded.set_exception(error)

        pending.add_done_callback(settle)
        return rewarded

    def close(self) -> None:
        """End the children; idempotent."""
        self._pool.close()


def _member(rollout: FinishedRollout, score: ScoredResponse) -> dict[str, Any]:
    return {
        "response": score.response,
        "reward": score.reward,
        "correct": score.correct,
        "num_tokens": len(rollout.log_probs_A),
        "truncated": rollout.truncated,
        "metrics": dict(rollout.metrics),
        "conversations": list(rollout.conversations),
    }


def _changed(scores: Sequence[ScoredResponse], seen: Sequence[int], given: list[float] | str) -> list[ScoredResponse]:
    """Return the scores with the rewards that some of them were given, or why there are none."""
    changed = list(scores)
    for k, reward in zip(seen, [nan] * len(seen) if isinstance(given, str) else given, strict=True):
        changed[k] = replace(scores[k], reward=reward)
        if isinstance(given, str):
            changed[k] = replace(changed[k], correct=False, failure=given)
    return changed
