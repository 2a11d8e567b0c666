"""The device catalogue: `configs/devices/*.yaml`, or a file of yours. Peaks and bandwidths, each with its source."""

import re
from pathlib import Path

from pydantic import Field, ValidationError

from asyncflow.errors import ConfigError
from asyncflow.settings import Settings
from launcher.config.paths import PACKAGED
from launcher.config.yaml_file import read_yaml


class Achievable(Settings):
    """Shares of peaks and bandwidths that are reached. Assumptions, the same for every device: none is fitted to a
    result. A measured device has numbers of its own in its file."""

    train: float = Field(0.4, gt=0, le=1)
    """Of the peak, forward and backward of packed micro-batches."""
    forward: float = Field(0.5, gt=0, le=1)
    """Of the peak, without gradients; prefill."""
    memory: float = Field(0.7, gt=0, le=1)
    """Of the memory's bandwidth, weights and keys and values of a decode step."""
    link: float = Field(0.7, gt=0, le=1)
    """Of links, network and host transfers."""


class Peaks(Settings):
    """Dense matrix products by element type (TFLOP/s)."""

    bfloat16: float = Field(gt=0)
    float32: float = Field(gt=0)


class Device(Settings):
    """One kind of accelerator, in nodes. Bandwidths are of one device in one direction."""

    name: str
    """As `--device` has it."""
    peak_tflops: Peaks
    """What products reach at most."""
    memory_gb: float = Field(gt=0)
    """Memory (GB)."""
    memory_gb_s: float = Field(gt=0)
    """Memory bandwidth (GB/s)."""
    devices_per_node: int = Field(ge=1)
    """Devices of a node."""
    link_gb_s: float = Field(gt=0)
    """To the others of its node (GB/s)."""
    network_gb_s: float = Field(gt=0)
    """To other nodes (GB/s)."""
    host_gb_s: float = Field(gt=0)
    """To host memory (GB/s)."""
    shared_by: int = Field(0, ge=0)
    """Cores of a CPU that all ranks share: with more ranks than cores each has its share; 0: a rank has the device."""
    step_overhead_s: float = Field(0.002, ge=0)
    """Of a decode step, beside reading memory (s); assumed where no source is given."""
    hop_s: float = Field(1e-5, ge=0)
    """Of a collective of a node's devices, beside its bytes (s); assumed where no source is given."""
    achievable: Achievable = Achievable()
    sources: dict[str, str]
    """Where each number is from."""


def find_device(name: str) -> Device:
    """Return a device of the catalogue, or of a YAML file.

    Raises:
        ConfigError: there is none of that name, or the file says something else.
    """
    known = {path.name.removesuffix(".yaml"): path for path in _catalogue()}
    path = Path(name) if name.endswith((".yaml", ".yml")) else known.get(name)
    if path is None:
        raise ConfigError(f"--device {name}: is not known; give one of {' '.join(sorted(known))}, or a YAML file")
    if not path.is_file():
        raise ConfigError(f"--device {path}: is no file; give a YAML file like configs/devices/h100.yaml, or a name")
    try:
        return Device.model_validate(read_yaml(path).values)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ConfigError(f"--device {path}: {where}: {first['msg']}; see configs/devices/h100.yaml") from error


def device_of(measured: str, named: str | None, what: str) -> str | None:
    """Return the name of the device that a profile was measured on.

    Args:
        measured: as the device calls itself.
        named: by `--device`; None: it is looked up in the catalogue.
        what: names the profile's file.

    Raises:
        ConfigError: the catalogue has it under another name than `named`.
    """
    known = [path.name.removesuffix(".yaml") for path in _catalogue()]
    called = measured.lower().replace("-", "")
    fitting = [name for name in known if re.search(rf"(?<![a-z0-9]){name.replace('-', '')}(?![0-9])", called)]
    if named in known and fitting and named not in fitting:
        raise ConfigError(f"{what}: was measured on {measured}, not on --device {named}; name --device {fitting[0]}")
    return named or (fitting[0] if fitting else None)


def _catalogue() -> list[Path]:
    return sorted((PACKAGED / "devices").glob("*.yaml"))
