"""A storage unit: one process of the data plane. Stores, tells every controller, and only then confirms.

Called by clients (put, get, snapshots) and by controllers (fences, dead letters, late acks). It never decides which
consumer gets what, and no handler waits for a controller.

    StorageUnit   dispatches; reads, fences, removals
    UnitState     rows and commits (pure)            BlockStore, backends   values
    UnitPuts      puts                               ControllerLinks        controllers
    UnitUpkeep    deletes, compacts, spills          UnitSnapshots          hold, cut, write
    RowJournal    what the next life tells about this one
"""

import logging
import secrets
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any, assert_never

from asyncflow.errors import PeerRefused, TransportError
from asyncflow.process import ServiceThreads
from asyncflow.transport.frame import Limits, Payload
from asyncflow.transport.meeting import Credentials
from asyncflow.transport.server import Call, ChannelServer, ChannelSession
from tq.backends.backend import Backend, FileBackend, agree_on_run_id, key_prefix, load_backend
from tq.config import QueueConfig
from tq.directory import TaskOutputs
from tq.messages import (
    UNIT_REQUESTS,
    ClearPartition,
    ClearRows,
    Columns,
    CutSnapshot,
    Done,
    FenceRows,
    FenceTask,
    GetColumns,
    GetUnitStats,
    HoldPuts,
    ListRows,
    Message,
    PutOutputs,
    PutRows,
    RegisterUnit,
    ReleaseCheckpointed,
    RemovalReason,
    RemoveRows,
    RowList,
    RowsRemoved,
    UnitAccepted,
    UnitAlive,
    UnitStats,
    WriteSnapshot,
)
from tq.timers import Timers
from tq.unit.block import BlockStore
from tq.unit.controller_link import ControllerLinks, Outcome, is_refusal, when_all, when_completed
from tq.unit.row_journal import RowJournal, confirmation
from tq.unit.snapshots import UnitSnapshots
from tq.unit.unit_puts import Holds, UnitPuts, UnitUpkeep
from tq.unit.unit_state import UnitState, list_rows, take_inventory

logger = logging.getLogger(__name__)

_BEATS_PER_TIMEOUT = 4


