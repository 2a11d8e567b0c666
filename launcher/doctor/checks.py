"""All checks, in the order in which they run: cheap ones first, then those that import torch, then the engines."""

from collections.abc import Callable
from dataclasses import dataclass

from launcher.doctor import (
    accelerator,
    backends,
    clock,
    disk,
    engines,
    groups,
    interfaces,
    limits,
    memory,
    packages,
    ports,
    sharing,
    slurm,
)
from launcher.doctor.finding import Finding
from launcher.doctor.needs import Needs


@dataclass(frozen=True)
class Check:
    """One look at the machine.

    Attributes:
        name: shown; unique.
        run: looks and judges; in the process of its own.
        deadline_s: after so long it counts as hanging (s).
        if_hanging: what to do then.
    """

    name: str
    run: Callable[[Needs], list[Finding]]
    deadline_s: float
    if_hanging: str


_DRIVER = (
    "try nvidia-smi or npu-smi info: a driver that hangs wants a reboot; or is the disk with Python's packages slow?"
)

CHECKS = (
    Check(packages.CHECK, packages.check, 30, "is the disk with Python's packages reachable? python -m site, df"),
    Check(limits.OPEN_FILES, limits.check_files, 10, "does ls /proc answer?"),
    Check(limits.PROCESSES, limits.check_processes, 10, "does ls /proc answer?"),
    Check(memory.CHECK, memory.check, 10, "does cat /proc/meminfo answer?"),
    Check(
        disk.CHECK,
        disk.check,
        20,
        "does df answer? A network file system that hangs: umount -l it, or another --run-dir",
    ),
    Check(clock.CHECK, clock.check, 10, "does date answer?"),
    Check(ports.CHECK, ports.check, 10, "does ss -s answer?"),
    Check(
        interfaces.CHECK, interfaces.check, 15, "the resolver hangs: correct /etc/resolv.conf, own name to /etc/hosts"
    ),
    Check(slurm.CHECK, slurm.check, 15, "does scontrol ping answer?"),
    Check(accelerator.CHECK, accelerator.check, 120, _DRIVER),
    Check(sharing.CHECK, sharing.check, 20, "does ls /proc/self/fd answer?"),
    Check(groups.CHECK, groups.check, 60, "a firewall swallows packets: iptables -L; or the driver hangs: nvidia-smi"),
    Check(backends.CHECK, backends.check, 30, "does its server answer? correct tq.backend.address"),
    Check(engines.CHECK, engines.check, 180, _DRIVER),
)
