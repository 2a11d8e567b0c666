"""Configurations of TRL and verl become ours, or are refused by key."""

import math
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from asyncflow.errors import ConfigError
from launcher.cli.commands import main
from launcher.config.import_config import TRL, VERL, Refused, Same, Together, import_config, tables_as_markdown
from launcher.config.key_reference import key_paths
from launcher.config.load_config import load_config

ROOT = Path(__file__).parents[3]
MODEL = ROOT / "configs" / "quickstart" / "model"
DATA = ROOT / "configs" / "quickstart" / "train.jsonl"

# The keys of TRL's docs/source/grpo_trainer.md and examples/scripts/grpo_*.py.
TRL_FILE: dict[str, Any] = {
    "model_name_or_path": str(MODEL), "dataset_name": str(DATA), "learning_rate": "1e-5", "use_vllm": True,
    "vllm_mode": "colocate", "per_device_train_batch_size": 8, "gradient_accumulation_steps": 4, "num_generations": 8,
    "max_completion_length": 8, "max_prompt_length": 8, "reward_funcs": ["accuracy_reward"], "beta": 0.001,
    "bf16": True, "max_steps": 200, "warmup_ratio": 0.05, "logging_steps": 1, "report_to": "wandb",
    "save_strategy": "no", "steps_per_generation": 8, "num_iterations": 2, "lr_scheduler_type": "cosine",
}  # fmt: skip

# What verl's examples/grpo_trainer/run_qwen2-7b_math.sh sets.
VERL_FILE: dict[str, Any] = {
    "algorithm": {"adv_estimator": "grpo", "use_kl_in_reward": False},
    "data": {"train_files": [str(DATA)], "val_files": str(DATA), "train_batch_size": 1024, "max_prompt_length": 8,
             "max_response_length": 8, "filter_overlong_prompts": True, "truncation": "error"},
    "actor_rollout_ref": {
        "model": {"path": str(MODEL), "use_remove_padding": True, "enable_gradient_checkpointing": True},
        "actor": {"optim": {"lr": 1e-6}, "ppo_mini_batch_size": 256, "ppo_micro_batch_size_per_gpu": 16,
                  "use_kl_loss": True, "kl_loss_coef": 0.001, "kl_loss_type": "low_var_kl", "entropy_coeff": 0,
                  "fsdp_config": {"param_offload": False, "optimizer_offload": False}},
        "rollout": {"log_prob_micro_batch_size_per_gpu": 16, "tensor_model_parallel_size": 2, "name": "vllm",
                    "gpu_memory_utilization": 0.6, "n": 5},
        "ref": {"log_prob_micro_batch_size_per_gpu": 16, "fsdp_config": {"param_offload": True}}},
    "trainer": {"critic_warmup": 0, "logger": ["console", "wandb"], "project_name": "p", "experiment_name": "qwen2/7b",
                "n_gpus_per_node": 8, "nnodes": 1, "save_freq": 20, "test_freq": 5, "total_epochs": 15},
}  # fmt: skip


def imported(given: dict[str, Any], place: Path, *, steps: int | None = None) -> dict[str, Any]:
    """Return the new file's values; the file is at `place / "new.yaml"`."""
    source = place / "theirs.yaml"
    source.write_text(yaml.safe_dump(given))
    text = import_config(source, steps=steps)
    (place / "new.yaml").write_text(text)
    values: dict[str, Any] = yaml.safe_load(text)
    return values


def with_value(given: dict[str, Any], dotted: str, value: Any) -> dict[str, Any]:
    """Return a copy with one value set."""
    copy: dict[str, Any] = yaml.safe_load(yaml.safe_dump(given))
    *sections, last = dotted.split(".")
    place = copy
    for part in sections:
        place = place.setdefault(part, {})
    place[last] = value
    return copy


def test_every_key_of_ours_in_the_tables_exists() -> None:
    known = set(key_paths())
    sections = {name.rpartition(".")[0] for name in known} | {"loggers", "evaluate", "roles"}
    named = [rule.ours for table in (TRL, VERL) for rule in table.values() if isinstance(rule, Same | Together)]
    assert not [name for name in named if name not in known and name not in sections]


