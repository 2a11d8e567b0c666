"""Processes on hosts that a test drives over pipes: functions of the modules in `tests/multiproc`, or of this one.

`python parties.py FD MODULE FUNCTION STORE_HOST STORE_PORT` runs `FUNCTION(port, pipe, ...)`; port 0: no store yet.
"""

import importlib
import os
import sys
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection as Pipe

import torch
from echo_peers import HOST_VARIABLE, credentials

from asyncflow.job import choose_interfaces
from asyncflow.sealed_store import serve_store
from tq import Column, QueueClient
from tq.config import QueueConfig

QUEUE = QueueConfig(request_timeout_s=60)


def serve(port: int, pipe: Pipe, host: str) -> None:
    """Serve the test's store on a host; says its port."""
    _, port = serve_store(host, timedelta(seconds=60))
    pipe.send(port)
    pipe.recv()


def client(port: int, pipe: Pipe, num_values: int) -> None:
    """Put rows, lease them and read them back; says whether they are the same, and how they travelled."""
    mine = QueueClient(credentials(port, 60.0), "client", config=QUEUE)
    x = torch.arange(4 * num_values, dtype=torch.float32).view(4, num_values)
    mine.put_rows({"x": Column.of_rows(list(x))}, partition=0)
    lease = mine.fetch("double", num_rows=4)
    read = lease["x"]
    order = [mine_row % 4 for mine_row in lease.rows]
    same = torch.equal(read.values.view(4, num_values), x[order])
    (stats,) = mine.unit_stats().values()
    pipe.send((same, stats.shared_channels, stats.wire_channels))
    pipe.recv()
    mine.close()


def main() -> None:
    fd, module, function, host, port = sys.argv[1:]
    pipe = Pipe(int(fd))
    if int(port):
        os.environ[HOST_VARIABLE] = host
        choose_interfaces(host)
    arguments = pipe.recv()
    target: Callable[..., None] = getattr(importlib.import_module(module), function)
    target(int(port), pipe, *arguments)
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
