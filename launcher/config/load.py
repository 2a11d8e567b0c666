"""Turn a YAML file and the command line, `--roles` too, into one checked, resolved `RunConfig`. Torch-free.

The order is: file, `--set`, `--steps`, `--roles`; then every value is checked, and the paths of models, data and users'
modules become absolute. Every problem is one `ConfigError` line. Called by the command line; it writes nothing but what
the Hub gives (`launcher.config.hub`).
"""

import copy
import difflib
import math
import os
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from asyncflow.errors import ConfigError
from asyncflow.run_files import CONFIG_FILE
from launcher.config.errors import Origins, explain
from launcher.config.hub import is_hub_name, located_data, located_model, snapshot_of
from launcher.config.paths import packaged_recipes, user_path
from launcher.config.yaml_file import parse_value, read_yaml
from workers.roles.own_classes import resolve
from workers.settings.algorithm_names import ALGORITHMS
from workers.settings.data import DataConfig, HubPart
from workers.settings.dataflow import ALIASES, OBSERVERS, ROLES, TRAINERS
from workers.settings.run import RunConfig
from workers.settings.schedule import ScheduleMode

_PATHS = ("model", "critic", "data", "evaluate")
"""Sections whose `path` names a file or directory."""
_REQUIRED_ROLES = ("rollout", "actor")
_EXAMPLE = "rollout:8,actor:4,ref:2"
_WHOLE_NUMBER = re.compile(r"-?[0-9]{1,9}")


def load_config(
    source: Path,
    *,
    overrides: Sequence[str] = (),
    roles: str | None = None,
    steps: int | None = None,
    called: str | None = None,
) -> RunConfig:
    """Read, override, check and resolve.

    Args:
        source: YAML file.
        overrides: `a.b=value`, each value parsed as YAML; later ones win.
        roles: `rollout:8,actor:4`; replaces the file's `roles` as a whole.
        steps: number of the last step.
        called: what errors call the settings, where `source` is none of the user's files.
    Returns:
        The configuration with canonical role names and absolute paths.
    Raises:
        ConfigError: one line with field, value, what to do.
    """
    file = read_yaml(source)
    if called is not None:
        file = replace(file, path=Path(called), root=None)
    values: dict[Any, Any] = copy.deepcopy(file.values)
    options = dict(_apply_override(values, text) for text in overrides)
    of_run = source.name == CONFIG_FILE and called is None
    if of_run:
        _forget_other_algorithm(values, file.values, options)
    if steps is not None:
        values["steps"] = steps
        options["steps"] = "--steps"
    if roles is not None:
        values["roles"] = dict(parse_roles(roles, _users_roles(values)))
        options["roles"] = "--roles"
    _default_staleness(values, options)
    origins = Origins(file, options)
    config = _validate(values, origins, beside=Path.cwd() if "code_directory" in options else source.parent)
    resolved: dict[str, Any] = {"roles": check_roles(config.roles, [task.own_role for task in config.tasks])}
    for name in _PATHS:
        resolved[name] = _located(getattr(config, name), name, source, options)
    data: DataConfig = resolved["data"]
    parts = (_located(one, f"data.mixture.{k}", source, options) for k, one in enumerate(data.mixture))
    resolved["data"] = data.model_copy(update={"mixture": tuple(parts)})
    model = config.reward.model
    if model is not None:
        located = _located(model, "reward.model", source, options)
        resolved["reward"] = config.reward.model_copy(update={"model": located})
    try:
        config = resolve(config.model_copy(update=resolved))
    except ConfigError as error:
        if not of_run:
            raise
        raise ConfigError(
            f"{error} ({source} has the settings that the run began with; if the class is another one since, correct "
            f"it there, too)"
        ) from error
    _refuse_surprises(values, config.model_dump(mode="python"), origins, ())  # now in outside classes' settings, too
    return config


