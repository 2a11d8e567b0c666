"""Turns a caller's Python objects, functions and rows given to `asyncflow.Trainer`, into files of a run. Torch-free.

    functions -> asyncflow_inputs.py   the source of what notebook cells or a script define, with everything it uses;
                                       what a module defines is imported from that module
    rows      -> data.jsonl            one object per line

Nothing is pickled: workers import the module like any other, so does a resumed run, and a person can read it. An object
without such a form is refused by name before anything starts. So is one that the program changed after its definition
(its file, a default, a class, a name), because workers would rebuild the original from the source.
"""

import __future__

import ast
import builtins
import dis
import functools
import inspect
import json
import linecache
import logging
import os
import re
import site
import sys
import sysconfig
from abc import ABCMeta
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib.machinery import PathFinder
from pathlib import Path, PurePath
from types import CodeType, FunctionType, ModuleType
from typing import Any, Generic

from asyncflow.errors import ConfigError

MODULE = "asyncflow_inputs"
DATA_FILE = "data.jsonl"
_SAME_AS_SCRIPT = "__main__"
_Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
_IN_A_MODULE = "put it into a module (a .py file) and import it from there"
_AGAIN = "run the definition again"
_OF_EVERY_MODULE = {"__name__", "__builtins__", "__annotations__"}
"""Every module has its own, and a class body looks up `__name__` implicitly."""
_OF_THE_PROGRAM = {"__file__", "__cached__", "__doc__", "__loader__", "__package__", "__path__", "__spec__"}
_MISSING = object()
_CHAIN = (ast.Name, ast.Attribute, ast.Subscript, ast.Constant, ast.UnaryOp, ast.unaryop, ast.expr_context)


def ship_functions(functions: Mapping[str, Callable[..., Any]]) -> tuple[str, dict[str, str]]:
    """Return the source of a module that defines these functions or classes, and `module:name` for each argument.

    Args:
        functions: the caller's argument name -> the object that was given.

    Raises:
        ConfigError: one cannot be shipped; names the argument, the function and the obstacle.
    """
    module = _Module()
    names = {argument: f"{MODULE}:{module.add_callable(argument, given)}" for argument, given in functions.items()}
    return module.render_source(), names


def write_rows(rows: Any, file: Path) -> None:
    """Write the argument `data` (a list of rows, a `datasets.Dataset` or a data frame) as JSON lines.

    Raises:
        ConfigError: it is none of these, has no rows, or a value has no JSON form; names row and field.
    """
    if hasattr(rows, "to_dicts"):  # polars
        rows = rows.to_dicts()
    elif hasattr(rows, "to_dict") and hasattr(rows, "columns"):  # pandas; a Dataset's iterator yields dicts by itself
        rows = rows.to_dict("records")
    if isinstance(rows, str | bytes | Mapping) or not isinstance(rows, Iterable):
        raise ConfigError(f"data: a {type(rows).__name__} is not a list of rows; give dicts, one per prompt")
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
        return _as_json(dict(row))
    except (TypeError, ValueError):
        # Find the field to blame: the error itself does not name it.
        for field, value in row.items():
            if type(value).__name__ in ("NAType", "NaTType") or (isinstance(value, float) and value != value):
                raise ConfigError(
                    f"data: field {field!r} of row {number} is empty (NaN); fill it or drop the row"
                ) from None
            try:
                _as_json({field: value})
            except UnicodeEncodeError as error:
                raise ConfigError(
                    f"data: row {number}, field {field!r}: {error.object[error.start : error.end]!a} is half of a "
                    f"character (a lone surrogate); decode the text as UTF-8, or drop the row"
                ) from error
            except (TypeError, ValueError) as error:
                raise ConfigError(
                    f"data: row {number}, field {field!r}: {error}; give texts, numbers, lists and dicts"
                ) from error
        raise


def _as_json(row: dict[str, Any]) -> str:
    text = json.dumps(row, ensure_ascii=False, allow_nan=False)
    # Raises for lone surrogates, which json.dumps accepts.
    text.encode()
    return text


