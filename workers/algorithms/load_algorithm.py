"""Constructs the algorithm that a configuration names; the names are in `workers.settings.algorithms`."""

import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch

from asyncflow.errors import ConfigError
from asyncflow.settings import own_settings
from tq.columns import Column, PackedBatch
from workers.algorithms.algorithm import Algorithm
from workers.calls.user_function import load_class
from workers.rows.packed_rows import sample_columns
from workers.settings.algorithms import NAMES, AlgorithmConfig, KlLossConfig, OutsideConfig, PolicyConfig
from workers.settings.dataflow import ACTOR_TRAIN, ADVANTAGES, DRAWN_COLUMNS, TURN_IDS, TURN_REWARDS, Task

FIELD = "algorithm.name"
# Keys of `OutsideConfig` that the class's `Config` answers itself.
_NOT_ITS_OWN = ("name", "dataflow", "needs_group_size", "needs_whole_step")
# Task -> where an algorithm outside the package may add columns: it computes advantages and loss.
_MAY_GROW: Mapping[str, tuple[str, ...]] = {ADVANTAGES: ("inputs", "outputs"), ACTOR_TRAIN: ("inputs",)}
_TRIED_TOKENS = 2  # tokens of each response in the trial group


class ResponseSettings(Protocol):
    """What an algorithm must know about generation; `workers.settings.rollout.RolloutConfig` provides it."""

    @property
    def longest_rollout(self) -> int:
        """Most tokens drawn in a rollout."""

    @property
    def truncated(self) -> str:
        """`mask`: truncated responses do not count."""


def load_algorithm(config: AlgorithmConfig, responses: ResponseSettings) -> Algorithm[Any]:
    """Return the algorithm that `config` names.
    Raises ConfigError if it is outside the package, and can no longer be imported."""
    kind: Any
    settings: PolicyConfig
    if isinstance(config, OutsideConfig):
        kind, settings = outside_algorithm(config.name, config.model_dump())
    else:
        kind, settings = load_class(NAMES.locate_class(config.name), field=FIELD, methods=()), config
    return _made(kind, settings, responses)


def outside_algorithm(name: str, section: Mapping[str, Any]) -> tuple[type[Algorithm[Any]], KlLossConfig]:
    """Import an algorithm from outside the package; return it, and the section's settings as its own `Config`.
    Raises ConfigError if there is none, it is not an algorithm, has no usable `Config`, or refuses a setting."""
    kind = load_class(name, field=FIELD, methods=())
    if not issubclass(kind, Algorithm):
        raise ConfigError(f"{FIELD}: {name} is not an algorithm; derive it from workers.algorithms.algorithm.Algorithm")
    given = {key: value for key, value in section.items() if key not in _NOT_ITS_OWN}
    config = own_settings(kind, given, name=name, section="algorithm", base=KlLossConfig)
    if config.has_critic or config.kl_in_reward:
        raise ConfigError(
            f"{FIELD}: {name} has a critic, or its KL penalty in the reward; only built-in algorithms support that"
        )
    defines = next(base for base in kind.__mro__ if "advantages" in vars(base))
    if config.credits_turns and not vars(defines).get("credits_turns"):
        raise ConfigError(
            f"algorithm.credit: turn cannot be used with {name}, whose class {defines.__name__} computes advantages "
            f"and does not say `credits_turns = True`; leave credit out, or have it read turn_ids and turn_rewards"
        )
    inputs: object = config.advantage_inputs
    if not isinstance(inputs, tuple | list) or not all(isinstance(column, str) for column in inputs):
        raise ConfigError(f"{FIELD}: {name}: advantage_inputs of its Config are {inputs!r}; give a tuple of columns")
    smallest: object = config.min_group_size
    if type(smallest) is not int or smallest < 1:
        raise ConfigError(f"{FIELD}: {name}: min_group_size of its Config is {smallest!r}; give 1 or more responses")
    return kind, config


