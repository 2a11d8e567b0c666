"""One unit's link to one controller: registers whenever the channel is new, then tells what changed, in that order.

    down --connected--> registering --UnitAccepted--> up --channel broke--> down --...      (forever, until `close`)
                        inventory, then every later change

The inventory is taken under the unit's lock, at the moment in which the channel becomes the one to use, so nothing is
missed and nothing is told before it. What was unconfirmed when a channel broke is in the next inventory.
Two threads: one connects and waits for the end of a channel, one sends. No handler ever waits for either.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

from asyncflow.errors import AsyncFlowError, DeadlineExceeded, LeaseFenced, PeerRefused, PutPending, TransportError
from asyncflow.process import ServiceThreads
from asyncflow.transport.frame import Limits
from asyncflow.transport.meeting import Credentials
from asyncflow.transport.server import Connection, Reply
from tq.messages import CONTROLLER_REPLIES, Message, OutputsWritten, RegisterUnit, RowsCreated, UnitAccepted
from tq.timers import Timer, Timers
from tq.unit.row_journal import Change, RowJournal

logger = logging.getLogger(__name__)

Completions = list[tuple["Future[Any]", Any]]  # futures to complete once the lock is released, with a reply or an error

_FIRST_BACKOFF_S = 0.05
_LAST_BACKOFF_S = 2.0
# After proving themselves, two ends meet in Gloo, which cannot be interrupted; `close` waits for it (s).
_HANDSHAKE_S = 4.0
_CLOSE_TIMEOUT_S = 5.0


class Host(Protocol):
    """The unit behind a link, called with the unit's lock held."""

    def inventory(self) -> RegisterUnit:
        """Return what the unit holds now."""

    def note_accepted(self, reply: UnitAccepted) -> Completions:
        """A controller took the inventory."""

    def is_registered(self) -> bool:
        """Whether any controller has taken an inventory."""


@dataclass(eq=False)
class Notice:
    """A notification that is not confirmed yet; `covered`: an inventory that was sent after it contains it."""

    message: Message
    future: "Future[Any]"
    timer: Timer | None = None
    covered: bool = False


