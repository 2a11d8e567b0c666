"""Turns a YAML file and the command line, including `--roles`, into one checked, resolved `RunConfig`. Torch-free.

Values are applied in this order: file, `--set`, `--steps`, `--roles`. Then every value is checked, and the paths of
models, data and user modules become absolute. Every problem is one `ConfigError` of one line. Nothing is written except
downloads from the Hub (`launcher.config.hub`).
"""

import copy
import difflib
import math
import os
import re
import reprlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import Any, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError

from asyncflow.errors import ConfigError
from asyncflow.run_files import CONFIG_FILE
from asyncflow.settings import as_advice, description
from launcher.config.hub import is_hub_name, located_data, located_model, snapshot_of
from launcher.config.key_reference import key_paths
from launcher.config.paths import packaged_recipes, user_path
from launcher.config.rules import AT_LOADING, check_rules
from workers.roles.own_classes import resolve
from workers.settings.algorithms import ALGORITHMS, NAMES, PolicyConfig
from workers.settings.data import DataConfig, HubPart
from workers.settings.dataflow import ALIASES, OBSERVERS, ROLES, TRAINERS
from workers.settings.engines import TeacherConfig
from workers.settings.run import COLOCATED, COLOCATED_WITH_EVALUATION, EvaluateConfig, RunConfig

# Reading YAML: the top level must be a mapping, and duplicate keys are refused. PyYAML's nodes know every key's line.


@dataclass(frozen=True)
class YamlFile:
    """A parsed file. `root` is the node tree, which knows line numbers; None: the settings come from no file."""

    path: Path
    values: dict[Any, Any]
    root: yaml.Node | None

    def line_of(self, keys: Sequence[str | int]) -> int | None:
        """Return the line (from 1) of the value under `keys`, or None if the file does not set it."""
        node = self.root
        line = None
        for key in keys:
            if node is None:
                return None
            found = _child(node, key)
            if found is None:
                return None
            line, node = found
        return line


