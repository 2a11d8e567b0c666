"""A caller's Python objects as a run's files: what `asyncflow.Trainer` takes as functions and rows. Torch-free.

    functions -> asyncflow_inputs.py   the source of what notebook cells or a script define, with all that it uses;
                                       what a module defines is imported from there
    rows      -> data.jsonl            an object per line

Nothing is pickled: workers read the module as any other, a resumed run too, and a person may look at it. What has no
such form is refused by name, before anything starts.
"""

import ast
import builtins
import dis
import inspect
import json
import linecache
import logging
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path, PurePath
from types import CodeType, ModuleType
from typing import Any

from asyncflow.errors import ConfigError

MODULE = "asyncflow_inputs"
DATA_FILE = "data.jsonl"
_SAME_AS_SCRIPT = "__main__"
_Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
_IN_A_MODULE = "put it into a module (a .py file) and import it from there"


def ship_functions(functions: Mapping[str, Callable[..., Any]]) -> tuple[str, dict[str, str]]:
    """Return the source of a module that has these functions or classes, and for each argument `module:name`.

    Args:
        functions: argument of the caller -> what was given.

    Raises:
        ConfigError: one cannot be shipped; names the argument, the function, and what of it stands in the way.
    """
    module = _Module()
    names = {argument: f"{MODULE}:{module.add_callable(argument, given)}" for argument, given in functions.items()}
    return module.source(), names


def write_rows(rows: Any, file: Path) -> None:
    """Write the argument `data`, rows of a list, a `datasets.Dataset` or a data frame, as JSON lines.

    Raises:
        ConfigError: it is none of these, has no rows, or one has a value that JSON has not; names row and field.
    """
    if hasattr(rows, "to_dict") and hasattr(rows, "columns"):  # pandas; a Dataset's iterator yields dicts by itself
        rows = rows.to_dict("records")
    if isinstance(rows, str | bytes | Mapping) or not isinstance(rows, Iterable):
        raise ConfigError(f"data: a {type(rows).__name__} is no list of rows; give dicts, one per prompt")
    count = 0
    with file.open("w", encoding="utf-8") as out:
        for count, row in enumerate(rows, start=1):
            if not isinstance(row, Mapping):
                raise ConfigError(f"data: row {count} is a {type(row).__name__}; give dicts, one per prompt")
            out.write(_line_of(row, count) + "\n")
    if not count:
        raise ConfigError("data: has no rows; give at least one")


def _line_of(row: Mapping[str, Any], number: int) -> str:
    try:
        return json.dumps(dict(row), ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError):
        for field, value in row.items():
            try:
                json.dumps({field: value}, allow_nan=False)
            except (TypeError, ValueError) as error:
                raise ConfigError(
                    f"data: row {number}, field {field!r}: {error}; give texts, numbers, lists and dicts"
                ) from error
        raise


class _Module:
    """The module while it is made: definitions by name, each after what it uses."""

    def __init__(self) -> None:
        self._future = False
        self._paths: dict[str, None] = {}
        self._imports: dict[str, None] = {}
        self._definitions: dict[str, str] = {}
        self._objects: dict[str, Any] = {}

    def source(self) -> str:
        """Return its text."""
        lines = [f'"""Made by asyncflow.Trainer from what it was given: see {__name__}."""', ""]
        lines += ["from __future__ import annotations", ""] * self._future
        if self._paths:
            lines += ["import sys", "", *(f"sys.path.append({path!r})" for path in self._paths), ""]
        return "\n".join([*lines, *self._imports, "", *self._definitions.values()])

    def add_callable(self, argument: str, given: Callable[..., Any]) -> str:
        """Add what the caller gave; returns its name in the module."""
        if not callable(given):
            raise ConfigError(f"{argument}: {given!r} is no function; give one, or its name in overrides")
        name = getattr(given, "__name__", "")
        if not name.isidentifier() or not (inspect.isfunction(given) or inspect.isclass(given)):
            what = "a lambda" if name == "<lambda>" else f"a {type(given).__name__}"
            raise ConfigError(f"{argument}: {what} has no source of its own; give a function that `def` makes")
        self._add(name, given, (argument, name))
        return name

    def _add(self, name: str, value: Any, path: tuple[str, ...]) -> None:
        """Have `name` be `value`; `path` says for whom, in errors."""
        if name in self._objects:
            if self._objects[name] is not value:
                raise ConfigError(f"{_shown(path)}: two different objects are called {name!r}; rename one of them")
            return
        self._objects[name] = value
        imported = self._import_line(name, value)
        if imported is not None:
            self._imports[imported] = None
        elif inspect.isfunction(value) or inspect.isclass(value):
            self._define(name, value, path)
        else:
            self._definitions[name] = f"{name} = {_expression(value, path)}\n"
            if isinstance(value, re.Pattern | logging.Logger | PurePath):
                self._imports[f"import {type(value).__module__.partition('.')[0]}"] = None

    def _import_line(self, name: str, value: Any) -> str | None:
        """Return how another process imports it; None: no module but the caller's program defines it."""
        if isinstance(value, ModuleType):
            return f"import {value.__name__} as {name}" if self._is_importable(value.__name__) else None
        home = getattr(value, "__module__", None)
        called = getattr(value, "__qualname__", None) or getattr(value, "_name", None)
        if not isinstance(home, str) or not isinstance(called, str) or home == _SAME_AS_SCRIPT:
            return None
        if getattr(sys.modules.get(home), called, None) is not value or not self._is_importable(home):
            return None
        return f"from {home} import {called} as {name}"

    def _is_importable(self, module: str) -> bool:
        top = module.partition(".")[0]
        spec = getattr(sys.modules.get(top), "__spec__", None)
        if spec is None:
            return False
        places = [*(spec.submodule_search_locations or ())] or ([spec.origin] if spec.has_location else [])
        if places:  # else it is built in
            root = str(Path(places[0]).absolute().parent)
            if not any(root == str(Path(known).absolute()) for known in _interpreters_path()):
                self._paths[root] = None
        return True

    def _define(self, name: str, value: Any, path: tuple[str, ...]) -> None:
        node, text = _definition(value, path)
        if node.name != name:
            raise ConfigError(f"{_shown(path)}: {name!r} is another name of {node.name!r}; use that one")
        self._future |= _stringized(value)
        known = _namespace(value)
        for used in sorted(_names_used(node)):
            if used in known and used != name:
                self._add(used, known[used], (*path, used))
        self._definitions[name] = text + "\n"


