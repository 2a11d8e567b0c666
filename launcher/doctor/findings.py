"""What a check of the doctor is: facts that it gathers, and a table that judges them; and how findings look.

This module, `runner` and `software` import the standard library and click only: where packages are missing, the doctor
must still be able to say so.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from asyncflow.errors import size_text

RESOLVE = "configuration"
"""Name of the step before the checks."""
DEVICE_CHECKS = "launcher.doctor.device_check:CHECKS"
"""The checks of `--device-check`."""
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

    def as_text(self) -> str:
        """Return one line, or two with the remedy."""
        line = f"{self.level.value:<{_LEVEL_WIDTH}}  {self.check:<{_CHECK_WIDTH}}  {self.text}"
        return f"{line}\n{'':<{_LEVEL_WIDTH}}  {'':<{_CHECK_WIDTH}}  -> {self.remedy}" if self.remedy else line


@dataclass(frozen=True)
class Needs:
    """What the checks compare this machine with. Numbers are 0 where no CONFIG was given.

    Attributes:
        run_dir: absolute; need not exist.
        engines: of roles with the launcher's interpreter.
        environments: (interpreter, engines) of the other roles on node 0.
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
    environments: tuple[tuple[str, tuple[str, ...]], ...] = ()
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
        from launcher.checks.placement import find_devices

        place = str(Path(run_dir or "runs").absolute())
        return Needs(place, find_devices("auto").kind, num_nodes, engines=("hf", "fsdp"))


@dataclass(frozen=True)
class Order:
    """What the user asked for.

    Attributes:
        registry: `module:NAME` of the tuple of checks.
    """

    config: str | None = None
    roles: str | None = None
    overrides: tuple[str, ...] = ()
    run_dir: str | None = None
    num_nodes: int = 1
    registry: str = "launcher.doctor.doctor_child:CHECKS"


Facts = Mapping[str, Any]


class Size(int):
    """A number of bytes; a text shows it as `1.5 GB`."""

    def __format__(self, _: str) -> str:
        return size_text(self)


@dataclass(frozen=True)
class Rule:
    """A row of a check's table: what is found if `when` holds.

    Attributes:
        when: name of a fact, or a function of all facts, which are its argument's attributes. If it gives a list, there
            is a finding for each member, whose items are facts of this row, too.
        text, remedy: formats of the facts.
        ends: if it holds, the rows that follow say nothing.
    """

    level: Level
    when: str | Callable[[Any], object]
    text: str
    remedy: str = ""
    ends: bool = False

    def held_by(self, facts: Facts) -> list[Facts]:
        """Return the facts of each finding."""
        held = facts[self.when] if isinstance(self.when, str) else self.when(SimpleNamespace(**facts))
        return [{**facts, **item} for item in held] if isinstance(held, list) else [facts] if held else []


ok, warning, error = (partial(Rule, level) for level in Level)
fatal = partial(Rule, Level.ERROR, ends=True)


@dataclass(frozen=True)
class MachineCheck:
    """One check of the machine.

    Attributes:
        look: gathers facts, and decides nothing.
        fine: format of what it says if no rule holds.
        deadline_s: after this time it counts as hanging, and `if_hanging` says what to do.
    """

    name: str
    look: Callable[[Needs], Facts]
    rules: tuple[Rule, ...]
    fine: str
    deadline_s: float
    if_hanging: str

    def judge(self, facts: Facts, needs: Needs) -> list[Finding]:
        """Return what the table says of the facts, to which those of `needs` belong."""
        known, found = {**vars(needs), **facts}, []
        for rule in self.rules:
            held = rule.held_by(known)
            found += [
                Finding(self.name, rule.level, rule.text.format(**one), rule.remedy.format(**one)) for one in held
            ]
            if held and rule.ends:
                break
        return found or [Finding(self.name, Level.OK, self.fine.format(**known))]

    def run(self, needs: Needs) -> list[Finding]:
        """Look and judge; an exception becomes a finding, too."""
        try:
            return self.judge(self.look(needs), needs)
        except ImportError as missing:
            text, remedy = f"without the package {missing.name}", "first do what `packages` says"
        except (Exception, SystemExit) as raised:  # noqa: BLE001 (one that fails must not end the others)
            text, remedy = f"({reason(raised)})", "look at it by hand, and report what happened"
        return [Finding(self.name, Level.WARNING, f"this could not be checked {text}", remedy)]


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
