"""What must hold before a run with `actor.engine: megatron` is accepted. Torch-free."""

from pathlib import Path

from asyncflow.errors import ConfigError
from workers.config import RunConfig
from workers.engines.megatron_config import DenseModel, check_division
from workers.model_files import read_model_config


def check_megatron(config: RunConfig) -> None:
    """Refuse a model that cannot be divided as configured, broken replicas, and settings that megatron does not have.

    Raises:
        ConfigError: the first thing that does not hold.
    """
    actor = config.actor
    if actor.engine != "megatron":
        return
    actor.megatron.layout(config.roles["actor"])
    model = DenseModel.of(read_model_config(Path(config.model.path)))
    check_division(model, actor.megatron)
    if actor.compile:
        raise ConfigError("actor.compile: megatron's layers are not compiled; set it to false, or actor.engine to fsdp")
