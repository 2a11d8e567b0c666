"""Colocated or separated on as many devices: `sim` engines against what is possible, and against what is planned.

Seven devices: 4 rollout instances, 2 actor ranks and 1 reference rank, or 7 instances and 7 actor ranks that take turns
and host the reference. Workloads are those of `benchmarks/ablation`, with half of its cluster, slots and samples.

What is possible. A colocated device generates, trains (and scores), or switches, one at a time; so a run's time is the
sum of three:

    generating   a step's samples start in data order, each in the slot that is free first. With s and k = staleness, a
                 sample of step s may start once version s - 1 - k exists. E(s): seconds of the rollout's turns, counted
                 without all that lies between them, after which the last response of step s has ended
    training     W(s) = tokens of step s x (reference + training seconds per token) / devices: a perfect split
    switching    x seconds for each passing of the turn, of which a turn of the actor needs two

    sync, async      the rollout's turn ends when it has nothing to draw: it has generated all k + 1 steps that
                     staleness allows. So turn c, of steps s = c (k + 1) + 1 ... (c + 1) (k + 1), takes
                     (end of its last response) + W(s) + ... + W(s + k) + 2 x
    colocate_async   the turn ends as soon as a step is complete, and what is unfinished goes on in the next one:
                     t(s) = E(s) - E(s - 1) + W(s) + 2 x, without the 2 x if step s was complete when s - 1 was

That of the separated form is `benchmarks/ablation/ideal.py`. Transfers, computing keys and values again and processes
cost nothing in either.
"""

import heapq
import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks import say_when
from benchmarks.ablation import ideal
from benchmarks.ablation.launched import launch_values, run_values
from benchmarks.ablation.workloads import WORKLOADS, Cluster, Workload
from launcher.config.load_config import split_roles
from launcher.plan.plan_report import open_planner
from launcher.plan.world import simulate
from workers.engines.sim.decode_times import SimLengths
from workers.settings.run import COLOCATED, RunConfig

DEVICES = Cluster(rollout=4, actor=2, ref=1)
SWITCHES_S = (0.0, 2.0, 10.0)
PAPERS_X = 1.59
"""AsyncFlow over colocated verl, mean of both models (arXiv 2507.01663)."""
SURE = (0.95, 1.05)
"""Inside, either form may be the faster one."""
_NAMES = ("w0", "w1", "w2", "w3")


@dataclass(frozen=True)
class Form:
    """A way to use the devices, in a schedule."""

    name: str
    colocated: bool
    mode: str
    staleness: int

    @property
    def schedule(self) -> dict[str, Any]:
        return {"mode": self.mode, "max_staleness": self.staleness}


FORMS = (
    Form("colocated_sync", True, "sync", 0),
    Form("colocated_async", True, "async", 1),
    Form("colocated_colocate_async", True, "colocate_async", 1),
    Form("separated_periodic", False, "periodic", 0),
    Form("separated_async", False, "async", 1),
)
"""The first is what the paper compares with, the last what it proposes. `sync` and `periodic` train on the newest
weights alone."""
_RIVAL, _OURS = FORMS[0], FORMS[-1]


