"""Which devices this machine has, found without importing torch: device files, the vendors' variables, the build."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from asyncflow.errors import ConfigError
from asyncflow.vendors import CPU, Vendor, vendor_of, vendors


@dataclass(frozen=True)
class Devices:
    """Where model ranks run.

    Attributes:
        kind: device type as PyTorch names it.
        count: accelerators visible to this process; 0 for the CPU, which takes any number of ranks.
    """

    kind: str
    count: int = 0


def find_devices(
    requested: str, *, dev: Path = Path("/dev"), env: Mapping[str, str] = os.environ, installed: bool | None = None
) -> Devices:
    """Return the devices for `launcher.device`.

    Args:
        requested: `auto` (an accelerator if one can be used, else the CPU), or a vendor's kind.
        dev: where device files are.
        env: the environment.
        installed: whether the accelerator's PyTorch is installed; None: look.
    Raises:
        ConfigError: the requested device is not there, or the installed PyTorch cannot use it.
    """
    if requested == "cpu":
        return Devices("cpu")
    for vendor in vendors().values() if requested == "auto" else [vendor_of(requested)]:
        if vendor is CPU:
            break
        count = vendor.count(dev, env)
        obstacle = vendor.obstacle() if installed is None else ("" if installed else "its PyTorch is missing")
        if count and not obstacle:
            return Devices(vendor.kind, count)
        if requested == vendor.kind:
            reason = obstacle if count else f"this machine shows no such device ({_seen(vendor, dev, env)})"
            raise ConfigError(
                f"launcher.device: {requested!r} cannot be used: {reason}; set launcher.device=cpu or auto"
            )
    return Devices("cpu")


def _seen(vendor: Vendor, dev: Path, env: Mapping[str, str]) -> str:
    variable = f", {vendor.visible}={env[vendor.visible]!r}" if vendor.visible in env else ""
    return f"no usable {dev}/{vendor.files}*{variable}"
