"""Recipes for accelerators against their plans: no run."""

from pathlib import Path

import pytest

from benchmarks.planner.recipes import cases, compare, open_recipe
from launcher.plan.search import with_changes

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


def test_every_kind_of_accelerator_has_recipes() -> None:
    devices = {device for _, device in cases()}
    assert devices == {"h100", "ascend-910b", "ascend-910c"}
