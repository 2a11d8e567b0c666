"""One controller service: the control plane's shell around `ControlState`, and, on the lead, admission.

Threads: the channel server's receivers apply events under one lock and send the answers; `clock` answers parked
requests whose time is up and gives silent consumers up; `unit-orders` tells the units; `admission` puts new prompts.
Nobody calls another process while holding the lock.

    first start      serve at once
    later starts     read the mark, wait for the units' inventories and for the consumers that were there, fence the
                     rest, serve
"""

import heapq
import logging
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from asyncflow.errors import AsyncFlowError
from asyncflow.transport.frame import Limits
from asyncflow.transport.handshake import Credentials
from asyncflow.transport.server import Call, ChannelServer, Session
from tq.client.queue_client import QueueClient
from tq.config import QueueConfig, ScheduleConfig
from tq.control.admission import AdmissionMark, AdmissionState
from tq.control.durable_mark import DurableMark
from tq.control.prompt_admitter import PromptAdmitter, PromptSource
from tq.control.sessions import Sessions
from tq.control.state import (
    Answer,
    Commit,
    ControlState,
    DeadlinePassed,
    Event,
    Fence,
    FenceAll,
    Instruction,
    Lost,
    OwnerGone,
    OwnerWrites,
    Quarantine,
    Quarantined,
    Recovering,
    RecoveryDeadline,
    RowsFinished,
    RowsLost,
    UnitGone,
    UnitLost,
)
from tq.control.task_state import TaskSpec
from tq.control.unit_orders import UnitOrders
from tq.directory import Directory
from tq.messages import (
    CONTROLLER_REQUESTS,
    AckLost,
    Alive,
    Done,
    FetchRound,
    FetchRows,
    GetQueueStats,
    GiveBack,
    Heartbeat,
    Join,
    OpenPartition,
    OutputsWritten,
    PublishVersion,
    QueueStats,
    RegisterUnit,
    RowsConfirmed,
    RowsCreated,
    RowsRemoved,
    Stop,
    WatchLost,
)

logger = logging.getLogger(__name__)

