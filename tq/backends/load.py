"""From settings to a backend. Client libraries and users' modules are imported only when they are asked for."""

import inspect
from importlib import import_module
from operator import attrgetter
from typing import Any

from asyncflow.errors import AsyncFlowError, ConfigError, one_line
from asyncflow.sealed_store import SealedStore
from asyncflow.settings import Settings, own_settings
from tq.backends.backend import Backend
from tq.backends.config import BACKENDS, BackendConfig

_METHODS = ("store", "load", "delete", "close")
_RUN_ID = "tq/run_id"


def load_backend(config: BackendConfig, unit_name: str, run_id: str) -> Backend:
    """Return what the settings name; leftovers of former incarnations of this unit are deleted.

    Args:
        config: settings.
        unit_name, run_id: all keys of the unit begin with `key_prefix(run_id, unit_name)`.

    Raises:
        ConfigError: the client library is not installed, or a class of the user's cannot be made.
        TransportError: the backend does not answer.
    """
    try:
        kind = backend_class(config.kind)
        config = config.model_copy(update={"options": backend_options(config, kind)})
        made: Backend = kind(config, key_prefix(run_id, unit_name))
    except AsyncFlowError:
        raise
    except Exception as error:  # it may be a user's class
        raise ConfigError(f"tq.backend.kind: {config.kind} cannot be made: {one_line(error)}") from error
    if missing := [name for name in ("name", "in_process") if not hasattr(made, name)]:
        raise ConfigError(f"tq.backend.kind: {config.kind} has no {missing[0]}; see tq.backends.backend.Backend")
    return made


def backend_class(kind: str) -> Any:
    """Import the class that `tq.backend.kind` names.

    Raises:
        ConfigError: it cannot be imported, or is no backend.
    """
    module, _, name = BACKENDS.locate(kind).partition(":")
    try:
        found = attrgetter(name)(import_module(module))
    except (Exception, SystemExit) as error:  # it may be a user's module
        raise ConfigError(f"tq.backend.kind: {kind} cannot be imported: {one_line(error)}") from error
    missing = [method for method in _METHODS if not callable(getattr(found, method, None))]
    if missing or not isinstance(found, type):
        what = f"lacks {' '.join(missing)}" if missing else "is no class"
        raise ConfigError(f"tq.backend.kind: {kind} {what}; see tq.backends.backend.Backend")
    try:
        inspect.signature(found).bind("", "")
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"tq.backend.kind: {kind} must be made with two arguments, section tq.backend and the prefix of its keys"
        ) from error
    return found


def backend_options(config: BackendConfig, kind: Any) -> dict[str, Any]:
    """Return the options of a user's backend, as its `Config` has them; without one as they are.

    Raises:
        ConfigError: it refuses one.
    """
    if not hasattr(kind, "Config"):
        return config.options
    return dict(own_settings(kind, config.options, name=config.kind, section="tq.backend.options", base=Settings))


def key_prefix(run_id: str, unit_name: str) -> str:
    """Return what all keys of a unit in a run begin with, whatever its incarnation."""
    return f"asyncflow:{run_id}:{unit_name}"


def agree_on_run_id(store: SealedStore, proposal: str) -> str:
    """Return the id that all units of this run use: the first one proposed."""
    return store.set_first(_RUN_ID, proposal).decode()
