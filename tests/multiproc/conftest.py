"""Real processes around a store on loopback: started from a fork server, ended by process id whatever happens."""

import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import TCPStore

# PyTorch looks up the name of every peer of a TCPStore; a resolver that does not answer would cost 5 s each time.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
sys.path.insert(0, str(Path(__file__).parent))  # children import `peers` by name

import peers
from echo_peers import Pong, echo_server
from waiting import wait_until
from weight_run import WeightRun

from asyncflow.transport.frame import Limits
from asyncflow.transport.server import Connection

DEADLINE_S = 60.0


class Child:
    """A process that runs a function of `peers`."""

    def __init__(self, context: Any, target: Callable[..., None], port: int, *arguments: Any) -> None:
        self._pipe, theirs = context.Pipe()
        self.process = context.Process(target=target, args=(port, theirs, *arguments), daemon=True)
        self.process.start()
        theirs.close()

    def hear(self, deadline_s: float = DEADLINE_S) -> Any:
        """Return what the process says next."""
        assert self._pipe.poll(deadline_s), f"{self.process} said nothing for {deadline_s:g} s"
        return self._pipe.recv()

    def tell(self, message: Any) -> None:
        """Send it something."""
        self._pipe.send(message)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal; returns when it stands still, if that is what the signal is for."""
        os.kill(self.process.pid, number)
        if number is signal.SIGSTOP:
            wait_until(self._stands_still, f"{self.process} was not stopped", deadline_s=DEADLINE_S)

    def _stands_still(self) -> bool:
        threads = Path(f"/proc/{self.process.pid}/task").glob("*/stat")
        try:
            return all(thread.read_text().rpartition(")")[2].split()[0] == "T" for thread in threads)
        except OSError:  # one has just ended
            return False

    def end(self) -> int:
        """Wait for its own end; returns the exit code."""
        self.process.join(DEADLINE_S)
        assert self.process.exitcode is not None, f"{self.process} did not end"
        return int(self.process.exitcode)

    def end_by_signal(self) -> None:
        """Wait for an end by `signal`."""
        assert self.end() < 0

    def kill(self) -> None:
        """End it and wait."""
        self.process.kill()
        self.process.join(DEADLINE_S)
        self._pipe.close()


@pytest.fixture
def store() -> TCPStore:
    """A job store on loopback."""
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=20))


@pytest.fixture
def start(store: TCPStore) -> Iterator[Callable[..., Child]]:
    """Return a function that starts `peers.FUNCTION` with arguments."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["torch", "torch.distributed", "tq.client.dataloader", "tq.control.controller", "weight_peers"]
    )
    children: list[Child] = []

    def start_child(target: Callable[..., None], *arguments: Any) -> Child:
        child = Child(context, target, store.port, *arguments)
        children.append(child)
        return child

    yield start_child
    for child in children:
        child.kill()


@pytest.fixture
def weight_run(start: Callable[..., Child]) -> WeightRun:
    """Return what starts a trainer, agents and receivers."""
    return WeightRun(start)


@pytest.fixture
def credentials(store: TCPStore) -> peers.Credentials:
    """What this process needs to open channels."""
    return peers.credentials(store.port)


@pytest.fixture(name="server")
def _server(start: Callable[..., Child]) -> Child:
    """A process that serves `echo`."""
    server = start(echo_server)
    assert server.hear() == "ready"
    return server


@pytest.fixture(name="connect")
def _connect(credentials: peers.Credentials) -> Iterator[Callable[..., Connection]]:
    """Return a function that opens a channel to a service that echoes."""
    opened: list[Connection] = []

    def connect(
        name: str = "client", service: str = "echo", *, proof: peers.Credentials = credentials, **limits: Any
    ) -> Connection:
        opened.append(Connection(proof, service, name, Pong, limits=Limits(**limits)))
        return opened[-1]

    yield connect
    for connection in opened:
        connection.close()
