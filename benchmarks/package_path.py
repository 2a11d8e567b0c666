"""Lets scripts in this directory import the project's packages: one of them has the name of a script, `weightsync`."""

import importlib.util
import sys
from pathlib import Path


def find_packages() -> None:
    """Look into this directory last, here and in the processes that are started; behind the one with the packages."""
    here = Path(__file__).resolve().parent
    others = [each for each in sys.path if Path(each or ".").resolve() not in (here, here.parent)]
    sys.path[:] = [*others, str(here.parent), str(here)]


def need(package: str) -> None:
    """End the script with one line where a package of the `test` extra is missing."""
    if importlib.util.find_spec(package) is None:
        print(f"{sys.argv[0]} needs {package}: pip install {package}", file=sys.stderr)
        sys.exit(2)
