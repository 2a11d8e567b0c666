"""One controller service: the control plane's shell around `ControlState`, and, on the lead, admission.

Threads: the channel server's receivers apply events and send the answers (`StateShell`); `timers` answers parked
requests whose deadline passed, and gives up units and silent consumers; `UnitOrders` tells the units; `admission` puts
rows.

    first start      serve at once
    later starts     read the mark, wait for the units' inventories and for the consumers that were there, fence the
                     rest, serve
"""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeGuard

from msgspec.structs import replace

from asyncflow.errors import AsyncFlowError, SealBroken, TransportError
from asyncflow.process import ServiceThreads
from asyncflow.transport.frame import Limits
from asyncflow.transport.meeting import Credentials
from asyncflow.transport.server import Call, ChannelServer, ChannelSession
from tq.config import QueueConfig
from tq.control.connected import OpenSessions, UnitGraces
from tq.control.durable_facts import DurableMark, Memory, UnitOrders
from tq.control.events import (
    Answer,
    Cleared,
    DeadlinePassed,
    DoneElsewhere,
    Event,
    ForwardAck,
    GroupRemoved,
    OrderFenceRows,
    OrderFenceTask,
    OrderRemoveRows,
    OwnerGone,
    OwnerWrites,
    PutAgain,
    RecoveryDeadline,
    RowsOfPartitionRemoved,
    TasksWrite,
    UnitGone,
    UnitLost,
)
from tq.control.row_table import RowSet
from tq.control.state import ControlState, Recovering
from tq.directory import Directory, TaskOutputs
from tq.messages import (
    CONTROLLER_REPLIES,
    CONTROLLER_REQUESTS,
    AckLost,
    Alive,
    ClearPartition,
    CloseWriting,
    Done,
    FetchRound,
    FetchRows,
    GetQueueStats,
    Heartbeat,
    Join,
    LeaseGrant,
    Message,
    NoRows,
    OpenPartition,
    OutputsWritten,
    Published,
    PublishVersion,
    QueueStats,
    RegisterUnit,
    Release,
    ReleaseCheckpointed,
    RowRecords,
    RowsConfirmed,
    RowsCreated,
    RowsRemoved,
    Stop,
    TaskStats,
    TellLost,
    UnitAlive,
    UnitLoss,
    WatchLost,
)
from tq.policies import TaskSpec
from tq.refill import AdmissionMark, Refill, first_token, replaces
from tq.service_channels import ServiceChannels, await_reply
from tq.timers import Timer, Timers

# What puts the rows of a run: a client like any other, but in the lead's process, and told what the lead knows.


class Admission(Protocol):
    """Puts new rows, and lost ones again."""

    @property
    def started(self) -> bool:
        """Whether `start` was called."""

    @property
    def admitted_groups(self) -> int:
        """All group ids below this number were given out."""

    @property
    def refills(self) -> Sequence[Refill]:
        """The groups that were replaced so far, in order; durable, so that a later incarnation begins with the same."""

    def start(self, known_rows: Mapping[int, Collection[int]] | None) -> None:
        """Begin. After a restart, `known_rows` holds each partition's existing and finished rows; None: first start."""

    def add_event(self, event: int | PutAgain | GroupRemoved) -> None:
        """Hear of a published version, lost rows, or a group that left its partition."""

    def close(self) -> None:
        """Stop; idempotent."""


@dataclass(frozen=True)
class AdmissionPlace:
    """What a controller gives its admission."""

    starts: int  # how often the controller started, this start included
    mark: AdmissionMark | None  # where an earlier incarnation stood; None: there was none
    version: int  # newest published weights; `mark` may know only older ones
    save: Callable[[AdmissionMark], None]  # makes a mark durable; returns when it is
    threads: ServiceThreads  # the controller's; the controller fails when a thread of admission does


MakeAdmission = Callable[[AdmissionPlace], Admission]


class LeaseObserver(Protocol):
    """Hears of leases, from any thread, after their consumers; it must not block."""

    def note_lease(self, grant: LeaseGrant, owner: str) -> None:
        """A consumer got rows; another reader of a replica's lease gets the same token."""

    def note_end(self, event: Release | OutputsWritten | AckLost) -> None:
        """A consumer returned rows, put their outputs, or acked them; another controller may have granted them."""