_LONGEST_PARK_S = 3600.0
_CHECKS_PER_TIMEOUT = 8
_RATE_WINDOW_S = 10.0
_TOKENS_PER_START = 40
"""Bits of a token that count leases; those above count starts of the controller."""


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
        version: int = 0,
        last_step: int = 0,
    ) -> None:
        """Start serving.

        Args:
            credentials: store and secret.
            name: one of `config.controllers`; the first one is the lead.
            tasks: of the whole queue, producers before consumers.
            config: settings.
            schedule: the staleness gate; None: no gate.
            prompts: admission's source, on the lead; None: rows come from elsewhere.
            version: step of the weights at the start.
            last_step: admission ends here.
        """
        self.failure: Exception | None = None
        self.failed = threading.Event()
        self._name = name
        self._config = config
        self._directory = Directory(config.controllers, tuple(task.name for task in tasks))
        self._lead = name == self._directory.lead
        self._durable = DurableMark(credentials, name)
        starts = self._durable.start()
        self._recovered = starts > 1
        self._mark = self._durable.load()
        self._mark.newest_version = max(version, self._mark.newest_version)
        self._lock = threading.Lock()
        self._calls: dict[int, _Waiting] = {}
        self._next_request = 0
        self._timers: list[tuple[float, int, Event]] = []
        self._timer_set = threading.Condition(self._lock)
        self._sessions = Sessions()
        self._done_before: dict[str, tuple[float, int]] = {}
        self._started = time.monotonic()
        self._mark_lock = threading.Lock()
        self._saving_losses = threading.Lock()
        self._closed = False
        recovering = None
        self._awaited: set[str] = set()
        """Consumers of an earlier incarnation that have not joined this one, until its recovery gives them up."""
        if self._recovered:
            recovering = Recovering(frozenset(self._durable.names("unit")), frozenset(self._durable.names("owner")))
            self._awaited.update(recovering.owners)
            logger.warning("start %d: waiting for %s", starts, recovering)
        self._state = ControlState(
            tasks,
            served=self._directory.served_by(name),
            max_staleness=schedule.staleness_bound if schedule else 0,
            version=self._mark.newest_version,
            first_token=(starts << _TOKENS_PER_START) + 1,
            row_limit=_row_limit(config, schedule) if self._lead else 0,
            byte_limit=config.max_live_bytes if self._lead else 0,
            refill=prompts is not None,
            recovering=recovering,
        )
        for partition, num_rows in self._mark.partitions.items():
            self._state.handle(OpenPartition(partition, num_rows))
        for partition, rows in self._mark.finished.items():
            self._state.handle(RowsFinished(partition, tuple(rows)))
        if lost := self._durable.load_lost():
            self._state.handle(RowsLost(tuple(lost)))
            self._state.lost_rows()  # durable already
        if self._mark.stopped:
            self._state.handle(Stop())
        self._orders = UnitOrders(credentials, name, timeout_s=config.request_timeout_s, fenced=self._apply)
        self._client = QueueClient(credentials, name, config=config)
        self._admitting: PromptAdmitter | None = None
        if prompts is not None and schedule is not None and self._lead:
            self._admitting = self._make_admitting(schedule, prompts, version=version, last_step=last_step)
        with credentials.borrowed_store() as store:
            self._directory.publish(store)
        limits = Limits(payload_bytes=config.max_message_bytes)
        self._server = ChannelServer(
            credentials, name, CONTROLLER_REQUESTS, self, limits=limits, max_clients=config.max_clients
        )
        self._clock = threading.Thread(target=self._watch_clock, name="clock", daemon=True)
        self._clock.start()
        if recovering is not None:
            with self._lock:
                self._set_timer(config.lease_timeout_s, RecoveryDeadline())
        self._start_admitting()

    def stop(self) -> None:
        """Answer everybody's fetches with `NoRows(stop)` from now on."""
        self._remember(Stop())
        self._apply(Stop())

    def close(self) -> None:
        """Stop serving; idempotent."""
        with self._lock:
            self._closed = True
            self._timer_set.notify_all()
        if self._admitting is not None:
            self._admitting.close()
        self._server.close()
        self._orders.close()
        self._client.close()
        self._clock.join(timeout=5)

    def disconnected(self, session: Session) -> None:
        """A channel ended: a consumer's leases return, except a trainer's; a unit's rows wait for its return."""
        with self._lock:
            for request in [number for number, waiting in self._calls.items() if waiting.call.session == session]:
                del self._calls[request]  # it would keep the channel alive
            owners, units = self._sessions.ended(session.number)
            answers = [answer for owner in owners for answer in self._handle(OwnerGone(owner))]
            for unit in units:
                answers += self._handle(UnitGone(unit))
                self._set_timer(self._config.unit_grace_s, UnitLost(unit))
            finished = self._state.finished_rows() if units else {}
        self._send(answers)
        if self._closed:
            return
        if finished:
            self._remember_finished(finished)
        self._forget(owners)

    def handle(self, call: Call) -> None:
        """Carry out one request of `CONTROLLER_REQUESTS`; some are answered later."""
        message = call.message
        match message:
            case FetchRows() | FetchRound() | WatchLost() | RowsCreated():
                self._ask(message, call, message.timeout_s)
            case RowsConfirmed():
                self._ask(message, call)
            case OutputsWritten() | RowsRemoved() | GiveBack() | AckLost():
                self._apply(message)
                call.reply(Done())
            case Heartbeat():
                self._heartbeat(message, call)
            case Join():
                self._join(message, call)
            case RegisterUnit():
                self._register(message, call)
            case OpenPartition() | Stop():
                self._remember(message)
                self._apply(message)
                call.reply(Done())
            case PublishVersion():
                self._remember(message)
                self._apply(message)
                if self._admitting is not None:
                    self._admitting.add(message.step)
                call.reply(Done())
            case GetQueueStats():
                call.reply(self._stats())

    def _ask(
        self,
        event: FetchRows | FetchRound | WatchLost | RowsCreated | RowsConfirmed,
        call: Call,
        timeout_s: float = 0.0,
    ) -> None:
        with self._lock:
            task = ""
            if isinstance(event, FetchRows | FetchRound):
                task = event.task
                self._sessions.asked(call.session.number, event.owner, time.monotonic())
            request = self._keep(call, task)
            try:
                answers = self._handle(event, request)
            except AsyncFlowError:
                del self._calls[request]
                raise
            if request in self._calls:
                self._set_timer(min(timeout_s, _LONGEST_PARK_S) if timeout_s > 0 else 0.0, DeadlinePassed(request))
        self._send(answers)

    def _heartbeat(self, message: Heartbeat, call: Call) -> None:
        with self._lock:
            known = self._sessions.heard(message.owner, time.monotonic())
            if known and message.writes:
                self._handle(OwnerWrites(message.owner, tuple(message.writes)))
            stats = self._state.units()
        call.reply(Alive(known, stats, self._state.newest_version))

    def _join(self, message: Join, call: Call) -> None:
        self._durable.add("owner", message.owner)
        with self._lock:
            answers = []
            if self._sessions.elsewhere(call.session.number, message.owner):
                answers = self._handle(OwnerGone(message.owner))  # what its broken channel was told never arrived
            self._sessions.joined(call.session.number, message.owner, time.monotonic())
            self._awaited.discard(message.owner)
            answers += self._handle(message, self._keep(call))
        self._send(answers)

    def _register(self, message: RegisterUnit, call: Call) -> None:
        self._durable.add("unit", message.unit)
        self._orders.catch_up(message.unit)
        with self._lock:
            self._sessions.registered(call.session.number, message.unit)
            answers = self._handle(message, self._keep(call))
        self._send(answers)

    def _keep(self, call: Call, task: str = "") -> int:
        """Keep a call until its `Answer` comes; returns the request's number. The lock is held."""
        self._next_request += 1
        self._calls[self._next_request] = _Waiting(call, task, time.monotonic())
        return self._next_request

    def _apply(self, event: Event) -> None:
        with self._lock:
            answers = self._handle(event)
        self._send(answers)

    def _handle(self, event: Event, request: int = 0) -> "list[tuple[Call, Answer]]":
        """Apply an event and hand out its instructions; the lock is held."""
        answers = []
        for instruction in self._state.handle(event, request):
            if isinstance(instruction, Answer):
                waiting = self._calls.pop(instruction.request, None)
                if waiting is not None:
                    answers.append((waiting.call, instruction))
            else:
                self._delegate(instruction)
        self._start_admitting()
        return answers

    def _delegate(self, instruction: Instruction) -> None:
        match instruction:
            case Commit() | Fence() | FenceAll() | Quarantine():
                self._orders.add(instruction)
            case Lost() | Quarantined() if self._admitting is not None:
                self._admitting.add(instruction)
            case Quarantined():
                self._shrink(instruction)

    def _send(self, answers: "list[tuple[Call, Answer]]") -> None:
        if self._state.losses_changed:
            self._remember_losses()
        for call, answer in answers:
            if isinstance(answer.reply, AsyncFlowError):
                call.refuse(answer.reply)
            else:
                call.reply(answer.reply)

    def _set_timer(self, delay_s: float, event: Event) -> None:
        self._next_request += 1
        timer = (time.monotonic() + delay_s, self._next_request, event)
        heapq.heappush(self._timers, timer)
        if self._timers[0] is timer:  # else the clock is up in time anyway
            self._timer_set.notify_all()

    def _watch_clock(self) -> None:
        try:
            while not self._closed:
                self._look_at_clock()
        except Exception as error:  # the boundary of a thread: without it nobody's deadline would ever pass
            if not self._closed:
                logger.exception("the clock failed")
                self._fail(error)

    def _look_at_clock(self) -> None:
        """Do what is due, or wait until something is."""
        with self._lock:
            now = time.monotonic()
            answers = []
            gone: set[str] = set()
            while self._timers and self._timers[0][0] <= now:
                event = heapq.heappop(self._timers)[2]
                answers += self._handle(event)
                if isinstance(event, RecoveryDeadline):  # else every later start would wait for them, too
                    gone, self._awaited = self._awaited, set()
            silent = self._sessions.silent(now, self._config.lease_timeout_s)
            for owner in silent:
                logger.warning("%s was silent for %g s; its leases return", owner, self._config.lease_timeout_s)
                answers += self._give_up(owner)
            if not answers and not silent and not gone:
                check_s = self._config.lease_timeout_s / _CHECKS_PER_TIMEOUT
                until = min(check_s, self._timers[0][0] - now) if self._timers else check_s
                self._timer_set.wait(max(0.0, until))
        self._send(answers)
        self._forget([*gone, *silent])

    def _give_up(self, owner: str) -> "list[tuple[Call, Answer]]":
        """A consumer was silent for too long; should it live on, it must not wait for an answer that never comes."""
        parked = [
            number
            for number, waiting in self._calls.items()
            if isinstance(message := waiting.call.message, FetchRows | FetchRound) and message.owner == owner
        ]
        answers = [answer for number in parked for answer in self._handle(DeadlinePassed(number))]
        return answers + self._handle(OwnerGone(owner))

    def _forget(self, owners: Sequence[str]) -> None:
        """Consumers were given up: the next incarnation does not wait for them, unless they are back already."""
        for owner in owners:
            self._durable.remove("owner", owner)
            with self._lock:
                back = owner in self._sessions.owners
            if back:
                self._durable.add("owner", owner)

    def _make_admitting(
        self, schedule: ScheduleConfig, prompts: PromptSource, *, version: int, last_step: int
    ) -> PromptAdmitter:
        if self._mark.admission is None:
            state = AdmissionState(schedule, version=version, last_step=last_step)
        else:
            state = AdmissionState.from_mark(self._mark.admission, schedule, last_step=last_step)
        return PromptAdmitter(
            state,
            self._client,
            prompts,
            num_units=self._config.num_storage_units,
            save=self._remember_admission,
            failed=self._fail,
        )

    def _start_admitting(self) -> None:
        """Begin as soon as the state knows which rows exist."""
        if self._admitting is None or self._admitting.started or self._state.recovering:
            return
        self._admitting.start(self._state.known_rows() if self._recovered else None)

    def _remember_finished(self, finished: Mapping[int, Collection[int]]) -> None:
        """A unit went away, and with it what it knew of freed rows: a restarted controller must not wait for them."""
        with self._mark_lock:
            for partition, rows in finished.items():
                known = self._mark.finished.get(partition, [])
                self._mark.finished[partition] = sorted({*known, *rows})
            self._durable.save(self._mark)

    def _remember_losses(self) -> None:
        """Before anybody hears of a loss, or of an ack of lost rows."""
        with self._saving_losses:
            with self._lock:
                lost = self._state.lost_rows()
            self._durable.save_lost(lost)

    def _shrink(self, quarantined: Quarantined) -> None:
        """Nobody puts a replacement: the partition has fewer rows from now on, also after a restart."""
        with self._mark_lock:
            if quarantined.partition in self._mark.partitions:
                self._mark.partitions[quarantined.partition] -= quarantined.num_rows
                self._durable.save(self._mark)

    def _fail(self, error: Exception) -> None:
        self.failure = error
        self.failed.set()

    def _remember(self, event: OpenPartition | PublishVersion | Stop) -> None:
        """Make a fact durable before it is acted on."""
        with self._mark_lock:
            match event:
                case OpenPartition():
                    self._mark.partitions[event.partition] = event.num_rows
                case PublishVersion():
                    self._mark.newest_version = max(self._mark.newest_version, event.step)
                case Stop():
                    self._mark.stopped = True
            self._durable.save(self._mark)

    def _remember_admission(self, mark: AdmissionMark) -> None:
        with self._mark_lock:
            self._mark.admission = mark
            self._durable.save(self._mark)

    def _stats(self) -> QueueStats:
        now = time.monotonic()
        admitted = 0 if self._admitting is None else self._admitting.admitted_groups
        with self._lock:
            stats = self._state.stats(admitted)
            stats.owners = self._sessions.owners
            oldest: dict[str, float] = {}
            for waiting in self._calls.values():
                oldest[waiting.task] = min(waiting.since, oldest.get(waiting.task, now))
            for task in stats.tasks:
                task.controller = self._name
                task.oldest_request_s = now - oldest.get(task.task, now)
                before, done = self._done_before.get(task.task, (self._started, 0))
                task.rows_per_s = (task.acked - done) / max(now - before, 1e-3)
                if now - before > _RATE_WINDOW_S:
                    self._done_before[task.task] = (now, task.acked)
        return stats


@dataclass(frozen=True)
class _Waiting:
    """A request that is not answered yet; `task` is "" for those that are not fetches."""

    call: Call
    task: str
    since: float


def _row_limit(config: QueueConfig, schedule: ScheduleConfig | None) -> int:
    if config.max_live_rows or schedule is None:
        return config.max_live_rows
    return schedule.live_rows
