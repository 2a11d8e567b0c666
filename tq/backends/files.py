"""A file per block in one directory: where rows that only wait for a checkpoint go. Not for live rows."""

import contextlib
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from asyncflow.errors import TransportError
from tq.backends.backend import missing


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
