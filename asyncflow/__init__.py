"""AsyncFlow: asynchronous streaming RL post-training for LLMs, on torch.distributed alone."""

import logging
from importlib import import_module
from typing import Any

logging.getLogger(__name__).addHandler(logging.NullHandler())  # libraries are silent unless a program sets up logging

__version__ = "0.1.0"

# The public entry points. They live in packages above this one, which must not be imported here: load them on first
# use.
_HOMES = {
    "Trainer": "launcher.trainer",
    "LocalEngines": "workers.outside.local_engines",
    "connect": "workers.outside.run_client",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'asyncflow' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
