"""Decodes and scores responses in the background, so that neither a slow reward nor the tokenizer delays generation.

submit -> score thread: decode -> built-in or remote: score -----------------.
                               -> child processes: submit -> the pool's ------+-> future
                                                             thread
"""

import contextlib
import logging
import math
import queue
import threading
from array import array
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from math import nan
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from asyncflow.errors import UserCodeFailed
from asyncflow.repeated import RepeatedWarnings
from tq.columns import Column
from workers.calls.pool import converted
from workers.data.tokenizer import TextDecoder
from workers.rewards.base import NO_FIELDS, Response, Score
from workers.rewards.load_reward import load_reward
from workers.rewards.pooled import GroupPool, PooledReward, is_url
from workers.rows.finished import FinishedRollout
from workers.settings.dataflow import REWARD_PARTS
from workers.settings.rewards import RewardConfig

logger = logging.getLogger(__name__)

_THREADS = 4
_MANY = 64
_SHOWN_TURNS = 8  # so many turns have a metric of their own


@dataclass(frozen=True)
class ScoredResponse:
    """One response with its texts."""

    prompt: str
    response: str
    ground_truth: str
    reward: float  # NaN: scoring failed, and the response has no weight
    correct: bool  # exactly right
    parts: Mapping[str, float] = field(default_factory=dict)  # of the reward, by name
    failure: str = ""  # why there is no reward, or ""
    turn_rewards: Sequence[float] = ()  # of each turn, whose sum `reward` is; empty: there is one reward


@dataclass(frozen=True)
class _Work:
    prompt: tuple[int, ...]
    response: tuple[int, ...]
    ground_truth: str
    task: str
    truncated: bool
    # text, parts, turns: see `Scorer.submit`
    text: str | None
    parts: Mapping[str, float]
    turns: Sequence[Sequence[Mapping[str, Any]]]
    scored: "Future[ScoredResponse]" = field(default_factory=Future)


