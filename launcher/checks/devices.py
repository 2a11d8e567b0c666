"""Which devices this machine has, found without importing torch: device files, the vendors' variables, the build."""

import importlib.metadata
import importlib.util
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from asyncflow.errors import ConfigError

Kind = Literal["cpu", "cuda", "npu"]


@dataclass(frozen=True)
class Devices:
    """Where model ranks run.

    Attributes:
        kind: device type as PyTorch names it.
        count: accelerators visible to this process; 0 for the CPU, which takes any number of ranks.
    """

    kind: Kind
    count: int = 0


@dataclass(frozen=True)
class _Vendor:
    kind: Kind
    file_prefix: str
    variable: str


_VENDORS = (
    _Vendor("npu", "davinci", "ASCEND_RT_VISIBLE_DEVICES"),
    _Vendor("cuda", "nvidia", "CUDA_VISIBLE_DEVICES"),
)


def find_devices(
    requested: str, *, dev: Path = Path("/dev"), env: Mapping[str, str] = os.environ, installed: bool | None = None
) -> Devices:
    """Return the devices for `launcher.device`.

    Args:
        requested: `auto` (an accelerator if one can be used, else the CPU), `cpu`, `cuda` or `npu`.
        dev: where device files are.
        env: the environment.
        installed: whether the accelerator's PyTorch is installed; None: look.
    Raises:
        ConfigError: the requested device is not there, or the installed PyTorch cannot use it.
    """
    if requested == "cpu":
        return Devices("cpu")
    for vendor in _VENDORS:
        if requested not in ("auto", vendor.kind):
            continue
        count = _count(vendor, dev, env)
        obstacle = _obstacle(vendor.kind) if installed is None else ("" if installed else "its PyTorch is missing")
        if count and not obstacle:
            return Devices(vendor.kind, count)
        if requested == vendor.kind:
            reason = obstacle if count else f"this machine shows no such device ({_seen(vendor, dev, env)})"
            raise ConfigError(
                f"launcher.device: {requested!r} cannot be used: {reason}; set launcher.device=cpu or auto"
            )
    return Devices("cpu")


def _count(vendor: _Vendor, dev: Path, env: Mapping[str, str]) -> int:
    present = (
        sum(1 for file in dev.iterdir() if re.fullmatch(rf"{vendor.file_prefix}\d+", file.name)) if dev.is_dir() else 0
    )
    visible = env.get(vendor.variable)
    if visible is None:
        return present
    count = 0
    for entry in (part.strip() for part in visible.split(",")):
        # The vendors' runtimes stop at the first entry that names no device.
        if not entry or (re.fullmatch(r"-?\d+", entry) and not 0 <= int(entry) < present):
            break
        count += 1
    return min(count, present)


def _seen(vendor: _Vendor, dev: Path, env: Mapping[str, str]) -> str:
    variable = f", {vendor.variable}={env[vendor.variable]!r}" if vendor.variable in env else ""
    return f"no usable {dev}/{vendor.file_prefix}*{variable}"


def _obstacle(kind: Kind) -> str:
    """Say why the installed PyTorch cannot drive `kind`, or nothing."""
    if kind == "npu":
        return "" if importlib.util.find_spec("torch_npu") else "torch_npu is not installed"
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return "torch is not installed"
    return f"the installed torch {version} is a CPU build" if version.endswith("+cpu") else ""
