"""Real servers behind the storage backends: started on free ports of loopback, ended by process id."""

import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.machine import obstacle
from tests.support.ports import free_port
from tq.config import BackendConfig

NEEDS = {
    "redis": "apt-get install redis-server",
    "mooncake": "pip install -e '.[mooncake]' && apt-get install libibverbs1 libnuma1 librdmacm1 libcurl4",
}


@contextmanager
def backend_server(kind: str, directory: Path) -> Iterator[tuple[BackendConfig, "subprocess.Popen[bytes] | None"]]:
    """Start what a backend needs; yields settings and the server, if any. Skips where it cannot run."""
    if kind == "memory":
        yield BackendConfig(), None
        return
    port = free_port()
    command = _command(kind, port, directory)
    with (directory / "server.log").open("wb") as log:
        server = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    address = f"redis://127.0.0.1:{port}/0" if kind == "redis" else f"127.0.0.1:{port}"
    sizes = {"segment_bytes": 2**28, "buffer_bytes": 2**24}
    try:
        _wait_for(port, server)
        yield BackendConfig(kind=kind, address=address, timeout_s=10, **sizes), server
    finally:
        server.kill()
        server.wait()


def _command(kind: str, port: int, directory: Path) -> list[str]:
    name, package = ("redis-server", "redis") if kind == "redis" else ("mooncake_master", "mooncake.store")
    binary = shutil.which(name) or shutil.which(name, path=str(Path(sys.executable).parent)) or name
    if reason := obstacle(binary, "--version", remedy=NEEDS[kind]):
        pytest.skip(reason)
    pytest.importorskip(package, exc_type=ImportError, reason=f"{package} cannot be imported: {NEEDS[kind]}")
    if kind == "redis":
        return [binary, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", str(directory)]
    return [
        binary,
        f"--port={port}",
        f"--metrics_port={free_port()}",
        "--rpc_address=127.0.0.1",
        "--metrics_host=127.0.0.1",
    ]


def _wait_for(port: int, server: "subprocess.Popen[bytes]") -> None:
    pause = threading.Event()
    for _ in range(200):
        assert server.poll() is None, "the server ended"
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
        except OSError:
            pause.wait(0.05)
        else:
            return
    raise AssertionError("the server does not answer")
