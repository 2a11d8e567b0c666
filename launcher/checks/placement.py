"""Decide which gangs a run has, and the node and device of every rank. Pure: roles and settings in, gangs out.

The actor's ranks are one gang. Each ref rank is a copy, unless several share one: these form a gang. Each rollout rank
is an instance, unless several form one: then one process drives all of their devices. Advantages processes take no
device; reward processes take one only with a reward model. Services come first, because all others need them.

    devices    node after node in the order of `roles_on_device`; an instance or a copy stays on one node, and leaves
               devices to smaller ones where it does not fit; a trainer that needs several nodes begins on an empty one
    cpu        as many ranks on every node, in the same order
    rollout+actor: the actor is placed as usual, and instance after instance gets the devices of its ranks, in order
    others     storage units and ranks without a device in turn, controllers on node 0, a weight agent on each node
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from asyncflow.errors import ConfigError
from asyncflow.job import GangSpec
from asyncflow.vendors import CPU, Vendor, vendor_of, vendors
from workers.settings.dataflow import CONTROLLER, STORAGE, WEIGHTS, roles_on_device
from workers.settings.run import RunConfig

# This machine's devices, found without importing torch: device files, the vendors' variables, the PyTorch build.


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
        requested: `auto` (an accelerator if one is usable, else the CPU), or a vendor's kind.
        installed: whether the accelerator's PyTorch is installed; None: look.

    Raises:
        ConfigError: the requested device does not exist, or the installed PyTorch cannot use it.
    """
    if requested == "cpu":
        return Devices("cpu")
    for vendor in vendors().values() if requested == "auto" else [vendor_of(requested)]:
        if vendor is CPU:
            break
        # Asking torch would import it before the configuration is accepted.
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


ONE_GANG = ("actor", "critic")
"""Roles whose ranks all live and die together."""
HEAD = 0


def place_gangs(
    config: RunConfig,
    devices: Devices,
    *,
    num_nodes: int = 1,
) -> tuple[GangSpec, ...]:
    """Return all gangs: services, then those of `roles_on_device` in its order, then those without a device.

    Args:
        devices: of every node.

    Raises:
        ConfigError: fewer accelerators than ranks, no node with room for an instance, ranks that form no whole
            instances, or `launcher.external_gangs` names something other than a gang on node 0.
    """
    roles = config.roles
    takers = roles_on_device(reward_model=config.reward.model is not None)
    on_device = [gang for role in takers if role in roles for gang in _gangs_of(role, config)]
    guests = [gang for gang in on_device if gang.role in config.guests]
    on_device = [gang for gang in on_device if gang not in guests]
    without = [gang for role in roles if role not in takers for gang in _gangs_of(role, config)]
    services = [_gang(name, CONTROLLER, index) for index, name in enumerate(config.tq.controllers)]
    units = [_gang(f"{STORAGE}-{unit}", STORAGE, unit) for unit in range(config.tq.num_storage_units)]
    agents = [replace(_gang(f"{WEIGHTS}-{node}", WEIGHTS, node), nodes=(node,)) for node in range(num_nodes)]
    if devices.kind == "cpu":
        placed = _spread(on_device, num_nodes)
    else:
        placed = _fill(on_device, devices, num_nodes, config.roles_text)
    if guests:
        placed = _place_guests(guests, placed)
    gangs = (*services, *_in_turn(units, num_nodes), *agents, *placed, *_in_turn(without, num_nodes))
    _check_external(config.launcher.external_gangs, gangs)
    return gangs


