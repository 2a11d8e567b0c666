"""Scores answers in threads, so that a slow reward does not hold up generation."""

import logging
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from asyncflow.errors import AsyncFlowError
from tq.batch import Column
from workers.config import RewardConfig
from workers.rewards.base import Score
from workers.rewards.load import load_reward
from workers.tokenizer import TextDecoder

logger = logging.getLogger(__name__)

_THREADS = 4


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
    """Decodes and scores; close it to end its threads."""

    def __init__(self, config: RewardConfig, tokenizer: PreTrainedTokenizerBase) -> None:
        self._function = load_reward(config)
        self._decoder = TextDecoder(tokenizer)
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="score")

    def submit(self, prompt_P: Tensor, response_R: Tensor, answer: str) -> "Future[ScoredAnswer]":
        """Score one answer.

        Args:
            prompt_P, response_R: int64 tokens.
            answer: reference answer.
        """
        return self._threads.submit(self._score, tuple(prompt_P.tolist()), tuple(response_R.tolist()), answer)

    def score_all(self, prompts: list[Tensor], responses: list[Tensor], answers: list[str]) -> list[ScoredAnswer]:
        """Score several answers and wait for all."""
        rows = zip(prompts, responses, answers, strict=True)
        return [future.result() for future in [self.submit(*row) for row in rows]]

    def close(self) -> None:
        """End the threads; a reward that hangs is left behind."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _score(self, prompt: tuple[int, ...], response: tuple[int, ...], answer: str) -> ScoredAnswer:
        prompt_text, response_text = self._decoder.prompt(prompt), self._decoder.response(response)
        score = self._score_text(prompt_text, response_text, answer)
        return ScoredAnswer(prompt_text, response_text, answer, score.reward, score.correct)

    def _score_text(self, prompt: str, response: str, answer: str) -> Score:
        try:
            return self._function(prompt, response, answer)
        except AsyncFlowError as error:  # of the user's function: it costs one sample, not the run
            logger.warning("%s; counted as 0", error)
            return Score(0.0, False)


def score_columns(scores: Sequence[ScoredAnswer]) -> dict[str, Column]:
    """Return the outputs of task `rewards`: `rewards` float32 [N], `correct` bool [N]."""
    return {
        "rewards": Column.of_scalars(torch.tensor([score.reward for score in scores])),
        "correct": Column.of_scalars(torch.tensor([score.correct for score in scores])),
    }
