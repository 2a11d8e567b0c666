"""Recipes for accelerators against their plans: no run."""

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from benchmarks.planner.papers import _asyncflow_config, _in_turns, _of_rival
from benchmarks.planner.recipes import QWEN_7B, cases, compare, open_recipe
from launcher.checks.models import check_models
from launcher.config.paths import find_recipe
from launcher.plan.plan_report import open_planner
from launcher.plan.search import with_changes
from workers.data.model_files import count_parameters
from workers.engines.device_memory import memory_of_roles

MOST = 1.10
"""Predicted step of a recipe / that of its best plan."""


@pytest.mark.slow
@pytest.mark.parametrize(("name", "device"), list(cases()))
def test_a_recipe_is_within_a_tenth_of_its_plan_and_fits(name: str, device: str, tmp_path: Path) -> None:
    found = compare(name, device, tmp_path)
    assert found.ratio <= MOST, f"{found.own_s:.1f} s; {found.plan_s:.1f} s as {found.plan}"


@pytest.mark.slow
def test_another_split_of_a_recipe_is_seen(tmp_path: Path) -> None:
    planner = open_recipe("qwen2.5-7b-grpo-deepscaler-cuda", "h100", tmp_path)
    layout = {"actor.megatron.tensor_parallel": 4, "actor.megatron.context_parallel": 1}
    other = with_changes(planner.config, {"roles": {"rollout": 10, "actor": 4, "ref": 2}, **layout})
    assert planner.step_s(other) > MOST * planner.step_s()


def test_the_adapter_recipe_is_near_its_plan_and_the_dry_run_counts_as_the_plan_does(tmp_path: Path) -> None:
    name = "qwen2.5-7b-lora-grpo-deepscaler-cuda"
    planner = open_recipe(name, "h100", tmp_path)
    best = planner.find_plans()[0]  # of both forms
    assert planner.num_devices == 4 and planner.step_s() <= MOST * best.step_s
    model = write_shapes(Path(planner.config.model.path))
    # Of `--dry-run`: from the shapes of the files, where the planner has config.json alone.
    found = check_models(planner.config, has_ipc=True)
    assert found.num_parameters == count_parameters(model) == 7_615_616_512
    assert planner.costs is not None
    sizes = planner.costs.model
    assert found.trained == sizes.trained_parameters(planner.config.lora)
    estimated = memory_of_roles(planner.config, sizes, has_ipc=True)
    for role, parts in found.memory.items():
        assert parts == pytest.approx(estimated[role], rel=1e-3), role  # biases are in the files only
    fullest = max(sum(parts.values()) for parts in found.memory.values())
    assert planner.config.launcher.device_memory_gb == planner.costs.device.memory_gb
    assert planner.headroom_gb(planner.config) == pytest.approx(80 - fullest / 1e9, rel=1e-3)


def test_what_the_papers_compare_with_keeps_no_copy_that_other_processes_read(tmp_path: Path) -> None:
    config = with_changes(_asyncflow_config(tmp_path, "7B"), {"actor.engine": "fsdp", "actor.tri_model": True})
    planner = open_planner(config, devices=512, device="ascend-910c")
    assert not _in_turns(planner, [config], 512), "ours reads a bucket of each of 512 ranks, and vLLM has four fifths"
    assert _in_turns(_of_rival(planner), [config], 512)


def write_shapes(model: Path) -> Path:
    """Give a directory with Qwen2.5-7B's config.json weights of its shapes, in a file that takes no room on a disk."""
    with torch.device("meta"):
        shapes = {name: value.shape for name, value in Qwen2ForCausalLM(Qwen2Config(**QWEN_7B)).named_parameters()}
    header, begin = {}, 0
    for name, shape in shapes.items():
        end = begin + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(header).encode()
    with (model / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + begin)
    (model / "generation_config.json").write_text('{"eos_token_id": 1}')
    for file_name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(find_recipe("quickstart").parent / "quickstart" / "model" / file_name, model)
    return model


def test_every_kind_of_accelerator_has_recipes() -> None:
    devices = {device for _, device in cases()}
    assert devices == {"h100", "ascend-910b", "ascend-910c"}
