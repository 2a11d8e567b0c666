"""Several hosts on one machine: network namespaces with addresses of their own, joined by a bridge."""

import contextlib
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import psutil

from asyncflow.job import Job
from tests.support import machine

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
DEADLINE_S = 120.0
_SPACES = Path("/etc/netns")
_PYTHONPATH = os.pathsep.join(map(str, (ROOT, HERE, HERE.parent / "multiproc")))

T = TypeVar("T")


def obstacle() -> str:
    """Return why no hosts can be made here, or ""."""
    if reason := machine.obstacle("ip", "-V", remedy="apt-get install iproute2"):
        return reason
    name = f"af-{os.getpid()}-try"
    made = _ip("netns", "add", name, check=False)
    if made.returncode:
        return f"network namespaces are not permitted here ({made.stderr.strip()})"
    try:
        bridged = _ip("-n", name, "link", "add", "name", "br0", "type", "bridge", check=False)
        return f"bridges are not permitted here ({bridged.stderr.strip()})" if bridged.returncode else ""
    finally:
        _ip("netns", "del", name)


def _ip(*words: str, check: bool = True) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(["ip", *words], check=check, capture_output=True, text=True)


class Host:
    """One of them."""

    def __init__(self, number: int, bridge: str, *, ipv6: bool) -> None:
        self.name = f"host-{number}"
        self.address = f"fd77::{number + 1}" if ipv6 else f"10.77.0.{number + 1}"
        self.processes: list[subprocess.Popen[str]] = []
        self._space = f"{bridge}-{number}"
        self.bridge, self.link = bridge, f"v{number}"  # namespace of the bridge, and the link to this host there
        _ip("netns", "add", self._space)
        _ip("-n", bridge, "link", "add", self.link, "type", "veth", "peer", "name", "eth0", "netns", self._space)
        _ip("-n", bridge, "link", "set", self.link, "master", "br0", "up")
        network = (f"{self.address}/64", "nodad") if ipv6 else (f"{self.address}/24",)
        _ip("-n", self._space, "address", "add", *network, "dev", "eth0")
        for link in ("lo", "eth0"):
            _ip("-n", self._space, "link", "set", link, "up")

    def know_names(self, addresses: Mapping[str, str]) -> None:
        """Make all that starts here from now on resolve these names, as a cluster's DNS would."""
        # `ip netns exec` mounts the files of this directory over those of /etc.
        _SPACES.joinpath(self._space).mkdir(parents=True)
        lines = ["127.0.0.1 localhost", *(f"{address} {name}" for name, address in addresses.items())]
        _SPACES.joinpath(self._space, "hosts").write_text("\n".join(lines) + "\n")

    def start(self, *command: Any, **options: Any) -> "subprocess.Popen[str]":
        """Start a command on this host; what it prints goes into one pipe."""
        process = subprocess.Popen(
            ["ip", "netns", "exec", self._space, *map(str, command)],
            env={**_environment(), "PYTHONPATH": _PYTHONPATH, "SLURMD_NODENAME": self.name},
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            **options,
        )
        self.processes.append(process)
        return process

    def python(self, *arguments: Any, **options: Any) -> "subprocess.Popen[str]":
        """Start Python on this host."""
        return self.start(sys.executable, *arguments, **options)

    def pids(self) -> list[int]:
        """Return all processes on this host."""
        return [int(pid) for pid in _ip("netns", "pids", self._space).stdout.split()]

    def listening(self) -> set[str]:
        """Return the addresses at which its processes listen."""
        found = set()
        for pid in self.pids():
            with contextlib.suppress(psutil.NoSuchProcess):
                for connection in psutil.Process(pid).net_connections("inet"):
                    if connection.status == psutil.CONN_LISTEN:
                        found.add(connection.laddr.ip)
        return found

    def received_bytes(self) -> int:
        """Return how much came over the network so far."""
        shown = self.start("cat", "/sys/class/net/eth0/statistics/rx_bytes")
        return int(ends([shown])[0][1])

    def cut_off(self) -> None:
        """Let no packet in or out any more."""
        _ip("-n", self._space, "link", "set", "eth0", "down")

    def end(self) -> None:
        """Kill all that runs here, by process id, and remove the host."""
        for pid in self.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for process in self.processes:
            process.wait(timeout=10)
            if process.stdout is not None:
                process.stdout.close()
        _ip("netns", "del", self._space)
        shutil.rmtree(_SPACES / self._space, ignore_errors=True)


class Party:
    """A process of `parties.py` on a host; this is the test's end of its pipe."""

    def __init__(self, host: Host, module: str, function: str, store: tuple[str, int], *arguments: Any) -> None:
        self._pipe, theirs = multiprocessing.Pipe()
        words = (theirs.fileno(), module, function, *store)
        self.process = host.python(HERE / "parties.py", *words, pass_fds=(theirs.fileno(),))
        theirs.close()
        self._pipe.send(arguments)

    def hear(self, deadline_s: float = 120.0) -> Any:
        """Return what it says next."""
        assert self._pipe.poll(deadline_s), f"it said nothing for {deadline_s:g} s"
        return self._pipe.recv()

    def tell(self, message: Any) -> None:
        """Send it something."""
        self._pipe.send(message)

    def close(self) -> None:
        """Close the pipe."""
        self._pipe.close()


@contextlib.contextmanager
def some_hosts(number: int, *, ipv6: bool = False) -> Iterator[list[Host]]:
    """Make hosts that reach each other, by IPv4 or by IPv6 alone; whatever happens, nothing of them is left."""
    bridge = f"af-{os.getpid()}"
    _ip("netns", "add", bridge)
    hosts: list[Host] = []
    try:
        _ip("-n", bridge, "link", "add", "name", "br0", "type", "bridge")
        _ip("-n", bridge, "link", "set", "br0", "up")
        for each in range(number):
            hosts.append(Host(each, bridge, ipv6=ipv6))
        yield hosts
    finally:
        for host in hosts:
            host.end()
        _ip("netns", "del", bridge)


def eventually(condition: Callable[[], T], what: str, deadline_s: float = DEADLINE_S) -> T:
    """Return the condition's first true value; other processes make it true."""
    end = time.monotonic() + deadline_s
    never = threading.Event()  # unrelated processes share no event to wait on
    while not (value := condition()):
        assert time.monotonic() < end, f"{what}: not within {deadline_s:g} s"
        never.wait(0.05)
    return value


def job_of(run_dir: Path) -> Job | None:
    """Return the run's job, once it is there."""
    return Job.load(run_dir) if (run_dir / "job.json").is_file() else None


def _environment() -> dict[str, str]:
    """Return this process's environment without the interfaces that a run on one node, in this process, chose."""
    return {name: value for name, value in os.environ.items() if not name.endswith("_SOCKET_IFNAME")}


def ends(processes: "Sequence[subprocess.Popen[str]]", deadline_s: float = DEADLINE_S) -> list[tuple[int, str]]:
    """Wait for processes; returns their exit codes and what they printed."""
    results = []
    for process in processes:
        output, _ = process.communicate(timeout=deadline_s)
        results.append((process.returncode, output))
    return results