class _Module:
    """The module under construction: definitions by name, each after those that it uses."""

    def __init__(self) -> None:
        self._future = False
        self._paths: dict[str, None] = {}
        self._submodules: dict[str, None] = {}
        self._imports: dict[str, None] = {}
        self._definitions: dict[str, str] = {}
        self._objects: dict[str, Any] = {}

    def render_source(self) -> str:
        lines = [f'"""Made by asyncflow.Trainer from what it was given: see {__name__}."""', ""]
        lines += ["from __future__ import annotations", ""] * self._future
        if self._paths:
            # Appended, not inserted: a user's modules never shadow installed ones.
            lines += ["import sys", "", *(f"sys.path.append({path!r})" for path in self._paths), ""]
        return "\n".join([*lines, *self._submodules, *self._imports, "", *self._definitions.values()])

    def add_callable(self, argument: str, given: Callable[..., Any]) -> str:
        """Add an object that the caller gave; return its name in the module."""
        if not callable(given):
            raise ConfigError(f"{argument}: {given!r} is not a function; give one, or its name in overrides")
        name = getattr(given, "__name__", "")
        if not name.isidentifier() or not (inspect.isfunction(given) or inspect.isclass(given)):
            what = "a lambda" if name == "<lambda>" else f"a {type(given).__name__}"
            raise ConfigError(f"{argument}: {what} has no source of its own; give a function defined with `def`")
        self._add_object(name, given, (argument, name))
        return name

    def _add_object(self, name: str, value: Any, path: tuple[str, ...]) -> None:
        """Bind `name` to `value`; `path` tells errors through which functions `value` was reached."""
        if name in self._objects:
            if self._objects[name] is not value:
                raise ConfigError(f"{_shown(path)}: two different objects are called {name!r}; rename one of them")
            return
        # Before its definition, so that recursive functions end here.
        self._objects[name] = value
        imported = self._import_line(name, value, path)
        if imported is not None:
            self._imports[imported] = None
        elif inspect.isfunction(value) or inspect.isclass(value):
            self._add_definition(name, value, path)
        else:
            self._definitions[name] = f"{name} = {_expression(value, path)}\n"
            if isinstance(value, re.Pattern | logging.Logger | PurePath):
                self._imports[f"import {type(value).__module__.partition('.')[0]}"] = None

    def _import_line(self, name: str, value: Any, path: tuple[str, ...]) -> str | None:
        """Return how another process imports the object; None: only the caller's program defines it."""
        if isinstance(value, ModuleType):
            return f"import {value.__name__} as {name}" if self._is_importable(value.__name__, path) else None
        home = getattr(value, "__module__", None)
        called = getattr(value, "__qualname__", None) or getattr(value, "_name", None)
        if not isinstance(home, str) or not isinstance(called, str) or home == _SAME_AS_SCRIPT:
            return None
        if getattr(sys.modules.get(home), called, None) is not value or not self._is_importable(home, path):
            return None
        return f"from {home} import {called} as {name}"

    def _is_importable(self, module: str, path: tuple[str, ...]) -> bool:
        top = module.partition(".")[0]
        spec = getattr(sys.modules.get(top), "__spec__", None)
        if spec is None:
            return False
        if spec.has_location:
            places = [*(spec.submodule_search_locations or [spec.origin])][:1]
        else:  # a namespace package of several directories; built-in modules have none
            places = [*(spec.submodule_search_locations or ())]
        known = _workers_path()
        for root in (Path(place).absolute().parent for place in places):
            # Already on the workers' path, or added by an earlier object.
            if root.resolve() in known or str(root) in self._paths:
                continue
            other = PathFinder.find_spec(top, [str(place) for place in known])
            if other is not None and other.has_location:  # workers look there first
                raise ConfigError(
                    f"{_shown(path)}: the module {top!r} of {root} has the name of {other.origin}, which the run's "
                    f"processes would import; rename it, or install it by `pip install -e`"
                )
            self._paths[str(root)] = None
        return True

    def _add_definition(self, name: str, value: Any, path: tuple[str, ...]) -> None:
        node, text = _definition(value, path)
        if node.name != name:
            raise ConfigError(f"{_shown(path)}: {name!r} is another name of {node.name!r}; use that one")
        self._future |= _stringized(value)
        known = _namespace(value)
        _check_as_defined(node, value, known, path)
        used_at_once, used = _names_used(node, path, stringized=_stringized(value))
        for each in sorted(used):
            if each in _OF_THE_PROGRAM and each in known:
                raise ConfigError(f"{_shown((*path, each))}, which differs in the run's processes; write its value")
            if each in _OF_EVERY_MODULE:
                continue
            if each in known:
                self._add_object(each, known[each], (*path, each))
                if isinstance(known[each], ModuleType):
                    self._submodules |= dict.fromkeys(_submodules_used(node, each, known[each]))
            elif each in used_at_once and not hasattr(builtins, each):
                raise ConfigError(
                    f"{_shown((*path, each))}, which its definition needs and which no longer exists; {_IN_A_MODULE}"
                )
        self._definitions[name] = text + "\n"


