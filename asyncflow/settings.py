"""Base of all configuration models: frozen, unknown keys are errors, docstrings under fields describe them.

A class that a setting names may have its own model, `Config`, which checks the options that the class is made with.
"""

import ast
import difflib
import inspect
import itertools
import reprlib
import textwrap
from collections.abc import Mapping, Sequence
from enum import Enum
from functools import cache
from types import MappingProxyType
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import InitErrorDetails, PydanticCustomError

from asyncflow.errors import ConfigError


class Settings(BaseModel):
    """A frozen section of the configuration; the launcher turns its errors into one line with the field."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    def refusal(self, key: str, why: str) -> ValidationError:
        """Return the error of a rule that compares settings: a validator raises it, and it names one of them."""
        given = getattr(self, key)
        return self.refusal_of((key,), given.value if isinstance(given, Enum) else given, why)

    @classmethod
    def refusal_of(cls, keys: tuple[str, ...], given: object, why: str) -> ValidationError:
        """Return the same of a value that this section was given under `keys`, one inside the other."""
        wrong = InitErrorDetails(type=PydanticCustomError("value_error", why), loc=keys, input=given)
        return ValidationError.from_exception_data(cls.__name__, [wrong])


SettingsT = TypeVar("SettingsT", bound=Settings)


def as_advice(message: str) -> str:
    return message.replace("Input should be", "it must be").removeprefix("Value error, ")


def description(model: type[BaseModel], field: str) -> str:
    """Return a field's meaning in one line: its `description` or the docstring under it; "" without either."""
    owner = next(kind for kind in model.__mro__ if field in inspect.get_annotations(kind))
    return " ".join((model.model_fields[field].description or _docstrings(owner).get(field, "")).split())


def own_settings(kind: Any, given: Mapping[str, Any], *, name: str, section: str, base: type[SettingsT]) -> SettingsT:
    """Return the settings that a class's `Config` makes of what is given.

    Args:
        section: of the configuration that holds the settings.
        base: class that `Config` must derive from; `Settings`: the class needs no `Config`.

    Raises:
        ConfigError: the `Config` cannot be used, or refuses a setting.
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


def own_options(
    kind: Any,
    given: Mapping[str, Any],
    *,
    name: str,
    section: str,
    first: Sequence[object] = (),
    named: Mapping[str, object] = MappingProxyType({}),
) -> dict[str, Any]:
    """Return the keyword options that a class is made with, as its `Config` gives them; without one, as they are.

    Args:
        section: of the configuration that holds the options.
        first, named: further arguments that the class is made with.

    Raises:
        ConfigError: its `Config` refuses an option, or its signature does not take them.
    """
    options = dict(given)
    if hasattr(kind, "Config"):
        options = dict(own_settings(kind, given, name=name, section=section, base=Settings))
    try:
        inspect.signature(kind).bind(*first, **named, **options)
    except TypeError as error:
        shown = " ".join(options) or "no options"
        raise ConfigError(f"{section}: {name} cannot be made with {shown}: {error}; correct the options") from error
    except ValueError:
        pass  # a class written in C, without a signature
    return options


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


@cache
def _docstrings(kind: type) -> Mapping[str, str]:
    """Return field -> the docstring under it."""
    # pydantic's `use_attribute_docstrings` would read all sources whenever the classes are made: a third of the time
    # that importing the configuration takes.
    try:
        (made,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    except (OSError, SyntaxError, TypeError):  # generated at run time, or the source is missing
        return {}
    assert isinstance(made, ast.ClassDef)
    return {
        field.target.id: text
        for field, under in itertools.pairwise(made.body)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if isinstance(under, ast.Expr) and isinstance(under.value, ast.Constant)
        if isinstance(text := under.value.value, str)
    }