def read_yaml(
    path: Path, *, argument: str = "CONFIG", instead: str = "start from a recipe such as configs/quickstart.yaml"
) -> YamlFile:
    """Parse `path`; raises ConfigError if it is unreadable, not YAML, empty, not a mapping, or has a duplicate key.

    `argument`: who named the file; `instead`: what to do about an empty one.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{argument}: cannot read {path}: {error.strerror}; give a readable YAML file") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{argument}: {path} is not UTF-8 text ({error.reason}); give a YAML file") from error
    loader = None
    try:
        loader = yaml.SafeLoader(text)
        root = loader.get_single_node()
        if root is not None:
            _refuse_duplicates(root, path)
        values = None if root is None else loader.construct_document(root)
    except yaml.MarkedYAMLError as error:
        raise ConfigError(f"{_where(path, error.problem_mark)}: YAML syntax: {_problem(error)}; fix it") from error
    except RecursionError as error:
        raise ConfigError(f"{path}: nested too deeply for a configuration; write it flat") from error
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"{path}: YAML syntax: {' '.join(str(error).split())}; fix it") from error
    finally:
        if loader is not None:
            loader.dispose()
    if root is None:
        raise ConfigError(f"{argument}: {path} is empty; {instead}")
    if not isinstance(values, dict):
        kind = type(values).__name__
        raise ConfigError(f"{path}:{root.start_mark.line + 1}: the top is a {kind}; it must be a mapping, `key: value`")
    return YamlFile(path, values, root)


def flatten(section: Mapping[Any, Any], *, whole: Collection[str] = (), prefix: str = "") -> dict[str, Any]:
    """Return the values of nested sections by dotted key; empty sections, and those named in `whole`, are values."""
    flat: dict[str, Any] = {}
    for key, value in section.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and value and name not in whole:
            flat |= flatten(value, whole=whole, prefix=f"{name}.")
        else:
            flat[name] = value
    return flat


def parse_value(text: str, option: str) -> Any:
    """Parse one command-line value as YAML; `option` names it in errors."""
    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, ValueError) as error:
        problem = _problem(error) if isinstance(error, yaml.MarkedYAMLError) else str(error)
        raise ConfigError(f"{option}: the value {text!r} is not YAML ({problem}); quote it") from error


def _child(node: yaml.Node, key: str | int) -> tuple[int, yaml.Node] | None:
    if isinstance(node, yaml.MappingNode):
        for key_node, value_node in node.value:
            if key_node.value == str(key):
                return key_node.start_mark.line + 1, value_node
    if isinstance(node, yaml.SequenceNode) and isinstance(key, int) and key < len(node.value):
        return node.value[key].start_mark.line + 1, node.value[key]
    return None


def _refuse_duplicates(root: yaml.Node, path: Path) -> None:
    # YAML aliases can form cycles, so each node is visited once; a loop instead of recursion, since files may nest
    # deeply.
    pending, visited = [root], {id(root)}
    while pending:
        node = pending.pop()
        children = list(node.value) if isinstance(node, yaml.SequenceNode) else []
        if isinstance(node, yaml.MappingNode):
            _refuse_duplicate_keys(node, path)
            children = [value for _, value in node.value]
        fresh = [child for child in children if id(child) not in visited]
        visited.update(id(child) for child in fresh)
        pending.extend(fresh)


def _refuse_duplicate_keys(node: yaml.MappingNode, path: Path) -> None:
    first_lines: dict[str, int] = {}
    for key, _ in node.value:
        if not isinstance(key, yaml.ScalarNode):
            continue
        line = key.start_mark.line + 1
        if key.value in first_lines:
            raise ConfigError(
                f"{path}:{line}: {key.value}: given twice (first in line {first_lines[key.value]}); keep one"
            )
        first_lines[key.value] = line


def _where(path: Path, mark: yaml.Mark | None) -> str:
    return f"{path}:{mark.line + 1}" if mark is not None else str(path)


def _problem(error: yaml.MarkedYAMLError) -> str:
    parts = [part for part in (error.context, error.problem) if part]
    return " ".join(", ".join(parts).split()) or "cannot be parsed"


# Error messages: one line with the dotted field, its value, where it was given, and what to do.

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
"""Our key -> its names in TRL, verl, OpenRLHF and similar systems."""

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
"""Settings of those systems that we express through a different quantity -> what to do."""

_ALGORITHM = "algorithm"
"""The section whose settings depend on its `name`."""


_MOST_KEYS = 6  # of a section in a message


@dataclass(frozen=True)
class Origins:
    """Where each value came from: a command-line option, or a line of the file."""

    file: YamlFile
    options: Mapping[str, str] = field(default_factory=dict)

    def format_origin(self, keys: Sequence[str | int]) -> str:
        """Return ` (file:line)` or ` (from --set ...)`, or "" if unknown."""
        for depth in range(len(keys), 0, -1):
            option = self.options.get(".".join(str(key) for key in keys[:depth]))
            if option is not None:
                return f" (from {option})"
        line = self.file.line_of(keys)
        inside = ".".join(str(key) for key in keys) + "."
        option = next((option for name, option in self.options.items() if name.startswith(inside)), None)
        if line is None:
            return f" (from {option})" if option is not None else ""
        return f" ({self.file.path}:{line}{f', and {option}' if option is not None else ''})"


def explain(error: ValidationError, origins: Origins) -> str:
    """Return one line for the most telling problem, plus the number of other problems."""
    details = sorted(error.errors(include_url=False), key=lambda detail: _rank(detail["type"]))
    if details[0]["type"] == "missing":  # ranked last, so every problem is a missing key
        return _explain_missing([keys_of(detail)[1] for detail in details], origins)
    line = _explain_one(details[0], origins)
    others = len(details) - 1
    return f"{line} (and {others} more)" if others else line


def _rank(kind: str) -> int:
    # A misspelled key also makes the intended one missing, so unknown keys rank first.
    return {"extra_forbidden": 0, "invalid_key": 0, "missing": 2}.get(kind, 1)


def keys_of(detail: Mapping[str, Any]) -> tuple[str, tuple[str | int, ...]]:
    """Return the algorithm's name if the problem is in its settings (else ""), and the keys that lead to it."""
    keys: tuple[str | int, ...] = tuple(key for key in detail["loc"] if key != "[key]")
    if keys[0] == _ALGORITHM and len(keys) > 1:  # pydantic inserts the union member's name
        return str(keys[1]), (keys[0], *keys[2:])
    return "", keys


