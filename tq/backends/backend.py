"""Where a storage unit keeps the values of its blocks: the interface, this process's memory (the default), and files.

A block is the payload of one put: written once, never changed, read whole, deleted when its last row goes. Keys name
run, unit and the unit's incarnation, so no other process uses them.
"""

import contextlib
import inspect
import re
import socket
import threading
from collections.abc import Iterator, Sequence
from importlib import import_module
from operator import attrgetter
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

import torch
from torch import Tensor

from asyncflow.errors import AsyncFlowError, ConfigError, TransportError, one_line
from asyncflow.extras import pip_line
from asyncflow.sealed_store import SealedStore
from asyncflow.settings import Settings, own_settings
from tq.config import BACKENDS, BackendConfig


class Backend(Protocol):
    """Keeps blocks by key. Thread-safe. A failure is a `TransportError` that names the backend and its address.

    A class that `tq.backend.kind` names is made with two arguments: that section, with its `options`, and the prefix of
    all keys of the unit. It deletes what an earlier life of the unit left under that prefix. `missing` makes the error
    of a block that is not there.
    """

    name: str
    """For people: `memory`, or a kind with its address (never with a password)."""
    in_process: bool
    """Whether blocks stay in this process's memory as they are, so that readers need not `load` them."""

    def store(self, key: str, payload: Tensor) -> None:
        """Keep a block, all of it or nothing; raises TransportError.

        `key` is not in use. `payload` is uint8 [bytes], contiguous, not empty; nobody changes it from now on.
        """

    def load(self, key: str, num_bytes: int) -> Tensor:
        """Return a block, uint8 [num_bytes]; raises TransportError if it is not there, or has another size."""

    def delete(self, keys: Sequence[str]) -> None:
        """Forget blocks; unknown ones are skipped."""

    def close(self) -> None:
        """Delete what this backend still keeps, as far as it answers, and disconnect. Idempotent."""


class MemoryBackend:
    """Keeps the very tensors that came: no copy on the way in, none on the way out."""

    name = "memory"
    in_process = True

    def __init__(self, config: BackendConfig | None = None, prefix: str = "") -> None:
        # Both arguments are unused: every backend is made with them.
        self._blocks: dict[str, Tensor] = {}

    def store(self, key: str, payload: Tensor) -> None:
        self._blocks[key] = payload

    def load(self, key: str, num_bytes: int) -> Tensor:
        payload = self._blocks.get(key)
        if payload is None or payload.numel() != num_bytes:
            raise missing(self.name, key, num_bytes)
        return payload

    def delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            self._blocks.pop(key, None)

    def close(self) -> None:
        self._blocks.clear()


def missing(name: str, key: str, num_bytes: int) -> TransportError:
    """Return the error of a load that found nothing, or a block of another size."""
    return TransportError(
        f"{name}: no block {key} of {num_bytes} bytes; was it evicted, or deleted by another program?"
    )


class FileBackend:
    """Files in a directory that belongs to this unit and goes with it."""

    in_process = False

    def __init__(self, directory: Path) -> None:
        self.name = f"files in {directory}"
        self._directory = directory
        try:
            directory.mkdir(parents=True, exist_ok=True)
            # A former process of the same name may have been killed before it could delete these.
            for left_over in directory.glob("*.block"):
                left_over.unlink(missing_ok=True)
        except OSError as error:
            raise TransportError(f"{self.name}: the directory cannot be created ({error})") from error

    def store(self, key: str, payload: Tensor) -> None:
        path = self._block_path(key)
        try:
            with path.open("wb") as file:
                file.write(payload.numpy().data)
        except OSError as error:
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
            raise TransportError(f"{self.name}: {payload.numel()} bytes cannot be written ({error})") from error

    def load(self, key: str, num_bytes: int) -> Tensor:
        payload = torch.empty(num_bytes, dtype=torch.uint8)
        try:
            with self._block_path(key).open("rb") as file:
                # Also read past the end: a longer file is not this block.
                complete = file.readinto(payload.numpy().data) == num_bytes and not file.read(1)
        except FileNotFoundError:
            complete = False
        except OSError as error:
            raise TransportError(f"{self.name}: block {key} cannot be read ({error})") from error
        if not complete:
            raise missing(self.name, key, num_bytes)
        return payload

    def delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            with contextlib.suppress(OSError):
                self._block_path(key).unlink(missing_ok=True)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            for path in self._directory.glob("*.block"):
                path.unlink(missing_ok=True)
            self._directory.rmdir()

    def _block_path(self, key: str) -> Path:
        return self._directory / f"{key.replace(':', '-').replace('/', '-')}.block"


# From settings to a backend. Client libraries and users' modules are imported only when they are asked for.

_METHODS = ("store", "load", "delete", "close")
_RUN_ID = "tq/run_id"


