"""Experiments that train the quickstart: stability, staleness, periodic. A run's first step begins its clock.

Runs take turns: every schedule with seed 0, then with seed 1, ... so that what else the machine does hits all alike.
"""

import os
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from benchmarks import say_when
from benchmarks.intervals import difference_of, mean_of
from benchmarks.papers.found import Found, Given, draw_band, draw_bars
from benchmarks.recipe_runs import RecipeRun, run_recipe, schedule_settings
from launcher.timeline.run_timeline import RunTimeline

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Runs = Mapping[str, Sequence[RecipeRun]]
"""Schedule -> runs, one per seed."""
_QUICKSTART, _SMOLLM2 = "quickstart", "smollm2-two-digit-sums-cpu"
_STEPS = {_QUICKSTART: 60, _SMOLLM2: 40}
_ROLES = {_QUICKSTART: "rollout:2,actor:1,ref:1,evaluate:1", _SMOLLM2: "rollout:1,actor:1,evaluate:1"}
_OWN = {
    # Drawn as in training, since the likeliest responses are all right after a few steps.
    _QUICKSTART: ("evaluate.interval=3", "evaluate.temperature=1.0", "evaluate.n_samples_per_prompt=8"),
    # 64 of the 400 held-out sums, often: an evaluation of all is as much work as six steps.
    _SMOLLM2: ("evaluate.interval=8", "evaluate.max_prompts=64", "algorithm.kl_coef=0"),
}
_LITTLE_KEPT = ("rollout.samples_per_step=0", "checkpoint.interval=0", "checkpoint.export_hf=false")
_LAST_STEPS = 5


def _train(
    given: Given,
    recipe: str,
    schedules: Mapping[str, tuple[str, int]],
    settings: Sequence[str],
    *,
    evaluated: bool = True,
) -> Runs:
    """Run every schedule, (mode, largest staleness), with every seed."""
    runs: dict[str, list[RecipeRun]] = {name: [] for name in schedules}
    for seed in range(given.seeds):
        for name, (mode, staleness) in schedules.items():
            schedule = (*schedule_settings(mode, staleness), f"seed={seed}")
            ran = run_recipe(
                recipe,
                given.directory / f"{name}-{seed}",
                [*schedule, *settings, *_LITTLE_KEPT],
                steps=given.steps or _STEPS[recipe],
                roles=_ROLES[recipe] if evaluated else "",
            )
            runs[name].append(ran)
            say_when(f"seed {seed} {name}: {ran.times_s()[-1]:.1f} s, accuracy {_final(ran, 'accuracy'):.4f}")
    return runs


def _final(ran: RecipeRun, key: str) -> float:
    return float(np.mean(ran.column(key)[-_LAST_STEPS:]))


# Stability: figure 12 of arXiv 2507.01663. There, Qwen2.5-7B on 16 NPUs, equal clock time: rewards do not differ,
# lengths converge.
_STABILITY = {"off": ("sync", 0), "on": ("async", 1)}
_CURVES = {"reward_mean": "reward", "response_tokens_mean": "response tokens", "held out": "held-out accuracy"}
_REACHED = 0.95
"""Equal accuracy: this share of the best that both runs of a seed have."""


def stability(given: Given) -> Found:
    """Reward, response length and held-out accuracy against wall clock, with asynchronous training off and on."""
    recipe = _QUICKSTART if given.model is None else _SMOLLM2
    own = _OWN[recipe] if given.model is None else (*_OWN[recipe], f"model.path={given.model}")
    runs = _train(given, recipe, _STABILITY, own)
    shortest_s = min(ran.times_s()[-1] for of_seeds in runs.values() for ran in of_seeds)
    rows: list[list[str]] = []
    figures: dict[str, float] = {}
    for key, label in _CURVES.items():
        for share in (0.25, 0.5, 0.75, 1.0):
            at = share * shortest_s
            off, on = ([_value_at(ran, key, at) for ran in runs[name]] for name in _STABILITY)
            difference = difference_of(on, off)
            rows.append([label, f"{at:.1f}", *(mean_of(each).text(3) for each in (off, on)), difference.text(3)])
        name = label.replace(" ", "_").replace("-", "_")
        figures |= {f"{name}_difference": difference.value, f"{name}_difference_interval": difference.half_width}
    pairs = list(zip(runs["off"], runs["on"], strict=True))
    gained = mean_of([_clock_to_equal_accuracy(*pair) for pair in pairs])
    ideal = mean_of([_ideal_x(ran) for ran in runs["off"]])
    steps = mean_of([off.times_s()[-1] / on.times_s()[-1] for off, on in pairs])
    figures |= {
        "async_wall_x": gained.value, "async_wall_x_interval": gained.half_width, "async_wall_ideal_x": ideal.value,
        "async_steps_x": steps.value, "async_steps_x_interval": steps.half_width,
    }  # fmt: skip
    what = f"{recipe}, {given.seeds} seeds, mean and 95 % interval"
    columns = ("figure", "clock (s)", "off (sync)", "on (async, 1)", "on - off")
    return Found(f"Stability: {what}", columns, rows, figures, partial(_draw_stability, runs, shortest_s))