def test_trl_file_becomes_a_configuration_that_loads(tmp_path: Path) -> None:
    values = imported(TRL_FILE, tmp_path)
    assert values["schedule"]["rollout_batch_size"] == 8  # 8 x 8 completions of one process / 8
    assert values["actor"]["num_mini_batches"] == 2
    assert values["steps"] == 200 / (2 * 2)
    assert values["actor"]["lr_warmup_steps"] == math.ceil(0.05 * 50)
    assert values["actor"]["lr"] == 1e-5
    assert values["checkpoint"]["interval"] == 0
    assert values["algorithm"]["loss_normalization"] == "token"  # loss_type's default: dapo
    assert "vllm_mode" in (tmp_path / "new.yaml").read_text()
    config = load_config(tmp_path / "new.yaml")
    assert config.reward.function == "math_verify"
    assert config.rollout.engine == "vllm"


def test_everything_that_trl_counts_in_updates_is_counted_in_steps(tmp_path: Path) -> None:
    """2 mini-batches x 2 iterations: a step of ours is four updates."""
    given = {
        **TRL_FILE, "warmup_ratio": None, "warmup_steps": 10, "save_steps": 100, "save_strategy": "steps",
        "eval_strategy": "steps", "eval_steps": 50, "sync_ref_model": True, "ref_model_mixup_alpha": 1,
        "ref_model_sync_steps": 64,
    }  # fmt: skip
    values = imported(given, tmp_path)
    assert values["steps"] == 50 and values["actor"]["lr_warmup_steps"] == 3
    assert (values["checkpoint"]["interval"], values["evaluate"]["interval"]) == (25, 13)
    assert values["algorithm"]["ref_update_interval"] == 16
    assert "save_steps / 4 updates a step" in (tmp_path / "new.yaml").read_text()
    once = imported({**given, "steps_per_generation": 4, "num_iterations": 1, "save_steps": 0.1}, tmp_path)
    assert (once["steps"], once["actor"]["lr_warmup_steps"], once["checkpoint"]["interval"]) == (200, 10, 20)


def test_trl_s_processes_count_where_the_file_says_how_many(tmp_path: Path) -> None:
    values = imported({**TRL_FILE, "num_processes": 4}, tmp_path)
    assert values["schedule"]["rollout_batch_size"] == 32
    assert (values["steps"], values["actor"]["num_mini_batches"]) == (50, 2)
    assert "4 processes" in (tmp_path / "new.yaml").read_text()


def test_a_whole_dump_of_trl_s_defaults_is_not_refused_for_what_has_no_effect(tmp_path: Path) -> None:
    given = {**TRL_FILE, "router_aux_loss_coef": 0.001, "vllm_structured_outputs_regex": None, "datasets": []}
    assert imported(given, tmp_path)["steps"] == 50


def test_verl_file_becomes_a_configuration_that_loads(tmp_path: Path) -> None:
    values = imported(VERL_FILE, tmp_path, steps=105)
    assert values["actor"]["num_mini_batches"] == 4
    assert values["roles"] == {"rollout": 2, "actor": 4}  # 2 instances of 2 devices
    assert values["evaluate"]["interval"] == 5
    assert "# TO FILL IN: reward.function\n" in (tmp_path / "new.yaml").read_text()
    config = load_config(tmp_path / "new.yaml", overrides=["reward.function=math"])
    assert config.algorithm.kl_coef == 0.001
    assert config.data.ground_truth_field == "reward_model.ground_truth"
    assert config.name == "qwen2-7b"