# Rows lost with a unit: every other controller tells the lead about them, and hears who is done with them.
#
# Only the lead has lost rows put again, and it may not have met the unit, if both died together. It may also know that
# all tasks were done, since an ack of rows in hand reached only the lead. Without these questions the rows would never
# be put again, and no other controller would learn that they are done.

logger = logging.getLogger(__name__)

_CLOSE_TIMEOUT_S = 5.0


class LeadQuestions:
    """Repeatedly asks the lead in its own thread; a lead that is away is asked the next time.

    Args:
        timeout_s: deadline of one question.
        losses: returns the rows to report; called from the thread.
        heard: receives what the lead knows; called from the thread.
    """

    def __init__(
        self,
        credentials: Credentials,
        name: str,
        lead: str,
        *,
        interval_s: float,
        timeout_s: float,
        losses: Callable[[], list[UnitLoss]],
        heard: Callable[[DoneElsewhere], None],
        threads: ServiceThreads,
    ) -> None:
        self._channels = ServiceChannels(credentials, name, Limits(), lambda *_: None)
        self._lead = lead
        self._interval_s = interval_s
        self._timeout_s = timeout_s
        self._losses = losses
        self._heard = heard
        self._closed = threading.Event()
        self._thread = threads.start(self._ask_repeatedly, name="ask-lead")

    def close(self) -> None:
        """Stop; idempotent."""
        self._closed.set()
        self._channels.close()
        self._thread.join(timeout=_CLOSE_TIMEOUT_S)

    def _ask_repeatedly(self) -> None:
        while not self._closed.wait(self._interval_s):
            losses = self._losses()
            if losses:
                try:
                    answer = self._ask_lead(losses)
                except TransportError as error:
                    logger.info("%s: %s", self._lead, error)
                else:
                    self._heard(answer)

    def _ask_lead(self, losses: list[UnitLoss]) -> DoneElsewhere:
        answer = self._channels.get(self._lead, CONTROLLER_REPLIES).submit(TellLost(losses))
        reply = await_reply(answer, self._lead, "TellLost", self._timeout_s)[0]
        rows = [number for loss in losses for record in loss.records for number in record.rows]
        return DoneElsewhere({task: [rows[k] for k in positions] for task, positions in reply.commits.items()})


# Applies events to a controller's state, one after another. Results are durable before any process is told.
#
# Unanswered calls wait here, each with its deadline:
#
#     add_call --> take_call (answered)
#         '-> set_deadline --> take_call (answered; the deadline is cancelled) | the deadline passes --> `expired`

NewsItem = tuple[Call, Answer] | PutAgain | GroupRemoved | RowsOfPartitionRemoved | Cleared
News = list[NewsItem]  # messages to send once the lock is released

_LONGEST_PARK_S = 3600.0


