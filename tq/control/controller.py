"""One controller service: the control plane's shell around `ControlState`, and, on the lead, admission.

Threads: the channel server's receivers apply events and send the answers (`StateShell`); `timers` answers parked
requests whose time is up and gives up units and silent consumers; `UnitOrders` tells the units; `admission` puts rows.

    first start      serve at once
    later starts     read the mark, wait for the units' inventories and for the consumers that were there, fence the
                     rest, serve
"""

import logging
import threading
import time
from collections.abc import Sequence
from functools import partial

from asyncflow.errors import AsyncFlowError
from asyncflow.process import ServiceThreads
from asyncflow.transport.frame import Limits
from asyncflow.transport.meeting import Credentials
from asyncflow.transport.server import Call, ChannelServer, Session
from tq.config import QueueConfig
from tq.control.admission import AdmissionPlace, MakeAdmission
from tq.control.connected import Sessions, UnitGraces
from tq.control.durable_facts import DurableMark, Memory
from tq.control.events import (
    DeadlinePassed,
    DoneElsewhere,
    Event,
    OwnerGone,
    OwnerWrites,
    RecoveryDeadline,
    UnitGone,
    UnitLost,
)
from tq.control.lead_questions import LeadQuestions
from tq.control.recovery import Recovering
from tq.control.shell import News, StateShell
from tq.control.state import ControlState
from tq.control.stats import TaskRates
from tq.control.unit_orders import UnitOrders
from tq.directory import Directory, TaskOutputs
from tq.lease_tokens import first_token
from tq.messages import (
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
    OpenPartition,
    OutputsWritten,
    Published,
    PublishVersion,
    QueueStats,
    RegisterUnit,
    Release,
    ReleaseCheckpointed,
    RowsConfirmed,
    RowsCreated,
    RowsRemoved,
    Stop,
    TellLost,
    UnitAlive,
    WatchLost,
)
from tq.owner import replaces
from tq.task_spec import TaskSpec
from tq.timers import Timers

logger = logging.getLogger(__name__)

_CHECKS_PER_TIMEOUT = 8
_LEFT_S = 5.0
"""A consumer that has not joined a restarted controller so long after a stop has left (s)."""


