"""Helper processes of our own side: forked from a server that has torch and the queue imported, killed by their id."""

import multiprocessing
import os
import signal
from collections.abc import Callable
from typing import Any

from asyncflow.process import die_with_parent

PRELOAD = ["torch", "torch.distributed", "tq.client.queue_client", "tq.client.dataloader", "tq.local", "xxhash"]
_END_TIMEOUT_S = 10.0


class Child:
    """Runs `target(pipe, *arguments)` in a process of its own."""

    def __init__(self, target: Callable[..., None], *arguments: Any) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_run, args=(target, theirs, *arguments), daemon=True)
        self._process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        """Process id."""
        assert self._process.pid is not None
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether it still runs."""
        return self._process.is_alive()

    def tell(self, message: Any) -> None:
        """Send it something."""
        self._pipe.send(message)

    def hear(self, timeout_s: float = 60.0) -> Any:
        """Return what it says next."""
        if not self._pipe.poll(timeout_s):
            raise SystemExit(f"{self._process.name} said nothing for {timeout_s:g} s")
        return self._pipe.recv()

    def ask(self, message: Any, timeout_s: float = 60.0) -> Any:
        """Send something and return the answer."""
        self.tell(message)
        return self.hear(timeout_s)

    def join(self, timeout_s: float) -> bool:
        """Wait for its own end; returns whether it came."""
        self._process.join(timeout_s)
        return not self._process.is_alive()

    def kill(self) -> None:
        """Send SIGKILL and wait until it is gone. Idempotent."""
        if self._process.is_alive():
            os.kill(self.pid, signal.SIGKILL)
        self._process.join(_END_TIMEOUT_S)
        self._pipe.close()


def _run(target: Callable[..., None], pipe: Any, *arguments: Any) -> None:
    die_with_parent()
    target(pipe, *arguments)
