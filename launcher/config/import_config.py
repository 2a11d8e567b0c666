"""`asyncflow import-config`: a GRPO configuration of TRL, or a PPO trainer's of verl, as one of ours.

Every key that the file gives ends in one of three ways: as ours; as a line that says why it has no counterpart; or,
where a run without it would learn something else, as a refusal. The tables below are also a page, docs/importing.md.

Sources: the classes GRPOConfig, GRPOScriptArguments and ModelConfig of TRL 1.16; ppo_trainer.yaml of verl (0.5 to 0.8).
"""

import json
import math
import re
import reprlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from asyncflow.errors import ConfigError
from asyncflow.settings import as_advice
from launcher.config.key_reference import key_paths
from launcher.config.load_config import flatten, keys_of, read_yaml
from launcher.config.paths import expand_home
from workers.settings.run import RunConfig

Found = dict[str, Any]
"""Their keys, dotted, and the values that a file gives."""


@dataclass
class Ours:
    """A configuration of ours in the making."""

    values: dict[str, Any] = field(default_factory=dict)  # Our dotted key -> value
    origins: dict[str, str] = field(default_factory=dict)  # Our dotted key -> what it was made of
    left: list[tuple[str, str]] = field(default_factory=list)  # Their key with its value, and why it is left out
    to_fill: list[str] = field(default_factory=list)  # What only the user knows

    def set_value(self, key: str, value: Any, origin: str) -> None:
        self.values[key] = value
        self.origins[key] = origin

    def leave_out(self, key: str, value: Any, why: str) -> None:
        self.left.append((f"{key}: {json.dumps(value, default=str)}", why))


@dataclass(frozen=True)
class Same:
    """Their key has the meaning of one of ours."""

    ours: str
    convert: Callable[[Any], Any] = lambda value: value
    note: str = ""


@dataclass(frozen=True)
class Left:
    """Their key has no counterpart; a run does not need it."""

    why: str


@dataclass(frozen=True)
class Refused:
    """Their key changes what is learnt and has no counterpart, unless its value is one of `harmless`."""

    why: str
    harmless: tuple[Any, ...] = (None, False)


@dataclass(frozen=True)
class Together:
    """Their key is converted together with others."""

    ours: str
    how: str


Rule = Same | Left | Refused | Together

_OUR_OWN = "the launcher places processes: --roles"
_LOGS = "every run writes metrics.jsonl, samples/ and report.html; see `loggers`"
_SAVES = "checkpoints are asynchronous and sharded: section checkpoint"
_MEMORY = "weights are sharded over the role's ranks; `asyncflow plan` finds sizes that fit"
_RAY = "there is no Ray"
_PADDING = "batches are packed, never padded"
_EVALUATOR = "answered if roles has evaluate: 1, which takes a device"
_UNKNOWN = "it is not in the table of docs/importing.md, so no counterpart is known"


def _positive(value: Any) -> Any:
    return max(0, value or 0)


def _dtype(value: Any) -> Any:
    return {"float16": "float16", "half": "float16", "fp16": "float16", "fp32": "float32", "float": "float32"}.get(
        str(value), "float32" if "32" in str(value) else "bfloat16"
    )


TRL: Mapping[str, Rule] = {
    "model_name_or_path": Same("model.path"),
    "model_revision": Same("model.revision", note="`main` is the default"),
    "dtype": Same("model.dtype", _dtype, "the trainer's master weights are float32"),
    "torch_dtype": Same("model.dtype", _dtype),
    "model_init_kwargs.dtype": Same("model.dtype", _dtype),
    "model_init_kwargs.torch_dtype": Same("model.dtype", _dtype),
    "model_init_kwargs.revision": Same("model.revision"),
    "model_init_kwargs.attn_implementation": Left("engines choose their attention; docs/engines.md"),
    "model_init_kwargs.trust_remote_code": Refused("models with code of their own are refused"),
    "bf16": Together("actor.autocast", "bfloat16"),
    "fp16": Refused("float16 needs a loss scale, which no engine of ours has; use bf16"),
    "datasets": Refused("name one as dataset_name, and write the others under data.mixture", (None, [])),
    "dataset_name": Same("data.path"),
    "dataset_config": Same("data.subset"),
    "dataset_train_split": Same("data.split"),
    "dataset_test_split": Together("evaluate.split", "with `eval_strategy`"),
    "dataset_streaming": Left("rows are read once, and prompts are made as they are needed"),
    "shuffle_dataset": Same("data.shuffle"),
    "max_prompt_length": Same("data.max_prompt_tokens", note="ours leaves a longer prompt out (data.overlong)"),
    "chat_template_kwargs": Same("data.chat_template_options"),
    "reward_funcs": Together("reward.function", "`accuracy_reward`: math_verify; a dotted name: module:function"),
    "reward_model_name_or_path": Same("reward.model.path"),
    "reward_weights": Refused("there is one reward; weigh the parts in a function of your own", (None, [1.0], [1])),
    "multi_objective_aggregation": Refused("there is one reward", (None, "sum_then_normalize")),
    "learning_rate": Same("actor.lr"),
    "lr_scheduler_type": Together("actor.lr_schedule", "constant, linear, cosine, constant_with_warmup"),
    "lr_scheduler_kwargs": Refused("see actor.lr_min_ratio and actor.lr_decay_steps", (None, {})),
    "warmup_steps": Together("actor.lr_warmup_steps", "as max_steps; below 1: a share of the steps"),
    "warmup_ratio": Together("actor.lr_warmup_steps", "a share of the steps"),
    "weight_decay": Same("actor.weight_decay", note="norms and biases do not decay, as there"),
    "adam_beta1": Together("actor.betas", "[adam_beta1, adam_beta2]"),
    "adam_beta2": Together("actor.betas", "[adam_beta1, adam_beta2]"),
    "adam_epsilon": Same("actor.eps"),
    "optim": Refused("AdamW is the only optimizer", (None, "adamw_torch", "adamw_torch_fused")),
    "max_grad_norm": Same("actor.grad_clip", lambda value: value or None),
    "gradient_checkpointing": Same("actor.gradient_checkpointing"),
    "per_device_train_batch_size": Together("schedule.rollout_batch_size", "see below"),
    "gradient_accumulation_steps": Together("schedule.rollout_batch_size", "see below"),
    "steps_per_generation": Together("schedule.rollout_batch_size", "see below"),
    "generation_batch_size": Together("schedule.rollout_batch_size", "see below"),
    "num_processes": Together("schedule.rollout_batch_size", "accelerate's; one, if the file does not say"),
    "num_generations": Same("schedule.n_samples_per_prompt"),
    "num_iterations": Same("actor.ppo_epochs"),
    "num_train_epochs": Together("steps", "prompts / schedule.rollout_batch_size x epochs"),
    "max_steps": Together("steps", "optimizer steps / updates of one step of ours"),
    "max_completion_length": Same("rollout.max_response_tokens"),
    "temperature": Same("rollout.temperature"),
    "top_p": Same("rollout.top_p"),
    "top_k": Same("rollout.top_k", _positive),
    "min_p": Refused("the log-probabilities would be of another distribution", (None, 0, 0.0)),
    "repetition_penalty": Refused("the log-probabilities would be of another distribution", (None, 1, 1.0)),
    "generation_kwargs": Refused("see section rollout", (None, {})),
    "vllm_structured_outputs_regex": Refused("responses would be of another distribution"),
    "vllm_guided_decoding_regex": Refused("responses would be of another distribution"),
    "use_vllm": Together("rollout.engine", "vllm, else hf"),
    "vllm_gpu_memory_utilization": Same("vllm.gpu_memory_utilization", note="ours has the device for itself"),
    "vllm_max_model_length": Same("vllm.max_model_len"),
    "vllm_max_model_len": Same("vllm.max_model_len"),
    "vllm_tensor_parallel_size": Same("vllm.tensor_parallel_size"),
    "beta": Same("algorithm.kl_coef"),
    "epsilon": Same("algorithm.eps_clip"),
    "epsilon_high": Same("algorithm.eps_clip_high"),
    "delta": Same("algorithm.dual_clip", note="where the advantage is negative; TRL's default is none, ours 3"),
    "importance_sampling_level": Together("algorithm.name", "`sequence`: gspo"),
    "loss_type": Together("algorithm.loss_normalization", "grpo: sequence; dapo, bnpo: token; dr_grpo: constant"),
    "scale_rewards": Together("algorithm.scale_advantages_by_std", "group: true; none: false; batch is refused"),
    "mask_truncated_completions": Same("rollout.truncated", lambda value: "mask" if value else "train"),
    "sync_ref_model": Together("algorithm.ref_update_interval", "with ref_model_sync_steps"),
    "ref_model_sync_steps": Together("algorithm.ref_update_interval", "as max_steps; with sync_ref_model"),
    "ref_model_mixup_alpha": Together("algorithm.ref_update_interval", "only 1: the reference becomes the policy"),
    "top_entropy_quantile": Refused("every drawn token is trained", (None, 1, 1.0)),
    "entropy_coef": Same("algorithm.entropy_coef"),
    "use_adaptive_entropy": Refused("algorithm.entropy_coef is a constant"),
    "vllm_importance_sampling_correction": Together("algorithm.off_policy.method", "false: none"),
    "vllm_importance_sampling_mode": Together(
        "algorithm.off_policy", "token_truncate: truncated_is; token_mask: decoupled; sequence_mask: a mask"
    ),
    "vllm_importance_sampling_clip_max": Together("algorithm.off_policy.cap", "with the mode"),
    "vllm_importance_sampling_cap": Together("algorithm.off_policy.cap", "with the mode"),
    "vllm_importance_sampling_clip_min": Refused("weights have no lower bound; see off_policy.method: icepop"),
    "off_policy_mask_threshold": Refused("see algorithm.off_policy.mask"),
    "use_bias_correction_kl": Refused("kl_estimator: k2 has the exact gradient on-policy", (None, False, True)),
    "use_peft": Together("lora", "an adapter, with the keys that follow"),
    "lora_r": Together("lora.rank", "with use_peft"),
    "lora_alpha": Together("lora.alpha", "with use_peft"),
    "lora_dropout": Together("lora.dropout", "with use_peft; 0.05 if it is not given"),
    "lora_target_modules": Together("lora.targets", "with use_peft; q_proj v_proj if none is given, as peft has it"),
    "lora_modules_to_save": Together("lora.modules_to_save", "with use_peft; versions are then merged"),
    "use_rslora": Together("lora.use_rslora", "with use_peft"),
    "use_dora": Refused("see section lora"),
    "lora_target_parameters": Refused("see section lora"),
    "load_in_4bit": Refused("quantised weights cannot be trained"),
    "load_in_8bit": Refused("quantised weights cannot be trained"),
    "router_aux_loss_coef": Left("only for mixtures of experts, which are refused"),
    "seed": Same("seed"),
    "save_steps": Together("checkpoint.interval", "as max_steps; below 1: a share of the steps"),
    "save_total_limit": Same("checkpoint.keep_last"),
    "save_strategy": Together("checkpoint.interval", "no: 0; steps; epoch: to be filled in"),
    "eval_strategy": Together("evaluate", "no: no evaluation; steps; epoch: to be filled in"),
    "eval_steps": Together("evaluate.interval", "as save_steps; with `eval_strategy`"),
    "num_generations_eval": Together("evaluate.n_samples_per_prompt", "with `eval_strategy`"),
    "run_name": Same("name", lambda value: str(value).replace("/", "-")),
    "output_dir": Left("the run's directory: --run-dir"),
    "report_to": Together("loggers", "wandb, tensorboard, trackio, mlflow, swanlab"),
    "max_tool_calling_iterations": Same("rollout.max_turns"),
    "attn_implementation": Left("engines choose their attention; docs/engines.md"),
    "trust_remote_code": Refused("models with code of their own are refused"),
}  # fmt: skip
"""TRL's keys. All others of transformers.TrainingArguments are left out with a line."""

