"""The order in which ready rows go out: ascending. Cost does not grow with the number of rows that wait. Pure.

Rows mostly become ready in ascending order: those sit in a line and cost O(1). The others (given back, or ready out of
turn) sit in a heap beside it.
"""

import heapq
from collections import deque
from collections.abc import Sequence


class ReadyQueue:
    """Row numbers in ascending order. A number may be here twice or be out of date: whoever pops it must check."""

    def __init__(self) -> None:
        self._line: deque[int] = deque()
        self._beside: list[int] = []

    def push(self, number: int) -> None:
        """Add a number."""
        if not self._line or number > self._line[-1]:
            self._line.append(number)
        else:
            heapq.heappush(self._beside, number)

    def pop(self) -> int | None:
        """Take the smallest number; None: there is none. A number that was pushed twice comes once."""
        if self._beside and (not self._line or self._beside[0] <= self._line[0]):
            number = heapq.heappop(self._beside)
        elif self._line:
            number = self._line.popleft()
        else:
            return None
        while self._beside and self._beside[0] == number:
            heapq.heappop(self._beside)
        if self._line and self._line[0] == number:
            self._line.popleft()
        return number

    def put_back(self, numbers: Sequence[int]) -> None:
        """Return numbers, ascending, that were just popped: nothing was pushed or popped since."""
        self._line.extendleft(reversed(numbers))
