"""Network: interfaces, which one each library would take, and whether names and loopback work."""

import fcntl
import ipaddress
import os
import socket
import struct
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from asyncflow.network import LOOPBACK
from launcher.doctor.finding import Finding, reason
from launcher.doctor.needs import Needs

CHECK = "network"
_VARIABLES = {"GLOO_SOCKET_IFNAME": "", "NCCL_SOCKET_IFNAME": "cuda", "HCCL_SOCKET_IFNAME": "npu"}
"""Each with the device whose backend reads it; Gloo's is read everywhere."""
_SLOW_S = 0.5
_ANSWER_S = 5.0
_SIOCGIFFLAGS, _SIOCGIFADDR = 0x8913, 0x8915
_NAME_BYTES = 16
_IFF_UP, _IFF_LOOPBACK = 0x1, 0x8


@dataclass(frozen=True)
class Interface:
    """One network interface.

    Attributes:
        name: e.g. `eth0`.
        up: it is switched on.
        loopback: it is.
        address: IPv4; empty: none.
    """

    name: str
    up: bool
    loopback: bool
    address: str = ""


@dataclass(frozen=True)
class NetworkFacts:
    """What the network of this host looks like.

    Attributes:
        interfaces: all.
        variables: those of `_VARIABLES` that are set.
        host: own name.
        host_addresses: what it resolves to; empty: it does not.
        lookup_s: what the slower took of looking up the own name, and the name of loopback's address (s).
        loopback_error: why a connection over loopback failed; empty: it did not.
    """

    interfaces: tuple[Interface, ...]
    variables: dict[str, str]
    host: str
    host_addresses: tuple[str, ...]
    lookup_s: float
    loopback_error: str


def check(needs: Needs) -> list[Finding]:
    """Look and judge."""
    return judge(gather(), needs)


def gather(env: Mapping[str, str] = os.environ) -> NetworkFacts:
    """Read interfaces, look names up, connect over loopback."""
    host = socket.gethostname()
    addresses, lookup_s = _addresses_of(host)
    began = time.monotonic()
    socket.getnameinfo((LOOPBACK, 0), 0)
    return NetworkFacts(
        find_interfaces(),
        {name: env[name] for name in _VARIABLES if env.get(name)},
        host,
        addresses,
        max(lookup_s, time.monotonic() - began),
        _loopback_error(),
    )


def judge(facts: NetworkFacts, needs: Needs) -> list[Finding]:
    """Say what would keep processes from finding each other."""
    missing = _judge_interfaces(facts, needs)
    if missing:
        return missing
    findings = [*_judge_variables(facts, needs), *_judge_names(facts, needs)]
    return findings or [Finding.ok(CHECK, _choice(facts, needs))]


def between_nodes(interfaces: Sequence[Interface], env: Mapping[str, str] = os.environ) -> str:
    """Return the interface that Gloo would take between nodes; empty: there is none.

    What GLOO_SOCKET_IFNAME names first, else the one that has the address of the host's name, else the first one up.
    """
    named = env.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    return _between(interfaces, named, _addresses_of(socket.gethostname())[0])


def chosen(names: Sequence[str], pattern: str) -> list[str]:
    """Return which of `names` a pattern of NCCL or HCCL takes: prefixes, `=exact,names`, or `^` for all others."""
    inverted = pattern.startswith("^")
    pattern = pattern.removeprefix("^")
    exact = pattern.startswith("=")
    wanted = [part for part in pattern.removeprefix("=").split(",") if part]
    matching = [name for name in names if any(name == part if exact else name.startswith(part) for part in wanted)]
    return [name for name in names if (name not in matching) == inverted]


