"""Ports that the kernel gives to connections and to our listeners: are there enough, and is no fixed one among them."""

from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from launcher.doctor.finding import Finding
from launcher.doctor.needs import Needs

CHECK = "ports"
_TORCHRUN_PORT = 29500
_LEAST = 1000
_PRIVILEGED = 1024
_SETTING = "net.ipv4.ip_local_port_range"


@dataclass(frozen=True)
class PortFacts:
    """What the kernel may hand out.

    Attributes:
        low, high: first and last port.
        reserved: pieces (first, last) that are left out.
        used: ports of the range that sockets have now.
    """

    low: int
    high: int
    reserved: tuple[tuple[int, int], ...] = ()
    used: int = 0


def check(needs: Needs) -> list[Finding]:
    """Look and judge."""
    return judge(gather(), needs)


def gather(proc: Path = Path("/proc")) -> PortFacts:
    """Read the range and who uses it."""
    settings = proc / "sys/net/ipv4"
    low, high = (int(number) for number in (settings / "ip_local_port_range").read_text().split())
    reserved = parse_ranges((settings / "ip_local_reserved_ports").read_text().strip())
    used = set()
    for name in ("tcp", "tcp6"):
        file = proc / "net" / name
        for line in file.read_text().splitlines()[1:] if file.is_file() else ():
            used.add(int(line.split()[1].rpartition(":")[2], 16))
    return PortFacts(low, high, reserved, sum(1 for port in used if low <= port <= high))


def judge(facts: PortFacts, needs: Needs) -> list[Finding]:
    """Compare."""
    reserved = sum(max(0, min(last, facts.high) - max(first, facts.low) + 1) for first, last in facts.reserved)
    left = facts.high - facts.low + 1 - reserved - facts.used
    remedy = f"sysctl -w {_SETTING}='32768 60999'"
    where = f"{facts.low} to {facts.high}"
    if left < needs.connections:
        return [
            Finding.error(CHECK, f"{left} ports are left of {where}; the run takes up to {needs.connections}", remedy)
        ]
    findings = []
    if left < max(_LEAST, 2 * needs.connections):
        findings.append(Finding.warning(CHECK, f"only {left} ports are left of {where}", remedy))
    if facts.low < _PRIVILEGED:
        text = f"the ports {where} begin among those of system services"
        findings.append(Finding.warning(CHECK, text, remedy))
    for port, owner in _fixed_ports(needs).items():
        if facts.low <= port <= facts.high and not any(first <= port <= last for first, last in facts.reserved):
            text = f"{owner} has port {port}, which any connection may take first: the kernel hands out {where}"
            setting = "net.ipv4.ip_local_reserved_ports"
            findings.append(Finding.warning(CHECK, text, f"sysctl -w {setting}={port}"))
    known = f", the run takes up to {needs.connections}" if needs.connections else ""
    return findings or [Finding.ok(CHECK, f"{left} are left of {where}{known}")]


def parse_ranges(text: str) -> tuple[tuple[int, int], ...]:
    """Return `8080,9148-9150` as pieces (first, last)."""
    pieces = [part.partition("-") for part in text.split(",") if part]
    return tuple((int(first), int(last or first)) for first, _, last in pieces)


def _fixed_ports(needs: Needs) -> dict[int, str]:
    """Return ports that somebody wants to have, not any free one."""
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
