"""`asyncflow verify`: sound runs pass, and whatever is wrong with a run is found."""

import random
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_run import Line, MadeRun, fake_readers, make_run

from launcher.verify.records import read_records
from launcher.verify.verify_report import Report, verify_records

runs = st.builds(
    make_run,
    st.integers(0, 10**6),
    fill=st.sampled_from(["in_order", "first_ready"]),
    starts=st.integers(1, 3),
    num_updates=st.integers(1, 2),
)


def verify(run: MadeRun, **options: Any) -> Report:
    """Write the run and judge it."""
    with tempfile.TemporaryDirectory() as directory:
        return verify_records(read_records(run.write(Path(directory)), fake_readers(**options)))


def wrong(report: Report) -> list[str]:
    return [check.name for check in report.checks if not check.ok]


def trained(run: MadeRun, chance: random.Random, *, of: Callable[[Line], bool] = lambda line: True) -> Line:
    """Return one of the lines of trained groups."""
    return chance.choice([line for line in run.ledger if "replaced_by" not in line and of(line)])


@given(runs)
def test_sound_runs_pass(run: MadeRun) -> None:
    report = verify(run)
    assert report.ok, report.as_text()
    assert report.last_step == run.completed


# Damage. Each changes a run in one place and returns the checks of which one must find it.


def drop_trained(run: MadeRun, chance: random.Random) -> set[str]:
    run.ledger.remove(trained(run, chance))
    return {"steps"}


def repeat_trained(run: MadeRun, chance: random.Random) -> set[str]:
    run.ledger.insert(chance.randint(0, len(run.ledger)), dict(trained(run, chance)))
    return {"once"}


def train_again_later(run: MadeRun, chance: random.Random) -> set[str]:
    """Another group's line in a later step names a group that was trained, rows and all."""
    first = trained(run, chance, of=lambda line: line["step"] < run.completed)
    later = trained(run, chance, of=lambda line: line["step"] > first["step"])
    later.update({name: first[name] for name in ("group", "indices", "epoch", "prompt_hash")})
    return {"once"}


def swap_groups(run: MadeRun, chance: random.Random) -> set[str]:
    """Two groups of different steps change places, rows and prompts with them."""
    one = trained(run, chance)
    if not any(line.get("admitted_step") != one["admitted_step"] for line in run.ledger if "indices" in line):
        return set()
    other = trained(run, chance, of=lambda line: line["admitted_step"] != one["admitted_step"])
    for name in ("group", "indices", "epoch", "prompt_hash"):
        one[name], other[name] = other[name], one[name]
    return {"admission", "once"}  # or by the lineage that had it that are dead letters


def change_group(run: MadeRun, chance: random.Random) -> set[str]:
    trained(run, chance)["group"] += chance.choice([-1, 1, 1000])
    return {"rows"}


def change_index(run: MadeRun, chance: random.Random) -> set[str]:
    line = trained(run, chance)
    line["indices"][chance.randrange(len(line["indices"]))] += chance.choice([-1, 1, 2])
    return {"rows"}


def change_staleness(run: MadeRun, chance: random.Random) -> set[str]:
    trained(run, chance)["staleness"] += chance.choice([-1, 1])
    return {"staleness"}


def change_versions(run: MadeRun, chance: random.Random) -> set[str]:
    line = trained(run, chance)
    line["versions"] = chance.choice([[line["step"], line["step"]], [line["versions"][0] - 5, line["versions"][1]]])
    return {"staleness"}


def exceed_the_bound(run: MadeRun, chance: random.Random) -> set[str]:
    line = trained(run, chance, of=lambda line: line["step"] >= 4)
    line["staleness"], line["versions"] = 3, [line["step"] - 4, line["step"] - 1]
    return {"staleness"}


def go_back_in_lineage(run: MadeRun, chance: random.Random) -> set[str]:
    trained(run, chance)["lineage"] += chance.choice([-1, 1])
    return {"steps"}


def lose_a_step(run: MadeRun, chance: random.Random) -> set[str]:
    step = chance.randint(1, run.completed)
    run.ledger = [line for line in run.ledger if line["step"] != step or "replaced_by" in line]
    return {"steps"}


def forget_a_replacement(run: MadeRun, chance: random.Random) -> set[str]:
    """One whose step is over, so that the group is missed; of another one nobody can tell yet."""
    ends = {line["lineage"]: line["step"] for line in run.ledger}
    told = [
        line
        for line in run.ledger
        if "replaced_by" in line and line["admitted_step"] <= ends[line["lineage"]] - run.schedule.lateness
    ]
    if not told:
        return set()
    run.ledger.remove(chance.choice(told))
    return {"admission"}


