"""Checks of the network: interfaces and which one each library would take, names, loopback, ports, and the server of
the queue's storage backend if there is one.
"""

import importlib
import os
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from asyncflow.extras import pip_line
from asyncflow.job import LOOPBACK, is_loopback
from launcher.doctor.findings import Finding, Needs, reason

NETWORK, PORTS, BACKEND = "network", "ports", "storage backend"
_VARIABLES = {"GLOO_SOCKET_IFNAME": "", "NCCL_SOCKET_IFNAME": "cuda", "HCCL_SOCKET_IFNAME": "npu"}
"""Variable -> the device whose backend reads it; empty: Gloo's, which is read everywhere."""
_SLOW_S = 0.5
_ANSWER_S = 5.0
_TORCHRUN_PORT = 29500
_LEAST_PORTS = 1000
_PRIVILEGED = 1024
_PORT_RANGE = "net.ipv4.ip_local_port_range"
_BACKEND_MODULES = {"redis": "redis", "mooncake": "mooncake.store"}
_REDIS_PORT = 6379


@dataclass(frozen=True)
class Interface:
    """One network interface; `address` is IPv4, empty if there is none."""

    name: str
    up: bool
    loopback: bool
    address: str = ""


@dataclass(frozen=True)
class NetworkFacts:
    """The network of this host.

    Attributes:
        variables: those of `_VARIABLES` that are set.
        host_addresses: what the host's own name resolves to; empty: it does not resolve.
        lookup_s: the slower one of looking up the own name and the name of the loopback address (s).
        loopback_error: why a connection over loopback failed; empty: it did not.
    """

    interfaces: tuple[Interface, ...]
    variables: dict[str, str]
    host: str
    host_addresses: tuple[str, ...]
    lookup_s: float
    loopback_error: str


@dataclass(frozen=True)
class PortFacts:
    """The ports that the kernel may hand out.

    Attributes:
        low, high: first and last port.
        reserved: ranges (first, last) that are left out.
        used: number of ports of the range that sockets have now.
    """

    low: int
    high: int
    reserved: tuple[tuple[int, int], ...] = ()
    used: int = 0


@dataclass(frozen=True)
class BackendFacts:
    """What happened when the storage backend was tried.

    Attributes:
        import_error: of the backend's package; empty: none.
        server: its address, without a password.
        server_error: why it does not answer; empty: it does.
    """

    import_error: str = ""
    server: str = ""
    server_error: str = ""


def try_network(needs: Needs, env: Mapping[str, str] = os.environ) -> NetworkFacts:
    """Read the interfaces, look names up, and connect over loopback."""
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


def judge_network(facts: NetworkFacts, needs: Needs) -> list[Finding]:
    missing = _judge_interfaces(facts, needs)
    if missing:
        return missing
    findings = [*_judge_variables(facts, needs), *_judge_names(facts, needs)]
    return findings or [Finding.ok(NETWORK, _choice(facts, needs))]


def read_ports(needs: Needs) -> PortFacts:
    """Read the port range, and count its ports in use."""
    import psutil

    settings = Path("/proc/sys/net/ipv4")
    low, high = (int(number) for number in (settings / "ip_local_port_range").read_text().split())
    reserved = parse_ranges((settings / "ip_local_reserved_ports").read_text().strip())
    used = {connection.laddr.port for connection in psutil.net_connections("tcp") if connection.laddr}
    return PortFacts(low, high, reserved, sum(low <= port <= high for port in used))