class StateShell:
    """The state with its lock, parked calls and listeners (units, durable facts, admission).

    No thread calls another process while it holds the lock.

    Args:
        outputs: reads task -> the columns that the task was seen to write.
        orders: makes the object that tells the units; it calls `fenced` for every fence that holds.
        restarted: this is not the controller's first start.
    """

    def __init__(
        self,
        state: ControlState,
        memory: Memory,
        timers: Timers,
        threads: ServiceThreads,
        *,
        outputs: Callable[[], Mapping[str, Iterable[str]]],
        orders: Callable[..., UnitOrders],
        restarted: bool,
        observer: LeaseObserver | None = None,
    ) -> None:
        self._observer = observer
        self.state = state
        self.lock = threading.Lock()
        self.calls = PendingRequests(timers, lambda request: self.apply_event(DeadlinePassed(request)))
        self.orders = orders(fenced=self.apply_event)
        self.admission: Admission | None = None
        self._memory = memory
        self._outputs = outputs
        self._threads = threads
        self._restarted = restarted

    def replay_memory(self) -> None:
        """Feed the state what earlier incarnations left."""
        self.state.handle(TasksWrite(self._outputs()))
        for event in self._memory.replay_events():
            self.state.handle(event)
        self.state.take_finished()  # durable already, like the losses
        self.state.take_losses()

    def apply_event(self, event: Event) -> None:
        """Apply an event and tell the consequences. The caller does not hold the lock."""
        with self.lock:
            answers = self.handle(event)
        self.send(answers)
        if self._observer is not None and isinstance(event, Release | OutputsWritten | AckLost):
            self._observer.note_end(event)

    def handle(self, event: Event, request: int = 0) -> News:
        """Apply an event and return what to `send`. The caller holds the lock."""
        news: News = []
        for instruction in self.state.handle(event, request):
            match instruction:
                case Answer():
                    call = self.calls.take_call(instruction.request)
                    if call is not None:
                        news.append((call, instruction))
                case ForwardAck() | OrderFenceRows() | OrderFenceTask() | OrderRemoveRows():
                    self.orders.add_order(instruction)
                case PutAgain() | GroupRemoved() | RowsOfPartitionRemoved() | Cleared():
                    news.append(instruction)
        # This event may have ended the recovery.
        self.start_admission()
        return news

    def send(self, news: News, event: Event | None = None) -> None:
        """Tell clients, units and admission. The caller does not hold the lock.

        `event` is what caused the news, if it may carry the values of its rows; a lease of exactly these rows then
        brings them.
        """
        with self.failing_service("durable facts"):
            self._make_durable(news)  # before any process is told
        # Answers to fetches go first: consumers are idle until they come.
        for one in sorted(news, key=_can_wait) if len(news) > 1 else news:
            match one:
                case PutAgain() | GroupRemoved() if self.admission is not None:
                    self.admission.add_event(one)
                case (call, Answer(reply=AsyncFlowError() as error)):
                    call.send_refusal(error)
                case (call, Answer(reply=LeaseGrant() as grant)) if _brings(event, grant, call.message):
                    call.send_reply(replace(grant, values=event.values))
                case (call, Answer(reply=reply)):
                    call.send_reply(reply)
            match one:
                case (Call(message=FetchRows() | FetchRound() as fetch), Answer(reply=LeaseGrant() as grant)):
                    if self._observer is not None:
                        self._observer.note_lease(grant, fetch.owner)

    def _make_durable(self, news: News) -> None:
        for one in news:
            # Rows that left with their group are written before the losses: a row in neither record would be missed
            # forever.
            if isinstance(one, RowsOfPartitionRemoved):
                self._memory.remember_removed(one.partition, self._removed_rows)
        if self.state.losses_changed or self._memory.saving_losses.locked():
            self._memory.remember_losses(self._take_losses)
        for one in news:
            if isinstance(one, Cleared):
                self._memory.clear(one.partition)
                self._memory.remember_removed(one.partition, self._removed_rows)

    def _removed_rows(self, partition: int) -> RowSet:
        with self.lock:
            return self.state.removed_rows(partition)

    def losses_to_tell(self) -> list[UnitLoss]:
        with self.lock:
            return self.state.list_losses()

    def learn_outputs(self) -> None:
        """Read what tasks write: an earlier incarnation or another controller may have been told, but not this one."""
        with self.failing_service("outputs of tasks", SealBroken):
            outputs = self._outputs()
        self.apply_event(TasksWrite(outputs))

    def save_finished(self) -> None:
        """Make durable which rows are finished. The caller does not hold the lock."""
        with self.failing_service("durable facts"):
            self._memory.remember_finished(self._newly_finished)

    def _newly_finished(self) -> dict[int, RowSet]:
        with self.lock:
            return self.state.take_finished()

    def _take_losses(self) -> tuple[dict[int, RowSet], dict[int, list[RowRecords]]] | None:
        with self.lock:
            if not self.state.losses_changed:
                return None
            return self.state.take_finished(), self.state.take_losses()

    @contextlib.contextmanager
    def failing_service(self, what: str, kind: type[Exception] = Exception) -> Iterator[None]:
        """Fail the whole service if the block fails: it restarts and rebuilds everything."""
        try:
            yield
        except kind as error:
            self._threads.fail(what, error)
            raise

    def start_admission(self) -> None:
        """Start admission once the state knows which rows exist."""
        if self.admission is None or self.admission.started or self.state.recovering:
            return
        self.admission.start(self.state.known_rows() if self._restarted else None)


