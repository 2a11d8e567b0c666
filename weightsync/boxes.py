"""Parts of tensors: axis-aligned boxes, which is what FSDP, tensor and pipeline parallelism cut. Pure."""

import itertools
import math
from collections.abc import Iterator, Sequence

import msgspec


class Box(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The elements `offset[d] <= i[d] < offset[d] + size[d]` of a tensor, in row-major order.

    Attributes:
        offset, size: one number per dimension; a scalar's are empty.
    """

    offset: tuple[int, ...]
    size: tuple[int, ...]

    @staticmethod
    def whole(shape: tuple[int, ...]) -> "Box":
        """Return all of a tensor."""
        return Box((0,) * len(shape), shape)

    @staticmethod
    def rows(shape: tuple[int, ...], start: int, stop: int) -> "Box":
        """Return rows `start` to `stop` of dimension 0."""
        return Box((start, *(0,) * (len(shape) - 1)), (stop - start, *shape[1:]))

    @property
    def numel(self) -> int:
        """Elements in the box."""
        return math.prod(self.size)

    @property
    def slices(self) -> tuple[slice, ...]:
        """What indexes a tensor to get the box."""
        return tuple(slice(start, start + size) for start, size in zip(self.offset, self.size, strict=True))

    def inside(self, shape: tuple[int, ...]) -> bool:
        """Return whether a tensor of this shape has all of it."""
        return len(self.offset) == len(self.size) == len(shape) and all(
            start >= 0 and size >= 0 and start + size <= length
            for start, size, length in zip(self.offset, self.size, shape, strict=True)
        )

    def within(self, outer: "Box") -> "Box | None":
        """Return this box counted from the corner of `outer`, or None if it is not inside that."""
        offset = tuple(start - other for start, other in zip(self.offset, outer.offset, strict=True))
        relative = Box(offset, self.size)
        return relative if relative.inside(outer.size) else None

    def overlaps(self, other: "Box") -> bool:
        """Return whether the two have an element in common."""
        return (
            self.numel > 0
            and other.numel > 0
            and all(
                a < b + m and b < a + n
                for a, n, b, m in zip(self.offset, self.size, other.offset, other.size, strict=True)
            )
        )

    def run(self, shape: tuple[int, ...]) -> tuple[int, int] | None:
        """Return (first element, number) if the box is one run of the flattened tensor, else None."""
        whole_from = len(shape)
        while whole_from and self.size[whole_from - 1] == shape[whole_from - 1]:
            whole_from -= 1
        if any(size != 1 for size in self.size[: max(0, whole_from - 1)]) and self.numel:
            return None
        start = 0
        for index, length in zip(self.offset, shape, strict=True):
            start = start * length + index
        return start, self.numel

    def cut(self, most: int) -> Iterator["Box"]:
        """Yield parts of at most `most` elements, in row-major order, as few as whole rows allow."""
        if self.numel <= most:
            if self.numel:
                yield self
            return
        axis = next(axis for axis, size in enumerate(self.size) if size > 1)
        row = self.numel // self.size[axis]
        step = max(1, most // row)
        for start in range(0, self.size[axis], step):
            part = self._along(axis, start, min(step, self.size[axis] - start))
            yield from part.cut(most)

    def split(self, first: int) -> tuple["Box | None", "Box | None"]:
        """Return a part of at most `first` elements, made of whole rows of the outermost axis, and the rest."""
        if self.numel <= first:
            return self, None
        axis = next((axis for axis, size in enumerate(self.size) if size > 1), None)
        rows = 0 if axis is None else first // (self.numel // self.size[axis])
        if axis is None or not rows:
            return None, self
        return self._along(axis, 0, rows), self._along(axis, rows, self.size[axis] - rows)

    def _along(self, axis: int, start: int, size: int) -> "Box":
        offset, sizes = list(self.offset), list(self.size)
        offset[axis] += start
        sizes[axis] = size
        return Box(tuple(offset), tuple(sizes))

    def __str__(self) -> str:
        return "[" + ", ".join(f"{a}:{a + n}" for a, n in zip(self.offset, self.size, strict=True)) + "]"


def first_overlap(boxes: Sequence[Box]) -> tuple[int, int] | None:
    """Return the positions of two boxes that overlap, or None.

    Boxes are first told apart along single axes: no box reaches from one group into another. That settles every cut
    that goes through all of a part, as those of data and tensor parallelism do, in n log n; only what no axis tells
    apart is compared pair by pair.
    """
    full = [k for k, box in enumerate(boxes) if box.numel]
    num_axes = len(boxes[full[0]].size) if full else 0
    stack = [(full, 0, 0)]
    while stack:
        members, axis, num_tried = stack.pop()
        if len(members) < 2:
            continue
        if num_tried == num_axes:
            for k, other in itertools.combinations(members, 2):
                if boxes[k].overlaps(boxes[other]):
                    return min(k, other), max(k, other)
            continue
        groups = _apart(boxes, members, axis)
        num_tried = num_tried + 1 if len(groups) == 1 else 1
        stack.extend((group, (axis + 1) % num_axes, num_tried) for group in groups)
    return None


def _apart(boxes: Sequence[Box], members: Sequence[int], axis: int) -> list[list[int]]:
    """Return groups of boxes such that two of different groups have no index of this axis in common."""
    groups: list[list[int]] = []
    end = -1
    for start, k in sorted((boxes[k].offset[axis], k) for k in members):
        if start >= end:
            groups.append([])
        groups[-1].append(k)
        end = max(end, start + boxes[k].size[axis])
    return groups
