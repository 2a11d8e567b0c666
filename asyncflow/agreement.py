"""What must be equal in all processes of a run, whatever their interpreters and nodes, by name. Torch-free.

Compared before anything starts between the interpreters of `launcher.environments` and between nodes, and by every
worker, also one that was started by hand. What else may differ: Python, torch, transformers, engines.
"""

import hashlib
import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import asyncflow

Identity = Mapping[str, str]
"""Name, as in messages -> version or digest."""

_HOME = Path(__file__).resolve().parents[1]
_SPOKEN = ("asyncflow", "tq", "weightsync", "workers/rows", "workers/settings")
"""Packages that say what goes between processes: messages, rows, weights, `job.json` and `config.yaml`."""


@cache
def software() -> Identity:
    """Return the version of AsyncFlow and a digest of what its processes say to each other."""
    return {"AsyncFlow version": asyncflow.__version__, "wire format": _wire_format()}


def _wire_format() -> str:
    # Of the sources: a number that somebody has to raise would be forgotten.
    digest = hashlib.sha256()
    for file in sorted(file for package in _SPOKEN for file in (_HOME / package).rglob("*.py")):
        digest.update(str(file.relative_to(_HOME)).encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:12]


def digest_of(value: Any) -> str:
    """Return a digest of a JSON value."""
    return hashlib.sha256(json.dumps(value, ensure_ascii=True).encode()).hexdigest()[:12]


def differences(first: Identity, own: Identity) -> str:
    """Return what differs, by name and with both values; "": nothing. A name that only one side has does not count."""
    names = [name for name in first if name in own and first[name] != own[name]]
    return ", ".join(f"{name} ({own[name]}, not {first[name]})" for name in names)
