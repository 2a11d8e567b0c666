"""Builds the engine that the configuration names; roles only see its protocol. Only the chosen engine is imported.

All functions raise what the engine's constructor does, usually ConfigError.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from asyncflow.process import keep_freed_memory
from asyncflow.registry import Registry
from asyncflow.settings import Settings, own_settings
from workers.calls.user_function import load_class, load_function
from workers.engines.base import (
    EngineSetup,
    FrozenEngine,
    GenerateEngine,
    Sleeper,
    TopTokensEngine,
    TrainEngine,
    ValueEngine,
)
from workers.settings.engines import REF_ENGINES, TRAIN_ENGINES, ActorConfig
from workers.settings.rewards import RewardModelConfig
from workers.settings.rollout import ENGINES, SamplingConfig
from workers.settings.run import RunConfig

if TYPE_CHECKING:
    from workers.engines.hf.frozen import RewardModel

# Group of entry points -> the protocol that its classes implement.
_PROTOCOLS: Mapping[str, Any] = {
    ENGINES.group: GenerateEngine,
    TRAIN_ENGINES.group: TrainEngine,
    REF_ENGINES.group: FrozenEngine,
}


def load_generate_engine(config: RunConfig, sampling: SamplingConfig, *, device: torch.device) -> GenerateEngine:
    """Return the engine `sampling.engine` without weights; `sampling` is the rollout's, or an evaluation's."""
    setup = EngineSetup(config, device, sampling.engine_options, sampling)
    engine: GenerateEngine = _made(ENGINES, "rollout", sampling.engine, setup)
    return engine


def load_generating_model(config: RunConfig, sampling: SamplingConfig, *, device: torch.device) -> GenerateEngine:
    """Return the engine `sampling.engine` with the weights of `model.path`, which stay."""
    setup = EngineSetup(config, device, sampling.engine_options, sampling, follows_policy=False)
    engine: GenerateEngine = _made(ENGINES, "rollout", sampling.engine, setup)
    if sampling.engine not in ("sim", "vllm"):  # vLLM reads them itself
        from workers.engines.hf.model import read_stored

        engine.load_weights(read_stored(setup.model_dir, engine.weight_needs()))
    return engine


def load_frozen_model(config: RunConfig, *, device: torch.device, weights_dir: Path | None) -> FrozenEngine:
    """Return the reference with the weights in `weights_dir` (None: initial); collective over a copy's ranks."""
    setup = EngineSetup(
        config, device, config.ref.engine_options, config.rollout, weights_dir,
        follows_policy=config.algorithm.ref_update_interval > 0, other_model=config.ref.path,
    )  # fmt: skip
    engine: FrozenEngine = _made(REF_ENGINES, "ref", config.ref.engine, setup)
    return engine


def load_teacher(config: RunConfig, model_dir: Path, *, device: torch.device) -> TopTokensEngine:
    """Return a teacher as section `teacher` says; collective over a copy's ranks."""
    teacher, temperature = config.teacher, config.rollout.temperature
    if teacher.engine == "fsdp":
        from workers.engines.fsdp.sharding import FsdpFrozenModel

        computation = ActorConfig(autocast=config.model.dtype, shared_prompt=teacher.shared_prompt)
        return FsdpFrozenModel(model_dir, computation, temperature=temperature, device=device, weights_dir=model_dir)
    from workers.engines.hf.frozen import FrozenModel

    return FrozenModel(
        model_dir, config.model, temperature=temperature, device=device, shared_prompt=teacher.shared_prompt
    )


def load_reward_model(config: RewardModelConfig, *, device: torch.device) -> "RewardModel":
    """Return the model that scores responses; collective over the ranks that share it."""
    from workers.engines.hf.frozen import RewardModel
    from workers.engines.hf.model import DTYPES

    return RewardModel(Path(config.path), dtype=DTYPES[config.dtype], device=device, shared=config.shards > 1)


def load_forward_model(config: RunConfig, *, device: torch.device) -> FrozenEngine:
    """Return a scoring copy of the policy with the initial weights; collective over the ranks that share it."""
    # Simulated if the actor is, since both must hold the same parameters.
    if config.actor.engine == "sim":
        from workers.engines.sim.engine import SimFrozenModel

        return SimFrozenModel(config.sim, s_per_token=config.sim.policy_forward_s_per_token)
    # The reference's engine; transformers' if that is outside the package.
    name = config.ref.engine if config.ref.engine in ("fsdp", "megatron") else "hf"
    engine: FrozenEngine = _made(REF_ENGINES, "ref", name, EngineSetup(config, device, {}, config.rollout))
    return engine


def load_train_engine(config: RunConfig, *, device: torch.device) -> TrainEngine:
    """Return the engine `actor.engine` with the initial weights; collective over the actor's default group."""
    _prepare(device)
    setup = EngineSetup(config, device, config.actor.engine_options, config.rollout)
    engine: TrainEngine = _made(TRAIN_ENGINES, "actor", config.actor.engine, setup)
    return engine


def load_value_engine(config: RunConfig, *, device: torch.device) -> ValueEngine:
    """Return the critic with its initial weights; collective over the default group."""
    from workers.engines.fsdp.sharding import FsdpValueEngine

    _prepare(device)
    model_dir = Path(config.critic.path or config.model.path)
    training = config.critic.training(config.actor).for_run(config.steps)
    return FsdpValueEngine(model_dir, training, device=device, seed=config.seed)


def row_groups(engine: str, within_stage: bool) -> tuple[dist.ProcessGroup, ...]:
    """Return the groups of devices in which an engine of this name computes, as a `tq.client.dataloader.DeviceRoute`
    takes them; the engine was built before. They make no communicator that the engine has not.

    Args:
        within_stage: from the first rank of this rank's pipeline stage, not from the replica's first one.
    """
    if engine != "megatron":
        assert dist.group.WORLD is not None, "the engine is built over the default group"
        return (dist.group.WORLD,)
    from workers.engines.megatron.megatron_model import row_groups as of_megatron

    return of_megatron(within_stage)


def outside_engine(
    registry: Registry, section: str, name: str, options: Mapping[str, Any], *, sleeps: bool
) -> tuple[Any, Settings]:
    """Import `name` (`module:Class`) from outside the package; return the class, and `options` as its own `Config`.

    Args:
        sleeps: it takes turns with another role on its devices.

    Raises:
        ConfigError: there is no such class, it lacks a method, or it refuses an option.
    """
    protocols = (_PROTOCOLS[registry.group], *((Sleeper,) if sleeps else ()))
    members = {each: getattr(protocol, each) for protocol in protocols for each in dir(protocol)}
    methods = [each for each, member in members.items() if not each.startswith("_") and callable(member)]
    kind = load_class(name, field=f"{section}.engine", methods=methods)
    return kind, own_settings(kind, options, name=name, section=f"{section}.engine_options", base=Settings)


def _made(registry: Registry, section: str, name: str, setup: EngineSetup) -> Any:
    if name in registry.built_in:
        return load_function(registry.locate_class(name), field=f"{section}.engine", arguments=None)(setup)
    kind, options = outside_engine(
        registry, section, name, setup.options, sleeps=setup.takes_turns and section != "ref"
    )
    return kind(replace(setup, options=options))


def _prepare(device: torch.device) -> None:
    if device.type == "cpu":
        # Every pass allocates the same memory again; accelerators' allocators keep it anyway.
        keep_freed_memory()