class Scorer:
    """Decodes and scores; `close` ends its threads and children.

    Args:
        failed: called by any thread with one line per response that could not be scored.
        scores: False: nothing has a reward, see `RunConfig.has_rewards`.
        has_parts: put parts of rewards, or rollouts' own numbers, into a column; None: if the function is a user's.
    """

    def __init__(
        self,
        config: RewardConfig,
        tokenizer: PreTrainedTokenizerBase,
        *,
        failed: Callable[[str], None] = lambda why: None,
        scores: bool = True,
        has_parts: bool | None = None,
    ) -> None:
        self._function = load_reward(config)
        self._compares, self._scores = not config.is_users, scores
        self._in_groups = config.group_function is not None
        self._has_parts = config.is_users if has_parts is None else has_parts
        self._failed = failed
        self._most_failures = config.max_failures_in_a_row
        self._failures = 0
        self._warnings = RepeatedWarnings(logger)
        self._counting = threading.Lock()
        self._decoder = TextDecoder(tokenizer)
        self._work: queue.SimpleQueue[_Work | None] = queue.SimpleQueue()
        self._num_threads = _THREADS
        if not isinstance(self._function, PooledReward):
            self._num_threads = config.concurrency or (_MANY if is_url(config.function) else _THREADS)
        # Not an executor: at exit Python waits for an executor's threads, and a remote scorer may take long.
        for number in range(self._num_threads):
            threading.Thread(target=self._score_until_closed, name=f"score-{number}", daemon=True).start()

    def score(self, rollout: FinishedRollout, ground_truth: str, task: str = NO_FIELDS) -> "Future[ScoredResponse]":
        """Score a rollout, unless its function did. Without a reward of its own, it fails if the row has no ground
        truth to compare with. `task` is the data row, JSON."""
        parts = dict(rollout.metrics)
        if rollout.conversations:
            parts |= {"turns": float(rollout.turns), "tool_s": rollout.tool_s, "cpu_s": rollout.cpu_s}
            parts["bridge_failures"] = float(rollout.bridge_failures)
        if rollout.reward is None and not rollout.failure:
            return self.submit(
                rollout.prompt, rollout.drawn, ground_truth, task,
                truncated=rollout.truncated, text=rollout.response, parts=parts, turns=rollout.turn_messages,
            )  # fmt: skip
        reward = math.nan if rollout.failure or rollout.reward is None else rollout.reward
        # A rollout function may report `correct`.
        correct = bool(rollout.metrics.get("correct", reward >= 1.0))
        prompt, response = self._decoder.decode_prompt(tuple(rollout.prompt.tolist())), rollout.response or ""
        scored: Future[ScoredResponse] = Future()
        turns = rollout.turn_rewards or ()
        parts = means_of_turns(turns) | parts
        failure = rollout.failure
        scored.set_result(ScoredResponse(prompt, response, ground_truth, reward, correct, parts, failure, turns))
        return scored

    def submit(
        self,
        prompt_P: Tensor,
        response_R: Tensor,
        ground_truth: str,
        task: str = NO_FIELDS,
        *,
        truncated: bool = False,
        text: str | None = None,
        parts: Mapping[str, float] = MappingProxyType({}),
        turns: Sequence[Sequence[Mapping[str, Any]]] = (),
    ) -> "Future[ScoredResponse]":
        """Score one response (int64 tokens); `task` is the data row, JSON. `text` is scored instead of the decoded
        response; `parts` are added to the reward's own. `turns`: see `Response`."""
        prompt, response = tuple(prompt_P.tolist()), tuple(response_R.tolist())
        work = _Work(prompt, response, ground_truth, task, truncated, text, parts, turns)
        self._work.put(work)
        return work.scored

    def columns(self, scores: Sequence[ScoredResponse]) -> dict[str, Column]:
        """Return the outputs of task `rewards`: `rewards` float32 [N], `correct` bool [N] and, if enabled,
        `reward_parts`."""
        columns = {
            "rewards": Column.of_scalars(torch.tensor([score.reward for score in scores])),
            "correct": Column.of_scalars(torch.tensor([score.correct for score in scores])),
        }
        if self._has_parts:
            columns[REWARD_PARTS] = Column.of_values([dict(score.parts) for score in scores])
        return columns

    def close(self) -> None:
        """Cancel pending scores and end threads and children; a hanging remote scorer is left behind. Idempotent."""
        with contextlib.suppress(queue.Empty):
            while True:
                work = self._work.get_nowait()
                if work is not None:
                    work.scored.cancel()
        for _ in range(self._num_threads):
            self._work.put(None)
        if isinstance(self._function, PooledReward):
            self._function.close()

    def _score_until_closed(self) -> None:
        while (work := self._work.get()) is not None:
            if not work.scored.set_running_or_notify_cancel():
                continue
            try:
                text = self._decoder.decode_response(work.response) if work.text is None else work.text
                drawn = (len(work.response), work.truncated, array("i", work.response).tobytes())
                prompt = self._decoder.decode_prompt(work.prompt)
                one = Response(prompt, text, work.ground_truth, work.task, *drawn, turns=work.turns)
                score = self._compared_with_nothing(work) or self._score_text(one)
                score.add_done_callback(partial(self._settle_work, work, one))
            except Exception as error:  # noqa: BLE001 - boundary of a thread: the caller of `result` raises it
                work.scored.set_exception(error)

    def _compared_with_nothing(self, work: _Work) -> "Future[Score] | None":
        """Return the score of a row without a ground truth, for which a built-in reward would call an empty reply
        right; NaN where nothing is scored."""
        if self._scores and (not self._compares or work.ground_truth.strip()):
            return None
        score: Future[Score] = Future()
        if not self._scores:
            score.set_result(Score(math.nan, correct=False))
        elif work.text is None or self._in_groups:
            score.set_result(Score(0.0, correct=False))
        else:
            score.set_exception(
                UserCodeFailed("the rollout gave no reward, and its row has no ground truth to compare with")
            )
        return score

    def _score_text(self, one: Response) -> "Future[Score]":
        if isinstance(self._function, PooledReward):
            return self._function.score(one)
        score: Future[Score] = Future()
        try:
            score.set_result(self._function(one))
        except Exception as error:  # noqa: BLE001 - as above
            score.set_exception(error)
        return score

    def _settle_work(self, work: _Work, one: Response, done: "Future[Score]") -> None:
        try:
            score, failure = self._outcome(done)
            texts, turns = (one.prompt, one.response, one.ground_truth), score.turn_rewards
            parts = {**means_of_turns(turns), **score.parts, **work.parts}
            work.scored.set_result(ScoredResponse(*texts, score.reward, score.correct, parts, failure, turns))
        except Exception as error:  # noqa: BLE001 - as above
            work.scored.set_exception(error)

    def _outcome(self, done: "Future[Score]") -> tuple[Score, str]:
        """Return the score, and why there is none, or ""."""
        try:
            score = done.result()
        except UserCodeFailed as error:  # costs one sample, not the run
            self._warnings.log_warning(f"{error}; the response has no weight")
            self._failed(str(error))
            self._count_failure(error)
            return Score(math.nan, correct=False), str(error)
        self._failures = 0
        return score, ""

    def _count_failure(self, error: UserCodeFailed) -> None:
        """Raise after too many failures in a row: the reward is broken, or its server gone."""
        with self._counting:
            self._failures += 1
            if 0 < self._most_failures <= self._failures:
                raise UserCodeFailed(
                    f"no score for {self._failures} responses in a row (reward.max_failures_in_a_row), for the "
                    f"last one because {error}; correct the reward and resume"
                )