def parse_roles(text: str, users: Collection[str] = ()) -> dict[str, int]:
    """Parse the option's value.

    Args:
        text: of the option.
        users: roles of users' tasks.

    Raises:
        ConfigError: not `role:ranks` pairs, a role given twice, or what `check_roles` refuses.
    """
    roles: dict[str, int] = {}
    for part in text.split(","):
        if not part.strip():
            raise ConfigError(f"--roles: {text!r} has an empty entry (a comma too many?); give e.g. --roles {_EXAMPLE}")
        name, colon, count = (piece.strip() for piece in part.partition(":"))
        if not colon or not name:
            raise ConfigError(f"--roles: {part.strip()!r} is not role:ranks; give e.g. --roles {_EXAMPLE}")
        role = _canonical_role(name, users)
        if role in roles:
            raise ConfigError(f"--roles: {role!r} is given twice; give it once, with all its ranks")
        if not _WHOLE_NUMBER.fullmatch(count):
            raise ConfigError(f"--roles: {name}:{count} is not a whole number of ranks; give e.g. {name}:2")
        roles[role] = int(count)
    return check_roles(roles, users)


def check_roles(roles: Mapping[str, int], users: Collection[str] = ()) -> dict[str, int]:
    """Return `roles` with canonical names, in the order of `ROLES`, then of `users`, the roles of users' tasks.

    Raises:
        ConfigError: unknown role (with the nearest name), less than one rank (none is for processes outside, but not of
            trainers and evaluators), a required role missing, or one role under two names.
    """
    counts: dict[str, int] = {}
    for name, count in roles.items():
        role = _canonical_role(name, users)
        if role in counts:
            raise ConfigError(f"roles: {role!r} is given twice (as {name!r} too); give it once")
        if count < (role in {*TRAINERS, *OBSERVERS}):
            raise ConfigError(
                f"roles: {name}:{count} must have at least 1 rank; give {name}:1 or more, or leave it out"
            )
        counts[role] = count
    for role in _REQUIRED_ROLES:
        if role not in counts:
            raise ConfigError(f"roles: {role!r} is missing; add {role}:1 or more, e.g. --roles {_EXAMPLE}")
    return {role: counts[role] for role in dict.fromkeys((*ROLES, *users)) if role in counts}


def _apply_override(values: dict[Any, Any], text: str) -> tuple[str, str]:
    """Set one `a.b=value` in `values`; return (`a.b`, the option as the user gave it)."""
    option = f"--set {text}"
    name, equals, value = text.partition("=")
    name = name.strip()
    keys = name.split(".")
    if not equals or not all(keys):
        raise ConfigError(f"{option}: give key=value with a dotted key, e.g. --set actor.lr=1e-5")
    section = values
    for depth, key in enumerate(keys[:-1]):
        inner = section.setdefault(key, {})
        if inner is None:
            inner = section[key] = {}
        if not isinstance(inner, dict):
            parent = ".".join(keys[: depth + 1])
            raise ConfigError(f"{option}: {parent} is not a section (it is {inner!r}); set {parent} itself")
        section = inner
    section[keys[-1]] = parse_value(value, option)
    return name, option


def _forget_other_algorithm(values: dict[Any, Any], written: Mapping[Any, Any], options: Mapping[str, str]) -> None:
    """Where an option names another algorithm than a run's own file, drop the former one's defaults from that file.

    A run writes down every setting, so the user gave none of these. What an option gave stays.
    """
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
    defaults = former().model_dump(mode="json")
    given = {"name", *(option.split(".")[1] for option in options if option.startswith("algorithm."))}
    for key, value in before.items():
        if key not in given and now.get(key) == value == defaults.get(key):
            del now[key]


