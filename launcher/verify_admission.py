"""Whether the trained groups are the ones that admission gives to each step: contiguous ids, none left out. Pure.

Admission is a pure function of what was trained or filtered out before a start and of the groups that were replaced
since, so it is played again for each start (lineage) whose steps survive, and says which step every id belongs to.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from launcher.verify_check import Check, named
from launcher.verify_steps import CompleteSteps
from tq.refill import AdmissionMark, Refill
from workers.admission.state import AdmissionState
from workers.ledger_file import ReplacedLine, TrainedLine

_NO_END = 2**62


@dataclass(frozen=True)
class Start:
    """The surviving steps of one lineage.

    Attributes:
        lineage: of them.
        first, last: step.
        trained, replaced: their ledger lines.
        before: groups that were in the weights that it began with, or filtered out before.
        state: admission, as it was in this lineage.
    """

    lineage: int
    first: int
    last: int
    trained: list[tuple[int, TrainedLine]]
    replaced: list[tuple[int, ReplacedLine]]
    before: frozenset[int]
    state: AdmissionState


def check_admission(steps: CompleteSteps) -> Check:
    """Every id below the newest one was trained, was replaced by another, or belongs to a step that is not over."""
    problems: list[str] = []
    start = None
    for start in _starts(steps):
        problems += [problem for one in start.trained for problem in _misplaced(one, start, steps)]
        problems += [problem for one in start.replaced for problem in _misnamed(one, start, steps)]
        problems += _left_out(start, steps)
    if start is None:
        return Check("admission", "no group was trained")
    ids = {line.group for _, line in steps.trained}
    given_up = ({line.group for _, line in start.replaced} | {line.group for _, line in steps.filtered}) - ids
    to_come = set(range(max(ids))) - ids - given_up if max(ids) < 2 * len(ids) + 2**20 else set()
    says = [f"ids 0 to {max(ids)}, in the steps that admission gives them"]
    says += [f"{len(to_come)} still to come ({named(to_come)})"] if to_come else []
    return Check("admission", "; ".join(says), tuple(problems))


def check_quarantine(steps: CompleteSteps) -> Check:
    """Name the groups that some task failed on too often, and what became of them."""
    trained = {line.group: line for _, line in steps.trained}
    notes = []
    for _, line in steps.quarantined:
        cause = f"after {line.deliveries} deliveries to {line.task}" if line.task else "nobody knows why any more"
        later = trained.get(line.group)
        again = f"; trained in step {later.step} after a resume" if later is not None else ""
        notes.append(
            f"group {line.group} of step {line.admitted_step} ({cause}), replaced by group {line.replaced_by}{again}"
        )
    return Check("quarantine", f"{len(notes)} groups" if notes else "no group", notes=tuple(notes))


def check_filtered(steps: CompleteSteps) -> Check:
    """Count the groups that were filtered out, each of which another one replaced; not every algorithm may do that."""
    number = len({line.group for _, line in steps.filtered})
    generated = number + len(steps.trained)
    share = f", {number / generated:.0%} of those that were generated" if number else ""
    algorithm = steps.records.config.algorithm
    problems: tuple[str, ...] = ()
    if number and not algorithm.filters_groups:
        first = steps.where(steps.filtered[0][0])
        problems = (f"{first}: groups were filtered out, but algorithm {algorithm.name} filters none",)
    return Check("filtered", f"{number or 'no'} group{'s' if number != 1 else ''}{share}", problems)


def _starts(steps: CompleteSteps) -> Iterator[Start]:
    schedule = steps.records.config.schedule
    by_lineage: dict[int, list[int]] = {}
    for step, lineage in steps.lineages.items():
        by_lineage.setdefault(lineage, []).append(step)
    for lineage, own in sorted(by_lineage.items()):
        first, last = min(own), max(own)
        before = frozenset(line.group for _, line in steps.trained if line.step < first)
        filtered = frozenset(line.group for _, line in steps.filtered if line.step < first)
        replaced = [one for one in steps.replaced if one[1].lineage == lineage]
        refills = [Refill(line.replaced_by, line.admitted_step, line.group) for _, line in replaced]
        mark = AdmissionMark(first - 1, last + 1, sorted(refills, key=lambda refill: refill.group))
        state = AdmissionState.from_mark(mark, schedule, last_step=_NO_END, trained=before, filtered=filtered)
        trained = [one for one in steps.trained if one[1].lineage == lineage]
        yield Start(lineage, first, last, trained, replaced, before | filtered, state)


def _misplaced(one: tuple[int, TrainedLine], start: Start, steps: CompleteSteps) -> Iterator[str]:
    number, line = one
    schedule = steps.records.config.schedule
    if line.group < 0 or line.group in start.before or line.group in start.state.replaced:
        return  # trained twice, or by the lineage that gave it up: said elsewhere
    where = f"{steps.where(number)}: group {line.group} of step {line.step}"
    belongs = start.state.step_of(line.group)
    if belongs != line.admitted_step:
        yield f"{where} was admitted for step {line.admitted_step}, it says; its id belongs to step {belongs}"
    metrics = steps.metrics.get(line.step)
    bound = schedule.staleness_bound if metrics is None else metrics.staleness_bound
    ahead = bound - schedule.lateness if schedule.lateness else 0
    if not line.step - schedule.lateness <= line.admitted_step <= line.step + ahead:
        yield f"{where} was admitted for step {line.admitted_step}, which is not within its reach"


def _misnamed(one: tuple[int, ReplacedLine], start: Start, steps: CompleteSteps) -> Iterator[str]:
    number, line = one
    where = f"{steps.where(number)}: group {line.group}, which was replaced,"
    if steps.lineages.get(line.step) != line.lineage:
        yield f"{where} is of lineage {line.lineage}, its step of {steps.lineages.get(line.step)}"
    if line.group in start.before or line.group < 0:
        yield f"{where} was trained or filtered out before this lineage began"
    elif start.state.step_of(line.group) != line.admitted_step:
        belongs = start.state.step_of(line.group)
        yield f"{where} was admitted for step {line.admitted_step}, it says; its id belongs to step {belongs}"
    if line.replaced_by <= line.group or line.replaced_by in start.before:
        yield f"{where} is replaced by group {line.replaced_by}, which is no new one"


def _left_out(start: Start, steps: CompleteSteps) -> Iterator[str]:
    """Yield the groups of steps that are over which were not trained."""
    trained = {line.group for _, line in start.trained}
    lateness = steps.records.config.schedule.lateness
    for step in steps.lineages:
        if start.first <= step <= start.last - lateness:
            missing = [one.group for one in start.state.groups_of(step) if one.group not in trained]
            if missing:
                yield f"step {step}: groups {named(missing)} were neither trained nor named as replaced"
