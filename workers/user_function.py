"""Finds a user's function, named `module:function`. Torch-free until the user's own module is imported.

For rewards, users' tasks and the like, which `workers.calls` calls; every message begins with the configuration's
field. Where modules are looked for: `workers.module_search`.
"""

import ast
import importlib
import importlib.util
import inspect
import reprlib
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

from asyncflow.errors import ConfigError, one_line
from workers.module_search import extend_path, hidden_module


def load_function(name: str, *, field: str, arguments: Sequence[str]) -> Callable[..., Any]:
    """Import `module:function`.

    Args:
        name: of the function.
        field: of the configuration that named it.
        arguments: that it is called with, in words.

    Raises:
        ConfigError: there is no such module or function, or importing it fails.
    """
    check_function(name, field=field, arguments=arguments)
    module_name, _, attribute = name.partition(":")
    try:
        value: object = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # a script may end itself: its role would look as if it were done
        raise ConfigError(f"{field}: importing {module_name!r} raised {one_line(error)}") from error
    for part in attribute.split("."):
        value = getattr(value, part, None)
    if not callable(value):
        raise ConfigError(f"{field}: {name!r} is not a function but {reprlib.repr(value)}; name a callable")
    if not _can_be_called(value, len(arguments)):
        raise ConfigError(f"{field}: {name} must take {', '.join(arguments)}")
    return value


def check_function(name: str, *, field: str, arguments: Sequence[str]) -> None:
    """Check that `module:function` exists, without running the module (parent packages are imported).

    Raises:
        ConfigError: malformed name, no such module, a syntax error in it, or it does not define the function, or not
            with so many arguments.
    """
    module_name, colon, attribute = name.partition(":")
    if not (colon and all(part.isidentifier() for part in (*module_name.split("."), *attribute.split(".")))):
        raise ConfigError(f"{field}: {name!r} is not of the form module:function")
    spec = _find(module_name, field)
    if spec.origin is None or not spec.origin.endswith(".py"):
        if module_name in sys.stdlib_module_names and (hidden := hidden_module(module_name)):
            raise ConfigError(f"{field}: {hidden}")
        return
    source = Path(spec.origin)
    try:
        module = ast.parse(source.read_bytes())
    except SyntaxError as error:
        raise ConfigError(f"{field}: {source}:{error.lineno}: {error.msg}") from error
    except (OSError, ValueError) as error:  # not readable; null bytes
        raise ConfigError(f"{field}: {source} cannot be read: {error}; name a Python module") from error
    defined = _top_level_names(module)
    if attribute.split(".")[0] not in defined and not defined & {"*", "__getattr__"}:
        advice = hidden_module(module_name) or "name a function of that module"
        raise ConfigError(f"{field}: {source} defines no {attribute!r}; {advice}")
    functions = [node for node in module.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    last = next((node for node in reversed(functions) if node.name == attribute), None)
    # What a decorator makes of a function may take other arguments.
    if last is not None and not last.decorator_list and not _takes(last.args, len(arguments)):
        raise ConfigError(f"{field}: {source}:{last.lineno}: {attribute} must take {', '.join(arguments)}")


def excerpt(text: str) -> str:
    """Return the beginning of a text, quoted, for a message."""
    return repr(text if len(text) <= 80 else text[:77] + "...")


def _can_be_called(function: Callable[..., Any], count: int) -> bool:
    """Whether it takes so many arguments, as far as it says; functions of C may say nothing."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return True
    try:
        signature.bind(*[""] * count)
    except TypeError:
        return False
    return True


def _takes(arguments: ast.arguments, count: int) -> bool:
    most = len(arguments.posonlyargs) + len(arguments.args)
    least = most - len(arguments.defaults)
    keyword_only = any(default is None for default in arguments.kw_defaults)
    return least <= count and (most >= count or arguments.vararg is not None) and not keyword_only


def _find(module_name: str, field: str) -> ModuleSpec:
    places = extend_path()
    try:
        spec = importlib.util.find_spec(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and not f"{module_name}.".startswith(f"{error.name}."):
            raise ConfigError(f"{field}: importing the package of {module_name!r} raised {one_line(error)}") from error
        spec = None
    except ValueError:  # a module without a spec
        spec = None
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{field}: importing the package of {module_name!r} raised {one_line(error)}") from error
    if spec is None and (hidden := hidden_module(module_name)):
        raise ConfigError(f"{field}: no module {module_name!r}: {hidden}")
    if spec is None:
        where = " or ".join(str(place) for place in places)
        raise ConfigError(
            f"{field}: no module {module_name!r}; install it, or put {module_name.split('.')[0]}.py into {where}"
        )
    return spec


def _top_level_names(module: ast.Module) -> set[str]:
    """Return every name that a module binds outside functions and classes; `*` for a star import."""
    names: set[str] = set()
    pending: list[ast.AST] = [module]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
            continue
        if isinstance(node, ast.Import | ast.ImportFrom):
            names.update((alias.asname or alias.name).partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        pending.extend(ast.iter_child_nodes(node))
    return names
