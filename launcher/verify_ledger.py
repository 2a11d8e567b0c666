"""What every line of the ledger must be, taken by itself or against all others. Pure; part of `asyncflow verify`."""

import re
from collections import Counter

import msgspec

from launcher.verify_check import Check, named
from launcher.verify_records import RunRecords
from launcher.verify_steps import CompleteSteps
from workers.json_reader import Lines
from workers.ledger_file import FilteredLine

_HASH = re.compile(r"[0-9a-f]{16}")


def check_files(records: RunRecords) -> Check:
    """Every line is one that a run writes; a last line that is cut is what a crash leaves."""
    files: tuple[Lines[msgspec.Struct], ...] = (records.ledger.file, records.metrics, records.updates)
    problems = [f"{file.where(number)}: {what}" for file in files for number, what in file.wrong]
    if any(file.lines for file in files):
        problems += [f"{file.path}: does not exist" for file in files if not file.path.exists()]
    why = "it is being written" if records.live else "a crash does that, and a resume removes it"
    notes = [f"{file.path}: the last line is cut: {why}" for file in files if file.torn]
    says = ", ".join(f"{file.path.name} {len(file.lines) + len(file.wrong)} lines" for file in files)
    return Check("files", says, tuple(problems), tuple(notes))


def check_once(steps: CompleteSteps) -> Check:
    """No group was trained twice, nor by the lineage that gave it up, nor, once filtered out, by a later one."""
    first: dict[int, int] = {}
    problems = []
    trained_by = {(line.lineage, line.group): number for number, line in steps.trained}
    for number, line in steps.trained:
        if line.group in first:
            problems.append(
                f"{steps.where(number)}: group {line.group} is trained in step {line.step}, but line "
                f"{first[line.group]} has it already"
            )
        first.setdefault(line.group, number)
    seen: set[tuple[int, int]] = set()
    filtered_before: set[int] = set()
    for number, given_up in steps.replaced:
        key = (given_up.lineage, given_up.group)
        filtered = isinstance(given_up, FilteredLine)
        how = "was filtered out" if filtered else "is in quarantine"
        where = f"{steps.where(number)}: group {given_up.group} {how}"
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
    """A group's rows are the ones that its id says."""
    size = steps.records.config.schedule.n_samples_per_prompt
    problems = []
    for number, line in steps.trained:
        expected = list(range(line.group * size, (line.group + 1) * size))
        if line.indices != expected:
            problems.append(
                f"{steps.where(number)}: group {line.group} has rows {named(line.indices) or 'none'}, "
                f"not {named(expected)}, each once and ascending"
            )
    return Check("rows", f"{size} rows a group, those of its id", tuple(problems))


def check_staleness(steps: CompleteSteps) -> Check:
    """No token is newer than the weights that the step trains, or older than the schedule allows."""
    problems = []
    default = steps.records.config.schedule.staleness_bound
    largest = 0
    for number, line in steps.trained:
        oldest, newest = line.versions
        measured = line.step - 1 - oldest
        metrics = steps.metrics.get(line.step)
        bound = default if metrics is None else metrics.staleness_bound
        largest = max(largest, measured)
        where = f"{steps.where(number)}: group {line.group} of step {line.step}"
        if line.staleness != measured:
            problems.append(f"{where}: staleness {line.staleness}, but its oldest token is of version {oldest}")
        if not 0 <= oldest <= newest <= line.step - 1:
            problems.append(f"{where}: versions {oldest} to {newest}, which are not all in 0..{line.step - 1}")
        elif measured > bound:
            problems.append(f"{where}: staleness {measured}, more than {bound}")
    return Check("staleness", f"at most {largest}", tuple(problems))


def check_prompts(steps: CompleteSteps) -> Check:
    """Group g has the prompt that the seed gives it."""
    prompts = steps.records.prompts
    if prompts.unknown:
        return Check("prompts", "not checked", notes=(f"nobody can say which prompts they are: {prompts.unknown}",))
    problems = []
    for number, line in steps.trained:
        where = f"{steps.where(number)}: group {line.group}"
        if line.group not in prompts.expected:
            problems.append(f"{where} has no prompt, there is no such group")
            continue
        epoch, digest = prompts.expected[line.group]
        if line.epoch != epoch:
            problems.append(f"{where} says epoch {line.epoch}; its id is in epoch {epoch}")
        if line.prompt_hash != digest:
            problems.append(f"{where} has a prompt with hash {line.prompt_hash}; the seed gives it another ({digest})")
    data = steps.records.config.data.path
    return Check("prompts", f"those that seed {steps.records.config.seed} gives each group of {data}", tuple(problems))


def check_tokens(steps: CompleteSteps) -> Check:
    """Hashes are such; a group that a checkpoint's queue held is compared with what was trained later."""
    problems = []
    for number, line in steps.trained:
        wrong = [digest for digest in (line.prompt_hash, line.token_hash) if not _HASH.fullmatch(digest)]
        problems += [f"{steps.where(number)}: {digest!r} is no hash of 16 hex digits" for digest in wrong]
    hashes = Counter(line.token_hash for _, line in steps.trained)
    notes = _saved(steps)
    alike = sum(count for count in hashes.values() if count > 1)
    if alike:
        notes.append(f"{alike} groups have the same tokens as another one, as short answers do")
    return Check("tokens", f"{len(hashes)} different hashes", tuple(problems), tuple(notes))


def _saved(steps: CompleteSteps) -> list[str]:
    """Say what became of answers that were saved before they were trained; one may be generated again."""
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
    text = f"checkpoints hold answers of {both} group{'s' * (both != 1)} that came later; {len(same)} trained with them"
    return [f"{text}, generated again: {named(other - same)}" if other - same else text]
