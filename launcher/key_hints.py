"""Which key was meant by one that does not exist: the field's other words for ours, then what is spelt alike. Pure."""

import difflib
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

_OTHER_WORDS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "actor.lr": ("learning_rate",),
        "actor.lr_warmup_steps": ("warmup_steps", "num_warmup_steps"),
        "actor.lr_schedule": ("lr_scheduler", "lr_scheduler_type"),
        "actor.grad_clip": ("max_grad_norm", "clip_grad", "gradient_clipping"),
        "actor.micro_batch_size": (
            "micro_batch_size_per_gpu", "ppo_micro_batch_size", "ppo_micro_batch_size_per_gpu",
            "micro_train_batch_size", "per_device_train_batch_size",
        ),
        "actor.max_tokens_per_micro_batch": ("ppo_max_token_len_per_gpu", "max_tokens_per_gpu"),
        "actor.ppo_epochs": ("num_ppo_epochs", "update_epochs", "num_iterations"),
        "actor.num_updates_per_step": ("num_mini_batches", "num_minibatches"),
        "algorithm.kl_coef": ("beta", "kl_beta", "kl_loss_coef", "init_kl_coef"),
        "algorithm.eps_clip": ("epsilon", "cliprange", "clip_range", "clip_ratio", "clip_ratio_low", "clip_eps"),
        "algorithm.eps_clip_high": ("epsilon_high", "clip_ratio_high", "clip_eps_high"),
        "algorithm.lam": ("lambda", "lambd", "gae_lambda"),
        "algorithm.gamma": ("discount", "discount_factor"),
        "schedule.n_samples_per_prompt": ("n", "group_size", "num_generations", "num_samples", "num_return_sequences"),
        "schedule.rollout_batch_size": ("train_batch_size", "global_batch_size"),
        "schedule.max_staleness": ("staleness", "staleness_threshold", "max_off_policyness"),
        "rollout.max_response_tokens": (
            "max_new_tokens", "max_tokens", "max_completion_length", "max_response_length", "response_length",
            "generate_max_len",
        ),
        "data.max_prompt_tokens": ("max_prompt_length", "prompt_max_len"),
        "data.prompt_field": ("prompt_key", "input_key"),
        "data.answer_field": ("answer_key", "label_key", "ground_truth_key"),
        "data.path": ("train_files", "prompt_data", "dataset", "dataset_name", "file"),
        "model.path": ("model_name_or_path", "model_name", "pretrain"),
        "model.dtype": ("torch_dtype", "precision"),
        "checkpoint.interval": ("save_interval", "save_steps", "save_freq"),
        "evaluate.interval": ("eval_interval", "eval_steps", "test_freq"),
        "vllm.tensor_parallel_size": ("tensor_model_parallel_size",),
        "steps": ("max_steps", "num_steps", "total_steps", "total_training_steps"),
    }
)  # fmt: skip
"""Our key -> what TRL, verl, OpenRLHF and their like call it."""


def meant_key(key: str, here: Sequence[str], everywhere: Iterable[str]) -> str | None:
    """Return the key that was probably meant, or None.

    Args:
        key: that does not exist.
        here: the keys of its section.
        everywhere: all keys of the configuration, dotted.
    """
    ours = [name for name, words in _OTHER_WORDS.items() if key.lower() in words]
    beside = [name for name in here if any(name == _last(other) for other in ours)]
    same = [name for name in everywhere if _last(name) == key]
    near = difflib.get_close_matches(key, here, n=1)
    return next(iter([*beside, *same, *near, *ours]), None)


def _last(name: str) -> str:
    return name.rpartition(".")[2]
