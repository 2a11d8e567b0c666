"""Placement of a graph's tasks on launched roles."""

import pytest

from asyncflow.errors import ConfigError
from workers.settings.algorithms import PPOConfig
from workers.settings.dataflow import Task, place_tasks

ROLLOUT = Task("actor_rollout", "rollout", "rollout", ("prompts",), ("responses",))
VALUES = Task("values", "critic", "critic", ("prompts", "responses"), ("values",))
SCORE = Task("rewards", "reward", "rollout", ("responses", "ground_truth"), ("rewards",))
RETURNS = Task("compute_advantages_and_returns", "advantages", "actor", ("values", "rewards"), ("returns",), True)
CRITIC = Task("critic_train", "critic", "critic", ("values", "returns"), ())
TRAIN = Task("actor_train", "actor", "actor", ("responses", "returns"), ())
PPO = (ROLLOUT, SCORE, VALUES, RETURNS, CRITIC, TRAIN)


def test_hosted_task_after_its_main_task_puts_its_outputs() -> None:
    (rollout,) = place_tasks((ROLLOUT, SCORE), ("rollout",))
    assert rollout.inputs == ("prompts", "ground_truth") and rollout.outputs == ("responses", "rewards")


def test_all_tasks_of_one_role_are_kept() -> None:
    values = Task("values", "critic", "critic", ("responses",), ("values",))
    train = Task("critic_train", "critic", "critic", ("values", "rewards"), ())
    placed = {task.role: task for task in place_tasks((ROLLOUT, SCORE, values, train), ("rollout", "critic"))}
    assert placed["critic"].name == "critic_train" and placed["critic"].fused == ("values",)
    assert placed["critic"].inputs == ("rewards", "responses")


def test_column_that_stays_inside_another_role_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"'critic' reads column returns, which no other launched role writes"):
        place_tasks(PPO, ("rollout", "critic", "actor"))


def test_observers_need_no_task() -> None:
    assert place_tasks((ROLLOUT, SCORE), ("rollout", "evaluate")) == place_tasks((ROLLOUT, SCORE), ("rollout",))


def test_role_without_a_task_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"'critic' has no task.*actor advantages reward rollout; leave critic out, or"
    ):
        place_tasks((ROLLOUT, SCORE, RETURNS, TRAIN), ("rollout", "actor", "critic"))


def test_missing_host_is_named() -> None:
    with pytest.raises(ConfigError, match=r"'rollout' is missing; task actor_rollout runs there"):
        place_tasks(PPO, ("actor", "critic"))


def test_whole_groups_spread_to_the_host() -> None:
    advantages = Task("compute_advantages_and_returns", "advantages", "actor", ("rewards",), ("returns",), True)
    placed = {task.role: task for task in place_tasks((ROLLOUT, SCORE, advantages, TRAIN), ("rollout", "actor"))}
    assert placed["actor"].whole_groups and not placed["rollout"].whole_groups


PPO_ROLES = ("rollout", "actor", "ref", "critic", "reward", "actor_fwd")
REAL_PPO = PPOConfig(kl_coef=0.1).tasks(old_log_probs=True)


def test_values_travel_to_advantages_in_a_role_of_their_own_and_come_back_as_returns() -> None:
    placed = place_tasks(REAL_PPO, (*PPO_ROLES, "advantages"))
    own = {task.name: task for task in placed}
    assert [task.name for task in placed if task.role == "critic"] == ["values", "critic_train"]
    assert own["values"].outputs == ("values",) and own["values"].whole_groups, "the rounds of the training"
    advantages = own["compute_advantages_and_returns"]
    assert advantages.role == "advantages" and "values" in advantages.inputs
    assert advantages.outputs == ("advantages", "returns")
    train = own["critic_train"]
    assert {"values", "returns"} <= set(train.inputs) and (train.outputs, train.fused) == ((), ())
    assert "advantages" in own["actor_train"].inputs


def test_critic_hosts_the_advantages_and_the_actor_both() -> None:
    inside = ("values", "compute_advantages_and_returns")
    (critic,) = (task for task in place_tasks(REAL_PPO, PPO_ROLES) if task.role == "critic")
    assert (critic.name, critic.fused, critic.outputs) == ("critic_train", inside, ("advantages",))
    without = [role for role in PPO_ROLES if role != "critic"]
    (actor,) = (task for task in place_tasks(REAL_PPO, without) if task.role == "actor")
    assert actor.fused == (*inside, "critic_train") and not {"values", "advantages"} & set(actor.inputs)


def test_advantages_of_a_critic_inside_the_actor_are_refused() -> None:
    """The actor would wait for what is made of its own values."""
    with pytest.raises(ConfigError, match="'advantages' reads column values, which no .* writes; launch critic, too"):
        place_tasks(REAL_PPO, ("rollout", "actor", "ref", "actor_fwd", "advantages"))
