"""Scoring threads: what a slow reward may hold up, and what not."""

import threading
from concurrent.futures import CancelledError
from pathlib import Path

import pytest
import torch

from launcher.config import load_config
from launcher.recipes import find_recipe
from workers.config import RewardConfig
from workers.rewards.base import Score
from workers.rewards.scorer import Scorer
from workers.tokenizer import load_tokenizer

DEADLINE_S = 20
PROMPT, RESPONSE = torch.tensor([3]), torch.tensor([4])


@pytest.fixture
def scorer() -> Scorer:
    return Scorer(
        RewardConfig(function="exact"), load_tokenizer(Path(load_config(find_recipe("quickstart")).model.path))
    )


def test_close_waits_for_no_reward_and_cancels_what_is_not_begun(scorer: Scorer) -> None:
    begun, released = threading.Semaphore(0), threading.Event()

    def slow(prompt: str, response: str, answer: str) -> Score:
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
    def broken(prompt: str, response: str, answer: str) -> Score:
        raise ZeroDivisionError

    scorer._function = broken
    with pytest.raises(ZeroDivisionError):
        scorer.score_all([PROMPT], [RESPONSE], ["-"])
    scorer.close()


def test_cancelled_answer_says_so(scorer: Scorer) -> None:
    released = threading.Event()
    scorer._function = lambda *_: Score(float(released.wait(DEADLINE_S)), True)
    futures = [scorer.submit(PROMPT, RESPONSE, "-") for _ in range(5)]
    scorer.close()
    released.set()
    with pytest.raises(CancelledError):
        futures[-1].result(DEADLINE_S)
