"""From settings to a backend. Client libraries are imported only when they are asked for."""

from asyncflow.sealed_store import SealedStore
from tq.backends.backend import Backend, MemoryBackend
from tq.backends.config import BackendConfig, BackendKind

_RUN_ID = "tq/run_id"


def load_backend(config: BackendConfig, unit_name: str, run_id: str) -> Backend:
    """Return what the settings name; leftovers of former incarnations of this unit are deleted.

    Args:
        config: settings.
        unit_name, run_id: all keys of the unit begin with `key_prefix(run_id, unit_name)`.

    Raises:
        ConfigError: the client library is not installed.
        TransportError: the backend does not answer.
    """
    prefix = key_prefix(run_id, unit_name)
    match config.kind:
        case BackendKind.MEMORY:
            return MemoryBackend()
        case BackendKind.REDIS:
            from tq.backends.redis import RedisBackend

            return RedisBackend(config, prefix)
        case BackendKind.MOONCAKE:
            from tq.backends.mooncake import MooncakeBackend

            return MooncakeBackend(config, prefix)


def key_prefix(run_id: str, unit_name: str) -> str:
    """Return what all keys of a unit in a run begin with, whatever its incarnation."""
    return f"asyncflow:{run_id}:{unit_name}"


def agree_on_run_id(store: SealedStore, proposal: str) -> str:
    """Return the id that all units of this run use: the first one proposed."""
    return store.set_first(_RUN_ID, proposal).decode()
