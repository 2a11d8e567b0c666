"""Devices: does PyTorch see what the machine has, compute on it, and have the backend that connects it."""

from dataclasses import dataclass

from asyncflow.errors import ConfigError
from asyncflow.size_text import size_text
from launcher.devices import Kind, find_devices
from launcher.doctor.finding import Finding, reason
from launcher.doctor.needs import Needs

CHECK = "devices"
_TOOLS = {"cuda": "nvidia-smi", "npu": "npu-smi info"}
_BUSY = 0.5


@dataclass(frozen=True)
class Device:
    """One accelerator.

    Attributes:
        error: what a small computation on it raised; empty: it computed.
        free_bytes, total_bytes: of its memory; 0: not known.
    """

    error: str = ""
    free_bytes: int = 0
    total_bytes: int = 0


@dataclass(frozen=True)
class AcceleratorFacts:
    """What PyTorch says, and what device files say.

    Attributes:
        files: devices by their files and the vendors' variables, whatever PyTorch can do.
        import_error: of torch, and of torch_npu where it is needed; empty: none.
        torch: version.
        kind: of the accelerator that PyTorch uses; empty: none.
        backend: that connects devices of the kind in use, `gloo` on the CPU; and whether this build has it.
        devices: each that PyTorch counts.
    """

    files: dict[Kind, int]
    import_error: str = ""
    torch: str = ""
    kind: str = ""
    backend: str = ""
    backend_available: bool = False
    devices: tuple[Device, ...] = ()


def check(needs: Needs) -> list[Finding]:
    """Look and judge."""
    return judge(gather(needs), needs)


def gather(needs: Needs) -> AcceleratorFacts:
    """Import torch, and compute a little on every device if the run uses them."""
    files: dict[Kind, int] = {"cuda": _by_files("cuda"), "npu": _by_files("npu")}
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


def judge(facts: AcceleratorFacts, needs: Needs) -> list[Finding]:
    """Compare."""
    if facts.import_error:
        remedy = "python -c 'import torch' shows all of it; the README says which build fits which device"
        return [Finding.error(CHECK, f"torch cannot be imported ({facts.import_error})", remedy)]
    if not facts.backend_available:
        text = f"torch {facts.torch} lacks the backend {facts.backend}, which connects {needs.device} devices"
        return [Finding.error(CHECK, text, f"install a build of torch with {facts.backend}; see the README")]
    if needs.device == "cpu":
        return [_idle_devices(facts) or Finding.ok(CHECK, f"cpu: torch {facts.torch}, backend {facts.backend}")]
    tool = _TOOLS[needs.device]
    if facts.kind != needs.device:
        text = f"{facts.files[needs.device]} {needs.device} devices are there, but torch {facts.torch} cannot use them"
        return [Finding.error(CHECK, text, f"does `{tool}` list them? Then install the torch that fits the driver")]
    broken = [
        Finding.error(CHECK, f"{needs.device}:{index} cannot compute ({device.error})", f"look at it: {tool}")
        for index, device in enumerate(facts.devices)
        if device.error
    ]
    text = f"{len(facts.devices)} x {needs.device}: torch {facts.torch}, backend {facts.backend}"
    return broken or [*_busy_devices(facts, needs), Finding.ok(CHECK, text)]


def _idle_devices(facts: AcceleratorFacts) -> Finding | None:
    """Devices that a run would leave alone, because PyTorch cannot use them."""
    for kind, count in facts.files.items():
        if count and facts.kind != kind:
            text = f"{count} {kind} devices are there, but torch {facts.torch} cannot use them, so a run takes the CPU"
            return Finding.warning(CHECK, text, f"install torch for {kind}, see the README; or leave it at the CPU")
    return None


def _busy_devices(facts: AcceleratorFacts, needs: Needs) -> list[Finding]:
    return [
        Finding.warning(
            CHECK,
            f"{needs.device}:{index} has {size_text(device.free_bytes)} of {size_text(device.total_bytes)} free",
            f"who else uses it: {_TOOLS[needs.device]}",
        )
        for index, device in enumerate(facts.devices)
        if device.free_bytes < _BUSY * device.total_bytes
    ]


def _by_files(kind: Kind) -> int:
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
    except AttributeError:  # older than torch 2.11: no such call
        return Device()
    except RuntimeError as error:
        return Device(error=reason(error))
    return Device("", free, total)