def judge_ports(facts: PortFacts, needs: Needs) -> list[Finding]:
    """Compare the free ports with what the run needs."""
    reserved = sum(max(0, min(last, facts.high) - max(first, facts.low) + 1) for first, last in facts.reserved)
    left = facts.high - facts.low + 1 - reserved - facts.used
    remedy = f"sysctl -w {_PORT_RANGE}='32768 60999'"
    where = f"{facts.low} to {facts.high}"
    if left < needs.connections:
        text = f"{left} ports are left of {where}; the run takes up to {needs.connections}"
        return [Finding.error(PORTS, text, remedy)]
    findings = []
    if left < max(_LEAST_PORTS, 2 * needs.connections):
        findings.append(Finding.warning(PORTS, f"only {left} ports are left of {where}", remedy))
    if facts.low < _PRIVILEGED:
        text = f"the ports {where} begin among those of system services"
        findings.append(Finding.warning(PORTS, text, remedy))
    for port, owner in _fixed_ports(needs).items():
        if facts.low <= port <= facts.high and not any(first <= port <= last for first, last in facts.reserved):
            text = f"{owner} needs port {port}, which any connection may take first: the kernel hands out {where}"
            setting = "net.ipv4.ip_local_reserved_ports"
            findings.append(Finding.warning(PORTS, text, f"sysctl -w {setting}={port}"))
    known = f", the run takes up to {needs.connections}" if needs.connections else ""
    return findings or [Finding.ok(PORTS, f"{left} are left of {where}{known}")]


def try_backend(needs: Needs) -> BackendFacts:
    """Import the backend's package and connect to its server."""
    if needs.backend not in _BACKEND_MODULES:
        return BackendFacts()
    try:
        importlib.import_module(_BACKEND_MODULES[needs.backend])
    except ImportError as error:
        return BackendFacts(import_error=reason(error))
    if needs.backend == "redis":
        return BackendFacts("", *_ask_redis(needs.backend_address))
    return BackendFacts("", needs.backend_address, _connection_error(needs.backend_address))


def judge_backend(facts: BackendFacts, needs: Needs) -> list[Finding]:
    if needs.backend not in _BACKEND_MODULES:
        what = "a class of yours, not checked" if ":" in needs.backend else "nothing else is needed"
        return [Finding.ok(BACKEND, f"{needs.backend}: {what}")]
    if facts.import_error:
        text = f"{needs.backend} cannot be imported ({facts.import_error})"
        return [Finding.error(BACKEND, text, pip_line(needs.backend))]
    if facts.server_error:
        text = f"{needs.backend} at {facts.server} does not answer ({facts.server_error})"
        start = "redis-server --port PORT" if needs.backend == "redis" else "mooncake_master --port=PORT"
        return [Finding.error(BACKEND, text, f"start it ({start}), or correct tq.backend.address")]
    return [Finding.ok(BACKEND, f"{needs.backend} at {facts.server} answers")]


def between_nodes(interfaces: Sequence[Interface]) -> str:
    """Return the interface that Gloo would take between nodes; empty: there is none.

    It is the one that GLOO_SOCKET_IFNAME names first, else the one with the address of the host's name, else the first
    one that is up.
    """
    named = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    return _between(interfaces, named, _addresses_of(socket.gethostname())[0])


def chosen(names: Sequence[str], pattern: str) -> list[str]:
    """Return those of `names` that a pattern of NCCL or HCCL selects: prefixes, `=exact,names`, `^` for all others."""
    inverted = pattern.startswith("^")
    pattern = pattern.removeprefix("^")
    exact = pattern.startswith("=")
    wanted = [part for part in pattern.removeprefix("=").split(",") if part]
    matching = [name for name in names if any(name == part if exact else name.startswith(part) for part in wanted)]
    return [name for name in names if (name not in matching) == inverted]


def find_interfaces() -> tuple[Interface, ...]:
    import psutil

    addresses = psutil.net_if_addrs()
    found = []
    for name, state in psutil.net_if_stats().items():
        flags = state.flags.split(",")
        ipv4 = [each.address for each in addresses.get(name, ()) if each.family is socket.AF_INET]
        found.append(Interface(name, "up" in flags, "loopback" in flags, ipv4[0] if ipv4 else ""))
    return tuple(found)


def parse_ranges(text: str) -> tuple[tuple[int, int], ...]:
    """Parse `8080,9148-9150` into ranges (first, last)."""
    pieces = [part.partition("-") for part in text.split(",") if part]
    return tuple((int(first), int(last or first)) for first, _, last in pieces)


