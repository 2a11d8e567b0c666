"""The learning rate of a step. Pure, and the same for every training engine.

lr     ______                         warm-up      linear from lr / N to lr over the first N steps
      /      \\.                       constant     lr
     /         '.  cosine             linear       a straight line down to lr_min_ratio x lr
    /  linear    '-.____ least        cosine       half a cosine down to it
    0  N             decay_steps
"""

import math

from workers.config import TrainingConfig


def learning_rate(config: TrainingConfig, step: int) -> float:
    """Return the rate of the updates of one step.

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
