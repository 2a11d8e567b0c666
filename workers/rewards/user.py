"""A user's reward: any Python callable, named `module:function`. Torch-free until the user's own module is imported."""

import ast
import importlib
import importlib.util
import logging
import math
import sys
import threading
from importlib.machinery import ModuleSpec
from pathlib import Path

from asyncflow.errors import AsyncFlowError, ConfigError
from workers.rewards.base import RewardFunction, Score

logger = logging.getLogger(__name__)


class UserReward:
    """Calls a user's function with a deadline and turns what it returns into a score.

    Every call runs in a thread of its own, which is left behind when it passes the deadline.
    """

    def __init__(self, function: RewardFunction, *, name: str, timeout_s: float) -> None:
        self._function = function
        self._name = name
        self._timeout_s = timeout_s

    def __call__(self, prompt: str, response: str, answer: str, /) -> Score:
        """Score one answer.

        Raises:
            AsyncFlowError: the function raised, hung, or returned something else than a finite number or a Score.
        """
        outcome: list[object] = []

        def call() -> None:
            try:
                outcome.append(self._function(prompt, response, answer))
            except BaseException as error:  # noqa: BLE001  the boundary to a user's code, which may call sys.exit
                outcome.append(error)

        thread = threading.Thread(target=call, name=f"reward {self._name}", daemon=True)
        thread.start()
        thread.join(self._timeout_s)
        if not outcome:
            raise AsyncFlowError(
                f"reward.function: {self._name} took longer than reward.timeout_s = {self._timeout_s:g} s "
                f"on response {_excerpt(response)}; make it faster or raise the limit"
            )
        return self._as_score(outcome[0], response)

    def _as_score(self, value: object, response: str) -> Score:
        if isinstance(value, BaseException):
            raise AsyncFlowError(
                f"reward.function: {self._name} raised {type(value).__name__}: {value} on response {_excerpt(response)}"
            ) from value
        if isinstance(value, Score):
            score = value
        else:
            try:
                number = float(value)  # type: ignore[arg-type]
            except (TypeError, ValueError) as error:
                raise AsyncFlowError(
                    f"reward.function: {self._name} returned {value!r} instead of a number or a Score"
                ) from error
            score = Score(number, number >= 1.0)
        if not math.isfinite(score.reward):
            raise AsyncFlowError(
                f"reward.function: {self._name} returned {score.reward} on response {_excerpt(response)}"
            )
        return score


def load_user_reward(name: str, timeout_s: float) -> UserReward:
    """Import `module:function`.

    Raises:
        ConfigError: there is no such module or function, or importing it fails.
    """
    check_user_reward(name)
    module_name, _, attribute = name.partition(":")
    try:
        value: object = importlib.import_module(module_name)
    except Exception as error:
        raise ConfigError(
            f"reward.function: importing {module_name!r} raised {type(error).__name__}: {error}"
        ) from error
    for part in attribute.split("."):
        value = getattr(value, part, None)
    if not callable(value):
        raise ConfigError(f"reward.function: {name!r} is not a function but {value!r}; name a callable")
    return UserReward(value, name=name, timeout_s=timeout_s)


def check_user_reward(name: str) -> None:
    """Check that `module:function` exists, without running the module (parent packages are imported).

    The working directory is searched last, so that a file there cannot hide an installed module.

    Raises:
        ConfigError: malformed name, no such module, a syntax error in it, or it does not define the function, or not
            with three arguments.
    """
    module_name, colon, attribute = name.partition(":")
    if not (colon and all(part.isidentifier() for part in (*module_name.split("."), *attribute.split(".")))):
        raise ConfigError(f"reward.function: {name!r} is not of the form module:function")
    spec = _find(module_name)
    if spec.origin is None or not spec.origin.endswith(".py"):
        return
    source = Path(spec.origin)
    try:
        module = ast.parse(source.read_bytes())
    except SyntaxError as error:
        raise ConfigError(f"reward.function: {source}:{error.lineno}: {error.msg}") from error
    defined = _top_level_names(module)
    if attribute.split(".")[0] not in defined and not defined & {"*", "__getattr__"}:
        raise ConfigError(f"reward.function: {source} defines no {attribute!r}; name a function of that module")

    for node in module.body:
        if isinstance(node, ast.FunctionDef) and node.name == attribute and not _takes_three(node.args):
            raise ConfigError(
                f"reward.function: {source}:{node.lineno}: {attribute} must take prompt, response, answer"
            )


def _takes_three(arguments: ast.arguments) -> bool:
    most = len(arguments.posonlyargs) + len(arguments.args)
    least = most - len(arguments.defaults)
    keyword_only = any(default is None for default in arguments.kw_defaults)
    return least <= 3 and (most >= 3 or arguments.vararg is not None) and not keyword_only


def _find(module_name: str) -> ModuleSpec:
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)
    try:
        spec = importlib.util.find_spec(module_name)
    except (ImportError, ValueError):
        spec = None
    if spec is None:
        raise ConfigError(
            f"reward.function: no module {module_name!r}; install it, or put {module_name.split('.')[0]}.py into {here}"
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


def _excerpt(text: str) -> str:
    return repr(text if len(text) <= 80 else text[:77] + "...")
