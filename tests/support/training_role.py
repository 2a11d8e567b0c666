"""What a step's trainer tells in tests: rows are counted, updates written down, nothing is published."""

from tq.columns import PackedBatch
from workers.records.ledger import ledger_lines
from workers.records.step_record import StepRecord


class CountingRole:
    """A `workers.trainer.step_trainer.TrainingRole`.

    Attributes:
        updates: step, number and count of the policy's updates.
        ended: what became of the steps: `publish 3`, `record 3`.
    """

    def __init__(self) -> None:
        self.updates: list[tuple[int, int, int]] = []
        self.ended: list[str] = []

    def take_round(self, batch: PackedBatch, record: StepRecord) -> None:
        if len(batch):
            step = record.step
            lines = ledger_lines(batch, step=step, admitted_step=step, lineage=0, time_s=0.0)
            record.add_rows(batch, lines, admitted_step=step)

    def commit_step(self, record: StepRecord, stopped: bool) -> bool:
        return not stopped

    def before_update(self) -> float:
        return 0.0

    def after_update(self, step: int, number: int, optimizer_updates: int) -> None:
        self.updates.append((step, number, optimizer_updates))

    def publish(self, record: StepRecord) -> None:
        self.ended.append(f"publish {record.step}")

    def record_step(self, record: StepRecord) -> None:
        self.ended.append(f"record {record.step}")
