"""Which class is which algorithm."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Protocol

from workers.algorithms.algorithm import Algorithm
from workers.algorithms.config import AlgorithmConfig
from workers.algorithms.dapo import DAPO
from workers.algorithms.grpo import GRPO
from workers.algorithms.gspo import GSPO
from workers.algorithms.ppo import PPO
from workers.algorithms.reinforce_plus_plus import ReinforcePlusPlus
from workers.algorithms.rloo import RLOO

_CLASSES: Mapping[str, type[Algorithm[Any]]] = MappingProxyType(
    {"grpo": GRPO, "dapo": DAPO, "rloo": RLOO, "reinforce_plus_plus": ReinforcePlusPlus, "gspo": GSPO, "ppo": PPO}
)


class AnswerSettings(Protocol):
    """What an algorithm must know of generation; `workers.config.RolloutConfig` says it."""

    @property
    def longest_rollout(self) -> int:
        """Most tokens that are drawn in a rollout."""

    @property
    def truncated(self) -> str:
        """`mask`: responses that were cut do not count."""


def load_algorithm(config: AlgorithmConfig, answers: AnswerSettings) -> Algorithm[Any]:
    """Return the algorithm that `config` names."""
    return _CLASSES[config.name](
        config, max_response_tokens=answers.longest_rollout, mask_truncated=answers.truncated == "mask"
    )