class ControllerService:
    """Serves its part of the control plane under `name` until `close`."""

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
    ) -> None:
        """Start serving.

        Args:
            credentials: store and secret.
            name: one of `config.controllers`; the first one is the lead.
            tasks: of the whole queue, producers before consumers.
            config: settings.
            admission: makes what puts the rows, on the lead; None: others put them.
            refill: the lead's admission replaces dead-letter groups.
            version: step of the weights at the start.
            row_limit: live rows beyond which puts wait, where `config` does not say; 0: none.
            lineage: of the queue: nothing of an earlier one counts.
        """
        self.threads = ServiceThreads(name)
        self._name = name
        self._config = config
        self._directory = Directory(config.controllers, tuple(task.name for task in tasks))
        self._lead = name == self._directory.lead
        self._durable = DurableMark(credentials, name, lineage=lineage)
        starts = self._durable.start()
        self._recovered = starts > 1
        self._memory = memory = Memory(self._durable, version=version)
        self._naming = threading.Lock()
        """Held while a consumer joins, or is forgotten, in the store and here; taken before the shell's lock."""
        self._timers = Timers(name, failed=partial(self.threads.fail, "timers"))
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
            restarted=self._recovered,
        )  # fmt: skip
        self._shell.recall()
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
            self._timers.after(config.lease_timeout_s, self._end_recovery)
        self._shell.start_admission()

    def stop(self) -> None:
        """Reply to every fetch with `NoRows(stop)` from now on.

        A consumer that left during the stop, while this controller was away, never rejoins. A trainer saves only after
        this reply.
        """
        self._memory.remember(Stop())
        self._shell.apply(Stop())
        if self._recovered:
            self._timers.after(_LEFT_S, self._end_recovery)

    def close(self) -> None:
        """Stop serving; idempotent."""
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

    def disconnected(self, session: Session) -> None:
        """A channel ended: a consumer's leases return, except a trainer's; a unit's rows wait for its return."""
        with self._shell.lock:
            owners, units = self._sessions.ended(session.number)
            events: list[Event] = [DeadlinePassed(request) for request in self._shell.calls.drop(session.number)]
            events += [OwnerGone(owner) for owner in owners] + [UnitGone(unit) for unit in units]
            answers = [answer for event in events for answer in self._shell.handle(event)]
            for unit in units:
                self._graces.begin(unit)
        self._shell.send(answers)
        if self._closed:
            return
        if units:
            self._shell.save_finished()
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
            case OutputsWritten() | RowsRemoved() | Release() | AckLost() | ClearPartition():
                self._shell.apply(message)
                call.reply(Done())
            case Heartbeat():
                self._heartbeat(message, call)
            case Join():
                self._join(message, call)
            case RegisterUnit():
                self._register(message, call)
            case OpenPartition() | Stop() | CloseWriting() | PublishVersion():
                self._memory.remember(message)
                self._shell.apply(message)
                call.reply(self._published(message) if isinstance(message, PublishVersion) else Done())
            case ReleaseCheckpointed():
                self._shell.save_finished()
                call.reply(Done())
            case GetQueueStats():
                call.reply(self._stats())
            case UnitAlive():
                with self._shell.lock:
                    self._sessions.unit_heard(call.session.number, time.monotonic())
                call.reply(Done())

    def _create(self, message: RowsCreated, call: Call) -> None:
        with self._shell.lock:
            returning = self._shell.state.any_away(message.rows)
        if returning:
            self._shell.learn_outputs()
        self._ask(message, call, message.timeout_s)

    def _published(self, message: PublishVersion) -> Published:
        if self._shell.admission is None:
            return Published()
        self._shell.admission.add(message.step)
        return Published(list(self._shell.admission.refills[message.refills_known :]))

    def _ask(
        self,
        event: FetchRows | FetchRound | WatchLost | RowsCreated | RowsConfirmed | TellLost,
        call: Call,
        timeout_s: float = 0.0,
    ) -> None:
        with self._shell.lock:
            if isinstance(event, FetchRows | FetchRound):
                self._sessions.asked(call.session.number, event.owner, time.monotonic())
            request = self._shell.calls.add(call)
            try:
                answers = self._shell.handle(event, request)
            except AsyncFlowError:
                self._shell.calls.take(request)
                raise
            self._shell.calls.park(request, timeout_s)
        self._shell.send(answers, event)

    def _heartbeat(self, message: Heartbeat, call: Call) -> None:
        with self._shell.lock:
            known = self._sessions.heard(message.owner, time.monotonic())
            if known and message.writes:
                self._shell.handle(OwnerWrites(message.owner, tuple(message.writes)))
            units, away = self._shell.state.units(), self._shell.state.away()
        call.reply(Alive(known, units, away, self._shell.state.newest_version))

    def _join(self, message: Join, call: Call) -> None:
        message.check_format(message.owner)
        with self._naming:
            self._durable.add("owner", message.owner)
            gone, answers = self._joined(message, call)
        self._shell.send(answers)
        self._forget(gone)

    def _joined(self, message: Join, call: Call) -> tuple[list[str], News]:
        """Returns who is gone since this consumer is here, and what to tell."""
        with self._shell.lock:
            gone = [other for other in {*self._sessions.owners, *self._awaited} if replaces(message.owner, other)]
            self._sessions.gone(gone)
            self._awaited.difference_update(gone)
            answers = [answer for other in gone for answer in self._shell.handle(OwnerGone(other))]
            if self._sessions.elsewhere(call.session.number, message.owner):
                answers += self._shell.handle(OwnerGone(message.owner))  # its broken channel delivered nothing
            self._sessions.joined(call.session.number, message.owner, time.monotonic())
            self._awaited.discard(message.owner)
            answers += self._shell.handle(message, self._shell.calls.add(call))
        return gone, answers

    def _register(self, message: RegisterUnit, call: Call) -> None:
        message.check_format(message.unit)
        self._durable.add("unit", message.unit)
        self._shell.learn_outputs()
        answers = None
        while answers is None:
            self._shell.orders.catch_up(message.unit)
            answers = self._registered(message, call)
        self._shell.save_finished()  # an earlier life of the unit may have known of them
        self._shell.send(answers)

    def _registered(self, message: RegisterUnit, call: Call) -> News | None:
        """Returns what to tell; None: the unit must be told something first, a fence say, before its rows go out."""
        with self._shell.lock:
            if self._shell.orders.owes(message.unit):
                return None
            self._sessions.registered(call.session.number, message.unit, time.monotonic())
            self._graces.end(message.unit)
            return self._shell.handle(message, self._shell.calls.add(call))

    def _hear_done(self, event: DoneElsewhere) -> None:
        self._shell.learn_outputs()
        self._shell.apply(event)

    def _look_for_silent(self) -> None:
        """Give up consumers that were not heard of; again and again."""
        timeout_s = self._config.lease_timeout_s
        with self._shell.lock:
            silent = self._sessions.silent(time.monotonic(), timeout_s)
            answers = [answer for owner in silent for answer in self._give_up(owner)]
        self._shell.send(answers)
        self._forget(silent)
        self._timers.after(timeout_s / _CHECKS_PER_TIMEOUT, self._look_for_silent)

    def _look_for_silent_units(self) -> None:
        """Cut off units that were not heard of, a stopped process say; when they go on they register again."""
        timeout_s = self._config.unit_timeout_s
        with self._shell.lock:
            silent = self._sessions.silent_units(time.monotonic(), timeout_s)
        for unit, session in silent:
            logger.warning("%s was silent for %g s; it counts as away", unit, timeout_s)
            self._server.cut_off(session)
        self._timers.after(timeout_s / _CHECKS_PER_TIMEOUT, self._look_for_silent_units)

    def _give_unit_up(self, unit: str, grace: int) -> None:
        with self._shell.lock:
            answers = self._shell.handle(UnitLost(unit)) if self._graces.over(unit, grace) else []
        self._shell.send(answers)

    def _end_recovery(self) -> None:
        with self._shell.lock:
            answers = self._shell.handle(RecoveryDeadline())
            gone, self._awaited = self._awaited, set()
        self._shell.send(answers)
        self._forget(list(gone))  # else every later start would wait for them, too

    def _give_up(self, owner: str) -> News:
        """A consumer was silent for too long; should it live on, it must not wait for an answer that never comes."""
        logger.warning("%s was silent for %g s; its leases return", owner, self._config.lease_timeout_s)
        parked = self._shell.calls.fetches_of(owner)
        answers = [answer for request in parked for answer in self._shell.handle(DeadlinePassed(request))]
        return answers + self._shell.handle(OwnerGone(owner))

    def _forget(self, owners: Sequence[str]) -> None:
        """Consumers were given up: the next incarnation does not wait for them, unless they are back already.

        Trainers whose leases outlive their channel are kept: they come back.
        """
        with self._naming:
            for owner in owners:
                with self._shell.lock:
                    expected = owner in self._sessions.owners or self._shell.state.keeps_leases(owner)
                if not expected:
                    self._durable.remove("owner", owner)

    def _stats(self) -> QueueStats:
        now = time.monotonic()
        admitted = 0 if self._shell.admission is None else self._shell.admission.admitted_groups
        with self._shell.lock:
            stats = self._shell.state.stats(admitted)
            stats.owners = self._sessions.owners
            oldest = self._shell.calls.waiting_since()
            for task in stats.tasks:
                task.controller = self._name
                task.oldest_request_s = now - oldest.get(task.task, now)
            self._rates.note(stats.tasks, now)
        return stats
