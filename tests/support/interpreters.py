"""Interpreters for `launcher.environments`: virtual environments over the one that runs the tests."""

import sys
import venv
from pathlib import Path

ROOT = Path(__file__).parents[2]


def make_interpreter(place: Path, *, sitecustomize: str = "", has_asyncflow: bool = True) -> str:
    """Return the interpreter of a new environment with the packages of this one.

    Args:
        sitecustomize: text of a module that runs at each of its starts.
        has_asyncflow: False: it has nothing but the standard library.
    """
    venv.create(place, with_pip=False, symlinks=True)
    (packages,) = place.glob("lib/python*/site-packages")
    searched = [path for path in sys.path if path.endswith("site-packages")]
    if has_asyncflow:
        (packages / "tests.pth").write_text("\n".join([*searched, str(ROOT)]))
    if sitecustomize:
        (packages / "sitecustomize.py").write_text(sitecustomize)
    return str(place / "bin" / "python")