def outside_tasks(name: str, settings: KlLossConfig, *, old_log_probs: bool) -> tuple[Task, ...]:
    """Return the tasks of an algorithm outside the package, as its `Config` defines them.
    Raises ConfigError if they are not every algorithm's tasks, or change more than the columns it may add."""
    given: object = settings.tasks(old_log_probs=old_log_probs)
    if not isinstance(given, tuple | list) or not all(isinstance(task, Task) for task in given):
        raise ConfigError(f"{FIELD}: {name}: tasks() of its Config returned {_shown(given)}; return a tuple of Task")
    known = PolicyConfig.tasks(settings, old_log_probs=old_log_probs)
    names = [task.name for task in known]
    if [task.name for task in given] != names:
        raise ConfigError(
            f"{FIELD}: {name}: tasks() of its Config are {' '.join(task.name for task in given)}; return those of "
            f"super().tasks(), {' '.join(names)} (tasks of your own belong in section tasks)"
        )
    for ours, its in zip(known, given, strict=True):
        grown = {part: getattr(its, part) for part in _MAY_GROW.get(ours.name, ())}
        if its != replace(ours, **grown) or any(not set(getattr(ours, part)) <= set(grown[part]) for part in grown):
            raise ConfigError(
                f"{FIELD}: {name}: tasks() of its Config changes {ours.name}; it may add inputs and outputs to "
                f"{ADVANTAGES}, and inputs to {ACTOR_TRAIN}"
            )
    return tuple(given)


def try_algorithm(
    name: str, kind: Any, settings: KlLossConfig, responses: ResponseSettings, *, tasks: Sequence[Task], group_size: int
) -> Algorithm[Any]:
    """Construct a user's algorithm and try it on a made-up group, if that provides the columns it reads.

    Raises ConfigError if a run cannot use its advantages, and whatever the algorithm raises.
    """
    algorithm, ones = _made(kind, settings, responses), [torch.ones(_TRIED_TOKENS)] * group_size
    columns = {
        **sample_columns([torch.tensor([0])] * group_size, [torch.tensor([0] * _TRIED_TOKENS)] * group_size),
        **{column: Column.of_rows(ones) for column in DRAWN_COLUMNS},
        **{column: Column.of_scalars(torch.zeros(group_size, dtype=torch.bool)) for column in ("truncated", "correct")},
        "rewards": Column.of_scalars(torch.arange(group_size, dtype=torch.float32)),
        TURN_IDS: Column.of_rows([torch.zeros(_TRIED_TOKENS, dtype=torch.int32)] * group_size),
        TURN_REWARDS: Column.of_scalars(torch.arange(group_size, dtype=torch.float64)),
    }
    task = next(task for task in tasks if task.name == ADVANTAGES)
    inputs = task.inputs
    if not set(inputs) <= set(columns):
        return algorithm  # a user's task writes some of them
    batch = PackedBatch(tuple(range(group_size)), {column: columns[column] for column in inputs}, (0,) * group_size)
    made = algorithm.advantages(batch, group_size=group_size)
    for column in task.outputs:
        found = made.get(column) if isinstance(made, Mapping) else made
        lengths = (1, _TRIED_TOKENS) if column == "advantages" else (1,)
        if not isinstance(found, Column) or found.lengths.tolist() not in [[each] * group_size for each in lengths]:
            raise ConfigError(
                f"{FIELD}: {name}.advantages returned {_shown(made)} for a group of {group_size} with "
                f"{_TRIED_TOKENS} tokens each; return {{{column!r}: Column}} with a number per row"
                f"{', or per drawn token' if column == 'advantages' else ''}"
            )
    return algorithm


def _shown(returned: object) -> str:
    return " ".join(reprlib.repr(returned).split())


def _made(kind: Any, settings: PolicyConfig, responses: ResponseSettings) -> Algorithm[Any]:
    algorithm: Algorithm[Any] = kind(
        settings, max_response_tokens=responses.longest_rollout, mask_truncated=responses.truncated == "mask"
    )
    return algorithm
