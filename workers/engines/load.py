"""Builds the engine that the configuration names; roles get it as its protocol and never know which one runs.

Called by the rollout and the actor. Each engine is imported when it is chosen, so that one is not needed for another.
"""

from pathlib import Path

import torch

from workers.config import RunConfig
from workers.engines.base import GenerateEngine, TrainEngine


def load_generate_engine(config: RunConfig, *, device: torch.device) -> GenerateEngine:
    """Return the engine `rollout.engine` without weights.

    Raises:
        ConfigError: see the engine.
    """
    model_dir = Path(config.model.path)
    match config.rollout.engine:
        case "hf":
            from workers.engines.hf import HfEngine

            return HfEngine(model_dir, config.model, rollout=config.rollout, device=device)


def load_train_engine(config: RunConfig, *, device: torch.device) -> TrainEngine:
    """Return the engine `actor.engine` with the initial weights; collective over the actor's default group.

    Raises:
        ConfigError: see the engine.
    """
    model_dir = Path(config.model.path)
    temperature = config.rollout.temperature
    match config.actor.engine:
        case "fsdp":
            from workers.engines.fsdp import FsdpEngine

            return FsdpEngine(
                model_dir, config.model, actor=config.actor, temperature=temperature, device=device, seed=config.seed
            )
