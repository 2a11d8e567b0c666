"""A thread that works a bounded number of items ahead of its taker. Loaders and streams fetch with it.

    source (an iterator, runs in the thread) -> at most `depth` finished items -> next(read_ahead)

The thread ends when the source does, when it fails (every call of the taker then raises the error), or when the taker
closes: then finished items that were not taken go to `discard`.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class ReadAhead(Generic[T]):
    """An iterator over what a thread produces. One thread takes; any thread may close.

    Args:
        depth: finished items that may wait, at least 1.
        closing: set by `close`; the source checks it between its own waits.
        discard: gets every item that is produced but never taken.
        arrived: called by the thread whenever `is_ready` may have become true.
    """

    def __init__(
        self,
        source: Iterator[T],
        *,
        depth: int,
        name: str,
        closing: threading.Event,
        discard: Callable[[T], None] = lambda item: None,
        arrived: Callable[[], None] = lambda: None,
    ) -> None:
        assert depth >= 1, f"a read-ahead of {depth} items"
        self._source = source
        self._depth = depth
        self._closing = closing
        self._discard = discard
        self._arrived = arrived
        self._changed = threading.Condition()
        self._items: deque[T] = deque()
        self._failure: Exception | None = None
        self._ended = False
        self.is_awaited = False
        """Whether the taker is waiting for an item."""
        self._thread = threading.Thread(target=self._read_source, name=name, daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def is_ready(self) -> bool:
        """Whether the taker's next call returns, or raises, at once."""
        with self._changed:
            return bool(self._items) or self._ended or self._closing.is_set()

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        """Wait for the next item; raises the source's own error once everything before it was taken."""
        with self._changed:
            self.is_awaited = True
            self._changed.wait_for(lambda: self._items or self._ended or self._closing.is_set())
            self.is_awaited = False
            if self._closing.is_set():
                raise StopIteration
            if self._items:
                item = self._items.popleft()
                self._changed.notify_all()
                return item
            if self._failure is not None:
                raise self._failure
            raise StopIteration

    def close(self) -> None:
        """End the iteration and, as soon as the source returns, the thread; idempotent, does not wait for it."""
        with self._changed:
            self._closing.set()
            left = list(self._items)
            self._items.clear()
            self._changed.notify_all()
        for item in left:
            self._discard(item)

    def join(self, timeout_s: float) -> bool:
        """Wait for the thread's end after `close`; returns whether it ended."""
        if self._thread is not threading.current_thread():
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _read_source(self) -> None:
        try:
            for item in self._source:
                if not self._offer_item(item):
                    self._discard(item)
                    return
        except Exception as error:  # noqa: BLE001 - the boundary of a thread: `__next__` raises it
            self._failure = error
        finally:
            with self._changed:
                self._ended = True
                self._changed.notify_all()
            self._arrived()

    def _offer_item(self, item: T) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: len(self._items) < self._depth or self._closing.is_set())
            if self._closing.is_set():
                return False
            self._items.append(item)
            self._changed.notify_all()
        self._arrived()
        return True