def _judge_interfaces(facts: NetworkFacts, needs: Needs) -> list[Finding]:
    if not any(each.loopback and each.up for each in facts.interfaces):
        return [Finding.error(NETWORK, "the loopback interface is down or missing", "ip link set lo up")]
    if facts.loopback_error:
        remedy = "iptables -A INPUT -i lo -j ACCEPT (a firewall is in the way, or ip addr add 127.0.0.1/8 dev lo)"
        return [Finding.error(NETWORK, f"no connection over {LOOPBACK}: {facts.loopback_error}", remedy)]
    if needs.num_nodes > 1 and not _between(facts.interfaces, "", ()):
        text = "no interface but loopback is up with an address, so no other node can be reached"
        return [Finding.error(NETWORK, text, "ip link set NAME up; ip addr add ADDRESS/BITS dev NAME")]
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
        # On one node the launcher makes Gloo use loopback, whatever the variable says.
        if device or needs.num_nodes > 1:
            findings.append(Finding.error(NETWORK, text, remedy))
        else:
            findings.append(Finding.warning(NETWORK, f"{text} (one node: unused)", remedy))
    return findings


def _judge_names(facts: NetworkFacts, needs: Needs) -> list[Finding]:
    findings = []
    hosts_line = f"echo '{_address_to_name(facts)} {facts.host}' >> /etc/hosts"
    several = needs.num_nodes > 1
    if not facts.host_addresses:
        text = f"the host's own name {facts.host} does not resolve"
        finding = Finding.error if several else Finding.warning
        findings.append(finding(NETWORK, text, hosts_line))
    elif several and not facts.variables.get("GLOO_SOCKET_IFNAME") and all(map(is_loopback, facts.host_addresses)):
        text = f"the host's own name {facts.host} means {facts.host_addresses[0]}, where other nodes cannot reach it"
        findings.append(Finding.warning(NETWORK, text, f"export GLOO_SOCKET_IFNAME={_suggestion(facts)}"))
    if facts.lookup_s > _SLOW_S:
        text = f"looking up {facts.host} or {LOOPBACK} takes {facts.lookup_s:.1f} s, as may every connection"
        remedy = f"{hosts_line}; have 'hosts: files dns' in /etc/nsswitch.conf"
        findings.append(Finding.warning(NETWORK, text, remedy))
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


def _addresses_of(host: str) -> tuple[tuple[str, ...], float]:
    """Return (addresses of a name, seconds that the lookup took)."""
    began = time.monotonic()
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        found = []
    return tuple(dict.fromkeys(str(each[4][0]) for each in found)), time.monotonic() - began


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


def _fixed_ports(needs: Needs) -> dict[int, str]:
    """Return port -> owner for the run's fixed ports, not for those where any free port will do."""
    fixed = {_TORCHRUN_PORT: "torchrun between nodes"} if needs.num_nodes > 1 else {}
    address = needs.backend_address
    if address:
        try:
            port = urlsplit(address if "//" in address else f"//{address}").port
        except ValueError:
            port = None
        if port is not None:
            fixed[port] = f"the storage backend {needs.backend}"
    return fixed


def _ask_redis(address: str) -> tuple[str, str]:
    """Return (the server's address, why it does not answer)."""
    import redis

    parts = urlsplit(address)
    server = f"{parts.hostname}:{parts.port or _REDIS_PORT}" if parts.hostname else parts.path
    try:
        client = redis.Redis.from_url(address, socket_timeout=_ANSWER_S, socket_connect_timeout=_ANSWER_S)
        client.ping()
        client.close()
    except (redis.RedisError, ValueError) as error:
        return server, reason(error)
    return server, ""


def _connection_error(address: str) -> str:
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        return "not HOST:PORT"
    try:
        socket.create_connection((host, int(port)), timeout=_ANSWER_S).close()
    except OSError as error:
        return reason(error)
    return ""
