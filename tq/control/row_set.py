"""A set of row numbers at a bit each: rows are numbered densely, and finished ones are remembered for long. Pure."""

from collections.abc import Iterable, Iterator

Span = tuple[int, int]
"""Neighbours: the first one, and the last one + 1."""

_BITS = 256
"""Per chunk: setting a bit copies its chunk."""
_FULL = (1 << _BITS) - 1
_CHUNKS = 256
"""Chunks of neighbours that go into one part."""
_PARTS = 256


class RowSet:
    """In ascending order when looked through."""

    def __init__(self, rows: Iterable[int] = ()) -> None:
        self._chunks: dict[int, int] = {}
        self.update(rows)

    def __contains__(self, row: int) -> bool:
        return bool(self._chunks.get(row // _BITS, 0) >> row % _BITS & 1)

    def __iter__(self) -> Iterator[int]:
        for first, end in self.spans():
            yield from range(first, end)

    def __bool__(self) -> bool:
        return bool(self._chunks)

    def __len__(self) -> int:
        return sum(bits.bit_count() for bits in self._chunks.values())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RowSet) and self._chunks == other._chunks

    __hash__ = None  # type: ignore[assignment]  # it changes

    def copy(self) -> "RowSet":
        """Return the same rows, to be changed by themselves."""
        rows = RowSet()
        rows._chunks = dict(self._chunks)
        return rows

    def add(self, row: int) -> None:
        """Take in one row."""
        chunk = row // _BITS
        self._chunks[chunk] = self._chunks.get(chunk, 0) | 1 << row % _BITS

    def discard(self, row: int) -> None:
        """Remove one row, if it is in here."""
        bits = self._chunks.get(row // _BITS, 0) & ~(1 << row % _BITS)
        if bits:
            self._chunks[row // _BITS] = bits
        else:
            self._chunks.pop(row // _BITS, None)

    def update(self, rows: Iterable[int]) -> None:
        """Take in several."""
        for row in rows:
            self.add(row)

    def merge(self, other: "RowSet") -> None:
        """Take in all of another set; costs no more for a chunk of rows than for a row."""
        for chunk, bits in other._chunks.items():
            self._chunks[chunk] = self._chunks.get(chunk, 0) | bits

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
        rows = RowSet()
        for first, end in spans:
            for chunk in range(first // _BITS, -(-end // _BITS)):
                low, high = max(first - chunk * _BITS, 0), min(end - chunk * _BITS, _BITS)
                rows._chunks[chunk] = rows._chunks.get(chunk, 0) | (1 << high) - (1 << low)
        return rows

    def parts(self) -> "dict[int, RowSet]":
        """Return number -> rows of this part: at most 256 parts of 65,536 neighbours each, larger ones in turn.

        A row is in the same part of every set, so a set that is stored by parts is written anew where it grew only.
        """
        parts: dict[int, RowSet] = {}
        for chunk, bits in self._chunks.items():
            parts.setdefault(chunk // _CHUNKS % _PARTS, RowSet())._chunks[chunk] = bits
        return parts


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
