"""Paths as the user wrote them, made absolute and checked; CONFIG may name a packaged recipe. Torch-free."""

import difflib
import reprlib
from pathlib import Path

from asyncflow.errors import ConfigError


def user_path(text: str, field: str, *, beside: Path | None = None) -> Path:
    """Return `text` as an absolute path without `~` and links; it need not exist.

    Args:
        field: its name in errors, e.g. `--run-dir`.
        beside: the directory that a relative path starts from; None: the working directory.

    Raises:
        ConfigError: it is empty, holds a NUL, names the home of an unknown user, or is a circular link.
    """
    shown = reprlib.repr(text)
    if not text.strip():
        raise ConfigError(f"{field}: {shown} is not a path; give one")
    if "\0" in text:
        raise ConfigError(f"{field}: {shown} holds a NUL character, which no path can; correct it")
    path = expand_home(text, field)
    try:
        return (beside / path if beside is not None else path).resolve()
    except RuntimeError as error:  # from Python 3.13 an OSError, which callers expect of any path
        raise ConfigError(f"{field}: {shown} is a link that leads to itself; correct it") from error


def expand_home(text: str, field: str) -> Path:
    """Return a path with the home of its `~` or `~user`; raises ConfigError if there is no such user. `field`: its name
    in errors."""
    try:
        return Path(text).expanduser()
    except RuntimeError as error:
        raise ConfigError(f"{field}: {reprlib.repr(text)}: no such user here; write the directory out") from error


def check_makeable(text: str, field: str) -> None:
    """Refuse an absolute path where no directory can be created or written to; raises ConfigError."""
    parent = next(path for path in (Path(text), *Path(text).parents) if path.exists())
    if not parent.is_dir() or why_not_writable(parent):
        raise ConfigError(f"{field}: cannot create {text!r}, {parent} is not a writable directory")


def why_not_writable(directory: Path) -> str:
    """Return why nothing can be created in a directory; "" if it can."""
    import tempfile  # not needed by `asyncflow status`

    try:
        # Try it: mode bits say too little (root, /proc, a read-only mount, a server that squashes root).
        with tempfile.TemporaryFile(dir=directory):
            return ""
    except OSError as error:
        return error.strerror or str(error)


QUICKSTART = "quickstart"
PACKAGED = Path(__file__).resolve().parents[2] / "configs"
"""Located beside our code, not by import: a user's folder `configs` may shadow it."""


def find_recipe(source: str | None) -> Path:
    """Return the YAML file for the command line's CONFIG; None: the packaged quickstart.

    An existing file wins. Otherwise the last part of the path, with or without `.yaml`, may name a packaged recipe, so
    `configs/quickstart.yaml` works from any directory.

    Raises:
        ConfigError: neither a file nor a recipe; names the nearest recipe.
    """
    recipes = packaged_recipes()
    if source is None:
        if QUICKSTART not in recipes:
            raise ConfigError("CONFIG: the packaged quickstart.yaml is missing; reinstall AsyncFlow or name a file")
        return recipes[QUICKSTART]
    path = user_path(source, "CONFIG")
    if path.exists():
        return _checked(path)
    path = Path(source)
    name = path.name.removesuffix(".yaml").removesuffix(".yml")
    if name in recipes and path.parent in (Path(), Path("configs")):
        return recipes[name]
    near = difflib.get_close_matches(name, recipes, n=1)
    hint = f"did you mean {near[0]}.yaml?" if near else "give a YAML file"
    raise ConfigError(f"CONFIG: {source!r} does not exist; {hint} (packaged recipes: {' '.join(sorted(recipes))})")


def packaged_recipes() -> dict[str, Path]:
    """Return name without `.yaml` -> file of the recipes installed with AsyncFlow."""
    return {file.stem: file for file in sorted(PACKAGED.glob("*.yaml"))}


def _checked(path: Path) -> Path:
    if path.is_dir():
        raise ConfigError(f"CONFIG: {path} is a directory; give a YAML file")
    if not path.is_file():
        raise ConfigError(f"CONFIG: {path} is not a regular file, and a run has to read it again; save it as a file")
    return path
