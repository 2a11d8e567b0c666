"""Recipes for accelerators: the step that the planner predicts of each as it is shipped, over that of its best plan.

    recipe_vs_plan_NAME_DEVICE    of each recipe, on each device that it is for
    recipe_vs_plan_max            the largest of these

Lengths are those that each recipe expects (its section `sim`). No run, no weights: shapes of the models are enough.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from launcher.config.load_config import load_config, read_yaml
from launcher.config.paths import find_recipe, packaged_recipes
from launcher.plan.plan_report import open_planner
from launcher.plan.search import Plan, Planner, check_launchable

QWEN_7B: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18944,
    "num_attention_heads": 28, "num_key_value_heads": 4, "num_hidden_layers": 28, "vocab_size": 152064,
    "tie_word_embeddings": False, "max_position_embeddings": 131072, "rms_norm_eps": 1e-6, "rope_theta": 1e6,
}  # fmt: skip
QWEN_32B = QWEN_7B | {
    "hidden_size": 5120, "intermediate_size": 27648, "num_hidden_layers": 64, "num_attention_heads": 40,
    "num_key_value_heads": 8,
}  # fmt: skip
DEVICES = {"cuda": ("h100",), "npu": ("ascend-910b", "ascend-910c")}
"""`launcher.device` of a recipe -> devices of the catalogue that it is for."""
_MODELS = {"qwen2.5-7b": QWEN_7B, "qwen2.5-32b": QWEN_32B}
"""Last part of a recipe's `model.path` -> its config.json."""


def cases() -> Iterator[tuple[str, str]]:
    """Yield (recipe, device) of every recipe for accelerators."""
    for name in sorted(packaged_recipes()):
        for device in DEVICES.get(_written(name, "launcher", "device"), ()):
            yield name, device


def _written(name: str, section: str, key: str) -> str:
    """Return what a recipe's file says; its model and data, which a configuration needs, are not here."""
    return str(read_yaml(find_recipe(name)).values.get(section, {}).get(key))


def open_recipe(name: str, device: str, directory: Path) -> Planner:
    """Return a planner for a recipe and as many devices as it has ranks. `directory` gets the model's config.json.

    Raises:
        ConfigError: the recipe cannot be placed on the devices, or a rank needs more memory than a device has.
    """
    model = Path(_written(name, "model", "path")).name
    (directory / model).mkdir(exist_ok=True)
    (directory / model / "config.json").write_text(json.dumps(_MODELS[model]))
    prompts = find_recipe("quickstart").parent / "quickstart" / "train.jsonl"
    own = [f"model.path={directory / model}", f"data.path={prompts}"]
    config = load_config(find_recipe(name), overrides=own)
    devices = config.num_devices
    planner = open_planner(config, devices=devices, device=device)
    check_launchable(config, planner.device, devices)
    planner.headroom_gb(config)
    return planner


def compare(name: str, device: str, directory: Path) -> tuple[float, Plan]:
    """Return the predicted step of a recipe as it is (s), and the best plan of its form."""
    planner = open_recipe(name, device, directory)
    planner = replace(planner, colocated=planner.config.is_colocated)
    return planner.step_s(), planner.find_plans()[0]


def compare_all(directory: Path, say: Callable[[str], None]) -> dict[str, float]:
    """Return the figures; `say` is told each comparison."""
    figures = {}
    directory /= "recipes"
    directory.mkdir()
    for name, device in cases():
        own_s, plan = compare(name, device, directory)
        figures[f"recipe_vs_plan_{name}_{device}"] = own_s / plan.step_s
        say(
            f"recipes: {name} on {device}: {own_s:.1f} s a step; planned {plan.step_s:.1f} s as {plan.roles_text} "
            f"{' '.join(plan.changes)}, {plan.headroom_gb or 0:.1f} GB left"
        )
    return figures | {"recipe_vs_plan_max": max(figures.values())}