def test_how_verl_validates_is_kept(tmp_path: Path) -> None:
    sampling = {"temperature": 0.6, "n": 4, "top_p": 0.9, "top_k": 20, "do_sample": True}
    values = imported(with_value(VERL_FILE, "actor_rollout_ref.rollout.val_kwargs", sampling), tmp_path, steps=9)
    told = {"temperature": 0.6, "n_samples_per_prompt": 4, "top_p": 0.9, "top_k": 20, "interval": 5}
    assert {key: values["evaluate"][key] for key in told} == told
    assert "answered if roles has evaluate: 1" in (tmp_path / "new.yaml").read_text()
    values = imported(with_value(VERL_FILE, "actor_rollout_ref.rollout.val_kwargs", {"top_k": -1}), tmp_path, steps=9)
    assert values["evaluate"]["top_k"] == 0


def test_adapters_become_ours(tmp_path: Path) -> None:
    imported({**TRL_FILE, "use_peft": True, "lora_r": 8, "lora_modules_to_save": ["norm"]}, tmp_path)
    config = load_config(tmp_path / "new.yaml")
    assert config.lora is not None and not config.sends_adapter
    assert (config.lora.rank, config.lora.scaling, config.lora.dropout) == (8, 4, 0.05)
    assert (config.lora.targets, config.lora.modules_to_save) == (("q_proj", "v_proj"), ("norm",))
    given = with_value(VERL_FILE, "actor_rollout_ref.model.lora_rank", 32)
    imported(with_value(given, "actor_rollout_ref.model.target_modules", ["all-linear"]), tmp_path, steps=105)
    config = load_config(tmp_path / "new.yaml", overrides=["reward.function=math"])
    assert config.lora is not None and config.sends_adapter
    assert (config.lora.rank, config.lora.scaling, config.lora.targets) == (32, 0.5, "all-linear")
    assert "lora" not in imported(TRL_FILE, tmp_path)
    assert "lora" not in imported(with_value(VERL_FILE, "actor_rollout_ref.model.lora_rank", 0), tmp_path)


def test_every_key_of_a_file_is_in_the_new_one(tmp_path: Path) -> None:
    imported(VERL_FILE, tmp_path)
    text = (tmp_path / "new.yaml").read_text()
    for key in ("use_remove_padding", "param_offload", "log_prob_micro_batch_size_per_gpu", "gpu_memory_utilization",
                "project_name", "test_freq", "total_epochs", "train_files"):  # fmt: skip
        assert key in text, key


def test_a_key_whose_partner_is_missing_is_told(tmp_path: Path) -> None:
    for test_freq in (None, -1):
        imported(with_value(VERL_FILE, "trainer.test_freq", test_freq), tmp_path)
        assert "#   data.val_files: " in (tmp_path / "new.yaml").read_text()
    imported({**TRL_FILE, "lora_r": 8, "use_peft": False}, tmp_path)
    text = (tmp_path / "new.yaml").read_text()
    assert "#   lora_r: 8: sets no lora.rank here (with use_peft)" in text and "use_peft" not in text.split("lora_r")[0]


@pytest.mark.parametrize("no", [False, "no"])  # YAML takes a bare `no` as false
def test_trl_s_no_is_no(no: object, tmp_path: Path) -> None:
    values = imported({**TRL_FILE, "eval_strategy": no, "save_strategy": no, "save_steps": 10}, tmp_path)
    assert "evaluate" not in values and values["checkpoint"]["interval"] == 0


def test_shares_and_epochs_of_trl_are_of_the_steps_or_are_to_be_filled_in(tmp_path: Path) -> None:
    """50 steps, of four updates each."""
    asked = {**TRL_FILE, "save_strategy": "steps", "eval_strategy": "steps", "save_steps": 0.25, "eval_steps": 0.1}
    values = imported({**asked, "warmup_ratio": 1}, tmp_path)
    assert (values["checkpoint"]["interval"], values["evaluate"]["interval"]) == (13, 5)
    assert values["actor"]["lr_warmup_steps"] == 50
    imported({**asked, "max_steps": None}, tmp_path)
    assert (
        "# TO FILL IN: steps, actor.lr_warmup_steps, evaluate.interval, checkpoint.interval"
        in (tmp_path / "new.yaml").read_text()
    )
    imported({**asked, "warmup_ratio": None, "warmup_steps": 0.1}, tmp_path)
    assert "lr_warmup_steps: 5  # warmup_steps 0.1 of the steps" in (tmp_path / "new.yaml").read_text()
    values = imported({**asked, "save_strategy": "epoch"}, tmp_path)
    assert values["checkpoint"] is None
    assert "# interval:  save_strategy epoch: prompts" in (tmp_path / "new.yaml").read_text()


