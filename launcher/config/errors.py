"""Say in one line what is wrong with a configuration: dotted field, value, where it was given, what to do."""

import difflib
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, get_args, get_origin

from pydantic import BaseModel, ValidationError

from asyncflow.settings import as_advice, description
from launcher.config.reference import key_paths
from launcher.config.yaml_file import YamlFile
from workers.settings.algorithm_names import ALGORITHMS, NAMES
from workers.settings.algorithms import PolicyConfig
from workers.settings.run import RunConfig

_ADVICE = {
    "int_type": "give a whole number",
    "int_parsing": "give a whole number",
    "int_from_float": "give a whole number",
    "float_type": "give a number",
    "float_parsing": "give a number",
    "bool_type": "give true or false",
    "bool_parsing": "give true or false",
    "string_type": "give text, in quotes",
    "dict_type": "give a section of `key: value` lines",
    "model_type": "give a section of `key: value` lines",
    "tuple_type": "give a list, [a, b]",
    "none_required": "leave it empty",
    "string_pattern_mismatch": "use lower-case letters, digits and _",
}

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
        "actor.num_mini_batches": ("num_updates_per_step", "num_minibatches"),
        "algorithm.kl_coef": ("beta", "kl_beta", "kl_loss_coef", "init_kl_coef"),
        "algorithm.eps_clip": ("epsilon", "cliprange", "clip_range", "clip_ratio", "clip_ratio_low", "clip_eps"),
        "algorithm.eps_clip_high": ("epsilon_high", "clip_ratio_high", "clip_eps_high"),
        "algorithm.group_filter": ("dynamic_sampling", "filter_groups", "dynamic_sampling_filter_path"),
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
        "data.ground_truth_field": ("answer_field", "answer_key", "label_key", "ground_truth_key"),
        "data.path": ("train_files", "prompt_data", "dataset", "dataset_name", "file"),
        "model.path": ("model_name_or_path", "model_name", "pretrain"),
        "model.dtype": ("torch_dtype", "precision"),
        "checkpoint.interval": ("save_interval", "save_steps", "save_freq"),
        "evaluate.interval": ("eval_interval", "eval_steps", "test_freq"),
        "vllm.tensor_parallel_size": ("tensor_model_parallel_size",),
        "steps": ("max_steps", "num_steps", "total_steps", "total_training_steps"),
    }
)  # fmt: skip
"""Our key -> its names in TRL, verl, OpenRLHF and the like."""

_OTHER_NUMBERS: Mapping[str, str] = MappingProxyType(
    {
        "ppo_mini_batch_size": "set actor.num_mini_batches to schedule.rollout_batch_size / ppo_mini_batch_size",
        "mini_batch_size": "set actor.num_mini_batches to schedule.rollout_batch_size / mini_batch_size",
        "gradient_accumulation_steps": "leave it out: a step is as many micro-batches as its samples make "
        "(actor.micro_batch_size)",
        "num_train_epochs": "set steps to prompts / schedule.rollout_batch_size x num_train_epochs",
        "total_epochs": "set steps to prompts / schedule.rollout_batch_size x total_epochs",
    }
)
"""Their settings that ours say by another number: what to do."""

_ALGORITHM = "algorithm"
"""The section whose settings depend on its `name`."""


@dataclass(frozen=True)
class Origins:
    """Where values came from: an option of the command line, or a line of the file."""

    file: YamlFile
    options: Mapping[str, str] = field(default_factory=dict)

    def of(self, keys: Sequence[str | int]) -> str:
        """Return ` (file:line)` or ` (from --set ...)`, or nothing when unknown."""
        for depth in range(len(keys), 0, -1):
            option = self.options.get(".".join(str(key) for key in keys[:depth]))
            if option is not None:
                return f" (from {option})"
        line = self.file.line_of(keys)
        if line is not None:
            return f" ({self.file.path}:{line})"
        inside = ".".join(str(key) for key in keys) + "."
        option = next((option for name, option in self.options.items() if name.startswith(inside)), None)
        return f" (from {option})" if option is not None else ""


def explain(error: ValidationError, origins: Origins) -> str:
    """Return one line for the most telling problem, and how many others there are."""
    details = sorted(error.errors(include_url=False), key=lambda detail: _rank(detail["type"]))
    if details[0]["type"] == "missing":  # then all are
        return _explain_missing([_keys_of(detail)[1] for detail in details], origins)
    line = _explain_one(details[0], origins)
    others = len(details) - 1
    return f"{line} (and {others} more)" if others else line


def _rank(kind: str) -> int:
    """A misspelt key also makes the right one missing, so it comes first."""
    return {"extra_forbidden": 0, "invalid_key": 0, "missing": 2}.get(kind, 1)


def _keys_of(detail: Mapping[str, Any]) -> tuple[str, tuple[str | int, ...]]:
    """Return the name of the algorithm where a problem is in its settings, and the keys that lead to it."""
    keys: tuple[str | int, ...] = tuple(key for key in detail["loc"] if key != "[key]")
    if keys[0] == _ALGORITHM and len(keys) > 1:  # pydantic names the member of the union, too
        return str(keys[1]), (keys[0], *keys[2:])
    return "", keys


