"""What a storage unit does beside its requests: deletes blocks, copies survivors out of thin ones, moves resting ones
to disk. One thread; takes the unit's lock only to look and to count, never while it copies.
"""

import logging
import threading
import time

from asyncflow.errors import TransportError
from asyncflow.process import ServiceThreads
from tq.unit.block import Block, BlockStore
from tq.unit.state import UnitState

logger = logging.getLogger(__name__)

_PAUSE_S = 0.2
"""Between two rounds: blocks that are about to go as a whole are not copied first."""
_SPILL_AGAIN_S = 30.0
"""Pause after a failed spill (s)."""
_CLOSE_TIMEOUT_S = 5.0


class UnitUpkeep:
    """Owned by a `StorageUnit`."""

    def __init__(
        self,
        name: str,
        state: UnitState,
        blocks: BlockStore,
        threads: ServiceThreads,
        *,
        lock: threading.Lock,
        keep_bytes: int,
    ) -> None:
        """Start the thread.

        Args:
            name: of the unit.
            state, blocks, threads: the unit's.
            lock: guards `state`.
            keep_bytes: rows that wait for a checkpoint go to disk beyond this, if `blocks` has a place there.
        """
        self._name = name
        self._state = state
        self._blocks = blocks
        self._lock = lock
        self._keep_bytes = keep_bytes
        self._work = threading.Condition(lock)
        self._gone: list[Block] = []
        self._closed = threading.Event()
        self._spill_again_at = 0.0
        self._thread = threads.start(self._run, name="upkeep")

    def poke(self) -> None:
        """Something changed. Memory is released at once, everything else soon."""
        accounting = self._state.accounting
        with self._lock:
            gone = accounting.take_gone()
            here = [block for block in gone if block.home.in_process]
            self._gone += [block for block in gone if not block.home.in_process]
            if self._has_work():
                self._work.notify()
        self._blocks.delete(here)

    def wake(self) -> None:
        """As `poke`, for callers that hold the lock: everything is released soon."""
        self._work.notify()

    def close(self) -> None:
        """Stop; idempotent."""
        with self._lock:
            self._closed.set()
            self._work.notify()
        self._thread.join(timeout=_CLOSE_TIMEOUT_S)

    def _has_work(self) -> bool:
        accounting = self._state.accounting
        return bool(self._gone) or accounting.has_gone or accounting.has_thin or self._over_limit()

    def _over_limit(self) -> bool:
        may = self._blocks.spill_home is not None and time.monotonic() >= self._spill_again_at
        return may and self._state.accounting.can_spill(self._keep_bytes)

    def _run(self) -> None:
        while True:
            with self._lock:
                while not self._closed.is_set() and not self._has_work():
                    self._work.wait()
                if self._closed.is_set():
                    return
                gone, self._gone = self._gone + self._state.accounting.take_gone(), []
            self._blocks.delete(gone)
            if self._closed.wait(_PAUSE_S):
                return
            self.tidy()

    def tidy(self) -> None:
        """Compact and spill what is due; also for tests, which do not wait."""
        with self._lock:
            thin = self._state.accounting.take_thin()
            resting = self._state.accounting.take_resting(self._keep_bytes) if self._over_limit() else []
        for block in thin:
            self._compact(block)
        for block in resting:
            self._spill(block)

    def _compact(self, block: Block) -> None:
        with self._lock:
            positions = self._state.survivors(block)
        try:
            new = self._blocks.compact(block, positions) if positions else None
        except TransportError as error:
            logger.warning("%s: a block stays larger than it need be: %s", self._name, error)
            new = None
        with self._lock:
            if new is not None:
                self._state.move(block, new, positions)
            self._state.accounting.unpin([block])
        self.poke()

    def _spill(self, block: Block) -> None:
        home = self._blocks.spill_home
        assert home is not None
        memory, written = block.home, self._blocks.spill(block)
        if not written:
            self._spill_again_at = time.monotonic() + _SPILL_AGAIN_S
        with self._lock:
            moved = written and self._state.accounting.spilled(block, home)
            self._state.accounting.unpin([block])
        try:
            if moved:
                memory.delete([block.key])
            elif written:
                home.delete([block.key])
        except TransportError as error:
            logger.warning("%s: %s", self._name, error)
        self.poke()
