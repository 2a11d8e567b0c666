"""The algorithms' graphs and where their tasks are placed."""

import subprocess
import sys

import pytest

from asyncflow.errors import ConfigError
from launcher.config.load_config import load_config
from launcher.config.paths import find_recipe
from launcher.config.rules import AT_START, check_rules
from workers.settings.algorithms import GRPOConfig, PPOConfig
from workers.settings.dataflow import NeededWeights, PlacedTask, place_tasks
from workers.settings.tasks import UserTaskConfig
from workers.tasks.graph import graph_of, task_specs, with_user_tasks

WITH_KL = GRPOConfig(kl_coef=0.1)


def place(*roles: str, config: GRPOConfig = WITH_KL) -> dict[str, PlacedTask]:
    return {task.name: task for task in place_tasks(config.tasks(), roles)}


def test_default_placement() -> None:
    placed = place("rollout", "actor", "ref")
    assert set(placed) == {"actor_rollout", "ref_log_probs", "actor_train"}
    rollout, train = placed["actor_rollout"], placed["actor_train"]
    assert rollout.inputs == ("prompts", "ground_truth") and rollout.fused == ("rewards",)
    assert set(rollout.outputs) == {
        *(
            "tokens",
            "sample_lengths",
            "response_mask",
            "rollout_log_probs",
            "versions",
            "truncated",
            "rewards",
            "correct",
        )
    }
    assert train.fused == ("compute_advantages_and_returns",) and train.whole_groups and train.outputs == ()
    assert "ref_log_probs" in train.inputs and "advantages" not in train.inputs


def test_actor_hosts_the_reference() -> None:
    train = place("rollout", "actor")["actor_train"]
    assert train.fused == ("ref_log_probs", "compute_advantages_and_returns")
    assert not {"ref_log_probs", "advantages"} & set(train.inputs)


def test_every_role_on_its_own() -> None:
    placed = place("rollout", "actor", "ref", "reward", "advantages")
    assert len(placed) == 5 and not any(task.fused for task in placed.values())
    columns = ("prompts", "tokens", "sample_lengths", "response_mask", "ground_truth", "truncated")
    assert placed["rewards"].inputs == columns
    assert placed["compute_advantages_and_returns"].whole_groups
    assert {"advantages", "ref_log_probs"} <= set(placed["actor_train"].inputs)


@pytest.mark.parametrize("roles", [("rollout", "actor"), ("rollout", "actor", "reward")])
def test_no_reference_without_a_kl_penalty(roles: tuple[str, ...]) -> None:
    placed = place(*roles, config=GRPOConfig())
    assert not any("ref_log_probs" in (*task.inputs, *task.fused) for task in placed.values())


SEVERAL = GRPOConfig().tasks(old_log_probs=True)


def test_actor_computes_the_old_policys_log_probs_where_nobody_else_does() -> None:
    train = {task.name: task for task in place_tasks(SEVERAL, ("rollout", "actor"))}["actor_train"]
    assert train.fused == ("actor_log_probs", "compute_advantages_and_returns")
    assert "old_log_probs" not in train.inputs and train.weights is NeededWeights.ANY


def test_a_role_for_the_old_policys_log_probs_holds_the_newest_weights() -> None:
    placed = {task.name: task for task in place_tasks(SEVERAL, ("rollout", "actor", "actor_fwd"))}
    assert placed["actor_log_probs"].weights is NeededWeights.NEWEST
    assert placed["actor_rollout"].weights is NeededWeights.BOUNDED
    assert "old_log_probs" in placed["actor_train"].inputs


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (("actor.ppo_epochs=2",), True),
        (("actor.num_mini_batches=2",), True),
        ((), False),
        (("actor.ppo_epochs=2", "algorithm.off_policy.method=none"), False),
        (("actor.ppo_epochs=2", "schedule.mode=sync"), True),
        (("algorithm.name=gspo", "actor.ppo_epochs=2"), True),
        (("algorithm.name=gspo",), False),
        (("algorithm.name=rloo", "algorithm.kl_coef=0.1"), True),
        (("algorithm.name=rloo", "algorithm.kl_coef=0.1", "algorithm.off_policy.method=none"), True),
        (("algorithm.name=rloo", "algorithm.kl_coef=0"), False),
        (("algorithm.name=reinforce_plus_plus", "algorithm.kl_coef=0.1"), True),
        (("algorithm.name=reinforce_plus_plus", "algorithm.kl_coef=0.1", "algorithm.baseline=group"), False),
        (("actor.ppo_epochs=2", "schedule.mode=sync", "algorithm.off_policy.method=decoupled"), True),
    ],
)
def test_old_log_probs_are_computed_exactly_where_loss_or_reward_need_them(
    settings: tuple[str, ...], expected: bool
) -> None:
    graph = graph_of(load_config(find_recipe("quickstart"), overrides=settings))
    assert any(task.name == "actor_log_probs" for task in graph) == expected


def test_graph_needs_no_torch() -> None:
    code = "import sys, workers.tasks.graph; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


PPO = PPOConfig(kl_coef=0.1, kl_placement="reward").tasks(old_log_probs=True)


