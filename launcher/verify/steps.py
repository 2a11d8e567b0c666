"""Foundations and checks of steps for `asyncflow verify`. Pure.

First the outcome of a check, and which steps are complete, by which lineage. Then the checks of steps: are all there,
and did the weights see what the ledger says (metrics, optimizer updates, checkpoints)?

A run writes a step's updates while it trains, then its ledger lines at once, then its metrics. So a crash leaves at
most one step in part, which no checkpoint has: `--resume` cuts it.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from asyncflow.run_files import checkpoint_step
from launcher.verify.records import RunRecords, SavedCheckpoint, StepLine, UpdateLine
from workers.records.ledger_file import DeadLetterLine, FilteredLine, ReplacedLine, TrainedLine

_SHOWN = 12


@dataclass(frozen=True)
class Check:
    """The outcome of one check.

    Attributes:
        says: what was found, in words, if there are no problems.
        problems: what is wrong, with file:line, step or group.
        notes: what was not checked, or is worth knowing.
    """

    name: str
    says: str
    problems: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        return not self.problems

    @property
    def outcome(self) -> str:
        """What was found; for a failed check only the number of problems, since `says` tells what should hold."""
        number = len(self.problems)
        return self.says if self.ok else f"{number} problem{'s' if number > 1 else ''}"

    def as_lines(self) -> list[str]:
        """Return lines for a person; only the first problems are shown."""
        hidden = len(self.problems) - _SHOWN
        rest = [f"      ... and {hidden} more"] if hidden > 0 else []
        return [
            f"{'ok   ' if self.ok else 'WRONG'} {self.name}: {self.outcome}",
            *(f"      {problem}" for problem in self.problems[:_SHOWN]),
            *rest,
            *(f"      note: {note}" for note in self.notes),
        ]


def named(numbers: Iterable[int]) -> str:
    """Return numbers as text with ranges for neighbours: `1-3, 7`."""
    parts: list[str] = []
    ordered = sorted(set(numbers))
    for number in ordered:
        if parts and number - 1 == int(parts[-1].rpartition("-")[2]):
            parts[-1] = f"{parts[-1].partition('-')[0]}-{number}"
        else:
            parts.append(str(number))
    shown = ", ".join(parts[:_SHOWN])
    return f"{shown}, ... ({len(ordered)} in all)" if len(parts) > _SHOWN else shown


@dataclass(frozen=True)
class CompleteSteps:
    """The lines of steps 1 to `last`, the last complete step. `partial` is a step after it with some lines; 0: none."""

    records: RunRecords
    last: int
    partial: int = 0

    @staticmethod
    def from_records(records: RunRecords) -> "CompleteSteps":
        """Find the complete steps. The last one may be partial, unless a checkpoint covers it."""
        steps = CompleteSteps(records, max(_steps(records), default=0))
        saved = max((one.step for one in records.checkpoints if not one.problem), default=0)
        if steps.last > saved and not steps._is_complete(steps.last):
            return CompleteSteps(records, steps.last - 1, steps.last)
        return steps

    @cached_property
    def trained(self) -> list[tuple[int, TrainedLine]]:
        """Ledger lines of trained groups, numbered."""
        return [one for one in self.records.ledger.trained if one[1].step <= self.last]

    @cached_property
    def dead_letters(self) -> list[tuple[int, DeadLetterLine]]:
        return [one for one in self.records.ledger.dead_letters if one[1].step <= self.last]

    @cached_property
    def filtered(self) -> list[tuple[int, FilteredLine]]:
        return [one for one in self.records.ledger.filtered if one[1].step <= self.last]

    @cached_property
    def replaced(self) -> list[tuple[int, ReplacedLine]]:
        """Ledger lines of groups that others replaced, in the file's order."""
        return sorted([*self.dead_letters, *self.filtered], key=lambda one: one[0])

    @cached_property
    def updates(self) -> list[tuple[int, UpdateLine]]:
        return [one for one in self.records.updates.lines if one[1].step <= self.last]

    @cached_property
    def metrics(self) -> Mapping[int, StepLine]:
        """Step -> its line in the metrics, the first one if there are several."""
        # Reversed, so that the first of several lines wins; `check_metrics` reports the others.
        return {line.step: line for _, line in reversed(self.records.metrics.lines) if line.step <= self.last}

    @cached_property
    def by_step(self) -> Mapping[int, Sequence[tuple[int, TrainedLine]]]:
        """Step -> its ledger lines of trained groups, numbered."""
        found: dict[int, list[tuple[int, TrainedLine]]] = defaultdict(list)
        for number, line in self.trained:
            found[line.step].append((number, line))
        return found

    @cached_property
    def lineages(self) -> Mapping[int, int]:
        """Step -> the lineage that trained it, by majority of its lines."""
        counts: dict[int, Counter[int]] = defaultdict(Counter)
        for _, line in self.trained:
            counts[line.step][line.lineage] += 1
        return {step: count.most_common(1)[0][0] for step, count in sorted(counts.items())}

    def num_updates(self, step: int) -> int:
        """Return the number of updates of steps 1 to `step` according to the metrics."""
        return sum(line.num_updates for line in self.metrics.values() if line.step <= step)

    def ledger_place(self, number: int) -> str:
        """Return `file:line` of a ledger line."""
        return self.records.ledger.file.describe_place(number)

    def _is_complete(self, step: int) -> bool:
        groups = {line.group for _, line in self.by_step.get(step, ())}
        made = sum(line.step == step for _, line in self.updates)
        line = self.metrics.get(step)
        return line is not None and made >= line.num_updates and len(groups) >= self._batch

    @property
    def _batch(self) -> int:
        return self.records.config.schedule.rollout_batch_size


