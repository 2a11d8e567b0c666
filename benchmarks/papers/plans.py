"""The papers' own recipes, as the planner predicts them (`--dry-run`): nothing runs, no weights are needed.

Each experiment has its recipe in configs/ and the forms that it compares. Below the table each recipe is compared with
its best plan, for those of arXiv 2511.18871 with four inference instances to a training one.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.planner.papers import ablation_rows, plan_of_ablation
from benchmarks.planner.recipes import PERIODIC, best_of_paper, best_step_s, compare, layout_text, open_recipe
from launcher.plan.plan_report import open_planner
from launcher.plan.search import Planner, with_changes
from workers.settings.schedule import ScheduleMode

ASYNCFLOW = "qwen2.5-7b-grpo-deepscaler-npu"
"""With the task and the model of arXiv 2507.01663, on the 16 NPUs of its stability."""
_DEVICES = {ASYNCFLOW: "ascend-910c"} | dict.fromkeys(PERIODIC, "ascend-910b")
"""Recipe -> device: of the first paper the catalogue's with nodes of 16, of the second the one that it names."""
_FORMS = {"sync": (ScheduleMode.SYNC, 0), "periodic": (ScheduleMode.PERIODIC, 0), "async": (ScheduleMode.ASYNC, 1)}
_MEASURED = dict(zip(PERIODIC, (1.92, 1.28, 1.66, 2.00), strict=True))
"""The second paper's gain of periodic over sync."""
_SCALED = {16: 188.2, 32: 171.8, 64: 163.2}
"""NPUs -> trained tokens per second and device of the second paper's first recipe."""


@dataclass(frozen=True)
class Line:
    """One form of a recipe, as planned.

    Attributes:
        step_s: predicted (s).
        over: the first form's step over this one's.
        papers: the paper's figure for `over`.
    """

    recipe: str
    form: str
    devices: int
    layout: str
    step_s: float
    over: float
    papers: str = ""

    def cells(self) -> tuple[str, ...]:
        step = "" if math.isnan(self.step_s) else f"{self.step_s:.0f}"
        return self.recipe, self.form, str(self.devices), self.layout, step, f"{self.over:.2f}", self.papers


COLUMNS = ("recipe", "form", "NPUs", "layout", "step (s)", "times the first", "the paper")


def stability(directory: Path) -> Iterator[Line]:
    planner = open_recipe(ASYNCFLOW, _DEVICES[ASYNCFLOW], directory)
    yield from _forms(ASYNCFLOW, planner, _FORMS, {})


def staleness(directory: Path) -> Iterator[Line]:
    planner = open_recipe(ASYNCFLOW, _DEVICES[ASYNCFLOW], directory)
    modes = {bound: ScheduleMode.ASYNC if bound else ScheduleMode.PERIODIC for bound in (0, 1, 2, 4, 8)}
    forms = {f"at most {bound}": (mode, bound) for bound, mode in modes.items()}
    yield from _forms(ASYNCFLOW, planner, forms, {})


def periodic(directory: Path) -> Iterator[Line]:
    forms = {name: _FORMS[name] for name in ("sync", "periodic")}
    for recipe in PERIODIC:
        planner = open_recipe(recipe, _DEVICES[recipe], directory)
        yield from _forms(recipe, planner, forms, {"periodic": f"{_MEASURED[recipe]:.2f}"})


def ablation(directory: Path) -> Iterator[Line]:
    planner, plan = plan_of_ablation(directory)
    steps = list(ablation_rows(planner, plan))
    layout = " ".join([plan.roles_text, *plan.changes])
    form = ("one task after the other", "+ streamed", "+ asynchronous")
    rates = (1.0, *(row.predicted or math.nan for row in steps))
    papers = ("", *(f"{row.paper:.2f}" for row in steps))
    for name, over, paper in zip(form, rates, papers, strict=True):
        seconds = plan.step_s * rates[-1] / over
        yield Line(f"{ASYNCFLOW}, 1,024 prompts of 8", name, planner.num_devices, layout, seconds, over, paper)


def scaling(directory: Path) -> Iterator[Line]:
    recipe = PERIODIC[0]
    config = open_recipe(recipe, _DEVICES[recipe], directory).config
    first_s = math.nan
    fewest = min(_SCALED)
    for devices, rate in _SCALED.items():
        planner = open_planner(config, devices=devices, device=_DEVICES[recipe])
        best = best_of_paper(planner, config)
        step_s = best_step_s(planner, best)
        first_s = step_s if devices == fewest else first_s
        over = first_s * fewest / (step_s * devices)
        yield Line(recipe, "a device", devices, layout_text(best), step_s, over, f"{rate / _SCALED[fewest]:.2f}")


def shared_prompts(directory: Path) -> Iterator[Line]:
    recipe = PERIODIC[-1]
    planner = open_recipe(recipe, _DEVICES[recipe], directory)
    alone = with_changes(planner.config, {"actor.shared_prompt": False, "actor.micro_batch_size": 1})
    forms = {"a prompt for each response": (alone, ""), "a prompt for sixteen": (planner.config, "7.99")}
    steps = {name: planner.step_s(config) for name, (config, _) in forms.items()}
    for name, (config, paper) in forms.items():
        over = next(iter(steps.values())) / steps[name]
        yield Line(recipe, name, config.num_devices, layout_text(config), steps[name], over, paper)


PLANS: Mapping[str, Callable[[Path], Iterator[Line]]] = {
    each.__name__: each for each in (stability, staleness, periodic, ablation, scaling, shared_prompts)
}


def _forms(
    recipe: str, planner: Planner, schedules: Mapping[str, tuple[ScheduleMode, int]], papers: Mapping[str, str]
) -> Iterator[Line]:
    """Yield the recipe as it is laid out, under each schedule."""
    first_s = math.nan
    for number, (name, (mode, bound)) in enumerate(schedules.items()):
        config = with_changes(planner.config, {"schedule.mode": mode, "schedule.max_staleness": bound})
        step_s = planner.step_s(config)
        first_s = first_s if number else step_s
        yield Line(
            recipe, name, config.num_devices, layout_text(config), step_s, first_s / step_s, papers.get(name, "")
        )


def recipe_plans(lines: Sequence[Line], directory: Path) -> Iterator[str]:
    """Yield, for each recipe of some lines, how far it is from its best plan."""
    for recipe in dict.fromkeys(line.recipe for line in lines if line.recipe in _DEVICES):
        found = compare(recipe, _DEVICES[recipe], directory)
        yield (
            f"{recipe} on {_DEVICES[recipe]}: {found.own_s:.0f} s a step; planned {found.plan_s:.0f} s as {found.plan}"
        )
