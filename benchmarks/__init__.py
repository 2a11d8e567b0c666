"""Measurements: our way and the alternative in turn, in one run: `python benchmarks/NAME`, or `NAME.py`."""

import importlib.util
import sys


def need(package: str) -> None:
    """End the script with one line where a package of the `test` extra is missing."""
    if importlib.util.find_spec(package) is None:
        print(f"{sys.argv[0]} needs {package}: pip install {package}", file=sys.stderr)
        sys.exit(2)