def _workers_path() -> list[Path]:
    # Not sys.path: directories beside a script, or added by the program, exist in this process alone.
    paths = sysconfig.get_paths()
    known = [paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    known += [f"{known[0]}/lib-dynload"]
    known += [site.getusersitepackages()] * bool(site.ENABLE_USER_SITE)
    known += filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    return [Path(place).resolve() for place in known]


def _definition(value: Any, path: tuple[str, ...]) -> tuple[_Definition, str]:
    """Return the statement that defines a function or class of the caller's program, and its source text."""
    changed = f"{_shown(path)}: its source has changed since it was defined; {_AGAIN}"
    is_class = inspect.isclass(value)
    for file, line in _places_of(value):
        # A file may have changed since it was imported.
        linecache.checkcache(file)
        lines = linecache.getlines(file)
        try:
            tree = ast.parse("".join(lines))
            codes = _codes_in("".join(lines), _stringized(value))
        except (SyntaxError, ValueError):
            continue
        found = [
            node
            for node in ast.walk(tree)
            if isinstance(node, _Definition)
            and node.name == (value if is_class else inspect.unwrap(value)).__name__
            and isinstance(node, ast.ClassDef) == is_class
            and (line is None or _first_line(node) <= line <= (node.end_lineno or 0))
        ]
        if found:  # several around a line: the innermost counts; several in a file: the last one
            node = found[-1] if line is None else min(found, key=lambda each: (each.end_lineno or 0) - each.lineno)
            if not all(
                _same_code(live, codes.get((each.name, _first_line(each)))) for each, live in _live(node, value)
            ):
                raise ConfigError(changed)
            text = "".join(lines[_first_line(node) - 1 : node.end_lineno]).rstrip() + "\n"
            # Keeps the source of an indented definition (a nested function) valid at the top level.
            return node, "if True:\n" * bool(node.col_offset) + text
        if lines and not is_class:
            raise ConfigError(changed)
    raise ConfigError(f"{_shown(path)}: its source is not available; {_IN_A_MODULE}")


def _codes_in(text: str, stringized: bool) -> dict[tuple[str, int], CodeType]:
    """Return the code objects of everything that a text defines, by name and first line."""
    flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT | (__future__.annotations.compiler_flag if stringized else 0)
    pending = [compile(text, "<asyncflow>", "exec", flags, dont_inherit=True)]
    codes: dict[tuple[str, int], CodeType] = {}
    while pending:
        code = pending.pop()
        codes[code.co_name, code.co_firstlineno] = code
        pending += [each for each in code.co_consts if isinstance(each, CodeType)]
    return codes


def _same_code(one: CodeType, other: CodeType | None) -> bool:
    """Whether both do the same, regardless of their line numbers."""

    def unplaced(code: CodeType) -> CodeType:
        consts = tuple(unplaced(each) if isinstance(each, CodeType) else each for each in code.co_consts)
        return code.replace(co_firstlineno=1, co_linetable=b"", co_consts=consts)

    return other is not None and unplaced(one) == unplaced(other)


def _live(node: _Definition, value: Any) -> Iterator[tuple[_Definition, CodeType]]:
    """Yield each function's definition with the code object that the program holds for it."""
    if not isinstance(node, ast.ClassDef):
        yield node, inspect.unwrap(value).__code__
        return
    for each, function in _methods(node, value):
        yield each, function.__code__


def _methods(node: ast.ClassDef, value: type) -> Iterator[tuple[ast.FunctionDef | ast.AsyncFunctionDef, FunctionType]]:
    """Yield the methods that a class body defines, each with the function that the class holds under that name."""
    times = _names_made(node)
    for each in node.body:
        if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef) and times[each.name] == 1:
            function = _function_of(vars(value).get(_mangled(each.name, node)))
            if function is None or (each.decorator_list and function.__code__.co_name != each.name):
                continue  # a function that a decorator made
            yield each, function


