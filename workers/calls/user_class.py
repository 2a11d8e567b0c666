"""Imports a class that a setting names: in a child, or in a worker. Torch-free until the user's own module is."""

from collections.abc import Collection
from typing import Any

from asyncflow.errors import ConfigError
from workers.calls.user_function import load_function


def load_class(name: str, *, field: str, methods: Collection[str]) -> Any:
    """Import `module:Class`.

    Args:
        name: of the class.
        field: of the configuration that names it.
        methods: that it must have.

    Raises:
        ConfigError: there is no such class, or it lacks a method.
    """
    found = load_function(name, field=field, arguments=None)
    missing = [method for method in methods if not callable(getattr(found, method, None))]
    missing += sorted(getattr(found, "__abstractmethods__", ()))
    if missing or not isinstance(found, type):
        what = f"lacks {' '.join(missing)}" if missing else "is no class"
        raise ConfigError(f"{field}: {name} {what}; docs/outside.md says what it must have")
    return found
