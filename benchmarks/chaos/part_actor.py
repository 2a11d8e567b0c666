"""`actor_recover_s_max`: a rank of the actor is killed in the middle of a quickstart run; rollouts stay.

    actor_recover_s   from the kill to the end of the next optimizer step, less the model's load time
    load_s            from the process's start to its first span of work, as it was when the run started

Then the run goes on to its end: the ledger must hold the staleness bound, and each group once.
"""

import time
from dataclasses import asdict, dataclass
from typing import Any

import psutil

from benchmarks.chaos.launched_run import LaunchedRun, overrides
from benchmarks.chaos.options import Options
from benchmarks.chaos.run_audit import audit
from benchmarks.transferqueue.part import Result
from launcher.timeline.run_timeline import RunTimeline

_ROLES = "rollout:2,actor:2,ref:1"
_KILLS = 3
_STEPS = 60
_INTERVAL = 5
_MAX_STALENESS = 2
_DEADLINE_S = 180.0


@dataclass
class Recovery:
    """One kill.

    Attributes:
        victim: which rank.
        at_step: the last finished step.
        next_update_s: from the kill to the end of the next optimizer step (s).
        load_s: see the module.
        rollouts_kept: whether rollouts are the processes that they were.
    """

    victim: str
    at_step: int
    next_update_s: float
    load_s: float
    rollouts_kept: bool

    @property
    def recover_s(self) -> float:
        """Without what loading takes."""
        return self.next_update_s - self.load_s


def run(options: Options) -> Result:
    """Kill ranks in turn."""
    kills = 1 if options.short else _KILLS
    steps = _STEPS // 2 if options.short else _STEPS
    settings = overrides(
        checkpoint__interval=_INTERVAL, schedule__max_staleness=_MAX_STALENESS, rollout__samples_per_step=0,
        launcher__max_restarts=kills,
    )  # fmt: skip
    recoveries = []
    with LaunchedRun(options.directory / "actor") as launched:
        launched.start("quickstart", "--roles", _ROLES, "--steps", str(steps), *settings)
        launched.wait_for_step(1, deadline_s=_DEADLINE_S)
        load_s = _load_s(launched)
        for number in range(kills):
            launched.wait_for_step((number + 1) * (_INTERVAL + 2) + 1, deadline_s=_DEADLINE_S)
            recoveries.append(_kill(launched, f"actor-{number % 2}", load_s))
            options.say(f"actor: {recoveries[-1]}")
        launched.end_with(0, deadline_s=_DEADLINE_S)
    ledger = launched.lines("ledger.jsonl")
    found = audit(ledger, launched.lines("updates.jsonl"))
    stalest = max(line["staleness"] for line in ledger)
    problems = [f"{each.victim}: a rollout was started again" for each in recoveries if not each.rollouts_kept]
    problems += [f"staleness {stalest}, bound {_MAX_STALENESS}"] if stalest > _MAX_STALENESS else []
    problems += launched.verify()
    details: dict[str, Any] = {
        "recoveries": [asdict(each) for each in recoveries], "staleness_max": stalest, "audit": asdict(found),
        "problems": problems,
    }  # fmt: skip
    figures = {
        "actor_recover_s_max": max(each.recover_s for each in recoveries),
        "skipped": found.skipped,
        "twice": found.twice + found.updates_twice,
    }
    return Result(figures, {"actor": details})


def _kill(launched: LaunchedRun, victim: str, load_s: float) -> Recovery:
    before, step = _rollouts(launched), launched.last_step()[1]
    killed = time.time()
    launched.send(launched.pid_of(victim))
    launched.wait_until(
        lambda: _next_update(launched, killed) is not None, "the next optimizer step", deadline_s=_DEADLINE_S
    )
    updated = _next_update(launched, killed)
    assert updated is not None
    return Recovery(victim, step, updated - killed, load_s, _rollouts(launched) == before)


def _next_update(launched: LaunchedRun, since: float) -> float | None:
    """Return when the first optimizer step after `since` ended, by rank 0 of the actor (unix time, s)."""
    spans = RunTimeline.read(launched.run_dir).spans.get("actor-0", ())
    return next((span.end for span in spans if span.name == "optimizer" and span.start > since), None)


def _load_s(launched: LaunchedRun) -> float:
    began = psutil.Process(launched.pid_of("actor-0")).create_time()
    return RunTimeline.read(launched.run_dir).spans["actor-0"][0].start - began


def _rollouts(launched: LaunchedRun) -> dict[str, int]:
    return {one.name: one.pid for one in launched.members() if one.name.startswith("rollout-")}
