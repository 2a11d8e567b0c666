"""Every configuration key with type, default and meaning, read from the settings models. Torch-free, pure.

`asyncflow config` prints it, and `docs/configuration.md` is what `as_markdown` returns. `asyncflow config algorithms`
prints the list at the top of docs/algorithms.md. (tests/unit/test_reference_pages.py compares both.)
"""

import ast
import difflib
import importlib.util
import inspect
import json
import textwrap
import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from asyncflow.errors import ConfigError
from asyncflow.settings import description
from workers.settings.algorithms import NAMES
from workers.settings.run import RunConfig

# Of so few algorithms it is said that they lack a key, instead of who has it.
_MOST_OTHERS = 2
_BOUNDS = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}


@dataclass(frozen=True)
class Key:
    """One key.

    Attributes:
        path: e.g. `actor.lr`; `tasks[].name` is a key of each entry of a list.
        type: for people, with its bounds.
        default: as YAML; "required" if there is none.
        text: its meaning.
        variant: the values of `algorithm.name` that have it, or `all but` those that do not; "": all.
    """

    path: str
    type: str
    default: str
    text: str
    variant: str = ""


def all_keys() -> list[Key]:
    """Return the keys of the whole configuration, in the order of the models."""
    return list(_keys_of(RunConfig, ""))


def key_paths() -> list[str]:
    """Return all sections and keys, dotted, each section before its keys."""
    paths = [key.path.split(".") for key in all_keys()]
    return list(dict.fromkeys(".".join(path[:depth]) for path in paths for depth in range(1, len(path) + 1)))


def keys_of(section: str) -> list[Key]:
    """Return the keys of one section, e.g. `actor` or `actor.megatron`, or one key; ConfigError: there is none."""
    keys = all_keys()
    found = [key for key in keys if key.path == section or key.path.startswith((f"{section}.", f"{section}[]."))]
    if not found:
        known = {key.path for key in keys} | {key.path.rpartition(".")[0] for key in keys if "." in key.path}
        near = difflib.get_close_matches(section, sorted(known), n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"sections: {' '.join(RunConfig.model_fields)}"
        raise ConfigError(f"config: there is no section or key {section!r}; {hint}")
    return found


def as_text(keys: Sequence[Key]) -> str:
    """Return keys for a terminal: a line with type and default, then the meaning."""
    lines = []
    for key in keys:
        only = f"  (algorithm.name: {key.variant})" if key.variant else ""
        lines += [f"{key.path}: {key.type} = {key.default}{only}", f"    {key.text}"]
    return "\n".join(lines)


def as_markdown(keys: Sequence[Key]) -> str:
    """Return the page: one table per section."""
    parts = [
        "# Configuration",
        "Every key, as `asyncflow config` prints it. `--set actor.lr=1e-5` sets one. Made from the models by "
        "`asyncflow config --markdown`.",
    ]
    sections: dict[str, list[Key]] = {}
    for key in keys:
        sections.setdefault(key.path.rpartition(".")[0], []).append(key)
    for section, members in sections.items():
        parts.append(f"## {f'`{section}`' if section else 'Top level'}")
        rows = ["| key | type | default | |", "|---|---|---|---|"]
        for key in members:
            name = f"`{key.path.rpartition('.')[2]}`" + (f" ({key.variant})" if key.variant else "")
            rows.append(f"| {name} | {_cell(key.type)} | `{key.default}` | {_cell(key.text)} |")
        parts.append("\n".join(rows))
    return "\n\n".join(parts) + "\n"


def algorithms_as_markdown() -> str:
    """Return what docs/algorithms.md says of each built-in algorithm: the docstring of its class."""
    items = []
    for name, place in NAMES.built_in.items():
        module, _, kind = place.partition(":")
        # Read as source: an import would import torch.
        spec = importlib.util.find_spec(module)
        assert spec is not None and spec.origin is not None
        classes = [node for node in ast.parse(Path(spec.origin).read_text()).body if isinstance(node, ast.ClassDef)]
        (text,) = (ast.get_docstring(node) or "" for node in classes if node.name == kind)
        item = f"- **`{name}`** {' '.join(text.split())}"
        items.append(textwrap.fill(item, 120, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False))
    return "\n".join(items) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _keys_of(model: type[BaseModel], prefix: str, variant: str = "") -> Iterator[Key]:
    for name, field in model.model_fields.items():
        path = f"{prefix}{name}"
        models = _models_in(field.annotation)
        if not models:
            yield Key(path, _type_text(field), _default(field), description(model, name), variant)
        elif len(models) == 1:
            yield from _keys_of(
                models[0], f"{path}[]." if get_origin(field.annotation) is tuple else f"{path}.", variant
            )
        else:
            yield from _keys_of_union(models, f"{path}.")


def _keys_of_union(models: Sequence[type[BaseModel]], prefix: str) -> Iterator[Key]:
    """Yield the keys that all models share, each once, then those of single models."""
    names = [str(model.model_fields["name"].default) for model in models]
    yield Key(f"{prefix}name", " | ".join(names), json.dumps(names[0]), "Which one: docs/algorithms.md.")
    each = [list(_keys_of_member(model, prefix)) for model in models]
    shared = [key for key in each[0] if all(key in keys for keys in each)]
    yield from shared
    owners: dict[Key, list[str]] = {}
    for name, keys in zip(names, each, strict=True):
        for key in keys:
            owners.setdefault(key, []).append(name)
    own = [replace(key, variant=_variant(names, of)) for key, of in owners.items() if key not in shared]
    yield from sorted(own, key=lambda key: [one.path for one in own].index(key.path))


def _keys_of_member(model: type[BaseModel], prefix: str) -> Iterator[Key]:
    """Yield the keys of one model of a union, without its name and what it refuses."""
    left_out = {"name", *getattr(model, "refused", ())}
    for key in _keys_of(model, prefix):
        if key.path.removeprefix(prefix).partition(".")[0] not in left_out:
            yield key


def _variant(names: Sequence[str], owners: Sequence[str]) -> str:
    others = [name for name in names if name not in owners]
    return " ".join(owners) if len(others) > _MOST_OTHERS else f"all but {' '.join(others)}"


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    if inspect.isclass(annotation) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for part in get_args(annotation) for model in _models_in(part)]


def _type_text(field: FieldInfo) -> str:
    bounds = [
        f"{sign} {getattr(rule, name)}"
        for rule in field.metadata
        for name, sign in _BOUNDS.items()
        if getattr(rule, name, None) is not None
    ]
    return " ".join([_type_name(field.annotation), *(["(" + ", ".join(bounds) + ")"] if bounds else [])])


def _type_name(annotation: Any) -> str:
    if annotation is type(None):
        return "null"
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _type_name(arguments[0])
    if origin in (Union, types.UnionType):
        return " | ".join(_type_name(part) for part in arguments)
    if origin is Literal:
        return " | ".join(str(part) for part in arguments)
    if origin is not None:
        inside = ", ".join(_type_name(part) for part in arguments if part is not ...)
        return f"{'list' if origin is tuple else origin.__name__}[{inside}]"
    if inspect.isclass(annotation) and issubclass(annotation, Enum):
        return " | ".join(str(member.value) for member in annotation)
    return str(getattr(annotation, "__name__", annotation))


def _default(field: FieldInfo) -> str:
    value = field.get_default(call_default_factory=True)
    if value is PydanticUndefined:
        return "required"
    return json.dumps(value, default=lambda one: dict(one) if hasattr(one, "keys") else str(one))
