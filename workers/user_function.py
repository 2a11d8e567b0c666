"""Finds a user's function, named `module:function`. Torch-free until the user's own module is imported.

Used for rewards and for users' tasks; every message begins with the configuration's field. The working directory is
searched last, so that a file there cannot hide an installed module.
"""

import _thread
import ast
import importlib
import importlib.util
import sys
import threading
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

from asyncflow.errors import ConfigError, UserCodeFailed


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
    except Exception as error:
        raise ConfigError(f"{field}: importing {module_name!r} raised {type(error).__name__}: {error}") from error
    for part in attribute.split("."):
        value = getattr(value, part, None)
    if not callable(value):
        raise ConfigError(f"{field}: {name!r} is not a function but {value!r}; name a callable")
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
        return
    source = Path(spec.origin)
    try:
        module = ast.parse(source.read_bytes())
    except SyntaxError as error:
        raise ConfigError(f"{field}: {source}:{error.lineno}: {error.msg}") from error
    defined = _top_level_names(module)
    if attribute.split(".")[0] not in defined and not defined & {"*", "__getattr__"}:
        raise ConfigError(f"{field}: {source} defines no {attribute!r}; name a function of that module")

    for node in module.body:
        if isinstance(node, ast.FunctionDef) and node.name == attribute and not _takes(node.args, len(arguments)):
            raise ConfigError(f"{field}: {source}:{node.lineno}: {attribute} must take {', '.join(arguments)}")


def call(
    function: Callable[..., Any], *arguments: object, what: str, limit: str, timeout_s: float, response: str
) -> object:
    """Call a user's function in a thread of its own, which is left behind when it passes the deadline.

    Args:
        function: the user's.
        arguments: of the call.
        what: begins every message, e.g. `reward.function: my_rewards:score`.
        limit: name of the setting that holds the deadline.
        timeout_s: the deadline (s).
        response: on which it is called.

    Raises:
        UserCodeFailed: it raised, or did not return in time.
    """
    outcome: list[tuple[object, BaseException | None]] = []
    ended = threading.Event()

    def run() -> None:
        try:
            outcome.append((function(*arguments), None))
        except BaseException as error:  # noqa: BLE001  the boundary to a user's code, which may call sys.exit
            outcome.append((None, error))
        ended.set()

    # Not a `Thread`: its start waits, without a deadline, for one that may die first where memory is short.
    _thread.start_new_thread(run, ())
    if not ended.wait(timeout_s):
        raise UserCodeFailed(
            f"{what} took longer than {limit} = {timeout_s:g} s on response {excerpt(response)}; "
            f"make it faster or raise the limit"
        )
    value, error = outcome[0]
    if error is not None:
        raised = f"{type(error).__name__}: {error}"
        raise UserCodeFailed(f"{what} raised {raised} on response {excerpt(response)}") from error
    return value


def excerpt(text: str) -> str:
    """Return the beginning of a text, quoted, for a message."""
    return repr(text if len(text) <= 80 else text[:77] + "...")


def _takes(arguments: ast.arguments, count: int) -> bool:
    most = len(arguments.posonlyargs) + len(arguments.args)
    least = most - len(arguments.defaults)
    keyword_only = any(default is None for default in arguments.kw_defaults)
    return least <= count and (most >= count or arguments.vararg is not None) and not keyword_only


def _find(module_name: str, field: str) -> ModuleSpec:
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)
    try:
        spec = importlib.util.find_spec(module_name)
    except (ImportError, ValueError):
        spec = None
    if spec is None:
        raise ConfigError(
            f"{field}: no module {module_name!r}; install it, or put {module_name.split('.')[0]}.py into {here}"
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
