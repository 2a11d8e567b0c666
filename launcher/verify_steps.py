"""Which steps of a run are complete, by which lineage: what the checks of `asyncflow verify` build on. Pure.

Updates are written while a step is trained, then its ledger lines at once, then its metrics. So a crash leaves at most
one step in part, and nothing that was saved: `--resume` cuts it.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from launcher.verify_check import Check
from launcher.verify_records import RunRecords, StepLine, UpdateLine
from workers.ledger_file import FilteredLine, QuarantinedLine, ReplacedLine, TrainedLine


@dataclass(frozen=True)
class CompleteSteps:
    """The lines of steps 1 .. `last`.

    Attributes:
        records: of the run.
        last: the last complete step.
        partial: a step after it of which something is there; 0: none.
    """

    records: RunRecords
    last: int
    partial: int = 0

    @staticmethod
    def of(records: RunRecords) -> "CompleteSteps":
        """Find them: the last step may be there in part, unless a checkpoint covers it."""
        steps = CompleteSteps(records, max(_steps(records), default=0))
        saved = max((one.step for one in records.checkpoints if not one.problem), default=0)
        if steps.last > saved and not steps._complete(steps.last):
            return CompleteSteps(records, steps.last - 1, steps.last)
        return steps

    @cached_property
    def trained(self) -> list[tuple[int, TrainedLine]]:
        """Ledger lines of trained groups."""
        return [one for one in self.records.ledger.trained if one[1].step <= self.last]

    @cached_property
    def quarantined(self) -> list[tuple[int, QuarantinedLine]]:
        """Ledger lines of groups in quarantine."""
        return [one for one in self.records.ledger.quarantined if one[1].step <= self.last]

    @cached_property
    def filtered(self) -> list[tuple[int, FilteredLine]]:
        """Ledger lines of groups that were filtered out."""
        return [one for one in self.records.ledger.filtered if one[1].step <= self.last]

    @cached_property
    def replaced(self) -> list[tuple[int, ReplacedLine]]:
        """Ledger lines of groups that others replaced, in the file's order."""
        return sorted([*self.quarantined, *self.filtered], key=lambda one: one[0])

    @cached_property
    def updates(self) -> list[tuple[int, UpdateLine]]:
        """Lines of optimizer updates."""
        return [one for one in self.records.updates.lines if one[1].step <= self.last]

    @cached_property
    def metrics(self) -> Mapping[int, StepLine]:
        """Step -> its line in the metrics; of several the first."""
        return {line.step: line for _, line in reversed(self.records.metrics.lines) if line.step <= self.last}

    @cached_property
    def by_step(self) -> Mapping[int, Sequence[tuple[int, TrainedLine]]]:
        """Step -> its ledger lines of trained groups."""
        found: dict[int, list[tuple[int, TrainedLine]]] = defaultdict(list)
        for number, line in self.trained:
            found[line.step].append((number, line))
        return found

    @cached_property
    def lineages(self) -> Mapping[int, int]:
        """Step -> the lineage that trained it; where lines differ, most of them."""
        counts: dict[int, Counter[int]] = defaultdict(Counter)
        for _, line in self.trained:
            counts[line.step][line.lineage] += 1
        return {step: count.most_common(1)[0][0] for step, count in sorted(counts.items())}

    def num_updates(self, step: int) -> int:
        """Return how many updates the metrics say that steps 1 .. `step` made."""
        return sum(line.num_updates for line in self.metrics.values() if line.step <= step)

    def where(self, number: int) -> str:
        """Return `file:line` of a ledger line."""
        return self.records.ledger.file.where(number)

    def _complete(self, step: int) -> bool:
        groups = {line.group for _, line in self.by_step.get(step, ())}
        made = sum(line.step == step for _, line in self.updates)
        line = self.metrics.get(step)
        return line is not None and made >= line.num_updates and len(groups) >= self._batch

    @property
    def _batch(self) -> int:
        return self.records.config.schedule.rollout_batch_size


def check_steps(steps: CompleteSteps) -> Check:
    """Every step is there, with as many groups as a step has, all of one lineage; later steps are of no older one."""
    batch = steps.records.config.schedule.rollout_batch_size
    problems = []
    expected = 1
    for step, lines in sorted(steps.by_step.items()):
        if step > expected:
            problems.append(f"{_steps_text(expected, step - 1)}: not in the ledger")
        expected = step + 1
        groups = {line.group for _, line in lines}
        if len(groups) != batch or len(lines) != batch:
            repeated = f" in {len(lines)} lines" if len(lines) != len(groups) else ""
            problems.append(f"step {step}: {len(groups)} groups{repeated}, not {batch}")
    if steps.last >= expected:
        problems.append(f"{_steps_text(expected, steps.last)}: not in the ledger")
    problems += _out_of_order(steps)
    notes = []
    if steps.partial:
        why = "the run is at it" if steps.records.live else "the run ended in it; a resume trains it again"
        notes.append(f"step {steps.partial} is not recorded in full: {why}")
    num_lineages = len(set(steps.lineages.values()))
    says = f"{steps.last} steps of {batch} groups, by {num_lineages} start{'s' if num_lineages != 1 else ''}"
    return Check("steps", says, tuple(problems), tuple(notes))


def _out_of_order(steps: CompleteSteps) -> list[str]:
    problems = []
    before = None
    for number, line in steps.trained:
        if steps.lineages[line.step] != line.lineage:
            problems.append(
                f"{steps.where(number)}: group {line.group} of step {line.step} is of lineage {line.lineage}, "
                f"its step of {steps.lineages[line.step]}"
            )
        if before is not None and line.step < before:
            problems.append(f"{steps.where(number)}: step {line.step} comes after step {before}")
        before = line.step
    newest = 0
    for step, lineage in steps.lineages.items():
        if lineage < newest:
            problems.append(f"step {step}: lineage {lineage} comes after lineage {newest}")
        newest = max(newest, lineage)
    return problems


def _steps(records: RunRecords) -> set[int]:
    trained = {line.step for _, line in records.ledger.trained}
    measured = {line.step for _, line in records.metrics.lines}
    return trained | measured | {line.step for _, line in records.updates.lines}


def _steps_text(first: int, last: int) -> str:
    return f"step {first}" if first == last else f"steps {first} to {last}"
