"""The optimizer updates of a training engine: their number, learning rate and clipping.

    engine.step(scale)    norm of the gradients -> Updates.next -> factor for them, learning rate -> optimizer

Called by the engines that train; touches no gradient itself.
"""

import logging
import math
from collections.abc import Mapping

import torch
from torch import Tensor

from workers.config import ActorConfig
from workers.engines.base import StepStats
from workers.learning_rate import learning_rate

logger = logging.getLogger(__name__)

_EPS = 1e-6
"""Added to the norm, as `torch.nn.utils.clip_grad_norm_` does."""


class Updates:
    """Counts updates, and the steps that they complete, across resumes."""

    def __init__(self, config: ActorConfig) -> None:
        """Args:
        config: updates of a step, learning rate and clipping.
        """
        self._config = config
        self._loaded = (0, 0)
        """Steps and updates of the state that was loaded."""
        self.number = 0
        """Updates in these weights."""

    @property
    def num_steps(self) -> int:
        """Complete steps, which warm-up counts, however many updates each makes, or made before a resume."""
        steps, updates = self._loaded
        return steps + (self.number - updates) // self._config.num_updates

    def next(self, norm: float, scale: float) -> tuple[float | None, StepStats]:
        """Count the next update.

        Args:
            norm: L2 norm of the gradients that are accumulated, over all ranks.
            scale: factor that the caller asks for.
        Returns:
            The whole factor on the gradients, and the update's figures. None instead of a factor: the gradients are not
            finite, and no weight may change.
        """
        stats = StepStats(grad_norm=abs(scale) * norm, lr=learning_rate(self._config, self.num_steps + 1))
        self.number += 1
        if not math.isfinite(stats.grad_norm):
            logger.warning("update %d skipped: its gradient norm is %s", self.number, stats.grad_norm)
            return None, stats
        return scale * min(1.0, self._config.grad_clip / (stats.grad_norm + _EPS)), stats

    def state_dict(self) -> dict[str, Tensor]:
        """Return the numbers of steps and updates for torch.distributed.checkpoint."""
        return {"num_steps": torch.tensor(self.num_steps), "optimizer_updates": torch.tensor(self.number)}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore what `state_dict` returned."""
        self.number = int(state["optimizer_updates"])
        self._loaded = int(state["num_steps"]), self.number