class PendingRequests:
    """Calls that wait, by request number. The caller holds the shell's lock. Never answers.

    `expired` is called without the lock when a request's deadline passes; the request may be answered at that moment.
    """

    def __init__(self, timers: Timers, expired: Callable[[int], None]) -> None:
        self._timers = timers
        self._expired = expired
        self._pending: dict[int, _Pending] = {}
        self._newest = 0

    def add_call(self, call: Call) -> int:
        """Keep a call until it is taken; returns its request number."""
        self._newest += 1
        self._pending[self._newest] = _Pending(call, time.monotonic())
        return self._newest

    def set_deadline(self, request: int, timeout_s: float) -> None:
        """Set a request's deadline, unless it was answered already."""
        pending = self._pending.get(request)
        if pending is not None:
            delay_s = min(max(0.0, timeout_s), _LONGEST_PARK_S)
            pending.deadline = self._timers.call_later(delay_s, partial(self._expired, request))

    def take_call(self, request: int) -> Call | None:
        """Return the call, to be answered once and now; None: it was taken before."""
        pending = self._pending.pop(request, None)
        return None if pending is None else pending.let_go()

    def drop_session(self, session: int) -> list[int]:
        """Drop the calls of a channel that ended, and return their requests."""
        requests = [number for number, pending in self._pending.items() if pending.call.session.number == session]
        # Nobody waits for a reply, and a kept call would keep the dead channel alive.
        for number in requests:
            self.take_call(number)
        return requests

    def fetches_of(self, owner: str) -> list[int]:
        return [
            number
            for number, pending in self._pending.items()
            if isinstance(message := pending.call.message, FetchRows | FetchRound) and message.owner == owner
        ]

    def waiting_since(self) -> dict[str, float]:
        """Return, per task, when its oldest waiting fetch arrived (s, monotonic)."""
        oldest: dict[str, float] = {}
        for pending in self._pending.values():  # in order of arrival
            if isinstance(pending.call.message, FetchRows | FetchRound):
                oldest.setdefault(pending.call.message.task, pending.since)
        return oldest


@dataclass(eq=False, slots=True)
class _Pending:
    call: Call
    since: float
    deadline: Timer | None = None

    def let_go(self) -> Call:
        if self.deadline is not None:
            self.deadline.cancel()
        return self.call


def _brings(event: Event | None, grant: LeaseGrant, fetch: Message) -> TypeGuard[RowsCreated | RowsConfirmed]:
    """Whether the event carries the values of a lease: a put of exactly these rows, still at the same unit."""
    if not isinstance(event, RowsCreated | RowsConfirmed) or not event.values or not isinstance(fetch, FetchRows):
        return False
    return grant.rows == event.rows and grant.units.count(event.unit) == len(event.rows)


def _can_wait(one: NewsItem) -> bool:
    return not (isinstance(one, tuple) and isinstance(one[1].reply, LeaseGrant | NoRows))


_CHECKS_PER_TIMEOUT = 8
_LEFT_S = 5.0  # after a stop, a consumer that has not joined a restarted controller within this time has left (s)


