"""The order in which pipeline stages compute the pieces of an update: 1F1B, interleaved if stages have several chunks.

Pure. Every rank of a replica adds the same pieces and gets the same slots, in which a stage computes at most one
piece; after each slot the stages exchange what they computed. So both ends of a transfer know of it without asking, and
post it at the same place of their program. The slots do not depend on when pieces are added, nor on how many at a time.

    2 stages, 4 pieces                                  stage 0   0   1   .   0'  2   1'  3   2'  .   3'
    k: forward of piece k, k': backward                 stage 1   .   0   0'  1   1'  2   2'  3   3'  .

    add_pieces(3) -> slots() ... add_pieces(2) -> slots() ... slots(drain=True)
                     '-- until the last piece has entered the first stage: the pipeline stays filled

Stage s of S keeps the activations of S - s pieces (with several chunks, of as many as in Megatron). Pieces whose
gradients become known only together are kept together, and later ones enter as they leave.

Source: Narayanan et al. 2021, arXiv 2104.04473, sections 2.2.1 and 2.2.2; megatron-core 0.16.1,
`core/pipeline_parallel/schedules.py` (the number of warm-up passes).
"""

from collections.abc import Iterator
from typing import NamedTuple


class StageTask(NamedTuple):
    """What a stage computes in a slot."""

    piece: int  # counts from the update's first
    part: int  # of the model, of stages x chunks; part p is chunk p // stages of stage p % stages
    backward: bool


Slot = tuple[StageTask | None, ...]  # of each stage; None: it has nothing to do


class PipelineSchedule:
    """The slots of one update, or of forward passes alone (`backward` False)."""

    def __init__(self, stages: int, chunks: int = 1, *, backward: bool = True) -> None:
        self._stages, self._chunks, self._backward = stages, chunks, backward
        self._unit_of: list[range] = []  # each piece -> the pieces whose backward passes begin together
        self._groups: list[list[int]] = []  # a group goes through all of a stage's chunks before the next one does
        self._group_is_open = False
        self._forward_done = [0] * (stages * chunks)  # of each part: it takes pieces in order
        self._backward_done = [0] * (stages * chunks)
        self._forwards = [_Turn(1) for _ in range(stages)]
        self._backwards = [_Turn(-1) for _ in range(stages)]

    @property
    def num_pieces(self) -> int:
        return len(self._unit_of)

    def add_pieces(self, number: int, *, together: bool) -> None:
        """Append pieces. `together`: no gradient of theirs is known before all are through."""
        first = self.num_pieces
        whole = range(first, first + number)
        self._group_is_open &= not together
        for piece in whole:
            self._unit_of.append(whole if together else range(piece, piece + 1))
            if not self._group_is_open or len(self._groups[-1]) == self._stages:
                self._groups.append([])
                self._group_is_open = True
            self._groups[-1].append(piece)
        self._group_is_open &= not together

    def slots(self, *, drain: bool = False) -> Iterator[Slot]:
        """Yield slots until all pieces have entered the first stage; with `drain` until all passes are done."""
        if drain:
            self._group_is_open = False
        done = self._backward_done if self._backward else self._forward_done
        while min(done) < self.num_pieces if drain else self._forward_done[0] < self.num_pieces:
            slot = tuple(self._choose_task(stage) for stage in range(self._stages))
            assert any(slot), "no stage can go on"
            for stage, task in enumerate(slot):
                if task is not None:
                    (self._backward_done if task.backward else self._forward_done)[task.part] += 1
                    (self._backwards if task.backward else self._forwards)[stage].advance()
            yield slot

    def find_next(self, task: StageTask) -> StageTask | None:
        """Return the task that needs what another one computed; None: no other part of the model does."""
        part = task.part + (-1 if task.backward else 1)
        return StageTask(task.piece, part, task.backward) if 0 <= part < len(self._forward_done) else None

    def _choose_task(self, stage: int) -> StageTask | None:
        """Return a forward pass if one is ready and there is room for its activations, else a backward pass."""
        if not self._backward or self._num_kept(stage) < self._max_kept(stage):
            task = self._next_task(stage, self._forwards[stage], backward=False)
            if task is not None and self._is_ready(task):
                return task
        task = self._next_task(stage, self._backwards[stage], backward=True)
        return task if self._backward and task is not None and self._is_ready(task) else None

    def _next_task(self, stage: int, turn: "_Turn", *, backward: bool) -> StageTask | None:
        found = turn.find(self._groups, self._chunks, last_is_open=self._group_is_open)
        return None if found is None else StageTask(found[0], found[1] * self._stages + stage, backward)

    def _is_ready(self, task: StageTask) -> bool:
        piece, part, last = task.piece, task.part, len(self._forward_done) - 1
        if not task.backward:
            return part == 0 or self._forward_done[part - 1] > piece
        if part == last:
            return self._forward_done[last] >= self._unit_of[piece].stop
        return self._backward_done[part + 1] > piece

    def _num_kept(self, stage: int) -> int:
        """Return how many forward passes of a stage wait for their backward pass."""
        return sum(self._forward_done[stage :: self._stages]) - sum(self._backward_done[stage :: self._stages])

    def _max_kept(self, stage: int) -> int:
        later = self._stages - 1 - stage
        most = later + 1 if self._chunks == 1 else 2 * later + (self._chunks - 1) * self._stages + 1
        oldest = min(self._backward_done[stage :: self._stages])
        together = len(self._unit_of[oldest]) if oldest < self.num_pieces else 0
        return max(most, together * self._chunks)


class _Turn:
    """Where a stage is in its order: groups, in each of them chunks (step -1: from the last), in those pieces."""

    def __init__(self, step: int) -> None:
        self._step = step
        self._group = self._place = self._chunk = 0  # `_chunk` counts those that the group is through

    def find(self, groups: list[list[int]], chunks: int, *, last_is_open: bool) -> tuple[int, int] | None:
        """Return the next piece and its chunk; None: there is none yet."""
        while self._group < len(groups):
            group = groups[self._group]
            if self._place < len(group):
                return group[self._place], self._chunk if self._step > 0 else chunks - 1 - self._chunk
            if last_is_open and group is groups[-1]:
                return None  # it may still grow, and its other pieces come first
            self._place, self._chunk = 0, self._chunk + 1
            if self._chunk == chunks:
                self._chunk, self._group = 0, self._group + 1
        return None

    def advance(self) -> None:
        self._place += 1
