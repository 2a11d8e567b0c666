"""A client's session with the queue: its name, channels to services, heartbeats, deadlines, and the leases it holds.

Called by `QueueClient` and `DataPlane`. The session knows which service does what and how long to wait, not what is
asked. It waits for a controller that restarts and joins it again; it waits for a unit until the caller's deadline.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import TimeoutError as FutureTimeout
from functools import cached_property, partial
from typing import Any, TypeVar

from asyncflow.errors import DeadlineExceeded, LeaseFenced, PeerRefused, SealBroken, TransportError
from asyncflow.transport.frame import Limits
from asyncflow.transport.meeting import Credentials
from asyncflow.transport.server import Connection, Reply
from tq.client.heartbeat import Heartbeats
from tq.config import QueueConfig
from tq.directory import Directory, TaskOutputs, allocate_rows, reserve_rows
from tq.messages import (
    CONTROLLER_REPLIES,
    UNIT_REPLIES,
    FetchRound,
    FetchRows,
    Held,
    Join,
    Joined,
    LeaseGrant,
    Message,
)
from tq.owner import new_owner
from tq.service_channels import ServiceChannels, await_reply

_BEATS_PER_TIMEOUT = 4
_GRACE_S = 30.0
"""How long a client waits for an answer beyond the request's own deadline, which the service keeps (s)."""
_LEAST_S = 0.5
_RETRY_S = 0.1
_LOOK_S = 1.0
"""How often a wait for a unit looks whether the unit is still up (s)."""
_ROW_BLOCK = 1024

M = TypeVar("M", bound=Message)
T = TypeVar("T")


