"""What a column task is: from columns of rows it computes new ones. Nothing here knows which.

One object serves a role of its own (`workers.scoring`) or runs inside the actor; `workers.columns.chain` runs it in
both. To add a task: a node in the algorithm's graph, and a factory in `workers.columns.registry`.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping

from tq.batch import Column, PackedBatch


class ColumnTask(ABC):
    """Computes the outputs of one task of the graph. Used by one thread."""

    num_rows: int
    """Most rows at a time; for a task over whole groups a multiple of their size."""
    collective = False
    """All ranks of the gang compute together, equally often; one without rows is given a batch without columns."""
    version: int | None = None
    """Step of the weights that it computes with, if rows are handed out only to who has certain ones."""

    @abstractmethod
    def compute(self, batch: PackedBatch, step: int) -> Mapping[str, Column]:
        """Return the task's output columns.

        Args:
            batch: at least the task's input columns; N >= 1 rows unless `collective`, of whole groups if it says so.
            step: that the rows belong to.
        """

    def take_weights(self, step: int) -> None:
        """Wait for weights of `step` or later and compute with them from now on; returns early when the run stops.

        Raises:
            WeightSyncError: they do not come.
        """
        raise AssertionError(f"{type(self).__name__} depends on no weights")

    @abstractmethod
    def close(self) -> None:
        """Let go of what it holds."""