@pytest.mark.parametrize(
    ("given", "key", "value"),
    [
        (TRL_FILE, "loss_type", "sapo"),
        (TRL_FILE, "use_dora", True),
        (TRL_FILE, "min_p", 0.1),
        (TRL_FILE, "vllm_structured_outputs_regex", "[0-9]+"),
        (TRL_FILE, "datasets", [{"path": "a"}, {"path": "b"}]),
        (TRL_FILE, "scale_rewards", "batch"),
        (TRL_FILE, "top_entropy_quantile", 0.2),
        (TRL_FILE, "reward_weights", [1.0, 0.5]),
        (TRL_FILE, "lr_scheduler_type", "polynomial"),
        (TRL_FILE, "num_generations", 7),
        (VERL_FILE, "algorithm.adv_estimator", "remax"),
        (VERL_FILE, "actor_rollout_ref.actor.ppo_mini_batch_size", 300),
        (VERL_FILE, "actor_rollout_ref.actor.policy_loss.loss_mode", "clip_cov"),
        (VERL_FILE, "actor_rollout_ref.rollout.name", "sglang"),
        (VERL_FILE, "actor_rollout_ref.model.exclude_modules", "q_proj"),
        (VERL_FILE, "actor_rollout_ref.actor.loss_agg_mode", "seq-mean-token-sum"),
        (VERL_FILE, "algorithm.use_kl_in_reward", True),
    ],
)
def test_what_would_learn_something_else_is_refused_by_key(
    given: dict[str, Any], key: str, value: Any, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=key.rpartition(".")[2]) as refused:
        imported(with_value(given, key, value), tmp_path)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("given", "key", "value"),
    [
        (TRL_FILE, "warmup_steps", "5%"),
        (TRL_FILE, "max_steps", "many"),
        (TRL_FILE, "save_steps", "epoch"),
        (TRL_FILE, "save_strategy", "best"),
        (TRL_FILE, "eval_strategy", "sometimes"),
        (TRL_FILE, "warmup_ratio", 2),
        (TRL_FILE, "warmup_ratio", -0.5),
        (TRL_FILE, "warmup_steps", -3),
        ({**TRL_FILE, "max_steps": -1}, "num_train_epochs", -1),
        ({**TRL_FILE, "save_strategy": "steps"}, "save_steps", -5),
        ({**TRL_FILE, "save_strategy": "steps"}, "save_steps", 2.5),
        ({**TRL_FILE, "save_strategy": "steps"}, "save_steps", 0),
        ({**TRL_FILE, "eval_strategy": "steps"}, "eval_steps", 0),
        (TRL_FILE, "bf16", "False"),
        (TRL_FILE, "use_peft", "x"),
        (TRL_FILE, "use_vllm", "yes"),
        (TRL_FILE, "mask_truncated_completions", "foo"),
        (VERL_FILE, "actor_rollout_ref.actor.use_kl_loss", "maybe"),
        (VERL_FILE, "algorithm.use_kl_in_reward", "False"),
        (VERL_FILE, "trainer.total_epochs", 0),
        (VERL_FILE, "data", 5),
        (TRL_FILE, "steps_per_generation", "8"),
        (TRL_FILE, "num_generations", math.inf),
        (TRL_FILE, "report_to", 5),
        (TRL_FILE, "scale_rewards", ["group"]),
        (TRL_FILE, "vllm_tensor_parallel_size", 0),
        (TRL_FILE, "vllm_importance_sampling_clip_max", 0),
        (TRL_FILE, "learning_rate", "abc"),
        (TRL_FILE, "adam_beta1", "abc"),
        (TRL_FILE, "epsilon", -1),
        (VERL_FILE, "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu", "foo"),
        (VERL_FILE, "data.train_files", 7),
        (VERL_FILE, "data.val_files", [1]),
        (VERL_FILE, "trainer.test_freq", "often"),
        (VERL_FILE, "actor_rollout_ref.rollout.top_k", "all"),
        (VERL_FILE, "custom_reward_function.path", 5),
        (VERL_FILE, "custom_reward_function.path", "~no-such-user/reward.py"),
        (VERL_FILE, "data.train_files", "~no-such-user/train.parquet"),
        (VERL_FILE, "data.train_files", ["a.parquet", "~no-such-user/train.parquet"]),
        (VERL_FILE, "data.val_files", "~no-such-user/held-out.parquet"),
        (VERL_FILE, "actor_rollout_ref.actor.optim.lr", "${oc.env:LR}"),
        (VERL_FILE, "actor_rollout_ref.actor.optim", "${my.optim}"),
    ],
)
def test_value_that_cannot_be_used_is_one_line_with_its_key(
    given: dict[str, Any], key: str, value: Any, tmp_path: Path
) -> None:
    (tmp_path / "theirs.yaml").write_text(yaml.safe_dump(with_value(given, key, value)))
    said = CliRunner().invoke(main, ["import-config", str(tmp_path / "theirs.yaml")])
    assert (said.exit_code, said.output.count("\n")) == (2, 1), said.output
    assert key.removeprefix("vllm_").rpartition(".")[2] in said.output


