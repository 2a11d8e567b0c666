"""Builds the engine that the configuration names; roles get it as its protocol and never know which one runs.

Called by rollout, actor, reference, rewards and evaluation. An engine is imported only when it is chosen.
"""

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from asyncflow.errors import ConfigError
from asyncflow.process import keep_freed_memory
from workers.config import RunConfig
from workers.engines.base import FrozenEngine, GenerateEngine, TrainEngine, ValueEngine
from workers.engines.model_files import max_positions
from workers.rewards.config import RewardModelConfig
from workers.rollout.config import SamplingConfig

if TYPE_CHECKING:
    from workers.engines.hf.frozen import RewardModel


def load_generate_engine(config: RunConfig, sampling: SamplingConfig, *, device: torch.device) -> GenerateEngine:
    """Return the engine `sampling.engine` without weights.

    Args:
        config: of the run.
        sampling: the rollout's, or the evaluation's.
        device: where it computes.

    Raises:
        ConfigError: see the engine.
    """
    model_dir = Path(config.model.path)
    match sampling.engine:
        case "hf":
            from workers.engines.hf.engine import HfEngine

            return HfEngine(model_dir, config.model, sampling=sampling, device=device)
        case "vllm":
            from workers.engines.vllm.engine import VllmEngine

            return VllmEngine(
                model_dir,
                config.model,
                config.vllm,
                sampling=sampling,
                max_prompt_tokens=_longest_prompt(config, sampling),
                device=device,
            )
        case "openai":
            from workers.engines.openai.engine import OpenAIEngine

            return OpenAIEngine(model_dir, config.model, config.openai, sampling=sampling)
        case "sim":
            from workers.engines.sim.engine import SimGenerateEngine
            from workers.engines.sim.lengths import SimLengths

            per_step = config.schedule.rollout_batch_size * config.schedule.n_samples_per_prompt
            lengths = SimLengths(config.sim, samples_per_step=per_step, seed=config.seed)
            return SimGenerateEngine(
                config.sim,
                lengths,
                num_slots=sampling.batch_size,
                max_response_tokens=sampling.max_response_tokens,
            )


def _longest_prompt(config: RunConfig, sampling: SamplingConfig) -> int:
    """Return the longest prompt of a call (tokens); those of later turns hold what came before."""
    if not config.rollout.is_own:
        return config.data.max_prompt_tokens
    context = config.rollout.max_context_tokens or max_positions(Path(config.model.path))
    if context is None:
        raise ConfigError(
            "rollout.max_context_tokens: is 0, and the model's config.json names no number of positions; set it"
        )
    return context - sampling.max_response_tokens


def load_frozen_model(config: RunConfig, *, device: torch.device, weights_dir: Path | None) -> FrozenEngine:
    """Return the reference `ref.engine` with the initial weights, or those in `weights_dir`.

    Raises:
        ConfigError: see the engine.
    """
    match config.ref.engine:
        case "hf":
            return _frozen_model(config, device=device, weights_dir=weights_dir)
        case "sim":
            from workers.engines.sim.engine import SimFrozenModel

            return SimFrozenModel(config.sim, s_per_token=config.sim.ref_s_per_token)


def load_reward_model(config: RewardModelConfig, *, device: torch.device) -> "RewardModel":
    """Return the model that scores responses; raises ConfigError, see `RewardModel`."""
    from workers.engines.hf.frozen import RewardModel
    from workers.engines.hf.model import DTYPES

    return RewardModel(Path(config.path), dtype=DTYPES[config.dtype], device=device)


def load_forward_model(config: RunConfig, *, device: torch.device) -> FrozenEngine:
    """Return a copy of the policy that only computes log-probabilities, with the initial weights.

    Its kind follows `actor.engine`, so both hold the same parameters.

    Raises:
        ConfigError: see the engine.
    """
    match config.actor.engine:
        case "fsdp" | "megatron":
            return _frozen_model(config, device=device)
        case "sim":
            from workers.engines.sim.engine import SimFrozenModel

            return SimFrozenModel(config.sim, s_per_token=config.sim.policy_forward_s_per_token)


def load_train_engine(config: RunConfig, *, device: torch.device) -> TrainEngine:
    """Return the engine `actor.engine` with the initial weights; collective over the actor's default group.

    Raises:
        ConfigError: see the engine.
    """
    _prepare(device)
    model_dir = Path(config.model.path)
    temperature = config.rollout.temperature
    actor = config.actor.for_run(config.steps, begins_after=config.critic_only_steps)
    match actor.engine:
        case "fsdp":
            from workers.engines.fsdp.engine import FsdpEngine

            return FsdpEngine(model_dir, actor=actor, temperature=temperature, device=device, seed=config.seed)
        case "megatron":
            from workers.engines.megatron.engine import MegatronEngine

            return MegatronEngine(
                model_dir,
                actor=actor,
                temperature=temperature,
                device=device,
                seed=config.seed,
                timeout_s=config.launcher.operation_timeout_s,
            )
        case "sim":
            from workers.engines.sim.engine import SimTrainEngine

            return SimTrainEngine(config.sim, lr=config.actor.lr)


def load_value_engine(config: RunConfig, *, device: torch.device) -> ValueEngine:
    """Return the critic with its initial weights; collective over the default group.

    Raises:
        ConfigError: see the engine.
    """
    from workers.engines.fsdp.engine import FsdpValueEngine

    _prepare(device)
    model_dir = Path(config.critic.path or config.model.path)
    training = config.critic.training(config.actor).for_run(config.steps)
    return FsdpValueEngine(model_dir, training, device=device, seed=config.seed)


def _prepare(device: torch.device) -> None:
    """Have this process keep freed memory, which every pass allocates again; accelerators' allocators do so anyway."""
    if device.type == "cpu":
        keep_freed_memory()


def _frozen_model(config: RunConfig, *, device: torch.device, weights_dir: Path | None = None) -> FrozenEngine:
    from workers.engines.hf.frozen import FrozenModel

    return FrozenModel(
        Path(config.model.path),
        config.model,
        temperature=config.rollout.temperature,
        device=device,
        weights_dir=weights_dir,
        shared_prompt=config.ref.shared_prompt,
    )
