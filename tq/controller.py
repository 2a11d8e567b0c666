"""The controller service: the control plane's shell around `ControlState` and `AdmissionState`.

Threads: the channel server's receivers apply events under one lock and send the answers; `deadlines` answers parked
requests whose time is up; `housekeeping` carries fences and frees to the units; `admission` puts new prompts.
Nobody calls another process while holding the lock.
"""

import heapq
import logging
import queue
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec

from asyncflow.errors import TransportError
from asyncflow.transport.handshake import Credentials
from asyncflow.transport.server import Call, ChannelServer, Session
from tq.admission import AdmissionState, AdmittedGroup
from tq.batch import Column
from tq.client import QueueClient
from tq.config import QueueConfig, ScheduleConfig
from tq.control import Answer, ControlState, DeadlinePassed, Event, Fence, Fenced, Free, Instruction, OwnerGone
from tq.messages import (
    CONTROLLER_REQUESTS,
    Done,
    FetchRound,
    FetchRows,
    GetQueueStats,
    OpenPartition,
    PublishVersion,
    Stop,
)
from tq.task_state import TaskSpec

logger = logging.getLogger(__name__)

_GROUPS_PER_PUT = 64
_LONGEST_PARK_S = 3600.0


class PromptSource(Protocol):
    """Where admission takes prompts from."""

    def columns(self, groups: Sequence[AdmittedGroup]) -> Mapping[str, Column]:
        """Return the first columns of all rows of `groups`, group after group."""