def test_references_of_verl_s_files_have_the_values_that_they_name(tmp_path: Path) -> None:
    given = with_value(VERL_FILE, "actor_rollout_ref.actor.ppo_mini_batch_size", "${data.train_batch_size}")
    given = with_value(given, "actor_rollout_ref.rollout.n", "${oc.select:actor_rollout_ref.actor.rollout_n, 3}")
    given = with_value(given, "actor_rollout_ref.rollout.max_model_len", "${.limit}")
    given = with_value(given, "actor_rollout_ref.rollout.limit", 1024)
    given = with_value(given, "trainer.default_local_dir", "${oc.env:HOME}")
    values = imported(given, tmp_path)
    assert values["actor"]["num_mini_batches"] == 1
    assert values["schedule"]["n_samples_per_prompt"] == 3
    assert values["vllm"]["max_model_len"] == 1024


def test_options_of_the_chat_template_stay_together(tmp_path: Path) -> None:
    options = {"enable_thinking": False, "depth": {"of": 2}}
    values = imported(with_value(VERL_FILE, "data.apply_chat_template_kwargs", options), tmp_path)
    assert values["data"]["chat_template_options"] == options
    assert imported({**TRL_FILE, "chat_template_kwargs": options}, tmp_path)["data"]["chat_template_options"] == options


def test_value_of_a_type_that_json_lacks_is_shown(tmp_path: Path) -> None:
    (tmp_path / "trl.yaml").write_text(yaml.safe_dump(TRL_FILE) + "logging_first: 2026-01-02\n")
    assert '#   logging_first: "2026-01-02": ' in import_config(tmp_path / "trl.yaml")


def test_harmless_values_of_refused_keys_pass(tmp_path: Path) -> None:
    rules = [(key, rule) for key, rule in TRL.items() if isinstance(rule, Refused)]
    imported(TRL_FILE | {key: rule.harmless[-1] for key, rule in rules}, tmp_path)


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token_truncate", {"method": "truncated_is", "cap": 3.0}),
        ("token_mask", {"method": "decoupled", "cap": 3.0}),
        ("sequence_mask", {"mask": "sequence", "sequence_log_ratio": round(math.log(3), 4)}),
    ],
)
def test_trl_s_correction_becomes_ours(mode: str, expected: dict[str, Any], tmp_path: Path) -> None:
    values = imported(TRL_FILE | {"vllm_importance_sampling_mode": mode}, tmp_path)
    assert values["algorithm"]["off_policy"] == expected


