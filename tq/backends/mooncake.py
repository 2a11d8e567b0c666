"""Blocks in a Mooncake Store: parts of a block are objects, pinned so that the store never evicts them.

Every unit lends the store a segment of its memory and prefers it for its own blocks. A block that went to another
unit's segment, because this one was full, is lost when that unit dies.
"""

import contextlib
import re
import socket
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from asyncflow.errors import ConfigError, TransportError
from asyncflow.extras import pip_line
from tq.backends.backend import missing
from tq.backends.config import BackendConfig

_PART_BYTES = 2**24
_NOT_FOUND = -704
_CLOSE_TIMEOUT_S = 5.0


class MooncakeBackend:
    """See `Backend`."""

    in_process = False

    def __init__(self, config: BackendConfig, prefix: str) -> None:
        """Join the store, and delete what former incarnations left under `prefix`.

        Raises:
            ConfigError: the Python package is not installed, or lacks a system library.
            TransportError: the master does not answer.
        """
        try:
            from mooncake.store import MooncakeDistributedStore, ReplicateConfig
        except ImportError as error:
            raise ConfigError(f"storage backend mooncake: {pip_line('mooncake')} ({error})") from error
        self.name = f"mooncake at {config.address}"
        self._prefix = prefix
        self._part_bytes = min(_PART_BYTES, config.segment_bytes // 4)
        self._sizes: dict[str, int] = {}
        self._lock = threading.Lock()
        self._closed = False
        _check_port(self.name, config)
        self._store: Any = MooncakeDistributedStore()
        self._check(
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
        """See `Backend`."""
        num_bytes = payload.numel()
        starts = range(0, num_bytes, self._part_bytes)
        with self._lock:
            self._sizes[key] = num_bytes
        try:
            with self._registered(payload):
                for part, start in enumerate(starts):
                    size = min(self._part_bytes, num_bytes - start)
                    code = self._store.put_from(f"{key}:{part}", payload.data_ptr() + start, size, self._placement)
                    self._check(code, f"store of {num_bytes} bytes")
        except TransportError:
            self.delete([key])
            raise

    def load(self, key: str, num_bytes: int) -> Tensor:
        """See `Backend`."""
        with self._lock:
            known = self._sizes.get(key)
        if known != num_bytes:
            raise missing(self.name, key, num_bytes)
        payload = torch.empty(num_bytes, dtype=torch.uint8)
        with self._registered(payload):
            for part, start in enumerate(range(0, num_bytes, self._part_bytes)):
                size = min(self._part_bytes, num_bytes - start)
                code = self._store.get_into(f"{key}:{part}", payload.data_ptr() + start, size)
                if code == _NOT_FOUND or 0 <= code != size:
                    raise missing(self.name, key, num_bytes)
                self._check(code, "load")
        return payload

    def delete(self, keys: Sequence[str]) -> None:
        """See `Backend`. What cannot be deleted stays until the next incarnation deletes it."""
        with self._lock:
            sizes = {key: self._sizes.pop(key, 0) for key in keys}
        parts = [f"{key}:{part}" for key in keys for part in range(-(-sizes[key] // self._part_bytes))]
        if parts:
            failed = [code for code in self._store.batch_remove(parts, True) if code not in (0, _NOT_FOUND)]
            if failed:
                self._check(failed[0], f"delete of {len(failed)} parts")

    def close(self) -> None:
        """See `Backend`."""
        if self._closed:
            return
        self._closed = True
        # A master that died keeps the client busy for a dozen seconds.
        closing = threading.Thread(target=self._leave, name="close-mooncake", daemon=True)
        closing.start()
        closing.join(_CLOSE_TIMEOUT_S)

    def _leave(self) -> None:
        with self._lock:
            keys = list(self._sizes)
        with contextlib.suppress(TransportError):  # then the next incarnation deletes them
            self.delete(keys)
        self._store.close()

    def _delete_all(self) -> None:
        pattern = "^" + re.sub(r"[^A-Za-z0-9:_-]", ".", self._prefix) + ":"
        code = self._store.remove_by_regex(pattern, True)
        if code != _NOT_FOUND:
            self._check(code, "deletion of leftovers")

    @contextlib.contextmanager
    def _registered(self, payload: Tensor) -> Iterator[None]:
        """Let the store's network read or write this memory directly."""
        self._check(self._store.register_buffer(payload.data_ptr(), payload.numel()), "registration of memory")
        try:
            yield
        finally:
            self._store.unregister_buffer(payload.data_ptr())

    def _check(self, code: int, what: str) -> None:
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
