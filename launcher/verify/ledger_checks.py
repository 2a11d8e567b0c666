"""Checks of the ledger for `asyncflow verify`: each line by itself, against all others, and against admission. Pure.

Admission is a pure function of the groups that were trained or filtered out before a start, and of those replaced
since. So it is replayed for each start (lineage) whose steps survive, and then says to which step every id belongs. Ids
are contiguous, and none is left out.
"""

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from asyncflow.json_lines import Lines
from launcher.verify.records import RunRecords
from launcher.verify.steps import Check, CompleteSteps, named
from tq.policies import StalenessRule
from tq.refill import AdmissionMark, Refill
from workers.admission.admission_state import AdmissionState
from workers.records.ledger_file import FilteredLine, ReplacedLine, TrainedLine

_HASH = re.compile(r"[0-9a-f]{16}")
_NO_END = 2**62


@dataclass(frozen=True)
class LineageStart:
    """The surviving steps of one lineage, with admission as replayed for it.

    `before` has the groups in the weights that it started from, and those filtered out before.
    """

    lineage: int
    first: int
    last: int
    trained: list[tuple[int, TrainedLine]]
    replaced: list[tuple[int, ReplacedLine]]
    before: frozenset[int]
    state: AdmissionState


def check_files(records: RunRecords) -> Check:
    """Every line is one that a run writes. A cut last line is legal: a crash leaves one."""
    files: tuple[Lines[msgspec.Struct], ...] = (records.ledger.file, records.metrics, records.updates)
    problems = [problem for file in files for problem in file.problems]
    if any(file.lines for file in files):
        problems += [f"{file.path}: does not exist" for file in files if not file.path.exists()]
    why = "it is being written" if records.live else "a crash does that, and a resume removes it"
    notes = [f"{file.path}: the last line is cut: {why}" for file in files if file.torn]
    says = ", ".join(f"{file.path.name} {len(file.lines) + len(file.wrong)} lines" for file in files)
    return Check("files", says, tuple(problems), tuple(notes))


def check_once(steps: CompleteSteps) -> Check:
    """No group is trained twice, nor by the lineage that gave it up, nor by a later one once it is filtered out."""
    first: dict[int, int] = {}
    problems = []
    trained_by = {(line.lineage, line.group): number for number, line in steps.trained}
    for number, line in steps.trained:
        if line.group in first:
            problems.append(
                f"{steps.ledger_place(number)}: group {line.group} is trained in step {line.step}, but line "
                f"{first[line.group]} has it already"
            )
        first.setdefault(line.group, number)
    seen: set[tuple[int, int]] = set()
    filtered_before: set[int] = set()
    for number, given_up in steps.replaced:
        key = (given_up.lineage, given_up.group)
        filtered = isinstance(given_up, FilteredLine)
        how = "was filtered out" if filtered else "is a dead letter"
        where = f"{steps.ledger_place(number)}: group {given_up.group} {how}"
        if key in trained_by:
            problems.append(f"{where}, but line {trained_by[key]} of the same lineage trains it")
        elif filtered and given_up.group in first:
            problems.append(f"{where}, but line {first[given_up.group]} trains it")
        if key in seen or given_up.group in filtered_before:
            problems.append(f"{where}, but it was replaced before")
        seen.add(key)
        if filtered:
            filtered_before.add(given_up.group)
    return Check("once", f"{len(first)} groups, none of them trained twice", tuple(problems))


def check_rows(steps: CompleteSteps) -> Check:
    """A group's rows are those that its id implies."""
    size = steps.records.config.schedule.n_samples_per_prompt
    problems = []
    for number, line in steps.trained:
        expected = list(range(line.group * size, (line.group + 1) * size))
        if line.indices != expected:
            problems.append(
                f"{steps.ledger_place(number)}: group {line.group} has rows {named(line.indices) or 'none'}, "
                f"not {named(expected)}, each once and ascending"
            )
    return Check("rows", f"{size} rows a group, those of its id", tuple(problems))


