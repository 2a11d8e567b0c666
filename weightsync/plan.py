"""From the trainer's shards to buckets and senders. Pure; every process computes or reads the same plan.

Each rank sends exactly the pieces that it holds, so nothing is gathered first: bytes moved are the model, once per
receiver. A piece is a contiguous run of a flattened parameter; FSDP2's dim-0 shards are such runs.

    rank 0 holds w[0:6] b[0:2]      buckets:  0 (sender 0): w[0:6] b[0:2]
    rank 1 holds w[6:12] b[2:4]               1 (sender 1): w[6:12] b[2:4]
"""

import math
from collections.abc import Mapping, Sequence

import msgspec

from asyncflow.errors import PlanError

ELEMENT_BYTES = {"float32": 4, "bfloat16": 2}


class Piece(msgspec.Struct, frozen=True):
    """A contiguous run of one flattened parameter: elements `start` to `start + numel`."""

    name: str
    start: int
    numel: int


class Bucket(msgspec.Struct, frozen=True):
    """What travels as one message.

    Attributes:
        index: position in the plan.
        sender: trainer rank that holds and sends it.
        pieces: in the order of their bytes.
    """

    index: int
    sender: int
    pieces: tuple[Piece, ...]

    @property
    def numel(self) -> int:
        """Elements in the bucket."""
        return sum(piece.numel for piece in self.pieces)


class TransferPlan(msgspec.Struct, frozen=True):
    """All of one model's transfer.

    Attributes:
        dtype: element type on the wire.
        num_senders: trainer ranks.
        shapes: of every parameter, in a fixed order.
        buckets: in sending order; each sender sends its own in this order.
    """

    dtype: str
    num_senders: int
    shapes: dict[str, tuple[int, ...]]
    buckets: tuple[Bucket, ...]

    def of_sender(self, rank: int) -> tuple[Bucket, ...]:
        """Return the buckets that `rank` sends, in order."""
        return tuple(bucket for bucket in self.buckets if bucket.sender == rank)

    def offsets(self) -> dict[str, int]:
        """Return where each parameter starts in one flat buffer of the whole model (elements)."""
        offsets = {}
        end = 0
        for name, shape in self.shapes.items():
            offsets[name] = end
            end += math.prod(shape)
        return offsets

    @property
    def numel(self) -> int:
        """Elements of the whole model."""
        return sum(math.prod(shape) for shape in self.shapes.values())

    @property
    def num_bytes(self) -> int:
        """Bytes of one version on the wire, for one receiver."""
        return self.numel * ELEMENT_BYTES[self.dtype]


class ShardSpec(msgspec.Struct, frozen=True):
    """What a trainer rank holds of one parameter; see `Piece`."""

    name: str
    shape: tuple[int, ...]
    start: int
    numel: int


def plan_transfer(held: Sequence[Sequence[ShardSpec]], *, bucket_bytes: int, dtype: str) -> TransferPlan:
    """Map the shards of all trainer ranks to buckets.

    Args:
        held: per rank, what it holds, in the order in which it will copy.
        bucket_bytes: about the size of a bucket; a larger shard is cut.
        dtype: `float32` or `bfloat16`.

    Raises:
        PlanError: the ranks disagree on a shape, or a parameter is not covered exactly once.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for specs in held:
        for spec in specs:
            if shapes.setdefault(spec.name, spec.shape) != spec.shape:
                raise PlanError(f"{spec.name}: trainer ranks disagree on its shape: {shapes[spec.name]}, {spec.shape}")
    _check_cover(held, shapes)
    limit = max(1, bucket_bytes // ELEMENT_BYTES[dtype])
    per_rank = [_cut(specs, limit) for specs in held]
    buckets: list[Bucket] = []
    for turn in range(max((len(bins) for bins in per_rank), default=0)):
        for rank, bins in enumerate(per_rank):
            if turn < len(bins):
                buckets.append(Bucket(len(buckets), rank, tuple(bins[turn])))
    return TransferPlan(dtype, len(held), shapes, tuple(buckets))


def check_receiver(plan: TransferPlan, wanted: Mapping[str, tuple[int, ...]]) -> None:
    """Compare with what a receiver's engine needs.

    Raises:
        PlanError: naming the first parameter that exists on one side only or differs in shape.
    """
    for name, shape in wanted.items():
        if name not in plan.shapes:
            raise PlanError(f"{name}: the receiver needs it, the trainer does not have it; are the models the same?")
        if plan.shapes[name] != tuple(shape):
            raise PlanError(f"{name}: shape {tuple(shape)} at the receiver, {plan.shapes[name]} at the trainer")
    for name in plan.shapes:
        if name not in wanted:
            raise PlanError(f"{name}: the trainer has it, the receiver does not; are the models the same?")


def _check_cover(held: Sequence[Sequence[ShardSpec]], shapes: Mapping[str, tuple[int, ...]]) -> None:
    runs: dict[str, list[tuple[int, int]]] = {name: [] for name in shapes}
    for specs in held:
        for spec in specs:
            if spec.numel:
                runs[spec.name].append((spec.start, spec.start + spec.numel))
    for name, shape in shapes.items():
        end = 0
        for start, stop in sorted(runs[name]):
            if start != end:
                raise PlanError(
                    f"{name}: elements {min(start, end)} to {max(start, end)} are held by no rank or by two"
                )
            end = stop
        if end != math.prod(shape):
            raise PlanError(f"{name}: {math.prod(shape)} elements, but the ranks hold {end}")


def _cut(specs: Sequence[ShardSpec], limit: int) -> list[list[Piece]]:
    bins: list[list[Piece]] = []
    room = 0
    for spec in specs:
        start, left = spec.start, spec.numel
        while left:
            if room == 0 or (left > room and room < limit // 4):
                bins.append([])
                room = limit
            numel = min(left, room)
            bins[-1].append(Piece(spec.name, start, numel))
            start, left, room = start + numel, left - numel, room - numel
    return bins
