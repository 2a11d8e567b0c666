"""What the planner predicts against what runs take; `sim` engines sleep, all else of a run is real.

    python benchmarks/planner [--json [FILE]] [--seed N] [--parts ...] [--runs 12] [--splits 24] [--steps 10]

    sim       sim_error_median, sim_error_max   |predicted / measured - 1| of the step time, of configurations that the
                                                seed draws (ranges in planner/drawn.py)
    choice    choice_gap                        throughput that the plan for 14 devices misses: the best of random
                                                splits and of the plan's neighbours, and the plan, again in pairs
    real      real_error_max, and each signed    the same error of recipes with real engines, after a profile of this
                                                machine: quickstart, quickstart-tools, SmolLM2 with its packages
    speed     plan_64_s, plan_1024_s            processor time of a plan for 64 and 1,024 devices with what one more
                                                device would give: Qwen2.5-7B, 128 and 1,024 prompts of 8 responses
    scale     scale_devices_*                   devices at which each service of the house saturates: service times
                                                measured here, queueing simulated (planner/scale.py)
    papers    paper_error_mean, paper_rows,     what the papers measured, predicted from their set-ups, each ratio and
              and each ratio                    the mean of |predicted / paper - 1| (planner/papers.py); no run
    recipes   recipe_vs_plan_max, and each      predicted step of a shipped recipe for accelerators / that of its best
                                                plan, by the number of its devices (planner/recipes.py); no run

Every prediction is printed before its run starts. On an otherwise idle machine. Progress goes to stderr.
"""

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the clone, for `benchmarks` and its packages

from benchmarks import say
from benchmarks.json_option import add_json_option, report

_SKIP = 3
_DEVICES = 14


@dataclass(frozen=True)
class Given:
    """What the command line asks for."""

    seed: int
    runs: int
    splits: int
    steps: int
    sizes: Sequence[int]
    quick: bool
    directory: Path


def sim(given: Given) -> dict[str, float]:
    """Predict and run what the seed draws."""
    from benchmarks.planner.drawn import draw, predicted_s, run

    errors = []
    for number in range(given.runs):
        values = draw(given.seed, number, steps=given.steps)
        predicted = predicted_s(values, skip=_SKIP)
        say(f"sim {number}: {values['schedule']['mode']}, {values['roles']}: predicted {predicted:.3f} s")
        measured = run(values, given.directory / f"sim-{number}").step_s(_SKIP)
        errors.append(abs(predicted / measured - 1))
        say(f"sim {number}: measured {measured:.3f} s, error {predicted / measured - 1:+.3f}")
    return {"sim_error_median": statistics.median(errors), "sim_error_max": max(errors)}


def real(given: Given) -> dict[str, float]:
    """Profile, predict and run recipes with real engines."""
    from benchmarks.planner.real import predict_and_run, recipes

    errors = {}
    for name, settings in recipes(given.directory, say).items():
        where = given.directory / f"real-{name}"
        errors[name] = predict_and_run(name, settings, where, steps=given.steps, skip=_SKIP, say=say)
    told = {f"real_error_{name.removesuffix('-arithmetic-cpu')}": error for name, error in errors.items()}
    return {**told, "real_error_max": max(map(abs, errors.values()))}