def _explain_missing(missing: Sequence[tuple[str | int, ...]], origins: Origins) -> str:
    # All missing keys at once, so the user edits the file only once.
    names = [".".join(str(key) for key in keys) for keys in missing]
    what = [_description(keys) for keys in missing]
    if len(names) == 1:
        return f"{names[0]}: missing in {origins.file.path}; set it{f' ({what[0]})' if what[0] else ''}"
    said = [f"{name} ({text})" if text else name for name, text in zip(names, what, strict=True)]
    return f"{', '.join(names)}: missing in {origins.file.path}; set {', '.join(said)}"


def _explain_one(detail: Mapping[str, Any], origins: Origins) -> str:
    algorithm, keys = keys_of(detail)
    name = ".".join(str(key) for key in keys)
    kind, value = detail["type"], detail["input"]
    if kind in ("union_tag_invalid", "union_tag_not_found"):
        return _unknown_algorithm(value, origins)
    if kind in ("extra_forbidden", "invalid_key"):
        hint = _algorithm_hint(algorithm, str(keys[-1])) if algorithm and len(keys) == 2 else _key_hint(keys)
        return f"{name}: unknown key{origins.format_origin(keys)}; {hint}"
    advice = _ADVICE.get(kind) or as_advice(detail["msg"])
    near = _nearest_choice(value, detail)
    what = reprlib.repr(value)
    if isinstance(value, Mapping):  # its keys are enough to find it
        inside = [*islice(map(str, value), _MOST_KEYS), *(["..."] if len(value) > _MOST_KEYS else [])]
        what = f"{{{', '.join(inside)}}}"
    return f"{name}: {what} cannot be used{origins.format_origin(keys)}; {advice}{near}"


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
    """Return the key that the user probably meant, or None: `key` is unknown, `here` are the keys of its section."""
    ours = [name for name, words in _OTHER_WORDS.items() if key.lower() in words]
    beside = [name for name in here if any(name == _leaf(other) for other in ours)]
    same = [name for name in everywhere if _leaf(name) == key]
    near = difflib.get_close_matches(key, here, n=1)
    # Another system's name for a key is certain; a similar spelling is a guess, so it comes last.
    return next(iter([*beside, *same, *ours, *near]), None)


def _leaf(name: str) -> str:
    return name.rpartition(".")[2]


def _unknown_algorithm(section: Any, origins: Origins) -> str:
    if not isinstance(section, Mapping):
        where = origins.format_origin((_ALGORITHM,))
        return (
            f"algorithm: {reprlib.repr(section)} cannot be used{where}; give a section of `key: value` lines, whose "
            f"name is one of {' '.join(ALGORITHMS)} or module:Class"
        )
    given, where = section["name"], origins.format_origin((_ALGORITHM, "name"))
    return f"algorithm.name: {given!r} cannot be used{where}; {NAMES.explain_unknown(str(given))}"


def _algorithm_hint(algorithm: str, key: str) -> str:
    owners = [name for name, settings in ALGORITHMS.items() if key in settings.model_fields]
    if owners:
        return f"it is a setting of {' '.join(owners)}, and algorithm.name is {algorithm}; remove one of them"
    if key in _OTHER_NUMBERS:
        return _OTHER_NUMBERS[key]
    names = [name for name in ALGORITHMS[algorithm].model_fields if name not in ALGORITHMS[algorithm].refused]
    meant = _meant_key(key, names, key_paths())
    if meant is not None:
        return f"did you mean {meant!r}?"
    return f"{algorithm} has {' '.join(names)}"


def _section(keys: Sequence[str | int]) -> type[BaseModel] | None:
    """Return the model that `keys` lead to, or None if they lead nowhere."""
    kind: Any = RunConfig
    for key in keys:
        kind = _kind_under(kind, str(key))
    return kind if _is_model(kind) else None