_ACTOR, _ROLLOUT = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout."

VERL: Mapping[str, Rule] = {
    "actor_rollout_ref.model.path": Same("model.path"),
    "actor_rollout_ref.model.enable_gradient_checkpointing": Same("actor.gradient_checkpointing"),
    "actor_rollout_ref.model.lora_rank": Together("lora.rank", "0: all weights are trained"),
    "actor_rollout_ref.model.lora_alpha": Together("lora.alpha", "with lora_rank"),
    "actor_rollout_ref.model.target_modules": Together("lora.targets", "with lora_rank"),
    "actor_rollout_ref.model.lora_adapter_path": Together("lora.path", "with lora_rank"),
    "actor_rollout_ref.model.exclude_modules": Refused("name the others: lora.targets"),
    "actor_rollout_ref.model.trust_remote_code": Refused("models with code of their own are refused"),
    "data.train_files": Together("data.path", "several files: data.mixture"),
    "data.val_files": Together("evaluate.path", "the first one"),
    "data.prompt_key": Same("data.prompt_field"),
    "data.max_prompt_length": Same("data.max_prompt_tokens"),
    "data.max_response_length": Same("rollout.max_response_tokens"),
    "data.train_batch_size": Same("schedule.rollout_batch_size"),
    "data.shuffle": Same("data.shuffle"),
    "data.seed": Same("seed", lambda value: value or 0),
    "data.filter_overlong_prompts": Together("data.overlong", "true: skip; else `truncation: error` is reject"),
    "data.truncation": Together("data.overlong", "prompts are never cut"),
    "data.apply_chat_template_kwargs": Same("data.chat_template_options"),
    "data.custom_cls.path": Refused("see data.source"),
    "data.sampler.class_path": Refused("see data.sampler"),
    "data.reward_fn_key": Together("data.ground_truth_field", "rows have reward_model.ground_truth"),
    _ACTOR + "strategy": Together("actor.engine", "fsdp, fsdp2: fsdp; megatron"),
    _ACTOR + "ppo_mini_batch_size": Together("actor.num_mini_batches", "train_batch_size / ppo_mini_batch_size"),
    _ACTOR + "ppo_micro_batch_size_per_gpu": Same("actor.micro_batch_size"),
    _ACTOR + "use_dynamic_bsz": Together("actor.max_tokens_per_micro_batch", "with ppo_max_token_len_per_gpu"),
    _ACTOR + "ppo_max_token_len_per_gpu": Together("actor.max_tokens_per_micro_batch", "with use_dynamic_bsz"),
    _ACTOR + "ppo_epochs": Same("actor.ppo_epochs"),
    _ACTOR + "clip_ratio": Together("algorithm.eps_clip", "and eps_clip_high, where the next two are not given"),
    _ACTOR + "clip_ratio_low": Together("algorithm.eps_clip", "else clip_ratio; with gspo else 0.2"),
    _ACTOR + "clip_ratio_high": Together("algorithm.eps_clip_high", "else clip_ratio; with gspo else 0.2"),
    _ACTOR + "clip_ratio_c": Same("algorithm.dual_clip"),
    _ACTOR + "loss_agg_mode": Together(
        "algorithm.loss_normalization",
        "token-mean: token; seq-mean-token-mean: sequence; seq-mean-token-sum-norm: constant",
    ),
    _ACTOR + "policy_loss.loss_mode": Together("algorithm.name", "vanilla, gspo; others are refused"),
    _ACTOR + "entropy_coeff": Same("algorithm.entropy_coef"),
    _ACTOR + "use_kl_loss": Together("algorithm.kl_coef", "with kl_loss_coef"),
    _ACTOR + "kl_loss_coef": Together("algorithm.kl_coef", "with use_kl_loss"),
    _ACTOR + "kl_loss_type": Together("algorithm.kl_estimator", "kl, k1: k1; mse, k2: k2; low_var_kl, k3: k3"),
    _ACTOR + "grad_clip": Same("actor.grad_clip"),
    _ACTOR + "optim.lr": Same("actor.lr"),
    _ACTOR + "optim.weight_decay": Same("actor.weight_decay"),
    _ACTOR + "optim.lr_warmup_steps": Together("actor.lr_warmup_steps", "else lr_warmup_steps_ratio"),
    _ACTOR + "optim.lr_warmup_steps_ratio": Together("actor.lr_warmup_steps", "a share of the steps"),
    _ACTOR + "optim.min_lr_ratio": Same("actor.lr_min_ratio", lambda value: value or 0.0),
    _ACTOR + "optim.warmup_style": Together("actor.lr_schedule", "constant, cosine"),
    _ACTOR + "optim.lr_scheduler_type": Together("actor.lr_schedule", "constant, cosine"),
    _ACTOR + "use_torch_compile": Left("there it is the loss alone; ours compiles layers: actor.compile"),
    _ACTOR + "ulysses_sequence_parallel_size": Refused("see actor.megatron.context_parallel", (None, 1)),
    _ACTOR + "megatron.tensor_model_parallel_size": Together("actor.megatron.tensor_parallel", "with megatron"),
    _ACTOR + "megatron.pipeline_model_parallel_size": Together("actor.megatron.pipeline_parallel", "with megatron"),
    _ACTOR + "megatron.context_parallel_size": Together("actor.megatron.context_parallel", "with megatron"),
    _ROLLOUT + "name": Together("rollout.engine", "vllm, hf; sglang is refused: rollout.engine openai"),
    _ROLLOUT + "temperature": Same("rollout.temperature"),
    _ROLLOUT + "top_k": Same("rollout.top_k", _positive),
    _ROLLOUT + "top_p": Same("rollout.top_p"),
    _ROLLOUT + "n": Same("schedule.n_samples_per_prompt"),
    _ROLLOUT + "dtype": Same("model.dtype", _dtype),
    _ROLLOUT + "gpu_memory_utilization": Left("there the device is shared with the trainer; ours takes 0.8 of its own"),
    _ROLLOUT + "enforce_eager": Same("vllm.enforce_eager"),
    _ROLLOUT + "tensor_model_parallel_size": Same("vllm.tensor_parallel_size"),
    _ROLLOUT + "max_num_batched_tokens": Together("vllm.engine_args", "max_num_batched_tokens"),
    _ROLLOUT + "max_model_len": Same("vllm.max_model_len"),
    _ROLLOUT + "max_num_seqs": Same("rollout.batch_size"),
    _ROLLOUT + "do_sample": Refused("without sampling a group has equal responses", (None, True)),
    _ROLLOUT + "multi_turn.enable": Refused("see rollout.function and rollout.tools"),
    _ROLLOUT + "val_kwargs.temperature": Together("evaluate.temperature", "with val_files"),
    _ROLLOUT + "val_kwargs.n": Together("evaluate.n_samples_per_prompt", "with val_files"),
    _ROLLOUT + "val_kwargs.top_p": Together("evaluate.top_p", "with val_files"),
    _ROLLOUT + "val_kwargs.top_k": Together("evaluate.top_k", "with val_files"),
    _ROLLOUT + "val_kwargs.do_sample": Left("evaluate.temperature decides: 0 is greedy"),
    "critic.optim.lr": Together("critic.lr", "with ppo"),
    "critic.optim.weight_decay": Together("critic.weight_decay", "with ppo"),
    "critic.model.path": Together("critic.path", "with ppo"),
    "critic.grad_clip": Together("critic.grad_clip", "with ppo"),
    "critic.cliprange_value": Together("algorithm.value_clip", "with ppo"),
    "critic.ppo_micro_batch_size_per_gpu": Together("critic.micro_batch_size", "with ppo"),
    "trainer.critic_warmup": Together("critic.num_critic_only_steps", "with ppo"),
    "reward_model.enable": Together("reward.model.path", "with reward_model.model.path"),
    "reward_model.model.path": Together("reward.model.path", "with reward_model.enable"),
    "reward_model.reward_manager": Refused(
        "dapo's penalty for length is algorithm.overlong_buffer_tokens", (None, "naive", "batch", "prime")
    ),
    "custom_reward_function.path": Together("reward.function", "module:function, code_directory"),
    "custom_reward_function.name": Together("reward.function", "module:function, code_directory"),
    "algorithm.adv_estimator": Together("algorithm.name", "gae: ppo; grpo, rloo, reinforce_plus_plus(_baseline)"),
    "algorithm.gamma": Together("algorithm.gamma", "with ppo; else only 1"),
    "algorithm.lam": Together("algorithm.lam", "with ppo"),
    "algorithm.norm_adv_by_std_in_grpo": Together("algorithm.scale_advantages_by_std", "with grpo"),
    "algorithm.use_kl_in_reward": Together("algorithm.kl_coef", "with ppo, rloo and reinforce_plus_plus"),
    "algorithm.kl_penalty": Together("algorithm.kl_coef", "kl alone"),
    "algorithm.kl_ctrl.kl_coef": Together("algorithm.kl_coef", "with use_kl_in_reward"),
    "algorithm.kl_ctrl.type": Refused("the coefficient is a constant", (None, "fixed")),
    "algorithm.filter_groups.enable": Together("algorithm.group_filter", "zero_variance"),
    "algorithm.use_pf_ppo": Refused("every drawn token counts the same"),
    "trainer.total_epochs": Together("steps", "prompts / train_batch_size x total_epochs"),
    "trainer.total_training_steps": Together("steps", "or total_epochs"),
    "trainer.experiment_name": Same("name", lambda value: str(value).replace("/", "-")),
    "trainer.logger": Together("loggers", "wandb, tensorboard, trackio, mlflow, swanlab; console is always on"),
    "trainer.nnodes": Together("roles", "half of all devices generate: see `asyncflow plan`"),
    "trainer.n_gpus_per_node": Together("roles", "half of all devices generate: see `asyncflow plan`"),
    "trainer.save_freq": Same("checkpoint.interval", _positive),
    "trainer.test_freq": Together("evaluate.interval", "with val_files"),
    "trainer.max_actor_ckpt_to_keep": Same("checkpoint.keep_last", lambda value: value or 2),
}  # fmt: skip
"""verl's keys, dotted. All others are left out with a line; see `_VERL_LEFT`."""

