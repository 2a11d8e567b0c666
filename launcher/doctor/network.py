"""Checks of the network: interfaces and which one each library would take, look-ups, loopback, ports, and the server of
the queue's storage backend if there is one.
"""

import contextlib
import importlib
import os
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

from asyncflow.errors import ConfigError
from asyncflow.extras import pip_line
from asyncflow.job import GLOO_INTERFACE, LOOPBACK, address_to_listen_on, interface_towards, is_loopback, link_speed
from launcher.doctor.findings import Facts, MachineCheck, Needs, error, fatal, reason, warning

_VARIABLES = {"cuda": "NCCL_SOCKET_IFNAME", "npu": "HCCL_SOCKET_IFNAME"}
"""Device -> the variable that its backend reads."""
_SLOW_S = 0.5
_ANSWER_S = 5.0
_LEAST_PORTS = 1000
_BACKENDS = {
    "redis": ("redis", "redis-server --port PORT"), "mooncake": ("mooncake.store", "mooncake_master --port=PORT"),
}  # fmt: skip
"""Kind -> its package's module, and what starts its server."""
_REDIS_PORT = 6379


class Interface(NamedTuple):
    """One network interface; `address` is IPv4, empty if there is none."""

    name: str
    up: bool
    loopback: bool
    address: str = ""


def try_network(needs: Needs, env: Mapping[str, str] = os.environ) -> Facts:
    """Read the interfaces, look names up, and connect over loopback."""
    host, interfaces, (name, address) = socket.gethostname(), find_interfaces(), between_nodes(env)
    up = [each.name for each in interfaces if each.up]
    gloo, variable = env.get(GLOO_INTERFACE, ""), _VARIABLES.get(needs.device, "")
    pattern = env.get(variable, "")
    taken = chosen(up, pattern) if pattern else []
    wrong = [{"variable": variable, "value": pattern}] if pattern and not taken else []
    # On one node Gloo is made to use loopback, whatever the variable says.
    if gloo and needs.num_nodes > 1 and gloo.split(",")[0] not in up:
        wrong.append({"variable": GLOO_INTERFACE, "value": gloo})
    library, own = variable.partition("_")[0], " ".join(each for each in taken if each != "lo") or "its own choice"
    return {
        "host": host, "lookup_s": lookup_s(host), "obstacle": loopback_error(), "names": " ".join(up), "wrong": wrong,
        "loopback": any(each.loopback and each.up for each in interfaces), "outside": name,
        "suggestion": name or "lo", "address": address or LOOPBACK, "own": f", {library} {own}" if library else "",
        "gloo": f"{name} ({address}{_speed_text(name)}) between nodes{_faster_text(up, name)}"
        if name
        else "no other is up",
    }  # fmt: skip


NETWORK = MachineCheck(
    "network", try_network, (
        fatal(lambda f: not f.loopback, "the loopback interface is down or missing", "ip link set lo up"),
        fatal("obstacle", f"no connection over {LOOPBACK}: {{obstacle}}",
              "iptables -A INPUT -i lo -j ACCEPT (a firewall is in the way, or ip addr add 127.0.0.1/8 dev lo)"),
        fatal(lambda f: f.num_nodes > 1 and not f.outside,
              "no interface but loopback is up with an address, so no other node can be reached",
              "ip link set NAME up; ip addr add ADDRESS/BITS dev NAME"),
        error("wrong", "{variable}={value} names no interface that is up; there are {names}",
              "unset {variable}, or export {variable}={suggestion}"),
        warning(lambda f: f.lookup_s > _SLOW_S,
                f"looking up {{host}} or {LOOPBACK} takes {{lookup_s:.1f}} s, as may every connection",
                "echo '{address} {host}' >> /etc/hosts; have 'hosts: files dns' in /etc/nsswitch.conf"),
    ),
    "Gloo takes lo inside the node, {gloo}{own}",
    15, "the resolver hangs: correct /etc/resolv.conf, own name to /etc/hosts",
)  # fmt: skip


def _speed_text(name: str) -> str:
    speed = link_speed(name)
    return f", {speed:g} Gb/s" if speed else ""


def _faster_text(names: Sequence[str], name: str) -> str:
    """Say which interfaces are faster: the one that all nodes reach is used in a run."""
    least = link_speed(name)
    faster = sorted((each for each in names if link_speed(each) > least > 0), key=link_speed, reverse=True)
    return f", or {', '.join(each + _speed_text(each) for each in faster)} if all nodes reach it" if faster else ""