class ControllerLink:
    """One link of a `ControllerLinks`; connects from construction on.

    `lock` is the unit's and guards the link, too. With `counts_always`, changes wait for this controller even if it was
    never up.
    """

    def __init__(
        self,
        credentials: Credentials,
        controller: str,
        unit: str,
        *,
        host: Host,
        lock: threading.Lock,
        timers: Timers,
        threads: ServiceThreads,
        limits: Limits,
        timeout_s: float,
        counts_always: bool,
    ) -> None:
        self.controller = controller
        self.registered = False  # whether the controller has ever taken an inventory: only then do puts wait for it
        self._credentials = replace(credentials, timeout_s=min(_HANDSHAKE_S, credentials.timeout_s))
        self._unit = unit
        self._host = host
        self._lock = lock
        self._work = threading.Condition(lock)
        self._sending = threading.Lock()
        self._timers = timers
        self._limits = limits
        self._timeout_s = timeout_s
        self._notices: dict[Notice, None] = {}
        self._outbox: deque[Notice] = deque()
        self._connection: Connection | None = None
        self._counts_always = counts_always
        self._stopping = threading.Event()
        self._threads = [
            threads.start(self._keep_connected, name=f"link-{controller}"),
            threads.start(self._send_notices, name=f"tell-{controller}"),
        ]

    @property
    def up(self) -> bool:
        """Whether the controller hears what is sent now; lock held."""
        return self.registered and self._connection is not None

    @property
    def counts(self) -> bool:
        """Whether a change must be told: the controller has an inventory, or is about to get one; lock held."""
        return self._counts_always or self.registered or self._connection is not None

    def notify_controller(self, message: Message, timeout_s: float) -> "Future[Any]":
        """Tell the controller. The unit's lock is held, so this follows the state change that it reports.

        The future holds the answer, or None when an inventory that covers the message was taken instead. It fails with
        the controller's refusal, or with a TransportError after `timeout_s`.
        """
        notice = Notice(message, Future())
        if self._stopping.is_set():
            notice.future.set_exception(TransportError(f"{self._unit} is closing"))
            return notice.future
        notice.timer = self._timers.call_later(timeout_s, partial(self._expire_notice, notice, timeout_s))
        self._notices[notice] = None
        self._outbox.append(notice)
        return notice.future

    def flush_notices(self, *, here: bool) -> None:
        """Send the notices, in order; the unit's lock is not held.

        `here`: in this thread, which saves waking another one. Not from a thread that receives answers: a controller
        that reads slowly would block it.
        """
        if not here:
            with self._lock:
                self.wake_sender()
            return
        while self._waiting() and self._sending.acquire(blocking=False):  # otherwise the holder looks again
            try:
                while self._send_next():
                    pass
            finally:
                self._sending.release()

    def wake_sender(self) -> None:
        """Have the sending thread send the notices; lock held."""
        self._work.notify()

    def written_in_flight(self, task: str, rows: Sequence[int] | None) -> "list[Future[Any]]":
        """Return the commits of a task (rows None: all) that the controller does not know yet; lock held."""
        wanted = None if rows is None else set(rows)
        return [
            notice.future
            for notice in self._notices
            if isinstance(notice.message, OutputsWritten)
            and not notice.covered
            and notice.message.task == task
            and (wanted is None or not wanted.isdisjoint(notice.message.rows))
        ]

    def forget_controller(self) -> Completions:
        """Stop waiting for a controller that was never up: let all notices pass; lock held."""
        if self.counts:
            return []
        self._outbox.clear()
        return [settled for notice in list(self._notices) for settled in self._pop_notice(notice, None)]

    def close(self) -> None:
        """Stop; idempotent. Unconfirmed notices fail."""
        with self._lock:
            self._stopping.set()
            connection = self._connection
            self._work.notify_all()
            error = TransportError(f"{self._unit} is closing")
            settled = [one for notice in list(self._notices) for one in self._pop_notice(notice, error)]
        complete(settled)
        if connection is not None:
            connection.close()
        for thread in self._threads:
            thread.join(timeout=_CLOSE_TIMEOUT_S)

    def _keep_connected(self) -> None:
        backoff_s = _FIRST_BACKOFF_S
        told = False
        while not self._stopping.is_set():
            try:
                connection = Connection(
                    self._credentials,
                    self.controller,
                    self._unit,
                    CONTROLLER_REPLIES,
                    limits=self._limits,
                    callbacks_only=True,
                    stop=self._stopping,
                )
            except TransportError as error:
                if not told:
                    logger.info("%s: waits for %s (%s)", self._unit, self.controller, error)
                told, up = True, False
            else:
                up = self._register_unit(connection)
                if up:
                    logger.info("%s: registered with %s", self._unit, self.controller)
                    connection.wait_closed()
                    told = False
                self._put_down(connection)
            backoff_s = _FIRST_BACKOFF_S if up else min(2 * backoff_s, _LAST_BACKOFF_S)
            self._stopping.wait(backoff_s)

    def _put_down(self, connection: Connection) -> None:
        with self._lock:
            self._connection = None
            settled = self.forget_controller() if self._host.is_registered() else []
        complete(settled)
        connection.close()

    def _register_unit(self, connection: Connection) -> bool:
        """Make the channel the one to use; returns whether the controller took the inventory."""
        accepted: Future[Any] = Future()
        with self._lock:
            if self._stopping.is_set():
                return False
            for notice in self._notices:
                notice.covered = True
            # The inventory contains every change so far, so it replaces what is still queued.
            self._outbox.clear()
            self._outbox.append(Notice(self._host.inventory(), accepted))
            self._connection = connection
            self._work.notify()
        try:
            self._handle_accepted(accepted.result(self._timeout_s))
        except TimeoutError:
            logger.warning("%s: %s did not take the inventory in %g s", self._unit, self.controller, self._timeout_s)
            return False
        except AsyncFlowError as error:
            logger.warning("%s: %s did not take the inventory: %s", self._unit, self.controller, error)
            return False
        return True

    def _handle_accepted(self, reply: UnitAccepted) -> None:
        lost = set(reply.drop)
        with self._lock:
            self.registered = True
            settled = self._host.note_accepted(reply)
            for notice in [notice for notice in self._notices if notice.covered]:
                refusal = None
                if isinstance(notice.message, RowsCreated) and not lost.isdisjoint(notice.message.rows):
                    refusal = PutPending(f"{self.controller}: rows {sorted(lost)[:8]} are elsewhere, or just being put")
                settled += self._pop_notice(notice, refusal)
        complete(settled)

    def _waiting(self) -> bool:
        with self._lock:
            return self._connection is not None and bool(self._outbox)

    def _send_notices(self) -> None:
        while not self._stopping.is_set():
            with self._lock:
                while not self._stopping.is_set() and not (self._connection is not None and self._outbox):
                    self._work.wait()
            with self._sending:
                self._send_next()

    def _send_next(self) -> bool:
        """Send one notice, if there is one; the caller holds `_sending`."""
        with self._lock:
            if self._stopping.is_set() or self._connection is None or not self._outbox:
                return False
            connection, notice = self._connection, self._outbox.popleft()
        try:
            answer = connection.submit(notice.message, timeout_s=self._timeout_s)
        except TransportError as error:
            self._settle_notice(notice, error)
        else:
            answer.add_done_callback(partial(self._handle_reply, notice))
        return True

    def _handle_reply(self, notice: Notice, answer: "Future[Reply]") -> None:
        self._settle_notice(notice, answer.exception() or answer.result()[0])

    def _settle_notice(self, notice: Notice, answer: Any) -> None:
        if isinstance(notice.message, RegisterUnit):
            complete([(notice.future, answer)])
            return
        if isinstance(answer, Exception) and not is_refusal(answer):
            # The channel broke; the next inventory covers this notice.
            logger.debug("%s", answer)
            return
        with self._lock:
            settled = self._pop_notice(notice, answer)
        complete(settled)

    def _expire_notice(self, notice: Notice, timeout_s: float) -> None:
        with self._lock:
            what = type(notice.message).__name__
            state = "did not confirm" if self.registered else "has never been up to hear"
            error = DeadlineExceeded(f"{self._unit}: {self.controller} {state} {what} within {timeout_s:g} s")
            settled = self._pop_notice(notice, error)
        complete(settled)

    def _pop_notice(self, notice: Notice, answer: Any) -> Completions:
        if notice not in self._notices:  # settled before
            return []
        del self._notices[notice]
        if notice.timer is not None:
            notice.timer.cancel()
        return [(notice.future, answer)]


