"""Whether the launcher would take a plan: the checks of a start that depend on what a plan changes."""

from launcher.checks.batch_sizes import check_batch_sizes
from launcher.checks.devices import Devices
from launcher.checks.models import check_broadcast, check_generating, check_reference, ranks_per_instance
from launcher.checks.placement import place_gangs
from launcher.checks.preflight import check_clients
from launcher.plan.devices import Device
from workers.settings.dataflow import place_tasks
from workers.settings.run import RunConfig
from workers.tasks.graph import graph_of


def check_launchable(config: RunConfig, device: Device | None, num_devices: int) -> None:
    """Refuse what a start would refuse.

    Args:
        config: of a plan.
        device: of the catalogue, whose nodes have so many; None: ranks share the machine.
        num_devices: of the cluster; the last node may have fewer.

    Raises:
        ConfigError: as at a start.
    """
    check_batch_sizes(config)
    place_tasks(graph_of(config), config.roles)
    check_clients(config)
    check_generating(config)
    check_reference(config)
    devices, num_nodes = Devices("cpu"), 1
    if device is not None and not device.shared_by:
        a_node = min(num_devices, device.devices_per_node)
        devices, num_nodes = Devices("accelerator", a_node), -(-num_devices // a_node)
    check_broadcast(config, devices.kind)
    place_gangs(config, devices, num_nodes=num_nodes, ranks_per_instance=ranks_per_instance(config))