@pytest.mark.parametrize(
    ("given", "keys", "low", "high"),
    [
        (TRL_FILE, {"importance_sampling_level": "sequence"}, 0.2, 0.2),
        (TRL_FILE, {"importance_sampling_level": "sequence", "epsilon": 3e-4}, 3e-4, 3e-4),
        (TRL_FILE, {"importance_sampling_level": "sequence", "epsilon": 3e-4, "epsilon_high": 4e-4}, 3e-4, 4e-4),
        (VERL_FILE, {"policy_loss.loss_mode": "gspo"}, 0.2, 0.2),
        (VERL_FILE, {"policy_loss.loss_mode": "gspo", "clip_ratio_low": 3e-4, "clip_ratio_high": 4e-4}, 3e-4, 4e-4),
        (VERL_FILE, {"policy_loss.loss_mode": "gspo", "clip_ratio": 1e-3}, 1e-3, 1e-3),
        (VERL_FILE, {"clip_ratio_low": 0.1, "clip_ratio": 0.2, "clip_ratio_high": 0.3}, 0.1, 0.3),
    ],
)
def test_clips_are_theirs_whatever_ours_are_by_default(
    given: dict[str, Any], keys: dict[str, Any], low: float, high: float, tmp_path: Path
) -> None:
    section = "actor_rollout_ref.actor." if given is VERL_FILE else ""
    for key, value in keys.items():
        given = with_value(given, section + key, value)
    algorithm = imported(given, tmp_path)["algorithm"]
    assert (algorithm["eps_clip"], algorithm["eps_clip_high"]) == (low, high)


def test_penalty_of_verl_s_rloo_is_in_the_reward_as_ours_is(tmp_path: Path) -> None:
    rloo = with_value(VERL_FILE, "algorithm.adv_estimator", "rloo")
    with pytest.raises(ConfigError, match=r"use_kl_loss.*in the reward"):
        imported(rloo, tmp_path)
    rloo = with_value(rloo, "actor_rollout_ref.actor.use_kl_loss", False)
    rloo = with_value(with_value(rloo, "algorithm.use_kl_in_reward", True), "algorithm.kl_ctrl.kl_coef", 0.02)
    assert imported(rloo, tmp_path)["algorithm"]["kl_coef"] == 0.02


def test_ppo_of_verl_has_a_critic_and_its_penalty_in_the_reward(tmp_path: Path) -> None:
    given = with_value(VERL_FILE, "algorithm.adv_estimator", "gae")
    given = with_value(with_value(given, "algorithm.use_kl_in_reward", True), "critic", {"optim": {"lr": 2e-5}})
    given = with_value(given, "actor_rollout_ref.actor.use_kl_loss", False)
    values = imported(given, tmp_path, steps=5)
    assert values["algorithm"]["kl_placement"] == "reward"
    assert values["critic"]["lr"] == 2e-5
    assert load_config(tmp_path / "new.yaml", overrides=["reward.function=math"]).algorithm.name == "ppo"


@pytest.mark.parametrize(
    ("given", "key", "meant"),
    [
        (TRL_FILE, "learning_rat", "learning_rate"),
        (TRL_FILE, "vllm_tensor_paralel_size", "vllm_tensor_parallel_size"),
        (VERL_FILE, "actor_rollout_ref.actor.optim.lrr", "actor_rollout_ref.actor.optim.lr"),
        (VERL_FILE, "actor_rollout_ref.actr.ppo_epochs", "actor_rollout_ref.actor.ppo_epochs"),
        ({}, "learning_rat", "learning_rate"),
    ],
)
def test_misspelt_key_is_refused_with_the_one_that_is_meant(
    given: dict[str, Any], key: str, meant: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=f"did you mean '{meant}'"):
        imported(with_value(given, key, 1), tmp_path)