_TRL_LEFT: Mapping[str, str] = {
    "logging": _LOGS, "log_": _LOGS, "num_completions_to_print": _LOGS, "save_": _SAVES,
    "eval_": "see section evaluate", "vllm_": "the generating instances are processes of the run", "fsdp": _MEMORY,
    "deepspeed": _MEMORY, "ddp_": _OUR_OWN, "dataloader_": "prompts are made as they are needed",
    "push_to_hub": "use `hf upload` with hf/", "accelerate_config": _MEMORY,
    "hub_": "use `hf upload` with hf/", "pad_": _PADDING, "remove_unused_columns": "rewards may ask for any field",
    "lora_": "see section lora", "per_device_eval": "see section evaluate", "disable_dropout": "decided by the engine",
    "sapo_": "belongs to a loss_type that is refused", "vespo_": "belongs to a loss_type that is refused",
}  # fmt: skip
_VERL_LEFT: Mapping[str, str] = {
    "ray_kwargs": _RAY, "ray_init": _RAY, "trainer.ray_": _RAY, "trainer.use_legacy": _RAY,
    "global_profiler": "see `asyncflow profile` and `asyncflow timeline`", "trainer.": "see --run-dir and checkpoint",
    "actor_rollout_ref.ref.": "see section ref", "critic.": "see section critic", "reward_model.": "see section reward",
    "data.dataloader": "data is read once, and prompts are made as they are needed", _ACTOR + "checkpoint": _SAVES,
    _ACTOR + "fsdp_config": _MEMORY, _ACTOR + "megatron": "see actor.megatron",
    "actor_rollout_ref.model.use_remove_padding": _PADDING,
    "algorithm.pf_ppo": "belongs to use_pf_ppo, which is refused",
}  # fmt: skip

_TRL_DEFAULTS: Found = {
    "learning_rate": 1e-6, "lr_scheduler_type": "linear", "gradient_checkpointing": True, "num_generations": 8,
    "max_completion_length": 512, "per_device_train_batch_size": 8, "gradient_accumulation_steps": 1,
    "num_train_epochs": 3.0, "loss_type": "dapo", "delta": None,
}  # fmt: skip
"""Defaults of theirs that differ from ours, and those that the arithmetic of batches needs."""
_VERL_DEFAULTS: Found = {
    "data.train_batch_size": 1024, "data.max_prompt_length": 512, "data.max_response_length": 512,
    _ACTOR + "ppo_mini_batch_size": 256, _ACTOR + "optim.lr": 1e-6, _ACTOR + "optim.weight_decay": 0.01,
    _ROLLOUT + "n": 1, _ROLLOUT + "name": "vllm", _ROLLOUT + "dtype": "bfloat16", "algorithm.adv_estimator": "gae",
    "actor_rollout_ref.model.enable_gradient_checkpointing": True, "trainer.nnodes": 1, "trainer.n_gpus_per_node": 8,
    "data.prompt_key": "prompt", "trainer.total_epochs": 30, "algorithm.lam": 1.0, "critic.optim.weight_decay": 0.01,
    "critic.cliprange_value": 0.5,
}  # fmt: skip

