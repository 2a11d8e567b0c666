"""Puts to a storage unit: new rows and outputs. From the message to the reply; no thread waits for a controller.

The first put of a column by a task also waits for the job store, which then knows that the task writes the column.

block (I/O) --> [lock] hold? state change, notices --> ... --> every controller agreed --> Stored
                                                       '-----> one did not --> new rows go again; outputs stay

Where there are several controllers, new rows are confirmed to all of them in a second round (`tq.control.row_table`).
A producer that hears that rows exist may forget them, so it must not hear this while the put that brings them may still
fail: a client that names such rows in another put gets `PutPending`, and puts them again.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from asyncflow.errors import AsyncFlowError, PeerRefused, PutPending, RowsExist, TransportError
from asyncflow.process import ServiceThreads
from asyncflow.transport.server import Call
from tq.directory import TaskOutputs
from tq.messages import (
    OutputsWritten,
    PutOutputs,
    PutRows,
    RemovalReason,
    RowsAccepted,
    RowsConfirmed,
    RowsCreated,
    RowsRemoved,
    Stored,
)
from tq.timers import Timer
from tq.unit.block import Block, BlockStore
from tq.unit.controller_link import ControllerLinks, Outcome, Told, when_all
from tq.unit.row_journal import RowJournal
from tq.unit.unit_state import Cut, Repeated, UnitState
from tq.wire import enclose

_PARKED_EXTRA_S = 5.0  # grace for a controller's refusal after a parked put's deadline (s)
# Of the request deadline: clients must hear which controller is missing before they give the unit up.
_CONFIRM_FRACTION = 0.8
# Values of a put up to this size travel in the frame of its notice; a fetch that waits for them gets them from there.
_SMALL_BYTES = 2048
Resume = Callable[[], None]  # carries out a put that waited
_DOUBTS = RowsExist, PutPending  # refusals that count only together with the other controllers' answers


class UnitPuts:
    """Carries out the puts of a `StorageUnit`.

    `lock` guards the other arguments; `poke` is called without it when rows may have gone.
    """

    def __init__(
        self,
        name: str,
        state: UnitState,
        blocks: BlockStore,
        links: ControllerLinks,
        holds: "Holds",
        *,
        outputs: TaskOutputs,
        journal: RowJournal,
        lock: threading.Lock,
        poke: Callable[[], None],
        timeout_s: float,
    ) -> None:
        self._name = name
        self._state = state
        self._blocks = blocks
        self._links = links
        self._holds = holds
        self._outputs = outputs
        self._journal = journal
        self._lock = lock
        self._poke = poke
        self._timeout_s = _CONFIRM_FRACTION * timeout_s
        # Rows of puts that not all controllers have confirmed, or that are not taken back yet.
        self._coming: set[int] = set()

    def put_rows(self, message: PutRows, call: Call) -> None:
        """Create rows; replies `Stored`, or refuses and changes nothing. Raises AsyncFlowError to refuse at once."""
        block = self._blocks.add_block(message.rows, message.columns, call.payload)
        self._carry_out(partial(self._create_rows, message, block, call), block)

    def put_outputs(self, message: PutOutputs, call: Call) -> None:
        """Commit outputs; replies `Stored`, or refuses. Raises AsyncFlowError to refuse at once.

        When a controller fails, the commit is kept: put it again.
        """
        block = self._blocks.add_block(message.rows, message.columns, call.payload)
        self._carry_out(partial(self._commit_outputs, message, block, call), block)

    def resume_put(self, put: Callable[[], None], block: Block | None, call: Call) -> None:
        """Carry out a put that waited for the end of a hold."""
        try:
            self._carry_out(put, block)
        except AsyncFlowError as error:
            call.send_refusal(error)

    def _carry_out(self, put: Callable[[], None], block: Block | None) -> None:
        try:
            put()
        except AsyncFlowError:
            self._discard_block(block)
            raise

    def _create_rows(self, message: PutRows, block: Block | None, call: Call) -> None:
        with self._lock:
            if self._holds.park_put(
                partial(self.resume_put, partial(self._create_rows, message, block, call), block, call)
            ):
                return
            self._refuse_coming(message.rows)
            repeated = self._state.create_rows(
                message.rows,
                block,
                partition=message.partition,
                groups=message.groups,
                group_size=message.group_size,
                commits=message.commits,
            )
            # Tell under the lock that made the change, so that notices follow the order of the changes.
            if repeated is None:
                created = self._make_rows_created(
                    message, block, b"" if self._links.several else _values(message, call)
                )
                told = self._links.tell(created, message.timeout_s + _PARKED_EXTRA_S)
                self._coming.update(message.rows)
        if repeated is not None:
            self._check_same(repeated, block)
            call.send_reply(Stored(self._state.accounting.num_bytes))
            return
        when_all(list(told.values()), partial(self._conclude_put, message, call), tolerated=_DOUBTS)
        self._links.flush_notices()

    def _refuse_coming(self, rows: Sequence[int]) -> None:
        coming = next((row for row in rows if row in self._coming), None)
        if coming is not None:
            raise PutPending(f"row {coming} is just being put here; put it again once that put has ended")

    def _conclude_put(self, message: PutRows, call: Call, outcome: Outcome) -> None:
        """All controllers answered, or one refuses the new rows."""
        answers = _agreed(outcome) if isinstance(outcome, list) else outcome
        confirmed: Told = {}
        with self._lock:
            dropped = self._state.take_dropped(message.rows)
            # A controller's reply to an inventory said, while this put was under way, that rows are elsewhere.
            if dropped and isinstance(answers, list):
                answers = PutPending(f"row {dropped[0]} is elsewhere, or just being put there")
            if isinstance(answers, list):
                self._learn_commits(message, answers)
                known = bool(message.commits) or any(
                    not isinstance(reply, RowsAccepted) or reply.commits for reply in answers
                )
                commits = self._state.commits_of(message.rows) if known or self._links.several else {}
                if self._links.several:
                    agreed = RowsConfirmed(self._name, message.rows, commits, _values(message, call))
                    confirmed = self._links.tell(agreed, self._timeout_s)
                else:  # the only controller knows them already
                    self._journal.append(RowsConfirmed(self._name, message.rows, commits))
                self._state.confirm(message.rows)
        if not isinstance(answers, list):
            self._take_back(message, call, answers)
            return
        when_all(list(confirmed.values()), partial(self._confirm_stored, message, call))
        if confirmed:
            self._links.flush_notices(here=False)

    def _confirm_stored(self, message: PutRows, call: Call, outcome: Outcome) -> None:
        """All controllers may hand out the new rows."""
        with self._lock:
            self._coming.difference_update(message.rows)
            if isinstance(outcome, list):
                self._learn_commits(message, outcome)
            num_bytes = self._state.accounting.num_bytes
        self._poke()
        if isinstance(outcome, list):
            call.send_reply(Stored(num_bytes))
        else:
            _refuse(call, outcome)

    def _learn_commits(self, message: PutRows, replies: list[Any]) -> None:
        """Learn which tasks were done with rows before these were lost; the lock is held."""
        for reply in replies:
            if isinstance(reply, RowsAccepted):
                rows = {task: [message.rows[k] for k in positions] for task, positions in reply.commits.items()}
                self._journal.note_commits(self._state.learn_commits(rows))

    def _take_back(self, message: PutRows, call: Call, error: BaseException) -> None:
        # Tell all controllers: one that refused may have taken part of the rows with an inventory.
        with self._lock:
            self._coming.difference_update(message.rows)
            for partition, rows in self._state.remove(message.rows).items():
                removal = RowsRemoved(self._name, partition, rows, RemovalReason.REFUSED)
                self._links.tell(removal, self._timeout_s)
        self._links.flush_notices(here=False)
        self._poke()
        _refuse(call, error)

    def _commit_outputs(self, message: PutOutputs, block: Block | None, call: Call) -> None:
        with self._lock:  # check first: a refused put must not note columns for its task
            self._state.check_commit(message.task, message.token, message.rows, block)
        self._outputs.note_outputs(message.task, [column.name for column in message.columns])
        with self._lock:
            if self._holds.park_put(
                partial(self.resume_put, partial(self._commit_outputs, message, block, call), block, call)
            ):
                return
            repeated = self._state.commit_outputs(message.task, message.token, message.rows, block)
            if repeated is None:
                told = self._tell_written(written := self._make_outputs_written(message, block))
        if repeated is not None:
            # A repeated put is told again: a controller may have failed to confirm the first one.
            self._check_same(repeated, block)
            with self._lock:
                told = self._tell_written(written := self._make_outputs_written(message, block))
        self._poke()
        when_all(list(told.values()), partial(self._conclude_commit, written, call))
        self._links.flush_notices()

    def _tell_written(self, written: OutputsWritten) -> Told:
        self._journal.open_commits += 1
        return self._links.tell(written, self._timeout_s)

    def _conclude_commit(self, written: OutputsWritten, call: Call, outcome: Outcome) -> None:
        with self._lock:
            # The journal notes a commit only now that all controllers know it; see `tq.unit.row_journal`.
            self._journal.open_commits -= 1
            if isinstance(outcome, list):
                self._journal.append(written)
        if isinstance(outcome, list):
            call.send_reply(Stored(self._state.accounting.num_bytes))
        else:
            _refuse(call, outcome)

    def _check_same(self, repeated: Repeated, block: Block | None) -> None:
        """Compare a put with the earlier one and free the new block; raises the refusal if they differ."""
        try:
            if block is not None and not _same(self._blocks, repeated, block):
                raise repeated.refusal
        finally:
            with self._lock:
                self._state.accounting.unpin_blocks(repeated.blocks)
            self._poke()
        self._discard_block(block)

    def _discard_block(self, block: Block | None) -> None:
        if block is not None:
            self._blocks.delete_blocks([block])

    def _make_rows_created(self, message: PutRows, block: Block | None, values: bytes) -> RowsCreated:
        columns, tokens, num_bytes = _extent(block, len(message.rows))
        return RowsCreated(
            self._name,
            message.partition,
            message.rows,
            message.groups,
            columns,
            tokens,
            num_bytes,
            message.group_size,
            message.timeout_s,
            message.commits,
            announced=self._links.several,
            values=values,
        )

    def _make_outputs_written(self, message: PutOutputs, block: Block | None) -> OutputsWritten:
        columns, tokens, num_bytes = _extent(block, len(message.rows))
        return OutputsWritten(self._name, message.task, message.rows, columns, tokens, num_bytes)


class Holds:
    """Holds of one unit, under which its puts wait, and the resulting cuts. Pure; the caller holds the lock.

    HoldPuts(h) --> puts wait --CutSnapshot(h) or the deadline--> they continue
    """

    def __init__(self) -> None:
        self._deadlines: dict[str, Timer] = {}
        self._parked: list[Resume] = []
        self._cuts: dict[str, tuple[int, Cut]] = {}

    def begin(self, hold: str, deadline: Timer) -> None:
        """Make puts wait from now on, until `end`."""
        before = self._deadlines.get(hold)
        if before is not None:
            before.cancel()
        self._deadlines[hold] = deadline

    def park_put(self, resume: Resume) -> bool:
        """Whether a put must wait; if so, `resume` carries it out later."""
        if self._deadlines:
            self._parked.append(resume)
        return bool(self._deadlines)

    def end(self, hold: str) -> list[Resume]:
        """End a hold and return the puts that may continue; an unknown hold is skipped."""
        deadline = self._deadlines.pop(hold, None)
        if deadline is not None:
            deadline.cancel()
        if self._deadlines:
            return []
        parked, self._parked = self._parked, []
        return parked

    def check(self, hold: str) -> None:
        """Raise PeerRefused when the hold has ended."""
        if hold not in self._deadlines:
            raise PeerRefused(f"hold {hold} has ended; hold again, and cut within its time")

    def keep(self, hold: str, session: int, cut: Cut) -> None:
        """Keep a cut for the client that made it."""
        self._cuts[hold] = (session, cut)

    def take_cut(self, hold: str) -> Cut:
        """Return a cut, once; raises PeerRefused if there is none."""
        try:
            return self._cuts.pop(hold)[1]
        except KeyError:
            raise PeerRefused(f"hold {hold} was not cut, or was written already") from None

    def take_abandoned(self, session: int) -> list[Cut]:
        """The client left: return its cuts, which nobody will ask for."""
        gone = [hold for hold, (owner, _) in self._cuts.items() if owner == session]
        return [self._cuts.pop(hold)[1] for hold in gone]


def _agreed(answers: list[Any]) -> Outcome:
    """Return the controllers' answers to new rows, or why these must be taken back."""
    doubts = [answer for answer in answers if isinstance(answer, _DOUBTS)]
    if not doubts:
        return answers
    if len(doubts) == len(answers) and all(isinstance(doubt, RowsExist) for doubt in doubts):
        return doubts[0]
    # Rows exist when all controllers say so. One that disagrees has just restarted, or the others are about to hear
    # that the rows are gone.
    return PutPending(f"not all controllers know of it: {doubts[0]}")


