"""GRPO's graph and where its tasks are placed."""

import subprocess
import sys

import pytest

from launcher.config import load_config
from launcher.recipes import find_recipe
from workers.algorithms.config import AlgorithmConfig
from workers.algorithms.graph import algorithm_tasks
from workers.dataflow import NeededWeights, PlacedTask, place_tasks
from workers.graph import graph_of

WITH_KL = AlgorithmConfig(kl_coef=0.1)


def place(*roles: str, config: AlgorithmConfig = WITH_KL) -> dict[str, PlacedTask]:
    return {task.name: task for task in place_tasks(algorithm_tasks(config), roles)}


def test_default_placement() -> None:
    placed = place("rollout", "actor", "ref")
    assert set(placed) == {"actor_rollout", "ref_log_probs", "actor_train"}
    rollout, train = placed["actor_rollout"], placed["actor_train"]
    assert rollout.inputs == ("prompts", "answers") and rollout.fused == ("rewards",)
    assert set(rollout.outputs) == {*("responses", "rollout_log_probs", "versions", "truncated", "rewards", "correct")}
    assert train.fused == ("compute_advantages_and_returns",) and train.whole_groups and train.outputs == ()
    assert "ref_log_probs" in train.inputs and "advantages" not in train.inputs


def test_actor_hosts_the_reference() -> None:
    train = place("rollout", "actor")["actor_train"]
    assert train.fused == ("ref_log_probs", "compute_advantages_and_returns")
    assert not {"ref_log_probs", "advantages"} & set(train.inputs)


def test_every_role_on_its_own() -> None:
    placed = place("rollout", "actor", "ref", "reward", "advantages")
    assert len(placed) == 5 and not any(task.fused for task in placed.values())
    assert placed["rewards"].inputs == ("prompts", "responses", "answers")
    assert placed["compute_advantages_and_returns"].whole_groups
    assert {"advantages", "ref_log_probs"} <= set(placed["actor_train"].inputs)


@pytest.mark.parametrize("roles", [("rollout", "actor"), ("rollout", "actor", "reward")])
def test_no_reference_without_a_kl_penalty(roles: tuple[str, ...]) -> None:
    placed = place(*roles, config=AlgorithmConfig())
    assert not any("ref_log_probs" in (*task.inputs, *task.fused) for task in placed.values())


SEVERAL = algorithm_tasks(AlgorithmConfig(), old_log_probs=True)


def test_actor_computes_the_old_policys_log_probs_where_nobody_else_does() -> None:
    train = {task.name: task for task in place_tasks(SEVERAL, ("rollout", "actor"))}["actor_train"]
    assert train.fused == ("actor_log_probs", "compute_advantages_and_returns")
    assert "log_probs" not in train.inputs and train.weights is NeededWeights.ANY


def test_a_role_for_the_old_policys_log_probs_holds_the_newest_weights() -> None:
    placed = {task.name: task for task in place_tasks(SEVERAL, ("rollout", "actor", "actor_fwd"))}
    assert placed["actor_log_probs"].weights is NeededWeights.NEWEST
    assert placed["actor_rollout"].weights is NeededWeights.BOUNDED
    assert "log_probs" in placed["actor_train"].inputs


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (("actor.ppo_epochs=2",), True),
        (("actor.num_updates_per_step=2",), True),
        ((), False),
        (("actor.ppo_epochs=2", "algorithm.off_policy.method=none"), False),
        (("actor.ppo_epochs=2", "schedule.mode=sync"), False),
        (("actor.ppo_epochs=2", "schedule.mode=sync", "algorithm.off_policy.method=decoupled"), True),
    ],
)
def test_old_log_probs_are_computed_exactly_where_the_loss_needs_them(
    settings: tuple[str, ...], expected: bool
) -> None:
    graph = graph_of(load_config(find_recipe("quickstart"), overrides=settings))
    assert any(task.name == "actor_log_probs" for task in graph) == expected


def test_graph_needs_no_torch() -> None:
    code = "import sys, workers.graph; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