class ControllerService:
    """Serves its part of the control plane under `name`, from construction until `close`.

    Args:
        name: one of `config.controllers`; the first one is the lead.
        tasks: of the whole queue, producers before consumers.
        admission: makes the object that puts the rows, on the lead; None: other clients put them.
        refill: the lead's admission replaces dead-letter groups.
        version: step of the weights at the start.
        row_limit: live rows beyond which puts wait, unless `config` sets a limit; 0: no limit.
        lineage: of the queue; nothing of an earlier lineage counts.
        observer: hears of the leases of this controller's tasks.
    """

    def __init__(
        self,
        credentials: Credentials,
        name: str,
        *,
        tasks: Sequence[TaskSpec],
        config: QueueConfig,
        admission: MakeAdmission | None = None,
        refill: bool = False,
        version: int = 0,
        row_limit: int = 0,
        lineage: int = 0,
        observer: LeaseObserver | None = None,
    ) -> None:
        self.threads = ServiceThreads(name)
        self._name = name
        self._config = config
        self._directory = Directory(config.controllers, tuple(task.name for task in tasks))
        self._lead = name == self._directory.lead
        self._durable = DurableMark(credentials, name, lineage=lineage)
        starts = self._durable.start()
        self._recovered = starts > 1
        self._memory = memory = Memory(self._durable, version=version)
        # Held while a consumer joins or is forgotten, both in the store and here; taken before the shell's lock.
        self._naming = threading.Lock()
        self._timers = Timers(name, failed=partial(self.threads.fail, "timers"))
        self._graces = UnitGraces(self._timers, config.unit_grace_s, self._give_unit_up)
        self._sessions = OpenSessions(config.lease_timeout_s, config.unit_timeout_s)
        self._rates = TaskRates(time.monotonic())
        self._closed = False
        recovering = None
        # Consumers of an earlier incarnation that have not joined this one; empty once recovery gives them up.
        self._awaited: set[str] = set()
        if self._recovered:
            # Not itself.
            owners = {owner for owner in self._durable.list_peers("owner") if not owner.startswith(f"{name}@")}
            recovering = Recovering(frozenset(self._durable.list_peers("unit")), frozenset(owners))
            self._awaited.update(recovering.owners)
            logger.warning("start %d: waiting for %s", starts, recovering)
        state = ControlState(
            tasks,
            served=self._directory.served_by(name),
            version=self._memory.newest_version,
            lineage=lineage,
            published=self._recovered,
            first_token=first_token(lineage, starts) + 1,
            row_limit=(config.max_live_rows or row_limit) if self._lead else 0,
            byte_limit=config.max_live_bytes if self._lead else 0,
            refill=refill,
            recovering=recovering,
        )
        orders = partial(UnitOrders, credentials, name, timeout_s=config.request_timeout_s, threads=self.threads)
        self._shell = StateShell(
            state, self._memory, self._timers, self.threads,
            outputs=partial(TaskOutputs(credentials).read, self._directory.tasks), orders=orders,
            restarted=self._recovered, observer=observer,
        )  # fmt: skip
        self._shell.replay_memory()
        self._questions = None
        if not self._lead:
            self._questions = LeadQuestions(
                credentials, name, self._directory.lead, threads=self.threads,
                interval_s=config.lease_timeout_s / _CHECKS_PER_TIMEOUT, timeout_s=config.request_timeout_s,
                losses=self._shell.losses_to_tell, heard=self._hear_done,
            )  # fmt: skip
        if admission is not None and self._lead:
            newest, save = memory.newest_version, memory.remember_admission
            self._shell.admission = admission(AdmissionPlace(starts, memory.admission, newest, save, self.threads))
        with credentials.borrowed_store() as store:
            self._directory.publish(store)
        self._server = ChannelServer(
            credentials, name, CONTROLLER_REQUESTS, self, threads=self.threads,
            limits=Limits(payload_bytes=config.max_message_bytes), max_clients=config.max_clients,
        )  # fmt: skip
        self._look_for_silent()
        self._look_for_silent_units()
        if recovering is not None:
            self._timers.call_later(config.lease_timeout_s, self._end_recovery)
        self._shell.start_admission()

    def stop(self) -> None:
        """Reply to every fetch with `NoRows(stop)` from now on; a trainer saves only after this reply."""
        self._memory.remember_event(Stop())
        self._shell.apply_event(Stop())
        # A consumer that left during the stop, while this controller was away, never rejoins.
        if self._recovered:
            self._timers.call_later(_LEFT_S, self._end_recovery)

    def close(self) -> None:
        self.threads.close()
        with self._shell.lock:
            self._closed = True
        if self._shell.admission is not None:
            self._shell.admission.close()
        self._timers.close()
        self._server.close()
        self._shell.orders.close()
        if self._questions is not None:
            self._questions.close()

    def handle_disconnect(self, session: ChannelSession) -> None:
        """A channel ended: a consumer's leases return, except a trainer's; a unit's rows wait for the unit's return."""
        with self._shell.lock:
            owners, units = self._sessions.end_session(session.number)
            events: list[Event] = [
                DeadlinePassed(request) for request in self._shell.calls.drop_session(session.number)
            ]
            events += [OwnerGone(owner) for owner in owners] + [UnitGone(unit) for unit in units]
            answers = [answer for event in events for answer in self._shell.handle(event)]
            for unit in units:
                self._graces.begin(unit)
        self._shell.send(answers)
        if self._closed:
            return
        if units:
            self._shell.save_finished()
        self._forget_owners(owners)

    def handle(self, call: Call) -> None:
        """Carry out one request of `CONTROLLER_REQUESTS`; some are answered later."""
        message = call.message
        match message:
            case RowsCreated():
                self._create_rows(message, call)
            case FetchRows() | FetchRound() | WatchLost():
                self._handle_or_park(message, call, message.timeout_s)
            case RowsConfirmed() | TellLost():
                self._handle_or_park(message, call)
            case OutputsWritten() | RowsRemoved() | Release() | AckLost() | ClearPartition():
                self._shell.apply_event(message)
                call.send_reply(Done())
            case Heartbeat():
                self._handle_heartbeat(message, call)
            case Join():
                self._join_owner(message, call)
            case RegisterUnit():
                self._register_unit(message, call)
            case OpenPartition() | Stop() | CloseWriting() | PublishVersion():
                # Durable first: a restarted controller must know what was answered.
                self._memory.remember_event(message)
                self._shell.apply_event(message)
                call.send_reply(self._note_published(message) if isinstance(message, PublishVersion) else Done())
            case ReleaseCheckpointed():
                self._shell.save_finished()
                call.send_reply(Done())
            case GetQueueStats():
                call.send_reply(self._collect_stats())
            case UnitAlive():
                with self._shell.lock:
                    self._sessions.unit_heard(call.session.number, time.monotonic())
                call.send_reply(Done())

    def _create_rows(self, message: RowsCreated, call: Call) -> None:
        with self._shell.lock:
            returning = self._shell.state.any_away(message.rows)
        if returning:
            self._shell.learn_outputs()
        self._handle_or_park(message, call, message.timeout_s)

    def _note_published(self, message: PublishVersion) -> Published:
        if self._shell.admission is None:
            return Published()
        self._shell.admission.add_event(message.step)
        return Published(list(self._shell.admission.refills[message.refills_known :]))

    def _handle_or_park(
        self,
        event: FetchRows | FetchRound | WatchLost | RowsCreated | RowsConfirmed | TellLost,
        call: Call,
        timeout_s: float = 0.0,
    ) -> None:
        with self._shell.lock:
            if isinstance(event, FetchRows | FetchRound):
                self._sessions.watch_owner(call.session.number, event.owner, time.monotonic())
            # Keep the call before the event, which may answer it at once; only a call that is still open gets a
            # deadline.
            request = self._shell.calls.add_call(call)
            try:
                answers = self._shell.handle(event, request)
            except AsyncFlowError:
                self._shell.calls.take_call(request)
                raise
            self._shell.calls.set_deadline(request, timeout_s)
        self._shell.send(answers, event)

    def _handle_heartbeat(self, message: Heartbeat, call: Call) -> None:
        with self._shell.lock:
            known = self._sessions.note_heartbeat(message.owner, time.monotonic())
            if known and message.writes:
                self._shell.handle(OwnerWrites(message.owner, tuple(message.writes)))
            units, away = self._shell.state.units(), self._shell.state.list_away_units()
        call.send_reply(Alive(known, units, away, self._shell.state.newest_version))

    def _join_owner(self, message: Join, call: Call) -> None:
        message.check_format(message.owner)
        with self._naming:
            self._durable.add_peer("owner", message.owner)
            gone, answers = self._apply_join(message, call)
        self._shell.send(answers)
        self._forget_owners(gone)

    def _apply_join(self, message: Join, call: Call) -> tuple[list[str], News]:
        """Returns the incarnations that this consumer replaces, and what to tell."""
        with self._shell.lock:
            gone = [other for other in {*self._sessions.owners, *self._awaited} if replaces(message.owner, other)]
            self._sessions.remove_owners(gone)
            self._awaited.difference_update(gone)
            answers = [answer for other in gone for answer in self._shell.handle(OwnerGone(other))]
            if self._sessions.is_elsewhere(call.session.number, message.owner):
                answers += self._shell.handle(OwnerGone(message.owner))  # its broken channel delivered nothing
            self._sessions.add_owner(call.session.number, message.owner, time.monotonic())
            self._awaited.discard(message.owner)
            answers += self._shell.handle(message, self._shell.calls.add_call(call))
        return gone, answers

    def _register_unit(self, message: RegisterUnit, call: Call) -> None:
        message.check_format(message.unit)
        self._durable.add_peer("unit", message.unit)
        self._shell.learn_outputs()
        answers = None
        # Orders may be added while the unit catches up; its rows go out only when it is owed none.
        while answers is None:
            self._shell.orders.catch_up(message.unit)
            answers = self._apply_registration(message, call)
        self._shell.save_finished()  # an earlier life of the unit may have reported some
        self._shell.send(answers)

    def _apply_registration(self, message: RegisterUnit, call: Call) -> News | None:
        """Returns what to tell; None: the unit must first hear something, such as a fence, before its rows go out."""
        with self._shell.lock:
            if self._shell.orders.owes_unit(message.unit):
                return None
            self._sessions.add_unit(call.session.number, message.unit, time.monotonic())
            self._graces.end(message.unit)
            return self._shell.handle(message, self._shell.calls.add_call(call))

    def _hear_done(self, event: DoneElsewhere) -> None:
        self._shell.learn_outputs()
        self._shell.apply_event(event)

    def _look_for_silent(self) -> None:
        """Periodically give up consumers that have been silent for `lease_timeout_s`."""
        with self._shell.lock:
            silent = self._sessions.silent_owners(time.monotonic())
            answers = [answer for owner in silent for answer in self._give_up(owner)]
        self._shell.send(answers)
        self._forget_owners(silent)
        self._timers.call_later(self._config.lease_timeout_s / _CHECKS_PER_TIMEOUT, self._look_for_silent)

    def _look_for_silent_units(self) -> None:
        """Periodically cut off silent units, such as a stopped process; a unit that continues registers again."""
        timeout_s = self._config.unit_timeout_s
        with self._shell.lock:
            silent = self._sessions.silent_units(time.monotonic())
        for unit, session in silent:
            logger.warning("%s was silent for %g s; it counts as away", unit, timeout_s)
            self._server.cut_off(session)
        self._timers.call_later(timeout_s / _CHECKS_PER_TIMEOUT, self._look_for_silent_units)

    def _give_unit_up(self, unit: str, grace: int) -> None:
        with self._shell.lock:
            answers = self._shell.handle(UnitLost(unit)) if self._graces.is_grace_over(unit, grace) else []
        self._shell.send(answers)

    def _end_recovery(self) -> None:
        with self._shell.lock:
            answers = self._shell.handle(RecoveryDeadline())
            gone, self._awaited = self._awaited, set()
        self._shell.send(answers)
        self._forget_owners(list(gone))  # otherwise every later start would wait for them, too

    def _give_up(self, owner: str) -> News:
        logger.warning("%s was silent for %g s; its leases return", owner, self._config.lease_timeout_s)
        # Should the consumer live on, it must not wait for an answer that never comes.
        parked = self._shell.calls.fetches_of(owner)
        answers = [answer for request in parked for answer in self._shell.handle(DeadlinePassed(request))]
        return answers + self._shell.handle(OwnerGone(owner))

    def _forget_owners(self, owners: Sequence[str]) -> None:
        """Let the next incarnation not wait for these consumers, unless they are back already."""
        with self._naming:
            for owner in owners:
                with self._shell.lock:
                    # Trainers keep leases beyond the end of their channel: they are expected back.
                    expected = owner in self._sessions.owners or self._shell.state.keeps_leases(owner)
                if not expected:
                    self._durable.remove("owner", owner)

    def _collect_stats(self) -> QueueStats:
        now = time.monotonic()
        admitted = 0 if self._shell.admission is None else self._shell.admission.admitted_groups
        with self._shell.lock:
            stats = self._shell.state.stats(admitted)
            stats.owners = self._sessions.owners
            oldest = self._shell.calls.waiting_since()
            for task in stats.tasks:
                task.controller = self._name
                task.oldest_request_s = now - oldest.get(task.task, now)
            self._rates.note_rates(stats.tasks, now)
        return stats


_WINDOW_S = 10.0


class TaskRates:
    """How fast each task progresses, from what was done some seconds ago.

    The caller holds the lock and passes the clock (s, monotonic).
    """

    def __init__(self, now: float) -> None:
        self._started = now
        self._before: dict[str, tuple[float, int]] = {}

    def note_rates(self, tasks: Iterable[TaskStats], now: float) -> None:
        """Fill in the rows per second since roughly the beginning of the last window."""
        for task in tasks:
            before, done = self._before.get(task.task, (self._started, 0))
            task.rows_per_s = (task.acked - done) / max(now - before, 1e-3)
            if now - before > _WINDOW_S:
                self._before[task.task] = (now, task.acked)
