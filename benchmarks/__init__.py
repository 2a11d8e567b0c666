"""Measurements: our way and the alternative in turn, in one run: `python benchmarks/NAME`, or `NAME.py`."""

import importlib.util
import sys
import time


def need(package: str) -> None:
    """End the script with one line where a package of the `test` extra is missing."""
    if importlib.util.find_spec(package) is None:
        print(f"{sys.argv[0]} needs {package}: pip install {package}", file=sys.stderr)
        sys.exit(2)


def say(text: str) -> None:
    """Print progress; standard output is for figures."""
    print(text, file=sys.stderr, flush=True)


_BEGAN = time.monotonic()


def say_when(text: str) -> None:
    """Print progress with the seconds since the benchmark began."""
    say(f"[{time.monotonic() - _BEGAN:6.1f} s] {text}")
