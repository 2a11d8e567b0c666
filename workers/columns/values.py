"""Task `values`: what the critic expects of an answer before each of its tokens."""

from collections.abc import Mapping

from tq.batch import Column, PackedBatch
from workers.columns.task import ColumnTask
from workers.engines.base import ValueEngine
from workers.packing import sequences_of


class Values(ColumnTask):
    """Asks the critic that the process trains: rows of a step come before its update."""

    collective = True

    def __init__(self, engine: ValueEngine, *, num_rows: int) -> None:
        """Args:
        engine: the critic.
        num_rows: answers per forward.
        """
        self.num_rows = num_rows
        self._engine = engine

    def compute(self, batch: PackedBatch, _: int) -> Mapping[str, Column]:
        """Return `values`, float32 per answer token, from `prompts` and `responses`."""
        if not len(batch):
            self._engine.values(None)
            return {}
        return {"values": Column(self._engine.values(sequences_of(batch)).cpu(), batch["responses"].lengths)}

    def close(self) -> None:
        """The engine is the trainer's."""
