"""Scores answers in threads, so that a slow reward does not hold up generation."""

import contextlib
import logging
import queue
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from asyncflow.errors import UserCodeFailed
from tq.batch import Column
from workers.rewards.base import Score
from workers.rewards.config import RewardConfig
from workers.rewards.isolated import IsolatedReward
from workers.rewards.load import load_reward
from workers.rewards.remote import is_url
from workers.tokenizer import TextDecoder

logger = logging.getLogger(__name__)

_THREADS = 4
_MANY = 64
_Work = tuple["Future[ScoredAnswer]", tuple[int, ...], tuple[int, ...], str]


@dataclass(frozen=True)
class ScoredAnswer:
    """One answer with its texts.

    Attributes:
        prompt, response, answer: what was asked, what came, what is right.
        reward: of the response.
        correct: whether it is exactly right.
    """

    prompt: str
    response: str
    answer: str
    reward: float
    correct: bool


class Scorer:
    """Decodes and scores; close it to end its threads.

    They are no executor's: at its end a process would wait for those, and a user's function may take its time.
    """

    def __init__(self, config: RewardConfig, tokenizer: PreTrainedTokenizerBase) -> None:
        self._function = load_reward(config)
        self._most_failures = config.max_failures_in_a_row
        self._failures = 0
        self._counting = threading.Lock()
        self._decoder = TextDecoder(tokenizer)
        self._work: queue.SimpleQueue[_Work | None] = queue.SimpleQueue()
        self._num_threads = config.concurrency or (_MANY if is_url(config.function) else _THREADS)
        for number in range(self._num_threads):
            threading.Thread(target=self._run, name=f"score-{number}", daemon=True).start()

    def submit(self, prompt_P: Tensor, response_R: Tensor, answer: str) -> "Future[ScoredAnswer]":
        """Score one answer.

        Args:
            prompt_P, response_R: int64 tokens.
            answer: reference answer.
        """
        future: Future[ScoredAnswer] = Future()
        self._work.put((future, tuple(prompt_P.tolist()), tuple(response_R.tolist()), answer))
        return future

    def score_all(self, prompts: list[Tensor], responses: list[Tensor], answers: list[str]) -> list[ScoredAnswer]:
        """Score several answers and wait for all."""
        rows = zip(prompts, responses, answers, strict=True)
        return [future.result() for future in [self.submit(*row) for row in rows]]

    def close(self) -> None:
        """Cancel what is not begun and end the threads; a reward that hangs is left behind. Idempotent."""
        with contextlib.suppress(queue.Empty):
            while True:
                work = self._work.get_nowait()
                if work is not None:
                    work[0].cancel()
        for _ in range(self._num_threads):
            self._work.put(None)
        if isinstance(self._function, IsolatedReward):
            self._function.close()

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            future, prompt, response, answer = work
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(self._score(prompt, response, answer))
            except Exception as error:  # noqa: BLE001 - the boundary of a thread: whoever asks for the result raises it
                future.set_exception(error)

    def _score(self, prompt: tuple[int, ...], response: tuple[int, ...], answer: str) -> ScoredAnswer:
        prompt_text, response_text = self._decoder.prompt(prompt), self._decoder.response(response)
        score = self._score_text(prompt_text, response_text, answer)
        return ScoredAnswer(prompt_text, response_text, answer, score.reward, score.correct)

    def _score_text(self, prompt: str, response: str, answer: str) -> Score:
        try:
            score = self._function(prompt, response, answer)
        except UserCodeFailed as error:  # costs one sample, not the run
            logger.warning("%s; counted as 0", error)
            self._count_failure(error)
            return Score(0.0, False)
        self._failures = 0
        return score

    def _count_failure(self, error: UserCodeFailed) -> None:
        """Raise if nothing was scored for too long: the reward is broken, or its server gone."""
        with self._counting:
            self._failures += 1
            if 0 < self._most_failures <= self._failures:
                raise UserCodeFailed(
                    f"no score for {self._failures} answers in a row (reward.max_failures_in_a_row), for the "
                    f"last one because {error}; correct the reward and resume"
                )


def score_columns(scores: Sequence[ScoredAnswer]) -> dict[str, Column]:
    """Return the outputs of task `rewards`: `rewards` float32 [N], `correct` bool [N]."""
    return {
        "rewards": Column.of_scalars(torch.tensor([score.reward for score in scores])),
        "correct": Column.of_scalars(torch.tensor([score.correct for score in scores])),
    }