def halved(workload: Workload) -> Workload:
    """Return half of a workload, on seven devices, with as many samples as all of them divide."""
    return replace(workload, slots=workload.slots // 2, samples=112, cluster=DEVICES)


def values_of(workload: Workload, form: Form, *, switch_s: float, steps: int, seed: int) -> dict[str, Any]:
    """Return the configuration of a run."""
    values = run_values(workload, form.schedule, steps, seed)
    if form.colocated:
        values["roles"] = {"+".join(COLOCATED): num_devices(workload)}
        values["sim"]["switch_s"] = switch_s
    return values


def num_devices(workload: Workload) -> int:
    cluster = workload.cluster
    return cluster.rollout + cluster.actor + cluster.ref


def ideal_step_s(workload: Workload, form: Form, *, switch_s: float, seed: int, steps: int, skip: int) -> float:
    """Return the mean seconds per step over steps skip + 1 ... steps."""
    if not form.colocated:
        return ideal.step_s(workload, max_staleness=form.staleness, seed=seed, steps=steps, skip=skip)
    lengths = SimLengths(workload.sim_config(), samples_per_step=workload.samples, seed=seed)
    drawn = [
        [lengths.response_length(row) for row in range(step * workload.samples, (step + 1) * workload.samples)]
        for step in range(steps)
    ]
    together = form.mode != "colocate_async"
    ends = list(_ends(workload, drawn, switch_s, size=form.staleness + 1, together=together))
    return statistics.fmean(after - before for before, after in zip(ends[skip:], ends[skip + 1 :], strict=False))


def _ends(
    workload: Workload, drawn: Sequence[Sequence[int]], switch_s: float, *, size: int, together: bool
) -> Iterator[float]:
    """Yield when each version exists, from version 0; `size` steps may be in flight, `together` in one turn."""
    sim, devices = workload.sim_config(), num_devices(workload)
    slots = [0.0] * (workload.slots // workload.cluster.rollout * devices)
    now = 0.0  # of the run
    clock = [0.0] * size  # E of the steps before the first one, then of each step
    yield now
    for step, tokens in enumerate(drawn):
        gate = clock[step]  # of the step that made the version which this step needs
        if together:  # all steps of a turn begin when it begins
            gate = clock[size - 1 + step // size * size]
        last = 0.0
        for number in tokens:
            end = max(heapq.heappop(slots), gate) + number * sim.decode_s_per_token
            heapq.heappush(slots, end)
            last = max(last, end)
        clock.append(max(last, clock[-1]))
    for step, tokens in enumerate(drawn):
        begun = clock[size + step - 1]
        ended = clock[size + step]
        if together:
            is_first, until = step % size == 0, min(len(drawn), step // size * size + size)
            ended = clock[size + until - 1]
            begun = begun if is_first else ended
        if ended > begun:
            now += ended - begun + 2 * switch_s
        now += sum(tokens) * (sim.ref_s_per_token + sim.train_s_per_token) / devices
        yield now


def predicted_step_s(values: Mapping[str, Any], devices: int, skip: int) -> tuple[float, float]:
    """Return the planner's step time (s), and that of the very steps of the run, which a simulated one has, too."""
    planner = open_planner(run_config(values), devices=devices, device=None)
    same_steps = simulate(planner.make_scenario(planner.config), steps=planner.config.steps)
    return planner.step_s(), same_steps.step_s(skip)


def run_config(values: Mapping[str, Any]) -> RunConfig:
    """Return a checked configuration."""
    roles, colocated = split_roles(values["roles"])
    return RunConfig.model_validate({**values, "roles": roles, "colocated": colocated})


def run(
    *,
    workloads: Sequence[str] = _NAMES,
    switches: Sequence[float] = SWITCHES_S,
    steps: int = 8,
    skip: int = 2,
    launched: bool = True,
    plot: Path | None = None,
    short: bool = False,
    **_: Any,
) -> dict[str, float]:
    """Run every form on every workload, with every time of a switch.

    Args:
        skip: first steps, which do not count; they and `steps` should be whole turns of `FORMS`.
        launched: False: only predict, and compare predictions with what is possible.
        plot: draw the steps into this file.
        short: one workload, one time of a switch, two turns.
    """
    if short:
        workloads, switches, steps = workloads[1:2], switches[1:2], skip + 2
    step_s: dict[tuple[str, float, Form], float] = {}
    predicted_s, ideals_s = dict(step_s), dict(step_s)
    figures: dict[str, float] = {}
    of_ideal: dict[bool, list[float]] = {True: [], False: []}
    errors: list[float] = []
    with tempfile.TemporaryDirectory(prefix="colocated-") as directory:
        for name, switch_s, form in product(workloads, switches, FORMS):
            if not form.colocated and switch_s != switches[0]:  # the same run
                for known in (step_s, predicted_s, ideals_s):
                    if (name, switches[0], form) in known:
                        known[name, switch_s, form] = known[name, switches[0], form]
                continue
            workload = halved(WORKLOADS[name])
            values = values_of(workload, form, switch_s=switch_s, steps=steps, seed=0)
            ideal_s = ideal_step_s(workload, form, switch_s=switch_s, seed=0, steps=steps, skip=skip)
            ideals_s[name, switch_s, form] = ideal_s
            predicted_s[name, switch_s, form], same_s = predicted_step_s(values, num_devices(workload), skip)
            key = f"{form.name}_{name}" + (f"_{switch_s:g}s" if form.colocated else "")
            figures[f"{key}_ideal_s"] = ideal_s
            figures[f"{key}_predicted_s"] = predicted_s[name, switch_s, form]
            figures[f"{key}_simulated_of_ideal"] = ideal_s / same_s
            told = (
                f"{key}: ideal {ideal_s:.2f} s, these steps simulated {same_s:.2f} s ({ideal_s / same_s:.3f} of ideal)"
            )
            told += f", the planner's step {predicted_s[name, switch_s, form]:.2f} s"
            if launched:
                measured_s = launch_values(values, Path(directory) / key).step_s(skip)
                step_s[name, switch_s, form] = measured_s
                figures[f"{key}_of_ideal"] = ideal_s / measured_s
                of_ideal[form.colocated].append(ideal_s / measured_s)
                errors.append(abs(same_s / measured_s - 1))
                told += f", measured {measured_s:.2f} s ({ideal_s / measured_s:.3f} of ideal)"
            say_when(told)
    for colocated, shares in of_ideal.items():
        if shares:
            figures["colocated_of_ideal" if colocated else "separated_of_ideal"] = min(shares)
    ratios = {"predicted_separated_x": separated_x(predicted_s), "separated_x": separated_x(step_s)}
    for title, of_cases in ratios.items():
        figures |= {f"{title}_{name}_{switch_s:g}s": x for (name, switch_s), x in of_cases.items()}
        for switch_s in switches if of_cases else ():
            figures[f"{title}_{switch_s:g}s"] = statistics.fmean(
                x for (_, each), x in of_cases.items() if each == switch_s
            )
        if of_cases:  # of the shortest switch: the least that separation gains
            figures[title] = figures[f"{title}_{switches[0]:g}s"]
    pairs, wrong = signs(ideals_s, predicted_s)
    figures |= {"planner_pairs_of_ideal": pairs, "planner_wrong_signs_of_ideal": wrong}
    if launched:
        pairs, wrong = signs(step_s, predicted_s)
        figures |= {"planner_error_max": max(errors), "planner_pairs": pairs, "planner_wrong_signs": wrong}
    if plot is not None:
        draw(step_s or predicted_s, plot, measured=launched)
    return figures


def separated_x(step_s: Mapping[tuple[str, float, Form], float]) -> dict[tuple[str, float], float]:
    """Return (workload, switch) -> how much faster the separated, asynchronous run is than a colocated one in turn."""
    cases = {(name, switch_s): seconds for (name, switch_s, form), seconds in step_s.items() if form is _RIVAL}
    return {case: seconds / step_s[*case, _OURS] for case, seconds in cases.items()}


def signs(
    step_s: Mapping[tuple[str, float, Form], float], predicted_s: Mapping[tuple[str, float, Form], float]
) -> tuple[int, int]:
    """Return how many pairs of a colocated form and the separated, asynchronous one differ by more than `SURE`, and in
    how many of them the planner names the slower one."""
    pairs = wrong = 0
    for name, switch_s, form in step_s:
        if not form.colocated:
            continue
        known, predicted = (each[name, switch_s, form] / each[name, switch_s, _OURS] for each in (step_s, predicted_s))
        if not SURE[0] <= known <= SURE[1]:
            pairs += 1
            wrong += (known > 1) != (predicted > 1)
    return pairs, wrong


def draw(step_s: Mapping[tuple[str, float, Form], float], target: Path, *, measured: bool) -> None:
    """Draw how much faster the separated, asynchronous run is than each other form, beside the paper's figure."""
    from matplotlib.figure import Figure

    names = list(dict.fromkeys(name for name, _, _ in step_s))
    switches = list(dict.fromkeys(switch_s for _, switch_s, _ in step_s))
    forms = list(dict.fromkeys(form for _, _, form in step_s))
    others = [form for form in forms if form is not _OURS]
    width = 0.8 / len(others)
    figure = Figure(figsize=(4.5 * len(switches), 4.5), layout="constrained")
    axes = figure.subplots(1, len(switches), squeeze=False)[0]
    for axis, switch_s in zip(axes, switches, strict=True):
        for number, form in enumerate(others):
            places = [place + (number - (len(others) - 1) / 2) * width for place in range(len(names))]
            heights = [step_s[name, switch_s, form] / step_s[name, switch_s, _OURS] for name in names]
            bars = axis.bar(places, heights, width, color=f"C{number}", label=form.name.replace("_", " ", 1))
            axis.bar_label(bars, fmt="%.2g", fontsize=7)
        axis.axhline(1.0, color="black", linewidth=0.8)
        axis.axhline(PAPERS_X, color="gray", linestyle="--", linewidth=1, label=f"the paper's mean, {PAPERS_X}")
        axis.set_xticks(range(len(names)), names)
        axis.set(title=f"a switch takes {switch_s:g} s")
    axes[0].set(ylabel="step / step of separated async")
    figure.legend(
        *axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=len(others) + 1, frameon=False
    )
    how = "sim engines" if measured else "predicted"
    figure.suptitle(f"Seven devices, steps of about 4 s ({how}); w0, w1: short tails; w2, w3: long ones")
    figure.savefig(target, dpi=110)