def choice(given: Given) -> dict[str, float]:
    """Run random splits of the devices, the plan and its neighbours; the best three and the plan again, in turn."""
    from benchmarks.planner.drawn import draw, run, with_data
    from launcher.plan.plan_report import open_planner
    from launcher.plan.search import with_ranks
    from workers.settings.run import RunConfig

    values = draw(given.seed, 0, steps=given.steps)
    values["schedule"] = {"mode": "async", "max_staleness": 1, "rollout_batch_size": 24, "n_samples_per_prompt": 4}
    values["roles"] = {"rollout": 8, "actor": 4, "ref": 2}
    values["algorithm"] = {"kl_coef": 0.001}
    config = RunConfig.model_validate(with_data(values))
    plan = replace(open_planner(config, devices=_DEVICES, device=None), colocated=False).find_plans()[0]
    planned = _split(plan.config.roles)
    say(f"choice: the plan is {plan.roles_text}, {plan.step_s:.3f} s a step")
    actors = [number for number in range(1, _DEVICES - 1) if with_ranks(config, {"actor": number})]
    every = [(_DEVICES - a - r, a, r) for a in actors for r in range(_DEVICES - a)]
    near = [each for each in every if 0 < sum(abs(one - other) for one, other in zip(each, planned, strict=True)) <= 2]
    chosen = {*random.Random(given.seed).sample(every, min(given.splits, len(every))), *near, planned}
    steps_s: dict[tuple[int, int, int], list[float]] = {}
    for turn, splits in enumerate((sorted(chosen), None, None, None)):
        if splits is None:
            ranked = sorted(steps_s, key=lambda each: statistics.fmean(steps_s[each]))
            splits = list(dict.fromkeys((planned, *ranked[:3])))
        for split in splits:
            roles = {role: number for role, number in zip(("rollout", "actor", "ref"), split, strict=True) if number}
            step_s = run(values | {"roles": roles}, given.directory / f"choice-{turn}-{split}").step_s(_SKIP)
            steps_s.setdefault(split, []).append(step_s)
            say(f"choice: {roles}: {step_s:.3f} s")
    again = {split: statistics.fmean(each[1:]) for split, each in steps_s.items() if len(each) > 1}
    return {"choice_gap": 1 - min(again.values()) / again[planned]}


def speed(given: Given) -> dict[str, float]:
    """Plan for clusters."""
    from benchmarks.planner.recipes import QWEN_7B
    from launcher.config.load_config import load_config
    from launcher.config.paths import find_recipe
    from launcher.plan.plan_report import open_planner

    model = given.directory / "qwen2.5-7b"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(QWEN_7B))
    figures = {}
    for devices, prompts in ((64, 128), (1024, 1024)):
        data = find_recipe("quickstart").parent / "quickstart" / "train.jsonl"
        overrides = [f"model.path={model}", f"data.path={data}", f"schedule.rollout_batch_size={prompts}"]
        recipe = find_recipe("qwen2.5-7b-grpo-deepscaler-npu")
        config = load_config(recipe, overrides=[*overrides, "sim.mean_tokens=2000", "sim.sigma=0.8"])
        began = time.process_time()
        planner = open_planner(config, devices=devices, device="ascend-910b")
        plans = planner.find_plans()
        planner.one_more(plans[0])
        figures[f"plan_{devices}_s"] = time.process_time() - began
        say(f"speed: {devices} devices: {plans[0].roles_text}, {plans[0].step_s:.1f} s a step")
    return figures


def papers(given: Given) -> dict[str, float]:
    """Predict the papers' cases."""
    from benchmarks.planner.papers import predict

    return predict(given.sizes, given.directory, say)


def recipes(given: Given) -> dict[str, float]:
    """Compare the recipes with their plans."""
    from benchmarks.planner.recipes import compare_all

    return compare_all(given.directory, say)


def scale(given: Given) -> dict[str, float]:
    """Find what saturates first."""
    from benchmarks.planner.scale import figures, measure, saturation

    measured = measure(given.directory, quick=given.quick)
    return figures(measured, saturation(measured))


PARTS: dict[str, Callable[[Given], dict[str, float]]] = {
    each.__name__: each for each in (speed, recipes, papers, scale, sim, real, choice)
}


def _split(roles: dict[str, int]) -> tuple[int, int, int]:
    return roles["rollout"], roles["actor"], roles.get("ref", 0)


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_json_option(parser)
    parser.add_argument("--parts", nargs="*", choices=PARTS, default=list(PARTS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--runs", type=int, default=12, help="of sim")
    parser.add_argument("--splits", type=int, default=24, help="of choice")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument(
        "--sizes", type=int, nargs="+", default=[32, 64, 128, 256, 512, 1024], help="of papers: AsyncFlow's devices"
    )
    parser.add_argument("--quick", action="store_true", help="of scale: a tenth of the requests; shows that it works")
    asked = parser.parse_args()
    if asked.steps <= _SKIP + 1 or asked.runs < 1 or asked.splits < 1:
        parser.error(f"give at least one run and one split, and more than {_SKIP + 1} steps")
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="planner-") as temporary:
        given = Given(
            asked.seed, asked.runs, asked.splits, asked.steps, sorted(asked.sizes), asked.quick, Path(temporary)
        )
        for part in asked.parts:
            figures |= PARTS[part](given)
    report(asked.json, figures, "\n".join(f"{name:20} {value:8.4g}" for name, value in figures.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