def load_backend(config: BackendConfig, unit_name: str, run_id: str) -> Backend:
    """Return what the settings name; leftovers of the unit's former incarnations are deleted.

    Raises:
        ConfigError: the client library is not installed, or a user's class cannot be made.
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
    """Import the class that `tq.backend.kind` names; raises ConfigError if it is not a backend."""
    module, _, name = BACKENDS.locate_class(kind).partition(":")
    try:
        found = attrgetter(name)(import_module(module))
    except (Exception, SystemExit) as error:  # it may be a user's module
        raise ConfigError(f"tq.backend.kind: {kind} cannot be imported: {one_line(error)}") from error
    missing = [method for method in _METHODS if not callable(getattr(found, method, None))]
    if missing or not isinstance(found, type):
        what = f"lacks {' '.join(missing)}" if missing else "is not a class"
        raise ConfigError(f"tq.backend.kind: {kind} {what}; see tq.backends.backend.Backend")
    try:
        inspect.signature(found).bind("", "")
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"tq.backend.kind: {kind} must be made with two arguments, section tq.backend and the prefix of its keys"
        ) from error
    return found


def backend_options(config: BackendConfig, kind: Any) -> dict[str, Any]:
    """Return the options of a user's backend, checked by its `Config` if it has one; raises ConfigError."""
    if not hasattr(kind, "Config"):
        return config.options
    return dict(own_settings(kind, config.options, name=config.kind, section="tq.backend.options", base=Settings))


def key_prefix(run_id: str, unit_name: str) -> str:
    """Return the prefix of all keys of a unit in a run, whatever its incarnation."""
    return f"asyncflow:{run_id}:{unit_name}"


def agree_on_run_id(store: SealedStore, proposal: str) -> str:
    """Return the id that all units of this run use: the first one proposed."""
    return store.set_first(_RUN_ID, proposal).decode()


# Blocks in a Mooncake Store: parts of a block are objects, pinned so that the store never evicts them.
#
# Every unit lends the store a segment of its memory and prefers it for its own blocks. A block in another unit's
# segment, because this unit's was full, is lost when that other unit dies.

_MOONCAKE_PART_BYTES = 2**24
_NOT_FOUND = -704
_CLOSE_TIMEOUT_S = 5.0


