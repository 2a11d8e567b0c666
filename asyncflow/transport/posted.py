"""Receives of frames that are posted before the frames are sent.

In Gloo a send to an end that has not posted the receive waits for it: a further round trip, and for ever when the
process is stopped. With the receive posted the bytes leave at once, and the kernel keeps them for a stopped process.
"""

import threading
from collections import deque
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor


class PostedFrames:
    """Receives in the order in which they were posted. Any thread may post; one takes."""

    def __init__(self, group: dist.ProcessGroup, source: int, tag: int, num_bytes: int) -> None:
        """Args:
        group, source, tag: where the frames come from.
        num_bytes: of every frame.
        """
        self._group = group
        self._source = source
        self._tag = tag
        self._num_bytes = num_bytes
        self._lock = threading.Lock()
        self._posted: deque[tuple[Tensor, dist.Work]] = deque()
        self._spare: list[Tensor] = []

    @property
    def num_posted(self) -> int:
        """How many frames can come without waiting."""
        return len(self._posted)

    def post(self, number: int) -> None:
        """Have at least so many receives posted.

        Raises:
            RuntimeError: the pair is broken.
        """
        if len(self._posted) >= number:
            return
        with self._lock:
            while len(self._posted) < number:
                buffer = self._spare.pop() if self._spare else torch.empty(self._num_bytes, dtype=torch.uint8)
                self._posted.append((buffer, self._group.recv([buffer], self._source, self._tag)))

    def take(self, timeout: timedelta) -> Tensor:
        """Wait for the next frame; give its buffer back with `reuse`.

        Raises:
            RuntimeError: the pair is broken, or is now because the timeout passed.
        """
        buffer, work = self._posted[0]
        work.wait(timeout)
        self._posted.popleft()
        return buffer

    def reuse(self, buffer: Tensor) -> None:
        """Post this buffer again one day."""
        self._spare.append(buffer)
