"""Tasks that ask a model for log-probabilities of answers: `ref_log_probs`."""

from collections.abc import Mapping

from tq.batch import Column, PackedBatch
from workers.columns.task import ColumnTask
from workers.context import WorkerContext
from workers.engines.base import TrainEngine
from workers.packing import sequences_of
from workers.reference import Reference


class ReferenceLogProbs(ColumnTask):
    """Log-probabilities under the reference policy."""

    def __init__(self, context: WorkerContext, engine: TrainEngine | None = None) -> None:
        config = context.config
        self.num_rows = config.ref.micro_batch_size
        if engine is not None:
            self.num_rows = min(self.num_rows, config.actor.micro_batch_size)
        self._reference = Reference(context)

    def compute(self, batch: PackedBatch, step: int) -> Mapping[str, Column]:
        """Return `ref_log_probs`, float32 per answer token, from `prompts` and `responses`."""
        log_probs_A = self._reference.log_probs(sequences_of(batch), step=step)
        return {"ref_log_probs": Column(log_probs_A.cpu(), batch["responses"].lengths)}

    def close(self) -> None:
        """Leave the weight agent."""
        self._reference.close()
