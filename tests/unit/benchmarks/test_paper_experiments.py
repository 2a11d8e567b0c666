"""What the papers' experiments compute from finished runs."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.intervals import difference_of, mean_of, t_quantile
from benchmarks.learning import _rows_around_evaluation, steps_to_target
from benchmarks.papers.__main__ import EXPERIMENTS
from benchmarks.papers.found import Found
from benchmarks.papers.plans import PLANS
from benchmarks.papers.trained import _clock_to_equal_accuracy
from benchmarks.planner.recipes import INSTANCES, PERIODIC, best_of_paper, open_recipe
from benchmarks.recipe_runs import RecipeRun

ROOT = Path(__file__).parents[3]


def ran(step_s: float, accuracies: list[float], *, interval: int = 2, began_s: float = 3.0) -> RecipeRun:
    """A run whose weights of step 0, `interval`, ... have these accuracies."""
    steps = range(1, interval * (len(accuracies) - 1) + 1)
    metrics = [{"step": step, "time_s": began_s + step * step_s, "step_time_s": step_s} for step in steps]
    evaluations = [{"step": number * interval, "accuracy": each} for number, each in enumerate(accuracies)]
    return RecipeRun(Path("run"), metrics, evaluations)


@pytest.mark.parametrize(("freedom", "value"), [(1, 12.7062), (2, 4.30265), (4, 2.77645), (30, 2.04227)])
def test_quantile_is_students(freedom: float, value: float) -> None:
    assert t_quantile(freedom) == pytest.approx(value, rel=1e-5)


def test_interval_of_a_mean() -> None:
    found = mean_of([1.0, 2.0, 3.0])
    assert (found.value, found.half_width) == (2.0, pytest.approx(4.30265 / math.sqrt(3), rel=1e-5))
    assert mean_of([1.0]).text() == "1.00"


def test_interval_of_a_difference_is_welchs() -> None:
    """By hand: variances 1 and 4 of three values each, so 2.94 degrees of freedom."""
    found = difference_of([1.0, 2.0, 3.0], [2.0, 4.0, 6.0])
    freedom = (1 / 3 + 4 / 3) ** 2 / ((1 / 3) ** 2 / 2 + (4 / 3) ** 2 / 2)
    assert found.value == -2.0
    assert found.half_width == pytest.approx(t_quantile(freedom) * math.sqrt(5 / 3))


def test_clock_to_equal_accuracy_counts_from_step_1_and_between_evaluations() -> None:
    """Both reach 0.8, so 0.76 counts: after 9/10 of the second interval."""
    off, on = ran(2.0, [0.2, 0.4, 0.8], began_s=100.0), ran(1.0, [0.2, 0.4, 0.8, 0.9])
    assert _clock_to_equal_accuracy(off, on) == pytest.approx(2.0)
    assert _clock_to_equal_accuracy(on, on) == 1.0


def test_steps_to_an_accuracy_are_those_of_as_many_responses_whatever_a_step_has() -> None:
    metrics = [{"accuracy": each} for each in (0.5, 1.0, 0.9, 1.0, 0.8)]
    assert [steps_to_target(metrics, window=window) for window in (1, 2, 3, 4)] == [2, 3, 4, 6]
    assert steps_to_target(metrics, window=9) == 6


def test_rows_after_an_evaluation_are_told_from_those_beside_it(tmp_path: Path) -> None:
    spans = {
        "actor-0": [],
        "evaluate-0-0": [("wait for weights", 0, 10, {}), ("evaluate", 10, 20, {"step": 0, "rows": 5})],
        "rollout-0-0": [("generate", 1, 9, {"step": 1}), ("generate", 9, 15, {"step": 2}),
                        ("generate", 15, 19, {"step": 3}), ("generate", 20, 22, {"step": 3})],
    }  # fmt: skip
    (tmp_path / "timeline").mkdir()
    for process, own in spans.items():
        lines = [json.dumps({"name": name, "start": start, "end": end, **more}) for name, start, end, more in own]
        (tmp_path / "timeline" / f"{process}.jsonl").write_text("".join(f"{line}\n" for line in lines))
    ledger = [
        {"lineage": 0, "step": step, "time_s": 1.0, "admitted_step": step, "group": step - 1, "epoch": 0,
         "indices": [4 * step, 4 * step + 1, 4 * step + 2, 4 * step + 3], "versions": [0, 0], "staleness": 0,
         "prompt_hash": "0", "token_hash": "0"}
        for step in (1, 2, 3)
    ]  # fmt: skip
    (tmp_path / "ledger.jsonl").write_text("".join(json.dumps(line) + "\n" for line in ledger))
    assert _rows_around_evaluation(RecipeRun(tmp_path, [], [])) == (4, 4)


def test_every_experiment_has_the_plan_of_its_paper() -> None:
    assert PLANS.keys() == EXPERIMENTS.keys()


def test_table_is_markdown_above_the_figures() -> None:
    found = Found("Title", ("a", "b"), [["1", "2"]], {"key": 0.5}, lambda _: None)
    assert found.table().splitlines()[2:5] == ["| a | b |", "|---|---|", "| 1 | 2 |"]


@pytest.mark.parametrize("name", PERIODIC)
def test_recipe_has_the_papers_instances_for_each_replica(name: str, tmp_path: Path) -> None:
    config = open_recipe(name, "ascend-910b", tmp_path).config
    replicas = config.roles["actor"] // config.ranks_per_copy("actor")
    assert config.roles["rollout"] == INSTANCES * replicas * config.ranks_per_copy("rollout")


@pytest.mark.slow
def test_best_plan_of_the_paper_has_them_too(tmp_path: Path) -> None:
    planner = open_recipe(PERIODIC[0], "ascend-910b", tmp_path)
    best = best_of_paper(planner, planner.config)
    replicas = best.roles["actor"] // best.ranks_per_copy("actor")
    assert best.roles["rollout"] == INSTANCES * replicas * best.ranks_per_copy("rollout")
    assert best.num_devices == planner.num_devices


@pytest.mark.slow
def test_an_experiment_runs_by_one_command(tmp_path: Path) -> None:
    command = [sys.executable, ROOT / "benchmarks" / "papers", "periodic", "--seeds", "2", "--steps", "6", "--json"]
    done = subprocess.run([*command, tmp_path / "found.json"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["periodic_first_step_max_abs"] < 0.02, "both draw the same responses with the same weights"
    assert len(found["table"]["rows"]) == 6
    assert "| steps | reward, sync | reward, periodic |" in done.stdout
