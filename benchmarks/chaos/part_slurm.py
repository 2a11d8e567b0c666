"""`requeues skipped twice`: preempted, requeued and resumed again and again by a real Slurm; see `slurm_cycles.py`."""

from benchmarks.chaos.options import Options
from benchmarks.chaos.slurm_cycles import preempt_cycles
from benchmarks.transferqueue.part import Result
from tests.support.local_slurm import slurm_obstacle

_CYCLES, _SHORT_CYCLES = 20, 2


def run(options: Options) -> Result:
    """Preempt; without Slurm on this machine there are no figures."""
    if reason := slurm_obstacle():
        options.say(f"slurm: left out: {reason}")
        return Result({}, {"slurm": {"missing": reason}})
    report = preempt_cycles(_SHORT_CYCLES if options.short else _CYCLES, seed=options.seed)
    figures = {key: report[key] for key in ("requeues", "skipped", "twice")}
    problems = [] if report["finished"] else ["the job did not finish after its last start"]
    return Result(figures, {"slurm": {**report, "problems": problems}})