_COMPUTED = (
    "steps_per_generation", "generation_batch_size", "max_steps", "warmup_steps", "warmup_ratio", "epsilon",
    "epsilon_high", "vllm_importance_sampling_clip_max", "vllm_importance_sampling_cap", "trainer.test_freq",
    "save_steps", "eval_steps", "num_train_epochs", "trainer.total_epochs", _ACTOR + "optim.lr_warmup_steps",
    _ACTOR + "optim.lr_warmup_steps_ratio",
)  # fmt: skip
"""Keys whose values are computed with."""
_FLAGS = (
    "bf16", "use_vllm", "mask_truncated_completions", "sync_ref_model", "use_peft", "use_rslora",
    "vllm_importance_sampling_correction", _ACTOR + "use_kl_loss", "algorithm.use_kl_in_reward",
    "algorithm.norm_adv_by_std_in_grpo", "algorithm.filter_groups.enable", "data.filter_overlong_prompts",
    _ACTOR + "use_dynamic_bsz", "reward_model.enable",
)  # fmt: skip
"""Keys that are true or false. Any text would count as true."""
_WANTED = "give a GRPOConfig of TRL or a verl configuration"
_WHOLE = frozenset({*TRL, *VERL})
"""Keys whose value may be a section of its own."""
_REFERENCE = re.compile(
    r"\$\{(?:(?P<name>[\w.]+)|oc\.select:\s*(?P<selected>[\w.]+)\s*(?:,(?P<default>[^${}\[\]'\":&*!|>%@`]*))?)\}"
)

