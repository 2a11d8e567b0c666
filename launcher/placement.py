"""Decide which gangs a run has and which device every rank gets. Pure: roles and settings in, gangs out.

One rollout rank is one instance, one ref rank one copy; the actor's ranks are one gang. Reward and advantages processes
take no device. Services come first, because everybody else needs them.
"""

from asyncflow.errors import ConfigError
from asyncflow.job import GangSpec
from launcher.devices import Devices
from workers.config import RunConfig
from workers.dataflow import CONTROLLER, ON_DEVICE, STORAGE, WEIGHTS

ONE_GANG = ("actor", "critic")
"""Roles whose ranks all live and die together."""


def place_gangs(config: RunConfig, devices: Devices) -> tuple[GangSpec, ...]:
    """Return all gangs: services, then roles in `ON_DEVICE`'s order, then those without a device.

    Raises:
        ConfigError: fewer accelerators than ranks, or `launcher.external_gangs` names no gang.
    """
    roles = config.roles
    on_device = [role for role in ON_DEVICE if role in roles]
    without = [role for role in roles if role not in ON_DEVICE]
    names = _device_names(sum(roles[role] for role in on_device), roles, devices)
    gangs = [_service(name, CONTROLLER, index) for index, name in enumerate(config.tq.controllers)]
    gangs += [_service(f"{STORAGE}-{unit}", STORAGE, unit) for unit in range(config.tq.num_storage_units)]
    gangs.append(_service(f"{WEIGHTS}-0", WEIGHTS, 0))
    for role in on_device:
        mine, names = names[: roles[role]], names[roles[role] :]
        gangs += _gangs_of(role, mine)
    for role in without:
        gangs += _gangs_of(role, ["cpu"] * roles[role])
    _check_external(config.launcher.external_gangs, [gang.name for gang in gangs])
    return tuple(gangs)


def _gangs_of(role: str, devices: list[str]) -> list[GangSpec]:
    if role in ONE_GANG:
        return [GangSpec(role, role, 0, len(devices), tuple(devices))]
    return [GangSpec(f"{role}-{index}", role, index, 1, (device,)) for index, device in enumerate(devices)]


def _service(name: str, role: str, index: int) -> GangSpec:
    return GangSpec(name, role, index, 1, ("cpu",))


def _device_names(num_ranks: int, roles: dict[str, int], devices: Devices) -> list[str]:
    if devices.kind == "cpu":
        return ["cpu"] * num_ranks
    if num_ranks > devices.count:
        wanted = ",".join(f"{role}:{count}" for role, count in roles.items())
        raise ConfigError(
            f"roles: {wanted} needs {num_ranks} {devices.kind} devices, but {devices.count} are there; "
            f"launch {devices.count} ranks in all, or set launcher.device=cpu"
        )
    return [f"{devices.kind}:{index}" for index in range(num_ranks)]


def _check_external(external: tuple[str, ...], names: list[str]) -> None:
    for name in external:
        if name not in names:
            raise ConfigError(
                f"launcher.external_gangs: {name!r} is not a gang of this run; its gangs: {' '.join(names)}"
            )