def _curve(ran: RecipeRun, key: str) -> tuple[list[float], list[float]]:
    return ran.held_out() if key == "held out" else (ran.times_s(), ran.column(key))


def _value_at(ran: RecipeRun, key: str, at: float) -> float:
    return float(np.interp(at, *_curve(ran, key)))


def _clock_to_equal_accuracy(off: RecipeRun, on: RecipeRun) -> float:
    """Return how many times as long `off` takes to the same held-out accuracy."""
    level = _REACHED * min(max(off.held_out()[1]), max(on.held_out()[1]))
    took = []
    for ran in (off, on):
        times, accuracies = ran.held_out()
        best = np.maximum.accumulate(accuracies)
        place = int(np.argmax(best >= level))
        began = max(0, place - 1)
        took.append(float(np.interp(level, best[began : place + 1], times[began : place + 1])))
    if not took[1]:
        raise SystemExit("stability: the untrained model is as good as the trained one; give more --steps")
    return took[0] / took[1]


def _ideal_x(off: RecipeRun) -> float:
    """Return what overlapping the roles of a sequential run could gain at most: all their work at a time, on all cores.

    T is a step in turn, the sum of what each role takes (its busy share b, the mean over its n processes). Overlapped
    it takes the longest b of T, and no less than the processor time of all, the sum of n b, over the cores.
    """
    timeline = RunTimeline.read(off.directory)
    busy = {role: shares["busy"] for role, shares in timeline.account_by_role().items() if role in _COMPUTES}
    number = {role: sum(name.startswith(f"{role}-") for name in timeline.spans) for role in busy}
    cores_share = sum(number[role] * share for role, share in busy.items()) / (os.cpu_count() or 1)
    return sum(busy.values()) / max(*busy.values(), cores_share)


_COMPUTES = ("rollout", "actor", "ref")


def _draw_stability(runs: Runs, shortest_s: float, figure: "Figure") -> None:
    clock = np.linspace(0.0, shortest_s, 80)
    axes = figure.subplots(1, len(_CURVES))
    for axis, (key, label) in zip(axes, _CURVES.items(), strict=True):
        for number, (name, of_seeds) in enumerate(runs.items()):
            curves = [np.interp(clock, *_curve(ran, key)).tolist() for ran in of_seeds]
            draw_band(axis, clock.tolist(), curves, f"C{number}", f"asynchronous {name}")
        axis.set(xlabel="seconds since step 1 began", ylabel=label)
    axes[0].legend(frameon=False)


# Staleness: the same steps with weights of different ages.


def staleness(given: Given) -> Found:
    """Accuracy and speed by the largest staleness that the schedule allows."""
    schedules = {str(bound): ("async" if bound else "periodic", bound) for bound in given.bounds}
    steps = given.steps or _STEPS[_QUICKSTART]
    runs = _train(given, _QUICKSTART, schedules, (f"evaluate.interval={steps}",))
    rows: list[list[str]] = []
    figures: dict[str, float] = {}
    first = runs[str(given.bounds[0])]
    for name, of_seeds in runs.items():
        mean_age = mean_of([float(np.mean(ran.column("staleness_mean"))) for ran in of_seeds])
        accuracy, held_out = [_final(ran, "accuracy") for ran in of_seeds], [ran.held_out()[1][-1] for ran in of_seeds]
        speed = [before.times_s()[-1] / ran.times_s()[-1] for before, ran in zip(first, of_seeds, strict=True)]
        points = difference_of(accuracy, [_final(ran, "accuracy") for ran in first])
        against = "" if of_seeds is first else f"{100 * points.value:.2f} ± {100 * points.half_width:.2f}"
        cells = (mean_of(accuracy).text(4), against, mean_of(held_out).text(3), mean_of(speed).text(2))
        rows.append([name, f"{mean_age.value:.2f}", *cells])
        figures |= {
            f"accuracy_{name}": mean_of(accuracy).value, f"held_out_{name}": mean_of(held_out).value,
            f"staleness_{name}": mean_age.value, f"speed_x_{name}": mean_of(speed).value,
        }  # fmt: skip
        if of_seeds is not first:
            figures |= {f"points_{name}": 100 * points.value, f"points_interval_{name}": 100 * points.half_width}
    columns = (
        "at most",
        "mean",
        f"accuracy, last {_LAST_STEPS} steps",
        "points against the first",
        "held out",
        "speed",
    )
    title = f"Staleness: quickstart, {steps} steps, {given.seeds} seeds, mean and 95 % interval"
    return Found(title, columns, rows, figures, partial(_draw_staleness, runs))