def train_what_was_given_up(run: MadeRun, chance: random.Random) -> set[str]:
    told = [line for line in run.ledger if "replaced_by" in line]
    if not told:
        return set()
    given_up = chance.choice(told)
    own = [line for line in run.ledger if "indices" in line and line["lineage"] == given_up["lineage"]]
    chance.choice(own)["group"] = given_up["group"]
    return {"once"}


def change_epoch(run: MadeRun, chance: random.Random) -> set[str]:
    trained(run, chance)["epoch"] += 1
    return {"prompts"}


def change_prompt(run: MadeRun, chance: random.Random) -> set[str]:
    trained(run, chance)["prompt_hash"] = "0123456789abcdef"
    return {"prompts"}


def spoil_a_hash(run: MadeRun, chance: random.Random) -> set[str]:
    trained(run, chance)["token_hash"] = chance.choice(["", "0123", "0123456789ABCDEF"])
    return {"tokens"}


def lose_a_field(run: MadeRun, chance: random.Random) -> set[str]:
    del trained(run, chance)[chance.choice(["epoch", "versions", "indices", "lineage"])]
    return {"files"}


def drop_metrics(run: MadeRun, chance: random.Random) -> set[str]:
    run.metrics.pop(chance.randrange(len(run.metrics)))
    return {"metrics"}


def repeat_metrics(run: MadeRun, chance: random.Random) -> set[str]:
    run.metrics.insert(chance.randint(0, len(run.metrics)), dict(chance.choice(run.metrics)))
    return {"metrics"}


def change_metrics(run: MadeRun, chance: random.Random) -> set[str]:
    chance.choice(run.metrics)[chance.choice(["samples", "lineage", "staleness_max"])] += 1
    return {"metrics"}


def drop_update(run: MadeRun, chance: random.Random) -> set[str]:
    run.updates.pop(chance.randrange(len(run.updates)))
    return {"updates"}


def repeat_update(run: MadeRun, chance: random.Random) -> set[str]:
    """The weights saw it twice, and the engine says so."""
    place = chance.randrange(len(run.updates))
    run.updates.insert(place, dict(run.updates[place]))
    for line in run.updates[place + 1 :]:
        line["optimizer_updates"] += 1
    return {"updates"}


def miscount_updates(run: MadeRun, chance: random.Random) -> set[str]:
    chance.choice(run.updates)["optimizer_updates"] += chance.choice([-1, 1])
    return {"updates"}


def save_other_updates(run: MadeRun, chance: random.Random) -> set[str]:
    step = chance.choice([*run.checkpoints])
    lineage, updates = run.checkpoints[step]
    run.checkpoints[step] = (lineage, updates + chance.choice([-1, 1]))
    return {"checkpoints"}


def save_another_lineage(run: MadeRun, chance: random.Random) -> set[str]:
    step = chance.choice([*run.checkpoints])
    lineage, updates = run.checkpoints[step]
    run.checkpoints[step] = (lineage + 1, updates)
    return {"checkpoints"}


def save_a_step_that_was_not_made(run: MadeRun, chance: random.Random) -> set[str]:
    run.checkpoints[run.completed + chance.randint(1, 3)] = (run.lineage, len(run.updates))
    return {"checkpoints"}


DAMAGES = [
    drop_trained, repeat_trained, train_again_later, swap_groups, change_group, change_index, change_staleness,
    change_versions, exceed_the_bound, go_back_in_lineage, lose_a_step, forget_a_replacement, train_what_was_given_up,
    change_epoch, change_prompt, spoil_a_hash, lose_a_field, drop_metrics, repeat_metrics, change_metrics, drop_update,
    repeat_update, miscount_updates, save_other_updates, save_another_lineage, save_a_step_that_was_not_made,
]  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
@settings(max_examples=settings.default.max_examples // 3)
@given(run=runs, seed=st.integers(0, 10**6))
def test_damage_is_found(run: MadeRun, seed: int, damage: Callable[[MadeRun, random.Random], set[str]]) -> None:
    expected = damage(run, random.Random(seed))
    report = verify(run)
    if expected:
        assert expected & set(wrong(report)), report.as_text()
        assert report.exit_code == 1