def complete(settled: Completions) -> None:
    """Complete futures, without the lock, since their callbacks send replies."""
    for future, answer in settled:
        if isinstance(answer, BaseException):
            future.set_exception(answer)
        else:
            future.set_result(answer)


def is_refusal(error: BaseException | None) -> bool:
    """Whether a controller said no; a plain TransportError means that it said nothing."""
    return isinstance(error, PeerRefused | LeaseFenced)


# All links of one unit: they tell every controller that counts of a change, and wait for the answers.
#
# The lead always counts. Another controller counts once it has registered this unit; with none registered, a change
# waits for the first.

Told = dict[str, "Future[Any]"]  # controller -> a future of its answer; see `ControllerLink.notify_controller`
Outcome = list[Any] | BaseException  # all answers, or the first error


class Holdings(Protocol):
    """What the links report on; called with the unit's lock held."""

    def inventory(self, *, announced: bool) -> RegisterUnit:
        """Return what the unit holds now; `announced`: controllers must agree on new rows."""

    def note_accepted(self, reply: UnitAccepted) -> None:
        """A controller took the inventory, and adds what it knows."""


class ControllerLinks:
    """One link to each controller, the lead first; see `ControllerLink`."""

    def __init__(
        self,
        credentials: Credentials,
        unit: str,
        controllers: Sequence[str],
        *,
        holdings: Holdings,
        lock: threading.Lock,
        journal: RowJournal,
        timers: Timers,
        threads: ServiceThreads,
        limits: Limits,
        timeout_s: float,
    ) -> None:
        self._holdings = holdings
        self._journal = journal
        self._lock = lock
        self._links: dict[str, ControllerLink] = {}
        with lock:  # a link that connects quickly must find the others in place
            for controller in controllers:
                self._links[controller] = ControllerLink(
                    credentials,
                    controller,
                    unit,
                    host=self,
                    lock=lock,
                    timers=timers,
                    threads=threads,
                    limits=limits,
                    timeout_s=timeout_s,
                    counts_always=controller == controllers[0],
                )

    @property
    def several(self) -> bool:
        """Whether controllers must agree on new rows."""
        return len(self._links) > 1

    @property
    def all_registered(self) -> bool:
        """Whether every controller has taken an inventory of this life."""
        return all(link.registered for link in self._links.values())

    def tell(self, message: Change, timeout_s: float) -> Told:
        """Tell every controller that counts; the caller has held the unit's lock since it made the change."""
        # A commit is journalled only once all controllers know it; until then its holder acks again.
        if not isinstance(message, OutputsWritten):
            self._journal.append(message)
        everybody = not self.is_registered()
        return {
            controller: link.notify_controller(message, timeout_s)
            for controller, link in self._links.items()
            if everybody or link.counts
        }

    def send_beat(self, message: Message, timeout_s: float) -> None:
        """Tell the controllers that are up; others get an inventory once they are. Lock held."""
        for link in self._links.values():
            if link.up:
                link.notify_controller(message, timeout_s)
                link.wake_sender()

    def flush_notices(self, *, here: bool = True) -> None:
        for link in self._links.values():
            link.flush_notices(here=here)

    def wake_senders(self) -> None:
        for link in self._links.values():
            link.wake_sender()

    def written_in_flight(self, task: str, rows: Sequence[int] | None, asker: str) -> "list[Future[Any]]":
        """Return commits that `asker` does not know yet or, if it is no controller, that any does not know."""
        links = [self._links[asker]] if asker in self._links else list(self._links.values())
        return [future for link in links for future in link.written_in_flight(task, rows)]

    def close(self) -> None:
        closing = [threading.Thread(target=link.close, daemon=True) for link in self._links.values()]
        for thread in closing:
            thread.start()
        for thread in closing:
            thread.join()

    def inventory(self) -> RegisterUnit:
        return self._holdings.inventory(announced=self.several)

    def note_accepted(self, reply: UnitAccepted) -> Completions:
        self._holdings.note_accepted(reply)
        return [settled for link in self._links.values() for settled in link.forget_controller()]

    def is_registered(self) -> bool:
        return any(link.registered for link in self._links.values())