class QueueSession:
    """Controllers and units as one client sees them. Thread-safe."""

    def __init__(
        self,
        credentials: Credentials,
        name: str,
        *,
        config: QueueConfig,
        stop: threading.Event,
        attempt: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Args:
        credentials: store and secret.
        name: of this process.
        config: limits and deadlines.
        stop: once set, services that are gone are not waited for.
        attempt: see `tq.owner`.
        clock: seconds, for deadlines.
        """
        self.outputs = TaskOutputs(credentials)
        """What tasks write."""
        self.owner = new_owner(name, attempt)
        """The consumer with its incarnation."""
        self._credentials = credentials
        self._config = config
        self._stop = stop
        self._clock = clock
        self.held = HeldLeases()
        """What a controller is told when this client joins it."""
        limits = Limits(payload_bytes=config.max_message_bytes, shared_memory=config.shared_memory)
        self._links = ServiceChannels(credentials, name, limits, self._greet)
        interval_s = config.lease_timeout_s / _BEATS_PER_TIMEOUT
        self.beats = Heartbeats(self.owner, interval_s, join=self.controller, rejoin=self._rejoin)
        """Sign of life, and what comes back with it."""
        self._rows_lock = threading.Lock()
        self._rows = range(0)
        self._reserved = 0

    @cached_property
    def directory(self) -> Directory:
        """Which controller serves which task."""
        with self._credentials.borrowed_store() as store:
            return Directory.read(store)

    def declare_outputs(self, columns: Iterable[str]) -> None:
        """See `QueueClient`."""
        self.beats.writes(columns)
        for controller in self.directory.controllers:
            self.beats.watch(controller)

    def units(self) -> dict[str, int]:
        """Return the units that are up, with the bytes that they hold, as the lead controller said last."""
        return self.beats.units(self.directory.lead)

    def may_answer(self, unit: str) -> bool:
        """Whether a unit is up, or may come back with its rows, as the lead controller said last."""
        return unit in self.units() or unit in self.beats.away(self.directory.lead)

    def deadline(self, timeout_s: float | None = None) -> "Deadline":
        """Begin a call that has so long, by default `request_timeout_s`."""
        return Deadline(self.seconds(timeout_s), self._clock)

    def seconds(self, timeout_s: float | None) -> float:
        """Return how long a call has (s): what was asked for, by default `request_timeout_s`."""
        return self._config.request_timeout_s if timeout_s is None else timeout_s

    def unit(self, name: str, timeout_s: float | None = None) -> Connection:
        """Return the channel to a unit; raises TransportError when it is gone."""
        return self._links.get(name, UNIT_REPLIES, timeout_s=timeout_s)

    def controller(self, name: str, timeout_s: float | None = None) -> Connection:
        """Return the channel to a controller, joined; raises TransportError when it is gone."""
        return self._links.get(name, CONTROLLER_REPLIES, timeout_s=timeout_s)

    def call(self, controller: str, message: Message, timeout_s: float | None = None) -> Any:
        """Ask a controller once.

        Args:
            controller: service name.
            message: request.
            timeout_s: how long it may park.

        Raises:
            TransportError: it is gone or does not answer.
            PeerRefused, LeaseFenced: it answered no.
        """
        wait_s = self.seconds(timeout_s) + _GRACE_S
        return self.controller(controller, wait_s).call(message, timeout_s=wait_s)[0]

    def ask(self, controller: str, message: Message, timeout_s: float | None = None) -> Any:
        """Like `call`, but a controller that is gone may come back meanwhile."""
        return self.retry_until(lambda: self.call(controller, message, timeout_s), self.deadline(timeout_s))

    def post(self, controller: str, message: Message) -> None:
        """Send a message over an open channel without waiting for the answer; without a channel it is dropped.

        It is carried out unless the controller or the channel goes: then this client joins anew.
        """
        connection = self._links.opened(controller)
        if connection is not None:
            with contextlib.suppress(TransportError):
                connection.submit(message)

    def tell_controllers(self, message: Message) -> list[Any]:
        """Send one message to every controller; returns their answers, the lead's first."""
        return [self.ask(service, message) for service in self.directory.controllers]

    def tell_units(
        self, message: Message, answer: type[M], *, every: bool = False, timeout_s: float | None = None
    ) -> dict[str, M]:
        """Send one message to the units that are up; returns their answers.

        Args:
            message: the same for all.
            answer: what they reply.
            every: first wait until no unit is away that may come back with its rows (killed, starting again).
            timeout_s: for all of it; default `request_timeout_s`.

        Raises:
            TransportError: a unit did not answer in time, or, with `every`, was away all the time.
        """
        deadline = self.deadline(timeout_s)
        self.retry_until(partial(self._find_units, every=every), deadline)
        futures = {unit: self.unit(unit, deadline.left_s).submit(message) for unit in sorted(self.units())}
        return {
            unit: expect(self.answer(future, unit, message, deadline.left_s), answer)
            for unit, future in futures.items()
        }

    def answer(self, future: Any, service: str, message: Message, timeout_s: float | None = None) -> Any:
        """Wait for the reply to a submitted message; returns it without its payload."""
        return self.reply(future, service, message, timeout_s)[0]

    def reply(self, future: Any, service: str, message: Message, timeout_s: float | None = None) -> Reply:
        """Wait for the reply to a submitted message, with its payload.

        Raises:
            TransportError: none came in time, or the service is a unit that the lead controller counts as away
                meanwhile: it may be stopped, and another one take the rows.
        """
        deadline = self._clock() + self.seconds(timeout_s)
        absence = Absence(self._clock)
        while (left_s := deadline - self._clock()) > _LOOK_S:
            with contextlib.suppress(FutureTimeout):
                reply: Reply = future.result(_LOOK_S)
                return reply
            if service in self.directory.controllers:
                continue
            if absence.lasts(away=self._is_away(service)) > self._config.unit_timeout_s:
                raise TransportError(f"{service} does not answer {type(message).__name__}, and counts as away")
        return await_reply(future, service, type(message).__name__, max(0.0, left_s))

    def _is_away(self, unit: str) -> bool:
        lead = self.directory.lead
        with contextlib.suppress(TransportError):
            self.beats.beat(lead, timeout_s=_LOOK_S)
            return unit not in self.beats.units(lead)
        return False

    def retry_until(self, attempt: Callable[[], T], deadline: "Deadline") -> T:
        """Try until it works or is refused, while services that are gone may come back.

        Raises:
            DeadlineExceeded: it did not work in time; says what came in the way last.
            TransportError: the same, but this client is closed, or its run stops.
        """
        while True:
            try:
                return attempt()
            except (PeerRefused, LeaseFenced, SealBroken):
                raise
            except TransportError as error:
                if deadline.passed:
                    raise DeadlineExceeded(f"{self.owner} tried for {deadline.timeout_s:g} s: {error}") from error
                if self._links.closed or self._stop.wait(_RETRY_S):
                    if error.deadline:  # it was the last attempt's: this call's has not passed
                        raise TransportError(str(error)) from error
                    raise

    def new_rows(self, number: int) -> range:
        """Return row indices that no other client has; asks the store once per block."""
        with self._rows_lock:
            if len(self._rows) < number:
                with self._credentials.borrowed_store() as store:
                    self._rows = allocate_rows(store, max(number, _ROW_BLOCK))
            taken, self._rows = self._rows[:number], self._rows[number:]
        return taken

    def reserve_rows(self, rows: Sequence[int]) -> None:
        """Let `new_rows`, here or elsewhere, return none of these; asks the store once per block of ascending rows.

        Rows that another client was given before, and has not put yet, are beyond its reach.
        """
        if not rows:
            return
        with self._rows_lock:
            last = max(rows)
            if min(rows) < self._rows.stop and last >= self._rows.start:
                self._rows = range(last + 1, max(last + 1, self._rows.stop))
            if last >= self._reserved:
                with self._credentials.borrowed_store() as store:
                    self._reserved = max(last + 1, reserve_rows(store, last + _ROW_BLOCK))

    def close(self) -> None:
        """Close all channels; idempotent."""
        self._links.close()
        self.beats.close()

    def _find_units(self, *, every: bool) -> None:
        lead = self.directory.lead
        self.beats.beat(lead)
        away = self.beats.away(lead)
        if every and away:
            raise TransportError(
                f"storage units are away: {' '.join(away)}; this needs the rows of all units, so ask again when they "
                f"are back, or are given up (unit_grace_s)"
            )

    def _greet(self, service: str, connection: Connection) -> None:
        if service in self.directory.controllers:
            self._join(service, connection)
            self.beats.watch(service)

    def _rejoin(self, service: str) -> None:
        self._join(service, self.controller(service))

    def _join(self, service: str, connection: Connection) -> None:
        tasks = self.directory.served_by(service)
        message = Join(self.owner, self.held.of_tasks(tasks))
        joined = expect(self.answer(connection.submit(message), service, message), Joined)
        self.held.void(tasks, joined.void)


class Deadline:
    """The deadline of one call, shared by all services that the call asks; begins when it is made."""

    def __init__(self, timeout_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.timeout_s = timeout_s
        """How long the whole call has (s)."""
        self._clock = clock
        self._end = clock() + timeout_s

    @property
    def passed(self) -> bool:
        """Whether the time is up."""
        return self._clock() >= self._end

    @property
    def left_s(self) -> float:
        """How long the next service may take (s).

        Never zero: else one silent service would make the services that are asked after it look silent, every time.
        """
        return max(_LEAST_S, self._end - self._clock())


class HeldLeases:
    """The leases that a client holds. Thread-safe; a lease leaves when its last row is done, released or void."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: dict[tuple[str, int], Held] = {}

    def granted(self, fetch: FetchRows | FetchRound, answer: LeaseGrant) -> None:
        """A lease was given; the same one again changes nothing."""
        held = Held(fetch.task, answer.token, answer.partition, list(answer.rows))
        if isinstance(fetch, FetchRound):
            held.round_index, held.rank, held.num_ranks = fetch.round_index, fetch.rank, fetch.num_ranks
            held.round_rows, held.last, held.total_rows = answer.round_rows, answer.last, answer.total_rows
            held.step, held.slice_rows = fetch.partition, len(answer.rows)
        elif not answer.rows:
            return
        with self._lock:
            self._held.setdefault((fetch.task, answer.token), held)
            if isinstance(fetch, FetchRound):
                self._forget_old_rounds(fetch.task, fetch.partition)

    def done(self, grant: LeaseGrant, rows: Iterable[int]) -> None:
        """Rows left the lease: put, acked or released."""
        key, gone = (grant.task, grant.token), set(rows)
        with self._lock:
            held = self._held.get(key)
            if held is not None:
                held.rows = [row for row in held.rows if row not in gone]
                if not held.rows and held.round_index < 0:  # rounds stay: other ranks may still want their slices
                    del self._held[key]

    def void(self, tasks: Collection[str], tokens: Collection[int]) -> None:
        """A controller does not count these as this client's any more."""
        with self._lock:
            for task in tasks:
                for token in tokens:
                    self._held.pop((task, token), None)

    def forget(self, grant: LeaseGrant) -> None:
        """Another reader of the lease answers for it."""
        with self._lock:
            self._held.pop((grant.task, grant.token), None)

    def of_tasks(self, tasks: Collection[str]) -> list[Held]:
        """Return what is held of these tasks."""
        with self._lock:
            return [held for (task, _), held in self._held.items() if task in tasks]

    def _forget_old_rounds(self, task: str, step: int) -> None:
        over = [key for key, held in self._held.items() if key[0] == task and not held.rows and held.step < step - 1]
        for key in over:
            del self._held[key]


def expect(reply: Any, kind: type[M]) -> M:
    """Return `reply` if it is what the protocol says.

    Raises:
        TransportError: it is something else.
    """
    if isinstance(reply, kind):
        return reply
    raise TransportError(f"expected {kind.__name__}, got {type(reply).__name__}")


class Absence:
    """How long a unit has counted as away, by the lead's repeated answers.

    Time before the first "away" does not count: the lead was not asked, did not answer, or had just restarted.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        """Args:
        clock: seconds.
        """
        self._clock = clock
        self._since: float | None = None

    def lasts(self, *, away: bool) -> float:
        """Take in an answer; return for how long (s) all answers have been "away"."""
        if not away:
            self._since = None
        elif self._since is None:
            self._since = self._clock()
        return 0.0 if self._since is None else self._clock() - self._since