def between_nodes(env: Mapping[str, str] = os.environ) -> tuple[str, str]:
    """Return (interface, address) that Gloo would take between nodes; empty: there is none.

    It is the interface that GLOO_SOCKET_IFNAME names first, else the one at which others find this host.
    """
    named = env.get(GLOO_INTERFACE, "").split(",")[0]
    for each in find_interfaces():
        if each.name == named and each.up and each.address:
            return named, each.address
    address = address_to_listen_on("")
    try:
        return ("", "") if is_loopback(address) else (interface_towards(address), address)
    except ConfigError:  # no route
        return "", ""


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


def lookup_s(host: str) -> float:
    """Return the slower one of looking up the host's name and the name of the loopback address (s)."""
    began = time.monotonic()
    with contextlib.suppress(OSError):
        socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    between = time.monotonic()
    socket.getnameinfo((LOOPBACK, 0), 0)
    return max(between - began, time.monotonic() - between)


def loopback_error() -> str:
    try:
        with (
            socket.create_server((LOOPBACK, 0)) as server,
            socket.create_connection(server.getsockname(), timeout=_ANSWER_S),
        ):
            server.settimeout(_ANSWER_S)
            server.accept()[0].close()
    except OSError as raised:
        return reason(raised)
    return ""


def look_at_ports(needs: Needs) -> Facts:
    """Count the ports that the kernel may still hand out."""
    low, high, reserved = port_range()
    withheld = sum(max(0, min(last, high) - max(first, low) + 1) for first, last in reserved)
    left = high - low + 1 - withheld - sum(low <= port <= high for port in ports_in_use())
    known = f", the run takes up to {needs.connections}" if needs.connections else ""
    return {"left": left, "range": f"{low} to {high}", "known": known}


_WIDER = "sysctl -w net.ipv4.ip_local_port_range='32768 60999'"
PORTS = MachineCheck(
    "ports", look_at_ports, (
        fatal(lambda f: f.left < f.connections, "{left} ports are left of {range}; the run takes up to {connections}",
              _WIDER),
        warning(lambda f: f.left < max(_LEAST_PORTS, 2 * f.connections), "only {left} ports are left of {range}",
                _WIDER),
    ),
    "{left} are left of {range}{known}",
    10, "does ss -s answer?",
)  # fmt: skip


def port_range() -> tuple[int, int, tuple[tuple[int, int], ...]]:
    """Return the first and the last port that the kernel hands out, and the ranges that it leaves out."""
    settings = Path("/proc/sys/net/ipv4")
    low, high = (int(number) for number in (settings / "ip_local_port_range").read_text().split())
    return low, high, parse_ranges((settings / "ip_local_reserved_ports").read_text().strip())


def ports_in_use() -> set[int]:
    import psutil

    return {connection.laddr.port for connection in psutil.net_connections("tcp") if connection.laddr}


def parse_ranges(text: str) -> tuple[tuple[int, int], ...]:
    """Parse `8080,9148-9150` into ranges (first, last)."""
    pieces = [part.partition("-") for part in text.split(",") if part]
    return tuple((int(first), int(last or first)) for first, _, last in pieces)


def try_backend(needs: Needs) -> Facts:
    """Import the backend's package and connect to its server."""
    kind, address = needs.backend, needs.backend_address
    if kind not in _BACKENDS:
        own = "a class of yours, not checked" if ":" in kind else "nothing else is needed"
        return {"broken": "", "silent": "", "fine": f"{kind}: {own}"}
    module, start = _BACKENDS[kind]
    broken = silent = ""
    try:
        importlib.import_module(module)
    except ImportError as raised:
        broken = reason(raised)
    else:
        address, silent = _ask_redis(address) if kind == "redis" else (address, _connection_error(address))
    facts = {"server": f"{kind} at {address}", "start": start, "install": pip_line(kind)}
    return {"broken": broken, "silent": silent, "fine": f"{kind} at {address} answers", **facts}


BACKEND = MachineCheck(
    "storage backend", try_backend, (
        error("broken", "{backend} cannot be imported ({broken})", "{install}"),
        error("silent", "{server} does not answer ({silent})", "start it ({start}), or correct tq.backend.address"),
    ),
    "{fine}",
    30, "does its server answer? correct tq.backend.address",
)  # fmt: skip


def _ask_redis(address: str) -> tuple[str, str]:
    """Return (the server's address, why it does not answer)."""
    import redis

    parts = urlsplit(address)
    server = f"{parts.hostname}:{parts.port or _REDIS_PORT}" if parts.hostname else parts.path
    try:
        client = redis.Redis.from_url(address, socket_timeout=_ANSWER_S, socket_connect_timeout=_ANSWER_S)
        client.ping()
        client.close()
    except (redis.RedisError, ValueError) as raised:
        return server, reason(raised)
    return server, ""


def _connection_error(address: str) -> str:
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        return "not HOST:PORT"
    try:
        socket.create_connection((host, int(port)), timeout=_ANSWER_S).close()
    except OSError as raised:
        return reason(raised)
    return ""
