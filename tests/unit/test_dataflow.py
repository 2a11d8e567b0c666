"""Placement of a graph's tasks on launched roles."""

import pytest

from asyncflow.errors import ConfigError
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
    with pytest.raises(ConfigError, match=r"'critic' has no task.*actor advantages reward rollout"):
        place_tasks((ROLLOUT, SCORE, RETURNS, TRAIN), ("rollout", "actor", "critic"))


def test_missing_host_is_named() -> None:
    with pytest.raises(ConfigError, match=r"'rollout' is missing; task actor_rollout runs there"):
        place_tasks(PPO, ("actor", "critic"))


def test_whole_groups_spread_to_the_host() -> None:
    advantages = Task("compute_advantages_and_returns", "advantages", "actor", ("rewards",), ("returns",), True)
    placed = {task.role: task for task in place_tasks((ROLLOUT, SCORE, advantages, TRAIN), ("rollout", "actor"))}
    assert placed["actor"].whole_groups and not placed["rollout"].whole_groups