def check_admission(steps: CompleteSteps) -> Check:
    """Every id below the newest is trained, replaced by another, or part of an unfinished step."""
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
    # A damaged ledger may name an id so large that the ids before it cannot be listed.
    to_come = set(range(max(ids))) - ids - given_up if max(ids) < 2 * len(ids) + 2**20 else set()
    says = [f"ids 0 to {max(ids)}, in the steps that admission gives them"]
    says += [f"{len(to_come)} still to come ({named(to_come)})"] if to_come else []
    return Check("admission", "; ".join(says), tuple(problems))


def check_dead_letters(steps: CompleteSteps) -> Check:
    """Name the groups on which some task failed too often, and what became of them."""
    trained = {line.group: line for _, line in steps.trained}
    notes = []
    for _, line in steps.dead_letters:
        cause = f"after {line.deliveries} deliveries to {line.task}" if line.task else "the cause is no longer known"
        later = trained.get(line.group)
        again = f"; trained in step {later.step} after a resume" if later is not None else ""
        notes.append(
            f"group {line.group} of step {line.admitted_step} ({cause}), replaced by group {line.replaced_by}{again}"
        )
    return Check("dead letter", f"{len(notes)} groups" if notes else "no group", notes=tuple(notes))


def check_filtered(steps: CompleteSteps) -> Check:
    """Count the groups that were filtered out and replaced; they are a problem where the algorithm filters none."""
    number = len({line.group for _, line in steps.filtered})
    generated = number + len(steps.trained)
    share = f", {number / generated:.0%} of those that were generated" if number else ""
    config = steps.records.config
    algorithm = config.algorithm
    problems: tuple[str, ...] = ()
    # A user's own rollouts may skip a task, which filters its group out.
    if number and not algorithm.filters_groups and not config.rollout.is_own:
        first = steps.ledger_place(steps.filtered[0][0])
        problems = (f"{first}: groups were filtered out, but algorithm {algorithm.name} filters none",)
    return Check("filtered", f"{number or 'no'} group{'s' if number != 1 else ''}{share}", problems)


def check_staleness(steps: CompleteSteps) -> Check:
    """No token is newer than the weights that the step trains, or older than the schedule allows."""
    problems = []
    default = steps.records.config.schedule.staleness_bound
    largest = 0
    for number, line in steps.trained:
        oldest, newest = line.versions
        measured = StalenessRule.age(line.step, oldest)
        metrics = steps.metrics.get(line.step)
        bound = default if metrics is None else metrics.staleness_bound
        largest = max(largest, measured)
        where = f"{steps.ledger_place(number)}: group {line.group} of step {line.step}"
        if line.staleness != measured:
            problems.append(f"{where}: staleness {line.staleness}, but its oldest token is of version {oldest}")
        if not 0 <= oldest <= newest <= line.step - 1:
            problems.append(f"{where}: versions {oldest} to {newest}, which are not all in 0..{line.step - 1}")
        elif measured > bound:
            problems.append(f"{where}: staleness {measured}, more than {bound}")
    return Check("staleness", f"at most {largest}", tuple(problems))


def check_prompts(steps: CompleteSteps) -> Check:
    """Every group has the prompt that the seed assigns it."""
    prompts = steps.records.prompts
    if prompts.unknown:
        return Check("prompts", "not checked", notes=(f"the expected prompts are unknown: {prompts.unknown}",))
    problems = []
    for number, line in steps.trained:
        where = f"{steps.ledger_place(number)}: group {line.group}"
        if line.group not in prompts.expected:
            problems.append(f"{where} has no prompt, there is no such group")
            continue
        epoch, digest = prompts.expected[line.group]
        if line.epoch != epoch:
            problems.append(f"{where} says epoch {line.epoch}; its id is in epoch {epoch}")
        if line.prompt_hash != digest:
            problems.append(f"{where} has a prompt with hash {line.prompt_hash}; the seed gives it another ({digest})")
    data = steps.records.config.data.name
    return Check(
        "prompts",
        f"every group has the prompt that seed {steps.records.config.seed} assigns it ({data})",
        tuple(problems),
    )


def check_tokens(steps: CompleteSteps) -> Check:
    """Token hashes are well-formed. Groups in a checkpoint's queue are compared with what was trained later."""
    problems = []
    for number, line in steps.trained:
        wrong = [digest for digest in (line.prompt_hash, line.token_hash) if not _HASH.fullmatch(digest)]
        problems += [f"{steps.ledger_place(number)}: {digest!r} is not a hash of 16 hex digits" for digest in wrong]
    hashes = Counter(line.token_hash for _, line in steps.trained)
    notes = _saved(steps)
    alike = sum(count for count in hashes.values() if count > 1)
    if alike:
        notes.append(f"{alike} groups have the same tokens as another one, as short responses do")
    return Check("tokens", f"{len(hashes)} distinct hashes", tuple(problems), tuple(notes))


