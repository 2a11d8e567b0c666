"""A version that stays on the devices of the trainer's ranks, for a generator that takes turns with them there."""

#     trainer rank   pack a bucket | copy it to the device copy | ... and to the agent's slot | sleep, give the turn
#     agent          OpenPlan: the handle of the device copy ........ Offered: those of this node's ranks
#     generator                       take the turn, wake weights | open, read, check, close | wake KV cache ... give it
#
# Each trainer rank has one device copy: memory of P x c / ranks bytes that it allocates once, beside PyTorch's
# allocator, and keeps while it sleeps. The slot gets its bytes, too: restarts, evaluations, other nodes and a moving
# reference read those.
#
# *Passing the turn is the acknowledgement.* A device copy is written only while the trainer has the turn, and read only
# while the generators have it. A reader opens a copy for a single load, and has closed it when the load returns, so
# before it can give the turn away. If a process dies, on either side, nothing waits for it, and none of its memory
# stays in use.
#
# This is not taken on trust: each bucket ends with its index, its version and its checksum, as in a broadcast, and the
# reading device compares them before a byte goes to the engine. A bucket that holds another version by now, is damaged,
# or cannot be opened (another node, no way to that device, a trainer that is gone) comes from shared memory.
#
# Several ranks of an engine read every n-th bucket each, and pass it on, all in the plan's order. So which tensors come
# when does not depend on what a rank could open.

import logging
import time
from bisect import bisect_right
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import NamedTuple

import torch
from torch import Tensor

from asyncflow.device import (
    ExportedMemory,
    OpenedMemory,
    free_cached_memory,
    side_stream,
    use_device,
    wait_for_device,
)
from asyncflow.errors import DeviceMemoryError, WeightSyncError, size_text
from asyncflow.timeline import Spans
from weightsync.broadcast_group import TRAILER_BYTES, BucketLayout, bucket_layouts
from weightsync.messages import DeviceCopy
from weightsync.plan import Bucket, Piece
from weightsync.slot_memory import Region, RegionLayout
from weightsync.version import Version

logger = logging.getLogger(__name__)

# Buckets on their way to the reading device: the one that is needed, and the next one.
_MOST_TRAVELLING = 2

# (tensor, rank): gives all ranks that rank's tensor, in place; collective.
Share = Callable[[Tensor, int], object]


def bucket_starts(layout: RegionLayout, rank: int) -> tuple[dict[int, int], int]:
    """Return where each bucket of a trainer rank begins in its device copy (bytes), by index, and the copy's size."""
    layouts, starts, end = bucket_layouts(layout), {}, 0
    for bucket in layout.plan.of_sender(rank):
        starts[bucket.index] = end
        end += layouts[bucket.index].num_bytes
    return starts, end


