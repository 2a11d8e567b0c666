"""What is checked of an algorithm's settings together before a run starts."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from asyncflow.errors import ConfigError
from launcher.checks.preflight import _check_data, check_run
from launcher.checks.start_notes import settings_without_effect
from launcher.cli.launch import launch
from launcher.config.load_config import load_config
from launcher.config.paths import find_recipe
from launcher.config.rules import AT_START, check_rules
from launcher.request.dry_run import describe
from tq.columns import Column, PackedBatch
from workers.algorithms.algorithm import PPO
from workers.algorithms.load_algorithm import load_algorithm
from workers.rows.packed_rows import sample_columns, samples_of
from workers.settings.run import RunConfig
from workers.tasks.graph import graph_of

GSPO = ("algorithm={name: gspo}", "algorithm.off_policy.method=none")


def check(*settings: str) -> None:
    check_run(load_config(find_recipe("quickstart"), overrides=settings, roles="rollout:1,actor:1"))


def test_gspo_is_not_clipped_by_the_gap_between_two_engines() -> None:
    with pytest.raises(ConfigError, match="^algorithm.off_policy.method: none cannot be used with algorithm.name gspo"):
        check(*GSPO)


def test_gspo_takes_ratios_of_the_trainer_s_own_policies() -> None:
    check(GSPO[0])
    check(*GSPO, "actor.tri_model=true")


def test_a_call_for_tasks_may_not_take_as_long_as_a_process_that_is_stuck() -> None:
    with pytest.raises(ConfigError, match=r"^data.timeout_s: 1800 is not below launcher.operation_timeout_s 1800"):
        check("data.timeout_s=1800", "data.sampler=own:Curriculum")


def configured(*settings: str) -> RunConfig:
    return load_config(find_recipe("quickstart"), overrides=settings, roles="rollout:1,actor:1")


WIDE = {"eps_clip": "0.9", "eps_clip_high": "5", "dual_clip": "10", "max_ratio": "20", "value_clip": "10"}
NARROW = {"eps_clip": "1e-4", "eps_clip_high": "2e-4", "dual_clip": "1.01", "max_ratio": "1", "value_clip": "1e-4"}
"""Values under which each setting bounds no ratio of the test, and nearly all."""
CLIPS = ("eps_clip", "eps_clip_high", "dual_clip")
BOUNDS = {
    "grpo": CLIPS, "dapo": CLIPS, "gspo": CLIPS, "rloo": CLIPS, "reinforce_plus_plus": CLIPS,
    "cispo": CLIPS[:2], "dppo": ("max_ratio",), "ppo": (*CLIPS, "value_clip"),
}  # fmt: skip
ROLLOUT = [[-1.0, -1.1, -1.2], [-2.0, -2.1, -2.2]]
OLD = [[-1.04, -1.15, -1.16], [-1.95, -2.07, -2.25]]
NEW = [[-0.99, -1.2, -1.21], [-1.89, -2.02, -2.3]]
"""Log-probabilities of two responses of three tokens."""


def gradient_of(config: RunConfig, *, updated: bool) -> list[float]:
    """Return the gradient of a micro-batch's loss, the policy's and the critic's.

    Args:
        updated: the step has updated the model before; the log-probabilities that it found are another column then.
    """
    algorithm = load_algorithm(config.algorithm, config.rollout)
    prompts, responses = [torch.tensor([1])] * 2, [torch.tensor([5, 6, 7])] * 2

    def column(rows: Sequence[Sequence[float]]) -> Column:
        return Column.of_rows([torch.tensor(row) for row in rows])

    columns = {
        **sample_columns(prompts, responses),
        "rollout_log_probs": column(ROLLOUT),
        "values": column(OLD),
        "returns": column(ROLLOUT),
        "advantages": column([[1.0, -2.0, 0.5], [-1.0, 1.5, -3.0]]),
        "truncated": Column.of_scalars(torch.tensor([False, False])),
        "rewards": Column.of_scalars(torch.tensor([1.0, 0.0])),
    }
    if updated and config.needs_old_log_probs:
        columns["old_log_probs"] = column(OLD)
    batch = samples_of(PackedBatch((0, 1), columns))
    found, losses = [], [algorithm.loss(batch, device=torch.device("cpu"))]
    policy = torch.tensor(NEW if updated else OLD).flatten().requires_grad_()
    found += torch.autograd.grad(losses[0](policy, torch.zeros(6)), policy)[0].tolist()
    if isinstance(algorithm, PPO):
        value = torch.tensor(NEW if updated else OLD).flatten().requires_grad_()
        loss = algorithm.value_loss(batch, device=torch.device("cpu"))
        found += torch.autograd.grad(loss(value), value)[0].tolist()
    return found


def both(setting: str, *run: str) -> tuple[RunConfig, RunConfig]:
    """Return a run in which a setting bounds nothing, and one in which it bounds nearly all."""
    run = (*run, "algorithm.kl_coef=0", *(("algorithm.eps_clip_high=1e-4",) if setting == "dual_clip" else ()))
    wide, tight = (configured(*run, f"algorithm.{setting}={values[setting]}") for values in (WIDE, NARROW))
    return wide, tight


@pytest.mark.parametrize(
    ("name", "setting"), [(name, setting) for name, all_of in BOUNDS.items() for setting in all_of]
)
def test_a_setting_that_is_said_to_be_without_effect_changes_no_gradient_and_one_that_is_not_does(
    name: str, setting: str
) -> None:
    for updates in (1, 2):
        wide, tight = both(setting, f"algorithm.name={name}", f"actor.ppo_epochs={updates}")
        same = gradient_of(wide, updated=updates > 1) == gradient_of(tight, updated=updates > 1)
        assert same == (updates == 1)
        assert (f"algorithm.{setting}" in settings_without_effect(tight)) == same


@pytest.mark.parametrize("setting", CLIPS)
def test_without_weights_clips_act_in_the_only_update_too(setting: str) -> None:
    run = ("algorithm.off_policy.method=none",)
    wide, tight = both(setting, *run)
    assert gradient_of(wide, updated=False) != gradient_of(tight, updated=False)
    assert settings_without_effect(tight) == ""
    on_policy = configured(*run, "actor.tri_model=true", "schedule.mode=sync")
    assert settings_without_effect(on_policy).startswith("without effect: algorithm.eps_clip, algorithm.dual_clip (wi")
    assert settings_without_effect(configured(*run, "actor.tri_model=true", "schedule.mode=async")) == ""


def test_clips_may_act_where_another_role_computes_the_old_policy_for_the_reward() -> None:
    settings = ["algorithm.name=ppo", "algorithm.kl_coef=0.1", "algorithm.kl_placement=reward"]
    roles = "rollout:1,actor:1,critic:1,ref:1"
    alone, beside = (
        load_config(find_recipe("quickstart"), overrides=settings, roles=f"{roles}{role}")
        for role in ("", ",actor_fwd:1")
    )
    check_run(beside)
    assert "algorithm.eps_clip" in settings_without_effect(alone)
    assert settings_without_effect(beside).startswith("without effect: algorithm.value_clip (with one update")


def test_dry_run_says_it_in_one_line() -> None:
    config = configured("algorithm.dual_clip=null", "algorithm.kl_coef=0", "algorithm.ref_update_interval=5")
    (line,) = [line for line in describe(check_run(config), source=Path("x"), run_dir=Path("y")).splitlines()
               if line.startswith("note: without effect")]  # fmt: skip
    assert "algorithm.eps_clip (with one update" in line and "dual_clip" not in line
    assert line.endswith("algorithm.ref_update_interval (algorithm.kl_coef is 0)")
    assert settings_without_effect(configured("actor.num_mini_batches=2")) == ""


def test_samples_of_a_part_of_the_distribution_are_noted() -> None:
    notes = check_run(configured("rollout.top_p=0.9", "rollout.top_k=20")).notes
    for text in ("rollout.top_p 0.9 draws from a part of the distribution", "rollout.top_k 20 draws from a part"):
        assert sum(note.startswith(text) for note in notes) == 1
    assert not [note for note in check_run(configured("rollout.temperature=0.7")).notes if "draws from a part" in note]


def test_sft_in_front_of_the_recipe_and_another_algorithm_contradict_each_other() -> None:
    done = CliRunner().invoke(launch, ["sft", "quickstart", "--set", "algorithm.name=grpo", "--dry-run"])
    assert done.exit_code == 2
    assert "algorithm.name: grpo, but the word sft sets it to sft; remove one of them" in done.output


def test_rows_of_sft_may_be_fed_later() -> None:
    config = load_config(find_recipe("quickstart-sft-cpu"), overrides=["data.path=null", "data.source=feed"])
    assert _check_data(config).num_prompts is None


def test_settings_of_generation_and_of_adapters_that_nothing_reads_are_noted() -> None:
    assert settings_without_effect(configured("weightsync.lora=merged")).endswith(
        "weightsync.lora (there is no section lora)"
    )
    settings = ("rollout.engine=vllm", "rollout.top_p=0.5")
    for roles, told in (
        ("actor:1", "rollout.engine, rollout.top_p (algorithm.name sft generates nothing to train on)"),
        ("actor:1,evaluate:1", "rollout.engine (algorithm.name sft generates nothing to train on)"),
    ):
        config = load_config(find_recipe("quickstart-sft-cpu"), overrides=settings, roles=roles)
        assert settings_without_effect(config) == f"without effect: {told}"
    assert settings_without_effect(load_config(find_recipe("quickstart-sft-cpu"))) == ""


def test_sft_reads_no_column_of_responses_whatever_rollouts_and_rewards_are_set_to() -> None:
    plain = load_config(find_recipe("quickstart-sft-cpu"))
    settings = ("rollout.keep_sampling_mask=true", "rollout.top_k=5", "reward.function=rewards:of_mine")
    config = load_config(find_recipe("quickstart-sft-cpu"), overrides=settings, roles="actor:1,evaluate:1")
    assert graph_of(config) == graph_of(plain)
    assert "rollout.keep_sampling_mask" in settings_without_effect(config)


NO_TRUTH = "data.ground_truth_field=null"
TEACHER = "ref.path=quickstart/model"
USERS_TASK = "tasks=[{name: of_mine, function: 'mine:weigh', inputs: [responses, ground_truth], output: loss_weights}]"


@pytest.mark.parametrize(
    ("recipe", "roles", "settings", "complaint"),
    [
        ("quickstart-sft-cpu", "actor:1", (NO_TRUTH,), ""),
        ("quickstart-sft-cpu", "actor:1,evaluate:1", (NO_TRUTH,), "evaluate.ground_truth_field: null"),
        ("quickstart-sft-cpu", "actor:1,evaluate:1", (NO_TRUTH, "evaluate.ground_truth_field=answer"), ""),
        ("quickstart-sft-cpu", "actor:1,evaluate:1", (NO_TRUTH, "reward.function=rewards:of_mine"), ""),
        ("quickstart-sft-cpu", "actor:1", ("reward.model={path: quickstart/reward_model}",), "reward.model: has noth"),
        ("quickstart-sft-cpu", "actor:1", (USERS_TASK,), "tasks: of_mine compares with a ground truth"),
        ("quickstart", "rollout:1,actor:1", (NO_TRUTH,), "data.ground_truth_field: null cannot be used"),
        ("quickstart", "rollout:1,actor:1,ref:1", (NO_TRUTH, "algorithm={name: distill}", TEACHER), ""),
        (
            "quickstart",
            "rollout:1,actor:1,ref:1",
            (NO_TRUTH, "algorithm={name: distill, reward_coef: 0.5}", TEACHER),
            "data.ground_truth_field: null cannot be used",
        ),
        ("quickstart-reward-model-cpu", "rollout:1,actor:1,reward:1", (NO_TRUTH,), ""),
        (
            "quickstart-reward-model-cpu",
            "rollout:1,actor:1,reward:1,evaluate:1",
            (NO_TRUTH, "evaluate={sets: {a: {path: quickstart/held_out.jsonl}}}"),
            "evaluate.sets.a.ground_truth_field: null",
        ),
    ],
)
def test_a_ground_truth_is_asked_for_where_something_is_compared_with_it(
    recipe: str, roles: str, settings: tuple[str, ...], complaint: str
) -> None:
    config = load_config(find_recipe(recipe), overrides=settings, roles=roles)
    if complaint:
        with pytest.raises(ConfigError, match=f"^{complaint}"):
            check_rules(config, AT_START)
    else:
        check_rules(config, AT_START)