def test_keys_of_theirs_that_resemble_others_are_left_out(tmp_path: Path) -> None:
    for key in ("gradient_checkpointing_kwargs", "optim_target_modules", "eval_accumulation_steps", "bf16_full_eval"):
        imported(with_value(TRL_FILE, key, 1), tmp_path)
    for key in ("actor.ppo_micro_batch_size", "rollout.mode", "rollout.bogus", "actor.optim.min_lr"):
        imported(with_value(VERL_FILE, f"actor_rollout_ref.{key}", 1), tmp_path)
        assert "no counterpart is known" in (tmp_path / "new.yaml").read_text()
    for key in ("trainer.max_critic_ckpt_to_keep", "data.val_batch_size", "data.filter_overlong_prompts_workers"):
        imported(with_value(VERL_FILE, key, 1), tmp_path)


def test_a_configuration_of_ours_is_not_imported(tmp_path: Path) -> None:
    for mine in ("configs/quickstart.yaml", "configs/smollm2-two-digit-sums-cpu.yaml"):
        with pytest.raises(ConfigError, match="AsyncFlow configuration already"):
            import_config(ROOT / mine)
    imported(TRL_FILE, tmp_path)
    resolved = tmp_path / "config.yaml"
    load_config(tmp_path / "new.yaml").save(tmp_path)
    with pytest.raises(ConfigError, match="AsyncFlow configuration already"):
        import_config(resolved)


def test_one_key_says_whose_a_file_is(tmp_path: Path) -> None:
    assert imported({"learning_rate": 2e-6}, tmp_path)["actor"]["lr"] == 2e-6
    assert "# TO FILL IN: steps, reward.function, data.path, model.path\n" in (tmp_path / "new.yaml").read_text()
    assert imported({"data": {"train_batch_size": 1024}}, tmp_path)["actor"]["num_mini_batches"] == 4


def test_broken_json_is_told_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "bad.json").write_text('{\n"learning_rate": }')
    with pytest.raises(ConfigError, match="bad.json:2: JSON syntax"):
        import_config(tmp_path / "bad.json")


def test_trl_s_unset_max_steps_leaves_steps_to_fill_in(tmp_path: Path) -> None:
    assert "steps" not in imported({**TRL_FILE, "max_steps": -1, "warmup_ratio": 0}, tmp_path)
    assert "# steps:  max_steps -1 sets none; num_train_epochs 3.0 x" in (tmp_path / "new.yaml").read_text()


def test_arguments_of_trl_s_model_become_ours(tmp_path: Path) -> None:
    given = {**TRL_FILE, "model_init_kwargs": {"torch_dtype": "float32", "attn_implementation": "sdpa"}}
    assert imported(given, tmp_path)["model"]["dtype"] == "float32"


def test_file_of_neither_system_and_a_file_that_exists_are_one_line(tmp_path: Path) -> None:
    (tmp_path / "other.yaml").write_text("colour: blue\n")
    (tmp_path / "taken.yaml").write_text("")
    said = CliRunner().invoke(main, ["import-config", str(tmp_path / "other.yaml")])
    assert (said.exit_code, said.output.count("\n")) == (2, 1)
    assert "neither keys of TRL's GRPOConfig nor of verl's" in said.output
    (tmp_path / "trl.yaml").write_text(yaml.safe_dump(TRL_FILE))
    said = CliRunner().invoke(main, ["import-config", str(tmp_path / "trl.yaml"), "-o", str(tmp_path / "taken.yaml")])
    assert said.exit_code == 2
    assert "exists" in said.output
    nowhere = str(tmp_path / "none" / "x.yaml")
    said = CliRunner().invoke(main, ["import-config", str(tmp_path / "trl.yaml"), "-o", nowhere])
    assert (said.exit_code, said.output.count("\n")) == (2, 1)


def test_page_has_the_tables() -> None:
    page = (ROOT / "docs" / "importing.md").read_text()
    assert tables_as_markdown() in page, "replace what follows <!-- generated -->: asyncflow config importing"
