"""Messages between the doctor's two processes, as JSON lines, and how findings look on a terminal. Pure.

This module, and all that runs before the first check, imports the standard library only: where packages are missing,
the doctor must still be able to say so.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from launcher.checks.placement import find_devices

RESOLVE = "configuration"
"""Name of the step before the checks; its answer has `needs` or `refused`."""
_LONGEST_REASON = 200
_CHECK_WIDTH = 15


class Level(StrEnum):
    """How bad a finding is: an error would make a run fail; a warning may cost speed, or hurt later."""

    OK = "ok"
    WARNING = "warning"
    ERROR = "error"


_LEVEL_WIDTH = max(len(level) for level in Level)


@dataclass(frozen=True)
class Finding:
    """The result of a check. `remedy` says what to do, as a command where possible; it is empty only at level `OK`."""

    check: str
    level: Level
    text: str
    remedy: str = ""

    def __post_init__(self) -> None:
        assert bool(self.remedy) == (self.level is not Level.OK), self

    @staticmethod
    def ok(check: str, text: str) -> "Finding":
        return Finding(check, Level.OK, text)

    @staticmethod
    def warning(check: str, text: str, remedy: str) -> "Finding":
        return Finding(check, Level.WARNING, text, remedy)

    @staticmethod
    def error(check: str, text: str, remedy: str) -> "Finding":
        return Finding(check, Level.ERROR, text, remedy)

    def as_text(self) -> str:
        """Return one line, or two with the remedy."""
        line = f"{self.level.value:<{_LEVEL_WIDTH}}  {self.check:<{_CHECK_WIDTH}}  {self.text}"
        return f"{line}\n{'':<{_LEVEL_WIDTH}}  {'':<{_CHECK_WIDTH}}  -> {self.remedy}" if self.remedy else line


@dataclass(frozen=True)
class Needs:
    """What the checks compare this machine with. Numbers are 0 where no CONFIG was given.

    Attributes:
        run_dir: absolute; need not exist.
        backend, backend_address: where storage units keep values.
        shared_memory: whether payloads of the queue go through shared memory.
        processes: of the run on this node, without the launcher.
        connections: TCP connections of those processes.
        descriptors: of the process that has the most open.
        threads: of all processes together.
        channels: of the process that has the most.
        memory_bytes: least host memory on this node, see `launcher.doctor.estimate`.
        checkpoint_bytes: one checkpoint, with what is exported beside it.
        num_checkpoints: that may exist at once, including the one being written.
    """

    run_dir: str
    device: str = "cpu"
    num_nodes: int = 1
    engines: tuple[str, ...] = ()
    backend: str = "memory"
    backend_address: str = ""
    shared_memory: bool = True
    processes: int = 0
    connections: int = 0
    descriptors: int = 0
    threads: int = 0
    channels: int = 0
    memory_bytes: int = 0
    memory_parts: str = ""
    checkpoint_bytes: int = 0
    num_checkpoints: int = 0

    @staticmethod
    def of_machine(run_dir: str | None, *, num_nodes: int) -> "Needs":
        """Return what any run needs here. Touches no file system but /dev. `run_dir` is as the user wrote it."""
        place = str(Path(run_dir or "runs").absolute())
        return Needs(place, find_devices("auto").kind, num_nodes, engines=("hf", "fsdp"))


@dataclass(frozen=True)
class Order:
    """An order to the child process, which takes just one.

    Attributes:
        registry: `module:NAME` of the tuple of checks.
        checks: names of those to run, in order.
        needs: from the first answer; None: resolve the configuration first.
    """

    config: str | None = None
    roles: str | None = None
    overrides: tuple[str, ...] = ()
    run_dir: str | None = None
    num_nodes: int = 1
    registry: str = "launcher.doctor.doctor_child:CHECKS"
    checks: tuple[str, ...] = ()
    needs: Needs | None = None


@dataclass(frozen=True)
class Answer:
    """The result of one check, or of `RESOLVE`, which alone has `needs`.

    `refused` says why the user's input cannot be used; then there are no findings, and nothing follows.
    """

    findings: tuple[Finding, ...] = ()
    needs: Needs | None = None
    refused: str = ""


def encode(message: Order | Answer) -> bytes:
    """Return a message as one line."""
    return json.dumps(asdict(message)).encode() + b"\n"


def decode_order(line: bytes) -> Order:
    fields = json.loads(line)
    lists = {name: tuple(fields[name]) for name in ("overrides", "checks")}
    return Order(**{**fields, **lists, "needs": _needs(fields["needs"])})


def decode_answer(line: bytes) -> Answer:
    fields = json.loads(line)
    findings = tuple(Finding(**{**each, "level": Level(each["level"])}) for each in fields["findings"])
    return Answer(findings, _needs(fields["needs"]), fields["refused"])


def summary(findings: Sequence[Finding], seconds: float) -> str:
    errors, warnings = _count(findings, Level.ERROR), _count(findings, Level.WARNING)
    parts = [f"{errors} error{'s' * (errors != 1)}", f"{warnings} warning{'s' * (warnings != 1)}"]
    return f"{', '.join(parts)}, {_count(findings, Level.OK)} ok, {seconds:.1f} s"


def as_json(findings: Sequence[Finding], seconds: float) -> str:
    counts = {f"num_{level.name.lower()}": _count(findings, level) for level in Level}
    return json.dumps({"findings": [asdict(finding) for finding in findings], **counts, "time_s": round(seconds, 3)})


def failed(findings: Sequence[Finding]) -> bool:
    return _count(findings, Level.ERROR) > 0


def reason(error: BaseException) -> str:
    """Return an exception as one line of limited length."""
    known = error.strerror if isinstance(error, OSError) else None  # without the path, which the finding names
    text = " ".join(str(known or error).split())
    text = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return text if len(text) <= _LONGEST_REASON else f"{text[:_LONGEST_REASON]} ..."


def _count(findings: Sequence[Finding], level: Level) -> int:
    return sum(each.level is level for each in findings)


def _needs(fields: Mapping[str, Any] | None) -> Needs | None:
    return None if fields is None else Needs(**{**fields, "engines": tuple(fields["engines"])})