def _function_of(member: Any) -> FunctionType | None:
    if isinstance(member, property):
        member = member.fget
    elif isinstance(member, functools.cached_property):
        member = member.func
    elif isinstance(member, staticmethod | classmethod):
        member = member.__func__
    if isinstance(member, FunctionType | functools._lru_cache_wrapper):
        member = inspect.unwrap(member)
    return member if isinstance(member, FunctionType) else None


def _mangled(name: str, node: ast.ClassDef) -> str:
    owner = node.name.lstrip("_")
    return f"_{owner}{name}" if name.startswith("__") and not name.endswith("__") and owner else name


def _names_made(node: ast.ClassDef) -> Counter[str]:
    """Return the names that a class body binds, and at how many places."""
    names: Counter[str] = Counter()
    pending: list[ast.AST] = [*node.body]
    while pending:
        each = pending.pop()
        if isinstance(each, _Definition):
            names[each.name] += 1
        elif isinstance(each, ast.Import | ast.ImportFrom):
            names.update(alias.asname or alias.name.partition(".")[0] for alias in each.names)
        elif isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store):
            names[each.id] += 1
        elif not isinstance(each, ast.Lambda):
            pending += [
                child
                for child in ast.iter_child_nodes(each)
                if not (isinstance(each, ast.AnnAssign) and not each.value)
            ]
    return names


def _check_as_defined(node: _Definition, value: Any, known: dict[str, Any], path: tuple[str, ...]) -> None:
    """Refuse a function or class that the program changed since its definition: workers rebuild it from the source.

    Adds defaults that were local names of the enclosing function to `known`.
    """
    if isinstance(node, ast.ClassDef):
        for method, function in _methods(node, value):
            _check_function(method, function, {**known, **vars(value)}, (*path, method.name))
        _check_attributes(node, value, known, path)
        return
    function = inspect.unwrap(value)
    for name, default in _defaults(node, function):
        if isinstance(name, ast.Name) and name.id not in known and not hasattr(builtins, name.id):
            known[name.id] = default
    _check_function(node, function, known, path)
    if "__class__" in function.__code__.co_freevars:
        raise ConfigError(f"{_shown(path)}: a method that uses its class (super()); give the class, or a function")
    if value is not function:
        _check_no_attributes(value, path)


def _check_function(
    node: ast.FunctionDef | ast.AsyncFunctionDef,
    function: FunctionType,
    known: Mapping[str, Any],
    path: tuple[str, ...],
) -> None:
    for source, default in _defaults(node, function):
        if _differs(source, default, known):
            raise ConfigError(
                f"{_shown(path)}: the default {ast.unparse(source)!r} was {_short(default)} at its definition and "
                f"has changed since; {_AGAIN}"
            )
    _check_no_attributes(function, path)


