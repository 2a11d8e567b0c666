"""Runs users' coroutines: one event loop for all of them, in a thread, so that they can share clients and sessions.

A coroutine that blocks the loop is the user's mistake, and costs what is waiting in that loop at the time; the loop is
then left behind, and the next coroutines get another.
"""

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any

from asyncflow.awake import awake_slices

_RESPONSE_S = 1.0


class CoroutineThread:
    """Owns the loop, made when first needed. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self, coroutine: Coroutine[Any, Any, Any]) -> "Future[Any]":
        """Begin a coroutine; the future is of what it returns."""
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=self._loop.run_forever, name="coroutines", daemon=True).start()
            return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def give_up(self, future: "Future[Any]") -> None:
        """Cancel what takes too long, and leave a loop behind that does not go on within a second."""
        with self._lock:
            loop = self._loop
        future.cancel()
        if loop is None:
            return
        alive = threading.Event()
        loop.call_soon_threadsafe(alive.set)
        if any(alive.wait(slice_s) for slice_s in awake_slices(_RESPONSE_S)):
            return
        with self._lock:
            if self._loop is loop:
                self._loop = None