def _kind_under(kind: Any, key: str) -> Any:
    """Return the type of what a value of type `kind` holds under `key`, without its null; None: no such key."""
    if get_origin(kind) in (tuple, dict):
        return get_args(kind)[-1 if get_origin(kind) is dict else 0]
    if kind is RunConfig and key == _ALGORITHM:
        return PolicyConfig
    info = kind.model_fields.get(key) if _is_model(kind) else None
    inner = None if info is None else info.annotation
    return next(filter(_is_model, get_args(inner)), inner) if type(None) in get_args(inner) else inner


def _is_model(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseModel)


def _description(keys: Sequence[str | int]) -> str:
    section = _section(keys[:-1])
    if section is None or str(keys[-1]) not in section.model_fields:
        return ""
    return description(section, str(keys[-1])).split(". ")[0].rstrip(".")


_PATHS = ("model", "critic", "ref", "teacher", "data", "evaluate")
"""Sections whose `path` names a file or directory."""
_EXAMPLE = "rollout:8,actor:4,ref:2"
_WHOLE_NUMBER = re.compile(r"-?[0-9]{1,9}")


def load_config(
    source: Path,
    *,
    overrides: Sequence[str] = (),
    roles: str | None = None,
    steps: int | None = None,
    called: str | None = None,
    evaluates: bool = False,
) -> RunConfig:
    """Read, override, check and resolve a configuration: canonical role names, absolute paths.

    Held-out prompts may be missing and are not fetched if nothing evaluates.

    Args:
        overrides: `a.b=value`, each value parsed as YAML; later ones win.
        roles: `rollout:8,actor:4`; replaces the file's `roles` entirely.
        steps: number of the last step.
        called: what errors call the settings if `source` is not a user's file.
        evaluates: nothing is trained, so that the model and the held-out prompts alone are used.

    Raises:
        ConfigError: one line with field, value and what to do.
    """
    file = read_yaml(source)
    if called is not None:
        file = replace(file, path=Path(called), root=None)
    # A copy: the file's own values are compared with below.
    values: dict[Any, Any] = copy.deepcopy(file.values)
    options = dict(_apply_override(values, text) for text in overrides)
    of_run = source.name == CONFIG_FILE and called is None
    if of_run:
        # Only a run's own file holds all defaults.
        _forget_other_algorithm(values, file.values, options)
    if steps is not None:
        values["steps"] = steps
        options["steps"] = "--steps"
    if roles is not None:
        values["roles"] = parse_roles(roles, _users_roles(values))
        options["roles"] = "--roles"
    if "roles" in options and "colocated" not in options:  # a run's own file says it in two settings
        values["colocated"] = ()
    if isinstance(values.get("roles"), dict):
        values["roles"], joint = split_roles(values["roles"])
        values |= {"colocated": joint} if joint else {}
    _default_staleness(values, options)
    origins = Origins(file, options)
    config = _validate(values, origins, beside=Path.cwd() if "code_directory" in options else source.parent)
    users = [task.own_role for task in config.tasks]
    generates = not config.algorithm.is_supervised
    resolved: dict[str, Any] = {"roles": check_roles(config.roles, users, generates=generates)}
    used = {"model", "evaluate"} if evaluates else {*_PATHS} - {"evaluate"} | {*resolved["roles"]}
    for name in _PATHS:
        resolved[name] = _located(getattr(config, name), name, source, options, used=name in used)
    data: DataConfig = resolved["data"]
    parts = (
        _located(one, f"data.mixture.{k}", source, options, used="data" in used) for k, one in enumerate(data.mixture)
    )
    resolved["data"] = data.model_copy(update={"mixture": tuple(parts)})
    held_out: EvaluateConfig = resolved["evaluate"]
    sets = {
        name: _located(one, f"evaluate.sets.{name}", source, options, used="evaluate" in used)
        for name, one in held_out.sets.items()
    }
    resolved["evaluate"] = held_out.model_copy(update={"sets": sets})
    teacher: TeacherConfig = resolved["teacher"]
    taught = {
        name: _located(one, f"teacher.sources.{name}", source, options, used="teacher" in used)
        for name, one in teacher.sources.items()
    }
    resolved["teacher"] = teacher.model_copy(update={"sources": taught})
    model = config.reward.model
    if model is not None:
        located = _located(model, "reward.model", source, options, used=not evaluates)
        resolved["reward"] = config.reward.model_copy(update={"model": located})
    if config.lora is not None and config.lora.path is not None and not evaluates:
        path = _absolute(config.lora.path, "lora.path", source, given={"lora", "lora.path"} & options.keys() != set())
        if path is None:
            raise ConfigError(f"lora.path: {config.lora.path!r} does not exist; name the directory of an adapter")
        resolved["lora"] = config.lora.model_copy(update={"path": str(path)})
    try:
        # Last: a child imports users' own classes, which it finds through the resolved code directory.
        config = resolve(config.model_copy(update=resolved))
    except ConfigError as error:
        if not of_run:
            raise
        raise ConfigError(
            f"{error} ({source} holds the settings that the run began with; if the class has changed since, correct "
            f"it there as well)"
        ) from error
    # Again: only now are the settings of users' own classes resolved.
    _refuse_surprises(values, config.model_dump(mode="python"), origins, ())
    return config