def means_of_turns(rewards: Sequence[float]) -> dict[str, float]:
    """Return the rewards of the first turns as parts of a reward: the metrics `reward/turn_1_mean` ..."""
    return {f"turn_{turn}": reward for turn, reward in enumerate(rewards[:_SHOWN_TURNS], 1)}


def turn_rewards_column(rollouts: Sequence[FinishedRollout], scores: Sequence[ScoredResponse]) -> Column:
    """Return the column `turn_rewards`, float64 [number of turns] each, since it is summed: with one reward, it is the
    last turn's; NaN where scoring failed. A rollout that drew nothing has one turn."""
    rows = []
    for rollout, score in zip(rollouts, scores, strict=True):
        number = max(1, rollout.num_trained_turns)
        if math.isnan(score.reward):
            turns: Sequence[float] = [math.nan] * number
        else:
            turns = score.turn_rewards or [*[0.0] * (number - 1), score.reward]
        assert len(turns) == number, f"{len(turns)} rewards for {number} turns"
        rows.append(torch.tensor(turns, dtype=torch.float64))
    return Column.of_rows(rows)


def no_rewards(where: str, why: str) -> UserCodeFailed:
    """Return the error for responses of which none could be scored; `why`: the last one's reason."""
    return UserCodeFailed(f"{where}: none of its responses could be scored; {why}; correct the reward and resume")


# Rewards of whole groups (`reward.group_function`): tournaments, rankings, diversity.
#
#     responses of a group are scored one by one -> all are there -> the user's function sees them -> their rewards
#
# Called by a rollout's outbox once all members of a group are there. The function runs in child processes,
# `reward.concurrency` groups at a time.

_CUT = "the others of its group were put before this process was restarted"


class GroupReward:
    """A group function behind a pool of children; the constructor raises as `PooledReward.until_ready` does. `failed`
    is called with one line for each group without rewards."""

    def __init__(self, config: RewardConfig, *, group_size: int, failed: Callable[[str], None]) -> None:
        self._group_size = group_size
        self._failed = failed
        self._warnings = RepeatedWarnings(logger)
        self._pool = GroupPool(config)
        self._pool.until_ready()

    def reward_group(
        self, task: str, rollouts: Sequence[FinishedRollout], scores: Sequence[ScoredResponse]
    ) -> "Future[Sequence[ScoredResponse]]":
        """Have the function reward a group; `task` is the data row, JSON.

        Members that drew nothing or have no reward of their own are left as they are. If the function fails, no member
        has a reward, as when `reward.function` fails. The same goes for a partial group, which a crash in the middle of
        a put may leave behind.
        """
        seen = [k for k, one in enumerate(scores) if not one.failure and len(rollouts[k].log_probs_A)]
        if not seen or len(scores) < self._group_size:
            cut: Future[Sequence[ScoredResponse]] = Future()
            cut.set_result(_changed(scores, seen, _CUT))
            return cut
        first = scores[0]
        members = [_member(rollouts[k], scores[k]) for k in seen]
        token_ids = [array("i", rollouts[k].drawn.tolist()).tobytes() for k in seen]
        pending = self._pool.reward(first.prompt, first.ground_truth, task, members, token_ids)

        def settled(done: "Future[list[float]]") -> Sequence[ScoredResponse]:
            try:
                return _changed(scores, seen, done.result())
            except UserCodeFailed as error:  # costs one group, not the run
                self._warnings.log_warning(f"{error}; its responses have no weight")
                self._failed(str(error))
                return _changed(scores, seen, str(error))

        return converted(pending, settled)

    def close(self) -> None:
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
    """Return the scores with the rewards given to those at `seen`, or the reason why there are none."""
    changed = list(scores)
    for k, reward in zip(seen, [nan] * len(seen) if isinstance(given, str) else given, strict=True):
        changed[k] = replace(scores[k], reward=reward, turn_rewards=())
        if isinstance(given, str):
            changed[k] = replace(changed[k], correct=False, failure=given)
    return changed
