"""Finds a user's function, named `module:function`. Torch-free until the user's own module is imported.

For rewards, users' tasks and the like, which `workers.calls` calls; every message begins with the configuration's
field. Where modules are looked for: `workers.calls.module_search`.
"""

import importlib
import importlib.util
import inspect
import reprlib
from collections.abc import Callable, Sequence
from typing import Any

from asyncflow.errors import ConfigError, one_line
from workers.calls.callee import Callee
from workers.calls.module_search import extend_path, hidden_module

_ABSENT = object()


def load_function(name: str, *, field: str, arguments: Sequence[str]) -> Callable[..., Any]:
    """Import `module:function`. In a child process, since a user's module may do anything; see `importable`.

    Args:
        name: of the function.
        field: of the configuration that named it.
        arguments: that it is called with, in words.

    Raises:
        ConfigError: there is no such module or function, importing it fails, or it does not take these arguments.
    """
    check_function(name, field=field)
    module_name, _, attribute = name.partition(":")
    try:
        module = importlib.import_module(module_name)
    except SyntaxError as error:
        raise ConfigError(f"{field}: {error.filename or module_name}:{error.lineno or 1}: {error.msg}") from error
    except (Exception, SystemExit) as error:  # a script may end itself: its role would look as if it were done
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
    if not _can_be_called(value, len(arguments)):
        raise ConfigError(f"{field}: {name} must take {', '.join(arguments)}")
    return value


def check_function(name: str, *, field: str) -> None:
    """Check that there is such a module, without running it (parent packages are imported).

    Raises:
        ConfigError: malformed name, or no such module.
    """
    module_name, colon, attribute = name.partition(":")
    if not (colon and all(part.isidentifier() for part in (*module_name.split("."), *attribute.split(".")))):
        raise ConfigError(f"{field}: {name!r} is not of the form module:function")
    _find(module_name, field)


def importable(name: str, field: str, arguments: Sequence[str]) -> Callee:
    """Import a function, in the child that says whether a run could: an entry of `workers.calls`.

    Raises:
        ConfigError: see `load_function`.
    """
    return Callee(load_function(name, field=field, arguments=arguments))


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


def _find(module_name: str, field: str) -> None:
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
