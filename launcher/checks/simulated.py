"""Whether the settings of simulated engines fit together."""

import math
from pathlib import Path

from asyncflow.errors import ConfigError
from workers.settings.run import RunConfig
from workers.settings.sim import SimConfig


def check_sim(config: RunConfig) -> None:
    """Refuse simulated engines beside real ones, and lengths that they cannot draw from.

    Raises:
        ConfigError: there are such.
    """
    engines = {"rollout": config.rollout.engine, "actor": config.actor.engine}
    if config.algorithm.kl_coef > 0:
        engines["ref"] = config.ref.engine
    if "evaluate" in config.roles:
        engines["evaluate"] = config.evaluate.engine
    if "sim" not in engines.values():
        return
    if set(engines.values()) != {"sim"}:
        others = ", ".join(f"{role}.engine {engine}" for role, engine in engines.items() if engine != "sim")
        raise ConfigError(f"{others}: cannot be with a role whose engine is sim; set all of them to sim, or none")
    if config.rollout.stop:
        raise ConfigError(
            "rollout.stop: cannot be with the engine sim, which draws no text that a string could end; leave it out"
        )
    check_lengths(config.sim)


def check_lengths(config: SimConfig) -> None:
    """Refuse a file of response lengths that has none.

    Raises:
        ConfigError: it cannot be read, or has something else.
    """
    if config.lengths == "file":
        path = Path(config.lengths_file)
        try:
            numbers = [float(word) for word in path.read_text().split()]
        except (OSError, ValueError) as error:
            raise ConfigError(f"sim.lengths_file: {path} cannot be read ({error}); give one number a line") from error
        if not numbers or not all(0 < number < math.inf for number in numbers):
            raise ConfigError(f"sim.lengths_file: {path} must have one number above 0 a line")
