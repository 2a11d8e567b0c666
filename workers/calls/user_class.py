"""A class that a setting names, with settings of its own: pydantic's `Config` inside it. In a child, or in a worker.

Torch-free until the user's own module is imported.
"""

import difflib
import reprlib
from collections.abc import Collection, Mapping
from typing import Any, TypeVar

from pydantic import ValidationError

from asyncflow.errors import ConfigError
from asyncflow.settings import Settings, as_advice
from workers.calls.user_function import load_function

SettingsT = TypeVar("SettingsT", bound=Settings)


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


def own_settings(kind: Any, given: Mapping[str, Any], *, name: str, section: str, base: type[SettingsT]) -> SettingsT:
    """Return the settings as the `Config` of a class has them.

    Args:
        kind: the class.
        given: what the configuration says.
        name: of the class.
        section: of the configuration that holds them.
        base: what the `Config` derives from; `Settings`: it needs none.

    Raises:
        ConfigError: its `Config` cannot be used, or refuses a setting.
    """
    model = getattr(kind, "Config", Settings)
    if not (isinstance(model, type) and issubclass(model, base)):
        raise ConfigError(
            f"{section}: {name} has no Config derived from {base.__module__}.{base.__name__}; give it one"
        )
    try:
        return model.model_validate(given)
    except ValidationError as error:
        raise ConfigError(_explained(error, name, section, list(model.model_fields))) from error


def _explained(error: ValidationError, name: str, section: str, known: list[str]) -> str:
    detail = error.errors(include_url=False)[0]
    key = ".".join((section, *map(str, detail["loc"])))
    if detail["type"] == "extra_forbidden":
        near = difflib.get_close_matches(str(detail["loc"][-1]), known, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"{name} has {' '.join(known) or 'none'}"
        return f"{key}: unknown key; {hint}"
    if detail["type"] == "missing":
        return f"{key}: missing; set it, {name} has no default"
    return f"{key}: {reprlib.repr(detail['input'])} cannot be used; {as_advice(detail['msg'])}"
