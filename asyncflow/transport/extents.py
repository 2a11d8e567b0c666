"""Which parts of a span of memory are free: first fit at the lowest address, neighbours merged. Pure.

The lowest address wins so that memory that was used before, and is therefore in RAM, is used again first. Whoever owns
the memory (`arena.Arena`, `warm.WarmPool`) asks here and never hands out a part before it was freed.
"""

from bisect import bisect_left

ALIGN_BYTES = 64


class Extents:
    """Allocator of aligned parts of [0, num_bytes). Not thread-safe."""

    def __init__(self, num_bytes: int) -> None:
        """Manage `num_bytes`, rounded down to `ALIGN_BYTES`."""
        self.num_bytes = num_bytes // ALIGN_BYTES * ALIGN_BYTES
        self._starts = [0] if self.num_bytes else []  # of the free extents, sorted
        self._sizes = [self.num_bytes] if self.num_bytes else []
        self._used: dict[int, int] = {}
        self.highest = 0
        """End of the highest part that was ever handed out."""

    @property
    def free_extents(self) -> list[tuple[int, int]]:
        """The free parts as (start, bytes), in order."""
        return list(zip(self._starts, self._sizes, strict=True))

    @property
    def in_use(self) -> int:
        """How many parts are handed out."""
        return len(self._used)

    def allocate(self, num_bytes: int) -> int | None:
        """Return the start of a part of at least `num_bytes`, or None when no free part is long enough."""
        size = max(1, -(-num_bytes // ALIGN_BYTES)) * ALIGN_BYTES
        for k, free in enumerate(self._sizes):
            if free < size:
                continue
            start = self._starts[k]
            if free == size:
                del self._starts[k], self._sizes[k]
            else:
                self._starts[k] += size
                self._sizes[k] -= size
            self._used[start] = size
            self.highest = max(self.highest, start + size)
            return start
        return None

    def free(self, start: int) -> None:
        """Take a part back.

        Raises:
            KeyError: no part that is in use starts there.
        """
        size = self._used.pop(start)
        k = bisect_left(self._starts, start)
        if k < len(self._starts) and start + size == self._starts[k]:
            size += self._sizes[k]
            del self._starts[k], self._sizes[k]
        if k > 0 and self._starts[k - 1] + self._sizes[k - 1] == start:
            self._sizes[k - 1] += size
        else:
            self._starts.insert(k, start)
            self._sizes.insert(k, size)
