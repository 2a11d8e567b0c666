"""The algorithm that a configuration names, ready to be asked; the registry is `config.NAMES`."""

import reprlib
from collections.abc import Mapping
from typing import Any, Protocol

import torch

from asyncflow.errors import ConfigError
from tq.columns import Column, PackedBatch
from workers.algorithms.algorithm import Algorithm
from workers.algorithms.config import NAMES, AlgorithmConfig, KlLossConfig, OutsideConfig, PolicyConfig
from workers.calls.user_class import load_class, own_settings
from workers.tasks.dataflow import DRAWN_COLUMNS
from workers.tasks.rollouts import sample_columns

FIELD = "algorithm.name"
_NOT_ITS_OWN = ("name", "reads", "needs_group_size", "needs_whole_step")
"""Keys of `OutsideConfig` that the class's `Config` does not have."""


class AnswerSettings(Protocol):
    """What an algorithm must know of generation; `workers.config.RolloutConfig` says it."""

    @property
    def longest_rollout(self) -> int:
        """Most tokens that are drawn in a rollout."""

    @property
    def truncated(self) -> str:
        """`mask`: responses that were cut do not count."""


def load_algorithm(config: AlgorithmConfig, answers: AnswerSettings) -> Algorithm[Any]:
    """Return the algorithm that `config` names.

    Raises:
        ConfigError: it is outside the package, and cannot be imported any more.
    """
    kind: Any
    settings: PolicyConfig
    if isinstance(config, OutsideConfig):
        kind, settings = outside_algorithm(config.name, config.model_dump())
    else:
        kind, settings = load_class(NAMES.locate(config.name), field=FIELD, methods=()), config
    return _made(kind, settings, answers)


def outside_algorithm(name: str, section: Mapping[str, Any]) -> tuple[type[Algorithm[Any]], KlLossConfig]:
    """Import an algorithm outside of the package; return it, and the settings as its own `Config` has them.

    Raises:
        ConfigError: there is none, it is no algorithm, has no `Config` that a run can use, or refuses a setting.
    """
    kind = load_class(name, field=FIELD, methods=())
    if not issubclass(kind, Algorithm):
        raise ConfigError(f"{FIELD}: {name} is no algorithm; derive it from workers.algorithms.algorithm.Algorithm")
    given = {key: value for key, value in section.items() if key not in _NOT_ITS_OWN}
    config = own_settings(kind, given, name=name, section="algorithm", base=KlLossConfig)
    if config.has_critic or config.kl_in_reward:
        raise ConfigError(
            f"{FIELD}: {name} has a critic, or its KL penalty in the reward; only built-in ones have that"
        )
    inputs: object = config.advantage_inputs
    if not isinstance(inputs, tuple | list) or not all(isinstance(column, str) for column in inputs):
        raise ConfigError(f"{FIELD}: {name}: advantage_inputs of its Config are {inputs!r}; give a tuple of columns")
    smallest: object = config.min_group_size
    if type(smallest) is not int or smallest < 1:
        raise ConfigError(f"{FIELD}: {name}: min_group_size of its Config is {smallest!r}; give 1 or more responses")
    return kind, config


def try_algorithm(
    name: str, kind: Any, settings: KlLossConfig, answers: AnswerSettings, *, group_size: int
) -> Algorithm[Any]:
    """Return an algorithm of a user's, which has compared a made-up group, if that has the columns.

    Raises:
        ConfigError: its advantages are not such that a run can use them.
        Exception: what it raises.
    """
    algorithm, ones = _made(kind, settings, answers), [torch.ones(1)] * group_size
    columns = {
        **sample_columns([torch.tensor([0])] * group_size, [torch.tensor([0])] * group_size),
        **{column: Column.of_rows(ones) for column in DRAWN_COLUMNS},
        **{column: Column.of_scalars(torch.zeros(group_size, dtype=torch.bool)) for column in ("truncated", "correct")},
        "rewards": Column.of_scalars(torch.arange(group_size, dtype=torch.float32)),
    }
    inputs = settings.advantage_inputs
    if not set(inputs) <= set(columns):
        return algorithm  # a users' task writes one
    batch = PackedBatch(tuple(range(group_size)), {column: columns[column] for column in inputs}, (0,) * group_size)
    made = algorithm.advantages(batch, group_size=group_size)
    found = made.get("advantages") if isinstance(made, Mapping) else made
    if not isinstance(found, Column) or found.lengths.tolist() != [1] * group_size:
        shown = " ".join(reprlib.repr(made).split())
        raise ConfigError(
            f"{FIELD}: {name}.advantages returned {shown} for a group of {group_size} with a token each; return "
            f"{{'advantages': Column}} with a number per row, or per drawn token"
        )
    return algorithm


def _made(kind: Any, settings: PolicyConfig, answers: AnswerSettings) -> Algorithm[Any]:
    algorithm: Algorithm[Any] = kind(
        settings, max_response_tokens=answers.longest_rollout, mask_truncated=answers.truncated == "mask"
    )
    return algorithm
