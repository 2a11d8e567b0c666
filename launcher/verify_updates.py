"""Whether the weights saw what the ledger says: metrics, optimizer updates, checkpoints. Pure; part of `asyncflow
verify`."""

from collections import Counter
from collections.abc import Iterator

from launcher.verify_check import Check, named
from launcher.verify_records import SavedCheckpoint
from launcher.verify_steps import CompleteSteps


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
            problems.append(f"{file.where(number)}: step {line.step} {again}")
        before = max(before, line.step)
        if line.samples != schedule.step_rows:
            problems.append(f"{file.where(number)}: {line.samples} samples, not {schedule.step_rows}")
        if line.lineage != steps.lineages.get(line.step, line.lineage):
            problems.append(
                f"{file.where(number)}: step {line.step} is of lineage {line.lineage}, in the ledger of "
                f"{steps.lineages[line.step]}"
            )
        oldest = max((trained.staleness for _, trained in steps.by_step.get(line.step, ())), default=None)
        if oldest is not None and oldest != line.staleness_max:
            problems.append(f"{file.where(number)}: staleness up to {line.staleness_max}, in the ledger up to {oldest}")
    return Check("metrics", f"one line for each of {len(steps.metrics)} steps", tuple(problems))


def check_updates(steps: CompleteSteps) -> Check:
    """Every update of every step was made once, and the engine counted no other."""
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
    for total, (number, update_line) in enumerate(steps.updates, start=1):
        where = f"{file.where(number)}: update {update_line.update} of step {update_line.step}"
        metrics = steps.metrics.get(update_line.step)
        if metrics is not None and not 1 <= update_line.update <= metrics.num_updates:
            problems.append(f"{where}: the metrics know {metrics.num_updates} of that step")
        if update_line.lineage != steps.lineages.get(update_line.step, update_line.lineage):
            problems.append(f"{where}: lineage {update_line.lineage}, not that of its step in the ledger")
        if update_line.optimizer_updates != total:
            problems.append(f"{where}: the engine counts {update_line.optimizer_updates} updates, the file {total}")
    void = [step for step, line in steps.metrics.items() if line.grad_norm is None]
    notes = [f"steps {named(void)}: a gradient was not finite, so that update changed no weight"] if void else []
    return Check("updates", f"{len(steps.updates)} optimizer updates, each once", tuple(problems), tuple(notes))


def check_checkpoints(steps: CompleteSteps) -> Check:
    """Every checkpoint is of a step that the ledger has, and holds as many updates as those steps made."""
    checkpoints = steps.records.checkpoints
    problems = [problem for one in checkpoints for problem in _problems(one, steps)]
    held = [one.step for one in checkpoints if not one.problem]
    says = f"of steps {named(held)}, with as many updates as those steps made" if held else "none"
    return Check("checkpoints", says, tuple(problems))


def _problems(one: SavedCheckpoint, steps: CompleteSteps) -> Iterator[str]:
    if one.problem:
        yield f"{one.path}: {one.problem}"
        return
    if one.path.name != f"step_{one.step:06d}":
        yield f"{one.path}: is of step {one.step}"
    if one.step > steps.last:
        yield f"{one.path}: is of step {one.step}, but the ledger ends with step {steps.last}"
        return
    if one.lineage != steps.lineages.get(one.step, one.lineage):
        yield f"{one.path}: is of lineage {one.lineage}, step {one.step} in the ledger of {steps.lineages[one.step]}"
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
