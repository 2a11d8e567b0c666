"""Does older data cost accuracy? The quickstart under every schedule, several seeds each, and a picture of it.

    python benchmarks/learning.py [--json [FILE]] [--seeds 5] [--steps 60] [--plot docs/learning.png]
    python benchmarks/learning.py --algorithms [NAME ...] [--json [FILE]] [--seeds 5]
    python benchmarks/learning.py --distill [--json [FILE]] [--seeds 5] [--steps 60]

    accuracy_SCHEDULE         mean over seeds of the accuracy of the last 5 steps; async2: max_staleness 2
    points_vs_sync_SCHEDULE   the difference to sync, in points of a hundred
    points_interval_SCHEDULE  half the width of its 95 % interval (Welch's t over the seeds)
    staleness_SCHEDULE        mean staleness of the samples
    worst_points_vs_sync      the lowest of the differences

With `--algorithms` each algorithm (all, or those named) under sync and async2, with two updates a step
(`--mini-batches`), since with one no clip ever acts and most of them make the same update:

    accuracy_ALGORITHM_SCHEDULE       mean over seeds, as above
    accuracy_std_ALGORITHM_SCHEDULE   its deviation over seeds

With `--distill`, a teacher is trained first (GRPO, seed 1000), and each seed's student learns the task twice, by GRPO
and from the teacher's 8 likeliest tokens (`algorithm.top_k`), with the quickstart's own settings otherwise:

    grpo_steps, distill_steps    median over seeds of the first step with an accuracy of 0.95 or more; a run that never
                                 comes so far counts as one step more than it has
    distill_steps_x              median over seeds of distillation's / GRPO's
    teacher_accuracy             of the teacher's last 5 steps

Runs take turns: every schedule with seed 0, then with seed 1, ... so that what else the machine does hits all alike.
The picture (needs matplotlib) shows reward, response length and its deviation, over steps and over wall clock: the
mean over seeds, and from the lowest to the highest.
"""

import argparse
import math
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the clone, for `benchmarks` and its packages

from asyncflow.json_lines import LineReader
from benchmarks.json_option import add_json_option, report

COMMAND = Path(sys.executable).parent / "asyncflow-launch"
SCHEDULES = {"sync": ("sync", 0), "async1": ("async", 1), "async2": ("async", 2), "async4": ("async", 4),
             "substep1": ("substep", 1)}  # fmt: skip
ALGORITHMS: Mapping[str, tuple[str, ...]] = {
    "grpo": (), "dr_grpo": ("scale_advantages_by_std=false", "loss_normalization=constant"), "dapo": ("name=dapo",),
    "gspo": ("name=gspo",), "cispo": ("name=cispo",), "dppo_tv": ("name=dppo",),
    "dppo_kl": ("name=dppo", "divergence=kl"), "rloo": ("name=rloo",),
    "reinforce_plus_plus": ("name=reinforce_plus_plus",),
    "reinforce_plus_plus_baseline": ("name=reinforce_plus_plus", "baseline=group"), "ppo": ("name=ppo",),
    "decoupled": ("off_policy.method=decoupled",), "icepop": ("off_policy.method=icepop",),
    "sequence_mask": ("off_policy.mask=sequence",), "geometric_mask": ("off_policy.mask=geometric",),
}  # fmt: skip
"""Rows of the table -> settings of section `algorithm`; the corrections are GRPO's."""
STEPS_AT_MOST = {"dapo": 35}
"""DAPO leaves out groups whose responses are all right: a run ends once nine of ten are."""
LAST_STEPS = 5
TARGET = 0.95
TEACHER_SEED = 1000
CURVES = {
    "reward_mean": "reward",
    "response_tokens_mean": "response length (tokens)",
    "response_tokens_std": "its deviation (tokens)",
}
Metrics = list[dict[str, Any]]


