"""Which class is which algorithm."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from workers.algorithms.base import Algorithm
from workers.algorithms.config import AlgorithmConfig
from workers.algorithms.dapo import DAPO
from workers.algorithms.grpo import GRPO
from workers.algorithms.gspo import GSPO
from workers.algorithms.policy_gradient import PolicyGradient
from workers.algorithms.ppo import PPO
from workers.algorithms.reinforce_plus_plus import ReinforcePlusPlus
from workers.algorithms.rloo import RLOO

_CLASSES: Mapping[str, type[PolicyGradient[Any]]] = MappingProxyType(
    {"grpo": GRPO, "dapo": DAPO, "rloo": RLOO, "reinforce_plus_plus": ReinforcePlusPlus, "gspo": GSPO, "ppo": PPO}
)


def load_algorithm(config: AlgorithmConfig, *, max_response_tokens: int, mask_truncated: bool) -> Algorithm:
    """Return the algorithm that `config` names.

    Args:
        config: with the off-policy correction settled.
        max_response_tokens: longest answer.
        mask_truncated: answers that were cut do not count.
    """
    return _CLASSES[config.name](config, max_response_tokens=max_response_tokens, mask_truncated=mask_truncated)
