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

from transferqueue_parts.part import Result

from chaos_parts.launched_run import LaunchedRun, overrides
from chaos_parts.options import Options
from chaos_parts.run_audit import Audit, audit

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
    """Save once, go on twice, in both ways."""
    saved, more = (_SHORT_SAVED, _SHORT_MORE) if options.short else (_SAVED, _MORE)
    audits: list[Audit] = []
    details: dict[str, Any] = {"problems": []}
    whole = _loss_of_whole_run(options, saved + 1)
    for name, settings in (("exact", _EXACT), ("streamed", _STREAMED)):
        origin = options.directory / f"elastic-{name}"
        _save(origin, settings, saved)
        for units in _UNITS:
            resumed = _go_on(origin, units, more)
            audits.append(audit(resumed.lines("ledger.jsonl"), resumed.lines("updates.jsonl")))
            first = next(line for line in resumed.lines("metrics.jsonl") if line["lineage"])
            said = {"first_step": first["step"], "loss": first["loss"], **asdict(audits[-1])}
            if name == "exact":
                said["loss_difference"] = abs(first["loss"] - whole)
                if said["loss_difference"] > _LOSS_DIFFERENCE:
                    details["problems"].append(f"{units} units: the loss of step {first['step']} is another one")
            details[f"{name}, {units} units"] = said
            options.say(f"elastic: {name}, {units} units: {said}")
    figures = {
        "skipped": sum(one.skipped for one in audits),
        "twice": sum(one.twice + one.updates_twice for one in audits),
    }
    return Result(figures, {"elastic": details})


def _loss_of_whole_run(options: Options, step: int) -> float:
    """Return the loss of a step of a run that has the first layout throughout."""
    with LaunchedRun(options.directory / "elastic-whole") as whole:
        whole.start("quickstart", "--steps", str(step), *_BEFORE, *overrides(**_BOTH, **_EXACT))
        whole.end_with(0, deadline_s=_DEADLINE_S)
    return float(whole.lines("metrics.jsonl")[-1]["loss"])


def _save(directory: Path, settings: dict[str, object], step: int) -> None:
    """Run to a checkpoint: a deterministic run ends there, another one is stopped."""
    exact = settings is _EXACT
    steps = step if exact else _ENDLESS
    with LaunchedRun(directory) as origin:
        origin.start("quickstart", "--steps", str(steps), *_BEFORE, *overrides(**_BOTH, **settings))
        if not exact:
            origin.wait_for_step(step, deadline_s=_DEADLINE_S)
            origin.send(origin.pid, signal.SIGTERM)
        origin.end_with(0 if exact else _STOPPED, deadline_s=_DEADLINE_S)


def _go_on(origin: Path, units: int, more: int) -> LaunchedRun:
    """Go on in a copy of the directory, for so many steps."""
    target = origin.with_name(f"{origin.name}-{units}-units")
    shutil.copytree(origin, target)
    with LaunchedRun(target) as resumed:
        steps = resumed.last_step()[1] + more
        resumed.resume("--roles", _AFTER, "--steps", str(steps), *overrides(tq__num_storage_units=units))
        resumed.end_with(0, deadline_s=_DEADLINE_S)
    return resumed