class MooncakeBackend:
    """Joins the store at construction, and deletes what former incarnations left under `prefix`."""

    in_process = False

    def __init__(self, config: BackendConfig, prefix: str) -> None:
        try:
            from mooncake.store import MooncakeDistributedStore, ReplicateConfig
        except ImportError as error:
            raise ConfigError(f"storage backend mooncake: {pip_line('mooncake')} ({error})") from error
        self.name = f"mooncake at {config.address}"
        self._prefix = prefix
        self._part_bytes = min(_MOONCAKE_PART_BYTES, config.segment_bytes // 4)
        self._sizes: dict[str, int] = {}
        self._lock = threading.Lock()
        self._closed = False
        _check_port(self.name, config)
        self._store: Any = MooncakeDistributedStore()
        self._check_code(
            self._store.setup(
                config.local_host,
                config.metadata,
                config.segment_bytes,
                config.buffer_bytes,
                config.protocol,
                config.devices,
                config.address,
            ),
            "setup",
        )
        self._placement = ReplicateConfig()
        self._placement.with_hard_pin = True
        self._placement.preferred_segment = self._store.get_hostname()
        self._delete_all()

    def store(self, key: str, payload: Tensor) -> None:
        num_bytes = payload.numel()
        starts = range(0, num_bytes, self._part_bytes)
        with self._lock:
            self._sizes[key] = num_bytes
        try:
            with self._registered_memory(payload):
                for part, start in enumerate(starts):
                    size = min(self._part_bytes, num_bytes - start)
                    code = self._store.put_from(f"{key}:{part}", payload.data_ptr() + start, size, self._placement)
                    self._check_code(code, f"store of {num_bytes} bytes")
        except TransportError:
            self.delete([key])
            raise

    def load(self, key: str, num_bytes: int) -> Tensor:
        with self._lock:
            known = self._sizes.get(key)
        if known != num_bytes:
            raise missing(self.name, key, num_bytes)
        payload = torch.empty(num_bytes, dtype=torch.uint8)
        with self._registered_memory(payload):
            for part, start in enumerate(range(0, num_bytes, self._part_bytes)):
                size = min(self._part_bytes, num_bytes - start)
                code = self._store.get_into(f"{key}:{part}", payload.data_ptr() + start, size)
                if code == _NOT_FOUND or 0 <= code != size:
                    raise missing(self.name, key, num_bytes)
                self._check_code(code, "load")
        return payload

    def delete(self, keys: Sequence[str]) -> None:
        with self._lock:
            sizes = {key: self._sizes.pop(key, 0) for key in keys}
        parts = [f"{key}:{part}" for key in keys for part in range(-(-sizes[key] // self._part_bytes))]
        if parts:
            failed = [code for code in self._store.batch_remove(parts, True) if code not in (0, _NOT_FOUND)]
            # What cannot be deleted stays until the next incarnation deletes it.
            if failed:
                self._check_code(failed[0], f"delete of {len(failed)} parts")

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        # A master that died keeps the client busy for a dozen seconds.
        closing = threading.Thread(target=self._leave_store, name="close-mooncake", daemon=True)
        closing.start()
        closing.join(_CLOSE_TIMEOUT_S)

    def _leave_store(self) -> None:
        with self._lock:
            keys = list(self._sizes)
        with contextlib.suppress(TransportError):  # then the next incarnation deletes them
            self.delete(keys)
        self._store.close()

    def _delete_all(self) -> None:
        pattern = "^" + re.sub(r"[^A-Za-z0-9:_-]", ".", self._prefix) + ":"
        code = self._store.remove_by_regex(pattern, True)
        if code != _NOT_FOUND:
            self._check_code(code, "deletion of leftovers")

    @contextlib.contextmanager
    def _registered_memory(self, payload: Tensor) -> Iterator[None]:
        """Let the store's network read or write this memory directly."""
        self._check_code(self._store.register_buffer(payload.data_ptr(), payload.numel()), "registration of memory")
        try:
            yield
        finally:
            self._store.unregister_buffer(payload.data_ptr())

    def _check_code(self, code: int, what: str) -> None:
        if code < 0:
            raise TransportError(f"{self.name}: {what} failed (code {code}); is the master up, and is there room?")


def _check_port(name: str, config: BackendConfig) -> None:
    """Fail at once where no server listens; the client library would try for a minute and a half."""
    host, _, port = config.address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), config.timeout_s).close()
    except ValueError as error:
        raise ConfigError(f"{name}: write the address of the master as HOST:PORT") from error
    except OSError as error:
        raise TransportError(f"{name}: the master does not answer: {error}") from error


# Blocks in a Redis server: one hash per block, whose fields are parts of the payload, so that none reaches Redis's
# limit of 512 MB.

_REDIS_PART_BYTES = 2**26
_DELETE_AT_ONCE = 512


class RedisBackend:
    """The server must not evict (`maxmemory-policy noeviction`, Redis's default).

    Connects at construction, and deletes what former incarnations left under `prefix`.
    """

    in_process = False

    def __init__(self, config: BackendConfig, prefix: str) -> None:
        try:
            import redis
        except ImportError as error:
            raise ConfigError(f"storage backend redis needs redis-py: {pip_line('redis')}") from error
        address = urlsplit(config.address)
        self.name = f"redis at {address.hostname or ''}{f':{address.port}' if address.port else ''}{address.path}"
        self._error: type[Exception] = redis.RedisError
        self._prefix = prefix
        self._closed = False
        self._client: Any = redis.Redis.from_url(
            config.address, socket_timeout=config.timeout_s, socket_connect_timeout=config.timeout_s
        )
        self._delete_all()

    def store(self, key: str, payload: Tensor) -> None:
        data = payload.numpy().data
        try:
            with self._named_errors("store"):
                for start in range(0, payload.numel(), _REDIS_PART_BYTES):
                    self._client.hset(key, str(start // _REDIS_PART_BYTES), data[start : start + _REDIS_PART_BYTES])
        except TransportError:
            self._forget_block(key)
            raise

    def load(self, key: str, num_bytes: int) -> Tensor:
        payload = torch.empty(num_bytes, dtype=torch.uint8)
        out = payload.numpy().data
        for start in range(0, num_bytes, _REDIS_PART_BYTES):
            with self._named_errors("load"):
                data = self._client.hget(key, str(start // _REDIS_PART_BYTES))
            if data is None or len(data) != min(_REDIS_PART_BYTES, num_bytes - start):
                raise missing(self.name, key, num_bytes)
            out[start : start + len(data)] = data
        return payload

    def delete(self, keys: Sequence[str]) -> None:
        with self._named_errors("delete"):
            for start in range(0, len(keys), _DELETE_AT_ONCE):
                self._client.unlink(*keys[start : start + _DELETE_AT_ONCE])

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        with contextlib.suppress(TransportError):  # then the next incarnation deletes them
            self._delete_all()
        self._client.close()

    def _delete_all(self) -> None:
        # Escape what SCAN would take as a wildcard.
        pattern = "".join(f"[{letter}]" if letter in "*?[" else letter for letter in self._prefix) + ":*"
        with self._named_errors("scan"):
            keys = list(self._client.scan_iter(match=pattern, count=1000))
        if keys:
            self.delete(keys)

    def _forget_block(self, key: str) -> None:
        with contextlib.suppress(TransportError):  # then the next incarnation deletes it
            self.delete([key])

    @contextlib.contextmanager
    def _named_errors(self, what: str) -> Iterator[None]:
        try:
            yield
        except self._error as error:
            raise TransportError(f"{self.name}: {what} failed: {error}") from error