def _values(message: PutRows, call: Call) -> bytes:
    small = 0 < call.payload.numel() <= _SMALL_BYTES
    return enclose(message.columns, call.payload) if small else b""


def _extent(block: Block | None, num_rows: int) -> tuple[list[str], list[int], int]:
    """Return a put's columns, the tokens of each row, and its bytes."""
    return ([], [0] * num_rows, 0) if block is None else (sorted(block.names), block.tokens, block.value_bytes)


def _same(blocks: BlockStore, repeated: Repeated, block: Block) -> bool:
    new = blocks.open(block)
    for earlier in repeated.blocks:
        if earlier.names != block.names:
            return False
        old = blocks.open(earlier)
        there = [(theirs, mine) for one, theirs, mine in repeated.pairs if one is earlier]
        before, now = [theirs for theirs, _ in there], [mine for _, mine in there]
        if not all(old[name].equals_rows(before, new[name], now) for name in block.names):
            return False
    return True


def _refuse(call: Call, error: BaseException) -> None:
    assert isinstance(error, AsyncFlowError), f"{error!r} is no refusal"
    call.send_refusal(error)


# What a storage unit does besides its requests: deletes blocks, copies survivors out of thin ones, moves resting ones
# to disk. One thread; takes the unit's lock only to look and to count, never while it copies.