def with_template_time(config: RunConfig, told: str | None = None) -> RunConfig:
    """Return the configuration with the time that chat templates see in all processes: its own, else `told`, else
    now."""
    time = config.data.template_time or told or datetime.now().isoformat(timespec="seconds")
    return config.model_copy(update={"data": config.data.model_copy(update={"template_time": time})})


def parse_roles(text: str, users: Collection[str] = ()) -> dict[str, int]:
    """Parse the value of `--roles`, with `rollout+actor` as one name; `users` are the roles of user-defined tasks.
    Raises as `check_roles` does."""
    roles: dict[str, int] = {}
    for part in text.split(","):
        if not part.strip():
            raise ConfigError(f"--roles: {text!r} has an empty entry (a comma too many?); give e.g. --roles {_EXAMPLE}")
        name, colon, count = (piece.strip() for piece in part.partition(":"))
        parts = [each.strip() for each in name.split("+")]
        if not colon or not all(parts):
            raise ConfigError(f"--roles: {part.strip()!r} is not role:ranks; give e.g. --roles {_EXAMPLE}")
        parts = [_canonical_role(each, users) for each in parts]
        role = "+".join(sorted(parts, key=[*ROLES, *users].index))
        if role in roles:
            raise ConfigError(f"--roles: {role!r} is given twice; give it once, with all its ranks")
        if not _WHOLE_NUMBER.fullmatch(count):
            raise ConfigError(f"--roles: {name}:{count} is not a whole number of ranks; give e.g. {name}:2")
        roles[role] = int(count)
    check_roles(split_roles(roles)[0], users, generates="rollout" in split_roles(roles)[0])
    order = [*ROLES, *users]
    return dict(sorted(roles.items(), key=lambda each: order.index(each[0].partition("+")[0])))


def split_roles(roles: Mapping[Any, Any]) -> tuple[dict[Any, Any], tuple[str, ...]]:
    """Return ranks per role, `rollout+actor: 8` written out, and the roles that share devices. Raises ConfigError if
    these are others than can, or a role is given twice."""
    split: dict[Any, Any] = {}
    joint: tuple[str, ...] = ()
    for name, count in roles.items():
        parts = [part.strip() for part in str(name).split("+")]
        if len(parts) == 1:
            parts = [name]
        else:
            able = (one for one in (COLOCATED, COLOCATED_WITH_EVALUATION) if sorted(one) == sorted(parts))
            joint = next(able, ())
            if not joint:
                raise ConfigError(
                    f"roles: {name!r} cannot share devices, only {'+'.join(COLOCATED)} can, and "
                    f"{'+'.join(COLOCATED_WITH_EVALUATION)}; give each of them devices of its own "
                    f"({', '.join(f'{part}:{count}' for part in parts)})"
                )
        for part in parts:
            if part in split:
                raise ConfigError(f"roles: {part!r} is given twice; give it once, with all its ranks")
            split[part] = count
    return split, joint


