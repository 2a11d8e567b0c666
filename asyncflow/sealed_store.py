"""The job store: its server, and clients that trust only values that the job wrote under the key they read."""

# PyTorch's own server would listen on every interface; `serve_store` takes one address. Still, a stranger who reaches
# the port can list, read, write and delete keys. So every value begins with an HMAC, by a key derived from the job's
# secret, over the whole key (with all prefixes) and the value. Nothing can be forged, changed, or moved to another key
# or another job. Names of keys are not secret.
#
# A seal cannot tell whether a genuine value is the newest of its key, or whether a key was deleted. Keys that are
# written once have no older value; most are, since they contain a lineage, an attempt or a number. Imports torch.

import logging
import secrets
import socket
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from asyncflow.errors import SealBroken
from asyncflow.job import endpoint, family_of
from asyncflow.mac import MAC_BYTES, Mac

logger = logging.getLogger(__name__)

_VALUE, _ITEM = b"value", b"item"  # so that a queue's item cannot pass for a value
_NONCE_BYTES = 8


class SealedStore:
    """One client of the store. As with any client, calls of several threads stall each other.

    Not a `torch.distributed.Store`, so that no process group is built on it by mistake; see `GlooStore`. The wrapped
    store must have no prefix of its own, which the seals would not cover.
    """

    def __init__(self, store: dist.Store, secret: bytes, *, prefix: str = "") -> None:
        self._store = store
        self._secret = secret
        self._mac = Mac(secret, "store")
        self._prefix = prefix
        self._told: set[str] = set()

    def with_prefix(self, prefix: str) -> "SealedStore":
        return SealedStore(self._store, self._secret, prefix=f"{self._prefix}{prefix}/")

    @property
    def timeout(self) -> timedelta:
        timeout: timedelta = self._store.timeout  # type: ignore[attr-defined]  # the stub lacks it
        return timeout

    def set_timeout(self, timeout: timedelta) -> None:
        self._store.set_timeout(timeout)

    def set(self, key: str, value: bytes | str) -> None:
        self._store.set(self._prefix + key, self._seal_value(_VALUE, key, _bytes(value)))  # type: ignore[arg-type]  # the stub lacks bytes

    def put(self, key: str, value: bytes | str) -> None:
        """Write, and return once the server has the value, so that a reader who is told of the key finds it."""
        # PyTorch's client does not wait for an answer to `set`, so a call on another connection could overtake it.
        self.set(key, value)
        self.check([key])

    def get(self, key: str) -> bytes:
        """Return the value, once there is one.

        Raises SealBroken if the job did not write it, DistError if none came in time or the store is gone.
        """
        return self._unseal_value(_VALUE, key, self._store.get(self._prefix + key))

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Like `get`, in one round trip."""
        values = self._store.multi_get([self._prefix + key for key in keys])
        return [self._unseal_value(_VALUE, key, value) for key, value in zip(keys, values, strict=True)]

    def get_existing(self, keys: Sequence[str]) -> dict[str, bytes]:
        """Return the values that exist and were written by the job; others are logged once per key.

        For values that are only displayed, or that are sent repeatedly.
        """
        there = keys if self.check(keys) else [key for key in keys if self.check([key])]
        values = self._store.multi_get([self._prefix + key for key in there]) if there else []
        found = {}
        for key, value in zip(there, values, strict=True):
            try:
                found[key] = self._unseal_value(_VALUE, key, value)
            except SealBroken as error:
                if key not in self._told:
                    logger.error("%s; it is ignored", error)
                self._told.add(key)
        return found

    def set_first(self, key: str, value: bytes | str) -> bytes:
        """Write, unless there is a value already; returns the current value."""
        sealed = self._seal_value(_VALUE, key, _bytes(value))
        return self._unseal_value(_VALUE, key, self._compare_and_set(key, b"", sealed))

    def add(self, key: str, number: int) -> int:
        """Add to a counter, which starts at 0; returns the sum."""
        # The store cannot add to a sealed number, so the slower of two clients tries again.
        while True:
            old = self._store.get(self._prefix + key) if self.check([key]) else b""
            sum_ = number + (int(self._unseal_value(_VALUE, key, old)[_NONCE_BYTES:]) if old else 0)
            # The nonce tells our sum from an equal sum of another process.
            new = self._seal_value(_VALUE, key, secrets.token_bytes(_NONCE_BYTES) + b"%d" % sum_)
            if self._compare_and_set(key, old, new) == new:
                return sum_

    def check(self, keys: Sequence[str]) -> bool:
        return bool(self._store.check([self._prefix + key for key in keys]))

    def wait(self, keys: Sequence[str], timeout: timedelta) -> None:
        """Wait until all these keys exist, sealed or not. Raises DistStoreError if they do not appear in time."""
        self._store.wait([self._prefix + key for key in keys], timeout)

    def delete_key(self, key: str) -> bool:
        return bool(self._store.delete_key(self._prefix + key))

    def list_keys(self) -> list[str]:
        """Return the keys below this prefix, sealed or not."""
        keys: list[str] = self._store.list_keys()
        return [key.removeprefix(self._prefix) for key in keys if key.startswith(self._prefix)]

    def read_below(self, prefix: str) -> dict[str, bytes]:
        """Return the values of all keys that begin with `prefix`, by the rest of the key, in one round trip.

        Raises SealBroken if the job did not write one of them: anybody can add a key.
        """
        keys = [key for key in self.list_keys() if key.startswith(prefix)]
        values = self.multi_get(keys) if keys else []
        return {key.removeprefix(prefix): value for key, value in zip(keys, values, strict=True)}

    def queue_push(self, key: str, item: bytes) -> None:
        self._store.queue_push(self._prefix + key, self._seal_value(_ITEM, key, item))

    def queue_pop(self, key: str) -> bytes:
        """Take from a queue, once it has an item.

        Raises SealBroken if the job did not write the item, which is removed; DistError if nothing came in time or the
        store is gone.
        """
        return self._unseal_value(_ITEM, key, self._store.queue_pop(self._prefix + key))

    def _compare_and_set(self, key: str, old: bytes, new: bytes) -> bytes:
        found: bytes = self._store.compare_set(self._prefix + key, old, new)  # type: ignore[arg-type]  # the stub lacks bytes
        return found

    def _seal_value(self, kind: bytes, key: str, body: bytes) -> bytes:
        return self._mac.compute_proof(kind, (self._prefix + key).encode(), body) + body

    def _unseal_value(self, kind: bytes, key: str, sealed: bytes) -> bytes:
        key, body = self._prefix + key, sealed[MAC_BYTES:]
        if not self._mac.verify_proof(sealed[:MAC_BYTES], kind, key.encode(), body):
            raise SealBroken(
                f"job store: the value of {key!r} was not written by this job; somebody else writes to the store, so "
                f"let only the job's processes reach its port"
            )
        return body


class GlooStore(dist.Store):
    """A sealed store as Gloo wants it, for connecting a pair; the caller keeps it alive meanwhile."""

    def __init__(self, store: SealedStore) -> None:
        super().__init__()
        self._store = store

    def set(self, key: str, value: bytes) -> None:  # type: ignore[override]  # the stub lacks bytes
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        return self._store.get(key)

    def wait(self, keys: list[str], timeout: timedelta) -> None:  # type: ignore[override]  # Gloo always says how long
        self._store.wait(keys, timeout)


def _bytes(value: bytes | str) -> bytes:
    return value.encode() if isinstance(value, str) else value


def serve_store(host: str, timeout: timedelta, port: int = 0) -> tuple[TCPStore, int]:
    """Start a store on one of this host's addresses; port 0: any free one.

    Returns the server, which is also a client and lives as long as the object, and its port. Raises OSError if the port
    is taken.
    """
    # Bind here: PyTorch's own listener would listen on all interfaces.
    listener = socket.create_server((host, port), family=family_of(host), backlog=1024)
    port = listener.getsockname()[1]
    store = TCPStore(
        host, port, is_master=True, timeout=timeout, wait_for_workers=False, master_listen_fd=listener.detach()
    )
    return store, port


def connect_store(host: str, port: int, timeout: timedelta) -> TCPStore:
    """Connect to a store; raises DistError if none answers in time. A thread that may block needs its own client."""
    made: Future[TCPStore] = Future()

    def connect() -> None:
        try:
            made.set_result(TCPStore(host, port, is_master=False, timeout=timeout, wait_for_workers=False))
        except BaseException as error:  # noqa: BLE001  the caller's
            made.set_exception(error)

    # PyTorch's client waits without a deadline for the first answer of a server that accepts and then stays silent.
    thread = threading.Thread(target=connect, name="connect-store", daemon=True)
    thread.start()
    thread.join(timeout.total_seconds())
    if thread.is_alive():
        raise dist.DistNetworkError(
            f"{endpoint(host, port)} did not answer as a job store within {timeout.total_seconds():g} s"
        )
    return made.result()
