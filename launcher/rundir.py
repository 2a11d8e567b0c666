"""The run directory: its default name, whether a new run may use it, and its layout. Nothing is written before the
whole configuration has been accepted.

    config.yaml  metrics.jsonl  ledger.jsonl  logs/ROLE/RANK.log  checkpoints/  samples/  timeline/
"""

import os
from datetime import datetime
from pathlib import Path

from asyncflow.errors import ConfigError
from workers.config import RunConfig

RUNS = Path("runs")
CONFIG_FILE = "config.yaml"
METRICS_FILE = "metrics.jsonl"
LEDGER_FILE = "ledger.jsonl"
CHECKPOINTS = "checkpoints"
DIRECTORIES = ("logs", CHECKPOINTS, "samples", "timeline")


def default_run_dir(name: str, now: datetime) -> Path:
    """Return `runs/NAME-TIMESTAMP` in the working directory, with a counter when that exists.

    Raises:
        ConfigError: `name` cannot be part of a directory name.
    """
    if not name or name.startswith(".") or any(char in name for char in "/\0\n"):
        raise ConfigError(f"name: {name!r} cannot name a run directory; use letters, digits, '-' and '_'")
    stem = (RUNS / f"{name}-{now:%Y%m%d-%H%M%S}").resolve()
    candidate, count = stem, 1
    while candidate.exists():
        count += 1
        candidate = stem.with_name(f"{stem.name}-{count}")
    return candidate


def check_new_run_dir(path: Path) -> None:
    """Check that a new run may be created at `path`; write nothing.

    Raises:
        ConfigError: it holds a run already, is not a directory, or cannot be written.
    """
    held = [name for name in (CONFIG_FILE, METRICS_FILE, LEDGER_FILE, *DIRECTORIES) if (path / name).exists()]
    if held:
        raise ConfigError(
            f"run directory: {path} already holds a run ({held[0]}); continue it with --resume {path}, "
            f"or choose another --run-dir"
        )
    check_writable(path)


def check_writable(path: Path) -> None:
    """Check that `path`, or the nearest directory above it that exists, can be written; write nothing.

    Raises:
        ConfigError: it cannot.
    """
    nearest = path
    while not nearest.exists() and nearest != nearest.parent:
        nearest = nearest.parent
    if not nearest.is_dir():
        raise ConfigError(f"run directory: {path} cannot be made, {nearest} is a file; choose another --run-dir")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise ConfigError(f"run directory: {nearest} cannot be written; choose another --run-dir or its permissions")


def create_run_dir(path: Path, config: RunConfig) -> None:
    """Make the layout and write the resolved configuration; also used, on what is there, by `--resume`.

    Raises:
        ConfigError: the file system refuses.
    """
    try:
        for name in DIRECTORIES:
            (path / name).mkdir(parents=True, exist_ok=True)
        config.save(path)
    except OSError as error:
        raise ConfigError(
            f"run directory: {path} cannot be written: {error.strerror}; choose another --run-dir"
        ) from error
