"""`skipped twice`: a run goes on with other numbers of actor ranks, rollout instances and storage units.

It begins with `rollout:4,actor:2,ref:1` and 3 units, and goes on with `rollout:2,actor:1,ref:1` and 1 unit, and, from
the same checkpoint again, with 5 units.

    exact      `deterministic: true`, mode `periodic`: the loss of the next step is the one of a run that never stopped
    streamed   mode `async`, stopped in the middle of a step: finished samples of steps to come travel in the checkpoint
"""

import shutil
import signal
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.chaos.launched_run import LaunchedRun, overrides
from benchmarks.chaos.options import Options
from benchmarks.chaos.run_audit import Audit, audit
from benchmarks.transferqueue.part import Result

_BEFORE = ("--roles", "rollout:4,actor:2,ref:1", "--set", "tq.num_storage_units=3")
_AFTER = "rollout:2,actor:1,ref:1"
_UNITS = (1, 5)
_SAVED, _MORE = 12, 8
_SHORT_SAVED, _SHORT_MORE = 4, 2
_LOSS_DIFFERENCE = 1e-5
_DEADLINE_S = 600.0
_EXACT = {"deterministic": "true", "schedule__mode": "periodic", "rollout__batch_size": 128}
_STREAMED = {"schedule__mode": "async", "schedule__max_staleness": 2}
_BOTH = {"rollout__samples_per_step": 0, "checkpoint__interval": 0}
_STOPPED = 75
_ENDLESS = 100_000


def run(options: Options) -> Result:
    """Save once, go on twice, in both ways; the short form leaves the exact one out."""
    audits: list[Audit] = []
    details: dict[str, Any] = {"problems": []}
    if not options.short:
        saved = _SAVED + 1
        whole = _loss_of_whole_run(options, saved)
        origin = _save(options, "exact", _EXACT, _SAVED)
        for units in _UNITS:
            resumed = _go_on(origin, units, _MORE)
            loss = next(float(line["loss"]) for line in resumed.lines("metrics.jsonl") if line["step"] == saved)
            difference = abs(loss - whole)
            if difference > _LOSS_DIFFERENCE:
                details["problems"].append(f"{units} units: the loss of step {saved} is {loss}, not {whole}")
            _judge(resumed, options, audits, details, loss=loss, loss_difference=difference)
    origin = _save(options, "streamed", _STREAMED, _SHORT_SAVED if options.short else _SAVED)
    for units in _UNITS:
        resumed = _go_on(origin, units, _SHORT_MORE if options.short else _MORE)
        _judge(resumed, options, audits, details)
    figures: dict[str, float] = {
        "skipped": sum(one.skipped for one in audits),
        "twice": sum(one.twice + one.updates_twice for one in audits),
    }
    return Result(figures, {"elastic": details})


def _judge(
    resumed: LaunchedRun, options: Options, audits: list[Audit], details: dict[str, Any], **facts: float
) -> None:
    """Add what a run that went on says."""
    found = audit(resumed.lines("ledger.jsonl"), resumed.lines("updates.jsonl"))
    audits.append(found)
    name = resumed.run_dir.name
    details[name] = {**asdict(found), **facts, "losses": [line["loss"] for line in resumed.lines("metrics.jsonl")]}
    details["problems"] += [f"{name}: {problem}" for problem in resumed.verify()]
    options.say(f"elastic: {name}: {found} {facts or ''}")


def _loss_of_whole_run(options: Options, step: int) -> float:
    """Return the loss of a step of a run that has the first layout throughout."""
    with LaunchedRun(options.directory / "elastic-whole") as whole:
        whole.start("quickstart", "--steps", str(step), *_BEFORE, *overrides(**_BOTH, **_EXACT))
        whole.end_with(0, deadline_s=_DEADLINE_S)
    return float(whole.lines("metrics.jsonl")[-1]["loss"])


def _save(options: Options, name: str, settings: dict[str, object], step: int) -> Path:
    """Run to a checkpoint: a deterministic run ends there, another one is stopped. Returns the run's directory."""
    exact = settings is _EXACT
    steps = step if exact else _ENDLESS
    with LaunchedRun(options.directory / f"elastic-{name}") as origin:
        origin.start("quickstart", "--steps", str(steps), *_BEFORE, *overrides(**_BOTH, **settings))
        if not exact:
            origin.wait_for_step(step, deadline_s=_DEADLINE_S)
            origin.send(origin.pid, signal.SIGTERM)
        origin.end_with(0 if exact else _STOPPED, deadline_s=_DEADLINE_S)
    return origin.run_dir


def _go_on(origin: Path, units: int, more: int) -> LaunchedRun:
    """Go on in a copy of the directory, for so many steps."""
    target = origin.with_name(f"{origin.name}-{units}-units")
    shutil.copytree(origin, target)
    with LaunchedRun(target) as resumed:
        steps = resumed.last_step()[1] + more
        resumed.resume("--roles", _AFTER, "--steps", str(steps), *overrides(tq__num_storage_units=units))
        resumed.end_with(0, deadline_s=_DEADLINE_S)
    return resumed
