"""One controller service: the control plane's shell around `ControlState`, and, on the lead, admission.

Threads: the channel server's receivers apply events under one lock and send the answers; `timers` answers parked
requests whose time is up and gives up units and silent consumers; `UnitOrders` tells the units; `admission` puts new
prompts. Nobody calls another process while holding the lock.

    first start      serve at once
    later starts     read the mark, wait for the units' inventories and for the consumers that were there, fence the
                     rest, serve
"""

import contextlib
import logging
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from functools import partial

from asyncflow.errors import AsyncFlowError, SealBroken
from asyncflow.service_threads import ServiceThreads
from asyncflow.transport.frame import Limits
from asyncflow.transport.handshake import Credentials
from asyncflow.transport.server import Call, ChannelServer, Session
from tq.client.queue_client import QueueClient
from tq.config import QueueConfig, ScheduleConfig
from tq.control.durable_mark import DurableMark
from tq.control.events import (
    Answer,
    Cleared,
    Commit,
    DeadlinePassed,
    DoneElsewhere,
    Event,
    Fence,
    FenceAll,
    Lost,
    OwnerGone,
    OwnerWrites,
    Quarantine,
    Quarantined,
    RecoveryDeadline,
    Shrunk,
    TasksWrite,
    UnitGone,
    UnitLost,
)
from tq.control.kept_calls import KeptCalls
from tq.control.lead_questions import LeadQuestions
from tq.control.memory import Memory
from tq.control.prompt_admitter import PromptAdmitter, PromptSource
from tq.control.recovery import Recovering
from tq.control.row_set import RowSet
from tq.control.saved_rows import SavedRows
from tq.control.sessions import Sessions
from tq.control.state import ControlState
from tq.control.task_rates import TaskRates
from tq.control.task_state import TaskSpec
from tq.control.unit_graces import UnitGraces
from tq.control.unit_orders import UnitOrders
from tq.directory import Directory
from tq.lease_tokens import first_token
from tq.messages import (
    CONTROLLER_REQUESTS,
    AckLost,
    Alive,
    ClearPartition,
    CloseWriting,
    CommitPartitions,
    Done,
    FetchRound,
    FetchRows,
    GetQueueStats,
    GiveBack,
    Heartbeat,
    Join,
    OpenPartition,
    OutputsWritten,
    Published,
    PublishVersion,
    QueueStats,
    RegisterUnit,
    RowRecords,
    RowsConfirmed,
    RowsCreated,
    RowsRemoved,
    Stop,
    TellLost,
    UnitAlive,
    UnitLoss,
    WatchLost,
)
from tq.owner import replaces
from tq.task_outputs import TaskOutputs
from tq.timers import Timers

logger = logging.getLogger(__name__)

_CHECKS_PER_TIMEOUT = 8
_LEFT_S = 5.0
"""Whoever has not joined a restarted controller so long after a stop has left (s)."""

News = list[tuple[Call, Answer] | Lost | Quarantined | Shrunk | Cleared]
"""What is told when the lock is released."""