_LOGGERS = ("wandb", "tensorboard", "trackio", "mlflow", "swanlab")
_VERL_ESTIMATORS = {
    "gae": ("ppo", {}), "grpo": ("grpo", {}), "rloo": ("rloo", {}), "reinforce_plus_plus": ("reinforce_plus_plus", {}),
    "reinforce_plus_plus_baseline": ("reinforce_plus_plus", {"baseline": "group"}),
}  # fmt: skip
_KL_ESTIMATORS = {"kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}


def import_config(source: Path, *, steps: int | None = None) -> str:
    """Return a configuration of ours, as YAML with comments.

    Args:
        source: YAML or JSON of TRL or verl; which one, its keys say.
        steps: number of our last step; None: from the file, if it says so.

    Raises:
        ConfigError: the file cannot be read, is of neither system, or asks for what a run here would not do.
    """
    if source.suffix == ".json":
        _check_json(source)  # YAML takes `{"a": }` for a null
    given = read_yaml(source, argument="SOURCE", instead=_WANTED).values
    found = {key: _number(value) for key, value in flatten(given, whole=_WHOLE).items()}
    if not found:
        raise ConfigError(f"{source}: has no settings; {_WANTED}")
    name = _system_of(found, source)
    for key, value in found.items():
        if value is not None and key not in _WHOLE and any(one.startswith(f"{key}.") for one in _WHOLE):
            raise ConfigError(f"{key}: {value!r} cannot be used; it is a section, {key}.NAME: VALUE")
    ours = _read_verl(found) if name == "verl" else _read_trl(found)
    if "model.path" not in ours.values:
        ours.to_fill.append("model.path")
    if steps is not None:
        ours.set_value("steps", steps, "--steps")
        ours.to_fill = [key for key in ours.to_fill if key != "steps"]
    ours.values.setdefault("schedule.mode", "async")
    ours.values.setdefault("schedule.max_staleness", 1)
    _check_values(ours)
    return _as_yaml(ours, source, name)


def _check_json(source: Path) -> None:
    try:
        json.loads(source.read_bytes())
    except json.JSONDecodeError as error:
        raise ConfigError(f"{source}:{error.lineno}: JSON syntax: {error.msg}; fix it") from error
    except (OSError, UnicodeDecodeError):
        pass  # `read_yaml` says what is wrong


def _system_of(found: Found, source: Path) -> str:
    """Return TRL or verl, whose keys the file has; some names, such as `data.shuffle`, are also ours."""
    known = frozenset(key_paths())
    counts = {
        "verl": sum(key in VERL or key.partition(".")[0] in ("actor_rollout_ref", "trainer") for key in found),
        "TRL": sum(key in TRL for key in found),
        "AsyncFlow": sum(key in known or key.startswith("roles.") for key in found),
    }
    name = max(counts, key=counts.__getitem__)
    if not counts[name]:
        near = next((f"; did you mean {meant!r}?" for key in found if (meant := _meant(key, {**TRL, **VERL}))), "")
        raise ConfigError(
            f"{source}: {', '.join(list(found)[:3])}: neither keys of TRL's GRPOConfig nor of verl's trainer{near}; "
            f"give one of these as YAML or JSON"
        )
    if name == "AsyncFlow":
        raise ConfigError(f"{source}: is an AsyncFlow configuration already; start it: asyncflow-launch {source}")
    return name


def _meant(key: str, rules: Mapping[str, Rule]) -> str | None:
    """Return the key that a misspelt one probably means: one or two letters differ, in its name or in its section."""
    section, _, name = key.rpartition(".")
    for known in rules:
        beside, _, other = known.rpartition(".")
        if beside == section and _num_edits(name, other) <= min(2, len(name) // 3):
            return known
        if other == name and section and _num_edits(section, beside) <= 2:
            return known
    return None


def _num_edits(one: str, other: str) -> int:
    codes = SequenceMatcher(None, one, other, autojunk=False).get_opcodes()
    return sum(max(end - start, to - at) for kind, start, end, at, to in codes if kind != "equal")


def _check_values(ours: Ours) -> None:
    """Check what is written, as a start would. What is missing, and rules between settings, are left to the dry-run."""
    try:
        RunConfig.model_validate(_tree(ours.values))
    except ValidationError as error:
        for detail in error.errors(include_url=False):
            keys = [str(key) for key in keys_of(detail)[1]]
            places = (".".join(keys[:depth]) for depth in range(len(keys), 0, -1))
            key = next((place for place in places if place in ours.origins), None)
            if key is not None and detail["type"] != "missing":
                raise ConfigError(
                    f"{ours.origins[key]}: {reprlib.repr(detail['input'])} cannot be used as {key}; "
                    f"{as_advice(detail['msg'])}"
                ) from error


def _tree(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values by dotted key as nested sections."""
    tree: dict[str, Any] = {}
    for key, value in values.items():
        *sections, last = key.split(".")
        place = tree
        for part in sections:
            place = place.setdefault(part, {})
        place.setdefault(last, value)
    return tree


def _number(value: Any) -> Any:
    # YAML 1.1 takes 1e-6 as text; TRL and verl take it as a number.
    if isinstance(value, str) and value[:1] in "0123456789.-+" and "e" in value.lower():
        try:
            return float(value)
        except ValueError:
            return value
    return value


def _convert(found: Found, rules: Mapping[str, Rule], reasons: Mapping[str, str], defaults: Found, system: str) -> Ours:
    """Convert all keys that stand for themselves, and their defaults. Raises ConfigError for those that are refused."""
    ours, refused = Ours(), []
    for key, value in found.items():
        rule = rules.get(key)
        if isinstance(rule, Same):
            if value is not None:
                try:
                    ours.set_value(rule.ours, rule.convert(value), key)
                except (TypeError, ValueError) as error:
                    raise _refuse(key, value, "give a number") from error
        elif isinstance(rule, Left):
            ours.leave_out(key, value, rule.why)
        elif isinstance(rule, Refused):
            if value not in rule.harmless:
                refused.append(f"{key}: {value!r} has no counterpart ({rule.why})")
        elif rule is None and (meant := _meant(key, rules)):
            raise ConfigError(f"{key}: unknown key; did you mean {meant!r}? correct it, or take it out")
        elif rule is None:
            why = next((text for start, text in reasons.items() if key.startswith(start)), _UNKNOWN)
            ours.leave_out(key, value, why)
    if refused:
        raise ConfigError(f"{'; '.join(refused)}; take it out, and set what is meant in the new file")
    for key, value in defaults.items():
        rule = rules[key]
        if isinstance(rule, Same) and rule.ours not in ours.values:
            ours.set_value(rule.ours, value, f"{key}, {system}'s default")
    return ours


def _refuse(key: str, value: Any, advice: str) -> ConfigError:
    return ConfigError(f"{key}: {value!r} has no counterpart; {advice}")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _check_kinds(found: Found) -> None:
    """Check the values that are computed with or decided by here; others are checked when the new file is loaded."""
    for key in _COMPUTED:
        value = found.get(key)
        if value is not None and not _is_number(value):
            raise ConfigError(f"{key}: {value!r} cannot be used; give a number")
    for key in _FLAGS:
        if found.get(key) not in (None, True, False):
            raise ConfigError(f"{key}: {found[key]!r} cannot be used; give true or false")


def _tell_unused(ours: Ours, found: Found, rules: Mapping[str, Rule]) -> None:
    """Tell of keys that go with others which the file lacks, unless they ask for nothing."""
    for key, value in found.items():
        rule = rules.get(key)
        if not isinstance(rule, Together) or not value or value in ("no", "none", ["none"]):
            continue
        if not any(f"{one}.".startswith(f"{rule.ours}.") for one in (*ours.values, *ours.to_fill)):
            ours.leave_out(key, value, f"sets no {rule.ours} here ({rule.how})")


def _texts(key: str, value: Any) -> list[str]:
    """Return a text or a list of them as a list."""
    texts = [value] if isinstance(value, str) else value or []
    if not isinstance(texts, list) or not all(isinstance(one, str) for one in texts):
        raise ConfigError(f"{key}: {value!r} cannot be used; give a text, or a list of texts")
    return texts


def _whole(key: str, value: Any, least: int = 1) -> int:
    if not _is_number(value) or value != int(value) or value < least:
        raise ConfigError(f"{key}: {value!r} cannot be used; give a whole number from {least}")
    return int(value)


def _epochs(key: str, get: Callable[..., Any]) -> float:
    epochs: float = get(key)
    if epochs <= 0:
        raise ConfigError(f"{key}: {epochs!r} cannot be used; give a number above zero")
    return epochs


def _read_trl(found: Found) -> Ours:
    _check_kinds(found)
    ours = _convert(found, TRL, _TRL_LEFT, _TRL_DEFAULTS, "TRL")
    get = (_TRL_DEFAULTS | {key: value for key, value in found.items() if value is not None}).get
    per_step = _trl_batches(ours, get)
    _trl_loss(ours, get, per_step)
    _trl_schedule_of_lr(ours, get, per_step)
    if get("bf16", True):
        ours.set_value("actor.autocast", "bfloat16", "bf16")
    _trl_rewards(ours, get)
    _trl_adapter(ours, get)
    ours.set_value("rollout.engine", "vllm" if get("use_vllm") else "hf", "use_vllm")
    ours.set_value("data.chat_template", True, "conversational prompts; false for prompts that are plain text")
    if "data.path" not in ours.values:
        ours.to_fill.append("data.path")
    evaluates = _strategy("eval_strategy", get("eval_strategy", "no"))
    saves = _strategy("save_strategy", get("save_strategy", "steps"))
    if evaluates != "no":
        ours.set_value("evaluate.path", ours.values.get("data.path"), f"dataset_name; {_EVALUATOR}")
        ours.set_value("evaluate.split", get("dataset_test_split", "test"), "dataset_test_split")
        _set_interval(ours, "evaluate.interval", evaluates, "eval", get("eval_steps", 10), per_step)
        if get("num_generations_eval"):
            ours.set_value("evaluate.n_samples_per_prompt", get("num_generations_eval"), "num_generations_eval")
    if saves == "no":
        ours.set_value("checkpoint.interval", 0, "save_strategy")
    elif saves == "epoch" or get("save_steps") is not None:
        _set_interval(ours, "checkpoint.interval", saves, "save", get("save_steps", 0), per_step)
    _set_loggers(ours, get("report_to"), "report_to")
    _set_roles(ours, 2, "the smallest")
    _tell_unused(ours, found, TRL)
    return ours


def _strategy(key: str, value: Any) -> str:
    """Return when TRL saves or evaluates: no, steps or epoch."""
    known = {"no": "no", False: "no", "steps": "steps", "epoch": "epoch"}  # YAML takes a bare `no` as false
    if not isinstance(value, str | bool) or value not in known:
        raise _refuse(key, value, "no, steps or epoch")
    return known[value]


def _set_interval(ours: Ours, key: str, strategy: str, prefix: str, updates: float, per_step: int) -> None:
    """Set an interval in steps of ours. `updates`: TRL's of it; below 1: their share of all."""
    if strategy == "epoch":
        ours.to_fill.append(key)
        ours.origins[key] = f"{prefix}_strategy epoch: prompts / schedule.rollout_batch_size"
    elif updates >= 1:
        ours.set_value(
            key, _in_steps(_whole(f"{prefix}_steps", updates), per_step), _origin(f"{prefix}_steps", per_step)
        )
    elif updates > 0:
        _set_share(ours, key, updates, f"{prefix}_steps")
    else:
        raise ConfigError(f"{prefix}_steps: {updates!r} cannot be used; give a number of updates, or a share below 1")


def _set_share(ours: Ours, key: str, share: float, origin: str) -> None:
    """Set a share of the steps, of which the file may not say how many there are."""
    if "steps" in ours.values:
        ours.set_value(key, math.ceil(share * ours.values["steps"]), f"{origin} {share} of the steps")
    else:
        ours.to_fill.append(key)
        ours.origins[key] = f"{origin} {share} x steps"


def _in_steps(updates: float, per_step: int) -> int:
    """Return a number of updates, which TRL counts, as one of our steps."""
    return math.ceil(updates / per_step)


def _origin(key: str, per_step: int) -> str:
    return key if per_step == 1 else f"{key} / {per_step} updates a step"


def _trl_batches(ours: Ours, get: Callable[..., Any]) -> int:
    """Set the sizes of a step; returns how many updates it has."""
    processes = _whole("num_processes", get("num_processes") or 1)  # most files do not say how many there are
    per_device = _whole("per_device_train_batch_size", get("per_device_train_batch_size"))
    accumulated = _whole("gradient_accumulation_steps", get("gradient_accumulation_steps"))
    group = _whole("num_generations", get("num_generations"))
    update = per_device * accumulated * processes
    per_generation = get("steps_per_generation") or accumulated
    completions = get("generation_batch_size") or per_device * per_generation * processes
    if completions % group or completions % update:
        raise ConfigError(
            f"num_generations: {group} does not divide the {completions} completions of a generation step, or an "
            f"update's {update} do not; correct per_device_train_batch_size, gradient_accumulation_steps "
            f"or num_generations, or add num_processes: N if you train with several"
        )
    updates = completions // update
    how = f"{completions} completions of {processes} processes / num_generations"
    if not get("num_processes"):
        how = f"{completions} completions of one process / num_generations: multiply by your number of processes"
    ours.set_value("schedule.rollout_batch_size", completions // group, how)
    if updates > 1:
        ours.set_value("actor.num_mini_batches", updates, "steps_per_generation / gradient_accumulation_steps")
    # Ours cuts whole groups; the result does not depend on it.
    ours.set_value("actor.micro_batch_size", max(per_device, group), "per_device_train_batch_size, whole groups")
    per_step = updates * _whole("num_iterations", get("num_iterations") or 1)
    if _positive(get("max_steps")) > 0:
        ours.set_value("steps", _in_steps(get("max_steps"), per_step), f"max_steps / {per_step} updates a step")
    else:
        ours.to_fill.append("steps")
        unset = "" if get("max_steps") is None else f"max_steps {get('max_steps')} sets none; "
        epochs = f"num_train_epochs {_epochs('num_train_epochs', get)} x prompts / schedule.rollout_batch_size"
        ours.origins["steps"] = unset + epochs
    return per_step


def _trl_loss(ours: Ours, get: Callable[..., Any], per_step: int) -> None:
    kind, level = str(get("loss_type")), str(get("importance_sampling_level") or "token")
    normalization = {"grpo": "sequence", "dapo": "token", "bnpo": "token", "dr_grpo": "constant", "cispo": "token"}
    if kind not in normalization:
        raise _refuse("loss_type", kind, f"one of {' '.join(normalization)}, or a loss of your own: docs/algorithms.md")
    if level == "sequence":
        ours.set_value("algorithm.name", "gspo", "importance_sampling_level")
        ours.set_value("algorithm.eps_clip", get("epsilon", 0.2), "epsilon")
        # Ours by default is the paper's, far narrower; theirs is epsilon.
        if get("epsilon_high") is None:
            ours.set_value("algorithm.eps_clip_high", get("epsilon", 0.2), "epsilon, since epsilon_high is unset")
    else:
        ours.set_value("algorithm.name", "cispo" if kind == "cispo" else "grpo", "loss_type")
    ours.set_value("algorithm.loss_normalization", normalization[kind], f"loss_type {kind}")
    if ours.values["algorithm.name"] == "cispo":
        # TRL bounds the weight above, by epsilon_high; our upper bound is 1 + eps_clip_high.
        high = get("epsilon_high") or get("epsilon", 0.2)
        ours.set_value("algorithm.eps_clip_high", high - 1, "epsilon_high - 1: the weight is at most epsilon_high")
        ours.set_value("algorithm.eps_clip", 1.0, "no lower bound, as there")
        if high <= 1:
            raise _refuse(
                "epsilon_high", high, "cispo bounds the weight by it, so it must exceed 1; 5.0 is recommended"
            )
        ours.values.pop("algorithm.dual_clip", None)
    else:
        ours.set_value("algorithm.dual_clip", get("delta"), "delta")
    scale = get("scale_rewards", "group")
    scale = ("group" if scale else "none") if isinstance(scale, bool) else scale
    if scale not in ("group", "none"):
        raise _refuse("scale_rewards", scale, "group or none")
    ours.set_value("algorithm.scale_advantages_by_std", scale == "group", "scale_rewards")
    ours.set_value("algorithm.advantage_eps", 1e-4, "TRL's")
    if get("sync_ref_model"):
        if get("ref_model_mixup_alpha", 0.6) != 1:
            raise _refuse(
                "ref_model_mixup_alpha", get("ref_model_mixup_alpha", 0.6), "1: the reference becomes the policy"
            )
        interval = _in_steps(_whole("ref_model_sync_steps", get("ref_model_sync_steps", 512)), per_step)
        ours.set_value("algorithm.ref_update_interval", interval, _origin("ref_model_sync_steps", per_step))
    if get("vllm_importance_sampling_correction") is False:
        ours.set_value("algorithm.off_policy.method", "none", "vllm_importance_sampling_correction")
        return
    mode, most = get("vllm_importance_sampling_mode"), get("vllm_importance_sampling_clip_max")
    most = get("vllm_importance_sampling_cap") if most is None else most
    if mode is None and most is None:
        return  # Ours by default; the new file's first lines say so.
    mode, most = mode or "sequence_mask", 3.0 if most is None else most
    if most <= 0:
        raise _refuse("vllm_importance_sampling_clip_max", most, "a bound above zero")
    if mode == "sequence_mask":
        ours.set_value("algorithm.off_policy.mask", "sequence", "vllm_importance_sampling_mode")
        ours.set_value("algorithm.off_policy.sequence_log_ratio", round(math.log(most), 4), "log clip_max, both ways")
    elif mode in ("token_truncate", "token_mask"):
        method = "truncated_is" if mode == "token_truncate" else "decoupled"
        ours.set_value("algorithm.off_policy.method", method, "vllm_importance_sampling_mode")
        ours.set_value("algorithm.off_policy.cap", most, "vllm_importance_sampling_clip_max")
    else:
        raise _refuse("vllm_importance_sampling_mode", mode, "token_truncate, token_mask or sequence_mask")


def _trl_schedule_of_lr(ours: Ours, get: Callable[..., Any], per_step: int) -> None:
    kind = str(get("lr_scheduler_type"))
    known = {"constant": "constant", "constant_with_warmup": "constant", "linear": "linear", "cosine": "cosine"}
    if kind not in known:
        raise _refuse("lr_scheduler_type", kind, "one of " + " ".join(known))
    ours.set_value("actor.lr_schedule", known[kind], "lr_scheduler_type")
    updates, share, share_of = get("warmup_steps") or 0, get("warmup_ratio") or 0, "warmup_ratio"
    if 0 < updates < 1:
        updates, share, share_of = 0, updates, "warmup_steps"
    _set_warmup(ours, updates, share, (_origin("warmup_steps", per_step), share_of), per_step)
    if get("adam_beta1") is not None or get("adam_beta2") is not None:
        ours.set_value("actor.betas", [get("adam_beta1", 0.9), get("adam_beta2", 0.999)], "adam_beta1, adam_beta2")


def _set_warmup(ours: Ours, updates: float, share: float, origins: tuple[str, str], per_step: int = 1) -> None:
    """Set it from a number of updates, else from a share of all; `origins`: what each of them is of."""
    for value, most, origin in ((updates, math.inf, origins[0]), (share, 1, origins[1])):
        if not 0 <= value <= most:
            what = "a number from 0" if most > 1 else "a share of the steps, from 0 to 1"
            raise ConfigError(f"{origin}: {value!r} cannot be used; give {what}")
    if updates:
        ours.set_value("actor.lr_warmup_steps", _in_steps(updates, per_step), origins[0])
    elif share:
        _set_share(ours, "actor.lr_warmup_steps", share, origins[1])


def _trl_adapter(ours: Ours, get: Callable[..., Any]) -> None:
    if not get("use_peft"):
        return
    ours.set_value("lora.rank", _whole("lora_r", get("lora_r", 16)), "lora_r")
    ours.set_value("lora.alpha", get("lora_alpha", 32), "lora_alpha")
    ours.set_value("lora.dropout", get("lora_dropout", 0.05), "lora_dropout; above 0 no ratio is exactly 1")
    # What peft takes for Llama, Mistral and Qwen.
    given = get("lora_target_modules") or ["q_proj", "v_proj"]
    ours.set_value("lora.targets", _targets("lora_target_modules", given), "lora_target_modules")
    if get("use_rslora"):
        ours.set_value("lora.use_rslora", True, "use_rslora")
    if whole := _texts("lora_modules_to_save", get("lora_modules_to_save")):
        ours.set_value("lora.modules_to_save", whole, "lora_modules_to_save")
        ours.set_value("weightsync.lora", "merged", "lora_modules_to_save: no engine takes them with an adapter")


def _targets(key: str, given: Any) -> Any:
    """Return `lora.targets`: `all-linear`, which may also stand alone in a list, or names."""
    names = _texts(key, given)
    return "all-linear" if names == ["all-linear"] else names


def _trl_rewards(ours: Ours, get: Callable[..., Any]) -> None:
    named = _texts("reward_funcs", get("reward_funcs"))
    if len(named) > 1:
        raise _refuse("reward_funcs", named, "one function of your own that adds them up, as reward.function")
    if named == ["accuracy_reward"]:
        ours.set_value("reward.function", "math_verify", "reward_funcs")
        ours.set_value("data.ground_truth_field", "solution", "accuracy_reward reads it")
    elif named and "." in str(named[0]):
        module, _, function = str(named[0]).rpartition(".")
        ours.set_value("reward.function", f"{module}:{function}", "reward_funcs; TRL's signature is served")
        ours.set_value("data.ground_truth_field", None, "your function reads the fields that it names")
    elif named:
        raise _refuse("reward_funcs", named[0], "accuracy_reward, or module.function of your own")
    elif "reward.model.path" in ours.values:
        ours.set_value("data.ground_truth_field", None, "the model alone decides")
    else:
        ours.to_fill.append("reward.function")


def _read_verl(found: Found) -> Ours:
    found = {key: value for key, value in found.items() if not key.endswith("_target_") and value != "???"}
    values = {key: _resolved(key, found) for key in found}
    found = {key: value for key, value in values.items() if value is not _ELSEWHERE}
    _check_kinds(found)
    given = {key: value for key, value in found.items() if value not in (None, {}, [])}
    ours = _convert(given, VERL, _VERL_LEFT, _VERL_DEFAULTS, "verl")
    get = (_VERL_DEFAULTS | found).get
    _verl_algorithm(ours, get)
    _verl_data(ours, get)
    _verl_training(ours, get)
    name = str(get(_ROLLOUT + "name"))
    if name not in ("vllm", "hf"):
        raise _refuse(
            _ROLLOUT + "name", name, "vllm or hf; servers of your own: rollout.engine openai (docs/engines.md)"
        )
    ours.set_value("rollout.engine", name, _ROLLOUT + "name")
    if name == "hf":
        for key in [key for key in ours.values if key.startswith("vllm.")]:
            del ours.values[key]
    elif get(_ROLLOUT + "max_num_batched_tokens"):
        tokens = {"max_num_batched_tokens": get(_ROLLOUT + "max_num_batched_tokens")}
        ours.set_value("vllm.engine_args", tokens, _ROLLOUT + "max_num_batched_tokens")
    _set_loggers(ours, get("trainer.logger"), "trainer.logger")
    devices = _whole("trainer.nnodes", get("trainer.nnodes")) * _whole(
        "trainer.n_gpus_per_node", get("trainer.n_gpus_per_node")
    )
    shared = "one device, which all roles share" if devices == 1 else f"{devices} devices, which share all roles"
    _set_roles(ours, devices, f"{shared} in verl")
    _tell_unused(ours, given, VERL)
    return ours


_ELSEWHERE = object()


def _resolved(key: str, found: Found) -> Any:
    """Return the value of a key, as OmegaConf interpolates it; `_ELSEWHERE`: this file has no value, and none matters.

    Raises:
        ConfigError: the key is one of the table, and its value is not in the file.
    """
    value, at = found[key], key
    for _ in range(len(found)):  # a chain of references, which may be a circle
        if "${" not in str(value):
            return value
        refers = _REFERENCE.fullmatch(value) if isinstance(value, str) else None
        if refers is None:
            break
        name, default = refers["name"] or refers["selected"], refers["default"]
        if name.startswith("."):  # beside the key, or above it
            rest = name.lstrip(".")
            name = ".".join([*at.split(".")[: len(rest) - len(name)], rest])
        if name in found:
            value = found[name]
        elif default is not None:
            value = _number(yaml.safe_load(default))
        elif name in _VERL_DEFAULTS:
            value = _VERL_DEFAULTS[name]
        else:
            break
        at = name
    matters = [rule for name, rule in VERL.items() if name == key or name.startswith(f"{key}.")]
    if any(not isinstance(rule, Left) for rule in matters):
        raise ConfigError(f"{key}: {found[key]!r} takes its value from elsewhere than this file; write the value there")
    return _ELSEWHERE


def _verl_algorithm(ours: Ours, get: Callable[..., Any]) -> None:
    estimator = str(get("algorithm.adv_estimator"))
    if estimator not in _VERL_ESTIMATORS:
        raise _refuse("algorithm.adv_estimator", estimator, f"one of {' '.join(_VERL_ESTIMATORS)}")
    name, options = _VERL_ESTIMATORS[estimator]
    mode = str(get(_ACTOR + "policy_loss.loss_mode") or "vanilla")
    if mode == "gspo" and name == "grpo":
        name = "gspo"
    elif mode != "vanilla":
        raise _refuse(_ACTOR + "policy_loss.loss_mode", mode, "vanilla, or gspo with adv_estimator grpo")
    # verl's default of each bound is 0.2, and clip_ratio_low and _high win over clip_ratio.
    for key, theirs in (("eps_clip", "clip_ratio_low"), ("eps_clip_high", "clip_ratio_high")):
        given = next((_ACTOR + each for each in (theirs, "clip_ratio") if get(_ACTOR + each) is not None), None)
        if given is not None:
            ours.set_value(f"algorithm.{key}", get(given), given)
        elif name == "gspo":  # ours by default are far narrower
            ours.set_value(f"algorithm.{key}", 0.2, "verl's default")
    ours.set_value("algorithm.name", name, "algorithm.adv_estimator, policy_loss.loss_mode")
    for key, value in options.items():
        ours.set_value(f"algorithm.{key}", value, "algorithm.adv_estimator")
    aggregation = str(get(_ACTOR + "loss_agg_mode") or "token-mean")
    known = {"token-mean": "token", "seq-mean-token-mean": "sequence", "seq-mean-token-sum-norm": "constant"}
    if aggregation not in known:
        raise _refuse(_ACTOR + "loss_agg_mode", aggregation, "one of " + " ".join(known))
    ours.set_value("algorithm.loss_normalization", known[aggregation], _ACTOR + "loss_agg_mode")
    if name in ("grpo", "gspo"):
        scaled = get("algorithm.norm_adv_by_std_in_grpo")
        ours.set_value("algorithm.scale_advantages_by_std", scaled is not False, "algorithm.norm_adv_by_std_in_grpo")
    if get("algorithm.filter_groups.enable"):
        ours.set_value("algorithm.group_filter", "zero_variance", "algorithm.filter_groups.enable")
    in_loss, in_reward = bool(get(_ACTOR + "use_kl_loss")), bool(get("algorithm.use_kl_in_reward"))
    baseline = options.get("baseline")
    if in_reward and (name not in ("ppo", "rloo", "reinforce_plus_plus") or baseline):
        raise _refuse(
            "algorithm.use_kl_in_reward", True, f"{estimator}: the penalty is a term of the loss (use_kl_loss)"
        )
    if in_loss and in_reward:
        raise _refuse("algorithm.use_kl_in_reward", True, "one KL penalty, here or use_kl_loss")
    if in_reward:
        if str(get("algorithm.kl_penalty") or "kl") not in ("kl", "k1"):
            raise _refuse("algorithm.kl_penalty", get("algorithm.kl_penalty"), "kl")
        ours.set_value("algorithm.kl_coef", get("algorithm.kl_ctrl.kl_coef", 0.001), "algorithm.kl_ctrl.kl_coef")
        if name == "ppo":
            ours.set_value("algorithm.kl_placement", "reward", "algorithm.use_kl_in_reward")
    elif in_loss:
        if name in ("rloo", "reinforce_plus_plus") and not baseline:
            raise _refuse(_ACTOR + "use_kl_loss", True, f"{name} has its penalty in the reward (use_kl_in_reward)")
        kind = str(get(_ACTOR + "kl_loss_type") or "low_var_kl").removesuffix("+")
        if kind not in _KL_ESTIMATORS:
            raise _refuse(_ACTOR + "kl_loss_type", kind, "one of " + " ".join(_KL_ESTIMATORS))
        ours.set_value("algorithm.kl_coef", get(_ACTOR + "kl_loss_coef", 0.001), _ACTOR + "kl_loss_coef")
        ours.set_value("algorithm.kl_estimator", _KL_ESTIMATORS[kind], _ACTOR + "kl_loss_type")
    else:
        ours.set_value("algorithm.kl_coef", 0.0, "neither use_kl_loss nor use_kl_in_reward")
    if name == "ppo":
        for theirs, key, otherwise in (
            ("algorithm.gamma", "algorithm.gamma", 1.0), ("algorithm.lam", "algorithm.lam", 1.0),
            ("critic.cliprange_value", "algorithm.value_clip", 0.5), ("critic.optim.lr", "critic.lr", 1e-5),
            ("critic.optim.weight_decay", "critic.weight_decay", 0.01), ("critic.grad_clip", "critic.grad_clip", 1.0),
            ("critic.model.path", "critic.path", None), ("trainer.critic_warmup", "critic.num_critic_only_steps", 0),
            ("critic.ppo_micro_batch_size_per_gpu", "critic.micro_batch_size", 16),
        ):  # fmt: skip
            value = get(theirs)
            ours.set_value(key, otherwise if value is None else value, theirs)
    elif get("algorithm.gamma", 1.0) not in (1, 1.0, None):
        raise _refuse("algorithm.gamma", get("algorithm.gamma"), f"{estimator} has one reward a response: 1")


def _verl_data(ours: Ours, get: Callable[..., Any]) -> None:
    files = _texts("data.train_files", get("data.train_files"))
    if len(files) == 1:
        ours.set_value("data.path", str(expand_home(files[0], "data.train_files")), "data.train_files")
    elif files:
        paths = [str(expand_home(one, "data.train_files")) for one in files]
        ours.set_value(
            "data.mixture", [{"path": path} for path in paths], "data.train_files, in equal shares; see weight"
        )
    else:
        ours.to_fill.append("data.path")
    ours.set_value("data.chat_template", True, "verl's prompts are lists of messages")
    ours.set_value("data.ground_truth_field", "reward_model.ground_truth", "verl's rows")
    reject = not get("data.filter_overlong_prompts") and str(get("data.truncation") or "error") == "error"
    ours.set_value("data.overlong", "reject" if reject else "skip", "data.filter_overlong_prompts, data.truncation")
    held_out = _texts("data.val_files", get("data.val_files"))
    interval = get("trainer.test_freq")
    if held_out and interval and interval > 0:
        ours.set_value(
            "evaluate.path", str(expand_home(held_out[0], "data.val_files")), f"data.val_files; {_EVALUATOR}"
        )
        ours.set_value("evaluate.interval", _whole("trainer.test_freq", interval), "trainer.test_freq")
        for one in held_out[1:]:
            ours.leave_out("data.val_files", one, "one file is evaluated")
        for theirs, key in (("temperature", "temperature"), ("n", "n_samples_per_prompt"), ("top_p", "top_p")):
            if get(f"{_ROLLOUT}val_kwargs.{theirs}") is not None:
                ours.set_value(f"evaluate.{key}", get(f"{_ROLLOUT}val_kwargs.{theirs}"), f"val_kwargs.{theirs}")
        if (most := get(f"{_ROLLOUT}val_kwargs.top_k")) is not None:
            ours.set_value("evaluate.top_k", _positive(most), "val_kwargs.top_k")
    path, function = get("custom_reward_function.path"), get("custom_reward_function.name") or "compute_score"
    if path:
        if not isinstance(path, str):
            raise ConfigError(f"custom_reward_function.path: {path!r} cannot be used; give the path of a Python file")
        place = expand_home(path, "custom_reward_function.path")
        ours.set_value(
            "reward.function", f"{place.stem}:{function}", "custom_reward_function; verl's signature is served"
        )
        ours.set_value("code_directory", str(place.parent), "custom_reward_function.path")
    if get("reward_model.enable"):
        if not get("reward_model.model.path"):
            raise ConfigError("reward_model.model.path: missing with reward_model.enable; set it")
        ours.set_value("reward.model.path", get("reward_model.model.path"), "reward_model.model.path")
    elif not path:
        ours.to_fill.append("reward.function")


def _verl_training(ours: Ours, get: Callable[..., Any]) -> None:
    prompts = _whole("data.train_batch_size", get("data.train_batch_size"))
    mini = _whole(_ACTOR + "ppo_mini_batch_size", get(_ACTOR + "ppo_mini_batch_size"))
    if prompts % mini:
        raise ConfigError(
            f"{_ACTOR}ppo_mini_batch_size: {mini} does not divide data.train_batch_size {prompts}; updates of unequal "
            f"size have no counterpart, so change one of them"
        )
    ours.set_value(
        "actor.num_mini_batches", prompts // mini, f"train_batch_size {prompts} / ppo_mini_batch_size {mini}"
    )
    if get(_ACTOR + "use_dynamic_bsz"):
        tokens = get(_ACTOR + "ppo_max_token_len_per_gpu") or 16384
        ours.set_value("actor.max_tokens_per_micro_batch", tokens, _ACTOR + "ppo_max_token_len_per_gpu")
    strategy = str(get(_ACTOR + "strategy") or "fsdp")
    if strategy not in ("fsdp", "fsdp2", "megatron"):
        raise _refuse(_ACTOR + "strategy", strategy, "fsdp, fsdp2 or megatron")
    ours.set_value("actor.engine", "megatron" if strategy == "megatron" else "fsdp", _ACTOR + "strategy")
    ours.set_value("actor.autocast", "bfloat16", "verl computes in it")
    model = "actor_rollout_ref.model."
    if rank := get(model + "lora_rank"):
        ours.set_value("lora.rank", _whole(model + "lora_rank", rank), model + "lora_rank")
        ours.set_value("lora.alpha", get(model + "lora_alpha") or 16, model + "lora_alpha")
        targets = _targets(model + "target_modules", get(model + "target_modules") or "all-linear")
        ours.set_value("lora.targets", targets, model + "target_modules")
        if get(model + "lora_adapter_path"):
            ours.set_value("lora.path", get(model + "lora_adapter_path"), model + "lora_adapter_path")
    if strategy == "megatron":
        for part in ("tensor_model", "pipeline_model", "context"):
            value = get(f"{_ACTOR}megatron.{part}_parallel_size")
            if value:
                name = f"actor.megatron.{part.removesuffix('_model')}_parallel"
                ours.set_value(name, value, f"{_ACTOR}megatron.{part}_parallel_size")
    kind = str(get(_ACTOR + "optim.lr_scheduler_type") or get(_ACTOR + "optim.warmup_style") or "constant")
    if kind not in ("constant", "cosine"):
        raise _refuse(_ACTOR + "optim.lr_scheduler_type", kind, "constant or cosine")
    ours.set_value("actor.lr_schedule", kind, _ACTOR + "optim.lr_scheduler_type")
    total = get("trainer.total_training_steps")
    if total:
        ours.set_value("steps", _whole("trainer.total_training_steps", total), "trainer.total_training_steps")
    else:
        ours.to_fill.append("steps")
        ours.origins["steps"] = f"total_epochs {_epochs('trainer.total_epochs', get)} x prompts / {prompts}"
    updates = _positive(get(_ACTOR + "optim.lr_warmup_steps"))  # -1: the share
    share = get(_ACTOR + "optim.lr_warmup_steps_ratio") or 0
    _set_warmup(ours, updates, share, ("optim.lr_warmup_steps", "optim.lr_warmup_steps_ratio"))


def _set_loggers(ours: Ours, named: Any, key: str) -> None:
    named = _texts(key, named)
    known = [{"name": name} for name in named if name in _LOGGERS]
    for name in named:
        if name not in _LOGGERS and name not in ("console", "none", "all"):
            ours.leave_out(key, name, f"there is no such logger; one of {' '.join(_LOGGERS)}")
    if known:
        ours.set_value("loggers", known, key)


def _set_roles(ours: Ours, devices: int, origin: str) -> None:
    tensor = _whole("tensor_parallel_size", ours.values.get("vllm.tensor_parallel_size", 1))
    roles = {"rollout": max(1, devices // 2 // tensor), "actor": max(1, devices // 2)}
    if ours.values.get("algorithm.name") == "ppo":
        roles["critic"] = roles["actor"] = max(1, devices // 4)
    ours.set_value("roles", roles, f"{origin}; `asyncflow plan` finds a better split")


_ORDER = ("name", "seed", "steps", "roles", "code_directory", "model", "data", "reward", "algorithm", "schedule",
          "rollout", "vllm", "actor", "lora", "critic", "ref", "weightsync", "evaluate", "checkpoint",
          "loggers")  # fmt: skip


def _as_yaml(ours: Ours, source: Path, system: str) -> str:
    lines = [
        f"# Made of {source.name}, a configuration of {system}, by `asyncflow import-config`.",
        "# Different by nature: training goes on while rollouts are generated, with weights at most",
        "# schedule.max_staleness steps old; `mode: sync` takes turns. Truncated importance sampling corrects for the",
        "# rest (algorithm.off_policy).",
    ]
    if ours.to_fill:
        lines.append(f"# TO FILL IN: {', '.join(ours.to_fill)}")
    tree = _tree({key: ours.values.get(key, _FILL) for key in [*ours.values, *ours.to_fill]})
    lines += _section(dict(sorted(tree.items(), key=lambda item: _ORDER.index(item[0]))), ours.origins, "")
    if ours.left:
        lines += ["", "# Without a counterpart:"]
        lines += [f"#   {what}: {why}" for what, why in ours.left]
    return "\n".join(lines) + "\n"


_FILL = object()


def _section(tree: Mapping[str, Any], origins: Mapping[str, str], prefix: str) -> list[str]:
    lines: list[str] = []
    indent = "  " * prefix.count(".")
    leading = ("name", "path", "function", "engine", "mode") if prefix else ()
    for key in sorted(tree, key=lambda one: leading.index(one) if one in leading else len(leading)):
        value = tree[key]
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and name not in origins:
            lines += [*([""] if not prefix else []), f"{indent}{key}:"]
            lines += _section(value, origins, f"{name}.")
            continue
        origin = f"  # {origins[name]}" if name in origins else ""
        if value is _FILL:
            lines.append(f"{indent}# {key}:{origin.replace('  # ', '  ') if origin else ' your own'}")
        else:
            text = yaml.safe_dump(value, default_flow_style=True, width=10_000).removesuffix("\n...\n").strip()
            lines.append(f"{indent}{key}: {text}{origin}")
    return lines


def tables_as_markdown() -> str:
    """Return docs/importing.md's tables."""
    lines: list[str] = []
    for system, rules in (("TRL", TRL), ("verl", VERL)):
        lines += [f"### {system}", "", f"| {system} | ours | how |", "|---|---|---|"]
        for key, rule in rules.items():
            if isinstance(rule, Same | Together):
                how = rule.note if isinstance(rule, Same) else rule.how
                lines.append(f"| `{key}` | `{rule.ours}` | {how} |")
            elif isinstance(rule, Refused):
                lines.append(f"| `{key}` | refused | {rule.why} |")
            else:
                lines.append(f"| `{key}` | left out | {rule.why} |")
        lines.append("")
    return "\n".join(lines)
