"""Paths as the user wrote them, made absolute and checked. Torch-free."""

import reprlib
from pathlib import Path

from asyncflow.errors import ConfigError


def user_path(text: str, field: str, *, beside: Path | None = None) -> Path:
    """Return `text` as an absolute path without `~` and links; nothing needs to exist there.

    Args:
        text: what the user wrote.
        field: its name in the error, e.g. `--run-dir`.
        beside: the directory that a relative path starts from; None: the working directory.
    Raises:
        ConfigError: it is empty, holds a NUL, names the home of an unknown user, or follows links in a circle.
    """
    shown = reprlib.repr(text)
    if not text.strip():
        raise ConfigError(f"{field}: {shown} is no path; give one")
    if "\0" in text:
        raise ConfigError(f"{field}: {shown} holds a NUL character, which no path can; correct it")
    try:
        path = Path(text).expanduser()
    except RuntimeError as error:
        raise ConfigError(f"{field}: {shown} names the home of nobody here; write the directory out") from error
    try:
        return (beside / path if beside is not None else path).resolve()
    except RuntimeError as error:  # Python 3.13 raises OSError, which the caller expects from any path
        raise ConfigError(f"{field}: {shown} is a link that leads to itself; correct it") from error


def check_makeable(text: str, field: str) -> None:
    """Refuse an absolute path where no directory can be made or written to.

    Raises:
        ConfigError: names what is in the way.
    """
    parent = next(path for path in (Path(text), *Path(text).parents) if path.exists())
    if not parent.is_dir() or why_not_writable(parent):
        raise ConfigError(f"{field}: {text!r} cannot be made, {parent} is no directory that can be written to")


def why_not_writable(directory: Path) -> str:
    """Return why nothing can be made in a directory, or nothing when it can.

    It makes a file that has no name and is gone when it is closed: modes say too little (root, /proc, a disk that was
    mounted to be read, a server that does not trust root).
    """
    import tempfile  # not needed to say how a run is

    try:
        with tempfile.TemporaryFile(dir=directory):
            return ""
    except OSError as error:
        return error.strerror or str(error)