logger = logging.getLogger(__name__)

_PAUSE_S = 0.2  # between two rounds, so that blocks that are about to go as a whole are not copied first (s)
_SPILL_AGAIN_S = 30.0  # pause after a failed spill (s)
_CLOSE_TIMEOUT_S = 5.0


class UnitUpkeep:
    """Frees, compacts and spills the blocks of a `StorageUnit`.

    `lock` guards `state`. Rows that wait for a checkpoint go to disk beyond `keep_bytes`, if `blocks` has a place
    there.
    """

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
        self._name = name
        self._state = state
        self._blocks = blocks
        self._lock = lock
        self._keep_bytes = keep_bytes
        self._work = threading.Condition(lock)
        self._gone: list[Block] = []
        self._closed = threading.Event()
        self._spill_again_at = 0.0
        self._thread = threads.start(self._run_upkeep, name="upkeep")

    def note_change(self) -> None:
        """Something changed: release memory at once, everything else soon."""
        accounting = self._state.accounting
        with self._lock:
            gone = accounting.take_gone()
            here = [block for block in gone if block.home.in_process]
            # Deleting from another place than memory is I/O, which the thread does.
            self._gone += [block for block in gone if not block.home.in_process]
            if self._has_work():
                self._work.notify()
        self._blocks.delete_blocks(here)

    def wake_thread(self) -> None:
        """As `note_change`, for callers that hold the lock: everything is released soon."""
        self._work.notify()

    def close(self) -> None:
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

    def _run_upkeep(self) -> None:
        while True:
            with self._lock:
                while not self._closed.is_set() and not self._has_work():
                    self._work.wait()
                if self._closed.is_set():
                    return
                gone, self._gone = self._gone + self._state.accounting.take_gone(), []
            self._blocks.delete_blocks(gone)
            if self._closed.wait(_PAUSE_S):
                return
            self.tidy_blocks()

    def tidy_blocks(self) -> None:
        """Compact and spill what is due; also for tests, which do not wait."""
        with self._lock:
            thin = self._state.accounting.take_thin()
            resting = self._state.accounting.take_resting(self._keep_bytes) if self._over_limit() else []
        for block in thin:
            self._compact_block(block)
        for block in resting:
            self._spill_block(block)

    def _compact_block(self, block: Block) -> None:
        with self._lock:
            positions = self._state.find_survivors(block)
        try:
            new = self._blocks.compact_block(block, positions) if positions else None
        except TransportError as error:
            logger.warning("%s: a block could not be compacted and stays larger than necessary: %s", self._name, error)
            new = None
        with self._lock:
            if new is not None:
                self._state.move_block(block, new, positions)
            self._state.accounting.unpin_blocks([block])
        self.note_change()

    def _spill_block(self, block: Block) -> None:
        home = self._blocks.spill_home
        assert home is not None
        memory, written = block.home, self._blocks.spill_block(block)
        if not written:
            self._spill_again_at = time.monotonic() + _SPILL_AGAIN_S
        with self._lock:
            # A reader that pinned the block in the meantime still needs the copy in memory; then the one on disk goes.
            moved = written and self._state.accounting.mark_spilled(block, home)
            self._state.accounting.unpin_blocks([block])
        try:
            if moved:
                memory.delete([block.key])
            elif written:
                home.delete([block.key])
        except TransportError as error:
            logger.warning("%s: %s", self._name, error)
        self.note_change()