def _explain_missing(missing: Sequence[tuple[str | int, ...]], origins: Origins) -> str:
    """Name all missing keys at once, so that the user edits the file once."""
    names = [".".join(str(key) for key in keys) for keys in missing]
    what = [_description(keys) for keys in missing]
    if len(names) == 1:
        return f"{names[0]}: missing in {origins.file.path}; set it{f' ({what[0]})' if what[0] else ''}"
    said = [f"{name} ({text})" if text else name for name, text in zip(names, what, strict=True)]
    return f"{', '.join(names)}: missing in {origins.file.path}; set {', '.join(said)}"


def _explain_one(detail: Mapping[str, Any], origins: Origins) -> str:
    algorithm, keys = _keys_of(detail)
    name = ".".join(str(key) for key in keys)
    kind, value = detail["type"], detail["input"]
    if kind in ("union_tag_invalid", "union_tag_not_found"):
        return _unknown_algorithm(value, origins)
    if kind in ("extra_forbidden", "invalid_key"):
        hint = _algorithm_hint(algorithm, str(keys[-1])) if algorithm and len(keys) == 2 else _key_hint(keys)
        return f"{name}: unknown key{origins.of(keys)}; {hint}"
    advice = _ADVICE.get(kind) or as_advice(detail["msg"])
    near = _nearest_choice(value, detail)
    return f"{name}: {reprlib.repr(value)} cannot be used{origins.of(keys)}; {advice}{near}"


def _nearest_choice(value: object, detail: Mapping[str, Any]) -> str:
    if detail["type"] not in ("literal_error", "enum") or not isinstance(value, str):
        return ""
    choices = detail["ctx"]["expected"].replace(" or ", ", ").replace("'", "").split(", ")
    near = difflib.get_close_matches(value, choices, n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def _key_hint(keys: Sequence[str | int]) -> str:
    section = _section(keys[:-1])
    last = str(keys[-1])
    if last in _OTHER_NUMBERS:
        return _OTHER_NUMBERS[last]
    names = list(section.model_fields) if section else []
    meant = _meant_key(last, names, key_paths())
    if meant is not None:
        return f"did you mean {meant!r}?"
    return f"known here: {' '.join(names)}" if names else "remove it"


def _meant_key(key: str, here: Sequence[str], everywhere: Iterable[str]) -> str | None:
    """Return the key that was probably meant, or None.

    Args:
        key: that does not exist.
        here: the keys of its section.
        everywhere: all keys of the configuration, dotted.
    """
    ours = [name for name, words in _OTHER_WORDS.items() if key.lower() in words]
    beside = [name for name in here if any(name == _leaf(other) for other in ours)]
    same = [name for name in everywhere if _leaf(name) == key]
    near = difflib.get_close_matches(key, here, n=1)
    return next(iter([*beside, *same, *ours, *near]), None)  # what another system calls it is no guess


def _leaf(name: str) -> str:
    return name.rpartition(".")[2]


def _unknown_algorithm(section: Any, origins: Origins) -> str:
    if not isinstance(section, Mapping):
        where = origins.of((_ALGORITHM,))
        return (
            f"algorithm: {reprlib.repr(section)} cannot be used{where}; give a section of `key: value` lines, whose "
            f"name is one of {' '.join(ALGORITHMS)} or module:Class"
        )
    given, where = section["name"], origins.of((_ALGORITHM, "name"))
    return f"algorithm.name: {given!r} cannot be used{where}; {NAMES.refusal(str(given))}"


def _algorithm_hint(algorithm: str, key: str) -> str:
    """Return which algorithms have a setting that this one lacks."""
    owners = [name for name, settings in ALGORITHMS.items() if key in settings.model_fields]
    if owners:
        return f"it is a setting of {' '.join(owners)}, and algorithm.name is {algorithm}; remove one of them"
    if key in _OTHER_NUMBERS:
        return _OTHER_NUMBERS[key]
    names = list(ALGORITHMS[algorithm].model_fields)
    meant = _meant_key(key, names, key_paths())
    if meant is not None:
        return f"did you mean {meant!r}?"
    return f"{algorithm} has {' '.join(names)}"


def _section(keys: Sequence[str | int]) -> type[BaseModel] | None:
    """Return the model that `keys` lead to, or None when they lead elsewhere."""
    model: type[BaseModel] = RunConfig
    for key in keys:
        if isinstance(key, int):
            continue  # an item of a list, whose type `_submodel` gave already
        inner = _submodel(model, str(key))
        if inner is None:
            return None
        model = inner
    return model


def _submodel(model: type[BaseModel], name: str) -> type[BaseModel] | None:
    info = model.model_fields.get(name)
    kind = info.annotation if info is not None else None
    if name == _ALGORITHM and model is RunConfig:
        return PolicyConfig
    if get_origin(kind) is tuple:
        kind = get_args(kind)[0]
    return kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None


def _description(keys: Sequence[str | int]) -> str:
    section = _section(keys[:-1])
    if section is None or str(keys[-1]) not in section.model_fields:
        return ""
    return description(section, str(keys[-1])).split(". ")[0].rstrip(".")
