"""Whether rollouts of the user's own can be made, as configured."""

import logging
import shutil
from pathlib import Path

from asyncflow.errors import ConfigError
from workers.calls.pool import CallPool, Entry
from workers.calls.user_function import check_function
from workers.config import RunConfig
from workers.rollout.config import FUNCTIONS
from workers.tasks.dataflow import TRAINERS

logger = logging.getLogger(__name__)


def check_own_rollouts(config: RunConfig) -> None:
    """Refuse settings that cannot be with rollouts of the user's own.

    Raises:
        ConfigError: the first one.
    """
    if not config.rollout.is_own:
        return
    what = next(name for name in ("function", "agent", "agent_command") if getattr(config.rollout, name))
    if config.deterministic:
        raise ConfigError(
            f"deterministic: true cannot be with rollout.{what}, whose calls are drawn as they come; set it to false"
        )
    for role in TRAINERS.intersection(config.roles):
        if getattr(config, role).max_tokens_per_micro_batch or config.actor.engine == "sim":
            continue
        raise ConfigError(
            f"{role}.max_tokens_per_micro_batch: is 0, but a rollout of rollout.{what} has any number of samples; "
            f"set it to the tokens that fit a forward-backward"
        )
    if "reward" in config.roles:
        raise ConfigError(
            f"roles: 'reward' cannot be with rollout.{what}, whose rollouts are scored where they are made"
        )


def check_rollout_code(config: RunConfig) -> None:
    """Import the user's functions in a child, as the run will; warn of what the renderer cannot do.

    Raises:
        ConfigError: one cannot be used, the program does not exist, or the model's chat template ignores tools.
    """
    own = config.rollout
    if not own.is_own:
        return
    for field, name in (("rollout.function", own.function), ("rollout.agent", own.agent)):
        if name is not None and name not in FUNCTIONS.built_in:
            check_function(name, field=field)
    for name in own.tools:
        check_function(name, field="rollout.tools")
    if own.agent_command and shutil.which(own.agent_command[0]) is None:
        raise ConfigError(
            f"rollout.agent_command: there is no program {own.agent_command[0]!r}; name one that can be run"
        )
    settings = {
        "model_dir": str(Path(config.model.path)),
        "renderer": config.model.renderer,
        "template_time": config.data.template_time,
        "function": own.function,
        "agent": own.agent,
        "tools": list(own.tools),
        "models": {name: served.model_dump() for name, served in own.models.items()},
    }
    pool = CallPool(
        Entry("workers.agents.preflight:usable", settings), what="rollout", limit="", timeout_s=60.0, concurrency=1
    )
    try:
        pool.until_ready()
        for what in pool.call(on="the renderer"):
            then = "each turn begins a new sample" if what.startswith("bridge") else "the policy's calls stay text"
            logger.warning("model.renderer: %s cannot %s: %s", config.model.renderer or "the template", what, then)
    finally:
        pool.close()