class ControllerService:
    """Serves the control plane under `name` until `close`."""

    def __init__(
        self,
        credentials: Credentials,
        name: str,
        *,
        units: Sequence[str],
        tasks: Sequence[TaskSpec],
        config: QueueConfig,
        schedule: ScheduleConfig,
        prompts: PromptSource | None = None,
        version: int = 0,
        last_step: int = 0,
    ) -> None:
        """Start serving.

        Args:
            credentials: store and secret.
            name: service name.
            units: names of the storage units.
            tasks: see `ControlState`.
            config, schedule: settings.
            prompts: admission's source; None: rows come from elsewhere.
            version: step of the weights at the start.
            last_step: admission ends here.
        """
        self._state = ControlState(tasks, max_staleness=schedule.staleness_bound, version=version)
        self._admission = AdmissionState(schedule, version=version, last_step=last_step)
        self._prompts = prompts
        self._config = config
        self._units = tuple(units)
        self._lock = threading.Lock()
        self._calls: dict[int, Call] = {}
        self._next_request = 0
        self._deadlines: list[tuple[float, int]] = []
        self._wake_deadlines = threading.Condition(self._lock)
        self._chores: queue.SimpleQueue[Fence | Free | None] = queue.SimpleQueue()
        self._versions: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self.failure: Exception | None = None
        self.failed = threading.Event()
        self._closed = False
        self._client = QueueClient(credentials, name, controller=name, config=config)
        self._server = ChannelServer(credentials, name, CONTROLLER_REQUESTS, self, max_clients=config.max_clients)
        self._threads = [
            threading.Thread(target=self._guard, args=(target,), name=target.__name__.strip("_"), daemon=True)
            for target in (self._watch_deadlines, self._do_chores, self._admit)
        ]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Answer everybody's fetches with `NoRows(stop)` from now on."""
        self._apply(Stop())

    def close(self) -> None:
        """Stop serving; idempotent."""
        with self._lock:
            self._closed = True
            self._wake_deadlines.notify_all()
        self._chores.put(None)
        self._versions.put(None)
        self._server.close()
        self._client.close()
        for thread in self._threads:
            thread.join(timeout=5)

    def disconnected(self, session: Session) -> None:
        """A client's leases return, except a trainer's."""
        with self._lock:
            answers = self._sort(self._state.handle(OwnerGone(_owner(session))))
            for request in [number for number, call in self._calls.items() if call.session == session]:
                del self._calls[request]  # it would keep the channel alive
        self._send(answers)

    def handle(self, call: Call) -> None:
        """Carry out one request of `CONTROLLER_REQUESTS`; fetches may be answered later."""
        message = call.message
        match message:
            case FetchRows() | FetchRound():
                self._fetch(message, call)
            case GetQueueStats():
                with self._lock:
                    stats = self._state.stats(self._admission.admitted_groups)
                call.reply(stats)
            case PublishVersion():
                self._apply(message)
                self._versions.put(message.step)
                call.reply(Done())
            case _:
                self._apply(message)
                call.reply(Done())

    def _fetch(self, message: FetchRows | FetchRound, call: Call) -> None:
        event = msgspec.structs.replace(message, owner=_owner(call.session))
        with self._lock:
            self._next_request += 1
            request = self._next_request
            self._calls[request] = call
            try:
                instructions = self._state.handle(event, request)
            except TransportError:
                del self._calls[request]
                raise
            timeout_s = min(message.timeout_s, _LONGEST_PARK_S) if message.timeout_s > 0 else 0.0
            if not any(isinstance(instruction, Answer) for instruction in instructions):
                heapq.heappush(self._deadlines, (time.monotonic() + timeout_s, request))
                self._wake_deadlines.notify_all()
            answers = self._sort(instructions)
        self._send(answers)

    def _apply(self, event: Event) -> None:
        with self._lock:
            answers = self._sort(self._state.handle(event))
        self._send(answers)

    def _sort(self, instructions: list[Instruction]) -> list[tuple[Call, Answer]]:
        answers = []
        for instruction in instructions:
            if isinstance(instruction, Answer):
                answers.append((self._calls.pop(instruction.request), instruction))
            else:
                self._chores.put(instruction)
        return answers

    @staticmethod
    def _send(answers: list[tuple[Call, Answer]]) -> None:
        for call, answer in answers:
            call.reply(answer.reply)

    def _watch_deadlines(self) -> None:
        while not self._closed:
            with self._lock:
                now = time.monotonic()
                passed = []
                while self._deadlines and self._deadlines[0][0] <= now:
                    passed.append(heapq.heappop(self._deadlines)[1])
                if not passed:
                    until = self._deadlines[0][0] - now if self._deadlines else None
                    self._wake_deadlines.wait(until)
            for request in passed:
                self._apply(DeadlinePassed(request))

    def _do_chores(self) -> None:
        while (chore := self._chores.get()) is not None:
            if isinstance(chore, Free):
                self._client.drop(chore.unit, chore.rows)
                continue
            for unit, rows in chore.rows.items():
                self._client.fence(unit, chore.task, chore.token, rows)
            self._apply(Fenced(chore.task, chore.token))

    def _admit(self) -> None:
        while True:
            for step in self._admission.admissible():
                self._admit_step(step)
            version = self._versions.get()
            if version is None:
                return
            self._admission.published(version)

    def _admit_step(self, step: int) -> None:
        if self._prompts is None:
            return
        groups = self._admission.groups_of(step)
        self._apply(OpenPartition(step, sum(len(group.rows) for group in groups)))
        for start in range(0, len(groups), _GROUPS_PER_PUT):
            chunk = groups[start : start + _GROUPS_PER_PUT]
            for k, unit in enumerate(self._units):
                part = chunk[k :: len(self._units)]
                if part:
                    self._client.put_rows(
                        unit,
                        step,
                        rows=[row for group in part for row in group.rows],
                        groups=[group.group for group in part for _ in group.rows],
                        columns=dict(self._prompts.columns(part)),
                    )

    def _guard(self, target: "_Loop") -> None:
        try:
            target()
        except Exception as error:  # the boundary of a thread: without it the whole service is dead
            if not self._closed:
                logger.exception("%s failed", target.__name__)
                self.failure = error
                self.failed.set()


class _Loop(Protocol):
    __name__: str

    def __call__(self) -> None: ...


def _owner(session: Session) -> str:
    return f"{session.client}#{session.number}"
