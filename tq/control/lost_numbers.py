"""Which rows went with their unit, and which parts of the durable record of them must be written again. Pure.

lose 5, 9000      changed: parts 0, 2      take -> {0: [5], 2: [9000]}    the store holds both
back 5            changed: -               the record stays: the unit may not know yet who was done with the row
end 5             changed: part 0          take -> {0: []}                 the store forgets the part
"""

from collections.abc import Iterable, Iterator

_ROWS = 4096
"""Neighbours that go into one part."""
_PARTS = 256
"""Rows beyond so many parts begin with the first one again."""


class LostNumbers:
    """Row numbers, by part."""

    def __init__(self) -> None:
        self._lost: dict[int, set[int]] = {}
        self._noted: dict[int, set[int]] = {}
        self._changed: set[int] = set()

    def __iter__(self) -> Iterator[int]:
        """Yield all lost rows."""
        for rows in self._lost.values():
            yield from rows

    @property
    def changed(self) -> bool:
        """Whether the record must be written again: for a loss, an ack of a lost row, the end of a noted one."""
        return bool(self._changed)

    def lose(self, numbers: Iterable[int]) -> None:
        """The unit of these rows is gone."""
        for number in numbers:
            self._lost.setdefault(_part(number), set()).add(number)
            self._changed.add(_part(number))

    def ack(self, number: int) -> None:
        """A task is done with a lost row."""
        self._changed.add(_part(number))

    def back(self, number: int) -> None:
        """A row was put again."""
        self._lost.get(_part(number), set()).discard(number)

    def end(self, number: int) -> None:
        """A row is finished, or removed."""
        self.back(number)
        if number in self._noted.get(_part(number), ()):
            self._changed.add(_part(number))

    def take(self) -> dict[int, list[int]]:
        """Return part -> the lost rows that its record is to hold, of the parts that changed since the last call."""
        changed, self._changed = self._changed, set()
        for part in changed:
            self._noted[part] = set(self._lost.get(part, ()))
        return {part: sorted(self._noted[part]) for part in sorted(changed)}


def _part(number: int) -> int:
    return number // _ROWS % _PARTS
