"""Applies events to a controller's state, one after another. Results are durable before any process is told.

Calls that are not answered yet wait here, each with its deadline:

    keep --> take (answered)
        '-> park --> take (answered; the deadline is off) | its time is up --> `expired`
"""

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TypeGuard

from msgspec.structs import replace

from asyncflow.errors import AsyncFlowError, SealBroken
from asyncflow.process import ServiceThreads
from asyncflow.transport.server import Call
from tq.control.admission import Admission
from tq.control.durable_facts import Memory
from tq.control.events import (
    Answer,
    Cleared,
    Commit,
    DeadlinePassed,
    Event,
    Fence,
    FenceAll,
    GroupRemoved,
    Lost,
    RemoveGroup,
    Shrunk,
    TasksWrite,
)
from tq.control.row_set import RowSet
from tq.control.state import ControlState
from tq.control.unit_orders import UnitOrders
from tq.messages import (
    FetchRound,
    FetchRows,
    LeaseGrant,
    Message,
    NoRows,
    RowRecords,
    RowsConfirmed,
    RowsCreated,
    UnitLoss,
)
from tq.timers import Timer, Timers

NewsItem = tuple[Call, Answer] | Lost | GroupRemoved | Shrunk | Cleared
News = list[NewsItem]
"""Messages that are sent when the lock is released."""

_LONGEST_PARK_S = 3600.0


