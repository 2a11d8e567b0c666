"""What every process of a run needs to find the others: `job.json` in the run directory.

The launcher writes it with mode 0600 (it holds the job's secret) before the first worker starts, and removes it when
the run ends. Workers read it, including those started by hand. It never travels through the store or argv.
"""

import contextlib
import json
import os
import socket
import struct
import threading
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import asdict, dataclass, replace
from ipaddress import IPv4Interface, IPv4Network, IPv6Interface, IPv6Network, ip_address, ip_interface
from pathlib import Path
from typing import Any

from asyncflow.clock import HostClock
from asyncflow.errors import ConfigError
from asyncflow.mac import Mac
from asyncflow.run_files import JOB_FILE

NO_PAUSE, PAUSING, PAUSED = "no", "pausing", "paused"
"""How far a pause is that the user asked for: no step is admitted; and all that were are trained."""
_ERROR_PREFIX = "error:"
_LEFT_WELL = "ok"


@dataclass(frozen=True)
class GangSpec:
    """Ranks that live and die together."""

    name: str  # unique in the run, e.g. `actor`, `rollout-0`, `ref-1`, `storage-0`, `controller`
    role: str  # `rollout actor ref reward advantages evaluate`, or the services `storage`, `controller`, `weights`
    index: int  # which instance of the role this gang is, from 0
    num_ranks: int  # worker processes
    # One device string per rank, e.g. `("cpu", "cpu")` or `("cuda:0", "cuda:1")`; if a single process drives several
    # devices (tensor parallelism in a generating engine), all of them.
    devices: tuple[str, ...]
    nodes: tuple[int, ...] = ()  # the node of each rank, ascending; left out: all ranks are on node 0

    def __post_init__(self) -> None:
        if not self.nodes:
            object.__setattr__(self, "nodes", (0,) * self.num_ranks)
        assert len(self.nodes) == self.num_ranks and list(self.nodes) == sorted(self.nodes), self.nodes

    @property
    def places(self) -> tuple[tuple[int, str], ...]:
        nodes = self.nodes * len(self.devices) if self.num_ranks == 1 else self.nodes
        return tuple(zip(nodes, self.devices, strict=True))

    @property
    def parts(self) -> tuple[int, ...]:
        return tuple(dict.fromkeys(self.nodes))

    def rank_in_role(self, rank: int) -> int:
        """Return a rank's number among all ranks of the role, by which its log is named."""
        return self.index * self.num_ranks + rank

    def ranks_on(self, node: int) -> range:
        first = sum(1 for other in self.nodes if other < node)
        return range(first, first + self.nodes.count(node))


@dataclass(frozen=True)
class Node:
    """One host of a run."""

    rank: int  # its number; node 0 has the head launcher and the job store
    host: str  # its name, for people
    address: str  # where the others reach it
    clock: HostClock  # of this host, aligned to node 0's


@dataclass(frozen=True)
class Network:
    """A node's place in a network that is faster than the way to the job store."""

    cidr: str  # e.g. `10.1.0.0/16`
    address: str  # the node's in it
    port: int  # where the node answers, while the nodes join; see `NetworkListeners`


