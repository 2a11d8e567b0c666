"""The algorithm that a configuration names, ready to be asked; the registry is `config.ALGORITHMS`."""

from typing import Any, Protocol

from workers.algorithms.algorithm import Algorithm
from workers.algorithms.config import AlgorithmConfig, OutsideConfig, PolicyConfig
from workers.algorithms.outside import import_class, own_settings


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
    settings: PolicyConfig = config
    if isinstance(config, OutsideConfig):
        kind = import_class(config.name)
        settings = own_settings(kind, config.name, config.model_dump())
    else:
        kind = import_class(config.implementation)
    return kind(settings, max_response_tokens=answers.longest_rollout, mask_truncated=answers.truncated == "mask")