class StorageUnit:
    """Serves rows under its name until `close`. Its constructor looks for the controllers, but does not wait for them.

    `backend` is where values are kept (None: as `config.backend` says); it is closed with the unit.

    Raises:
        ConfigError: the backend's client library is missing.
        TransportError: the job store or the backend does not answer.
    """

    def __init__(
        self,
        credentials: Credentials,
        name: str,
        config: QueueConfig,
        *,
        controllers: Sequence[str],
        backend: Backend | None = None,
        lineage: int = 0,
    ) -> None:
        self.name = name
        self.threads = ServiceThreads(name)
        self._closed = False
        self._timeout_s = config.request_timeout_s
        self._most_bytes = config.max_message_bytes
        self._incarnation = secrets.token_hex(8)
        self._blocks = _block_store(credentials, name, self._incarnation, config, backend)
        self._lock = lock = threading.Lock()
        self._state = state = UnitState(retain=config.retain_until_checkpoint, lineage=lineage)
        self._traffic = UnitTraffic()
        self._journal = RowJournal(
            credentials,
            name,
            lineage=lineage,
            inventory=partial(take_inventory, name, self._incarnation, state, announced=True),
            failed=partial(self.threads.fail, "row journal"),
        )
        self._timers = Timers(name, failed=partial(self.threads.fail, "timers"))
        keep_bytes = config.spill_after_bytes
        self._upkeep = UnitUpkeep(name, state, self._blocks, self.threads, lock=lock, keep_bytes=keep_bytes)
        poke, holds = self._upkeep.note_change, Holds()
        limits = Limits(payload_bytes=config.max_message_bytes, shared_memory=config.shared_memory)
        self._links = ControllerLinks(
            credentials,
            name,
            controllers,
            holdings=self,
            lock=lock,
            journal=self._journal,
            timers=self._timers,
            threads=self.threads,
            limits=limits,
            timeout_s=self._timeout_s,
        )
        self._puts = UnitPuts(
            name,
            state,
            self._blocks,
            self._links,
            holds,
            outputs=TaskOutputs(credentials),
            journal=self._journal,
            lock=lock,
            poke=poke,
            timeout_s=self._timeout_s,
        )
        chunk_bytes = config.max_message_bytes // 2
        self._snapshots = UnitSnapshots(
            name, state, self._blocks, holds, self._timers, lock=lock, poke=poke, chunk_bytes=chunk_bytes
        )
        self._beat_s = config.unit_timeout_s / _BEATS_PER_TIMEOUT
        self._beat()
        self._server = ChannelServer(
            credentials, name, UNIT_REQUESTS, self, limits=limits, max_clients=config.max_clients, threads=self.threads
        )

    def close(self) -> None:
        """Stop serving; rows are gone. Idempotent; takes a few seconds at most."""
        with self._lock:
            closed, self._closed = self._closed, True
        if closed:
            return
        self.threads.close()
        self._server.close()
        self._links.close()
        self._snapshots.close()
        self._timers.close()
        self._upkeep.close()
        self._blocks.close()
        with self._lock:
            self._journal.close()

    def handle_disconnect(self, session: ChannelSession) -> None:
        """A channel ended. Only cuts belong to a channel; rows do not."""
        self._traffic.remove_client(session.number)
        self._snapshots.drop_cuts(session.number)

    def inventory(self, *, announced: bool) -> RegisterUnit:
        """Called by the links with the lock held."""
        told = take_inventory(self.name, self._incarnation, self._state, announced=announced)
        told.earlier = self._journal.earlier
        return told

    def note_accepted(self, reply: UnitAccepted) -> None:
        """A controller knows the inventory; called by the links with the lock held."""
        for partition, rows in self._state.drop_elsewhere(reply.drop).items():
            self._links.tell(RowsRemoved(self.name, partition, rows, RemovalReason.DROPPED), self._timeout_s)
            self._links.wake_senders()
        self._state.set_tasks(reply.tasks)
        new = self._state.learn_commits(reply.commits)
        if new:
            self._links.tell(confirmation(self.name, new), self._timeout_s)
            self._links.wake_senders()
        if self._links.all_registered:
            self._journal.forget_earlier()
        self._upkeep.wake_thread()

    def handle(self, call: Call) -> None:
        """Carry out one request of `UNIT_REQUESTS`."""
        message: UNIT_REQUESTS = call.message
        self._traffic.add_client(call.session.number, shared=call.shared)
        match message:
            case PutRows():
                self._traffic.put(call.payload.numel())
                self._puts.put_rows(message, call)
            case PutOutputs():
                self._traffic.put(call.payload.numel())
                self._puts.put_outputs(message, call)
            case GetColumns():
                self._get_columns(message, call)
            case FenceRows() | FenceTask():
                self._fence_rows(message, call)
            case RemoveRows():
                self._dead_letter(message)
                call.send_reply(Done())
            case ListRows():
                with self._lock:
                    records = list_rows(self._state, message.rows, message.partition)
                call.send_reply(RowList(records))
            case ClearRows():
                self._clear_rows(message, call)
            case ClearPartition():
                self._clear_partition(message, call)
            case ReleaseCheckpointed():
                with self._lock:
                    self._state.release_checkpointed(message.step)
                    self._journal.forget_finished()
                self._upkeep.note_change()
                call.send_reply(Done())
            case HoldPuts():
                self._snapshots.hold(message, call)
            case CutSnapshot():
                self._snapshots.cut_snapshot(message, call)
            case WriteSnapshot():
                self._snapshots.write(message, call)
            case GetUnitStats():
                call.send_reply(self._collect_stats())
            case _:
                assert_never(message)

    def _beat(self) -> None:
        """Periodically tell the controllers that this process is not stopped."""
        with self._lock:
            if self._closed:
                return
            self._links.send_beat(UnitAlive(self.name), self._timeout_s)
        self._timers.call_later(self._beat_s, self._beat)

    def _get_columns(self, message: GetColumns, call: Call) -> None:
        accounting = self._state.accounting
        with self._lock:
            parts = self._state.locate_columns(message.rows, message.columns)
            blocks = list({block: None for places in parts.values() for block, _ in places})
            accounting.pin(blocks)
        try:
            headers, pieces = self._blocks.describe_rows(parts, wide=call.shared)
            payload = Payload([piece for column in pieces for piece in column])
            if payload.num_bytes > self._most_bytes:  # the reader would close the channel
                raise PeerRefused(
                    f"{payload.num_bytes} bytes are more than max_message_bytes: read fewer rows at a time"
                )
            # First: a client that has the reply must find it in the statistics.
            self._traffic.count_read(payload.num_bytes)
            call.send_reply(Columns(headers), payload)
        finally:
            with self._lock:
                accounting.unpin_blocks(blocks)
            self._upkeep.note_change()

    def _fence_rows(self, message: FenceRows | FenceTask, call: Call) -> None:
        """Fence, and confirm once the controller knows all that was committed."""
        asker = call.session.client
        with self._lock:
            rows = None
            if isinstance(message, FenceRows):
                rows = message.rows
                self._state.fence_rows(message.task, message.token, rows)
            else:
                self._state.fence_task(message.task, message.token, message.alive)
            # Otherwise the controller would hand out a row again that was committed just before the fence.
            unknown = self._links.written_in_flight(message.task, rows, asker)
        when_completed(unknown, partial(self._reply_fenced, call))

    def _reply_fenced(self, call: Call, errors: list[BaseException]) -> None:
        unheard = [error for error in errors if not is_refusal(error)]  # a refusal shows that it was heard
        if unheard:
            call.send_refusal(TransportError(f"{self.name}: a put before the fence is not confirmed: {unheard[0]}"))
        else:
            call.send_reply(Done())

    def _dead_letter(self, message: RemoveRows) -> None:
        with self._lock:
            for partition, rows in self._state.remove_groups(message.rows, message.cause).items():
                removal = RowsRemoved(self.name, partition, rows, RemovalReason.GROUP_LEFT, message.cause)
                self._links.tell(removal, self._timeout_s)
        self._links.flush_notices()
        self._upkeep.note_change()

    def _clear_partition(self, message: ClearPartition, call: Call) -> None:
        with self._lock:
            rows = self._state.clear(message.partition)
            removal = RowsRemoved(self.name, message.partition, rows, RemovalReason.CLEARED)
            told = self._links.tell(removal, self._timeout_s)  # even without rows: the partition may be declared
        self._confirm_clearing(list(told.values()), call, Done())

    def _clear_rows(self, message: ClearRows, call: Call) -> None:
        told: list[Future[Any]] = []
        with self._lock:
            records = list_rows(self._state, message.rows, None, retained=False)
            for partition, rows in self._state.remove([row for record in records for row in record.rows]).items():
                removal = RowsRemoved(self.name, partition, rows, RemovalReason.REMOVED)
                told += self._links.tell(removal, self._timeout_s).values()
        self._confirm_clearing(told, call, RowList(records))

    def _confirm_clearing(self, told: "list[Future[Any]]", call: Call, reply: Message) -> None:
        self._upkeep.note_change()
        when_all(told, partial(self._reply_cleared, call, reply))
        self._links.flush_notices()

    @staticmethod
    def _reply_cleared(call: Call, reply: Message, outcome: Outcome) -> None:
        if isinstance(outcome, list):
            call.send_reply(reply)
        else:
            call.send_refusal(outcome if isinstance(outcome, TransportError) else TransportError(str(outcome)))

    def _collect_stats(self) -> UnitStats:
        shared, wire = self._traffic.count_channels()
        with self._lock:
            accounting = self._state.accounting
            return UnitStats(
                len(self._state),
                accounting.num_bytes,
                self._state.retained_rows,
                accounting.retained_bytes,
                accounting.spilled_bytes,
                self._traffic.puts,
                self._traffic.gets,
                self._traffic.bytes_in,
                self._traffic.bytes_out,
                shared,
                wire,
                self._blocks.backend.name,
            )