@dataclass(frozen=True)
class Job:
    """Endpoints and membership of one run."""

    store_host: str  # the job store (TCPStore), on loopback for a one-node run, else at node 0's address
    store_port: int
    secret: str  # hex; channels prove it by challenge-response
    launcher_pid: int  # on the head node
    gangs: tuple[GangSpec, ...]  # every gang of the run, started by the launcher or by hand
    lineage: int  # number of actor restores before this start (0 for a fresh run)
    resume_from: str  # checkpoint directory to restore, or ""
    last_step: int  # number of the last step to train
    started_at: float  # unix time (s) at which the user's command started; metrics count from it
    clock: HostClock  # of the head launcher's host; every timeline there uses it
    # All hosts, by rank; empty for a one-node run, and until the launchers of all nodes have joined.
    nodes: tuple[Node, ...] = ()
    networks: tuple[Network, ...] = ()  # that the other nodes try as they join, the fastest one first
    # The one that all nodes reach, by which channels, collectives and weights go; "": the way to the job store.
    network: str = ""
    revision: int = 0  # counts the writes, so that other hosts know whether they see the newest file

    def with_changes(self, **fields: Any) -> "Job":
        """Return this job with other values, as its next revision."""
        return replace(self, revision=self.revision + 1, **fields)

    def local_clock(self) -> HostClock:
        return HostClock.of_this_host([self.clock, *(node.clock for node in self.nodes)])

    def gang(self, name: str) -> GangSpec:
        """Return the gang called `name`; raises ConfigError with the known names."""
        for gang in self.gangs:
            if gang.name == name:
                return gang
        known = " ".join(gang.name for gang in self.gangs)
        raise ConfigError(f"gang: no gang is named {name!r} in this run; known: {known}")

    def of_role(self, role: str) -> tuple[GangSpec, ...]:
        """Return the gangs of `role`, by index; empty if the role was not launched."""
        return tuple(gang for gang in self.gangs if gang.role == role)

    def save(self, run_dir: Path) -> None:
        """Write `job.json` (mode 0600) atomically; a job that was written before must be `with_changes` first."""
        target = run_dir / JOB_FILE
        beside = target.with_suffix(".tmp")
        descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w") as file:
            # Which directory this is, since a copy of it is no run.
            json.dump({**asdict(self), "directory": run_dir.stat().st_ino}, file)
        beside.replace(target)

    @staticmethod
    def load(run_dir: Path) -> "Job":
        """Read `job.json`; raises ConfigError if the run is not running."""
        path = run_dir / JOB_FILE
        if not path.is_file():
            raise ConfigError(f"run directory: {run_dir} has no {JOB_FILE}, so nothing runs there; start it first")
        fields = json.loads(path.read_text())
        gangs = tuple(
            GangSpec(**{**gang, "devices": tuple(gang["devices"]), "nodes": tuple(gang["nodes"])})
            for gang in fields.pop("gangs")
        )
        nodes = tuple(Node(**{**node, "clock": HostClock(**node["clock"])}) for node in fields.pop("nodes"))
        networks = tuple(Network(**network) for network in fields.pop("networks", ()))
        clock = HostClock(**fields.pop("clock"))
        fields.pop("directory", None)
        return Job(gangs=gangs, nodes=nodes, networks=networks, clock=clock, **fields)


def last_words(error: BaseException | None) -> str:
    """Return what a rank writes to the store key `left/GANG/RANK` when it leaves, with or without an error."""
    return _LEFT_WELL if error is None else f"{_ERROR_PREFIX} {type(error).__name__}: {error}"


def error_in(words: str | None) -> str:
    """Return the error in a rank's last words, in one line; "" if there is none."""
    if words is None or not words.startswith(_ERROR_PREFIX):
        return ""
    return " ".join(words.removeprefix(_ERROR_PREFIX).split()) or "it gave no reason"


# This host's addresses and network interfaces, and which of them lead to another host. Linux, without torch.
#
# Sockets of a one-node run stay on loopback. On several nodes a process uses the interface that the user named, else
# that in the fastest network that all nodes reach, else the one that leads to the job store:
#
#     node 0       offers its networks that are faster than the store's (`OfferedNetworks`), in job.json
#     other nodes  connect to it through their own interface in each of them (`list_reached`), and answer there, too
#     the later    of two others connects to the earlier one (`reached_everywhere`), so each pair was tried once
#     node 0       writes the fastest one in which all reach each other into job.json, from which every process reads it

LOOPBACK = "127.0.0.1"
LOOPBACK_INTERFACE = "lo"
GLOO_INTERFACE, NCCL_INTERFACE = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"
INTERFACE_VARIABLES = (GLOO_INTERFACE, NCCL_INTERFACE, "HCCL_SOCKET_IFNAME")
_ROUTES = Path("/proc/net")
_ROUTE_UP, _ROUTE_REJECT, _ROUTE_LOCAL = 0x1, 0x200, 0x80000000
# Addresses reserved for documentation (RFC 5737, 3849): nothing is sent to them, only their route is looked up.
_ANYWHERE = ("203.0.113.1", "2001:db8::1")
_INTERFACES = Path("/sys/class/net")
_PROBE_TIMEOUT_S = 2.0


def choose_interfaces(store_host: str, network: str = "", env: MutableMapping[str, str] = os.environ) -> None:
    """Make this process's collective libraries use the interface in `network`, or that leads to the job store.

    Call it before the first process group. On one node that is loopback, whatever the user has set for other jobs.
    Raises ConfigError if no interface leads there, and the user named none.
    """
    if is_loopback(store_host):
        env[GLOO_INTERFACE] = LOOPBACK_INTERFACE
        return
    wanted = [variable for variable in INTERFACE_VARIABLES if not env.get(variable)]
    if wanted:
        own = own_interface(network) if network else None
        name = interface_towards(store_host) if own is None else own[0]
        # NCCL and HCCL take a bare name as a prefix: eth1 would be eth10, too.
        env.update({variable: name if variable == GLOO_INTERFACE else f"={name}" for variable in wanted})