def check_steps(steps: CompleteSteps) -> Check:
    """Every step exists, with a whole batch of groups, all of one lineage, and lineages never go back."""
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
        why = "the run is working on it" if steps.records.live else "the run ended in it; a resume trains it again"
        notes.append(f"step {steps.partial} is not recorded in full: {why}")
    num_lineages = len(set(steps.lineages.values()))
    says = f"{steps.last} steps of {batch} groups, by {num_lineages} start{'s' if num_lineages != 1 else ''}"
    return Check("steps", says, tuple(problems), tuple(notes))


def check_metrics(steps: CompleteSteps) -> Check:
    """Every step has one line, in order, that agrees with its ledger lines."""
    schedule = steps.records.config.schedule
    file = steps.records.metrics
    problems = []
    counts = Counter(line.step for _, line in file.lines)
    absent = [step for step in steps.by_step if step not in steps.metrics]
    if absent:
        problems.append(f"{file.path}: no line for steps {named(absent)}")
    before = 0
    for number, line in file.lines:
        if line.step > steps.last:
            continue
        if line.step <= before:
            again = "again" if counts[line.step] > 1 else f"after step {before}"
            problems.append(f"{file.describe_place(number)}: step {line.step} {again}")
        before = max(before, line.step)
        if line.samples != schedule.step_rows:
            problems.append(f"{file.describe_place(number)}: {line.samples} samples, not {schedule.step_rows}")
        if line.lineage != steps.lineages.get(line.step, line.lineage):
            problems.append(
                f"{file.describe_place(number)}: step {line.step} is of lineage {line.lineage}, but the ledger says "
                f"{steps.lineages[line.step]}"
            )
        oldest = max((trained.staleness for _, trained in steps.by_step.get(line.step, ())), default=None)
        if oldest is not None and oldest != line.staleness_max:
            problems.append(
                f"{file.describe_place(number)}: staleness up to {line.staleness_max}, but the ledger says {oldest}"
            )
    return Check("metrics", f"one line for each of {len(steps.metrics)} steps", tuple(problems))


def check_updates(steps: CompleteSteps) -> Check:
    """Every update of every step was made once, and the engine counted no others."""
    file = steps.records.updates
    problems = []
    made = Counter((line.step, line.update) for _, line in steps.updates)
    for (step, update), count in sorted(made.items()):
        if count > 1:
            problems.append(f"step {step}: update {update} was made {count} times")
    for step, line in sorted(steps.metrics.items()):
        missing = [update for update in range(1, line.num_updates + 1) if (step, update) not in made]
        if missing:
            problems.append(f"step {step}: update {named(missing)} of {line.num_updates} was not made")
    # The engine's counter is saved in checkpoints, so it shows updates that were made but not recorded, or lost.
    for total, (number, update_line) in enumerate(steps.updates, start=1):
        where = f"{file.describe_place(number)}: update {update_line.update} of step {update_line.step}"
        metrics = steps.metrics.get(update_line.step)
        if metrics is not None and not 1 <= update_line.update <= metrics.num_updates:
            problems.append(f"{where}: the metrics record {metrics.num_updates} for that step")
        if update_line.lineage != steps.lineages.get(update_line.step, update_line.lineage):
            problems.append(f"{where}: lineage {update_line.lineage}, not that of its step in the ledger")
        if update_line.optimizer_updates != total:
            problems.append(f"{where}: the engine counts {update_line.optimizer_updates} updates, the file {total}")
    void = [step for step, line in steps.metrics.items() if line.grad_norm is None]
    notes = [f"steps {named(void)}: a gradient was not finite, so that update changed no weight"] if void else []
    return Check("updates", f"{len(steps.updates)} optimizer updates, each once", tuple(problems), tuple(notes))


def check_checkpoints(steps: CompleteSteps) -> Check:
    """Every checkpoint is of a step in the ledger, and holds as many updates as the steps up to it made."""
    checkpoints = steps.records.checkpoints
    problems = [problem for one in checkpoints for problem in _problems(one, steps)]
    held = [one.step for one in checkpoints if not one.problem]
    says = f"of steps {named(held)}, with as many updates as those steps made" if held else "none"
    return Check("checkpoints", says, tuple(problems))


def _out_of_order(steps: CompleteSteps) -> list[str]:
    problems = []
    before = None
    for number, line in steps.trained:
        if steps.lineages[line.step] != line.lineage:
            problems.append(
                f"{steps.ledger_place(number)}: group {line.group} of step {line.step} is of lineage {line.lineage}, "
                f"but its step of {steps.lineages[line.step]}"
            )
        if before is not None and line.step < before:
            problems.append(f"{steps.ledger_place(number)}: step {line.step} comes after step {before}")
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


def _problems(one: SavedCheckpoint, steps: CompleteSteps) -> Iterator[str]:
    if one.problem:
        yield f"{one.path}: {one.problem}"
        return
    if checkpoint_step(one.path) != one.step:
        yield f"{one.path}: is of step {one.step}"
    if one.step > steps.last:
        yield f"{one.path}: is of step {one.step}, but the ledger ends with step {steps.last}"
        return
    if one.lineage != steps.lineages.get(one.step, one.lineage):
        yield f"{one.path}: is of lineage {one.lineage}, but step {one.step} is of {steps.lineages[one.step]}"
    expected = {
        "the metrics": steps.num_updates(one.step),
        "updates.jsonl": sum(line.step <= one.step for _, line in steps.updates),
    }
    for source, made in expected.items():
        if one.updates != made:
            yield f"{one.path}: its state counts {one.updates} optimizer updates, {source} {made}"
    critic = sum(line.critic_num_updates for step, line in steps.metrics.items() if step <= one.step)
    if (one.critic_updates or 0) != critic:
        yield f"{one.path}: its critic counts {one.critic_updates or 0} optimizer updates, the metrics {critic}"
