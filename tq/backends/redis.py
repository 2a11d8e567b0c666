"""Blocks in a Redis server: one hash per block, its fields are parts of the payload, so none reaches Redis' 512 MB."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any
from urllib.parse import urlsplit

import torch
from torch import Tensor

from asyncflow.errors import ConfigError, TransportError
from asyncflow.extras import pip_line
from tq.backends.backend import missing
from tq.backends.config import BackendConfig

_PART_BYTES = 2**26
_DELETE_AT_ONCE = 512


class RedisBackend:
    """See `Backend`. The server must not evict (`maxmemory-policy noeviction`, Redis' default)."""

    in_process = False

    def __init__(self, config: BackendConfig, prefix: str) -> None:
        """Connect, and delete what former incarnations left under `prefix`.

        Raises:
            ConfigError: redis-py is not installed.
            TransportError: the server does not answer.
        """
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
        """See `Backend`."""
        data = payload.numpy().data
        try:
            with self._named("store"):
                for start in range(0, payload.numel(), _PART_BYTES):
                    self._client.hset(key, str(start // _PART_BYTES), data[start : start + _PART_BYTES])
        except TransportError:
            self._forget(key)
            raise

    def load(self, key: str, num_bytes: int) -> Tensor:
        """See `Backend`."""
        payload = torch.empty(num_bytes, dtype=torch.uint8)
        out = payload.numpy().data
        for start in range(0, num_bytes, _PART_BYTES):
            with self._named("load"):
                data = self._client.hget(key, str(start // _PART_BYTES))
            if data is None or len(data) != min(_PART_BYTES, num_bytes - start):
                raise missing(self.name, key, num_bytes)
            out[start : start + len(data)] = data
        return payload

    def delete(self, keys: Sequence[str]) -> None:
        """See `Backend`."""
        with self._named("delete"):
            for start in range(0, len(keys), _DELETE_AT_ONCE):
                self._client.unlink(*keys[start : start + _DELETE_AT_ONCE])

    def close(self) -> None:
        """See `Backend`."""
        if self._closed:
            return
        self._closed = True
        with contextlib.suppress(TransportError):  # then the next incarnation deletes them
            self._delete_all()
        self._client.close()

    def _delete_all(self) -> None:
        pattern = "".join(f"[{letter}]" if letter in "*?[" else letter for letter in self._prefix) + ":*"
        with self._named("scan"):
            keys = list(self._client.scan_iter(match=pattern, count=1000))
        if keys:
            self.delete(keys)

    def _forget(self, key: str) -> None:
        with contextlib.suppress(TransportError):  # then the next incarnation deletes it
            self.delete([key])

    @contextlib.contextmanager
    def _named(self, what: str) -> Iterator[None]:
        try:
            yield
        except self._error as error:
            raise TransportError(f"{self.name}: {what} failed: {error}") from error
