"""Scoring threads: what a slow reward may hold up, and what not."""

import math
import threading
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncflow.errors import UserCodeFailed
from launcher.config.load_config import load_config
from launcher.config.paths import find_recipe
from workers.data.tokenizer import load_tokenizer
from workers.rewards.base import Response, Score
from workers.rewards.scorer import Scorer
from workers.rows.finished import FinishedRollout
from workers.settings.rewards import RewardConfig

DEADLINE_S = 20
PROMPT, RESPONSE = torch.tensor([3]), torch.tensor([4])


def make_scorer(failures: list[str] | None = None, **settings: Any) -> Scorer:
    tokenizer = load_tokenizer(Path(load_config(find_recipe("quickstart")).model.path))
    told = [] if failures is None else failures
    return Scorer(RewardConfig.model_validate({"function": "exact"} | settings), tokenizer, failed=told.append)


@pytest.fixture
def scorer() -> Scorer:
    return make_scorer()


def test_close_waits_for_no_reward_and_cancels_what_is_not_begun(scorer: Scorer) -> None:
    begun, released = threading.Semaphore(0), threading.Event()

    def slow(_: Response) -> Score:
        begun.release()
        assert released.wait(DEADLINE_S)
        return Score(1.0, True)

    scorer._function = slow
    futures = [scorer.submit(PROMPT, RESPONSE, "-") for _ in range(9)]
    for _ in range(4):
        assert begun.acquire(timeout=DEADLINE_S)
    scorer.close()
    scorer.close()
    running = [future for future in futures if not future.cancelled()]
    assert len(running) == 4
    assert all(thread.daemon for thread in threading.enumerate() if thread.name.startswith("score-"))
    released.set()
    assert [future.result(DEADLINE_S).reward for future in running] == [1.0] * 4


def test_what_a_function_of_ours_raises_reaches_whoever_asks(scorer: Scorer) -> None:
    def broken(_: Response) -> Score:
        raise ZeroDivisionError

    scorer._function = broken
    with pytest.raises(ZeroDivisionError):
        scorer.submit(PROMPT, RESPONSE, "-").result()
    scorer.close()


def test_cancelled_response_says_so(scorer: Scorer) -> None:
    released = threading.Event()
    scorer._function = lambda *_: Score(float(released.wait(DEADLINE_S)), True)
    futures = [scorer.submit(PROMPT, RESPONSE, "-") for _ in range(5)]
    scorer.close()
    released.set()
    with pytest.raises(CancelledError):
        futures[-1].result(DEADLINE_S)


@pytest.mark.parametrize(("most", "ends"), [(3, True), (4, False), (0, False)])
def test_a_reward_that_fails_on_every_response_ends_the_run(most: int, ends: bool) -> None:
    failures: list[str] = []
    scorer = make_scorer(failures, concurrency=1, max_failures_in_a_row=most)
    outcomes = iter([None, None, 1.0, None, None, None, 1.0])

    def sometimes(_: Response) -> Score:
        if (reward := next(outcomes)) is None:
            raise UserCodeFailed("the server is gone")
        return Score(reward, True)

    scorer._function = sometimes
    futures = [scorer.submit(PROMPT, RESPONSE, "-") for _ in range(6)]
    scores = [future.result(DEADLINE_S) for future in futures[:5]]
    assert [score.failure for score in scores] == ["the server is gone"] * 2 + [""] + ["the server is gone"] * 2
    assert [math.isnan(score.reward) for score in scores] == [True, True, False, True, True]
    if ends:
        with pytest.raises(UserCodeFailed, match="no score for 3 responses in a row .*the server is gone; correct"):
            futures[5].result(DEADLINE_S)
    else:
        assert futures[5].result(DEADLINE_S).failure == "the server is gone"
    assert failures == ["the server is gone"] * 5
    scorer.close()


def ended(response: str) -> FinishedRollout:
    """Return a rollout of a function that gave no reward."""
    drawn = torch.ones(1)
    return FinishedRollout(
        0, 0, torch.tensor([3, 4]), [2], torch.tensor([0, 1], dtype=torch.uint8), -drawn, drawn.int(), truncated=True,
        response=response,
    )  # fmt: skip


@pytest.mark.parametrize("function", ["exact", "digits", "math"])
def test_a_rollout_without_reward_whose_row_has_no_ground_truth_is_a_failure_and_not_right(function: str) -> None:
    failures: list[str] = []
    scorer = make_scorer(failures, function=function)
    scored = scorer.score(ended(""), "").result(DEADLINE_S)
    assert math.isnan(scored.reward)
    assert (scored.correct, scored.failure) == (False, failures[0])
    assert "gave no reward" in scored.failure
    assert scorer.score(ended("8"), "8").result(DEADLINE_S).reward == 1.0
    scorer.close()


def test_nothing_is_right_where_there_is_no_ground_truth_and_groups_are_judged_as_a_whole() -> None:
    scorer = make_scorer(group_function="math:prod")
    for scored in (scorer.score(ended(""), ""), scorer.submit(PROMPT, torch.tensor([], dtype=torch.int64), " ")):
        scored_response = scored.result(DEADLINE_S)
        assert (scored_response.reward, scored_response.correct, scored_response.failure) == (0.0, False, "")
    scorer.close()