class ControllerService:
    """Serves its part of the control plane under `name` until `close`."""

    def __init__(
        self,
        credentials: Credentials,
        name: str,
        *,
        tasks: Sequence[TaskSpec],
        config: QueueConfig,
        schedule: ScheduleConfig | None = None,
        prompts: PromptSource | None = None,
        refill: bool = False,
        version: int = 0,
        last_step: int = 0,
        trained: Collection[int] = (),
        filtered: Collection[int] = (),
        max_filtered: int | None = None,
        lineage: int = 0,
        saved: SavedRows | None = None,
    ) -> None:
        """Start serving.

        Args:
            credentials: store and secret.
            name: one of `config.controllers`; the first one is the lead.
            tasks: of the whole queue, producers before consumers.
            config: settings.
            schedule: of admission; None: rows are put by others.
            prompts: admission's source, on the lead; None: rows come from elsewhere.
            refill: the lead, whichever controller this is, admits prompts, and so replaces groups in quarantine; with
                `prompts` it does.
            version: step of the weights at the start.
            last_step: admission ends here.
            trained: groups in the weights at the start, where they are not just those up to `version`.
            filtered, max_filtered: see `AdmissionState`.
            lineage: of the queue: nothing of an earlier one counts.
            saved: finished samples that admission, on the lead, may put instead of prompts.
        """
        self.threads = ServiceThreads(name)
        self._name = name
        self._config = config
        self._directory = Directory(config.controllers, tuple(task.name for task in tasks))
        self._lead = name == self._directory.lead
        self._durable = DurableMark(credentials, name, lineage=lineage)
        starts = self._durable.start()
        self._recovered = starts > 1
        self._memory = Memory(self._durable, version=version)
        self._lock = threading.Lock()
        self._naming = threading.Lock()
        """Held while a consumer joins, or is forgotten, in the store and here; taken before `_lock`."""
        self._timers = Timers(name, failed=partial(self.threads.fail, "timers"))
        self._calls = KeptCalls(self._timers, lambda request: self._apply(DeadlinePassed(request)))
        self._graces = UnitGraces(self._timers, config.unit_grace_s, self._give_unit_up)
        self._sessions = Sessions()
        self._rates = TaskRates(time.monotonic())
        self._closed = False
        recovering = None
        self._awaited: set[str] = set()
        """Consumers of an earlier incarnation that have not joined this one, until its recovery gives them up."""
        if self._recovered:
            owners = {owner for owner in self._durable.names("owner") if not owner.startswith(f"{name}@")}  # not itself
            recovering = Recovering(frozenset(self._durable.names("unit")), frozenset(owners))
            self._awaited.update(recovering.owners)
            logger.warning("start %d: waiting for %s", starts, recovering)
        self._state = ControlState(
            tasks,
            served=self._directory.served_by(name),
            version=self._memory.newest_version,
            lineage=lineage,
            published=self._recovered,
            first_token=first_token(lineage, starts) + 1,
            row_limit=_row_limit(config, schedule) if self._lead else 0,
            byte_limit=config.max_live_bytes if self._lead else 0,
            refill=refill or prompts is not None,
            recovering=recovering,
        )
        self._outputs = TaskOutputs(credentials)
        self._state.handle(TasksWrite(self._outputs.read(self._directory.tasks)))
        for event in self._memory.events():
            self._state.handle(event)
        self._state.take_finished()  # durable already, as are these:
        self._state.take_losses()
        self._orders = UnitOrders(
            credentials, name, timeout_s=config.request_timeout_s, fenced=self._apply, threads=self.threads
        )
        self._client = QueueClient(credentials, name, config=config, attempt=starts)
        self._questions = None
        if not self._lead:
            self._questions = LeadQuestions(
                credentials,
                name,
                self._directory.lead,
                interval_s=config.lease_timeout_s / _CHECKS_PER_TIMEOUT,
                timeout_s=config.request_timeout_s,
                losses=self._losses_to_tell,
                heard=self._hear_done,
                threads=self.threads,
            )
        self._admitting: PromptAdmitter | None = None
        if prompts is not None and schedule is not None and self._lead:
            self._admitting = PromptAdmitter(
                self._memory.admission_state(
                    schedule,
                    version=version,
                    last_step=last_step,
                    trained=trained,
                    filtered=filtered,
                    max_filtered=max_filtered,
                ),
                self._client,
                prompts,
                num_units=config.num_storage_units,
                save=self._memory.remember_admission,
                threads=self.threads,
                saved=saved,
            )
        with credentials.borrowed_store() as store:
            self._directory.publish(store)
        limits = Limits(payload_bytes=config.max_message_bytes)
        self._server = ChannelServer(
            credentials,
            name,
            CONTROLLER_REQUESTS,
            self,
            limits=limits,
            max_clients=config.max_clients,
            threads=self.threads,
        )
        self._look_for_silent()
        self._look_for_silent_units()
        if recovering is not None:
            self._timers.after(config.lease_timeout_s, self._end_recovery)
        self._start_admitting()

    def stop(self) -> None:
        """Answer everybody's fetches with `NoRows(stop)` from now on.

        Who left because of the stop while this controller was away never joins; a trainer saves after its answer only.
        """
        self._memory.remember(Stop())
        self._apply(Stop())
        if self._recovered:
            self._timers.after(_LEFT_S, self._end_recovery)

    def close(self) -> None:
        """Stop serving; idempotent."""
        self.threads.close()
        with self._lock:
            self._closed = True
        if self._admitting is not None:
            self._admitting.close()
        self._timers.close()
        self._server.close()
        self._orders.close()
        self._client.close()
        if self._questions is not None:
            self._questions.close()

    def disconnected(self, session: Session) -> None:
        """A channel ended: a consumer's leases return, except a trainer's; a unit's rows wait for its return."""
        with self._lock:
            owners, units = self._sessions.ended(session.number)
            events: list[Event] = [DeadlinePassed(request) for request in self._calls.drop(session.number)]
            events += [OwnerGone(owner) for owner in owners] + [UnitGone(unit) for unit in units]
            answers = [answer for event in events for answer in self._handle(event)]
            for unit in units:
                self._graces.begin(unit)
        self._send(answers)
        if self._closed:
            return
        if units:
            with self._failing("durable facts"):
                self._memory.remember_finished(self._newly_finished)
        self._forget(owners)

    def handle(self, call: Call) -> None:
        """Carry out one request of `CONTROLLER_REQUESTS`; some are answered later."""
        message = call.message
        match message:
            case RowsCreated():
                self._create(message, call)
            case FetchRows() | FetchRound() | WatchLost():
                self._ask(message, call, message.timeout_s)
            case RowsConfirmed() | TellLost():
                self._ask(message, call)
            case OutputsWritten() | RowsRemoved() | GiveBack() | AckLost() | ClearPartition():
                self._apply(message)
                call.reply(Done())
            case Heartbeat():
                self._heartbeat(message, call)
            case Join():
                self._join(message, call)
            case RegisterUnit():
                self._register(message, call)
            case OpenPartition() | Stop() | CloseWriting():
                self._memory.remember(message)
                self._apply(message)
                call.reply(Done())
            case CommitPartitions():
                self._memory.remember_finished(self._newly_finished)
                call.reply(Done())
            case PublishVersion():
                self._memory.remember(message)
                self._apply(message)
                call.reply(self._published(message))
            case GetQueueStats():
                call.reply(self._stats())
            case UnitAlive():
                with self._lock:
                    self._sessions.unit_heard(call.session.number, time.monotonic())
                call.reply(Done())

    def _create(self, message: RowsCreated, call: Call) -> None:
        with self._lock:
            returning = self._state.any_away(message.rows)
        if returning:
            self._learn_outputs()
        self._ask(message, call, message.timeout_s)

    def _published(self, message: PublishVersion) -> Published:
        if self._admitting is None:
            return Published()
        self._admitting.add(message.step)
        return Published(list(self._admitting.refills[message.refills_known :]))

    def _ask(
        self,
        event: FetchRows | FetchRound | WatchLost | RowsCreated | RowsConfirmed | TellLost,
        call: Call,
        timeout_s: float = 0.0,
    ) -> None:
        with self._lock:
            if isinstance(event, FetchRows | FetchRound):
                self._sessions.asked(call.session.number, event.owner, time.monotonic())
            request = self._calls.keep(call)
            try:
                answers = self._handle(event, request)
            except AsyncFlowError:
                self._calls.take(request)
                raise
            self._calls.park(request, timeout_s)
        self._send(answers)

    def _heartbeat(self, message: Heartbeat, call: Call) -> None:
        with self._lock:
            known = self._sessions.heard(message.owner, time.monotonic())
            if known and message.writes:
                self._handle(OwnerWrites(message.owner, tuple(message.writes)))
            units, away = self._state.units(), self._state.away()
        call.reply(Alive(known, units, away, self._state.newest_version))

    def _join(self, message: Join, call: Call) -> None:
        with self._naming:
            self._durable.add("owner", message.owner)
            gone, answers = self._joined(message, call)
        self._send(answers)
        self._forget(gone)

    def _joined(self, message: Join, call: Call) -> tuple[list[str], News]:
        """Returns who is gone since this consumer is here, and what to tell."""
        with self._lock:
            gone = [other for other in {*self._sessions.owners, *self._awaited} if replaces(message.owner, other)]
            self._sessions.gone(gone)
            self._awaited.difference_update(gone)
            answers = [answer for other in gone for answer in self._handle(OwnerGone(other))]
            if self._sessions.elsewhere(call.session.number, message.owner):
                answers += self._handle(OwnerGone(message.owner))  # what its broken channel was told never arrived
            self._sessions.joined(call.session.number, message.owner, time.monotonic())
            self._awaited.discard(message.owner)
            answers += self._handle(message, self._calls.keep(call))
        return gone, answers

    def _register(self, message: RegisterUnit, call: Call) -> None:
        self._durable.add("unit", message.unit)
        self._learn_outputs()
        answers = None
        while answers is None:
            self._orders.catch_up(message.unit)
            answers = self._registered(message, call)
        with self._failing("durable facts"):
            self._memory.remember_finished(self._newly_finished)  # an earlier life of the unit may have known of them
        self._send(answers)

    def _registered(self, message: RegisterUnit, call: Call) -> News | None:
        """Returns what to tell; None: the unit must be told something first, a fence say, before its rows go out."""
        with self._lock:
            if self._orders.owes(message.unit):
                return None
            self._sessions.registered(call.session.number, message.unit, time.monotonic())
            self._graces.end(message.unit)
            return self._handle(message, self._calls.keep(call))

    def _learn_outputs(self) -> None:
        """Hear what tasks write: an earlier incarnation or another controller may have been told, but not this one."""
        with self._failing("outputs of tasks", SealBroken):
            outputs = self._outputs.read(self._directory.tasks)
        self._apply(TasksWrite(outputs))

    @contextlib.contextmanager
    def _failing(self, what: str, kind: type[Exception] = Exception) -> Iterator[None]:
        """If that fails, so has the service: it starts again, and rebuilds everything."""
        try:
            yield
        except kind as error:
            self.threads.fail(what, error)
            raise

    def _hear_done(self, event: DoneElsewhere) -> None:
        self._learn_outputs()
        self._apply(event)

    def _apply(self, event: Event) -> None:
        with self._lock:
            answers = self._handle(event)
        self._send(answers)

    def _handle(self, event: Event, request: int = 0) -> News:
        """Apply an event and hand out its instructions; the lock is held."""
        news: News = []
        for instruction in self._state.handle(event, request):
            match instruction:
                case Answer():
                    call = self._calls.take(instruction.request)
                    if call is not None:
                        news.append((call, instruction))
                case Commit() | Fence() | FenceAll() | Quarantine():
                    self._orders.add(instruction)
                case Lost() | Quarantined() | Shrunk() | Cleared():
                    news.append(instruction)
        self._start_admitting()
        return news

    def _send(self, news: News) -> None:
        """Tell clients, units and admission; the lock is not held."""
        with self._failing("durable facts"):
            self._make_durable(news)  # before anybody hears of them
        for one in news:
            match one:
                case Lost() | Quarantined() if self._admitting is not None:
                    self._admitting.add(one)
                case (call, Answer(reply=AsyncFlowError() as error)):
                    call.refuse(error)
                case (call, Answer(reply=reply)):
                    call.reply(reply)

    def _make_durable(self, news: News) -> None:
        """What left with its group is written before the losses: a row that is in neither would be missed for ever."""
        for one in news:
            if isinstance(one, Shrunk):
                self._memory.remember_removed(one.partition, self._removed)
        if self._state.losses_changed or self._memory.remembering_losses:
            self._memory.remember_losses(self._losses)
        for one in news:
            if isinstance(one, Cleared):
                self._memory.clear(one.partition)
                self._memory.remember_removed(one.partition, self._removed)

    def _removed(self, partition: int) -> RowSet:
        with self._lock:
            return self._state.removed_rows(partition)

    def _losses_to_tell(self) -> list[UnitLoss]:
        with self._lock:
            return self._state.losses()

    def _newly_finished(self) -> dict[int, RowSet]:
        with self._lock:
            return self._state.take_finished()

    def _losses(self) -> tuple[dict[int, RowSet], dict[int, list[RowRecords]]] | None:
        with self._lock:
            if not self._state.losses_changed:
                return None
            return self._state.take_finished(), self._state.take_losses()

    def _look_for_silent(self) -> None:
        """Give up consumers that were not heard of; again and again."""
        timeout_s = self._config.lease_timeout_s
        with self._lock:
            silent = self._sessions.silent(time.monotonic(), timeout_s)
            answers = [answer for owner in silent for answer in self._give_up(owner)]
        self._send(answers)
        self._forget(silent)
        self._timers.after(timeout_s / _CHECKS_PER_TIMEOUT, self._look_for_silent)

    def _look_for_silent_units(self) -> None:
        """Cut off units that were not heard of, a stopped process say; when they go on they register again."""
        timeout_s = self._config.unit_timeout_s
        with self._lock:
            silent = self._sessions.silent_units(time.monotonic(), timeout_s)
        for unit, session in silent:
            logger.warning("%s was silent for %g s; it counts as away", unit, timeout_s)
            self._server.cut_off(session)
        self._timers.after(timeout_s / _CHECKS_PER_TIMEOUT, self._look_for_silent_units)

    def _give_unit_up(self, unit: str, grace: int) -> None:
        with self._lock:
            answers = self._handle(UnitLost(unit)) if self._graces.over(unit, grace) else []
        self._send(answers)

    def _end_recovery(self) -> None:
        with self._lock:
            answers = self._handle(RecoveryDeadline())
            gone, self._awaited = self._awaited, set()
        self._send(answers)
        self._forget(list(gone))  # else every later start would wait for them, too

    def _give_up(self, owner: str) -> News:
        """A consumer was silent for too long; should it live on, it must not wait for an answer that never comes."""
        logger.warning("%s was silent for %g s; its leases return", owner, self._config.lease_timeout_s)
        parked = self._calls.fetches_of(owner)
        answers = [answer for request in parked for answer in self._handle(DeadlinePassed(request))]
        return answers + self._handle(OwnerGone(owner))

    def _forget(self, owners: Sequence[str]) -> None:
        """Consumers were given up: the next incarnation does not wait for them, unless they are back already.

        Nor are trainers forgotten whose leases outlive their channel: they come back, and go on with them.
        """
        with self._naming:
            for owner in owners:
                with self._lock:
                    expected = owner in self._sessions.owners or self._state.keeps_leases(owner)
                if not expected:
                    self._durable.remove("owner", owner)

    def _start_admitting(self) -> None:
        """Begin as soon as the state knows which rows exist."""
        if self._admitting is None or self._admitting.started or self._state.recovering:
            return
        self._admitting.start(self._state.known_rows() if self._recovered else None)

    def _stats(self) -> QueueStats:
        now = time.monotonic()
        admitted = 0 if self._admitting is None else self._admitting.admitted_groups
        with self._lock:
            stats = self._state.stats(admitted)
            stats.owners = self._sessions.owners
            oldest = self._calls.waiting_since()
            for task in stats.tasks:
                task.controller = self._name
                task.oldest_request_s = now - oldest.get(task.task, now)
            self._rates.note(stats.tasks, now)
        return stats


def _row_limit(config: QueueConfig, schedule: ScheduleConfig | None) -> int:
    return config.max_live_rows or (schedule.live_rows if schedule else 0)