def _check_no_attributes(function: FunctionType, path: tuple[str, ...]) -> None:
    for name in vars(function):
        if not _is_dunder(name):
            raise ConfigError(
                f"{_shown(path)}: it has an attribute of its own, {name!r}, which its source does not set; use "
                f"a global name instead"
            )


def _check_attributes(node: ast.ClassDef, value: type, known: Mapping[str, Any], path: tuple[str, ...]) -> None:
    if type(value) not in (type, ABCMeta) or (issubclass(value, tuple) and hasattr(value, "_fields")):
        return  # the bodies of enumerations and named tuples differ from what their classes hold
    times = _names_made(node)
    others = len(node.decorator_list) - ("__dataclass_fields__" in vars(value))
    for each in node.body:
        target = each.targets[0] if isinstance(each, ast.Assign) else getattr(each, "target", None)
        source = getattr(each, "value", None)
        if not isinstance(target, ast.Name) or source is None or times[target.id] != 1:
            continue
        live = vars(value).get(_mangled(target.id, node), _MISSING)
        beside = {name: each for name, each in vars(value).items() if name != target.id}
        if _is_dunder(target.id) or inspect.isdatadescriptor(live) or (live is _MISSING and others > 0):
            continue
        if _differs(source, live, {**known, **beside}):
            raise ConfigError(
                f"{_shown(path)}: {target.id!r} is no longer what its line in the class says; write its value there"
            )
    if others > 0 or any(
        "__init_subclass__" in vars(base) for base in value.__mro__[1:] if base not in (object, Generic)
    ):
        return  # decorators and __init_subclass__ may add anything, and will do so again in the worker
    made = {_mangled(name, node) for name in times}
    for name, live in vars(value).items():
        if name not in made and not _is_dunder(name) and name != "_abc_impl" and not inspect.isdatadescriptor(live):
            raise ConfigError(f"{_shown(path)}: {name!r} was set after the class was defined; write it into the class")


def _defaults(node: ast.FunctionDef | ast.AsyncFunctionDef, function: FunctionType) -> Iterator[tuple[ast.expr, Any]]:
    """Yield each default's source expression and its current value."""
    positional, by_name = function.__defaults__ or (), function.__kwdefaults__ or {}
    if len(positional) != len(node.args.defaults):
        positional = (_MISSING,) * len(node.args.defaults)
    yield from zip(node.args.defaults, positional, strict=True)
    for argument, source in zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True):
        if source is not None:
            yield source, by_name.get(argument.arg, _MISSING)


def _differs(source: ast.expr, live: Any, known: Mapping[str, Any]) -> bool:
    """Whether a literal, or a chain such as `POINTS["right"]`, no longer gives `live`; nothing else is evaluated."""
    try:
        again = ast.literal_eval(source)
    except (ValueError, TypeError):
        if not all(isinstance(each, _CHAIN) for each in ast.walk(source)):
            return False
        try:
            code = compile(ast.Expression(source), "<asyncflow>", "eval")
            again = eval(code, {**vars(builtins), **known})  # noqa: S307  the user's own line, without calls
        except Exception:  # noqa: BLE001  user objects may raise anything; the value is gone
            return True
    if again is live:
        return False
    if type(again) is not type(live):
        return True
    if type(live).__module__ != "builtins" and (again == live) is not True:
        return True
    # By repr: `==` would equate 1, 1.0 and True inside containers. A set's repr has no fixed order.
    return repr(again) != repr(live) and not (isinstance(live, set | frozenset) and again == live)


def _is_dunder(name: str) -> bool:
    return name.startswith("__") and name.endswith("__")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"a {type(value).__name__}"


def _first_line(node: _Definition) -> int:
    return min([node.lineno, *(each.lineno for each in node.decorator_list)])


