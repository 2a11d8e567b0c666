"""Task `rewards` in a role of its own; inside rollout every answer is scored as it ends (`workers.outbox`)."""

from collections.abc import Mapping
from pathlib import Path

from tq.batch import Column, PackedBatch
from workers.columns.task import ColumnTask
from workers.context import WorkerContext
from workers.engines.base import TrainEngine
from workers.rewards.scorer import Scorer, score_columns
from workers.tokenizer import load_tokenizer


class Rewards(ColumnTask):
    """Scores answers with the reward function."""

    def __init__(self, context: WorkerContext, _: TrainEngine | None = None) -> None:
        config = context.config
        self._scorer = Scorer(config.reward, load_tokenizer(Path(config.model.path)))
        self.num_rows = config.schedule.n_samples_per_prompt

    def compute(self, batch: PackedBatch, _: int) -> Mapping[str, Column]:
        """Return `rewards` and `correct` from `prompts`, `responses`, `answers`."""
        prompts, responses = (list(batch[name].rows()) for name in ("prompts", "responses"))
        return score_columns(self._scorer.score_all(prompts, responses, batch["answers"].texts()))

    def close(self) -> None:
        """End the scoring threads."""
        self._scorer.close()