def _gangs_of(role: str, config: RunConfig) -> list[GangSpec]:
    num_ranks = config.roles[role]
    if role in ONE_GANG:
        return [_gang(role, role, 0, num_ranks)]
    together = config.ranks_per_copy(role)
    shared = together // config.ranks_per_instance(role)  # processes
    if num_ranks % together:
        what, key = ("copies", _copy_key(role)) if shared > 1 else ("instances", _INSTANCE_KEY)
        raise ConfigError(
            f"roles: {role}:{num_ranks} makes no whole {what} of {together} ranks ({key}); give a multiple of "
            f"{together}"
        )
    return [_gang(f"{role}-{k}", role, k, shared, num_devices=together) for k in range(num_ranks // together)]


_INSTANCE_KEY = "vllm.tensor_parallel_size"


def _copy_key(role: str) -> str:
    """Return the settings that say how many ranks share a copy."""
    own = {"reward": "reward.model.shards", "teacher": "teacher.shards"}
    return own.get(role, "ref.shards, ref.megatron")


def _gang(name: str, role: str, index: int, num_ranks: int = 1, num_devices: int | None = None) -> GangSpec:
    return GangSpec(name, role, index, num_ranks, ("cpu",) * (num_devices or num_ranks))


def _in_turn(gangs: Sequence[GangSpec], num_nodes: int) -> list[GangSpec]:
    return [replace(gang, nodes=(gang.index % num_nodes,) * gang.num_ranks) for gang in gangs]


def _spread(gangs: Sequence[GangSpec], num_nodes: int) -> list[GangSpec]:
    """Give every node an even block of all ranks; an instance lives where its first rank falls."""
    total = sum(len(gang.devices) for gang in gangs)
    placed, begin = [], 0
    for gang in gangs:
        spans = gang.role in ONE_GANG
        ranks = [begin + (rank if spans else 0) for rank in range(gang.num_ranks)]
        placed.append(replace(gang, nodes=tuple(rank * num_nodes // total for rank in ranks)))
        begin += len(gang.devices)
    return placed


@dataclass
class _Room:
    """Free devices of one node: those from `used` on."""

    node: int
    used: int
    count: int

    @property
    def free(self) -> int:
        return self.count - self.used

    def take_devices(self, number: int) -> list[tuple[int, int]]:
        """Return (node, device) of `number` devices, or of all that are left."""
        first, self.used = self.used, min(self.used + number, self.count)
        return [(self.node, device) for device in range(first, self.used)]


def _place_guests(guests: Sequence[GangSpec], placed: Sequence[GangSpec]) -> list[GangSpec]:
    """Add the instances that take turns with the actor on its devices."""
    hosts = next(gang for gang in placed if gang.role == "actor")
    places, found = hosts.places, []
    for gang in guests:
        begin = gang.index * len(gang.devices)
        own = places[begin : begin + len(gang.devices)]
        if len({node for node, _ in own}) > 1:
            raise ConfigError(
                f"roles: {gang.name} shares {len(own)} devices with actor ranks on several nodes, but stays on one; "
                f"set {_INSTANCE_KEY} to a divisor of the actor's ranks on each node"
            )
        nodes = tuple(node for node, _ in own[: gang.num_ranks])
        found.append(replace(gang, devices=tuple(device for _, device in own), nodes=nodes))
    return [*placed, *found]


def _fill(gangs: Sequence[GangSpec], devices: Devices, num_nodes: int, roles: str) -> list[GangSpec]:
    rooms = [_Room(node, 0, devices.count) for node in range(num_nodes)]
    wanted = sum(len(gang.devices) for gang in gangs)
    if wanted > devices.count * num_nodes:
        raise _too_few(roles, wanted, devices, num_nodes)
    return [_with_devices(gang, rooms, devices) for gang in gangs]


def _with_devices(gang: GangSpec, rooms: Sequence[_Room], devices: Devices) -> GangSpec:
    number = len(gang.devices)
    if gang.role in ONE_GANG and number > devices.count:
        # A trainer that needs several nodes takes whole, empty ones.
        wholes = -(-number // devices.count)
        empty = [room for room in rooms if room.used == 0][:wholes]
        able = empty if len(empty) == wholes else []
    else:
        able = [room for room in rooms if room.free >= number][:1]
    if not able:
        raise _no_room(gang, rooms, devices)
    places: list[tuple[int, int]] = []
    for room in able:
        places += room.take_devices(number - len(places))
    names = tuple(f"{devices.kind}:{device}" for _, device in places)
    return replace(gang, devices=names, nodes=tuple(node for node, _ in places[: gang.num_ranks]))


def _too_few(asked: str, wanted: int, devices: Devices, num_nodes: int) -> ConfigError:
    there = devices.count * num_nodes
    nodes = f" ({num_nodes} nodes x {devices.count})" if num_nodes > 1 else ""
    more = ", add nodes (--nnodes)" if num_nodes > 1 else ""
    return ConfigError(
        f"roles: {asked} needs {wanted} {devices.kind} devices, but there are {there}{nodes}; launch {there} ranks in "
        f"all{more}, or set launcher.device=cpu"
    )


def _no_room(gang: GangSpec, rooms: Sequence[_Room], devices: Devices) -> ConfigError:
    free = ", ".join(f"{room.free} on node {room.node}" for room in rooms)
    spans = gang.role in ONE_GANG and gang.num_ranks > devices.count
    if not spans and len(gang.devices) > devices.count:
        key = _INSTANCE_KEY if gang.num_ranks == 1 else _copy_key(gang.role)
        return ConfigError(
            f"{key}: {len(gang.devices)} ranks share a model on one node, but a node has {devices.count} "
            f"{devices.kind} devices; set it to {devices.count} or less"
        )
    needs = "begins on an empty node" if spans else "stays on one node"
    return ConfigError(
        f"roles: {gang.name} needs {len(gang.devices)} {devices.kind} devices and {needs}, but {free} are free; launch "
        f"fewer ranks, or more nodes (--nnodes)"
    )


def _check_external(external: Sequence[str], gangs: Sequence[GangSpec]) -> None:
    by_name = {gang.name: gang for gang in gangs}
    for name in external:
        if name not in by_name:
            raise ConfigError(
                f"launcher.external_gangs: {name!r} is not a gang of this run; its gangs: {' '.join(by_name)}"
            )
        if by_name[name].parts != (HEAD,):
            raise ConfigError(
                f"launcher.external_gangs: {name!r} is placed on node {by_name[name].parts[-1]}, but only gangs of "
                f"node 0 may be started by hand; leave it out"
            )
