"""A user's storage backend: `tq.backend.kind: own_backend:Files`, with `options: {directory: ...}`."""

from pathlib import Path

from tq.backends.backend import FileBackend
from tq.config import BackendConfig


class Files(FileBackend):
    """Blocks in files; a unit has a directory of its own."""

    def __init__(self, config: BackendConfig, prefix: str) -> None:
        directory = Path(config.options["directory"]) / prefix.replace(":", "-")
        super().__init__(directory)
        self.name = f"own_backend:Files in {directory}"


class Nameless:
    """It lacks what the protocol has beside methods."""

    def __init__(self, config: BackendConfig, prefix: str) -> None: ...

    def store(self) -> None: ...

    load = delete = close = store
