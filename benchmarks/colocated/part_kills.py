"""`kills skipped twice`: kill -9 at random moments, of the role that has the devices and of the one that sleeps.

A quickstart run in mode `async`, 2 ranks of each role. The status of the launcher says who has the devices. Half of the
kills hit a holder, half a sleeper; between two kills the run finishes a step.

    skipped   groups below the newest trained one that were neither trained nor put among the dead letters
    twice     groups trained twice, and optimizer updates made twice for a step, in what survives
"""

import json
import random
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import say_when
from benchmarks.chaos.launched_run import LaunchedRun, Member, overrides, pause
from benchmarks.chaos.run_audit import audit

STEPS_PER_KILL = 6
_DEADLINE_S = 1800.0
_LONGEST_PAUSE_S = 1.5
_POLL_S = 0.05
_SETTINGS = {
    "checkpoint__interval": 3,
    "launcher__max_restarts": 20,
    "launcher__restart_window_s": 30,
    "rollout__samples_per_step": 0,
}


def run(*, directory: Path, short: bool = False, num_kills: int = 10, seed: int = 0, **_: Any) -> dict[str, float]:
    """Kill; count what is left."""
    num_kills = min(num_kills, 2) if short else num_kills
    chance, killed = random.Random(seed), []
    arguments = ["quickstart", "--roles", "rollout+actor:2", "--steps", str(STEPS_PER_KILL * num_kills + 4)]
    with LaunchedRun(directory / "kills") as launched:
        launched.start(*arguments, *overrides(**_SETTINGS))
        launched.wait_for_step(1, deadline_s=_DEADLINE_S)
        for number in range(num_kills):
            pause(chance.uniform(0.0, _LONGEST_PAUSE_S))
            victim = choose(launched, chance, holds=number % 2 == 0)
            before = launched.last_step()
            say_when(f"kill {number + 1}: {victim.name} at step {before[1]}")
            launched.send(victim.pid)
            killed.append(victim.name)
            launched.wait_until(partial(is_past, launched, before), f"a step after {killed}", deadline_s=_DEADLINE_S)
        launched.end_with(0, deadline_s=_DEADLINE_S)
        found = audit(launched.lines("ledger.jsonl"), launched.lines("updates.jsonl"))
        problems = launched.verify()
    assert not problems, problems
    assert not found.updates_missing, f"{found.updates_missing} steps without an optimizer update"
    return {"kills": len(killed), "skipped": found.skipped, "twice": found.twice + found.updates_twice}


def is_past(launched: LaunchedRun, before: tuple[int, int]) -> bool:
    return launched.last_step() > before


def choose(launched: LaunchedRun, chance: random.Random, *, holds: bool) -> Member:
    """Return a process of a gang that has the devices, or of one that has not."""
    while True:
        turn = json.loads((launched.run_dir / "status.json").read_text()).get("turn", "")
        holders = turn.partition(";")[0].split(", ")
        workers = [one for one in launched.members() if one.name.startswith(("rollout-", "actor-"))]
        found = [one for one in workers if (gang_of(one) in holders) == holds]
        if found:
            return chance.choice(found)
        pause(_POLL_S)


def gang_of(member: Member) -> str:
    """A member is called by its role and its rank there; each rollout is a gang, all ranks of the actor are one."""
    return "actor" if member.name.startswith("actor-") else member.name