class DeviceCopyWriter:
    """The device copy of a trainer rank that sends something.

    Raises DeviceMemoryError if the device has no room for it, or its memory cannot be shared.
    """

    def __init__(self, layout: RegionLayout, rank: int, device: torch.device) -> None:
        self._starts, num_bytes = bucket_starts(layout, rank)
        self._memory = ExportedMemory(num_bytes, device)
        self.device_copy = DeviceCopy(rank, self._memory.handle)
        # No bucket has this trailer. New memory, all zeros, would pass for bucket 0 of the first version.
        unwritten = torch.full((TRAILER_BYTES // 8,), -1, dtype=torch.int64, device=device)
        for index, start in self._starts.items():
            self._memory.write(start + bucket_layouts(layout)[index].num_bytes - TRAILER_BYTES, unwritten)
        wait_for_device(device)

    def write(self, bucket: BucketLayout, words: Tensor, version: Version) -> None:
        """Finish a packed bucket, int64 [num_words], with its trailer, and copy it; issues work in the current stream.

        The trainer has the turn.
        """
        bucket.stamp_trailer(words, version)
        self._memory.write(self._starts[bucket.bucket.index], words)


class _Part(NamedTuple):
    """Where a part of a tensor is: piece `place` of a bucket. Slices of the tensor, and of the piece."""

    bucket: int
    place: int
    inside: tuple[slice, ...]
    within: tuple[slice, ...]
    is_whole: bool  # the piece is all of the tensor


class DeviceReader:
    """One receiver's way to device copies, used by its own thread and by the engine's, which loads.

    Args:
        name: of the receiver.
        device: that the engine loads to.
        rank, num_ranks: of the processes that share the model.
        timeline: gets a span `hand over weights` per load, with the bytes that came each way.
    """

    def __init__(self, name: str, device: torch.device, *, timeline: Spans, rank: int = 0, num_ranks: int = 1) -> None:
        self.name, self.device = name, device
        self.rank, self.num_ranks = rank, num_ranks
        self.timeline = timeline
        # Of all loads.
        self.bytes_on_device = self.bytes_on_host = 0
        self._failed: set[bytes] = set()
        self._known: tuple[RegionLayout, dict[str, list[_Part]]] | None = None
        self._said: tuple[bool, bool] | None = None

    def reads_bucket(self, bucket: Bucket) -> bool:
        """Return whether this rank is the one that reads a bucket."""
        return bucket.index % self.num_ranks == self.rank

    def covered_senders(self, copies: Sequence[DeviceCopy]) -> frozenset[int]:
        """Return the trainer ranks whose device copies are to be tried."""
        return frozenset(copy.rank for copy in copies if copy.handle not in self._failed)

    def open_copies(self, copies: Sequence[DeviceCopy]) -> dict[int, OpenedMemory]:
        """Open what can be opened, by trainer rank. What fails once is not tried again."""
        opened = {}
        for copy in copies:
            if copy.handle in self._failed:
                continue
            try:
                opened[copy.rank] = OpenedMemory(copy.handle, self.device)
            except DeviceMemoryError as error:
                self._failed.add(copy.handle)
                logger.warning(
                    "%s: what trainer rank %d has on its device cannot be opened here (%s): it is taken from shared "
                    "memory from now on", self.name, copy.rank, error,
                )  # fmt: skip
        return opened

    def parts_of(self, layout: RegionLayout, matched: Mapping[str, Piece]) -> dict[str, list[_Part]]:
        """Return the parts of what an engine wants, in the plan's order; found once per plan."""
        if self._known is None or self._known[0] is not layout:
            self._known = layout, _find_parts(layout, matched)
        return self._known[1]

    def count_load(self, version: Version, on_device: int, on_host: int, seconds: float) -> None:
        """Count the bytes that came each way, and log them whenever that changes in kind."""
        self.bytes_on_device += on_device
        self.bytes_on_host += on_host
        self.timeline.record_span(
            "hand over weights", seconds, version=version.step, device_bytes=on_device, host_bytes=on_host
        )
        kinds = on_device > 0, on_host > 0
        if kinds != self._said:
            self._said = kinds
            logger.info(
                "%s: of weights %s, %s were read on the device and %s from shared memory",
                self.name, version, size_text(on_device), size_text(on_host),
            )  # fmt: skip


class HandedOver:
    """A version of which this node's trainer ranks may still have buckets on their devices; all of it is in `region`.

    Args:
        region: the agent's slot.
        matched: what the engine wants, by its own names, see `match_needs`.
        check_on_host: compares a bucket in `region` with its checksum, and has it repaired; raises WeightSyncError.
            Called for buckets that nobody has checked yet.
    """

    def __init__(
        self,
        reader: DeviceReader,
        version: Version,
        copies: Sequence[DeviceCopy],
        region: Region,
        matched: Mapping[str, Piece],
        *,
        check_on_host: Callable[[Bucket], None],
    ) -> None:
        self.reader, self.version, self.region = reader, version, region
        self.matched = matched
        self.copies = tuple(copies)
        self.check_on_host = check_on_host

    @contextmanager
    def opened(self, share: Share | None = None) -> Iterator["BucketTensors"]:
        """Provide the tensors on the engine's device. The generators have the turn, and whoever ends this may give it
        away: the device has read everything, and nothing is open any more.

        Args:
            share: where several ranks load together; all of them iterate over the tensors.
        """
        reader, began = self.reader, time.monotonic()
        use_device(reader.device)
        memories = reader.open_copies(self.copies)
        tensors = BucketTensors(self, memories, share)
        try:
            yield tensors
        finally:
            free_cached_memory(reader.device)  # waits for the device; the KV cache wakes next and needs the room
            for memory in memories.values():
                with suppress(DeviceMemoryError):  # its process has ended meanwhile
                    memory.close()
        reader.count_load(self.version, tensors.bytes_on_device, tensors.bytes_on_host, time.monotonic() - began)


class BucketTensors(Mapping[str, Tensor]):
    """Tensors that are put together when they are asked for, from buckets that are read once if they are asked for in
    the order of iteration, the plan's. A tensor belongs to whoever got it, and tied weights are the same one."""

    def __init__(self, version: HandedOver, memories: Mapping[int, OpenedMemory], share: Share | None) -> None:
        reader, layout = version.reader, version.region.layout
        self.like = version.region.view_matched(version.matched)
        """Tensors of the same names, shapes and dtypes, in memory that need not have been checked."""
        self.bytes_on_device = self.bytes_on_host = 0
        self._version, self._reader, self._share = version, reader, share
        self._memories = dict(memories)
        self._buckets, self._layouts = layout.plan.buckets, bucket_layouts(layout)
        self._starts = {rank: bucket_starts(layout, rank)[0] for rank in memories}
        self._parts = reader.parts_of(layout, version.matched)
        different = {version.matched[name]: parts for name, parts in self._parts.items()}
        self._uses = Counter(part.bucket for parts in different.values() for part in parts)
        self._last: tuple[Piece, Tensor] | None = None
        self._kept: OrderedDict[int, list[Tensor]] = OrderedDict()
        # Usually each trainer rank has one bucket that is partly used. Another one may hold what several ranks have and
        # this one sends: small tensors of all layers.
        self._most_kept = 2 * len({bucket.sender for bucket in self._buckets}) + 1
        self._own = [index for index in sorted(self._uses) if reader.reads_bucket(self._buckets[index])]
        self._stream = None if reader.device.type == "cpu" else torch.Stream(device=reader.device)
        self._travelling: dict[int, tuple[Tensor, Tensor, torch.Event | None]] = {}

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts)

    def __len__(self) -> int:
        return len(self._parts)

    def __contains__(self, name: object) -> bool:
        return name in self._parts  # a mapping's own reads the tensor

    def __getitem__(self, name: str) -> Tensor:
        wanted, parts = self._version.matched[name], self._parts[name]
        if self._last is not None and self._last[0] == wanted:  # tied weights
            return self._last[1]
        if len(parts) == 1 and parts[0].is_whole:
            values = self._bucket(parts[0].bucket)[parts[0].place]
            self._note_used(parts[0].bucket)
        else:
            values = torch.empty_like(self.like[name], device=self._reader.device)
            for part in parts:
                values[part.inside].copy_(self._bucket(part.bucket)[part.place][part.within])
                self._note_used(part.bucket)
        self._last = wanted, values
        return values

    def _note_used(self, index: int) -> None:
        """Let a bucket go once all of it was used."""
        self._uses[index] -= 1
        if self._uses[index] == 0:
            self._kept.pop(index, None)

    def _bucket(self, index: int) -> list[Tensor]:
        """Return a bucket's pieces, on the engine's device, in the shapes of their boxes."""
        if index in self._kept:
            self._kept.move_to_end(index)
            return self._kept[index]
        layout, device = self._layouts[index], self._reader.device
        if self._reader.reads_bucket(self._buckets[index]):
            words = self._read(index)
        else:
            words = torch.empty(layout.num_words, dtype=torch.int64, device=device)
        if self._share is not None:
            self._share(words, index % self._reader.num_ranks)
        while len(self._kept) >= self._most_kept:
            self._kept.popitem(last=False)
        self._kept[index] = layout.view_pieces(words)
        return self._kept[index]

    def _read(self, index: int) -> Tensor:
        """Return a bucket's words, checked, while the next one of this rank travels."""
        self._begin(index)
        following = self._own[bisect_right(self._own, index) :][:1]
        if len(self._travelling) < _MOST_TRAVELLING:
            for other in following:
                if self._uses[other] > 0 and other not in self._kept:
                    self._begin(other)
        if index not in self._travelling:
            return self._from_host(index)
        words, summary, arrived = self._travelling.pop(index)
        if arrived is not None:
            torch.accelerator.current_stream(self._reader.device).wait_event(arrived)
        try:
            self._layouts[index].check(summary.tolist(), self._version.version)
        except WeightSyncError as error:
            self._give_up_copy(index, error)
            return self._from_host(index)
        self.bytes_on_device += self._buckets[index].num_bytes
        return words

    def _begin(self, index: int) -> None:
        memory, sender = self._memories.get(self._buckets[index].sender), self._buckets[index].sender
        if memory is None or index in self._travelling:
            return
        layout, device = self._layouts[index], self._reader.device
        words = torch.empty(layout.num_words, dtype=torch.int64, device=device)
        try:
            with side_stream(device, self._stream):
                memory.read(self._starts[sender][index], words)
                summary = layout.make_summary(words)
                arrived = None if self._stream is None else self._stream.record_event()
        except DeviceMemoryError as error:
            self._give_up_copy(index, error)
            return
        self._travelling[index] = words, summary, arrived

    def _give_up_copy(self, index: int, error: WeightSyncError) -> None:
        """Take the rest of a trainer rank's buckets from shared memory, in this load."""
        sender = self._buckets[index].sender
        # It stays open until the load ends; what travels of it will be checked like all others.
        if self._memories.pop(sender, None) is not None:
            logger.warning(
                "%s: %s, on the device of trainer rank %d: it is taken from shared memory",
                self._reader.name, error, sender,
            )  # fmt: skip

    def _from_host(self, index: int) -> Tensor:
        bucket, layout, region = self._buckets[index], self._layouts[index], self._version.region
        self._version.check_on_host(bucket)
        words = torch.empty(layout.num_words, dtype=torch.int64, device=self._reader.device)
        for target, piece in zip(layout.view_pieces(words), bucket.pieces, strict=True):
            target.copy_(region.view_piece(piece), non_blocking=True)
        self.bytes_on_host += bucket.num_bytes
        return words


def without_reading(weights: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Return tensors of the same names, shapes and dtypes, for who wants to know these alone."""
    return weights.like if isinstance(weights, BucketTensors) else weights


def _find_parts(layout: RegionLayout, matched: Mapping[str, Piece]) -> dict[str, list[_Part]]:
    lying: dict[int, list[tuple[int, int, Piece]]] = {}
    for bucket in layout.plan.buckets:
        for place, piece in enumerate(bucket.pieces):
            lying.setdefault(piece.tensor, []).append((bucket.index, place, piece))
    parts: dict[str, list[_Part]] = {}
    for name, wanted in matched.items():
        parts[name] = []
        for index, place, piece in lying.get(wanted.tensor, ()):
            part = piece.box.overlap(wanted.box)
            if part is None:
                continue
            inside, within = part.relative_to(wanted.box), part.relative_to(piece.box)
            assert inside is not None and within is not None, "an overlap is inside both"
            parts[name].append(_Part(index, place, inside.slices, within.slices, piece.box == wanted.box))
    # Every trainer rank cuts what it sends into buckets in this order.
    return {name: parts[name] for name in sorted(parts, key=lambda each: matched[each].tensor)}
