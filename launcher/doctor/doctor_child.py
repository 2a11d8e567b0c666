"""The checking process: what `workers.calls` calls in a child of the command, and the list of checks.

Its own output is discarded, since libraries print. It may be killed at any time, and leaves nothing but what SIGTERM
lets it remove. Only `launcher.doctor.runner` starts it.
"""

import importlib
import os
import signal
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec

from asyncflow.errors import ConfigError, size_text
from launcher.doctor import devices, disk, network, software
from launcher.doctor.findings import RESOLVE, Finding, Level, MachineCheck, Needs, Order, reason
from workers.calls.user_function import Callee

CHECKS = (
    software.PACKAGES, disk.OPEN_FILES, disk.PROCESSES, disk.MEMORY, disk.DISK, network.PORTS, network.NETWORK,
    software.SLURM, devices.DEVICES, disk.SHARED_MEMORY, devices.GROUPS, network.BACKEND, software.ENGINES,
    software.ENVIRONMENTS,
)  # fmt: skip
"""In the order in which they run: cheap checks first, then those that import torch, then the engines."""


@dataclass(frozen=True)
class Resolved:
    """What the checks compare the machine with, and what there is to say about CONFIG."""

    needs: Needs
    findings: tuple[Finding, ...] = ()


def examining(order: Mapping[str, Any], needs: Mapping[str, Any] | None) -> Callee:
    """Entry of `workers.calls`: reads the configuration, unless the needs are known; then runs checks by name."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for descriptor in (1, 2):
        os.dup2(nowhere, descriptor)
    signal.signal(signal.SIGTERM, _leave)
    wanted = msgspec.convert(order, Order)
    first = resolve(wanted) if needs is None else Resolved(msgspec.convert(needs, Needs))
    checks = {check.name: check for check in checks_of(wanted.registry)}
    return Callee(lambda name: first if name == RESOLVE else checks[name].run(first.needs))


def checks_of(registry: str) -> tuple[MachineCheck, ...]:
    module, _, name = registry.partition(":")
    checks: tuple[MachineCheck, ...] = getattr(importlib.import_module(module), name)
    return checks


def resolve(order: Order) -> Resolved:
    """Read the configuration as `asyncflow-launch` does. Writes nothing. Raises ConfigError if it cannot be used."""
    needs = Needs.of_machine(order.run_dir, num_nodes=order.num_nodes)
    try:
        if order.config is None:
            finding = Finding(RESOLVE, Level.OK, "none given: any run, on this machine")
            return Resolved(_with_run_dir(needs, order), (finding,))
        needs, notes = _needs_of_run(order)
    except ConfigError:
        raise
    except Exception as error:  # noqa: BLE001 (the boundary: if packages are missing, the checks must still run)
        text = f"cannot be read here ({reason(error)}), so only the machine is checked"
        remedy = "first do what the other findings say, `packages` above all"
        return Resolved(needs, (Finding(RESOLVE, Level.ERROR, text, remedy),))
    text = (
        f"{order.config}: {needs.processes} workers on {needs.device}, up to {needs.threads} threads, "
        f"{needs.descriptors} files a process, {size_text(needs.memory_bytes)} of memory"
    )
    return Resolved(needs, tuple(Finding(RESOLVE, Level.OK, each) for each in (text, *notes)))


def _needs_of_run(order: Order) -> tuple[Needs, tuple[str, ...]]:
    """Return what the run needs, and notes about its files."""
    from launcher.doctor.estimate import needs_of
    from launcher.nodes.options import ONE_NODE, NodePlace
    from launcher.request.request import Request
    from launcher.run.rundir import RUNS
    from workers.data.model_files import weight_files

    place, run_dir = ONE_NODE, order.run_dir
    if order.num_nodes > 1:
        # Several nodes need a run directory to meet in; this one is never created.
        place, run_dir = NodePlace(order.num_nodes), order.run_dir or str(RUNS / "where-nodes-meet")
    accepted = Request(order.config, order.roles, order.overrides, run_dir, place=place).accept_run()
    files = weight_files(Path(accepted.checked.config.model.path))
    model_bytes = sum(file.stat().st_size for file in files)
    needs = needs_of(accepted, model_bytes=model_bytes, num_nodes=order.num_nodes)
    return needs, accepted.checked.notes


def _with_run_dir(needs: Needs, order: Order) -> Needs:
    from launcher.config.paths import user_path

    return needs if order.run_dir is None else replace(needs, run_dir=str(user_path(order.run_dir, "--run-dir")))


def _leave(number: int, _: FrameType | None) -> None:
    """Unwind the stack, so that temporary files are removed."""
    raise SystemExit(128 + number)
