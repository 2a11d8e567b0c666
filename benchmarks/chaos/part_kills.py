"""`kills skipped twice accuracy`: random SIGKILLs over all processes of a quickstart run, the launcher's too.

A run with every role that the quickstart can have, two storage units, two controllers, weight agent, fork server,
launcher. Between two kills the run finishes a step. Three times in ten the next kill does not wait for that, and hits
while other processes start again, restore, or save. Whenever the
launcher is gone it is started with `--resume latest`, as a user's loop around the command would. A run with the same
seed that is left alone is made first.

    skipped   groups below the newest trained one that were neither trained nor put among the dead letters
    twice     groups trained twice, and optimizer updates made twice for a step, in what survives; updates are counted
              by the trainer, apart from the ledger; `asyncflow verify` has to agree
    accuracy  mean of the last five steps
"""

import statistics
import time
from collections import Counter, defaultdict
from dataclasses import asdict, dataclass, field
from typing import Any

from benchmarks.chaos.kill_plan import KillPlan
from benchmarks.chaos.launched_run import LAUNCHER, STARTING, LaunchedRun, Member, overrides, pause
from benchmarks.chaos.options import Options
from benchmarks.chaos.run_audit import audit, final_accuracy
from benchmarks.transferqueue.part import Result

ROLES = "rollout:2,actor:2,ref:1,evaluate:1"
STEPS_PER_KILL = 8
SHORT_STEPS = 30
LIMITS = {
    "checkpoint__interval": 3,
    "launcher__max_restarts": 4,
    "launcher__max_global_restarts": 3,
    "launcher__restart_window_s": 30,
}
_SETTINGS = {"rollout__samples_per_step": 0, "tq__num_controllers": 2, "evaluate__interval": 20}
_POLL_S = 0.02
_END_S = 1800.0
_NEXT_STEP_S = 120.0
"""Longest wait for the step after a kill (s): far more than any recovery takes."""


@dataclass
class Killed:
    """One kill.

    Attributes:
        name: who.
        step: the last finished one.
        at_s: since the first start (s).
        hurried: the run had not got on since the last kill.
        next_step_s: until the next step was finished (s); None: nobody waited for it.
    """

    name: str
    step: int
    at_s: float
    hurried: bool
    next_step_s: float | None = None


@dataclass
class _Fire:
    """The state of a run under fire."""

    run: LaunchedRun
    plan: KillPlan
    options: Options
    began: float = field(default_factory=time.monotonic)
    kills: list[Killed] = field(default_factory=list)

    def kill_one(self) -> None:
        """Wait for the moment and kill somebody."""
        moment = self.plan.moment()
        if not moment.hurried:
            self._wait_for_progress()
        pause(moment.pause_s)
        members = self._killable()
        victim = self.plan.victim([one.name for one in members])
        killed = Killed(victim, self.run.last_step()[1], time.monotonic() - self.began, moment.hurried)
        self._before = self.run.last_step()
        self._killed_at = self.run.send(next(one.pid for one in members if one.name == victim))
        self.kills.append(killed)
        self.options.say(
            f"kill {len(self.kills)}: {victim} at step {killed.step}{' (hurried)' if moment.hurried else ''}"
        )
        self.keep_running()

    def keep_running(self) -> None:
        """Start the command again if it ended and may be resumed.

        Raises:
            RuntimeError: the run failed, or was over before everybody was killed.
        """
        code = self.run.exit_code()
        if code is None:
            return
        if code in (0, 1, 2):
            raise RuntimeError(f"after {len(self.kills)} kills the command ended with {code}: {self.run.last_words()}")
        self.run.resume()

    def wait_for_end(self) -> None:
        """Wait until the run is over, however often it has to be started for that."""
        deadline = time.monotonic() + _END_S
        while self.run.wait_for_end(deadline_s=deadline - time.monotonic()) != 0:
            self.keep_running()

    def _wait_for_progress(self) -> None:
        """Wait for a step after the last kill."""
        if not self.kills:
            self.run.wait_for_step(2, deadline_s=_NEXT_STEP_S)
            return
        deadline = time.monotonic() + _NEXT_STEP_S
        while self.run.last_step() <= self._before:
            self.keep_running()
            if time.monotonic() > deadline:
                raise RuntimeError(f"no step within {_NEXT_STEP_S:g} s after {self.kills[-1]}: {self.run.last_words()}")
            pause(_POLL_S)
        self.kills[-1].next_step_s = time.monotonic() - self._killed_at

    def _killable(self) -> list[Member]:
        """Wait until somebody may be killed: not the launcher before it has taken the directory, as there is no run."""
        while True:
            taken = (self.run.run_dir / "config.yaml").exists()
            spared = {STARTING} if taken else {STARTING, LAUNCHER}
            found = [one for one in self.run.members() if one.name not in spared]
            if found:
                return found
            self.keep_running()
            pause(_POLL_S)


def run(options: Options) -> Result:
    """Kill; compare with a run that was left alone."""
    steps = SHORT_STEPS if options.short else max(60, STEPS_PER_KILL * options.kills)
    arguments = ["quickstart", "--roles", ROLES, "--steps", str(steps), *overrides(**_SETTINGS, **LIMITS)]
    calm = None
    if not options.short:
        options.say(f"kills: a run of {steps} steps that is left alone")
        with LaunchedRun(options.directory / "left-alone") as calm:
            calm.start(*arguments)
            calm.end_with(0, deadline_s=_END_S)
    with LaunchedRun(options.directory / "under-fire") as run:
        run.start(*arguments)
        fire = _Fire(run, KillPlan(options.seed), options)
        for _ in range(options.kills):
            fire.kill_one()
        fire.wait_for_end()
    return _result(fire, calm)


def _result(fire: _Fire, calm: LaunchedRun | None) -> Result:
    found = audit(fire.run.lines("ledger.jsonl"), fire.run.lines("updates.jsonl"))
    metrics = fire.run.lines("metrics.jsonl")
    next_step_s = defaultdict(list)
    for killed in fire.kills:
        if killed.next_step_s is not None:
            next_step_s[killed.name].append(killed.next_step_s)
    problems = fire.run.verify()
    if found.updates_missing:
        problems.append(f"{found.updates_missing} steps without an optimizer update")
    details: dict[str, Any] = {
        "restart_limits": {name.replace("__", "."): value for name, value in LIMITS.items()},
        "steps": metrics[-1]["step"],
        "lineages": metrics[-1]["lineage"] + 1,
        "starts_of_the_command": fire.run.starts,
        "killed": Counter(killed.name for killed in fire.kills),
        "hurried": sum(killed.hurried for killed in fire.kills),
        "audit": asdict(found),
        "held_out": _held_out(fire.run),
        "next_step_s": {
            name: {"median": statistics.median(each), "worst": max(each)} for name, each in next_step_s.items()
        },
        "each": [asdict(killed) for killed in fire.kills],
        "problems": problems,
    }
    if calm is not None:
        details["left_alone"] = {"accuracy": final_accuracy(calm.lines("metrics.jsonl")), "held_out": _held_out(calm)}
    figures = {
        "kills": len(fire.kills),
        "skipped": found.skipped,
        "twice": found.twice + found.updates_twice,
        "accuracy": final_accuracy(metrics),
    }
    return Result(figures, {"kills": details})


def _held_out(run: LaunchedRun) -> float | None:
    """Return the accuracy on held-out prompts of the newest evaluation."""
    evaluations = run.lines("evaluation.jsonl")
    return evaluations[-1]["accuracy"] if evaluations else None