def _draw_staleness(runs: Runs, figure: "Figure") -> None:
    left, right = figure.subplots(1, 2)
    for number, (name, of_seeds) in enumerate(runs.items()):
        steps = of_seeds[0].column("step")
        draw_band(left, steps, [ran.column("reward_mean") for ran in of_seeds], f"C{number}", f"at most {name}")
    left.set(xlabel="step", ylabel="reward")
    left.legend(frameon=False)
    finals = [[_final(ran, "accuracy") for ran in of_seeds] for of_seeds in runs.values()]
    draw_bars(right, range(len(runs)), finals, color="C0")
    right.set_xticks(range(len(runs)), list(runs))
    right.set(xlabel="largest staleness", ylabel=f"accuracy of the last {_LAST_STEPS} steps")
    right.set_ylim(bottom=max(0.0, min(map(min, finals)) - 0.05))


# Periodic against sync: figure 5 of arXiv 2511.18871, where rewards coincide step by step.
_PERIODIC = {"sync": ("sync", 0), "periodic": ("periodic", 0)}
_TENTH = 10


def periodic(given: Given) -> Found:
    """Rewards of periodic and of sync training, step by step; and how long both take."""
    runs = _train(given, _QUICKSTART, _PERIODIC, (), evaluated=False)
    pairs = list(zip(runs["sync"], runs["periodic"], strict=True))
    gaps = np.array([np.subtract(two.column("reward_mean"), one.column("reward_mean")) for one, two in pairs])
    rows = []
    for start in range(0, gaps.shape[1], -(-gaps.shape[1] // _TENTH)):
        chosen = slice(start, start + -(-gaps.shape[1] // _TENTH))
        cells = [
            mean_of([float(np.mean(ran.column("reward_mean")[chosen])) for ran in of_seeds]).text(4)
            for of_seeds in runs.values()
        ]
        inside = gaps[:, chosen]
        last = start + inside.shape[1]
        difference = mean_of(inside.mean(axis=1).tolist())
        rows.append([f"{start + 1} to {last}", *cells, difference.text(4), f"{np.abs(inside).max():.4f}"])
    whole = mean_of(gaps.mean(axis=1).tolist())
    faster = mean_of([one.times_s()[-1] / two.times_s()[-1] for one, two in pairs])
    figures = {
        "periodic_reward_difference": whole.value, "periodic_reward_difference_interval": whole.half_width,
        "periodic_reward_max_abs": float(np.abs(gaps).max()),
        "periodic_first_step_max_abs": float(np.abs(gaps[:, 0]).max()),
        "periodic_wall_x": faster.value, "periodic_wall_x_interval": faster.half_width,
    }  # fmt: skip
    columns = ("steps", "reward, sync", "reward, periodic", "difference of a seed's mean", "largest of a step")
    title = f"Periodic against sync: quickstart, {given.seeds} seeds, mean and 95 % interval"
    return Found(title, columns, rows, figures, partial(_draw_periodic, runs, gaps))


def _draw_periodic(runs: Runs, gaps: "np.ndarray[tuple[int, ...], np.dtype[np.float64]]", figure: "Figure") -> None:
    left, right = figure.subplots(1, 2)
    steps = runs["sync"][0].column("step")
    for number, (name, of_seeds) in enumerate(runs.items()):
        draw_band(left, steps, [ran.column("reward_mean") for ran in of_seeds], f"C{number}", name)
    left.set(xlabel="step", ylabel="reward")
    left.legend(frameon=False)
    for seed, gap in enumerate(gaps):
        right.plot(steps, gap, linewidth=1, label=f"seed {seed}")
    right.axhline(0.0, color="black", linewidth=0.8)
    right.set(xlabel="step", ylabel="reward, periodic - sync")
    right.legend(frameon=False)
    right.grid(alpha=0.25)
