"""Where a storage unit keeps the values of its blocks: the one interface, and the default, this process's memory.

A block is the payload of one put: written once, never changed, read whole, deleted when its last row goes. Keys name
run, unit and the unit's incarnation, so that nobody else ever uses them.
"""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from asyncflow.errors import TransportError


class Backend(Protocol):
    """Keeps blocks by key. Thread-safe. A failure is a `TransportError` that names the backend and its address."""

    name: str
    """For people: `memory`, or a kind with its address (never with a password)."""
    in_process: bool
    """Whether blocks stay in this process's memory as they are, so that readers need not `load` them."""

    def store(self, key: str, payload: Tensor) -> None:
        """Keep a block, all of it or nothing.

        Args:
            key: new; not yet in use.
            payload: uint8 [bytes], contiguous, at least one byte; not changed by anybody from now on.

        Raises:
            TransportError: it could not be stored; nothing of it is left behind.
        """

    def load(self, key: str, num_bytes: int) -> Tensor:
        """Return a block, uint8 [num_bytes].

        Raises:
            TransportError: the block is not there, or has another size, or the backend does not answer.
        """

    def delete(self, keys: Sequence[str]) -> None:
        """Forget blocks; unknown ones are passed over.

        Raises:
            TransportError: the backend does not answer.
        """

    def close(self) -> None:
        """Delete what this backend still keeps, as far as it answers, and let go of it. Idempotent."""


class MemoryBackend:
    """Keeps the very tensors that came: no copy on the way in, none on the way out."""

    name = "memory"
    in_process = True

    def __init__(self) -> None:
        self._blocks: dict[str, Tensor] = {}

    def store(self, key: str, payload: Tensor) -> None:
        """See `Backend`."""
        self._blocks[key] = payload

    def load(self, key: str, num_bytes: int) -> Tensor:
        """See `Backend`."""
        payload = self._blocks.get(key)
        if payload is None or payload.numel() != num_bytes:
            raise missing(self.name, key, num_bytes)
        return payload

    def delete(self, keys: Sequence[str]) -> None:
        """See `Backend`."""
        for key in keys:
            self._blocks.pop(key, None)

    def close(self) -> None:
        """See `Backend`."""
        self._blocks.clear()


def missing(name: str, key: str, num_bytes: int) -> TransportError:
    """Return the error of a load that found nothing, or something else."""
    return TransportError(f"{name}: no block {key} of {num_bytes} bytes; was it evicted or deleted by somebody else?")
