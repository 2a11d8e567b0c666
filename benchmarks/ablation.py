"""The schedules against each other and against what is possible, with `sim` engines: everything but computing is real.

    python benchmarks/ablation.py [--json] [--workloads w0 ...] [--schedules sync ...] [--steps 25] [--skip 5]

    SCHEDULE_vs_ideal_wN     ideal step time / measured: sync, streaming (periodic), async (staleness 1), substep (1)
    SCHEDULE_x_wN            ideal step time of doing one thing at a time / measured
    substep_mean_staleness_vs_async
                             mean over all samples, of their oldest token, at the same bound; the first steps count, too
    staleness_samples, staleness_violations
                             samples whose staleness was looked at in the ledger, and those above the bound

8 rollout instances, 4 actor ranks, 2 reference ranks, each a process of the real launcher; queue and weight transfer
are real; 256 samples a step. Step times are means over the steps after the first ones. Progress goes to stderr.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any


def measure(workloads: list[str], schedules: list[str], *, steps: int, skip: int, directory: Path) -> dict[str, Any]:
    """Run everything; returns the figures."""
    from ablation_parts.ideal import step_s
    from ablation_parts.launched import launch
    from ablation_parts.workloads import SCHEDULES, WORKLOADS

    figures: dict[str, Any] = {}
    staleness: dict[str, list[int]] = {schedule: [] for schedule in schedules}
    violations = 0
    for name in workloads:
        workload, seed = WORKLOADS[name], 0
        sequential_s = step_s(workload, max_staleness=0, seed=seed, steps=steps, skip=skip, sequential=True)
        for schedule in schedules:
            bound = SCHEDULES[schedule]["max_staleness"]
            ideal_s = sequential_s
            if schedule != "sync":
                ideal_s = step_s(workload, max_staleness=bound, seed=seed, steps=steps, skip=skip)
            ran = launch(workload, schedule, directory / f"{name}-{schedule}", steps=steps, seed=seed)
            measured_s = ran.step_s(skip)
            figures[f"{schedule}_vs_ideal_{name}"] = ideal_s / measured_s
            figures[f"{schedule}_x_{name}"] = sequential_s / measured_s
            staleness[schedule] += ran.staleness
            violations += sum(not 0 <= each <= bound for each in ran.staleness)
            _say(
                f"{name} {schedule}: {measured_s:.2f} s a step, ideal {ideal_s:.2f} s ({ideal_s / measured_s:.3f}), "
                f"{sequential_s / measured_s:.2f}x, mean staleness {statistics.fmean(ran.staleness):.2f}"
            )
    if {"substep", "async"} <= staleness.keys():
        means = {schedule: statistics.fmean(each) for schedule, each in staleness.items()}
        figures["substep_mean_staleness_vs_async"] = means["substep"] / means["async"]
    figures["staleness_samples"] = sum(map(len, staleness.values()))
    figures["staleness_violations"] = violations
    return figures


_BEGAN = time.monotonic()


def _say(text: str) -> None:
    print(f"[{time.monotonic() - _BEGAN:6.1f} s] {text}", file=sys.stderr, flush=True)


def main() -> int:
    """Measure and print."""
    here = Path(__file__).resolve().parent
    sys.path[:] = [*(each for each in sys.path if Path(each or ".").resolve() != here), str(here.parent), str(here)]
    from ablation_parts.workloads import SCHEDULES, WORKLOADS

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    parser.add_argument("--workloads", nargs="*", choices=WORKLOADS, default=["w0", "w1", "w2", "w3"])
    parser.add_argument("--schedules", nargs="*", choices=SCHEDULES, default=list(SCHEDULES))
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--skip", type=int, default=5, help="steps at the start that do not count")
    given = parser.parse_args()
    if given.steps <= given.skip + 1 or not given.workloads or not given.schedules:
        parser.error("give a workload, a schedule, and at least two steps more than --skip")
    with tempfile.TemporaryDirectory(prefix="ablation-") as temporary:
        figures = measure(
            given.workloads, given.schedules, steps=given.steps, skip=given.skip, directory=Path(temporary)
        )
    if given.json:
        print(json.dumps(figures, indent=1))
    else:
        print("\n".join(f"{name:36} {value:10.4g}" for name, value in figures.items()))
    return 1 if figures["staleness_violations"] else 0


if __name__ == "__main__":
    sys.exit(main())
