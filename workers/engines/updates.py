"""The optimizer updates of a training engine: their number, learning rate and clipping.

    engine.step(scale)    norm of the gradients -> Updates.next -> factor for them, learning rate -> optimizer

Called by the engines that train; touches no gradient itself.
"""

import logging
import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from workers.engines.base import StepStats
from workers.settings.engines import ActorConfig, TrainingConfig

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
        clip, length = self._config.grad_clip, abs(scale) * norm
        clipped = clip is not None and length > clip
        stats = StepStats(length, learning_rate(self._config, self.num_steps + 1), clipped=clipped)
        self.number += 1
        if not math.isfinite(stats.grad_norm):
            logger.warning("update %d skipped: its gradient norm is %s", self.number, stats.grad_norm)
            return None, stats
        return scale if clip is None else scale * min(1.0, clip / (length + _EPS)), stats

    def state_dict(self) -> dict[str, Tensor]:
        """Return the numbers of steps and updates for torch.distributed.checkpoint."""
        return {"num_steps": torch.tensor(self.num_steps), "optimizer_updates": torch.tensor(self.number)}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore what `state_dict` returned."""
        self.number = int(state["optimizer_updates"])
        self._loaded = int(state["num_steps"]), self.number


def decay(weights: Sequence[Tensor], config: TrainingConfig, lr: float) -> None:
    """Shrink weights as AdamW does, before its update (Loshchilov & Hutter 2019, arXiv 1711.05101, algorithm 2).

    Done here and not by the optimizer, whose groups of parameters would otherwise be part of what is saved.

    Args:
        weights: that decay; see `decays`.
        config: with `weight_decay`.
        lr: of the update.
    """
    if config.weight_decay and weights:
        torch._foreach_mul_(list(weights), 1 - lr * config.weight_decay)


def decays(parameter: Tensor) -> bool:
    """Return whether a parameter decays: norms and biases, which have one dimension, do not."""
    return parameter.dim() > 1


def learning_rate(config: TrainingConfig, step: int) -> float:
    """Return the learning rate of the updates of one step.

        lr     ______                         warm-up      linear from lr / N to lr over the first N steps
              /      \\.                       constant     lr
             /         '.  cosine             linear       a straight line down to lr_min_ratio x lr
            /  linear    '-.____ least        cosine       half a cosine down to it
            0  N             decay_steps

    Args:
        config: with `lr_decay_steps` as it stands for this run, see `TrainingConfig.for_run`.
        step: from 1; beyond `lr_decay_steps` the rate stays at its least.

    Source of the cosine: Loshchilov & Hutter 2017 (arXiv 1608.03983), eq. 5, without restarts.
    """
    if step < config.lr_warmup_steps:
        return config.lr * step / config.lr_warmup_steps
    if config.lr_schedule == "constant":
        return config.lr
    assert config.lr_decay_steps, "settings of an engine come from TrainingConfig.for_run"
    first = max(1, config.lr_warmup_steps)
    done = min(1.0, max(0.0, (step - first) / max(1, config.lr_decay_steps - first)))
    left = 1 - done if config.lr_schedule == "linear" else (1 + math.cos(math.pi * done)) / 2
    return config.lr * (config.lr_min_ratio + (1 - config.lr_min_ratio) * left)
