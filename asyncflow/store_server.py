"""A TCPStore server that listens on one address only: PyTorch's own would listen on every interface.

Used by the launcher for the job store and by a queue that runs alone. Imports torch.
"""

import socket
from datetime import timedelta

from torch._C._distributed_c10d import TCPStore


def serve_store(host: str, timeout: timedelta, port: int = 0) -> tuple[TCPStore, int]:
    """Start a store on `host`.

    Args:
        host: one of this host's addresses.
        timeout: of the server's own calls.
        port: 0: any free one.
    Returns:
        The server, which is a client too, and its port. It lives as long as the object.
    Raises:
        OSError: the port is taken.
    """
    listener = socket.create_server((host, port), backlog=1024)
    port = listener.getsockname()[1]
    store = TCPStore(
        host, port, is_master=True, timeout=timeout, wait_for_workers=False, master_listen_fd=listener.detach()
    )
    return store, port


def connect_store(host: str, port: int, timeout: timedelta) -> TCPStore:
    """Connect to a store; a thread that may block in it needs a client of its own."""
    return TCPStore(host, port, is_master=False, timeout=timeout, wait_for_workers=False)