def find_interfaces() -> tuple[Interface, ...]:
    """Return all interfaces of this network namespace, which /sys may not show."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        return tuple(_interface(name, asked) for _, name in socket.if_nameindex())


def _judge_interfaces(facts: NetworkFacts, needs: Needs) -> list[Finding]:
    if not any(each.loopback and each.up for each in facts.interfaces):
        return [Finding.error(CHECK, "the loopback interface is down or missing", "ip link set lo up")]
    if facts.loopback_error:
        remedy = "iptables -A INPUT -i lo -j ACCEPT (a firewall is in the way, or ip addr add 127.0.0.1/8 dev lo)"
        return [Finding.error(CHECK, f"no connection over {LOOPBACK}: {facts.loopback_error}", remedy)]
    if needs.num_nodes > 1 and not _between(facts.interfaces, "", ()):
        text = "no interface but loopback is up with an address, so no other node can be reached"
        return [Finding.error(CHECK, text, "ip link set NAME up; ip addr add ADDRESS/BITS dev NAME")]
    return []


def _judge_variables(facts: NetworkFacts, needs: Needs) -> list[Finding]:
    findings = []
    for name, pattern in facts.variables.items():
        device = _VARIABLES[name]
        if device and device != needs.device:
            continue
        names = [each.name for each in facts.interfaces if each.up]
        taken = chosen(names, pattern) if device else [part for part in pattern.split(",") if part in names]
        if taken:
            continue
        text = f"{name}={pattern} names no interface that is up; there are {' '.join(names)}"
        remedy = f"unset {name}, or export {name}={_suggestion(facts)}"
        # Gloo of one node gets loopback from the launcher, whatever the variable says.
        matters = bool(device) or needs.num_nodes > 1
        findings.append(
            Finding.error(CHECK, text, remedy)
            if matters
            else Finding.warning(CHECK, f"{text} (one node: unused)", remedy)
        )
    return findings


def _judge_names(facts: NetworkFacts, needs: Needs) -> list[Finding]:
    findings = []
    hosts_line = f"echo '{_address_to_name(facts)} {facts.host}' >> /etc/hosts"
    several = needs.num_nodes > 1
    if not facts.host_addresses:
        text = f"the host's own name {facts.host} does not resolve"
        findings.append(Finding.error(CHECK, text, hosts_line) if several else Finding.warning(CHECK, text, hosts_line))
    elif several and not facts.variables.get("GLOO_SOCKET_IFNAME") and all(map(_is_loopback, facts.host_addresses)):
        text = f"the host's own name {facts.host} means {facts.host_addresses[0]}, where other nodes do not find it"
        findings.append(Finding.warning(CHECK, text, f"export GLOO_SOCKET_IFNAME={_suggestion(facts)}"))
    if facts.lookup_s > _SLOW_S:
        text = f"looking up {facts.host} or {LOOPBACK} takes {facts.lookup_s:.1f} s, and every connection may do so"
        remedy = f"{hosts_line}; have 'hosts: files dns' in /etc/nsswitch.conf"
        findings.append(Finding.warning(CHECK, text, remedy))
    return findings


def _choice(facts: NetworkFacts, needs: Needs) -> str:
    named = facts.variables.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    outside = _between(facts.interfaces, named, facts.host_addresses)
    address = next((each.address for each in facts.interfaces if each.name == outside), "")
    parts = ["Gloo takes lo inside the node", f"{outside} ({address}) between nodes" if outside else "no other is up"]
    variable = next((name for name, device in _VARIABLES.items() if device == needs.device), None)
    if variable is not None:
        pattern = facts.variables.get(variable)
        names = [each.name for each in facts.interfaces if each.up and not each.loopback]
        taken = " ".join(chosen(names, pattern)) if pattern else "its own choice"
        parts.append(f"{variable.split('_')[0]} {taken}")
    return ", ".join(parts)


def _between(interfaces: Sequence[Interface], named: str, addresses: Sequence[str]) -> str:
    able = [each for each in interfaces if each.up and not each.loopback and each.address]
    by_name = [each.name for each in able if each.name == named]
    by_address = [each.name for each in able if each.address in addresses]
    return next(iter([*by_name, *by_address, *(each.name for each in able)]), "")


def _suggestion(facts: NetworkFacts) -> str:
    return _between(facts.interfaces, "", facts.host_addresses) or "lo"


def _address_to_name(facts: NetworkFacts) -> str:
    outside = _suggestion(facts)
    return next((each.address for each in facts.interfaces if each.name == outside and each.address), LOOPBACK)


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.split("%")[0]).is_loopback


def _addresses_of(host: str) -> tuple[tuple[str, ...], float]:
    """Return (addresses of a name, seconds that it took)."""
    began = time.monotonic()
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        found = []
    return tuple(dict.fromkeys(str(each[4][0]) for each in found)), time.monotonic() - began


def _interface(name: str, asked: socket.socket) -> Interface:
    flags = struct.unpack_from("H", _ask(asked, _SIOCGIFFLAGS, name))[0]
    address = _ask(asked, _SIOCGIFADDR, name)
    return Interface(
        name,
        bool(flags & _IFF_UP),
        bool(flags & _IFF_LOOPBACK),
        socket.inet_ntoa(address[4:8]) if any(address[4:8]) else "",
    )


def _ask(asked: socket.socket, request: int, name: str) -> bytes:
    """Return what the kernel says of an interface, without its name; zeros where it says nothing."""
    try:
        return fcntl.ioctl(asked.fileno(), request, struct.pack("256s", os.fsencode(name)[:15]))[_NAME_BYTES:]
    except OSError:  # it has no address, or vanished
        return bytes(_NAME_BYTES)


def _loopback_error() -> str:
    try:
        with (
            socket.create_server((LOOPBACK, 0)) as server,
            socket.create_connection(server.getsockname(), timeout=_ANSWER_S),
        ):
            server.settimeout(_ANSWER_S)
            server.accept()[0].close()
    except OSError as error:
        return reason(error)
    return ""
