"""Where a storage unit keeps the values of its blocks: the interface, this process's memory (the default), and files.

A block is the payload of one put: written once, never changed, read whole, deleted when its last row goes. Keys name
run, unit and the unit's incarnation, so no other process uses them.
"""

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from asyncflow.errors import TransportError
from tq.backends.config import BackendConfig


class Backend(Protocol):
    """Keeps blocks by key. Thread-safe. A failure is a `TransportError` that names the backend and its address.

    One that `tq.backend.kind` names is made with two arguments: that section, with its `options`, and what all keys of
    the unit begin with. It deletes what an earlier life of the unit left under that prefix. `missing` makes the error
    of a block that is not there.
    """

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
        """Delete what this backend still keeps, as far as it answers, and disconnect. Idempotent."""


class MemoryBackend:
    """Keeps the very tensors that came: no copy on the way in, none on the way out."""

    name = "memory"
    in_process = True

    def __init__(self, config: BackendConfig | None = None, prefix: str = "") -> None:
        """Begin empty; the arguments are all backends'."""
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
    return TransportError(
        f"{name}: no block {key} of {num_bytes} bytes; was it evicted, or deleted by another program?"
    )


class FileBackend:
    """See `Backend`. Files lie in a directory of this unit's own, which goes with it."""

    in_process = False

    def __init__(self, directory: Path) -> None:
        """Make the directory, and forget what a former process of the same name left there.

        Raises:
            TransportError: it cannot be made.
        """
        self.name = f"files in {directory}"
        self._directory = directory
        try:
            directory.mkdir(parents=True, exist_ok=True)
            for left_over in directory.glob("*.block"):
                left_over.unlink(missing_ok=True)
        except OSError as error:
            raise TransportError(f"{self.name}: cannot be made ({error})") from error

    def store(self, key: str, payload: Tensor) -> None:
        """See `Backend`."""
        path = self._path(key)
        try:
            with path.open("wb") as file:
                file.write(payload.numpy().data)
        except OSError as error:
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
            raise TransportError(f"{self.name}: {payload.numel()} bytes cannot be written ({error})") from error

    def load(self, key: str, num_bytes: int) -> Tensor:
        """See `Backend`."""
        payload = torch.empty(num_bytes, dtype=torch.uint8)
        try:
            with self._path(key).open("rb") as file:
                complete = file.readinto(payload.numpy().data) == num_bytes and not file.read(1)
        except FileNotFoundError:
            complete = False
        except OSError as error:
            raise TransportError(f"{self.name}: block {key} cannot be read ({error})") from error
        if not complete:
            raise missing(self.name, key, num_bytes)
        return payload

    def delete(self, keys: Sequence[str]) -> None:
        """See `Backend`."""
        for key in keys:
            with contextlib.suppress(OSError):
                self._path(key).unlink(missing_ok=True)

    def close(self) -> None:
        """See `Backend`."""
        with contextlib.suppress(OSError):
            for path in self._directory.glob("*.block"):
                path.unlink(missing_ok=True)
            self._directory.rmdir()

    def _path(self, key: str) -> Path:
        return self._directory / f"{key.replace(':', '-').replace('/', '-')}.block"