class UnitTraffic:
    """What came and went since the start, and how clients are connected. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._channels: dict[int, bool] = {}
        self.puts = 0
        self.gets = 0
        self.bytes_in = 0
        self.bytes_out = 0

    def add_client(self, session: int, *, shared: bool) -> None:
        """Note whether a client's payloads come through shared memory or over the wire."""
        with self._lock:
            self._channels[session] = shared

    def remove_client(self, session: int) -> None:
        with self._lock:
            self._channels.pop(session, None)

    def put(self, num_bytes: int) -> None:
        with self._lock:
            self.puts += 1
            self.bytes_in += num_bytes

    def count_read(self, num_bytes: int) -> None:
        with self._lock:
            self.gets += 1
            self.bytes_out += num_bytes

    def count_channels(self) -> tuple[int, int]:
        """Return how many clients (share memory, use the wire)."""
        with self._lock:
            shared = sum(self._channels.values())
            return shared, len(self._channels) - shared


def _block_store(
    credentials: Credentials, name: str, incarnation: str, config: QueueConfig, backend: Backend | None
) -> BlockStore:
    with credentials.borrowed_store() as store:
        run_id = agree_on_run_id(store, secrets.token_hex(4))
    return BlockStore(
        backend or load_backend(config.backend, name, run_id),
        FileBackend(Path(config.spill_directory) / f"{run_id}-{name}") if config.spill_directory else None,
        prefix=f"{key_prefix(run_id, name)}:{incarnation}",
        token_columns=config.token_columns,
    )