def test_critic_passes_advantages_on_and_keeps_values_and_returns() -> None:
    placed = {task.name: task for task in place_tasks(PPO, ("rollout", "actor", "critic", "ref", "actor_fwd"))}
    critic, train = placed["critic_train"], placed["actor_train"]
    assert critic.fused == ("values", "compute_advantages_and_returns") and critic.outputs == ("advantages",)
    assert set(critic.inputs) == {
        *("tokens", "sample_lengths", "response_mask", "rewards", "old_log_probs", "ref_log_probs", "truncated"),
    }
    assert critic.whole_groups and train.fused == () and "advantages" in train.inputs


def test_actor_trains_the_critic_that_has_no_role() -> None:
    train = {task.name: task for task in place_tasks(PPO, ("rollout", "actor"))}["actor_train"]
    assert train.fused == (
        *("ref_log_probs", "actor_log_probs", "values", "compute_advantages_and_returns", "critic_train"),
    )
    assert train.outputs == () and not {"values", "advantages", "returns"} & set(train.inputs)


@pytest.mark.parametrize(("roles", "column"), [(("ref",), "old_log_probs"), (("actor_fwd",), "ref_log_probs")])
def test_critic_in_a_role_of_its_own_needs_the_penaltys_two_models_in_theirs(roles: tuple[str], column: str) -> None:
    with pytest.raises(ConfigError, match=rf"'critic' reads column {column}, which no other launched role writes"):
        place_tasks(PPO, ("rollout", "actor", "critic", *roles))
    in_loss = PPOConfig(kl_coef=0.1).tasks()
    assert place_tasks(in_loss, ("rollout", "actor", "critic"))


def test_masks_of_users_tasks_reach_the_critic_too() -> None:
    safety = UserTaskConfig(name="safety", function="m:f", output="loss_weights")
    tasks = {task.name: task for task in with_user_tasks(PPO, [safety])}
    assert "loss_weights" in tasks["critic_train"].inputs and "loss_weights" in tasks["actor_train"].inputs


def test_controllers_treat_the_critic_as_a_trainer() -> None:
    config = load_config(find_recipe("quickstart-ppo-cpu"))
    placed = place_tasks(graph_of(config), tuple(config.roles))
    specs = {spec.name: spec for spec in task_specs(placed, config)}
    for name in ("actor_train", "critic_train"):
        assert specs[name].keeps_leases and specs[name].max_deliveries == 0 and specs[name].whole_groups
    assert specs["critic_train"].outputs == {"advantages"} and not specs["ref_log_probs"].keeps_leases


TOOLS = ("rollout.function=tools", "rollout.tools=[configs.quickstart_tools.tools:multiply]")
SEVERAL_TURNS = {"turn_ids", "turn_rewards"}


@pytest.mark.parametrize(
    ("settings", "outputs", "inputs"),
    [
        (("algorithm.name=grpo",), set(), set()),
        (("algorithm.name=gspo",), set(), set()),
        (("algorithm.name=grpo", "algorithm.credit=turn"), SEVERAL_TURNS, SEVERAL_TURNS),
        (("algorithm.name=rloo", "algorithm.credit=turn", "algorithm.kl_coef=0.1"), SEVERAL_TURNS, SEVERAL_TURNS),
        (("algorithm.name=reinforce_plus_plus",), set(), set()),
        (("algorithm.name=reinforce_plus_plus", "algorithm.kl_coef=0.1"), {"turn_ids"}, {"turn_ids"}),
        (("algorithm.name=ppo",), {"turn_ids"}, {"turn_ids"}),
        (("algorithm.name=ppo", "algorithm.credit=turn"), SEVERAL_TURNS, SEVERAL_TURNS),
    ],
)
def test_columns_of_turns_travel_only_where_advantages_read_them(
    settings: tuple[str, ...], outputs: set[str], inputs: set[str]
) -> None:
    settings = ("algorithm.kl_coef=0", *settings)
    config = load_config(find_recipe("quickstart"), overrides=(*settings, *TOOLS))
    roles = ("rollout", "actor", "advantages", *(("critic",) if config.algorithm.has_critic else ()))
    roles += ("ref", "actor_fwd") if config.algorithm.has_reward_penalty else ()
    placed = {task.name: task for task in place_tasks(graph_of(config), roles)}
    assert SEVERAL_TURNS & set(placed["actor_rollout"].outputs) == outputs
    assert SEVERAL_TURNS & set(placed["compute_advantages_and_returns"].inputs) == inputs
    if "algorithm.credit=turn" not in settings:
        single = graph_of(load_config(find_recipe("quickstart"), overrides=settings))
        assert not any(SEVERAL_TURNS.intersection((*task.inputs, *task.outputs)) for task in single)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (("algorithm.credit=turn",), "algorithm.credit: turn is for rollouts of several turns, and this run draws one"),
        (
            ("algorithm.name=ppo", "algorithm.gae_timestep_unit=turn"),
            "algorithm.gae_timestep_unit: turn is for rollouts of several turns",
        ),
        (
            ("algorithm.credit=turn", "reward.group_function=m:f", *TOOLS),
            "algorithm.credit: turn cannot be used with reward.group_function, which gives each rollout one reward",
        ),
    ],
)
def test_a_credit_of_turns_that_there_are_not_is_refused(settings: tuple[str, ...], message: str) -> None:
    config = load_config(find_recipe("quickstart"), overrides=settings)
    with pytest.raises(ConfigError, match=message):
        check_rules(config, AT_START)