def link_speed(interface: str, interfaces: Path = _INTERFACES) -> float:
    """Return an interface's speed (Gb/s); 0: the kernel does not know it."""
    try:
        return max(0, int((interfaces / interface / "speed").read_text())) / 1000
    except (OSError, ValueError):
        return 0.0


def own_interface(cidr: str) -> tuple[str, str] | None:
    """Return (interface, address) of this host in a network; None: it has none there."""
    found = [(name, str(own.ip)) for name, own in own_addresses() if str(own.network) == cidr]
    return max(found, key=lambda each: link_speed(each[0]), default=None)  # a host may have several there


def own_addresses() -> list[tuple[str, IPv4Interface | IPv6Interface]]:
    """Return the addresses of this host with their networks, by interface; only those that other hosts may reach."""
    import psutil

    up = {name for name, state in psutil.net_if_stats().items() if state.isup}
    found = []
    for name, addresses in psutil.net_if_addrs().items():
        for each in addresses:
            if name in up and each.family in (socket.AF_INET, socket.AF_INET6) and each.netmask:
                prefix = ip_address(each.netmask)
                bits = f"{int(prefix):b}".count("1")
                own = ip_interface(f"{each.address.partition('%')[0]}/{bits}")
                if not own.is_loopback and not own.is_link_local:
                    found.append((name, own))
    return found


def describe_way(interface: str, version_bytes: int) -> str:
    """Return an interface's speed, and how long a weight version takes over it."""
    speed = link_speed(interface)
    if not speed:
        return f"{interface}, whose speed is not known"
    seconds = version_bytes * 8 / 1e9 / speed
    takes = f": a version of the weights ({version_bytes / 1e9:.3g} GB) takes {seconds:.2g} s" if version_bytes else ""
    return f"{interface}, {speed:g} Gb/s{takes}"


class NetworkListeners:
    """Answers other nodes at this host's addresses in some networks, until `close`.

    Args:
        places: (cidr, address) of each.
        secret: the job's (hex).
    """

    def __init__(self, places: Iterable[tuple[str, str]], secret: str) -> None:
        self._listeners: list[socket.socket] = []
        found = []
        for cidr, address in places:
            with contextlib.suppress(OSError):  # an address that is not usable yet
                listener = socket.create_server((address, 0), family=family_of(address))
                self._listeners.append(listener)
                found.append(Network(cidr, address, listener.getsockname()[1]))
                thread = threading.Thread(target=_answer_probes, args=(listener, _proof(secret, cidr)), daemon=True)
                thread.start()
        self.networks = tuple(found)

    def close(self) -> None:
        for listener in self._listeners:
            with contextlib.suppress(OSError):  # wakes the thread in `accept`
                listener.shutdown(socket.SHUT_RDWR)
            listener.close()


class OfferedNetworks(NetworkListeners):
    """Node 0's networks that are faster than the way to the job store, the fastest one first."""

    def __init__(self, store_host: str, secret: str, env: Mapping[str, str] = os.environ) -> None:
        super().__init__(_faster_places(store_host, env), secret)


