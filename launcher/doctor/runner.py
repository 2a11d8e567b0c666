"""`asyncflow doctor`: runs the checks in a child process, each with a deadline, and prints what they find.

    runner                         child 1                          child 2
      |-- order ------------------>|  reads CONFIG
      |<-- needs ------------------|
      |-- a ---------------------->|
      |<-- found a ----------------|
      |-- b ---------------------->|
      |   (no answer in time)      |
      |-- SIGTERM, SIGKILL ------->X
      |-- order, needs, c ---------------------------------------------->|
      |<-- found c ------------------------------------------------------|

All checks share the child's imports, and a check that hangs in a driver or a file system costs only its deadline.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict

import click

from launcher.doctor.findings import (
    RESOLVE,
    Finding,
    Level,
    MachineCheck,
    Needs,
    Order,
    as_json,
    failed,
    reason,
    summary,
)
from launcher.doctor.software import PACKAGES

_COLOURS = {Level.OK: None, Level.WARNING: "yellow", Level.ERROR: "red"}
_CRASHES = "see what it says: python -X faulthandler -c 'import launcher.doctor.doctor_child'"
_HANGS = "does ls answer in the directories of CONFIG, model and data? Is one on a file system that hangs?"


def print_report(order: Order, *, json: bool) -> bool:
    """Run the checks of `order.registry` and print each finding as it comes, or one JSON object at the end.

    Returns whether a run would fail.

    Raises:
        ConfigError: the user's input cannot be used.
    """
    began = time.monotonic()
    findings: list[Finding] = []
    for finding in examine(order):
        findings.append(finding)
        if not json:
            click.secho(finding.as_text(), fg=_COLOURS[finding.level])
    seconds = time.monotonic() - began
    click.echo(as_json(findings, seconds) if json else summary(findings, seconds))
    return failed(findings)


def examine(order: Order, checks: Sequence[MachineCheck] | None = None) -> Iterator[Finding]:
    """Run checks of `order.registry`, all of them by default, and yield findings as they come.

    Raises:
        ConfigError: CONFIG or an option cannot be used.
    """
    try:
        from launcher.doctor.doctor_child import checks_of

        todo = list(checks_of(order.registry) if checks is None else checks)
    except ImportError as missing:  # not even a child could start
        yield Finding(
            RESOLVE, Level.ERROR, f"nothing but packages can be checked ({reason(missing)})", "see `packages`"
        )
        yield from PACKAGES.run(Needs("runs"))
        return
    yield from _examine(order, todo)


def _examine(order: Order, todo: list[MachineCheck]) -> Iterator[Finding]:
    import msgspec

    from asyncflow.process import variables_set
    from launcher.doctor.doctor_child import Resolved
    from launcher.process.fork_server import environment
    from workers.calls.child_process import ChildDied
    from workers.calls.pool import CallProcess, Entry

    needs: Needs | None = None
    while todo:
        known = {"order": asdict(order), "needs": needs and asdict(needs)}
        with variables_set(environment(threads=1)):  # a worker's
            child = CallProcess(Entry("launcher.doctor.doctor_child:examining", known))
        name, if_hanging = RESOLVE, _HANGS
        with child:
            try:
                first = msgspec.convert(child.call(RESOLVE), Resolved)
                needs = first.needs
                yield from first.findings
                while todo:
                    check = todo.pop(0)
                    name, if_hanging = check.name, check.if_hanging
                    found = child.call(name, timeout_s=check.deadline_s)
                    yield from msgspec.convert(found, list[Finding])
            except (ChildDied, TimeoutError) as what:
                died = isinstance(what, ChildDied)
                text = f"the checking process {what}" if died else str(what)
                yield Finding(name, Level.ERROR, text, _CRASHES if died and name == RESOLVE else if_hanging)
                if name != RESOLVE:
                    continue
                if needs is not None:
                    return
                # CONFIG cannot be read, but checks of the machine itself may show why.
                needs = Needs.of_machine(order.run_dir, num_nodes=order.num_nodes)
