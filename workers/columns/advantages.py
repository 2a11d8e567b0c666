"""Task `compute_advantages_and_returns`: the algorithm's advantages of whole groups."""

from collections.abc import Mapping

from tq.batch import Column, PackedBatch
from workers.algorithms.load import load_algorithm
from workers.columns.task import ColumnTask
from workers.context import WorkerContext
from workers.engines.base import TrainEngine

_GROUPS = 8


class Advantages(ColumnTask):
    """Compares the answers of each prompt."""

    def __init__(self, context: WorkerContext, _: TrainEngine | None = None) -> None:
        self._algorithm = load_algorithm(context.config.algorithm, context.config.rollout)
        self._group_size = context.config.schedule.n_samples_per_prompt
        self.num_rows = self._group_size * _GROUPS

    def compute(self, batch: PackedBatch, _: int) -> Mapping[str, Column]:
        """Return what the algorithm makes of whole groups, at least `advantages`."""
        return self._algorithm.advantages(batch, group_size=self._group_size)

    def close(self) -> None:
        """Nothing is held."""