def _interpreters_path() -> list[str]:
    """Where workers look, too: not beside a script, which `python -P` leaves out."""
    script = {str(Path(sys.argv[0]).absolute().parent), "", str(Path.cwd())}
    return [place for place in sys.path if place not in script]


def _definition(value: Any, path: tuple[str, ...]) -> tuple[_Definition, str]:
    """Return the statement that defines a function or class of the caller's program, and its text."""
    for file, line in _places_of(value):
        lines = linecache.getlines(file)
        try:
            tree = ast.parse("".join(lines))
        except SyntaxError:
            continue
        found = [
            node
            for node in ast.walk(tree)
            if isinstance(node, _Definition)
            and node.name == value.__name__
            and isinstance(node, ast.ClassDef) == inspect.isclass(value)
            and (line is None or _first_line(node) <= line <= (node.end_lineno or 0))
        ]
        if found:  # of several around a line the innermost; of several in a file the last, which is the one that counts
            node = found[-1] if line is None else min(found, key=lambda each: (each.end_lineno or 0) - each.lineno)
            return node, textwrap.dedent("".join(lines[_first_line(node) - 1 : node.end_lineno])).rstrip() + "\n"
    raise ConfigError(f"{_shown(path)}: its source is not to be had; {_IN_A_MODULE}")


def _first_line(node: _Definition) -> int:
    return min([node.lineno, *(each.lineno for each in node.decorator_list)])


def _places_of(value: Any) -> Iterator[tuple[str, int | None]]:
    """Yield the files, with a line inside of it where that is known, in which a function or class may be defined."""
    for code in _codes_of(value):
        yield code.co_filename, code.co_firstlineno
    if inspect.isclass(value):  # one without methods of its own knows only its module; a notebook's is its cells
        module = sys.modules[value.__module__]
        yield getattr(module, "__file__", None) or "", None
        yield from ((file, None) for file in reversed(linecache.cache) if "ipykernel" in file or file.startswith("<ip"))


def _codes_of(value: Any) -> Iterator[CodeType]:
    """Yield the code of a function, or of a class's own methods."""
    if inspect.isfunction(value):
        yield inspect.unwrap(value).__code__
    elif inspect.isclass(value):
        for member in vars(value).values():
            function = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
            if inspect.isfunction(function):
                yield inspect.unwrap(function).__code__


def _namespace(value: Any) -> dict[str, Any]:
    """Return what names mean inside of a function or class; builtins are everywhere."""
    if inspect.isclass(value):
        return {**vars(sys.modules[value.__module__])}
    function = inspect.unwrap(value)
    closed = inspect.getclosurevars(function).nonlocals
    return {name: each for name, each in {**function.__globals__, **closed}.items() if not hasattr(builtins, name)}


def _names_used(node: ast.stmt) -> set[str]:
    """Return the names that a definition looks up outside of itself: in its code, decorators, defaults and bases."""
    pending = [compile(ast.Module([node], []), "<asyncflow>", "exec")]
    names: set[str] = set()
    while pending:
        code = pending.pop()
        names |= {each.argval for each in dis.get_instructions(code) if each.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
        pending += [each for each in code.co_consts if isinstance(each, CodeType)]
    return names


def _stringized(value: Any) -> bool:
    import __future__

    return any(code.co_flags & __future__.annotations.compiler_flag for code in _codes_of(value))


def _expression(value: Any, path: tuple[str, ...]) -> str:
    """Return Python that makes a constant."""
    if isinstance(value, re.Pattern):
        return f"re.compile({value.pattern!r}, {value.flags})"
    if isinstance(value, logging.Logger):
        return f"logging.getLogger({value.name!r})"
    if isinstance(value, PurePath):
        return f"pathlib.{type(value).__name__}({str(value)!r})"
    try:
        text = repr(value)
        same = ast.literal_eval(text)
        if type(same) is type(value) and repr(same) == text:
            return text
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        pass
    if isinstance(value, set | frozenset):
        return f"{type(value).__name__}({_expression(sorted(value, key=repr), path)})"
    raise ConfigError(
        f"{_shown(path)}: a {type(value).__name__} of this program, which the run's processes do not have; make it "
        f"inside of {path[1]}, or {_IN_A_MODULE}"
    )


def _shown(path: tuple[str, ...]) -> str:
    """Return `reward: score uses table`."""
    return f"{path[0]}: {' uses '.join(path[1:])}"
