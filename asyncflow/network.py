"""This host's addresses and network interfaces, and which of them lead to another host. Linux, without torch.

Sockets of a run on one node stay on loopback. On several nodes a process uses the interface that leads to the job
store, unless the user named another one.
"""

import contextlib
import os
import socket
import struct
from collections.abc import Iterable, Iterator, MutableMapping
from ipaddress import IPv4Network, IPv6Network, ip_address
from pathlib import Path

from asyncflow.errors import ConfigError

LOOPBACK = "127.0.0.1"
LOOPBACK_INTERFACE = "lo"
GLOO_INTERFACE, NCCL_INTERFACE = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"
_INTERFACE_VARIABLES = (GLOO_INTERFACE, NCCL_INTERFACE, "HCCL_SOCKET_IFNAME")
_ROUTES = Path("/proc/net")
_ROUTE_UP, _ROUTE_REJECT, _ROUTE_LOCAL = 0x1, 0x200, 0x80000000
_ANYWHERE = ("203.0.113.1", "2001:db8::1")
"""Addresses for documentation (RFC 5737, 3849): nothing is sent there, only the route is looked up."""


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
    """Return whether an address never leaves the host."""
    return ip_address(address).is_loopback


def endpoint(host: str, port: int | str) -> str:
    """Return HOST:PORT for people and options, an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def family_of(address: str) -> socket.AddressFamily:
    """Return the family of an IPv4 or IPv6 address."""
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def interface_towards(address: str, routes: Path = _ROUTES) -> str:
    """Return the interface whose route to `address` is the most specific one.

    For an address of this host that is the interface of its network.

    Args:
        address: IPv4 or IPv6.
        routes: the directory with the kernel's tables.

    Raises:
        ConfigError: there is no route.
    """
    target = ip_address(address)
    table = _ipv4_routes(routes / "route") if target.version == 4 else _ipv6_routes(routes / "ipv6_route")
    fitting = [(network.prefixlen, -metric, name) for network, metric, name in table if target in network]
    if not fitting:
        raise ConfigError(f"{GLOO_INTERFACE}: no interface of this host leads to {address}; set it to the right one")
    return max(fitting, key=lambda route: route[:2])[2]


def address_towards(address: str) -> str:
    """Return this host's own address on the way to another one; sends nothing.

    Raises:
        OSError: there is no way.
    """
    with socket.socket(family_of(address), socket.SOCK_DGRAM) as probe:
        probe.connect((address, 9))
        return str(probe.getsockname()[0])


def resolve(host: str) -> str:
    """Return the address of a name, or of an address itself; IPv4 where a name has both.

    Raises:
        OSError: the name is not known.
    """
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return str(min(found, key=lambda each: each[0] != socket.AF_INET)[4][0])


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
    for address in _ANYWHERE:
        with contextlib.suppress(OSError):
            yield address_towards(address)
    yield from _interface_addresses()


def _interface_addresses() -> Iterable[str]:
    import psutil  # a node that is named, or leads outside, does without

    found = [each for addresses in psutil.net_if_addrs().values() for each in addresses]
    yield from (each.address for each in found if each.family is socket.AF_INET)
    # An address of a link (fe80::...%eth0) means something else on every host.
    yield from (each.address for each in found if each.family is socket.AF_INET6 and "%" not in each.address)


def _is_own(address: str) -> bool:
    with socket.socket(family_of(address), socket.SOCK_STREAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True


def _ipv4_routes(path: Path) -> Iterator[tuple[IPv4Network, int, str]]:
    """Yield (network, metric, interface) of routes that are up; numbers are in the order of this machine's bytes."""
    for line in path.read_text().splitlines()[1:]:
        name, destination, _, flags, _, _, metric, mask = line.split()[:8]
        if _leads_somewhere(int(flags, 16)):
            number = struct.pack("=I", int(destination, 16))
            yield IPv4Network((number, int(mask, 16).bit_count()), strict=False), int(metric), name


def _ipv6_routes(path: Path) -> Iterator[tuple[IPv6Network, int, str]]:
    """The same of IPv6, which the kernel writes in another form; no file: this host has no IPv6."""
    for line in path.read_text().splitlines() if path.exists() else ():
        destination, width, _, _, _, metric, _, _, flags, name = line.split()
        bits = int(flags, 16)
        # A host's own addresses are routes, too, of `lo` in older kernels.
        if _leads_somewhere(bits) and not bits & _ROUTE_LOCAL:
            yield IPv6Network((bytes.fromhex(destination), int(width, 16)), strict=False), int(metric, 16), name


def _leads_somewhere(flags: int) -> bool:
    return bool(flags & _ROUTE_UP) and not flags & _ROUTE_REJECT
