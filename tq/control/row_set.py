"""A set of row numbers at a bit each: rows are numbered densely, and finished ones are remembered for long. Pure."""

from collections.abc import Iterable, Iterator

Span = tuple[int, int]
"""Neighbours: the first one, and the last one + 1."""

_BITS = 256
"""Per chunk: setting a bit copies its chunk."""
_FULL = (1 << _BITS) - 1


class RowSet:
    """Grows only; in ascending order when looked through."""

    def __init__(self, rows: Iterable[int] = ()) -> None:
        self._chunks: dict[int, int] = {}
        self.update(rows)

    def __contains__(self, row: int) -> bool:
        return bool(self._chunks.get(row // _BITS, 0) >> row % _BITS & 1)

    def __iter__(self) -> Iterator[int]:
        for first, end in self.spans():
            yield from range(first, end)

    def __len__(self) -> int:
        return sum(bits.bit_count() for bits in self._chunks.values())

    def add(self, row: int) -> None:
        """Take in one row."""
        chunk = row // _BITS
        self._chunks[chunk] = self._chunks.get(chunk, 0) | 1 << row % _BITS

    def update(self, rows: Iterable[int]) -> None:
        """Take in several."""
        for row in rows:
            self.add(row)

    def merge(self, other: "RowSet") -> None:
        """Take in all of another set; costs no more for a chunk of rows than for a row."""
        for chunk, bits in other._chunks.items():
            self._chunks[chunk] = self._chunks.get(chunk, 0) | bits

    def copy(self) -> "RowSet":
        """Return a set of its own."""
        copied = RowSet()
        copied.merge(self)
        return copied

    def spans(self) -> list[Span]:
        """Return the rows as runs of neighbours, ascending."""
        spans: list[Span] = []
        for chunk, bits in sorted(self._chunks.items()):
            for low, high in [(0, _BITS)] if bits == _FULL else _runs(bits):
                first, end = chunk * _BITS + low, chunk * _BITS + high
                if spans and spans[-1][1] == first:
                    first = spans.pop()[0]
                spans.append((first, end))
        return spans

    @staticmethod
    def of_spans(spans: Iterable[Span]) -> "RowSet":
        """Undo `spans`."""
        return RowSet(row for first, end in spans for row in range(first, end))


def _runs(bits: int) -> Iterator[Span]:
    """Yield the runs of ones."""
    position = 0
    while bits:
        zeros = (bits & -bits).bit_length() - 1
        bits >>= zeros
        ones = (~bits & bits + 1).bit_length() - 1
        bits >>= ones
        yield position + zeros, position + zeros + ones
        position += zeros + ones
