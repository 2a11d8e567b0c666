"""Users' tasks in an algorithm's graph, and where they are placed."""

from dataclasses import replace
from typing import Any

import pytest

from asyncflow.errors import ConfigError
from workers.settings.algorithms import GRPOConfig
from workers.settings.dataflow import ACTOR_TRAIN, ADVANTAGES, PlacedTask, place_tasks
from workers.settings.run import RunConfig
from workers.settings.tasks import UserTaskConfig
from workers.tasks.graph import graph_of, prompt_columns, with_reward_parts, with_user_tasks

GRPO = GRPOConfig(kl_coef=0.1).tasks()


def user(name: str = "safety", **settings: Any) -> UserTaskConfig:
    return UserTaskConfig.model_validate({"name": name, "function": "m:f", "output": "loss_weights"} | settings)


def place(users: list[UserTaskConfig], *roles: str) -> dict[str, PlacedTask]:
    tasks = with_user_tasks(GRPO, users)
    return {task.name: task for task in place_tasks(tasks, ("rollout", "actor", "ref", *roles))}


def test_graph_without_users_tasks_is_the_algorithms() -> None:
    assert with_user_tasks(GRPO, []) == GRPO


def test_task_runs_in_its_role_and_training_waits_for_its_column() -> None:
    placed = place([user()], "safety")
    assert placed["safety"].inputs == ("prompts", "tokens", "response_mask") and placed["safety"].outputs == (
        "loss_weights",
    )
    assert "loss_weights" in placed["actor_train"].inputs


def test_task_is_computed_in_the_actor_when_its_role_was_not_launched() -> None:
    train = place([user(inputs=["ground_truth", "advantages"])])["actor_train"]
    assert train.fused == ("compute_advantages_and_returns", "safety")
    assert "ground_truth" in train.inputs and not {"loss_weights", "advantages"} & set(train.inputs)


def test_producers_come_first_in_whichever_order_they_are_written() -> None:
    mask, score = user("mask", inputs=["toxicity"]), user("score", output="toxicity")
    assert place([mask, score])["actor_train"].fused[-2:] == ("score", "mask")


def test_tasks_of_one_role_are_computed_together_and_put_what_others_read() -> None:
    score = user("score", role="filters", output="toxicity")
    mask = user("mask", role="filters", inputs=["toxicity", "rewards"])
    filters = place([mask, score], "filters")["mask"]
    assert filters.fused == ("score",) and filters.outputs == ("loss_weights",)
    assert filters.inputs == ("rewards", "prompts", "tokens", "response_mask")
    late = user("late", inputs=["toxicity"])
    early = user("early", role="filters", inputs=["toxicity"], output="more")
    last = user("last", inputs=["more"], output="loss_weights")
    assert place([score, late], "filters", "late")["score"].outputs == ("toxicity",)
    placed = place([score, early, last.model_copy(update={"inputs": ("more", "toxicity")})], "filters", "last")
    assert (placed["early"].fused, placed["early"].outputs) == (("score",), ("more", "toxicity"))


