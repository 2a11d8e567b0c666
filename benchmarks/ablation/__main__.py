"""The schedules against each other and against what is possible, with `sim` engines: everything but computing is real.

    python benchmarks/ablation [--json [FILE]] [--parts ...] [--steps 25] [--skip 5] [--workloads ...] ...

    schedules   SCHEDULE_vs_ideal_wN     ideal step time / measured: sync, streaming (periodic), async and substep with
                                         staleness 1, substep2
                SCHEDULE_x_wN            ideal step time of doing one thing at a time / measured
                substep_mean_staleness_vs_async, also _wN
                                         means over the samples, of their oldest token, at the same bound
    idle        actor_idle_w4            share of async's steady state in which the actor's ranks do not compute
                idle_account_sum         the role's sum in the account of idle time that is farthest from 1
                timeline_overhead        largest share of a process's CPU time that recording spans took
    scaling     scaling_NNx              samples per second with so many times the instances, and the work, of 1x (one
                                         process of each role), over so many times those of 1x: w2, async with
                                         staleness 2 (at 1 the ideal itself loses: more responses, a longer longest one)
    staleness   staleness_samples, staleness_violations
                                         samples of simulated runs with heavy tails, kills and resumes, and those that
                                         were outside the bound; the runs above count, too
    periodic    periodic_vs_sync_max_rel largest relative difference of a gradient, streamed and in order, same rows

8 rollout instances, 4 actor ranks, 2 reference ranks, each a process of the real launcher; queue and weight transfer
are real; 256 samples a step. Step times are means over the steps after the first ones. Progress goes to stderr.
"""

import argparse
import math
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the clone, for `benchmarks` and its packages

from benchmarks import say_when
from benchmarks.json_option import add_json_option, report

_FIRES = (
    ("periodic", 0, "in_order"),
    ("async", 1, "in_order"),
    ("async", 4, "in_order"),
    ("substep", 2, "in_order"),
    ("async", 2, "first_ready"),
    ("substep", 4, "first_ready"),
)
_FIRE_SAMPLES = 20_000
_FACTORS = (1, 2, 4, 8, 16)


@dataclass(frozen=True)
class Given:
    """What the command line asks for."""

    workloads: Sequence[str]
    schedules: Sequence[str]
    steps: int
    skip: int
    factors: Sequence[int]
    directory: Path


def schedules(given: Given) -> dict[str, float]:
    """Run every schedule on every workload."""
    from benchmarks.ablation.ideal import step_s
    from benchmarks.ablation.launched import launch
    from benchmarks.ablation.workloads import SCHEDULES, WORKLOADS

    figures: dict[str, float] = {"staleness_samples": 0, "staleness_violations": 0}
    means: dict[str, dict[str, float]] = {}
    for name in given.workloads:
        workload = WORKLOADS[name]
        ideal: dict[str, Any] = {"seed": 0, "steps": given.steps, "skip": given.skip}
        sequential_s = step_s(workload, max_staleness=0, sequential=True, **ideal)
        for schedule in given.schedules:
            bound = SCHEDULES[schedule]["max_staleness"]
            ideal_s = sequential_s if schedule == "sync" else step_s(workload, max_staleness=bound, **ideal)
            ran = launch(workload, schedule, given.directory / f"{name}-{schedule}", steps=given.steps, seed=0)
            measured_s = ran.step_s(given.skip)
            figures[f"{schedule}_vs_ideal_{name}"] = ideal_s / measured_s
            figures[f"{schedule}_x_{name}"] = sequential_s / measured_s
            figures["staleness_samples"] += len(ran.staleness)
            figures["staleness_violations"] += sum(not 0 <= each <= bound for each in ran.staleness)
            mean = means.setdefault(schedule, {})[name] = statistics.fmean(ran.staleness)
            say_when(
                f"{name} {schedule}: {measured_s:.2f} s a step, ideal {ideal_s:.2f} s ({ideal_s / measured_s:.3f}), "
                f"{sequential_s / measured_s:.2f}x, mean staleness {mean:.2f}"
            )
    return figures | _staleness_ratios(means)


