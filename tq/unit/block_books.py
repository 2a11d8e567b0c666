"""How many bytes a unit's blocks take up, and which of them may go, shrink or move to disk. Pure.

rows need it, or a reader pins it --> counted in full --nobody left--> gone (to be deleted)
                                      |--less than a quarter needed--> thin (survivors are copied out)
                                      '--all that need it are retained--> resting (may move to disk)
"""

from collections.abc import Iterable, Sequence

from tq.backends.backend import Backend
from tq.unit.block import Block
from tq.unit.records import Place, Row

_THIN_FRACTION = 4
_COMPACT_FROM_BYTES = 2**16
"""Smaller blocks are not worth a copy: a shared region is held in pages anyway."""


class BlockBooks:
    """Accounts of one unit."""

    def __init__(self) -> None:
        self.num_bytes = 0
        """Held in memory (or in the backend), counting blocks in full."""
        self.spilled_bytes = 0
        """On disk."""
        self.retained_bytes = 0
        """Of rows that only wait for a checkpoint, wherever they are."""
        self._gone: list[Block] = []
        self._thin: dict[Block, None] = {}
        self._resting: dict[Block, None] = {}

    def add(self, block: Block) -> None:
        """All rows of a new block need it."""
        block.alive = len(block.rows)
        block.alive_bytes = block.value_bytes
        self.num_bytes += block.num_bytes
        self._settle(block)

    def retain(self, places: Iterable[Place]) -> None:
        """A row only waits for a checkpoint from now on."""
        for block, position in places:
            block.retained += 1
            self.retained_bytes += block.row_bytes[position]
            self._settle(block)

    def release(self, places: Iterable[Place], *, retained: bool) -> None:
        """A row is gone."""
        for block, position in places:
            block.alive -= 1
            block.alive_bytes -= block.row_bytes[position]
            if retained:
                block.retained -= 1
                self.retained_bytes -= block.row_bytes[position]
            self._settle(block)

    def pin(self, blocks: Iterable[Block]) -> None:
        """Somebody reads these outside of the lock."""
        for block in blocks:
            block.pins += 1

    def unpin(self, blocks: Iterable[Block]) -> None:
        """They have been read."""
        for block in blocks:
            block.pins -= 1
            self._settle(block)

    @property
    def has_gone(self) -> bool:
        """Whether `take_gone` would return something."""
        return bool(self._gone)

    @property
    def has_thin(self) -> bool:
        """Whether `take_thin` would return something."""
        return bool(self._thin)

    def can_spill(self, keep_bytes: int) -> bool:
        """Whether more than `keep_bytes` of retained rows are in memory, and some of them may move."""
        return bool(self._resting) and self.retained_bytes - self.spilled_bytes > keep_bytes

    def take_gone(self) -> list[Block]:
        """Return blocks to delete, once."""
        gone, self._gone = self._gone, []
        return gone

    def take_thin(self) -> list[Block]:
        """Return blocks whose survivors should move, once; they are pinned."""
        thin = [block for block in self._thin if block.alive and not block.spilled]
        self._thin.clear()
        self.pin(thin)
        return thin

    def take_resting(self, keep_bytes: int) -> list[Block]:
        """Return blocks to move to disk so that `keep_bytes` of retained rows stay at most; they are pinned."""
        excess = self.retained_bytes - self.spilled_bytes - keep_bytes
        chosen: list[Block] = []
        for block in list(self._resting):
            if excess <= 0:
                break
            if not block.pins:
                del self._resting[block]
                chosen.append(block)
                excess -= block.alive_bytes
        self.pin(chosen)
        return chosen

    def spilled(self, block: Block, home: Backend) -> bool:
        """A pinned block was copied to disk. False: somebody else reads it now; it stays where it was."""
        if block.pins > 1 or block.alive == 0:
            return False
        block.home, block.columns, block.spilled = home, None, True
        self.num_bytes -= block.num_bytes
        self.spilled_bytes += block.num_bytes
        return True

    def moved(self, old: Block, new: Block, positions: Sequence[int], rows: dict[int, Row]) -> None:
        """What survives of `old` is in `new` now.

        Args:
            old: pinned.
            new: not in the books yet.
            positions: in `old`, of the rows of `new`.
            rows: all rows of the unit.
        """
        self.add(new)
        for position, number in enumerate(new.rows):
            row = rows.get(number)
            here = row is not None and row.places.get(next(iter(new.names))) == (old, positions[position])
            if row is None or not here:  # it went while it was copied
                self.release([(new, position)], retained=False)
                continue
            for name in new.names:
                row.places[name] = (new, position)
            if row.retained:
                self.retain([(new, position)])
            self.release([(old, positions[position])], retained=row.retained)

    def _settle(self, block: Block) -> None:
        if block.alive == 0:
            self._thin.pop(block, None)
            self._resting.pop(block, None)
            if block.pins == 0:
                self.num_bytes -= 0 if block.spilled else block.num_bytes
                self.spilled_bytes -= block.num_bytes if block.spilled else 0
                self._gone.append(block)
            return
        if block.num_bytes >= _COMPACT_FROM_BYTES and block.alive_bytes * _THIN_FRACTION < block.value_bytes:
            self._thin[block] = None
        if block.retained == block.alive and block.home.in_process:
            self._resting[block] = None
        else:
            self._resting.pop(block, None)
