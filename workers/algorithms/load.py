"""The algorithm that a configuration names, ready to be asked; the registry is `config.NAMES`."""

from collections.abc import Mapping
from typing import Any, Protocol

from asyncflow.errors import ConfigError
from workers.algorithms.algorithm import Algorithm
from workers.algorithms.config import NAMES, AlgorithmConfig, KlLossConfig, OutsideConfig, PolicyConfig
from workers.calls.user_class import load_class, own_settings

FIELD = "algorithm.name"
_NOT_ITS_OWN = ("name", "reads")
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
    algorithm: Algorithm[Any] = kind(
        settings, max_response_tokens=answers.longest_rollout, mask_truncated=answers.truncated == "mask"
    )
    return algorithm


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
    return kind, config
