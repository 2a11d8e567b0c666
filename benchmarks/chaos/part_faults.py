"""`faults faults_recovered faults_named hangs`: what else can go wrong, one fault after the other.

Each has a run of its own and ends in recovery, or in an exit whose last line names who and why; see `faults.py`.
"""

from benchmarks.chaos.faults import inject_faults
from benchmarks.chaos.options import Options
from benchmarks.transferqueue.part import Result

_SHORT = ("reward_raises", "loss_is_not_finite")
"""The tests have a file of their own with more of them."""


def run(options: Options) -> Result:
    """Inject them."""
    only = _SHORT if options.short else ()
    report = inject_faults(options.seed, only=only, keep=options.directory / "faults", say=options.say)
    each = report.pop("each")
    problems = [f"{one['fault']}: {one['seen']}, not {one['expected']}: {one['detail']}" for one in each
                if one["seen"] != one["expected"]]  # fmt: skip
    return Result(report, {"faults": {"each": each, "problems": problems}})
