"""The checking process: `python -m launcher.doctor.doctor_child DESCRIPTOR PARENT`; order on stdin, answers to it.

Its own output is discarded, since libraries print. It may be killed at any time, and leaves nothing but what SIGTERM
lets it remove. Only `launcher.doctor.runner` starts it.
"""

import contextlib
import importlib
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import TypeVar

from asyncflow.errors import ConfigError, size_text
from asyncflow.process import die_with_parent
from launcher.doctor import devices, disk, network, software
from launcher.doctor import disk as host
from launcher.doctor.findings import RESOLVE, Answer, Finding, Needs, Order, decode_order, encode, reason

Facts = TypeVar("Facts")


@dataclass(frozen=True)
class Check:
    """One check of the machine. After `deadline_s` it counts as hanging, and `if_hanging` says what to do."""

    name: str
    run: Callable[[Needs], list[Finding]]
    deadline_s: float
    if_hanging: str


def _look(
    gather: Callable[[Needs], Facts], judge: Callable[[Facts, Needs], list[Finding]]
) -> Callable[[Needs], list[Finding]]:
    return lambda needs: judge(gather(needs), needs)


_DRIVER = (
    "try nvidia-smi or npu-smi info: a driver that hangs wants a reboot; or is the disk with Python's packages slow?"
)
_PACKAGES = "is the disk with Python's packages reachable? python -m site, df"
_DISK = "does df answer? A network file system that hangs: umount -l it, or another --run-dir"
_NAMES = "the resolver hangs: correct /etc/resolv.conf, own name to /etc/hosts"
_PACKETS = "a firewall swallows packets: iptables -L; or the driver hangs: nvidia-smi"

CHECKS = (
    Check(software.PACKAGES, software.check_packages, 30, _PACKAGES),
    Check(host.OPEN_FILES, _look(host.read_limits, host.judge_open_files), 10, "does ls /proc answer?"),
    Check(host.PROCESSES, _look(host.read_limits, host.judge_processes), 10, "does ls /proc answer?"),
    Check(host.MEMORY, _look(host.read_memory, host.judge_memory), 10, "does cat /proc/meminfo answer?"),
    Check(disk.DISK, _look(disk.try_disk, disk.judge_disk), 20, _DISK),
    Check(host.CLOCK, _look(host.watch_clock, host.judge_clock), 10, "does date answer?"),
    Check(network.PORTS, _look(network.read_ports, network.judge_ports), 10, "does ss -s answer?"),
    Check(network.NETWORK, _look(network.try_network, network.judge_network), 15, _NAMES),
    Check(software.SLURM, _look(software.ask_slurm, software.judge_slurm), 15, "does scontrol ping answer?"),
    Check(devices.DEVICES, _look(devices.try_devices, devices.judge_devices), 120, _DRIVER),
    Check(disk.SHARED_MEMORY, _look(disk.try_sharing, disk.judge_sharing), 20, "does ls /proc/self/fd answer?"),
    Check(devices.GROUPS, _look(devices.try_groups, devices.judge_groups), 60, _PACKETS),
    Check(
        network.BACKEND,
        _look(network.try_backend, network.judge_backend),
        30,
        "does its server answer? correct tq.backend.address",
    ),
    Check(software.ENGINES, _look(software.import_engines, software.judge_engines), 180, _DRIVER),
)
"""In the order in which they run: cheap checks first, then those that import torch, then the engines."""


def main() -> None:
    """Run the checks that the order on stdin names."""
    descriptor, parent = (int(argument) for argument in sys.argv[1:3])
    die_with_parent(parent)
    os.set_inheritable(descriptor, False)
    signal.signal(signal.SIGTERM, _leave)
    with contextlib.suppress(SystemExit):  # SIGTERM unwinds, so temporary files are removed
        _carry_out(decode_order(sys.stdin.buffer.read()), descriptor)
    os._exit(0)  # at once: a normal exit would wait for threads of what was tried


def resolve(order: Order) -> Answer:
    """Read the configuration as `asyncflow-launch` does, unless the order already has its needs. Writes nothing."""
    if order.needs is not None:
        return Answer((Finding.ok(RESOLVE, "known"),), order.needs)
    try:
        needs = Needs.of_machine(order.run_dir, num_nodes=order.num_nodes)
        if order.config is None:
            finding = Finding.ok(RESOLVE, "none given: any run, on this machine")
            return Answer((finding,), _with_run_dir(needs, order))
        needs, notes = _needs_of_run(order)
    except ConfigError as error:
        return Answer(refused=str(error))
    except Exception as error:  # noqa: BLE001 (the boundary: if packages are missing, the checks must still run)
        text = f"cannot be read here ({reason(error)}), so only the machine is checked"
        remedy = "first do what the other findings say, `packages` above all"
        return Answer((Finding.error(RESOLVE, text, remedy),), needs)
    text = (
        f"{order.config}: {needs.processes} workers on {needs.device}, up to {needs.threads} threads, "
        f"{needs.descriptors} files a process, {size_text(needs.memory_bytes)} of memory"
    )
    return Answer(tuple(Finding.ok(RESOLVE, each) for each in (text, *notes)), needs)


def _carry_out(order: Order, descriptor: int) -> None:
    first = resolve(order)
    os.write(descriptor, encode(first))
    if first.needs is None:
        return
    module, _, name = order.registry.partition(":")
    checks: dict[str, Check] = {check.name: check for check in getattr(importlib.import_module(module), name)}
    for wanted in order.checks:
        os.write(descriptor, encode(Answer(tuple(_run(checks[wanted], first.needs)))))


def _run(check: Check, needs: Needs) -> list[Finding]:
    """Run one check; an exception becomes a finding, too."""
    try:
        return check.run(needs)
    except ImportError as error:
        text = f"this could not be checked without the package {error.name}"
        return [Finding.warning(check.name, text, "first do what `packages` says")]
    except Exception as error:  # noqa: BLE001 (a check's boundary: one that fails must not end the others)
        text = f"this could not be checked ({reason(error)})"
        return [Finding.warning(check.name, text, "look at it by hand, and report what happened")]


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
    accepted = Request(order.config, order.roles, order.overrides, run_dir, place=place).accept()
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


if __name__ == "__main__":
    main()