def check_roles(roles: Mapping[str, int], users: Collection[str] = (), *, generates: bool = True) -> dict[str, int]:
    """Return `roles` with canonical names, in the order of `ROLES`, then of `users` (roles of user-defined tasks).

    `generates`: the algorithm needs the role `rollout`.

    Raises:
        ConfigError: an unknown role (with the nearest name), too few ranks (0 leaves a role to processes outside, which
            trainers and evaluators do not allow), a missing required role, or one role under two names.
    """
    counts: dict[str, int] = {}
    for name, count in roles.items():
        role = _canonical_role(name, users)
        if role in counts:
            raise ConfigError(f"roles: {role!r} is given twice (as {name!r} too); give it once")
        # True counts as 1: trainers and evaluators need a rank, other roles may have none.
        if count < (role in {*TRAINERS, *OBSERVERS}):
            raise ConfigError(
                f"roles: {name}:{count} must have at least 1 rank; give {name}:1 or more, or leave it out"
            )
        counts[role] = count
    for role in ("rollout", "actor") if generates else ("actor",):
        if role not in counts:
            raise ConfigError(f"roles: {role!r} is missing; add {role}:1 or more, e.g. --roles {_EXAMPLE}")
    return {role: counts[role] for role in dict.fromkeys((*ROLES, *users)) if role in counts}


def _apply_override(values: dict[Any, Any], text: str) -> tuple[str, str]:
    """Set one `a.b=value` in `values`; return (`a.b`, the option as the user typed it)."""
    option = f"--set {text}"
    name, equals, value = text.partition("=")
    name = name.strip()
    keys = name.split(".")
    if not equals or not all(keys):
        raise ConfigError(f"{option}: give key=value with a dotted key, e.g. --set actor.lr=1e-5")
    section = values
    for depth, key in enumerate(keys[:-1]):
        inner = section.setdefault(key, {})
        # An empty section in YAML is null.
        if inner is None:
            inner = section[key] = {}
        if not isinstance(inner, dict):
            parent = ".".join(keys[: depth + 1])
            raise ConfigError(f"{option}: {parent} is not a section (it is {inner!r}); set {parent} itself")
        section = inner
    section[keys[-1]] = parse_value(value, option)
    return name, option


def _forget_other_algorithm(values: dict[Any, Any], written: Mapping[Any, Any], options: Mapping[str, str]) -> None:
    """If an option switches the algorithm of a run's own file, drop the former algorithm's defaults from that file."""
    before, now = written.get("algorithm"), values.get("algorithm")
    if (
        "algorithm" in options
        or not isinstance(before, Mapping)
        or not isinstance(now, dict)
        or before.get("name") == now.get("name")
    ):
        return
    former = ALGORITHMS.get(str(before.get("name")))
    if former is None:
        return
    # A run's file holds every setting, so values equal to the defaults were not chosen by the user. Options stay.
    defaults = former().model_dump(mode="json")
    given = {"name", *(option.split(".")[1] for option in options if option.startswith("algorithm."))}
    for key, value in before.items():
        if key not in given and now.get(key) == value == defaults.get(key):
            del now[key]


def _users_roles(values: Mapping[Any, Any]) -> list[str]:
    """Return the roles of user-defined tasks from values that are not validated yet."""
    tasks = values.get("tasks")
    named = [task for task in tasks if isinstance(task, dict)] if isinstance(tasks, list) else []
    return [str(task.get("role") or task.get("name")) for task in named]


