"""Counts for a storage unit's statistics. Thread-safe."""

import threading


class UnitTraffic:
    """What came and went since the start, and how clients are connected."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._channels: dict[int, bool] = {}
        self.puts = 0
        self.gets = 0
        self.bytes_in = 0
        self.bytes_out = 0

    def met(self, session: int, *, shared: bool) -> None:
        """A client sent something; its payloads come through shared memory, or over the wire."""
        with self._lock:
            self._channels[session] = shared

    def left(self, session: int) -> None:
        """A client is gone."""
        with self._lock:
            self._channels.pop(session, None)

    def put(self, num_bytes: int) -> None:
        """A put arrived."""
        with self._lock:
            self.puts += 1
            self.bytes_in += num_bytes

    def got(self, num_bytes: int) -> None:
        """A read was answered."""
        with self._lock:
            self.gets += 1
            self.bytes_out += num_bytes

    def channels(self) -> tuple[int, int]:
        """Return how many clients (share memory, use the wire)."""
        with self._lock:
            shared = sum(self._channels.values())
            return shared, len(self._channels) - shared