def _staleness_ratios(means: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    if not {"substep", "async"} <= means.keys():
        return {}
    pairs = {name: (means["substep"][name], means["async"][name]) for name in means["async"]}
    ratios = {f"substep_mean_staleness_vs_async_{name}": one / other for name, (one, other) in pairs.items()}
    whole = sum(one for one, _ in pairs.values()) / sum(other for _, other in pairs.values())
    return {"substep_mean_staleness_vs_async": whole, **ratios}


def idle(given: Given) -> dict[str, float]:
    """Run w4 under async; look at its timeline."""
    from asyncflow.timeline import measure_span_cost
    from benchmarks.ablation.launched import launch
    from benchmarks.ablation.workloads import WORKLOADS

    ran = launch(WORKLOADS["w4"], "async", given.directory / "w4-idle", steps=given.steps, seed=0)
    sums = [sum(shares.values()) for shares in ran.timeline.account_by_role().values()]
    figures = {
        "actor_idle_w4": ran.idle("actor", given.skip),
        "idle_account_sum": max(sums, key=lambda total: abs(total - 1)),
        "timeline_overhead": ran.timeline.recording_overhead(measure_span_cost()),
    }
    say_when(f"w4 async: actor idle {figures['actor_idle_w4']:.3f}, recording {figures['timeline_overhead']:.4f}")
    return figures


def scaling(given: Given) -> dict[str, float]:
    """Run w2 with more and more instances, each with the same work."""
    from benchmarks.ablation.launched import launch
    from benchmarks.ablation.workloads import UNIT

    rates: dict[int, float] = {}
    for factor in given.factors:
        workload = UNIT.times(factor)
        ran = launch(workload, "async2", given.directory / f"scaling-{factor}", steps=given.steps, seed=0)
        rates[factor] = workload.samples / ran.step_s(given.skip)
        say_when(f"scaling {factor}x: {ran.step_s(given.skip):.2f} s a step, {rates[factor]:.1f} samples/s")
    first = given.factors[0]
    return {f"scaling_{factor}x": rate * first / rates[first] / factor for factor, rate in rates.items()}


def staleness(given: Given) -> dict[str, float]:
    """Simulate runs in which things die."""
    from benchmarks.ablation.staleness import under_fire
    from workers.settings.schedule import Fill, ScheduleMode

    runs = [
        under_fire(ScheduleMode(mode), bound, fill=Fill(fill), samples=_FIRE_SAMPLES, seed=bound)
        for mode, bound, fill in _FIRES
    ]
    kills, resumes = sum(run.kills for run in runs), sum(run.resumes for run in runs)
    wrong = sum(run.missing + run.twice for run in runs)
    say_when(f"{kills} kills, {resumes} resumes; samples missing or trained twice: {wrong}")
    return {
        "staleness_samples": sum(run.samples for run in runs),
        "staleness_violations": sum(run.violations for run in runs) + wrong,
    }


def periodic(given: Given) -> dict[str, float]:
    """Compare gradients."""
    from benchmarks.ablation.equivalence import max_relative_difference

    return {"periodic_vs_sync_max_rel": max_relative_difference()}


PARTS: dict[str, Callable[[Given], dict[str, float]]] = {
    each.__name__: each for each in (periodic, staleness, idle, scaling, schedules)
}


def main() -> int:
    """Measure and print."""
    from benchmarks.ablation.workloads import SCHEDULES, WORKLOADS

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_json_option(parser)
    parser.add_argument("--parts", nargs="*", choices=PARTS, default=list(PARTS))
    parser.add_argument("--workloads", nargs="*", choices=WORKLOADS, default=["w0", "w1", "w2", "w3"])
    compared = [name for name in SCHEDULES if name != "async2"]
    parser.add_argument("--schedules", nargs="*", choices=SCHEDULES, default=compared)
    parser.add_argument("--factors", nargs="*", type=int, default=list(_FACTORS), help="of scaling")
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--skip", type=int, default=5, help="steps at the start that do not count")
    asked = parser.parse_args()
    if asked.steps <= asked.skip + 1 or not asked.workloads or not asked.schedules or min(asked.factors, default=0) < 1:
        parser.error("give a workload, a schedule, factors from 1, and at least two steps more than --skip")
    figures: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="ablation-") as temporary:
        given = Given(asked.workloads, asked.schedules, asked.steps, asked.skip, asked.factors, Path(temporary))
        for part in asked.parts:
            for name, value in PARTS[part](given).items():
                both = name in figures and name.startswith("staleness_")
                figures[name] = figures[name] + value if both else value
    report(asked.json, figures, "\n".join(f"{name:36} {value:10.4g}" for name, value in figures.items()))
    return 1 if figures.get("staleness_violations", 0) or any(map(math.isnan, figures.values())) else 0


if __name__ == "__main__":
    sys.exit(main())
