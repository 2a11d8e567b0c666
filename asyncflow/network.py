"""This host's addresses and network interfaces, and which of them lead to another host. Linux, IPv4, without torch.

Sockets of a run on one node stay on loopback. On several nodes a process uses the interface that leads to the job
store, unless the user named another one.
"""

import contextlib
import os
import socket
import struct
from collections.abc import Iterable, MutableMapping
from pathlib import Path

from asyncflow.errors import ConfigError

LOOPBACK = "127.0.0.1"
LOOPBACK_INTERFACE = "lo"
GLOO_INTERFACE, NCCL_INTERFACE = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"
_INTERFACE_VARIABLES = (GLOO_INTERFACE, NCCL_INTERFACE, "HCCL_SOCKET_IFNAME")
_ROUTES = Path("/proc/net/route")
_ROUTE_UP, _ROUTE_REJECT = 0x1, 0x200
_ANYWHERE = "203.0.113.1"
"""An address for documentation (RFC 5737): nothing is sent there, only the route is looked up."""


def choose_interfaces(store_host: str, env: MutableMapping[str, str] = os.environ) -> None:
    """Have the collective libraries of this process use the interface that leads to the job store.

    Call it before the first process group. On one node that is loopback, whatever the user set for other jobs.

    Raises:
        ConfigError: no interface leads there, and the user named none.
    """
    if is_loopback(store_host):
        env[GLOO_INTERFACE] = LOOPBACK_INTERFACE
        return
    wanted = [variable for variable in _INTERFACE_VARIABLES if not env.get(variable)]
    if wanted:
        env.update(dict.fromkeys(wanted, interface_towards(store_host)))


def choose_interface(host: str) -> None:
    """Have this process's channels use the interface that leads to `host`, unless the user named one; for programs
    that have process groups of their own beside them."""
    if not is_loopback(host):
        os.environ.setdefault(GLOO_INTERFACE, interface_towards(host))


def is_loopback(address: str) -> bool:
    """Return whether an IPv4 address never leaves the host."""
    return address.startswith("127.")


def interface_towards(address: str, routes: Path = _ROUTES) -> str:
    """Return the interface whose route to `address` is the most specific one.

    For an address of this host that is the interface of its network.

    Raises:
        ConfigError: there is no route.
    """
    target = _as_number(address)
    best: tuple[int, int, str] | None = None
    for line in routes.read_text().splitlines()[1:]:
        name, destination, _, flags, _, _, metric, mask = line.split()[:8]
        bits = int(flags, 16)
        if not bits & _ROUTE_UP or bits & _ROUTE_REJECT:
            continue
        network, width = _of_kernel(destination), _of_kernel(mask)
        if target & width == network and (best is None or (width, -int(metric)) > best[:2]):
            best = (width, -int(metric), name)
    if best is None:
        raise ConfigError(f"{GLOO_INTERFACE}: no interface of this host leads to {address}; set it to the right one")
    return best[2]


def address_towards(address: str) -> str:
    """Return this host's own address on the way to another one; sends nothing.

    Raises:
        OSError: there is no way.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((address, 9))
        return str(probe.getsockname()[0])


def resolve(host: str) -> str:
    """Return the IPv4 address of a name, or of an address itself.

    Raises:
        OSError: the name is not known.
    """
    return str(socket.getaddrinfo(host, None, socket.AF_INET, socket.SOCK_STREAM)[0][4][0])


def address_to_listen_on(named: str, hints: Iterable[str] = ()) -> str:
    """Return the address of this host by which others find it.

    Args:
        named: what the user calls this host; "": the hints are tried, then the way to the outside, then the first
            interface with an address. Loopback comes last: then every node of the run is on this host.
        hints: what others may call it; those that are no address of this host are passed over.
    Raises:
        ConfigError: `named` is not known, or is another host.
    """
    if named:
        try:
            address = resolve(named)
        except OSError as error:
            raise ConfigError(f"--head: {named!r} cannot be resolved ({error.strerror}); give an address") from error
        if not _is_own(address):
            at = "" if address == named else f" ({address})"
            raise ConfigError(f"--head: {named}{at} is no address of this host, which is node 0; name node 0 there")
        return address
    found = [address for address in _candidates(hints) if _is_own(address)]
    return next((address for address in found if not is_loopback(address)), LOOPBACK)


def _candidates(hints: Iterable[str]) -> Iterable[str]:
    for hint in hints:
        try:
            yield resolve(hint)
        except OSError:
            continue
    with contextlib.suppress(OSError):
        yield address_towards(_ANYWHERE)
    yield from _interface_addresses()


def _interface_addresses() -> Iterable[str]:
    import psutil  # a node that is named, or leads outside, does without

    for addresses in psutil.net_if_addrs().values():
        yield from (each.address for each in addresses if each.family is socket.AF_INET)


def _is_own(address: str) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True


def _as_number(address: str) -> int:
    return int.from_bytes(socket.inet_aton(address), "big")


def _of_kernel(text: str) -> int:
    """Read an address as /proc/net/route has it: hexadecimal, in the order of this machine's bytes."""
    return int.from_bytes(struct.pack("=I", int(text, 16)), "big")
