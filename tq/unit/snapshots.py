"""Snapshots of a storage unit: hold, cut, write. The hold makes the cuts of all units one moment.

client -> every unit HoldPuts --> all Done --> every unit CutSnapshot --> puts go on --> every unit WriteSnapshot
"""

import logging
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

from safetensors import SafetensorError

from asyncflow.errors import AsyncFlowError, TransportError, one_line
from asyncflow.transport.server import Call
from tq.messages import CutSnapshot, Done, HoldPuts, SnapshotWritten, WriteSnapshot
from tq.timers import Timers
from tq.unit.block import BlockStore
from tq.unit.holds import Holds
from tq.unit.records import Cut
from tq.unit.snapshot_files import SnapshotWriter
from tq.unit.state import UnitState

logger = logging.getLogger(__name__)

_CLOSE_TIMEOUT_S = 10.0


class UnitSnapshots:
    """Owned by a `StorageUnit`."""

    def __init__(
        self,
        name: str,
        state: UnitState,
        blocks: BlockStore,
        holds: Holds,
        timers: Timers,
        *,
        lock: threading.Lock,
        poke: Callable[[], None],
        chunk_bytes: int,
    ) -> None:
        """Args:
        name: of the unit; its files begin with it.
        state, blocks, holds, timers: the unit's.
        lock: guards them.
        poke: called without the lock when blocks may have gone.
        chunk_bytes: rows that are restored in one message.
        """
        self._name = name
        self._state = state
        self._blocks = blocks
        self._holds = holds
        self._timers = timers
        self._lock = lock
        self._poke = poke
        self._chunk_bytes = chunk_bytes
        self._closing = threading.Event()
        self._writers: list[threading.Thread] = []

    def hold(self, message: HoldPuts, call: Call) -> None:
        """Let puts wait; no put changes anything after this was answered."""
        with self._lock:  # else the deadline could pass before the hold begins
            deadline = self._timers.after(message.timeout_s, partial(self._overdue, message.hold))
            self._holds.begin(message.hold, deadline)
        call.reply(Done())

    def cut(self, message: CutSnapshot, call: Call) -> None:
        """Note what is here, and let puts go on.

        Raises:
            PeerRefused: the hold has ended.
        """
        with self._lock:
            self._holds.check(message.hold)
            cut = self._state.cut(after_partition=message.after_partition, forget_acks_of=message.forget_acks_of)
            self._holds.keep(message.hold, call.session.number, cut)
        call.reply(Done())
        self._end(message.hold)

    def write(self, message: WriteSnapshot, call: Call) -> None:
        """Write a cut in a thread of its own, since the client goes on putting on this channel.

        Raises:
            PeerRefused: there is no such cut.
        """
        with self._lock:
            cut = self._holds.take(message.hold)
            self._writers = [thread for thread in self._writers if thread.is_alive()]
            writer = threading.Thread(
                target=self._write, args=(cut, message.directory, call), name=f"snapshot-{self._name}", daemon=True
            )
            self._writers.append(writer)
        writer.start()

    def abandon(self, session: int) -> None:
        """A client left; nobody will ask for its cuts."""
        with self._lock:
            for cut in self._holds.abandoned(session):
                self._state.books.unpin(cut.blocks)
        self._poke()

    def close(self) -> None:
        """Stop writing; idempotent."""
        self._closing.set()
        for writer in self._writers:
            writer.join(timeout=_CLOSE_TIMEOUT_S)

    def _overdue(self, hold: str) -> None:
        logger.warning("%s: nobody cut hold %s in time; puts go on", self._name, hold)
        self._end(hold)

    def _end(self, hold: str) -> None:
        with self._lock:
            parked = self._holds.end(hold)
        for resume in parked:
            resume()

    def _write(self, cut: Cut, directory: str, call: Call) -> None:
        try:
            writer = SnapshotWriter(Path(directory), self._name, self._blocks, chunk_bytes=self._chunk_bytes)
            files, num_bytes = writer.write(cut.rows, self._closing)
            call.reply(SnapshotWritten(files, len(cut.rows), num_bytes))
        except AsyncFlowError as error:
            call.refuse(error)
        except Exception as error:  # the boundary of a thread: the client waits for an answer
            expected = isinstance(error, OSError | SafetensorError)
            logger.warning("%s: a snapshot", self._name, exc_info=None if expected else error)
            call.refuse(TransportError(f"{self._name}: {directory} cannot be written: {one_line(error)}"))
        finally:
            with self._lock:
                self._state.books.unpin(cut.blocks)
            self._poke()
