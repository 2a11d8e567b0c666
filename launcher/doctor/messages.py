"""What the command and its checking process say to each other: JSON lines. Pure.

Only the standard library is imported here, and in all that runs before the first check: where packages are missing, the
doctor is the one that must be able to say so.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from launcher.doctor.finding import Finding, Level
from launcher.doctor.needs import Needs

RESOLVE = "configuration"
"""Name of the first thing that is done: it answers `Resolved` or `Refused`."""


@dataclass(frozen=True)
class Order:
    """What to do, once.

    Attributes:
        config, roles, overrides, run_dir: as the user gave them.
        num_nodes: over how many nodes.
        registry: `module:NAME` of the tuple of checks.
        checks: names of those to run, in order.
        needs: what `Resolved` said, or None: resolve first.
    """

    config: str | None = None
    roles: str | None = None
    overrides: tuple[str, ...] = ()
    run_dir: str | None = None
    num_nodes: int = 1
    registry: str = "launcher.doctor.checks:CHECKS"
    checks: tuple[str, ...] = ()
    needs: Needs | None = None


@dataclass(frozen=True)
class Resolved:
    """The configuration was accepted, or there is none."""

    needs: Needs
    finding: Finding


@dataclass(frozen=True)
class Refused:
    """The user's input cannot be used; nothing else follows."""

    text: str


@dataclass(frozen=True)
class Found:
    """A check ended."""

    check: str
    findings: tuple[Finding, ...]


Answer = Resolved | Refused | Found
_ANSWERS: Mapping[str, type[Answer]] = {kind.__name__: kind for kind in (Resolved, Refused, Found)}


def encode(message: Order | Answer) -> bytes:
    """Return a message as a line."""
    return json.dumps({"type": type(message).__name__, **asdict(message)}).encode() + b"\n"


def decode_order(line: bytes) -> Order:
    """Read an order."""
    fields = _fields(line)
    fields["overrides"], fields["checks"] = tuple(fields["overrides"]), tuple(fields["checks"])
    return Order(**fields)


def decode_answer(line: bytes) -> Answer:
    """Read an answer."""
    kind = _ANSWERS[json.loads(line)["type"]]
    return kind(**_fields(line))


def _fields(line: bytes) -> dict[str, Any]:
    fields: dict[str, Any] = json.loads(line)
    del fields["type"]
    if (needs := fields.get("needs")) is not None:
        fields["needs"] = Needs(**{**needs, "engines": tuple(needs["engines"])})
    if "finding" in fields:
        fields["finding"] = _finding(fields["finding"])
    if "findings" in fields:
        fields["findings"] = tuple(_finding(each) for each in fields["findings"])
    return fields


def _finding(fields: Mapping[str, Any]) -> Finding:
    return Finding(**{**fields, "level": Level(fields["level"])})
