"""Checks of devices: does PyTorch see the machine's devices, compute on them, and have the backend that connects them?
Can two ranks meet and add over each backend and interface that a run would use?
"""

import threading
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from asyncflow.errors import ConfigError
from asyncflow.job import GLOO_INTERFACE, LOOPBACK, LOOPBACK_INTERFACE
from asyncflow.process import variables_set
from launcher.checks.placement import find_devices
from launcher.doctor.findings import Facts, MachineCheck, Needs, Size, error, fatal, ok, reason, warning
from launcher.doctor.network import between_nodes
from launcher.doctor.software import DRIVER

if TYPE_CHECKING:
    import torch
    from torch.distributed import TCPStore

_TOOLS = {"cuda": "nvidia-smi", "npu": "npu-smi info"}
_BUSY = 0.5
_TIMEOUT = timedelta(seconds=10)


def try_devices(needs: Needs) -> Facts:
    """Import torch and, if the run uses devices, compute a little on each."""
    # By device files and the vendors' variables, whatever PyTorch can use.
    files = {kind: _by_files(kind) for kind in _TOOLS}
    tool = _TOOLS.get(needs.device, f"the tool of {needs.device}")
    facts: dict[str, Any] = {"unimportable": "", "count": files.get(needs.device), "tool": tool}
    try:
        import torch
        import torch.distributed as dist

        if needs.device == "npu":
            import torch_npu  # noqa: F401 - registers the device and HCCL
    except (ImportError, OSError, RuntimeError) as raised:
        return {**facts, "unimportable": reason(raised)}
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    kind = accelerator.type if accelerator is not None else ""
    used = needs.device if needs.device == kind else "cpu"
    backend = dist.get_default_backend_for_device(used)
    tried = [try_device(kind, index) for index in range(torch.accelerator.device_count())] if used != "cpu" else []
    here = f"{len(tried)} x {used}" if used != "cpu" else "cpu"
    return {
        **facts, "torch": torch.__version__, "backend": backend, "available": dist.is_backend_available(backend),
        "kind": kind, "here": here, "broken": [each for each in tried if each["why"]],
        "busy": [each for each in tried if each["free"] < _BUSY * each["total"]],
        "idle": [{"idle": other, "number": files[other]} for other in files if files[other] and other != kind],
    }  # fmt: skip


DEVICES = MachineCheck(
    "devices", try_devices, (
        fatal("unimportable", "torch cannot be imported ({unimportable})",
              "python -c 'import torch' shows all of it; the README says which build fits which device"),
        fatal(lambda f: not f.available,
              "torch {torch} lacks the backend {backend}, which connects {device} devices",
              "install a build of torch with {backend}; see the README"),
        warning(lambda f: f.device == "cpu" and f.idle[:1],
                "{number} {idle} devices are there, but torch {torch} cannot use them, so a run takes the CPU",
                "install torch for {idle}, see the README; or stay on the CPU"),
        fatal(lambda f: f.device not in ("cpu", f.kind),
              "{count} {device} devices are there, but torch {torch} cannot use them",
              "does `{tool}` list them? Then install the torch that fits the driver"),
        fatal("broken", "{device}:{index} cannot compute ({why})", "look at it: {tool}"),
        warning("busy", "{device}:{index} has {free} of {total} free", "who else uses it: {tool}"),
        ok(lambda f: f.device != "cpu", "{here}: torch {torch}, backend {backend}"),
    ),
    "{here}: torch {torch}, backend {backend}",
    120, DRIVER,
)  # fmt: skip


def try_groups(needs: Needs) -> Facts:
    """Try groups: Gloo over loopback, over the interface between several nodes, and the devices' backend."""
    import torch

    names = [LOOPBACK_INTERFACE]
    if needs.num_nodes > 1 and (name := between_nodes()[0]):
        names.append(name)
    tried = [_group("gloo", name, _gloo_error(name), _LOOPBACK_REMEDY if name == LOOPBACK_INTERFACE else _NAME_IT)
             for name in names]  # fmt: skip
    if needs.device != "cpu" and torch.accelerator.is_available():
        backend = torch.distributed.get_default_backend_for_device(needs.device)
        devices = [torch.device(needs.device, index) for index in range(min(2, torch.accelerator.device_count()))]
        remedy = f"{backend.upper()}_DEBUG=INFO asyncflow doctor; is the driver as new as {backend}?"
        tried.append(_group(backend, f"{len(devices)} x {needs.device}", _error_of(devices), remedy))
    return {"tried": ", ".join(each["what"] for each in tried), "failed": [each for each in tried if each["why"]]}


def _group(backend: str, where: str, why: str, advice: str) -> Facts:
    return {"what": f"{backend} on {where}", "why": why, "advice": advice}


_LOOPBACK_REMEDY = "ip link set lo up; iptables -A INPUT -i lo -j ACCEPT"
_NAME_IT = f"export {GLOO_INTERFACE}=NAME of an interface in `ip addr` that is up"
GROUPS = MachineCheck(
    "groups", try_groups, (error("failed", "no group over {what} ({why})", "{advice}"),),
    "all-reduce between two ranks works ({tried})",
    60, "a firewall swallows packets: iptables -L; or the driver hangs: nvidia-smi",
)  # fmt: skip


def _by_files(kind: str) -> int:
    try:
        return find_devices(kind, installed=True).count
    except ConfigError:
        return 0


def try_device(kind: str, index: int) -> Facts:
    """Compute on one device; an unknown size of its memory is 0."""
    import torch

    device, facts = torch.device(kind, index), {"index": index, "why": "", "free": Size(0), "total": Size(0)}
    try:
        ones = torch.ones(64, 64, device=device)
        if float((ones @ ones).sum()) != 64.0**3:
            return {**facts, "why": "a product of two matrices came out wrong"}
        free, total = torch.accelerator.get_memory_info(device)
    except AttributeError:  # torch before 2.11 lacks `get_memory_info`
        return facts
    except RuntimeError as raised:
        return {**facts, "why": reason(raised)}
    return {**facts, "free": Size(free), "total": Size(total)}


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
    except (OSError, RuntimeError) as raised:
        return f"no job store on {LOOPBACK}: {reason(raised)}"
    errors: list[str] = []

    def meet(rank: int) -> None:
        try:
            _add(connect_store(LOOPBACK, port, _TIMEOUT), rank, devices)
        except Exception as raised:  # noqa: BLE001 (the thread's boundary; each backend raises errors of its own)
            errors.append(reason(raised))

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
