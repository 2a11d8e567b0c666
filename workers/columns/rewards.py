"""Task `rewards` in a role of its own; inside rollout every answer is scored as it ends (`workers.outbox`)."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from asyncflow.errors import UserCodeFailed
from tq.batch import Column, PackedBatch
from workers.columns.column_tasks import ColumnTask, sequences_of
from workers.context import WorkerContext
from workers.engines.base import TrainEngine
from workers.engines.load import load_reward_model
from workers.rewards.base import LARGEST_REWARD
from workers.rewards.config import RewardModelConfig
from workers.rewards.scorer import ScoredAnswer, Scorer
from workers.tokenizer import load_tokenizer
from workers.user_function import excerpt


class Rewards(ColumnTask):
    """Scores answers with the reward function, and with the reward model if there is one."""

    def __init__(self, context: WorkerContext, _: TrainEngine | None = None) -> None:
        config = context.config
        self._config = config.reward.model
        self.num_rows = config.schedule.n_samples_per_prompt
        if self._config is not None:
            self._model = load_reward_model(self._config, device=context.device)
            self.num_rows = self._config.micro_batch_size
        tokenizer = load_tokenizer(Path(config.model.path))
        self._scorer = Scorer(config.reward, tokenizer, failed=context.reward_failed)

    def compute(self, batch: PackedBatch, _: int) -> Mapping[str, Column]:
        """Return `rewards` and `correct` from `prompts`, `responses`, `answers`.

        Raises:
            UserCodeFailed: the reward model gave an answer no finite number.
        """
        prompts, responses = (list(batch[name].rows()) for name in ("prompts", "responses"))
        answers = batch["answers"].texts()
        if self._config is None:
            return self._scorer.columns(self._scorer.score_all(prompts, responses, answers))
        futures = [self._scorer.submit(*row) for row in zip(prompts, responses, answers, strict=True)]
        model_scores = self._model.scores(sequences_of(batch)).tolist()  # the function is called meanwhile
        pairs = zip((future.result() for future in futures), model_scores, strict=True)
        return self._scorer.columns([_combined(scored, score, self._config) for scored, score in pairs])

    def close(self) -> None:
        """End scoring threads and children."""
        self._scorer.close()


def _combined(scored: ScoredAnswer, model_score: float, config: RewardModelConfig) -> ScoredAnswer:
    """Return the answer with the weighted sum of both as its reward; none where the function failed. Whether the
    response is right is the function's word alone."""
    if scored.failure:
        return scored
    reward = config.weight * model_score + config.function_weight * scored.reward
    if not abs(reward) <= LARGEST_REWARD:
        raise UserCodeFailed(
            f"reward.model: {config.path} scored the response {excerpt(scored.response)} with {model_score:g}, which "
            f"is no reward; look at the model, or set reward.model.dtype to float32"
        )
    return replace(scored, reward=reward)