def when_all(
    futures: "Sequence[Future[Any]]",
    done: Callable[[Outcome], None],
    *,
    tolerated: tuple[type[BaseException], ...] = (),
) -> None:
    """Call `done` once: with all results in order, or with the first error as soon as there is one.

    It runs in the thread that completes the last future, or in this one. `tolerated` errors count as results.
    """
    if not futures:
        done([])
        return
    gathering = _Gathering(len(futures), done, tolerated)
    for k, future in enumerate(futures):
        future.add_done_callback(partial(gathering.note_completed, k))


def when_completed(futures: "Sequence[Future[Any]]", done: Callable[[list[BaseException]], None]) -> None:
    """Call `done` once, when all futures are completed, with the errors of those that failed. See `when_all`."""

    def sort_out(results: Outcome) -> None:
        assert isinstance(results, list), "no error ends this wait"
        done([result for result in results if isinstance(result, BaseException)])

    when_all(futures, sort_out, tolerated=(BaseException,))


class _Gathering:
    """Holds no future, and `done` only until it was called."""

    def __init__(
        self, number: int, done: Callable[[Outcome], None], tolerated: tuple[type[BaseException], ...]
    ) -> None:
        self._lock = threading.Lock()
        self._results: list[Any] = [None] * number
        self._left = number
        self._done: Callable[[Outcome], None] | None = done
        self._tolerated = tolerated

    def note_completed(self, k: int, future: "Future[Any]") -> None:
        error = future.exception()
        result = future.result() if error is None else error
        if isinstance(error, self._tolerated):
            error = None
        with self._lock:
            self._left -= 1
            self._results[k] = result
            done = self._done if error is not None or self._left == 0 else None
            if done is not None:
                # Break the reference cycle: a put's payload must not stay alive until the garbage collector runs.
                self._done = None
        if done is not None:
            done(self._results if error is None else error)