def train(
    directory: Path,
    schedule: str,
    *,
    seed: int,
    steps: int,
    algorithm: str = "grpo",
    mini_batches: int = 1,
    teacher: Path | None = None,
) -> Metrics:
    """Run the quickstart under a schedule, with one of `ALGORITHMS`, or with a teacher; returns its metrics.

    Raises:
        SystemExit: the run failed; says what it printed.
    """
    mode, max_staleness = SCHEDULES[schedule]
    steps = min(steps, STEPS_AT_MOST.get(algorithm, steps))
    settings = [f"schedule.mode={mode}", f"schedule.max_staleness={max_staleness}", f"seed={seed}",
                "rollout.samples_per_step=0", "checkpoint.interval=0", f"actor.num_mini_batches={mini_batches}",
                *(f"algorithm.{setting}" for setting in ALGORITHMS[algorithm])]  # fmt: skip
    if teacher is not None:
        settings += ["algorithm={name: distill, top_k: 8}", f"ref.path={teacher}"]
    options = [part for setting in settings for part in ("--set", setting)]
    command: list[str | Path] = [COMMAND, "quickstart", "--steps", str(steps), "--run-dir", str(directory), *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{algorithm}, {schedule}: exit status {done.returncode}\n{done.stdout}\n{done.stderr}")
    return LineReader(directory / "metrics.jsonl").read()


def figures_of(runs: Mapping[str, Sequence[Metrics]]) -> dict[str, float]:
    """Return the figures from every schedule's runs, one per seed."""
    figures: dict[str, float] = {}
    final = {name: [_final_accuracy(metrics) for metrics in of_seeds] for name, of_seeds in runs.items()}
    for name, accuracies in final.items():
        figures[f"accuracy_{name}"] = statistics.fmean(accuracies)
        figures[f"staleness_{name}"] = statistics.fmean(line["staleness_mean"] for run in runs[name] for line in run)
        if name != "sync" and "sync" in final:
            figures[f"points_vs_sync_{name}"] = 100 * (statistics.fmean(accuracies) - statistics.fmean(final["sync"]))
            figures[f"points_interval_{name}"] = 100 * _half_width(accuracies, final["sync"])
    differences = [value for name, value in figures.items() if name.startswith("points_vs_sync_")]
    if differences:
        figures["worst_points_vs_sync"] = min(differences)
    return figures


def table_of(runs: Mapping[tuple[str, str], Sequence[Metrics]]) -> dict[str, float]:
    """Return the figures of (algorithm, schedule) -> runs, one per seed."""
    figures: dict[str, float] = {}
    for (algorithm, schedule), of_seeds in runs.items():
        accuracies = [_final_accuracy(metrics) for metrics in of_seeds]
        figures[f"accuracy_{algorithm}_{schedule}"] = statistics.fmean(accuracies)
        figures[f"accuracy_std_{algorithm}_{schedule}"] = statistics.pstdev(accuracies)
    return figures


def distill(*, seeds: int, steps: int, directory: Path) -> dict[str, float]:
    """Train a teacher, then students of as many seeds with and without it; returns the figures."""
    taught = train(directory / "teacher", "async1", seed=TEACHER_SEED, steps=steps)
    teacher = directory / "teacher" / "checkpoints" / f"step_{steps:06d}" / "hf"
    alone, with_teacher = [], []
    for seed in range(seeds):
        alone.append(_steps_to_target(train(directory / f"grpo-{seed}", "async1", seed=seed, steps=steps)))
        student = train(directory / f"distill-{seed}", "async1", seed=seed, steps=steps, teacher=teacher)
        with_teacher.append(_steps_to_target(student))
        print(f"seed {seed}: grpo {alone[-1]} steps, distill {with_teacher[-1]}", file=sys.stderr, flush=True)
    return {
        "teacher_accuracy": _final_accuracy(taught),
        "grpo_steps": statistics.median(alone),
        "distill_steps": statistics.median(with_teacher),
        "distill_steps_x": statistics.median(b / a for a, b in zip(alone, with_teacher, strict=True)),
    }


def _steps_to_target(metrics: Metrics) -> int:
    reached = (int(line["step"]) for line in metrics if float(line["accuracy"]) >= TARGET)
    return next(reached, len(metrics) + 1)


def _final_accuracy(metrics: Metrics) -> float:
    return statistics.fmean(float(line["accuracy"]) for line in metrics[-LAST_STEPS:])


def _half_width(one: Sequence[float], other: Sequence[float]) -> float:
    """Return half the 95 % interval of the difference of two means (Welch 1947); infinite for less than two seeds."""
    if min(len(one), len(other)) < 2:
        return float("inf")
    parts = [statistics.variance(each) / len(each) for each in (one, other)]
    if not sum(parts):
        return 0.0
    freedom = sum(parts) ** 2 / sum(part**2 / (len(each) - 1) for part, each in zip(parts, (one, other), strict=True))
    return _t_quantile(freedom) * math.sqrt(sum(parts))


def _t_quantile(freedom: float) -> float:
    """Return Student's 97.5 % quantile (Cornish-Fisher, Abramowitz and Stegun 26.7.5)."""
    z = statistics.NormalDist().inv_cdf(0.975)
    terms = (
        z,
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return sum(term / freedom**power for power, term in enumerate(terms))


def plot(runs: Mapping[str, Sequence[Metrics]], target: Path) -> None:
    """Draw the curves over steps (above) and over wall clock (below)."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 7), layout="constrained")
    axes = figure.subplots(2, len(CURVES), sharey="col")
    for color, (name, of_seeds) in enumerate(runs.items()):
        times = np.mean([[line["time_s"] for line in metrics] for metrics in of_seeds], axis=0)
        steps = [line["step"] for line in of_seeds[0]]
        for column, (key, label) in enumerate(CURVES.items()):
            values = np.array([[line[key] for line in metrics] for metrics in of_seeds])
            for row, (x, x_label) in enumerate(((steps, "step"), (times, "seconds since the command"))):
                axis = axes[row, column]
                axis.plot(x, values.mean(axis=0), color=f"C{color}", label=name, linewidth=1.4)
                axis.fill_between(x, values.min(axis=0), values.max(axis=0), color=f"C{color}", alpha=0.12, linewidth=0)
                axis.set(xlabel=x_label, ylabel=label)
                axis.grid(alpha=0.25)
    axes[0, 0].legend(frameon=False)
    num_seeds = len(next(iter(runs.values())))
    figure.suptitle(f"Quickstart, {num_seeds} seeds: mean, and from lowest to highest")
    figure.savefig(target, dpi=110)


def main() -> int:
    """Run, print, draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_json_option(parser)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--schedules", nargs="*", choices=SCHEDULES, help="default: all; of algorithms sync async2")
    parser.add_argument("--algorithms", nargs="*", choices=ALGORITHMS, help="the table of these; none named: of all")
    parser.add_argument("--distill", action="store_true", help="steps to an accuracy with a teacher and without")
    parser.add_argument("--mini-batches", type=int, help="updates a step; default: 1, of algorithms 2")
    parser.add_argument("--plot", type=Path, help="draw the curves into this file")
    given = parser.parse_args()
    if given.seeds < 1 or given.steps < LAST_STEPS or given.schedules == []:
        parser.error(f"give a schedule, at least one seed and {LAST_STEPS} steps")
    if given.distill:
        with tempfile.TemporaryDirectory(prefix="learning-") as temporary:
            figures = distill(seeds=given.seeds, steps=given.steps, directory=Path(temporary))
        report(given.json, figures, "\n".join(f"{name:48} {value:10.4f}" for name, value in figures.items()))
        return 0
    is_table = given.algorithms is not None
    algorithms = given.algorithms or (list(ALGORITHMS) if is_table else ["grpo"])
    mini_batches = given.mini_batches or (2 if is_table else 1)
    schedules = given.schedules or (["sync", "async2"] if is_table else list(SCHEDULES))
    runs: dict[tuple[str, str], list[Metrics]] = {(one, name): [] for one in algorithms for name in schedules}
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="learning-") as temporary:
        for seed in range(given.seeds):
            for (algorithm, schedule), done in runs.items():
                directory = Path(temporary) / f"{algorithm}-{schedule}-{seed}"
                options = {"seed": seed, "steps": given.steps, "mini_batches": mini_batches}
                done.append(train(directory, schedule, algorithm=algorithm, **options))
                passed, accuracy = time.monotonic() - began, _final_accuracy(done[-1])
                where = f"seed {seed} {algorithm} {schedule}"
                print(f"[{passed:6.1f} s] {where}: accuracy {accuracy:.4f}", file=sys.stderr, flush=True)
    of_schedules = {name: runs[algorithms[0], name] for name in schedules}
    figures = table_of(runs) if is_table else figures_of(of_schedules)
    if given.plot is not None:
        plot(of_schedules, given.plot)
    report(given.json, figures, "\n".join(f"{name:48} {value:10.4f}" for name, value in figures.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
