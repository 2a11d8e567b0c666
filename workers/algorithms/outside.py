"""An algorithm outside the package, `algorithm.name: module:Class`: its class, and its settings checked by itself.

The launcher imports neither torch nor a user's module: `resolve` has a child do so, which answers with the settings as
the class's `Config` has them. Workers then import the class themselves. Torch-free until the class is imported.
"""

import difflib
import reprlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from asyncflow.errors import ConfigError, UserCodeFailed
from asyncflow.settings import as_advice
from workers.algorithms.config import KlLossConfig, OutsideConfig
from workers.calls.pool import CallPool, Entry
from workers.calls.user_function import Callee, load_function

if TYPE_CHECKING:
    from workers.algorithms.algorithm import Algorithm

FIELD = "algorithm.name"
_TIMEOUT_S = 30.0
_NOT_ITS_OWN = ("name", "reads")
"""Keys of `OutsideConfig` that the class's `Config` does not have."""


def resolve(config: OutsideConfig) -> OutsideConfig:
    """Return the settings with the class's own defaults, checked by its `Config`, in a child.

    Raises:
        ConfigError: there is no such class, it is no algorithm, or refuses a setting.
    """
    # What was given alone: a default of the class's own may be another.
    settings = {"name": config.name, "section": config.model_dump(mode="json", exclude_unset=True)}
    pool = CallPool(
        Entry("workers.algorithms.outside:resolving", settings),
        what=f"{FIELD}: {config.name}",
        limit="the deadline",
        timeout_s=_TIMEOUT_S,
        concurrency=1,
    )
    try:
        pool.until_ready()
        return OutsideConfig.model_validate(pool.call(on="its settings"))
    except UserCodeFailed as error:
        raise ConfigError(str(error)) from error
    finally:
        pool.close()


def resolving(name: str, section: Mapping[str, Any]) -> Callee:
    """Import the class and check its settings, in the child; the function returns them.

    Raises:
        ConfigError: see `resolve`.
    """
    config = own_settings(import_class(name), name, section)
    given = {**config.model_dump(mode="json"), "name": name, "reads": list(config.advantage_inputs)}
    return Callee(lambda: given)


def import_class(name: str) -> "type[Algorithm[Any]]":
    """Import `module:Class`.

    Raises:
        ConfigError: there is none, or it is no algorithm with a `Config`.
    """
    from workers.algorithms.algorithm import Algorithm

    kind = load_function(name, field=FIELD, arguments=None)
    if not (isinstance(kind, type) and issubclass(kind, Algorithm)):
        raise ConfigError(f"{FIELD}: {name} is no algorithm; derive it from workers.algorithms.algorithm.Algorithm")
    return kind


def own_settings(kind: "type[Algorithm[Any]]", name: str, section: Mapping[str, Any]) -> KlLossConfig:
    """Return the settings as the class's own `Config` has them.

    Raises:
        ConfigError: it has no `Config` that a run can use, or refuses a setting.
    """
    model = getattr(kind, "Config", None)
    if not (isinstance(model, type) and issubclass(model, KlLossConfig)):
        raise ConfigError(
            f"{FIELD}: {name} has no Config; give it one, derived from a class of workers.algorithms.config"
        )
    try:
        config = model.model_validate({key: value for key, value in section.items() if key not in _NOT_ITS_OWN})
    except ValidationError as error:
        raise ConfigError(_explained(error, name, list(model.model_fields))) from error
    if config.has_critic or config.kl_in_reward:
        raise ConfigError(
            f"{FIELD}: {name} has a critic, or its KL penalty in the reward; only built-in ones have that"
        )
    return config


def _explained(error: ValidationError, name: str, known: list[str]) -> str:
    detail = error.errors(include_url=False)[0]
    key = ".".join(("algorithm", *map(str, detail["loc"])))
    if detail["type"] == "extra_forbidden":
        near = difflib.get_close_matches(str(detail["loc"][-1]), known, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"{name} has {' '.join(known)}"
        return f"{key}: unknown key; {hint}"
    return f"{key}: {reprlib.repr(detail['input'])} cannot be used; {as_advice(detail['msg'])}"