def _canonical_role(name: str, users: Collection[str]) -> str:
    role, known = ALIASES.get(name, name), (*ROLES, *users)
    if role not in known:
        near = difflib.get_close_matches(name, (*known, *ALIASES), n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known roles: {' '.join(known)}"
        raise ConfigError(f"roles: {name!r} is not a role; {hint}")
    return role


def _default_staleness(values: dict[Any, Any], options: Mapping[str, str]) -> None:
    schedule = values.get("schedule")
    if not isinstance(schedule, dict) or schedule.get("mode") not in ("sync", "periodic"):
        return
    # sync and periodic bound the staleness to 0: record that unless the user also asked for another number.
    only_mode_given = "schedule.mode" in options and "schedule.max_staleness" not in options
    if only_mode_given or "max_staleness" not in schedule:
        schedule["max_staleness"] = 0


def _validate(values: Mapping[Any, Any], origins: Origins, *, beside: Path) -> RunConfig:
    try:
        config = RunConfig.model_validate(values)
    except ValidationError as error:
        raise ConfigError(explain(error, origins)) from error
    places = (config.code_directory or ".").split(os.pathsep)
    found = [str(user_path(place, "code_directory", beside=beside)) for place in places]
    config = config.model_copy(update={"code_directory": os.pathsep.join(found)})
    _refuse_surprises(values, config.model_dump(mode="python"), origins, ())
    check_rules(config, AT_LOADING)
    return config


def _refuse_surprises(given: Any, resolved: Any, origins: Origins, keys: tuple[str | int, ...]) -> None:
    """Refuse what pydantic accepts but is surely a mistake: booleans as numbers, infinite numbers."""
    if isinstance(given, Mapping) and isinstance(resolved, Mapping):
        for key, value in given.items():
            _refuse_surprises(value, resolved.get(key), origins, (*keys, key))
    elif isinstance(given, (list, tuple)) and isinstance(resolved, (list, tuple)):
        for index, (value, kept) in enumerate(zip(given, resolved, strict=False)):
            _refuse_surprises(value, kept, origins, (*keys, index))
    else:
        name, where = ".".join(str(key) for key in keys), origins.format_origin(keys)
        if isinstance(given, bool) and not isinstance(resolved, bool):
            raise ConfigError(f"{name}: {str(given).lower()} is not a number{where}; give a number")
        if isinstance(resolved, float) and not math.isfinite(resolved):
            raise ConfigError(f"{name}: {resolved} is not finite{where}; give a finite number")


def _located(section: Any, name: str, source: Path, options: Mapping[str, str], *, used: bool) -> Any:
    """Return a section whose `path`, if any, is absolute; a path from an option starts at the working directory. What
    nothing uses is not fetched; in a file it stays as it is written if it is not here."""
    if section.path is None:
        return section
    given = any(f"{name}.path" == key or f"{name}.path".startswith(f"{key}.") for key in options)
    if used or given:
        path = _absolute(section.path, f"{name}.path", source, given=given)
        parts = {f"{name}.{part}" for part in HubPart.model_fields} if isinstance(section, HubPart) else set()
        if f"{name}.path" in options and not parts & options.keys() and path is not None and path.is_file():
            # A file instead of the Hub's data: their parts are not of it.
            section = section.model_copy(update=dict.fromkeys(HubPart.model_fields))
    else:
        path = _existing(_places(section.path, f"{name}.path", source, given=given))
    if used:
        return (located_data if isinstance(section, HubPart) else located_model)(section, path, key=name)
    return section if path is None else section.model_copy(update={"path": str(path)})


def _absolute(text: str, name: str, source: Path, *, given: bool) -> Path | None:
    """Return the first place that exists; None: it may be a name on the Hub."""
    candidates = _places(text, name, source, given=given)
    if (found := _existing(candidates)) is not None:
        return found
    where = " and at ".join(str(candidate) for candidate in candidates)
    hint = "" if given else _where_from(source)
    if not hint and (is_hub_name(text) or snapshot_of(text)):
        return None
    raise ConfigError(f"{name}: {text!r} does not exist (looked at {where}); correct it (--set {name}=PATH){hint}")


def _existing(candidates: Iterable[Path]) -> Path | None:
    return next((each for each in candidates if each.exists()), None)


def _places(text: str, name: str, source: Path, *, given: bool) -> list[Path]:
    # A path in the file is meant relative to the file; one from --set relative to the working directory.
    places = [Path.cwd(), source.parent] if given else [source.parent, Path.cwd()]
    return list(dict.fromkeys(user_path(text, name, beside=place) for place in places))


def _where_from(source: Path) -> str:
    # The package does not ship a recipe's large files.
    return f", or get it as the first lines of {source} say" if source in packaged_recipes().values() else ""
