"""From settings to a backend. Client libraries and users' modules are imported only when they are asked for."""

from importlib import import_module

from asyncflow.errors import AsyncFlowError, ConfigError, one_line
from asyncflow.sealed_store import SealedStore
from tq.backends.backend import Backend
from tq.backends.config import BACKENDS, BackendConfig

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
    module, _, name = BACKENDS.locate(config.kind).partition(":")
    try:
        made: Backend = getattr(import_module(module), name)(config, key_prefix(run_id, unit_name))
    except AsyncFlowError:
        raise
    except Exception as error:  # it may be a user's class
        raise ConfigError(f"tq.backend.kind: {config.kind} cannot be made: {one_line(error)}") from error
    return made


def key_prefix(run_id: str, unit_name: str) -> str:
    """Return what all keys of a unit in a run begin with, whatever its incarnation."""
    return f"asyncflow:{run_id}:{unit_name}"


def agree_on_run_id(store: SealedStore, proposal: str) -> str:
    """Return the id that all units of this run use: the first one proposed."""
    return store.set_first(_RUN_ID, proposal).decode()
