"""Experiments on `sim` engines: everything but computing is real. They run the workloads of `benchmarks/ablation`."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from benchmarks import say_when
from benchmarks.ablation import ideal
from benchmarks.ablation.launched import launch, launch_values, run_values
from benchmarks.ablation.workloads import SCHEDULES, UNIT, WORKLOADS, Cluster, Workload
from benchmarks.intervals import mean_of
from benchmarks.papers.found import Found, Given, draw_bars
from launcher.plan.plan_report import open_planner
from workers.settings.run import RunConfig

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Ablation: table 1 of arXiv 2507.01663, Qwen2.5-7B on 512 NPUs. w0 is close to it.
_WORKLOAD = "w0"
_PAPERS = {"sync": 1.0, "streaming": 2.01, "async": 2.74}
_ABLATED = {"sync": "separated, one task after the other", "streaming": "+ streaming through the queue",
            "async": "+ asynchronous, staleness 1"}  # fmt: skip
_STEPS, _SKIP = 9, 3


def ablation(given: Given) -> Found:
    """Throughput with streaming, and with asynchronous training as well, over one task after the other."""
    workload, steps = WORKLOADS[_WORKLOAD], given.steps or _STEPS
    skip = min(_SKIP, steps - 2)
    seconds: dict[str, list[float]] = {name: [] for name in _ABLATED}
    ideals: dict[str, list[float]] = {name: [] for name in _ABLATED}
    for seed in range(given.seeds):
        for name in _ABLATED:
            ran = launch(workload, name, given.directory / f"{name}-{seed}", steps=steps, seed=seed)
            seconds[name].append(ran.step_s(skip))
            bound: dict[str, Any] = {"seed": seed, "steps": steps, "skip": skip, "sequential": name == "sync"}
            ideals[name].append(
                ideal.step_s(workload, max_staleness=SCHEDULES[name]["max_staleness"], **bound),
            )
            say_when(f"seed {seed} {name}: {seconds[name][-1]:.2f} s a step, ideal {ideals[name][-1]:.2f} s")
    gains = {name: _over(seconds["sync"], of_seeds) for name, of_seeds in seconds.items()}
    ideal_gains = {name: statistics.fmean(_over(ideals["sync"], of_seeds)) for name, of_seeds in ideals.items()}
    rows: list[list[str]] = []
    figures: dict[str, float] = {}
    for name, label in _ABLATED.items():
        gain = mean_of(gains[name])
        cells = (mean_of(seconds[name]).text(2), gain.text(2), f"{ideal_gains[name]:.2f}", f"{_PAPERS[name]:.2f}")
        rows.append([label, *cells])
        figures |= {f"ablation_x_{name}": gain.value, f"ablation_x_interval_{name}": gain.half_width}
        figures[f"ablation_ideal_x_{name}"] = ideal_gains[name]
    columns = ("", "seconds a step", "times the first", "ideal", "the paper, 512 NPUs")
    title = f"Ablation: sim engines, {_WORKLOAD}, 14 processes, {given.seeds} seeds, mean and 95 % interval"
    return Found(title, columns, rows, figures, partial(_draw_ablation, gains, ideal_gains), (7.5, 4.2))


def _over(slow: Sequence[float], fast: Sequence[float]) -> list[float]:
    return [one / other for one, other in zip(slow, fast, strict=True)]


def _draw_ablation(gains: Mapping[str, Sequence[float]], ideals: Mapping[str, float], figure: "Figure") -> None:
    axis = figure.subplots()
    draw_bars(axis, range(len(gains)), list(gains.values()), width=0.4, color="C0", label="measured")
    axis.plot(range(len(gains)), list(ideals.values()), "k_", markersize=28, label="ideal")
    axis.plot(range(len(gains)), list(_PAPERS.values()), "C1D", label="the paper")
    axis.set_xticks(range(len(gains)), ["in turn", "streamed", "asynchronous"])
    axis.set(ylabel="times one task after the other")
    axis.legend(frameon=False)


# Scaling: four inference instances to a training one, as in arXiv 2511.18871, each with the same work at every size.
_INSTANCES = 4
_SCHEDULE = "async2"
_PREDICTED = (32, 64, 128, 256)
"""Units beyond what is run: by the planner alone."""
_SCALING_STEPS, _SCALING_SKIP = 8, 2


def scaling(given: Given) -> Found:
    """Samples per second and instance with more and more instances."""
    steps = given.steps or _SCALING_STEPS
    skip = min(_SCALING_SKIP, steps - 2)
    rates: dict[int, list[float]] = {units: [] for units in given.units}
    for seed in range(given.seeds):
        for units, found in rates.items():
            workload, values = _unit_values(units, steps, seed)
            ran = launch_values(values, given.directory / f"{units}-{seed}")
            found.append(workload.samples / ran.step_s(skip) / (units * _INSTANCES))
            say_when(f"seed {seed}: {units * _INSTANCES} instances: {found[-1]:.3f} samples/s an instance")
    first = given.units[0]
    planned = {units: _planned_rate(units) for units in (*given.units, *_PREDICTED) if units not in _between(given)}
    ideals = {units: _ideal_rate(units, steps, skip) for units in given.units}
    rows: list[list[str]] = []
    figures: dict[str, float] = {}
    shares: dict[int, list[float]] = {}
    for units, predicted in planned.items():
        processes = f"{units * _INSTANCES} + {units}"
        expected = predicted / planned[first]
        if units not in rates:
            rows.append([processes, "", "", "", f"{expected:.3f}"])
            figures[f"scaling_planned_{units * _INSTANCES}"] = expected
            continue
        shares[units] = _over(rates[units], rates[first])
        share, possible = mean_of(shares[units]), ideals[units] / ideals[first]
        cells = (mean_of(rates[units]).text(3), share.text(3), f"{possible:.3f}", f"{expected:.3f}")
        rows.append([processes, *cells])
        figures |= {
            f"scaling_{units * _INSTANCES}": share.value, f"scaling_interval_{units * _INSTANCES}": share.half_width,
            f"scaling_ideal_{units * _INSTANCES}": possible, f"scaling_planned_{units * _INSTANCES}": expected,
        }  # fmt: skip
    columns = ("instances + trainers", "samples/s an instance", "over the first", "ideal", "planned")
    title = f"Scaling: sim engines, {_SCHEDULE}, {given.seeds} seeds, mean and 95 % interval"
    first_planned = {units: rate / planned[first] for units, rate in planned.items()}
    return Found(title, columns, rows, figures, partial(_draw_scaling, shares, first_planned), (7.5, 4.2))


def _between(given: Given) -> set[int]:
    """Return sizes that are neither run nor beyond what is run."""
    return {units for units in _PREDICTED if units < max(given.units)} - set(given.units)


def _unit_values(units: int, steps: int, seed: int) -> tuple[Workload, dict[str, Any]]:
    """Return `units` times one trainer with its instances and their work, and the configuration of that run."""
    workload = replace(UNIT, ref=0.0, cluster=Cluster(rollout=_INSTANCES, actor=1, ref=1)).times(units)
    values = run_values(workload, SCHEDULES[_SCHEDULE], steps, seed)
    del values["roles"]["ref"]  # these papers' trainers have the reference; a process less to run
    return workload, values | {"algorithm": {"kl_coef": 0.0}}


def _planned_rate(units: int) -> float:
    """Return the planner's samples per second and instance."""
    workload, values = _unit_values(units, _SCALING_STEPS, 0)
    config = RunConfig.model_validate(values)
    planner = open_planner(config, devices=config.num_devices, device=None)
    return workload.samples / planner.step_s() / (units * _INSTANCES)


def _ideal_rate(units: int, steps: int, skip: int) -> float:
    workload, _ = _unit_values(units, steps, 0)
    bound = SCHEDULES[_SCHEDULE]["max_staleness"]
    return workload.samples / ideal.step_s(workload, max_staleness=bound, seed=0, steps=steps, skip=skip) / units


def _draw_scaling(shares: Mapping[int, Sequence[float]], planned: Mapping[int, float], figure: "Figure") -> None:
    axis = figure.subplots()
    means = [mean_of(of_seeds) for of_seeds in shares.values()]
    halves = [each.half_width if len(next(iter(shares.values()))) > 1 else 0.0 for each in means]
    instances = [units * _INSTANCES for units in shares]
    axis.errorbar(instances, [each.value for each in means], yerr=halves, capsize=3, marker="o", label="measured")
    axis.plot([units * _INSTANCES for units in planned], list(planned.values()), "k--", label="planned")
    axis.set_xscale("log", base=2)
    axis.set_xticks([units * _INSTANCES for units in planned], [str(units * _INSTANCES) for units in planned])
    axis.set(xlabel="instances", ylabel="samples per second and instance, over the first", ylim=(0, 1.1))
    axis.legend(frameon=False)
    axis.grid(alpha=0.25)
