"""Which columns of saved samples hold under the configuration that a run goes on with."""

from typing import Any

import pytest

from workers.roles.services import usable_columns
from workers.settings.run import RunConfig

PROMPT = {"prompts", "ground_truth", "epochs"}
RESPONSE = {"tokens", "sample_lengths", "response_mask", "rollout_log_probs", "versions", "truncated"}
REWARD = {"rewards", "correct"}
REFERENCE = {"ref_log_probs"}
USER = {"name": "polite", "function": "manners:polite", "inputs": ["responses"], "output": "loss_weights"}


def config(**sections: Any) -> RunConfig:
    fields: dict[str, Any] = {
        "steps": 9, "roles": {}, "model": {"path": "m"}, "data": {"path": "d"},
        "schedule": {"rollout_batch_size": 2, "n_samples_per_prompt": 2},
        "rollout": {"max_response_tokens": 8}, "algorithm": {"kl_coef": 0.1}, "tasks": [USER],
    }  # fmt: skip
    for name, section in sections.items():
        fields[name] = {**fields.get(name, {}), **section} if isinstance(section, dict) else section
    return RunConfig.model_validate(fields)


def usable(now: RunConfig, *, before: RunConfig | None = None, partition: int = 21, step: int = 21) -> set[str]:
    columns = usable_columns(before or config(), now, saved_step=20)(partition, step)
    return set(columns)


EVERYTHING = PROMPT | RESPONSE | REWARD | REFERENCE | {"advantages", "loss_weights"}


def test_unchanged_configuration_keeps_everything() -> None:
    assert usable(config()) == EVERYTHING
    assert usable(config(), partition=22) == EVERYTHING


@pytest.mark.parametrize(
    ("change", "left"),
    [
        ({"rollout": {"temperature": 0.5}}, PROMPT),
        ({"rollout": {"max_response_tokens": 9}}, PROMPT),
        ({"rollout": {"stop": ["\n"]}}, PROMPT),
        ({"model": {"dtype": "bfloat16"}}, PROMPT),
        ({"reward": {"function": "digits"}}, EVERYTHING - REWARD - {"advantages"}),
        ({"reward": {"model": {"path": "r"}}}, EVERYTHING - REWARD - {"advantages"}),
        ({"ref": {"engine": "sim"}}, EVERYTHING - REFERENCE),
        ({"algorithm": {"eps_clip": 0.1}}, EVERYTHING - {"advantages"}),
        ({"algorithm": {"kl_coef": 0.0}}, EVERYTHING - REFERENCE - {"advantages"}),
        ({"tasks": [{**USER, "function": "manners:very_polite"}]}, EVERYTHING - {"loss_weights"}),
        ({"tasks": []}, EVERYTHING - {"loss_weights"}),
        ({"rollout": {"batch_size": 3, "samples_per_step": 0, "truncated": "mask"}}, EVERYTHING),
        ({"actor": {"lr": 1.0}, "schedule": {"max_staleness": 3}, "tq": {"num_storage_units": 7}}, EVERYTHING),
    ],
)
def test_column_whose_task_changed_goes_with_what_was_computed_from_it(change: dict[str, Any], left: set[str]) -> None:
    assert usable(config(**change)) == left


TEACHER = {"teacher_log_probs"}
TAUGHT: dict[str, Any] = {
    "algorithm": {"name": "distill", "teacher_coef": 1.0, "kl_coef": 0.1, "reward_coef": 0.5},
    "data": {"path": None, "mixture": [{"name": "sums", "path": "s"}, {"name": "products", "path": "p"}]},
    "teacher": {"path": "t", "sources": {"sums": {"path": "a"}, "products": {"path": "b"}}},
}


@pytest.mark.parametrize(
    ("change", "kept"),
    [
        ({}, TEACHER | REFERENCE),
        ({"teacher": {"sources": {"sums": {"path": "b"}, "products": {"path": "a"}}}}, REFERENCE),
        ({"teacher": {"sources": {"sums": {"path": "a"}}}}, REFERENCE),
        ({"teacher": {"sources": {}}}, REFERENCE),
        ({"ref": {"path": "r"}}, TEACHER),
    ],
)
def test_log_probabilities_of_a_teacher_hold_while_each_source_has_the_same_one(
    change: dict[str, Any], kept: set[str]
) -> None:
    before = config(**TAUGHT)
    now = config(**{name: {**TAUGHT.get(name, {}), **change.get(name, {})} for name in {*TAUGHT, *change}})
    assert usable(now, before=before) & (TEACHER | REFERENCE) == kept


def test_rows_of_a_source_that_has_another_name_now_are_put_again() -> None:
    swapped = [{"name": "products", "path": "s"}, {"name": "sums", "path": "p"}]
    now = config(**{**TAUGHT, "data": {"path": None, "mixture": swapped}})
    assert not usable(now, before=config(**TAUGHT)) & {"sources", *TEACHER}, "a teacher is found by the source's name"


def test_task_that_is_new_has_written_nothing() -> None:
    assert usable(config(), before=config(tasks=[])) == EVERYTHING - {"loss_weights"}


def test_rollouts_that_were_saved_without_their_turns_rewards_are_made_again() -> None:
    own: dict[str, Any] = {"rollout": {"function": "tools"}, "tasks": []}
    turns = config(**own, algorithm={"credit": "turn"})
    assert usable(turns, before=config(**own)) == PROMPT | {"tasks"}
    kept = PROMPT | RESPONSE | REWARD | REFERENCE | {"tasks", "reward_parts", "advantages", "turn_ids", "turn_rewards"}
    assert usable(turns, before=turns) == kept


def test_rollouts_with_another_number_of_likeliest_tokens_are_made_again() -> None:
    few, more = (config(algorithm={"name": "dppo", "divergence_top_k": number}) for number in (2, 3))
    likeliest = {"rollout_top_ids", "rollout_top_log_probs"}
    assert usable(few, before=few) == EVERYTHING | likeliest
    assert usable(more, before=few) == PROMPT
    assert usable(config(algorithm={"name": "dppo"}), before=few) == PROMPT


def test_log_probabilities_under_the_newest_weights_are_computed_again() -> None:
    updates = config(actor={"num_mini_batches": 2}, algorithm={"off_policy": {"method": "decoupled"}})
    assert "old_log_probs" not in usable(updates, before=updates)
    charged = config(algorithm={"name": "rloo"})
    assert usable(charged, before=charged) == EVERYTHING - {"advantages"}, "they come from rewards charged for the KL"


@pytest.mark.parametrize(
    ("partition", "step", "holds"),
    [(21, 21, True), (22, 24, True), (24, 25, False), (25, 25, False)],  # step 25's reference is of step 24: abandoned
)
def test_reference_that_follows_the_policy_holds_while_it_is_the_same(partition: int, step: int, holds: bool) -> None:
    follows = config(algorithm={"ref_update_interval": 4})
    columns = usable(follows, before=follows, partition=partition, step=step)
    assert (columns >= REFERENCE) == holds
    assert columns >= RESPONSE