@pytest.mark.parametrize(
    ("users", "message"),
    [
        (
            [user(), user("other")],
            "tasks.1.output: column 'loss_weights' is written by another task; take another name",
        ),
        ([user(), user(output="x")], "tasks.1.name: there is a task 'safety' already"),
        ([user("rewards")], "tasks.0.name: there is a task 'rewards' already"),
        ([user(output="rewards")], "tasks.0.output: column 'rewards' is written by another task"),
        ([user(output="old_log_probs")], "tasks.0.output: column 'old_log_probs' is written by another task"),
        ([user("controller")], "tasks.0.role: 'controller' is a service of AsyncFlow's own"),
        ([user(role="actor")], "tasks.0.role: 'actor' is a role of AsyncFlow's own"),
        ([user("reference")], "tasks.0.role: 'reference' is a role of AsyncFlow's own"),
        ([user(inputs=["response"])], "tasks.0.inputs: no task writes column 'response'; did you mean 'responses'"),
        ([user(inputs=["answers"])], "tasks.0.inputs: no task writes column 'answers'; did you mean 'ground_truth'"),
        ([user(inputs=["zzz"])], "tasks.0.inputs: no task writes column 'zzz'; known columns: prompts ground_truth"),
        ([user(inputs=["versions"])], r"tasks.0.inputs: column 'versions' has a value per token; use texts \(prompts"),
        (
            [user(output="loss_weight")],
            "tasks.0.output: no task reads column 'loss_weight'; did you mean 'loss_weights'",
        ),
        ([user(inputs=["loss_weights"])], "tasks: safety wait for each other's outputs in a circle"),
        (
            [user("a", inputs=["y"], output="x"), user("b", inputs=["x"], output="y")],
            "tasks: a b wait for each other's outputs in a circle",
        ),
    ],
)
def test_tasks_that_cannot_be_are_refused(users: list[UserTaskConfig], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{message}"):
        with_user_tasks(GRPO, users)


def test_an_algorithm_of_ones_own_may_compare_what_a_users_task_wrote() -> None:
    """The task comes before the advantages then, in a role of its own or inside the actor."""
    graph = tuple(replace(task, inputs=(*task.inputs, "novelty")) if task.name == ADVANTAGES else task for task in GRPO)
    tasks = with_user_tasks(graph, [user("mask"), user("curious", output="novelty")])
    names = [task.name for task in tasks]
    assert names.index("curious") < names.index(ADVANTAGES) and names[-1] == ACTOR_TRAIN
    (train,) = (task for task in place_tasks(tasks, ("rollout", "actor", "ref")) if task.name == ACTOR_TRAIN)
    assert train.fused.index("curious") < train.fused.index(ADVANTAGES) and "novelty" not in train.inputs
    placed = {task.name: task for task in place_tasks(tasks, ("rollout", "actor", "ref", "curious"))}
    assert "novelty" in placed["curious"].outputs and "novelty" in placed[ACTOR_TRAIN].inputs
    with pytest.raises(ConfigError, match=r"^tasks.0.output: no task reads column 'novel'; did you mean 'novelty'\?"):
        with_user_tasks(graph, [user("curious", output="novel")])


def test_the_trainer_reads_from_which_source_of_a_mixture_a_row_is() -> None:
    sources = [{"path": "a.jsonl"}, {"path": "b.jsonl"}]
    for data in ({"path": "a.jsonl"}, {"mixture": sources}):
        config = RunConfig.model_validate(
            {"steps": 1, "roles": {"rollout": 1, "actor": 1}, "model": {"path": "m"},
             "rollout": {"max_response_tokens": 8}, "data": {**data, "max_prompt_tokens": 8},
             "schedule": {"rollout_batch_size": 4, "n_samples_per_prompt": 2}}
        )  # fmt: skip
        (train,) = (task for task in graph_of(config) if task.name == "actor_train")
        assert ("sources" in prompt_columns(config)) == ("sources" in train.inputs) == ("mixture" in data)
        place_tasks(graph_of(config), config.roles)
    with pytest.raises(ConfigError, match="column 'sources' is for the metrics alone"):
        with_user_tasks(GRPO, [user(inputs=["sources"])])
    with pytest.raises(ConfigError, match="column 'sources' is written by another task"):
        with_user_tasks(GRPO, [user(output="sources")])


def test_parts_of_a_users_reward_travel_to_the_trainer_and_are_for_nobody_else() -> None:
    graph = with_reward_parts(GRPO)
    for roles in (("rollout", "actor", "ref"), ("rollout", "actor", "ref", "reward")):
        tasks = place_tasks(graph, roles)
        (writer,) = (task for task in tasks if "reward_parts" in task.outputs)
        assert writer.role == ("reward" if "reward" in roles else "rollout")
        assert [task.name for task in tasks if "reward_parts" in task.inputs] == ["actor_train"]
    with pytest.raises(ConfigError, match="column 'reward_parts' is for the metrics alone"):
        with_user_tasks(graph, [user(inputs=["reward_parts"])])
    with pytest.raises(ConfigError, match="column 'reward_parts' is written by another task"):
        with_user_tasks(GRPO, [user(output="reward_parts")])


def test_roles_that_wait_for_each_other_are_refused() -> None:
    first, last = user("first", role="ends", output="x"), user("last", role="ends", inputs=["y"])
    middle = user("middle", inputs=["x"], output="y")
    with pytest.raises(ConfigError, match=r"^roles: .*ends.*middle.* wait for each other's columns"):
        place([first, middle, last], "ends", "middle")


def test_column_that_only_the_actor_knows_cannot_be_read_elsewhere() -> None:
    with pytest.raises(ConfigError, match="'safety' reads column advantages, which no other launched role writes"):
        place([user(inputs=["advantages"])], "safety")