def _starts(steps: CompleteSteps) -> Iterator[LineageStart]:
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
        # A replacement's id shifts the ids behind it, so those of the lineage decide which step later ids belong to.
        mark = AdmissionMark(first - 1, last + 1, sorted(refills, key=lambda refill: refill.group))
        state = AdmissionState(schedule, version=first - 1, last_step=_NO_END, trained=before, filtered=filtered)
        trained = [one for one in steps.trained if one[1].lineage == lineage]
        yield LineageStart(lineage, first, last, trained, replaced, before | filtered, state.restore_mark(mark))


def _misplaced(one: tuple[int, TrainedLine], start: LineageStart, steps: CompleteSteps) -> Iterator[str]:
    number, line = one
    schedule = steps.records.config.schedule
    if line.group < 0 or line.group in start.before or line.group in start.state.replaced:
        return  # trained twice, or by the lineage that gave it up: reported by `check_once`
    where = f"{steps.ledger_place(number)}: group {line.group} of step {line.step}"
    belongs = start.state.step_of(line.group)
    if belongs != line.admitted_step:
        yield f"{where} claims admission for step {line.admitted_step}, but its id belongs to step {belongs}"
    metrics = steps.metrics.get(line.step)
    bound = schedule.staleness_bound if metrics is None else metrics.staleness_bound
    # With lateness, ready rounds of later steps are trained early, within what is left of the staleness bound.
    ahead = bound - schedule.lateness if schedule.lateness else 0
    if not line.step - schedule.lateness <= line.admitted_step <= line.step + ahead:
        yield f"{where} was admitted for step {line.admitted_step}, which is out of the step's reach"


def _misnamed(one: tuple[int, ReplacedLine], start: LineageStart, steps: CompleteSteps) -> Iterator[str]:
    number, line = one
    where = f"{steps.ledger_place(number)}: group {line.group}, which was replaced,"
    if steps.lineages.get(line.step) != line.lineage:
        yield f"{where} is of lineage {line.lineage}, but its step of {steps.lineages.get(line.step)}"
    if line.group in start.before or line.group < 0:
        yield f"{where} was trained or filtered out before this lineage began"
    elif start.state.step_of(line.group) != line.admitted_step:
        belongs = start.state.step_of(line.group)
        yield f"{where} claims admission for step {line.admitted_step}, but its id belongs to step {belongs}"
    if line.replaced_by <= line.group or line.replaced_by in start.before:
        yield f"{where} names group {line.replaced_by} as its replacement, but that group already existed"


def _left_out(start: LineageStart, steps: CompleteSteps) -> Iterator[str]:
    """Yield a problem per finished step that lacks groups which admission gave it."""
    trained = {line.group for _, line in start.trained}
    # A group may be trained up to `lateness` steps late, so the last steps need not be whole yet.
    lateness = steps.records.config.schedule.lateness
    for step in steps.lineages:
        if start.first <= step <= start.last - lateness:
            missing = [one.group for one in start.state.groups_of(step) if one.group not in trained]
            if missing:
                yield f"step {step}: groups {named(missing)} were neither trained nor named as replaced"


def _saved(steps: CompleteSteps) -> list[str]:
    """Say what became of responses that were saved before they were trained; a group may be generated again."""
    trained = {line.group: line for _, line in steps.trained}
    same: set[int] = set()
    other: set[int] = set()
    for checkpoint in steps.records.checkpoints:
        for group, digest in (checkpoint.queue or {}).items():
            line = trained.get(group)
            if line is not None and line.step > checkpoint.step:
                (same if line.token_hash == digest else other).add(group)
    if not same and not other:
        return []
    both = len(same | other)
    text = (
        f"checkpoints hold responses of {both} group{'s' * (both != 1)} that came later; {len(same)} trained with them"
    )
    return [f"{text}, generated again: {named(other - same)}" if other - same else text]
