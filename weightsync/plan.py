"""From the trainer's shards to buckets and senders. Pure; every process computes or reads the same plan."""

# Each rank sends exactly what it holds, so nothing is gathered first. A version of the weights is one *region*: all
# tensors in wire format, one after another, under their Hugging Face names. A rank's shards, however they were cut, are
# boxes of these tensors. The plan groups them into buckets, the unit of transfer and of checksums.
#
#     rank 0 holds w[0:2, :] b[0:2]      buckets:  0 (sender 0): w[0:2, :] b[0:2]
#     rank 1 holds w[2:4, :] b[2:4]                1 (sender 1): w[2:4, :] b[2:4]
#     region: | w ............... | b .... |
#
# A plan grows with tensors times ranks. So it travels to a process once, as bytes (`encode`); messages name it by its
# digest, and pieces name tensors by number.
#
# A receiver takes whole tensors (a generator, by Hugging Face names) or boxes of them (ranks sharded like the trainer).

import hashlib
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property

import msgspec

from asyncflow.decoding import msgpack_decoder
from asyncflow.errors import PlanError

# Parts of tensors: axis-aligned boxes, which is how FSDP, tensor and pipeline parallelism cut. Pure.


class Box(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The elements `offset[d] <= i[d] < offset[d] + size[d]` of a tensor, in row-major order. A scalar has no `d`."""

    offset: tuple[int, ...]
    size: tuple[int, ...]

    @staticmethod
    def from_shape(shape: tuple[int, ...]) -> "Box":
        return Box((0,) * len(shape), shape)

    @staticmethod
    def rows(shape: tuple[int, ...], start: int, stop: int) -> "Box":
        return Box((start, *(0,) * (len(shape) - 1)), (stop - start, *shape[1:]))

    @property
    def numel(self) -> int:
        return math.prod(self.size)

    @property
    def slices(self) -> tuple[slice, ...]:
        return tuple(slice(start, start + size) for start, size in zip(self.offset, self.size, strict=True))

    def fits_shape(self, shape: tuple[int, ...]) -> bool:
        """Return whether a tensor of this shape contains the box."""
        return len(self.offset) == len(self.size) == len(shape) and all(
            start >= 0 and size >= 0 and start + size <= length
            for start, size, length in zip(self.offset, self.size, shape, strict=True)
        )

    def relative_to(self, outer: "Box") -> "Box | None":
        """Return this box relative to the corner of `outer`, or None if it is not inside `outer`."""
        offset = tuple(start - other for start, other in zip(self.offset, outer.offset, strict=True))
        relative = Box(offset, self.size)
        return relative if relative.fits_shape(outer.size) else None

    def overlaps_box(self, other: "Box") -> bool:
        return (
            self.numel > 0
            and other.numel > 0
            and all(
                a < b + m and b < a + n
                for a, n, b, m in zip(self.offset, self.size, other.offset, other.size, strict=True)
            )
        )

    def overlap(self, other: "Box") -> "Box | None":
        """Return what is in both, or None."""
        if not self.overlaps_box(other):
            return None
        ends = [
            (max(a, b), min(a + m, b + n))
            for a, m, b, n in zip(self.offset, self.size, other.offset, other.size, strict=True)
        ]
        return Box(tuple(start for start, _ in ends), tuple(stop - start for start, stop in ends))

    def hull(self, other: "Box") -> "Box":
        """Return the smallest box that contains both."""
        ends = [
            (min(a, b), max(a + m, b + n))
            for a, m, b, n in zip(self.offset, self.size, other.offset, other.size, strict=True)
        ]
        return Box(tuple(start for start, _ in ends), tuple(stop - start for start, stop in ends))

    def contiguous_run(self, shape: tuple[int, ...]) -> tuple[int, int] | None:
        """Return (first element, number) if the box is one run of the flattened tensor, else None."""
        # A run has size 1 in the leading dimensions, any size in one, and only whole dimensions after that.
        whole_from = len(shape)
        while whole_from and self.size[whole_from - 1] == shape[whole_from - 1]:
            whole_from -= 1
        if any(size != 1 for size in self.size[: max(0, whole_from - 1)]) and self.numel:
            return None
        start = 0
        for index, length in zip(self.offset, shape, strict=True):
            start = start * length + index
        return start, self.numel

    def cut_parts(self, most: int) -> Iterator["Box"]:
        """Yield parts of at most `most` elements, in row-major order, as few as whole rows allow."""
        if self.numel <= most:
            if self.numel:
                yield self
            return
        axis = next(axis for axis, size in enumerate(self.size) if size > 1)
        row = self.numel // self.size[axis]
        step = max(1, most // row)
        for start in range(0, self.size[axis], step):
            part = self._part_along(axis, start, min(step, self.size[axis] - start))
            yield from part.cut_parts(most)

    def split(self, first: int) -> tuple["Box | None", "Box | None"]:
        """Return a part of at most `first` elements, made of whole rows of the outermost axis, and the rest."""
        if self.numel <= first:
            return self, None
        axis = next((axis for axis, size in enumerate(self.size) if size > 1), None)
        rows = 0 if axis is None else first // (self.numel // self.size[axis])
        if axis is None or not rows:
            return None, self
        return self._part_along(axis, 0, rows), self._part_along(axis, rows, self.size[axis] - rows)

    def _part_along(self, axis: int, start: int, size: int) -> "Box":
        offset, sizes = list(self.offset), list(self.size)
        offset[axis] += start
        sizes[axis] = size
        return Box(tuple(offset), tuple(sizes))

    def __str__(self) -> str:
        return "[" + ", ".join(f"{a}:{a + n}" for a, n in zip(self.offset, self.size, strict=True)) + "]"


def first_overlap(boxes: Sequence[Box]) -> tuple[int, int] | None:
    """Return the positions of two boxes that overlap, or None.

    First separate the boxes into groups along single axes, so that no box reaches from one group into another. This
    settles every cut that goes all the way through a part, as data and tensor parallelism make them, in n log n. Only
    boxes that no axis separates are compared pair by pair.
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
                if boxes[k].overlaps_box(boxes[other]):
                    return min(k, other), max(k, other)
            continue
        groups = _apart(boxes, members, axis)
        # A split starts the count anew: smaller groups may fall apart along axes that were tried before.
        num_tried = num_tried + 1 if len(groups) == 1 else 1
        stack.extend((group, (axis + 1) % num_axes, num_tried) for group in groups)
    return None


def _apart(boxes: Sequence[Box], members: Sequence[int], axis: int) -> list[list[int]]:
    """Return groups such that boxes of different groups share no index of this axis."""
    groups: list[list[int]] = []
    end = -1
    for start, k in sorted((boxes[k].offset[axis], k) for k in members):
        if start >= end:
            groups.append([])
        groups[-1].append(k)
        end = max(end, start + boxes[k].size[axis])
    return groups


# Element types that weights and buffers may have (bytes).
DTYPE_BYTES = {
    "float64": 8, "float32": 4, "bfloat16": 2, "float16": 2,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1,
}  # fmt: skip
_FLOATS = ("float64", "float32", "bfloat16", "float16")
_ALIGN_BYTES = 64


class TensorSpec(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A tensor as it travels."""

    shape: tuple[int, ...]  # of the whole tensor
    dtype: str  # element type on the wire

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]

    @property
    def room_bytes(self) -> int:
        """Bytes that it takes in a region, padding included."""
        return -(-self.num_bytes // _ALIGN_BYTES) * _ALIGN_BYTES


class ShardSpec(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What a trainer rank holds of one tensor."""

    name: str  # Hugging Face name
    shape: tuple[int, ...]  # of the whole tensor
    dtype: str  # the trainer's element type; floating-point ones are cast to the plan's, others travel unchanged
    box: Box  # the part held


class Piece(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A box of one tensor (by its number in the plan) inside a bucket."""

    tensor: int
    box: Box


class Bucket(msgspec.Struct, frozen=True, array_like=True):
    """What travels as one message, with one checksum."""

    index: int  # position in the plan
    sender: int  # trainer rank that holds and sends it
    num_bytes: int  # of all pieces, packed
    pieces: tuple[Piece, ...]  # in the order of their bytes


class TransferPlan(msgspec.Struct, frozen=True, dict=True):  # a `__dict__` for what is derived once
    """All of one model's transfer."""

    num_senders: int  # trainer ranks
    # In the order in which they lie in a region; a piece names a tensor by its position here.
    tensors: dict[str, TensorSpec]
    buckets: tuple[Bucket, ...]  # in sending order; each sender sends its own in this order

    def of_sender(self, rank: int) -> tuple[Bucket, ...]:
        return tuple(bucket for bucket in self.buckets if bucket.sender == rank)

    @cached_property
    def names(self) -> tuple[str, ...]:
        return tuple(self.tensors)

    @cached_property
    def region_bytes(self) -> int:
        """Bytes of one version in memory, padding included."""
        return sum(tensor.room_bytes for tensor in self.tensors.values())

    @property
    def num_bytes(self) -> int:
        """Bytes of one version on the wire, for one receiver."""
        return sum(tensor.num_bytes for tensor in self.tensors.values())

    def encode(self) -> bytes:
        return msgspec.msgpack.encode(self)

    @staticmethod
    def decode(data: bytes) -> "TransferPlan":
        """Read what `encode` wrote. Raises PlanError if the bytes are not a plan."""
        try:
            return msgpack_decoder(TransferPlan).decode(data)
        except msgspec.MsgspecError as error:
            raise PlanError(f"weights: a plan of {len(data)} bytes cannot be read ({error})") from error

    def digest(self) -> str:
        return self._digest

    @cached_property
    def _digest(self) -> str:
        return plan_digest(self.encode())


class Need(msgspec.Struct, frozen=True):
    """What a receiver wants of one tensor."""

    shape: tuple[int, ...]  # of the whole tensor
    aliases: tuple[str, ...] = ()  # other names of it (tied weights); the first one that the trainer has is used
    box: Box | None = None  # the part; None: all


def plan_digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def plan_transfer(held: Sequence[Sequence[ShardSpec]], *, bucket_bytes: int, dtype: str) -> TransferPlan:
    """Map the shards of all trainer ranks to buckets.

    If several ranks hold a shard (replicas of data or tensor parallelism), the one with the least to send sends it.

    Args:
        held: per rank, what it holds, in the order in which it will copy.
        bucket_bytes: approximate size of a bucket; larger shards are cut.
        dtype: element type of all floating-point tensors on the wire.

    Raises:
        PlanError: the ranks disagree on a tensor, no rank holds some element, or different shards overlap.
    """
    tensors: dict[str, TensorSpec] = {}
    numbers: dict[str, int] = {}
    holders: dict[tuple[int, Box], list[int]] = {}
    for rank, specs in enumerate(held):
        for spec in specs:
            _check_shard(spec, tensors, dtype)
            number = numbers.setdefault(spec.name, len(numbers))
            if spec.box.numel:
                holders.setdefault((number, spec.box), []).append(rank)
    _check_cover(tensors, holders)
    element_bytes = [DTYPE_BYTES[tensor.dtype] for tensor in tensors.values()]
    shares = _assign(holders, element_bytes, len(held))
    per_rank = [_fill(share, element_bytes, bucket_bytes) for share in shares]
    buckets: list[Bucket] = []
    # Ranks take turns, so that all of them send at the same time.
    for turn in range(max((len(bins) for bins in per_rank), default=0)):
        for rank, bins in enumerate(per_rank):
            if turn < len(bins):
                num_bytes = sum(piece.box.numel * element_bytes[piece.tensor] for piece in bins[turn])
                buckets.append(Bucket(len(buckets), rank, num_bytes, tuple(bins[turn])))
    return TransferPlan(len(held), tensors, tuple(buckets))


def match_needs(plan: TransferPlan, needs: Mapping[str, Need], *, whole: bool = True) -> dict[str, Piece]:
    """Return where everything that a receiver wants is in the trainer's tensors.

    Args:
        needs: by the receiver's names.
        whole: the receiver takes the whole model; False: it is one of several ranks that share it.

    Raises:
        PlanError: names the first tensor that exists on one side only, or has another shape there.
    """
    matched: dict[str, Piece] = {}
    numbers = {name: number for number, name in enumerate(plan.names)}
    for name, need in needs.items():
        source = next((each for each in (name, *need.aliases) if each in plan.tensors), None)
        if source is None:
            raise PlanError(f"{name}: the receiver needs it, the trainer does not have it; are the models the same?")
        shape = plan.tensors[source].shape
        if shape != tuple(need.shape):
            raise PlanError(f"{name}: shape {tuple(need.shape)} at the receiver, {shape} at the trainer")
        box = need.box or Box.from_shape(shape)
        if not box.fits_shape(shape):
            raise PlanError(f"{name}: the receiver wants {box} of shape {shape}")
        matched[name] = Piece(numbers[source], box)
    if whole:
        taken = {piece.tensor for piece in matched.values()}
        for number, name in enumerate(plan.names):
            if number not in taken:
                raise PlanError(f"{name}: the trainer has it, the receiver does not; are the models the same?")
    return matched


def buckets_of(plan: TransferPlan, pieces: Iterable[Piece]) -> frozenset[int]:
    """Return the indices of the buckets that contain any part of these pieces."""
    wanted: dict[int, list[Box]] = {}
    for piece in pieces:
        wanted.setdefault(piece.tensor, []).append(piece.box)
    return frozenset(
        bucket.index
        for bucket in plan.buckets
        if any(box.overlaps_box(part.box) for part in bucket.pieces for box in wanted.get(part.tensor, ()))
    )


def _check_shard(spec: ShardSpec, tensors: dict[str, TensorSpec], dtype: str) -> None:
    if spec.dtype not in DTYPE_BYTES:
        raise PlanError(f"{spec.name}: element type {spec.dtype} cannot travel; use one of {' '.join(DTYPE_BYTES)}")
    tensor = TensorSpec(spec.shape, dtype if spec.dtype in _FLOATS else spec.dtype)
    known = tensors.setdefault(spec.name, tensor)
    if known.shape != tensor.shape:
        raise PlanError(f"{spec.name}: trainer ranks disagree on its shape: {known.shape}, {tensor.shape}")
    if known.dtype != tensor.dtype:
        raise PlanError(f"{spec.name}: trainer ranks disagree on its type: {known.dtype}, {tensor.dtype}")
    if not spec.box.fits_shape(spec.shape):
        raise PlanError(f"{spec.name}: a rank holds {spec.box}, outside of shape {spec.shape}")


def _check_cover(tensors: Mapping[str, TensorSpec], parts: Iterable[tuple[int, Box]]) -> None:
    boxes: list[list[Box]] = [[] for _ in tensors]
    for number, box in parts:
        boxes[number].append(box)
    for (name, tensor), held in zip(tensors.items(), boxes, strict=True):
        overlap = first_overlap(held)
        if overlap is not None:
            one, other = (held[k] for k in overlap)
            raise PlanError(f"{name}: trainer ranks hold {one} and {other}, which overlap")
        numel, present = math.prod(tensor.shape), sum(box.numel for box in held)
        if present != numel:
            raise PlanError(f"{name}: {numel} elements, but the trainer ranks hold {present}")


def _assign(
    holders: Mapping[tuple[int, Box], Sequence[int]], element_bytes: Sequence[int], num_ranks: int
) -> list[list[Piece]]:
    shares: list[list[Piece]] = [[] for _ in range(num_ranks)]
    loads = [0] * num_ranks
    # Shards with one holder first: they settle the loads that the replicas are balanced over.
    for (number, box), ranks in holders.items():
        if len(ranks) == 1:
            loads[ranks[0]] += box.numel * element_bytes[number]
    for (number, box), ranks in holders.items():
        rank = min(ranks, key=lambda each: (loads[each], each))
        if len(ranks) > 1:
            loads[rank] += box.numel * element_bytes[number]
        shares[rank].append(Piece(number, box))
    return shares


def _fill(share: Sequence[Piece], element_bytes: Sequence[int], bucket_bytes: int) -> list[list[Piece]]:
    """Cut one rank's pieces into buckets; close one that is nearly full rather than add a tiny piece."""
    bins: list[list[Piece]] = []
    room = 0
    for piece in share:
        each_bytes = element_bytes[piece.tensor]
        pending = [piece.box]
        while pending:
            box = pending.pop()
            first, rest = box.split(room // each_bytes)
            if first is None and room >= bucket_bytes:  # one row exceeds even an empty bucket
                pending.extend(reversed(list(box.cut_parts(max(1, bucket_bytes // each_bytes)))))
            elif first is None or (rest is not None and room < bucket_bytes // 4):
                bins.append([])
                room = max(bucket_bytes, each_bytes)
                pending.append(box)
            else:
                bins[-1].append(Piece(piece.tensor, first))
                room -= first.numel * each_bytes
                pending.extend(() if rest is None else (rest,))
    return bins
