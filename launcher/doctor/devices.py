"""Checks of devices: does PyTorch see the machine's devices, compute on them, and have the backend that connects them?
Can two ranks meet and add over each backend and interface that a run would use?
"""

import threading
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from asyncflow.errors import ConfigError, size_text
from asyncflow.job import GLOO_INTERFACE, LOOPBACK, LOOPBACK_INTERFACE
from asyncflow.process import variables_set
from launcher.checks.placement import find_devices
from launcher.doctor.findings import Finding, Needs, reason
from launcher.doctor.network import between_nodes, find_interfaces

if TYPE_CHECKING:
    import torch
    from torch.distributed import TCPStore

DEVICES, GROUPS = "devices", "groups"
_TOOLS = {"cuda": "nvidia-smi", "npu": "npu-smi info"}
_BUSY = 0.5
_TIMEOUT = timedelta(seconds=10)


@dataclass(frozen=True)
class Device:
    """One accelerator.

    Attributes:
        error: what a small computation on it raised; empty: nothing.
        free_bytes, total_bytes: of its memory; 0: unknown.
    """

    error: str = ""
    free_bytes: int = 0
    total_bytes: int = 0


@dataclass(frozen=True)
class AcceleratorFacts:
    """Devices as PyTorch and as device files show them.

    Attributes:
        files: kind -> number of devices by device files and the vendors' variables, whatever PyTorch can use.
        import_error: of torch, or of torch_npu where it is needed; empty: none.
        kind: of the accelerator that PyTorch uses; empty: none.
        backend: the one that connects devices of the kind in use, `gloo` on the CPU.
        devices: each one that PyTorch counts.
    """

    files: dict[str, int]
    import_error: str = ""
    torch: str = ""
    kind: str = ""
    backend: str = ""
    backend_available: bool = False
    devices: tuple[Device, ...] = ()


@dataclass(frozen=True)
class GroupFacts:
    """One group that was tried; `where` is an interface or devices, and `error` is empty if the sum was right."""

    backend: str
    where: str
    error: str = ""


def try_devices(needs: Needs) -> AcceleratorFacts:
    """Import torch and, if the run uses devices, compute a little on each."""
    files: dict[str, int] = {"cuda": _by_files("cuda"), "npu": _by_files("npu")}
    try:
        import torch
        import torch.distributed as dist

        if needs.device == "npu":
            import torch_npu  # noqa: F401 - registers the device and HCCL
    except (ImportError, OSError, RuntimeError) as error:
        return AcceleratorFacts(files, import_error=reason(error))
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    kind = accelerator.type if accelerator is not None else ""
    used = needs.device if needs.device == kind else "cpu"
    backend = dist.get_default_backend_for_device(used)
    devices = tuple(_try(kind, index) for index in range(torch.accelerator.device_count())) if used != "cpu" else ()
    return AcceleratorFacts(
        files, "", torch.__version__, kind, backend, dist.is_backend_available(backend), devices=devices
    )


def judge_devices(facts: AcceleratorFacts, needs: Needs) -> list[Finding]:
    if facts.import_error:
        remedy = "python -c 'import torch' shows all of it; the README says which build fits which device"
        return [Finding.error(DEVICES, f"torch cannot be imported ({facts.import_error})", remedy)]
    if not facts.backend_available:
        text = f"torch {facts.torch} lacks the backend {facts.backend}, which connects {needs.device} devices"
        return [Finding.error(DEVICES, text, f"install a build of torch with {facts.backend}; see the README")]
    if needs.device == "cpu":
        return [_idle_devices(facts) or Finding.ok(DEVICES, f"cpu: torch {facts.torch}, backend {facts.backend}")]
    tool = _TOOLS[needs.device]
    if facts.kind != needs.device:
        text = f"{facts.files[needs.device]} {needs.device} devices are there, but torch {facts.torch} cannot use them"
        return [Finding.error(DEVICES, text, f"does `{tool}` list them? Then install the torch that fits the driver")]
    broken = [
        Finding.error(DEVICES, f"{needs.device}:{index} cannot compute ({device.error})", f"look at it: {tool}")
        for index, device in enumerate(facts.devices)
        if device.error
    ]
    text = f"{len(facts.devices)} x {needs.device}: torch {facts.torch}, backend {facts.backend}"
    return broken or [*_busy_devices(facts, needs), Finding.ok(DEVICES, text)]


