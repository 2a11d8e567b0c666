"""Base of all configuration models: frozen, unknown keys are errors, docstrings under fields describe them."""

import ast
import inspect
import itertools
import textwrap
from collections.abc import Mapping
from functools import cache

from pydantic import BaseModel, ConfigDict


class Settings(BaseModel):
    """A frozen section of the configuration; `launcher.config.load` turns its errors into one line with the field."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


def as_advice(message: str) -> str:
    """Return pydantic's message as what is to be done."""
    return message.replace("Input should be", "it must be").removeprefix("Value error, ")


def description(model: type[BaseModel], field: str) -> str:
    """Return what a field means, in one line: its `description`, or the docstring under it; "" without one."""
    owner = next(kind for kind in model.__mro__ if field in inspect.get_annotations(kind))
    return " ".join((model.model_fields[field].description or _docstrings(owner).get(field, "")).split())


@cache
def _docstrings(kind: type) -> Mapping[str, str]:
    """Return field -> the docstring under it. pydantic's `use_attribute_docstrings` would read all sources whenever the
    classes are made: a third of the time that importing the configuration takes."""
    try:
        (made,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    except (OSError, SyntaxError, TypeError):  # made by a program, or its source is gone
        return {}
    assert isinstance(made, ast.ClassDef)
    return {
        field.target.id: text
        for field, under in itertools.pairwise(made.body)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if isinstance(under, ast.Expr) and isinstance(under.value, ast.Constant)
        if isinstance(text := under.value.value, str)
    }
