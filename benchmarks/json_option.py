"""`--json [FILE]`, the same for every script here."""

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_STDOUT = "-"


def add_json_option(parser: argparse.ArgumentParser) -> None:
    """Add it to a script's options, as `json`."""
    parser.add_argument(
        "--json",
        nargs="?",
        const=_STDOUT,
        metavar="FILE",
        help="print one JSON object instead of the table; with FILE write it there, beside the table",
    )


def write_json(target: str | None, values: Mapping[str, Any]) -> None:
    """Write FILE, if there is one."""
    if target not in (None, _STDOUT):
        Path(target).write_text(json.dumps(values, indent=1) + "\n")


def report(target: str | None, values: Mapping[str, Any], table: str) -> None:
    """Print what a script found.

    Args:
        target: what `--json` was given.
        values: the JSON object.
        table: the same for people.
    """
    write_json(target, values)
    print(json.dumps(values, indent=1) if target == _STDOUT else table)