def try_groups(needs: Needs) -> list[GroupFacts]:
    """Try groups: Gloo over loopback, over the interface between several nodes, and the devices' backend."""
    import torch

    names = [LOOPBACK_INTERFACE]
    if needs.num_nodes > 1 and (name := between_nodes(find_interfaces())):
        names.append(name)
    groups = [GroupFacts("gloo", name, _gloo_error(name)) for name in names]
    if needs.device != "cpu" and torch.accelerator.is_available():
        backend = torch.distributed.get_default_backend_for_device(needs.device)
        devices = [torch.device(needs.device, index) for index in range(min(2, torch.accelerator.device_count()))]
        groups.append(GroupFacts(backend, f"{len(devices)} x {needs.device}", _error_of(devices)))
    return groups


def judge_groups(facts: list[GroupFacts], needs: Needs) -> list[Finding]:
    findings = []
    for group in facts:
        if not group.error:
            continue
        remedy = f"export {GLOO_INTERFACE}=NAME of an interface in `ip addr` that is up"
        if group.backend == "gloo" and group.where == LOOPBACK_INTERFACE:
            remedy = "ip link set lo up; iptables -A INPUT -i lo -j ACCEPT"
        elif group.backend != "gloo":
            remedy = f"{group.backend.upper()}_DEBUG=INFO asyncflow doctor; is the driver as new as {group.backend}?"
        text = f"no group over {group.backend} on {group.where} ({group.error})"
        findings.append(Finding.error(GROUPS, text, remedy))
    if not findings:
        tried = ", ".join(f"{group.backend} on {group.where}" for group in facts)
        findings.append(Finding.ok(GROUPS, f"all-reduce between two ranks works ({tried})"))
    return findings


def _idle_devices(facts: AcceleratorFacts) -> Finding | None:
    """Report devices that a run would leave idle because PyTorch cannot use them."""
    for kind, count in facts.files.items():
        if count and facts.kind != kind:
            text = f"{count} {kind} devices are there, but torch {facts.torch} cannot use them, so a run takes the CPU"
            return Finding.warning(DEVICES, text, f"install torch for {kind}, see the README; or stay on the CPU")
    return None


def _busy_devices(facts: AcceleratorFacts, needs: Needs) -> list[Finding]:
    return [
        Finding.warning(
            DEVICES,
            f"{needs.device}:{index} has {size_text(device.free_bytes)} of {size_text(device.total_bytes)} free",
            f"who else uses it: {_TOOLS[needs.device]}",
        )
        for index, device in enumerate(facts.devices)
        if device.free_bytes < _BUSY * device.total_bytes
    ]


def _by_files(kind: str) -> int:
    try:
        return find_devices(kind, installed=True).count
    except ConfigError:
        return 0


def _try(kind: str, index: int) -> Device:
    import torch

    device = torch.device(kind, index)
    try:
        ones = torch.ones(64, 64, device=device)
        if float((ones @ ones).sum()) != 64.0**3:
            return Device(error="a product of two matrices came out wrong")
        free, total = torch.accelerator.get_memory_info(device)
    except AttributeError:  # torch before 2.11 lacks `get_memory_info`
        return Device()
    except RuntimeError as error:
        return Device(error=reason(error))
    return Device("", free, total)


def _gloo_error(interface: str) -> str:
    import torch

    from asyncflow.transport.channel import gloo_device

    with variables_set({GLOO_INTERFACE: interface}):
        # The cached device is bound to another interface.
        gloo_device.cache_clear()
        try:
            return _error_of([torch.device("cpu")] * 2)
        finally:
            gloo_device.cache_clear()


def _error_of(devices: "list[torch.device]") -> str:
    """Let one thread per device meet the others and add. Return the first error; empty: it worked."""
    from asyncflow.sealed_store import connect_store, serve_store

    try:
        store, port = serve_store(LOOPBACK, _TIMEOUT)
    except (OSError, RuntimeError) as error:
        return f"no job store on {LOOPBACK}: {reason(error)}"
    errors: list[str] = []

    def meet(rank: int) -> None:
        try:
            _add(connect_store(LOOPBACK, port, _TIMEOUT), rank, devices)
        except Exception as error:  # noqa: BLE001 (the thread's boundary; each backend raises errors of its own)
            errors.append(reason(error))

    threads = [threading.Thread(target=meet, args=(rank,), daemon=True) for rank in range(len(devices))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    del store
    return errors[0] if errors else ""


def _add(store: "TCPStore", rank: int, devices: "list[torch.device]") -> None:
    import torch

    from asyncflow.device import connect_group

    device = devices[rank]
    if device.type != "cpu":
        torch.accelerator.set_device_index(device.index)
    group = connect_group(store, rank, len(devices), device)
    numbers = torch.full((1024,), rank + 1.0, device=device)
    group.allreduce([numbers]).wait()
    if float(numbers[-1]) != sum(range(1, len(devices) + 1)):
        raise RuntimeError("the sum over the ranks came out wrong")
