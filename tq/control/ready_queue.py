"""The order in which ready rows go out: ascending. Cost does not grow with the number of rows that wait. Pure.

Neighbouring numbers share a bucket; only the bucket in front is kept sorted. So a million rows cost a heap of a
thousand buckets, in whatever order they become ready.
"""

import heapq
from bisect import insort
from collections.abc import Sequence

_BUCKET_BITS = 10


class ReadyQueue:
    """Row numbers in ascending order. A number may be here twice or be out of date: whoever pops it must check."""

    def __init__(self) -> None:
        self._front: list[int] = []
        """Negated, so that the smallest number is last."""
        self._front_bucket = -1
        self._buckets: dict[int, list[int]] = {}
        self._order: list[int] = []

    def push(self, number: int) -> None:
        """Add a number."""
        bucket = number >> _BUCKET_BITS
        if bucket == self._front_bucket:
            insort(self._front, -number)
            return
        members = self._buckets.get(bucket)
        if members is not None:
            members.append(number)
            return
        self._buckets[bucket] = [number]
        heapq.heappush(self._order, bucket)
        if bucket < self._front_bucket:
            self._retreat()

    def pop(self) -> int | None:
        """Take the smallest number; None: there is none. A number that was pushed twice comes once."""
        if not self._front:
            if not self._order:
                return None
            self._front_bucket = heapq.heappop(self._order)
            self._front = sorted(-number for number in self._buckets.pop(self._front_bucket))
        number = -self._front.pop()
        while self._front and self._front[-1] == -number:
            self._front.pop()
        return number

    def put_back(self, numbers: Sequence[int]) -> None:
        """Return numbers that were popped."""
        for number in reversed(numbers):
            self.push(number)

    def _retreat(self) -> None:
        """A bucket that comes earlier exists."""
        if self._front:
            self._buckets[self._front_bucket] = [-number for number in self._front]
            heapq.heappush(self._order, self._front_bucket)
        self._front, self._front_bucket = [], -1