def _users_roles(values: Mapping[Any, Any]) -> list[str]:
    """Return the roles of users' tasks, before anything is known to be valid."""
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
    """In `sync` and `periodic` mode the bound is 0: write that down unless the user asked for another number, too."""
    schedule = values.get("schedule")
    if not isinstance(schedule, dict) or schedule.get("mode") not in ("sync", "periodic"):
        return
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
    schedule = config.schedule
    if schedule.staleness_bound < schedule.max_staleness:
        where = origins.of(("schedule", "max_staleness"))
        raise ConfigError(
            f"schedule.max_staleness: {schedule.max_staleness} cannot be with mode {schedule.mode}{where}; "
            f"set it to 0, or schedule.mode to async or substep"
        )
    if config.deterministic and schedule.mode not in (ScheduleMode.SYNC, ScheduleMode.PERIODIC):
        raise ConfigError(
            f"deterministic: true cannot be with schedule.mode {schedule.mode}, where the weights of a token depend on "
            f"timing; set schedule.mode to periodic or sync"
        )
    if config.deterministic and config.algorithm.filters_groups:
        raise ConfigError(
            "deterministic: true cannot be with algorithm.group_filter, where which responses are generated together "
            "depends on timing; set algorithm.group_filter to null"
        )
    if config.reward.group_function is not None and (config.deterministic or "reward" in config.roles):
        what = "deterministic: true" if config.deterministic else "roles: 'reward'"
        raise ConfigError(
            f"{what} cannot be with reward.group_function, which sees a group where and when it is generated; leave "
            f"one of the two out"
        )
    if schedule.lateness and schedule.gate_staleness < 1:
        where = origins.of(("schedule", "fill"))
        raise ConfigError(
            f"schedule.fill: {schedule.fill} cannot be with mode {schedule.mode} and max_staleness "
            f"{schedule.max_staleness}{where}: a group that is trained a step late is older; set schedule.mode to "
            f"async or substep and schedule.max_staleness to 2 or more, or schedule.fill to in_order"
        )
    return config


def _refuse_surprises(given: Any, resolved: Any, origins: Origins, keys: tuple[str | int, ...]) -> None:
    """Refuse what pydantic accepts but is surely a mistake: true as a number, infinite numbers."""
    if isinstance(given, Mapping) and isinstance(resolved, Mapping):
        for key, value in given.items():
            _refuse_surprises(value, resolved.get(key), origins, (*keys, key))
    elif isinstance(given, (list, tuple)) and isinstance(resolved, (list, tuple)):
        for index, (value, kept) in enumerate(zip(given, resolved, strict=False)):
            _refuse_surprises(value, kept, origins, (*keys, index))
    else:
        name, where = ".".join(str(key) for key in keys), origins.of(keys)
        if isinstance(given, bool) and not isinstance(resolved, bool):
            raise ConfigError(f"{name}: {str(given).lower()} is not a number{where}; give a number")
        if isinstance(resolved, float) and not math.isfinite(resolved):
            raise ConfigError(f"{name}: {resolved} is not finite{where}; give a finite number")


def _located(section: Any, name: str, source: Path, options: Mapping[str, str]) -> Any:
    """Return a section with an absolute `path`, if it has one; an option names it from the working directory."""
    if section.path is None:
        return section
    given = any(f"{name}.path" == key or f"{name}.path".startswith(f"{key}.") for key in options)
    path = _absolute(section.path, f"{name}.path", source, given=given)
    return (located_data if isinstance(section, HubPart) else located_model)(section, path, key=name)


def _absolute(text: str, name: str, source: Path, *, given: bool) -> Path | None:
    """Find a relative path beside the config file, else in the working directory; the other way round for `--set`.

    Returns:
        The path; None: it may be a name on the Hub.
    """
    places = [Path.cwd(), source.parent] if given else [source.parent, Path.cwd()]
    candidates = list(dict.fromkeys(user_path(text, name, beside=place) for place in places))
    for candidate in candidates:
        if candidate.exists():
            return candidate
    where = " and at ".join(str(candidate) for candidate in candidates)
    hint = "" if given else _where_from(source)
    if not hint and (is_hub_name(text) or snapshot_of(text)):
        return None
    raise ConfigError(f"{name}: {text!r} does not exist (looked at {where}); correct it (--set {name}=PATH){hint}")


def _where_from(source: Path) -> str:
    """Say where a packaged recipe's files come from; it does not bring large ones."""
    return f", or get it as the first lines of {source} say" if source in packaged_recipes().values() else ""