class StateShell:
    """The state with its lock, parked calls and listeners (units, durable facts, admission).

    No thread calls another process while holding the lock.
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
    ) -> None:
        """Args:
        state: of the controller.
        memory: its durable facts.
        timers: run the deadlines of calls.
        threads: the controller's.
        outputs: reads task -> the columns that it was seen to write.
        orders: makes what tells the units; `fenced` is called with every fence that holds.
        restarted: this is not the controller's first start.
        """
        self.state = state
        self.lock = threading.Lock()
        self.calls = PendingRequests(timers, lambda request: self.apply(DeadlinePassed(request)))
        self.orders = orders(fenced=self.apply)
        self.admission: Admission | None = None
        self._memory = memory
        self._outputs = outputs
        self._threads = threads
        self._restarted = restarted

    def recall(self) -> None:
        """Tell the state what earlier incarnations left."""
        self.state.handle(TasksWrite(self._outputs()))
        for event in self._memory.events():
            self.state.handle(event)
        self.state.take_finished()  # durable already, as are these:
        self.state.take_losses()

    def apply(self, event: Event) -> None:
        """Apply an event and tell what follows; the lock is not held."""
        with self.lock:
            answers = self.handle(event)
        self.send(answers)

    def handle(self, event: Event, request: int = 0) -> News:
        """Apply an event and return what to `send`; the lock is held."""
        news: News = []
        for instruction in self.state.handle(event, request):
            match instruction:
                case Answer():
                    call = self.calls.take(instruction.request)
                    if call is not None:
                        news.append((call, instruction))
                case Commit() | Fence() | FenceAll() | RemoveGroup():
                    self.orders.add(instruction)
                case Lost() | GroupRemoved() | Shrunk() | Cleared():
                    news.append(instruction)
        self.start_admission()
        return news

    def send(self, news: News, event: Event | None = None) -> None:
        """Tell clients, units and admission; the lock is not held. Fetches go first: rows wait for these answers.

        Args:
            news: what follows from an event.
            event: if it may have brought the values of its rows.
        """
        with self.failing("durable facts"):
            self._make_durable(news)  # before any process is told
        for one in sorted(news, key=_can_wait) if len(news) > 1 else news:
            match one:
                case Lost() | GroupRemoved() if self.admission is not None:
                    self.admission.add(one)
                case (call, Answer(reply=AsyncFlowError() as error)):
                    call.refuse(error)
                case (call, Answer(reply=LeaseGrant() as grant)) if _brings(event, grant, call.message):
                    call.reply(replace(grant, values=event.values))
                case (call, Answer(reply=reply)):
                    call.reply(reply)

    def _make_durable(self, news: News) -> None:
        """What left with its group is written before the losses: a row that is in neither would be missed for ever."""
        for one in news:
            if isinstance(one, Shrunk):
                self._memory.remember_removed(one.partition, self._removed)
        if self.state.losses_changed or self._memory.saving_losses.locked():
            self._memory.remember_losses(self._losses)
        for one in news:
            if isinstance(one, Cleared):
                self._memory.clear(one.partition)
                self._memory.remember_removed(one.partition, self._removed)

    def _removed(self, partition: int) -> RowSet:
        with self.lock:
            return self.state.removed_rows(partition)

    def losses_to_tell(self) -> list[UnitLoss]:
        """Return what went with units, for the lead."""
        with self.lock:
            return self.state.losses()

    def learn_outputs(self) -> None:
        """Hear what tasks write: an earlier incarnation or another controller may have been told, but not this one."""
        with self.failing("outputs of tasks", SealBroken):
            outputs = self._outputs()
        self.apply(TasksWrite(outputs))

    def save_finished(self) -> None:
        """Make durable which rows are finished; the lock is not held."""
        with self.failing("durable facts"):
            self._memory.remember_finished(self._newly_finished)

    def _newly_finished(self) -> dict[int, RowSet]:
        with self.lock:
            return self.state.take_finished()

    def _losses(self) -> tuple[dict[int, RowSet], dict[int, list[RowRecords]]] | None:
        with self.lock:
            if not self.state.losses_changed:
                return None
            return self.state.take_finished(), self.state.take_losses()

    @contextlib.contextmanager
    def failing(self, what: str, kind: type[Exception] = Exception) -> Iterator[None]:
        """If that fails, so has the service: it starts again, and rebuilds everything."""
        try:
            yield
        except kind as error:
            self._threads.fail(what, error)
            raise

    def start_admission(self) -> None:
        """Begin as soon as the state knows which rows exist."""
        if self.admission is None or self.admission.started or self.state.recovering:
            return
        self.admission.start(self.state.known_rows() if self._restarted else None)


class PendingRequests:
    """Calls that wait, by request number. The caller holds the shell's lock. Never answers."""

    def __init__(self, timers: Timers, expired: Callable[[int], None]) -> None:
        """Args:
        timers: run the deadlines.
        expired: called without the lock with a request whose time is up, though it may just be answered.
        """
        self._timers = timers
        self._expired = expired
        self._pending: dict[int, _Pending] = {}
        self._newest = 0

    def add(self, call: Call) -> int:
        """Keep a call until it is taken; returns the request's number."""
        self._newest += 1
        self._pending[self._newest] = _Pending(call, time.monotonic())
        return self._newest

    def park(self, request: int, timeout_s: float) -> None:
        """Set the deadline of a request, unless it was answered."""
        pending = self._pending.get(request)
        if pending is not None:
            delay_s = min(max(0.0, timeout_s), _LONGEST_PARK_S)
            pending.deadline = self._timers.after(delay_s, partial(self._expired, request))

    def take(self, request: int) -> Call | None:
        """Return the call, which is to be answered now, once."""
        pending = self._pending.pop(request, None)
        return None if pending is None else pending.let_go()

    def drop(self, session: int) -> list[int]:
        """A channel ended: its calls need no reply, and would keep it alive. Returns the requests."""
        requests = [number for number, pending in self._pending.items() if pending.call.session.number == session]
        for number in requests:
            self.take(number)
        return requests

    def fetches_of(self, owner: str) -> list[int]:
        """Return the fetches of a consumer."""
        return [
            number
            for number, pending in self._pending.items()
            if isinstance(message := pending.call.message, FetchRows | FetchRound) and message.owner == owner
        ]

    def waiting_since(self) -> dict[str, float]:
        """Return, per task, when its oldest fetch began to wait (s, monotonic)."""
        oldest: dict[str, float] = {}
        for pending in self._pending.values():  # in the order of their coming
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
    """Whether an event has the values of a lease: a put of exactly these rows, where they are."""
    if not isinstance(event, RowsCreated | RowsConfirmed) or not event.values or not isinstance(fetch, FetchRows):
        return False
    return grant.rows == event.rows and grant.units.count(event.unit) == len(event.rows)


def _can_wait(one: NewsItem) -> bool:
    """Whether this is no answer to a fetch."""
    return not (isinstance(one, tuple) and isinstance(one[1].reply, LeaseGrant | NoRows))