def _faster_places(store_host: str, env: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    # With an interface of the user's own choice there is nothing to choose.
    if is_loopback(store_host) or env.get(GLOO_INTERFACE):
        return
    least = link_speed(interface_towards(store_host))
    if not least:  # of unknown speed, as in most virtual machines, and perhaps the fastest
        return
    for name, own in sorted(own_addresses(), key=lambda each: (-link_speed(each[0]), each[0])):
        if link_speed(name) <= least:
            return
        yield str(own.network), str(own.ip)


def list_reached(networks: Iterable[Network], secret: str, env: Mapping[str, str] = os.environ) -> list[str]:
    """Return which of node 0's networks this host reaches through an interface of its own there."""
    if env.get(GLOO_INTERFACE):
        return []
    return [network.cidr for network in networks if _is_reached(network, secret)]


def reached_everywhere(cidrs: Iterable[str], others: Sequence[Network], secret: str) -> list[str]:
    """Return the networks in which this host reaches all of the `others` that are in them."""
    return [cidr for cidr in cidrs if all(_is_reached(each, secret) for each in others if each.cidr == cidr)]


def _is_reached(network: Network, secret: str) -> bool:
    own = own_interface(network.cidr)
    if own is None or own[1] == network.address:  # such as the address that every host's docker0 has
        return False
    expected = _proof(secret, network.cidr)
    try:
        with socket.create_connection(
            (network.address, network.port), _PROBE_TIMEOUT_S, source_address=(own[1], 0)
        ) as probe:
            return probe.recv(len(expected), socket.MSG_WAITALL) == expected
    except OSError:
        return False


def _proof(secret: str, cidr: str) -> bytes:
    return Mac(bytes.fromhex(secret), "network").compute_proof(cidr.encode())


def _answer_probes(listener: socket.socket, proof: bytes) -> None:
    while True:
        try:
            probe, _ = listener.accept()
        except OSError:  # closed
            return
        with probe, contextlib.suppress(OSError):
            probe.sendall(proof)


def choose_interface(host: str) -> None:
    """Make this process's channels use the interface that leads to `host`, unless the user named one.

    Unlike `choose_interfaces`, for programs that also have process groups of their own.
    """
    if not is_loopback(host):
        os.environ.setdefault(GLOO_INTERFACE, interface_towards(host))


def own_name() -> str:
    """Return this host's name, for people."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def is_loopback(address: str) -> bool:
    return ip_address(address).is_loopback


def endpoint(host: str, port: int | str) -> str:
    """Return HOST:PORT for people and options, with an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def family_of(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def interface_towards(address: str, routes: Path = _ROUTES) -> str:
    """Return the interface with the most specific route to an IPv4 or IPv6 address.

    For an address of this host that is the interface of its network. `routes` is the directory of the kernel's tables.
    Raises ConfigError if there is no route.
    """
    target = ip_address(address)
    table = _ipv4_routes(routes / "route") if target.version == 4 else _ipv6_routes(routes / "ipv6_route")
    fitting = [(network.prefixlen, -metric, name) for network, metric, name in table if target in network]
    if not fitting:
        raise ConfigError(f"{GLOO_INTERFACE}: no interface of this host leads to {address}; set it to the right one")
    return max(fitting, key=lambda route: route[:2])[2]


def address_towards(address: str) -> str:
    """Return this host's own address on the way to another one; sends nothing. Raises OSError if there is no route."""
    # Connecting a datagram socket only looks up the route; the port does not matter.
    with socket.socket(family_of(address), socket.SOCK_DGRAM) as probe:
        probe.connect((address, 9))
        return str(probe.getsockname()[0])


def resolve(host: str) -> str:
    """Return the address of a name or address; IPv4 where a name has both. Raises OSError if the name is unknown."""
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return str(min(found, key=lambda each: each[0] != socket.AF_INET)[4][0])


def address_to_listen_on(named: str, hints: Iterable[str] = ()) -> str:
    """Return the address of this host at which others find it.

    Args:
        named: what the user calls this host; "": try the hints, then the route to the outside, then the first interface
            with an address. Loopback is the last resort: then every node of the run is on this host.
        hints: what others may call it; skipped unless they are addresses of this host.

    Raises:
        ConfigError: `named` is unknown, or is another host.
    """
    if named:
        try:
            address = resolve(named)
        except OSError as error:
            raise ConfigError(f"--head: {named!r} cannot be resolved ({error.strerror}); give an address") from error
        if not _is_own(address):
            at = "" if address == named else f" ({address})"
            raise ConfigError(f"--head: {named}{at} is not an address of this host, which is node 0; name node 0 there")
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
    import psutil  # not needed by a node that has a name or a route outside

    found = [each for addresses in psutil.net_if_addrs().values() for each in addresses]
    yield from (each.address for each in found if each.family is socket.AF_INET)
    # A link-local address (fe80::...%eth0) means something else on every host.
    yield from (each.address for each in found if each.family is socket.AF_INET6 and "%" not in each.address)


def _is_own(address: str) -> bool:
    with socket.socket(family_of(address), socket.SOCK_STREAM) as probe:
        # Only an address of this host can be bound.
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True


def _ipv4_routes(path: Path) -> Iterator[tuple[IPv4Network, int, str]]:
    """Yield (network, metric, interface) of routes that are up; numbers are in native byte order."""
    for line in path.read_text().splitlines()[1:]:
        name, destination, _, flags, _, _, metric, mask = line.split()[:8]
        if _leads_somewhere(int(flags, 16)):
            number = struct.pack("=I", int(destination, 16))
            yield IPv4Network((number, int(mask, 16).bit_count()), strict=False), int(metric), name


def _ipv6_routes(path: Path) -> Iterator[tuple[IPv6Network, int, str]]:
    """The same for IPv6, which the kernel writes in another form; no file: this host has no IPv6."""
    for line in path.read_text().splitlines() if path.exists() else ():
        destination, width, _, _, _, metric, _, _, flags, name = line.split()
        bits = int(flags, 16)
        # Older kernels also list a host's own addresses as routes of `lo`.
        if _leads_somewhere(bits) and not bits & _ROUTE_LOCAL:
            yield IPv6Network((bytes.fromhex(destination), int(width, 16)), strict=False), int(metric, 16), name


def _leads_somewhere(flags: int) -> bool:
    return bool(flags & _ROUTE_UP) and not flags & _ROUTE_REJECT
