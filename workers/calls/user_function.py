"""Finds a user's function by its name `module:function`. Torch-free until the user's own module is imported.

Used for all user code that `workers.calls` runs; messages begin with the setting. Python searches for user modules
after all installed packages: first beside the configuration, then in the working directory. So neither directory can
hide an installed module.
"""

import importlib
import importlib.util
import inspect
import os
import reprlib
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asyncflow.errors import ConfigError, one_line

_ABSENT = object()
_RECIPES = "configs"  # our package whose modules recipes name. Users may have a folder of that name, found first.
_VARIABLE = "ASYNCFLOW_CODE_DIRECTORY"  # tells children where the configuration is


def _as_they_are(arguments: Sequence[Any]) -> Sequence[Any]:
    return arguments


def _as_it_is(value: Any, arguments: Sequence[Any]) -> Any:
    return value


@dataclass(frozen=True)
class Callee:
    """What a child calls: a user's function with its conversions. Returned, in the child, by a
    `workers.calls.pool.Entry`."""

    function: Callable[..., Any]  # the user's; `def` or `async def`
    takes: Callable[[Sequence[Any]], Sequence[Any]] = _as_they_are  # what the pool sent -> the function's arguments
    # (result, what the pool sent) -> a JSON value; raises `UserCodeFailed`, with the whole message, if the result is
    # unusable
    gives: Callable[[Any, Sequence[Any]], Any] = _as_it_is


def load_function(name: str, *, field: str, arguments: Sequence[str] | None) -> Callable[..., Any]:
    """Import `module:function`, usually in a child process, since importing a user's module may do anything.

    Args:
        field: the setting that names it.
        arguments: what it is called with, in words; None: the caller checks its parameters.

    Raises ConfigError if there is no such module or function, importing it fails, or it does not take these arguments.
    """
    check_function(name, field=field)
    module_name, _, attribute = name.partition(":")
    try:
        module = importlib.import_module(module_name)
    except SyntaxError as error:
        raise ConfigError(f"{field}: {error.filename or module_name}:{error.lineno or 1}: {error.msg}") from error
    except (Exception, SystemExit) as error:  # a script may call sys.exit: the role would seem to have finished
        raise ConfigError(f"{field}: importing {module_name!r} raised {one_line(error)}") from error
    value: object = module
    for part in attribute.split("."):
        value = getattr(value, part, _ABSENT)
        if value is _ABSENT:
            source = getattr(module, "__file__", None) or module_name
            advice = hidden_module(module_name) or "name a function of that module"
            raise ConfigError(f"{field}: {source} defines no {attribute!r}; {advice}")
    if not callable(value):
        raise ConfigError(f"{field}: {name!r} is not a function but {reprlib.repr(value)}; name a callable")
    if arguments is not None:
        _check_parameters(value, arguments, f"{field}: {name}")
    return value


def is_async(function: Callable[..., Any]) -> bool:
    """Return whether it is an `async def`, or an object whose `__call__` is one."""
    return any(map(inspect.iscoroutinefunction, (function, type(function).__call__)))


def check_function(name: str, *, field: str) -> None:
    """Raise ConfigError for a malformed name or a missing module, without running the module (but its parent
    packages)."""
    module_name, colon, attribute = name.partition(":")
    if not (colon and all(part.isidentifier() for part in (*module_name.split("."), *attribute.split(".")))):
        raise ConfigError(f"{field}: {name!r} is not of the form module:function")
    _find(module_name, field)


def importable(name: str, field: str, arguments: Sequence[str]) -> Callee:
    """Entry of `workers.calls`: import a function in a child, to find out whether a run could."""
    return Callee(load_function(name, field=field, arguments=arguments))


def excerpt(text: str) -> str:
    """Quote the beginning of a text, for a message."""
    return repr(text if len(text) <= 80 else text[:77] + "...")


def search_beside(code_directory: str | None) -> None:
    """Make this process and its children also search `code_directory` for user modules."""
    os.environ[_VARIABLE] = code_directory or ""


def extend_path() -> list[Path]:
    """Append the user's directories to `sys.path`; return them in order."""
    named = os.environ.get(_VARIABLE)
    beside = [Path(each) for each in named.split(os.pathsep)] if named else []
    places = list(dict.fromkeys([*beside, Path.cwd()]))
    sys.path.extend(str(place) for place in places if str(place) not in sys.path)
    return places


def hidden_module(module_name: str) -> str:
    """Return a message if an installed module hides a user's file or directory of the same name, else ""."""
    top = module_name.partition(".")[0]
    spec = importlib.util.find_spec(top)
    if spec is None:
        return ""
    found = [*(spec.submodule_search_locations or ()), *([spec.origin] if spec.origin else [])]
    for own in (place / name for place in extend_path() for name in (top, f"{top}.py")):
        if own.exists() and not any(Path(place) == own or own in Path(place).parents for place in found):
            return (
                f"{own} is hidden by the installed {top!r} ({found[0] if found else 'built in'}), which comes first; "
                f"rename yours, say to my_{top}"
            )
    return ""


def _check_parameters(function: Callable[..., Any], arguments: Sequence[str], what: str) -> None:
    """Refuse a function that cannot take these arguments, or names them in another order."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # C functions may not tell
        return
    try:
        signature.bind(*[""] * len(arguments))
    except TypeError as error:
        raise ConfigError(f"{what} must take {', '.join(arguments)}") from error
    names = [each.name for each in signature.parameters.values()][: len(arguments)]
    for name, wanted in zip(names, arguments, strict=False):
        if name != wanted and name in arguments:
            raise ConfigError(
                f"{what} has parameter {name!r} where {wanted!r} is given; take {', '.join(arguments)}, in this order"
            )


def _add_recipes() -> None:
    """Let `configs.X` find our module even if a user's `configs` folder comes first."""
    package = importlib.import_module(_RECIPES)
    ours = str(Path(__file__).resolve().parents[2] / _RECIPES)
    if ours not in package.__path__:
        package.__path__ = [*package.__path__, ours]


def _find(module_name: str, field: str) -> None:
    places = extend_path()
    try:
        if module_name.startswith(f"{_RECIPES}."):
            _add_recipes()
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


def load_class(name: str, *, field: str, methods: Collection[str]) -> Any:
    """Import `module:Class`, named by the setting `field`; raises ConfigError if it is missing or lacks one of
    `methods`."""
    found = load_function(name, field=field, arguments=None)
    missing = [method for method in methods if not callable(getattr(found, method, None))]
    missing += sorted(getattr(found, "__abstractmethods__", ()))
    if missing or not isinstance(found, type):
        what = f"lacks {' '.join(missing)}" if missing else "is not a class"
        raise ConfigError(f"{field}: {name} {what}; docs/outside.md says what it must have")
    return found
