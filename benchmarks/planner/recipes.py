"""Recipes for accelerators: the step that the planner predicts of each as it is shipped, over that of its best plan.

    recipe_vs_plan_NAME_DEVICE    of each recipe, on each device that it is for
    recipe_vs_plan_max            the largest of these

Lengths are those that each recipe expects (its section `sim`). No run, no weights: shapes of the models are enough.
Recipes of a paper that has so many inference instances for each training instance are compared with the best such plan.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from asyncflow.errors import ConfigError
from launcher.config.load_config import load_config, read_yaml
from launcher.config.paths import find_recipe, packaged_recipes
from launcher.config.rules import check_batch_sizes
from launcher.plan.plan_report import open_planner
from launcher.plan.search import Planner, batch_sizes, check_launchable, with_changes
from workers.settings.run import RunConfig

QWEN_7B: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18944,
    "num_attention_heads": 28, "num_key_value_heads": 4, "num_hidden_layers": 28, "vocab_size": 152064,
    "tie_word_embeddings": False, "max_position_embeddings": 131072, "rms_norm_eps": 1e-6, "rope_theta": 1e6,
}  # fmt: skip
QWEN_32B = QWEN_7B | {
    "hidden_size": 5120, "intermediate_size": 27648, "num_hidden_layers": 64, "num_attention_heads": 40,
    "num_key_value_heads": 8,
}  # fmt: skip
QWEN3_8B = QWEN_7B | {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 4096, "intermediate_size": 12288,
    "num_attention_heads": 32, "num_key_value_heads": 8, "num_hidden_layers": 36, "head_dim": 128, "vocab_size": 151936,
}  # fmt: skip
DEVICES = {"cuda": ("h100",), "npu": ("ascend-910b", "ascend-910c")}
"""`launcher.device` of a recipe -> devices of the catalogue that it is for."""
_MODELS = {
    "qwen2.5-7b": QWEN_7B, "qwen2.5-7b-instruct": QWEN_7B, "qwen2.5-32b": QWEN_32B, "r1-distill-qwen-32b": QWEN_32B,
    "qwen3-8b": QWEN3_8B,
}  # fmt: skip
"""Last part of a recipe's `model.path` -> its config.json."""
PERIODIC = (
    "qwen3-8b-grpo-deepscaler-16k-npu", "r1-distill-qwen-32b-grpo-deepscaler-16k-npu",
    "r1-distill-qwen-32b-grpo-deepscaler-8k-npu", "qwen2.5-7b-instruct-grpo-gsm8k-1k-npu",
)  # fmt: skip
"""Recipes with the set-ups of Periodic Asynchrony (arXiv 2511.18871)."""
INSTANCES = 4
"""Inference instances for each training instance, in that paper."""


@dataclass(frozen=True)
class Compared:
    """A recipe's predicted step (s), and that of its best plan.

    Attributes:
        plan: the plan, for people.
    """

    own_s: float
    plan_s: float
    plan: str

    @property
    def ratio(self) -> float:
        return self.own_s / self.plan_s


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


def compare(name: str, device: str, directory: Path) -> Compared:
    """Compare a recipe as it is with the best plan of its form."""
    planner = open_recipe(name, device, directory)
    if name in PERIODIC:
        best = best_of_paper(planner, planner.config)
        return Compared(planner.step_s(), best_step_s(planner, best), layout_text(best))
    planner = replace(planner, colocated=planner.config.is_colocated)
    plan = planner.find_plans()[0]
    text = f"{plan.roles_text} {' '.join(plan.changes)}, {plan.headroom_gb or 0:.1f} GB left"
    return Compared(planner.step_s(), plan.step_s, text)


def best_of_paper(planner: Planner, config: RunConfig) -> RunConfig:
    """Return a run with the best of all layouts of the planner's devices that have `INSTANCES` instances a replica."""
    fits: list[tuple[float, RunConfig]] = []
    for layout in planner.model_layouts():
        divided = with_changes(config, layout)
        replica, instance = divided.ranks_per_copy("actor"), divided.ranks_per_copy("rollout")
        number, left = divmod(planner.num_devices, replica + INSTANCES * instance)
        if left or not number:
            continue
        roles = {"rollout": number * INSTANCES * instance, "actor": number * replica}
        divided = with_changes(divided, {"roles": roles})
        if fits_memory(planner, divided):
            fits.append((planner.bound_s(divided), divided))
    return min(fits, key=lambda each: each[0])[1]


def fits_memory(planner: Planner, config: RunConfig) -> bool:
    """Return whether a run can be placed: its batch divides, and its ranks have room."""
    try:
        check_batch_sizes(config)
        planner.headroom_gb(config)
    except ConfigError:
        return False
    return True


def best_step_s(planner: Planner, config: RunConfig) -> float:
    """Return a step's time with the best number of responses of an instance, as a plan has it."""
    config = with_changes(config, {"rollout.batch_size": planner.config.rollout.batch_size})
    return min(replace(planner, config=with_changes(config, each)).step_s() for each in batch_sizes(config))


def layout_text(config: RunConfig) -> str:
    """Return how a run is laid out, for people."""
    sizes = config.actor.megatron
    return (
        f"{config.roles_text}, instances of {config.vllm.tensor_parallel_size}, replicas of TP{sizes.tensor_parallel} "
        f"CP{sizes.context_parallel} PP{sizes.pipeline_parallel}"
    )


def compare_all(directory: Path, say: Callable[[str], None]) -> dict[str, float]:
    """Return the figures; `say` is told each comparison."""
    figures = {}
    directory /= "recipes"
    directory.mkdir()
    for name, device in cases():
        found = compare(name, device, directory)
        figures[f"recipe_vs_plan_{name}_{device}"] = found.ratio
        say(f"recipes: {name} on {device}: {found.own_s:.1f} s a step; planned {found.plan_s:.1f} s as {found.plan}")
    return figures | {"recipe_vs_plan_max": max(figures.values())}
