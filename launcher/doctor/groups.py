"""Process groups: do two ranks meet and add up, over the interface and the backend that a run would use."""

import threading
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from asyncflow.environment import variables_set
from asyncflow.network import GLOO_INTERFACE, LOOPBACK_INTERFACE
from launcher.doctor.finding import Finding, reason
from launcher.doctor.interfaces import between_nodes, find_interfaces
from launcher.doctor.needs import Needs

if TYPE_CHECKING:
    import torch
    from torch.distributed import TCPStore

CHECK = "groups"
_TIMEOUT = timedelta(seconds=10)


@dataclass(frozen=True)
class GroupFacts:
    """One group that was tried.

    Attributes:
        backend: e.g. `gloo`.
        where: interface, or devices.
        error: why it could not be; empty: it added up.
    """

    backend: str
    where: str
    error: str = ""


def check(needs: Needs) -> list[Finding]:
    """Look and judge."""
    return judge(gather(needs), needs)


def gather(needs: Needs) -> list[GroupFacts]:
    """Build the groups: Gloo over loopback, over the interface between nodes if there are several, and the devices'."""
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


def judge(facts: list[GroupFacts], needs: Needs) -> list[Finding]:
    """Say which of them cannot be."""
    findings = []
    for group in facts:
        if not group.error:
            continue
        remedy = f"export {GLOO_INTERFACE}=NAME of an interface in `ip addr` that is up"
        if group.backend == "gloo" and group.where == LOOPBACK_INTERFACE:
            remedy = "ip link set lo up; iptables -A INPUT -i lo -j ACCEPT"
        elif group.backend != "gloo":
            remedy = f"{group.backend.upper()}_DEBUG=INFO asyncflow doctor; is the driver as new as {group.backend}?"
        findings.append(Finding.error(CHECK, f"no group over {group.backend} on {group.where} ({group.error})", remedy))
    if not findings:
        tried = ", ".join(f"{group.backend} on {group.where}" for group in facts)
        findings.append(Finding.ok(CHECK, f"two ranks met and added up: {tried}"))
    return findings


def _gloo_error(interface: str) -> str:
    import torch

    from asyncflow.transport.gloo import gloo_device

    with variables_set({GLOO_INTERFACE: interface}):
        gloo_device.cache_clear()
        try:
            return _error_of([torch.device("cpu")] * 2)
        finally:
            gloo_device.cache_clear()


def _error_of(devices: "list[torch.device]") -> str:
    """Have one thread per device meet the others and add; returns what went wrong first, or nothing."""
    from asyncflow.network import LOOPBACK
    from asyncflow.store_server import connect_store, serve_store

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
