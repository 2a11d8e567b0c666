"""The user's function that has servers take new weights, as the engine's child calls it. Torch-free."""

from pathlib import Path

from workers.calls.callee import Callee
from workers.calls.pool import CallPool, Entry
from workers.engines.openai_config import UPDATE_ARGUMENTS, OpenAIConfig
from workers.user_function import load_function


def open_updates(config: OpenAIConfig) -> CallPool:
    """Return what calls `openai.update`, one update after the other.

    Raises:
        ConfigError: it cannot be imported.
    """
    pool = CallPool(
        Entry("workers.engines.openai_update:update", {"name": config.update}),
        what=f"openai.update: {config.update}",
        limit="openai.update_timeout_s",
        timeout_s=config.update_timeout_s,
        concurrency=1,
    )
    try:
        pool.until_ready()
    except BaseException:
        pool.close()
        raise
    return pool


def update(name: str) -> Callee:
    """Import the function; it gets a `Path`, and what it returns is nothing to us."""
    function = load_function(name, field="openai.update", arguments=UPDATE_ARGUMENTS)
    return Callee(function, takes=lambda texts: [Path(texts[0])], gives=lambda value, texts: None)