def _places_of(value: Any) -> Iterator[tuple[str, int | None]]:
    """Yield the files in which a function or class may be defined, each with a line inside the definition if known."""
    for code in _codes_of(value):
        yield code.co_filename, code.co_firstlineno
    if inspect.isclass(value):  # without methods it knows only its module; a notebook's module is all its cells
        module = sys.modules[value.__module__]
        yield getattr(module, "__file__", None) or "", None
        yield from (
            (file, None) for file in [*reversed(linecache.cache)] if "ipykernel" in file or file.startswith("<ip")
        )


def _codes_of(value: Any) -> Iterator[CodeType]:
    if inspect.isfunction(value):
        yield inspect.unwrap(value).__code__
    elif inspect.isclass(value):
        yield from (function.__code__ for function in map(_function_of, vars(value).values()) if function is not None)


def _namespace(value: Any) -> dict[str, Any]:
    """Return what free names mean inside a function or class; unchanged builtins are left out."""
    if inspect.isclass(value):
        known = {**vars(sys.modules[value.__module__])}
        functions = [each for each in map(_function_of, vars(value).values()) if each is not None]
        functions = [each for each in functions if each.__qualname__.startswith(f"{value.__qualname__}.")]
    else:
        functions = [inspect.unwrap(value)]
        known = {**functions[0].__globals__}
    for function in functions:
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            if name != "__class__":
                try:
                    known[name] = cell.cell_contents
                except ValueError:  # not set yet
                    known.pop(name, None)
    return {name: each for name, each in known.items() if getattr(builtins, name, _MISSING) is not each}


def _names_used(node: ast.stmt, path: tuple[str, ...], *, stringized: bool) -> tuple[set[str], set[str]]:
    """Return the outer names used when it is made (decorators, defaults, bases, annotations), and all of them."""
    alone = ast.Module([node], [])
    flags = __future__.annotations.compiler_flag if stringized else 0
    # Compiled alone, a definition looks every outer name up as a global.
    try:
        pending = [compile(alone, "<asyncflow>", "exec", dont_inherit=True)]
    except SyntaxError as error:
        raise ConfigError(f"{_shown(path)}: {error.msg}, outside its context; {_IN_A_MODULE}") from error
    at_once = _looked_up(compile(alone, "<asyncflow>", "exec", flags, dont_inherit=True))
    names: set[str] = set()
    while pending:
        code = pending.pop()
        names |= _looked_up(code)
        pending += [each for each in code.co_consts if isinstance(each, CodeType)]
    return at_once, names


def _looked_up(code: CodeType) -> set[str]:
    return {each.argval for each in dis.get_instructions(code) if each.opname in ("LOAD_GLOBAL", "LOAD_NAME")}


def _submodules_used(node: ast.stmt, name: str, module: ModuleType) -> Iterator[str]:
    """Yield the imports that make `name.a.b` resolve in a worker."""
    # `import name` alone does not import submodules; this program may have imported them elsewhere.
    for each in ast.walk(node):
        first, *parts = ast.unparse(each).split(".") if isinstance(each, ast.Attribute) else [""]
        if first != name:
            continue
        found, called = module, module.__name__
        for part in parts:
            called = f"{called}.{part}"
            if called not in sys.modules or getattr(found, part, None) is not sys.modules[called]:
                break
            found = sys.modules[called]
            yield f"import {called}"


def _stringized(value: Any) -> bool:
    return any(code.co_flags & __future__.annotations.compiler_flag for code in _codes_of(value))


def _expression(value: Any, path: tuple[str, ...]) -> str:
    """Return a Python expression that makes a constant."""
    if isinstance(value, re.Pattern):
        return f"re.compile({value.pattern!r}, {value.flags})"
    if isinstance(value, logging.Logger):
        return f"logging.getLogger({value.name!r})"
    if isinstance(value, PurePath):
        return f"pathlib.{type(value).__name__}({str(value)!r})"
    if type(value) is float and (value != value or value in (float("inf"), -float("inf"))):
        return f"float({str(value)!r})"
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
    """Return, for example, `reward: score uses table`."""
    return f"{path[0]}: {' uses '.join(path[1:])}"
