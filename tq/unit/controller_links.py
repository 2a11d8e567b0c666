"""All links of one unit: every controller that counts is told of a change; and waiting for their answers.

The lead always counts. Another controller counts once it has registered this unit; with none registered, a change
waits for the first.
"""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, Protocol

from asyncflow.process import ServiceThreads
from asyncflow.transport.frame import Limits
from asyncflow.transport.meeting import Credentials
from tq.messages import Message, OutputsWritten, RegisterUnit, UnitAccepted
from tq.timers import Timers
from tq.unit.controller_link import Completions, ControllerLink
from tq.unit.row_journal import Change, RowJournal

Told = dict[str, "Future[Any]"]
"""Controller -> a future of its answer; see `ControllerLink.notify`."""
Outcome = list[Any] | BaseException
"""All answers, or the first error."""


class Holdings(Protocol):
    """What the links tell of; called with the unit's lock held."""

    def inventory(self, *, held: bool) -> RegisterUnit:
        """Return what the unit holds now; `held`: controllers must agree on new rows."""

    def accepted(self, reply: UnitAccepted) -> None:
        """A controller took the inventory and knows this beside it."""


class ControllerLinks:
    """Owned by a `StorageUnit`."""

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
        """Start one link to each controller; arguments as for `ControllerLink`, and where to note what they tell."""
        self._holdings = holdings
        self._journal = journal
        self._lock = lock
        self._links: dict[str, ControllerLink] = {}
        with lock:  # a link that is quick finds the others in place
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
        """Tell every controller that counts; the unit's lock is held since the change was made."""
        if not isinstance(message, OutputsWritten):  # else its holder acks again, unless it was told that all know
            self._journal.append(message)
        everybody = not self.registered()
        return {
            controller: link.notify(message, timeout_s)
            for controller, link in self._links.items()
            if everybody or link.counts
        }

    def beat(self, message: Message, timeout_s: float) -> None:
        """Tell the controllers that are up; the others get an inventory when they are; lock held."""
        for link in self._links.values():
            if link.up:
                link.notify(message, timeout_s)
                link.wake()

    def flush(self, *, here: bool = True) -> None:
        """Send what was told; see `ControllerLink.flush`."""
        for link in self._links.values():
            link.flush(here=here)

    def wake(self) -> None:
        """Have the threads send what was told; lock held."""
        for link in self._links.values():
            link.wake()

    def written_in_flight(self, task: str, rows: Sequence[int] | None, asker: str) -> "list[Future[Any]]":
        """Return commits that `asker` does not know yet, or, if it is no controller, any of them; lock held."""
        links = [self._links[asker]] if asker in self._links else list(self._links.values())
        return [future for link in links for future in link.written_in_flight(task, rows)]

    def close(self) -> None:
        """Stop all links; idempotent."""
        closing = [threading.Thread(target=link.close, daemon=True) for link in self._links.values()]
        for thread in closing:
            thread.start()
        for thread in closing:
            thread.join()

    def inventory(self) -> RegisterUnit:
        """See `controller_link.Host`."""
        return self._holdings.inventory(held=self.several)

    def accepted(self, reply: UnitAccepted) -> Completions:
        """See `controller_link.Host`."""
        self._holdings.accepted(reply)
        return [settled for link in self._links.values() for settled in link.forget()]

    def registered(self) -> bool:
        """See `controller_link.Host`."""
        return any(link.registered for link in self._links.values())


def when_all(
    futures: "Sequence[Future[Any]]",
    done: Callable[[Outcome], None],
    *,
    tolerated: tuple[type[BaseException], ...] = (),
) -> None:
    """Call `done` once: with all results in order, or with the first error as soon as there is one.

    It runs in the thread that completes the last future, or in this one.

    Args:
        futures: to wait for.
        done: gets the outcome.
        tolerated: errors that count as results.
    """
    if not futures:
        done([])
        return
    gathering = _Gathering(len(futures), done, tolerated)
    for k, future in enumerate(futures):
        future.add_done_callback(partial(gathering.completed, k))


def when_completed(futures: "Sequence[Future[Any]]", done: Callable[[list[BaseException]], None]) -> None:
    """Call `done` once, with the errors of those that failed, when all are completed. See `when_all`."""

    def sort_out(results: Outcome) -> None:
        assert isinstance(results, list), "no error ends this wait"
        done([result for result in results if isinstance(result, BaseException)])

    when_all(futures, sort_out, tolerated=(BaseException,))


class _Gathering:
    """Refers to no future, and to `done` only until it was called: a put's payload must not wait for a cycle's end."""

    def __init__(
        self, number: int, done: Callable[[Outcome], None], tolerated: tuple[type[BaseException], ...]
    ) -> None:
        self._lock = threading.Lock()
        self._results: list[Any] = [None] * number
        self._left = number
        self._done: Callable[[Outcome], None] | None = done
        self._tolerated = tolerated

    def completed(self, k: int, future: "Future[Any]") -> None:
        error = future.exception()
        result = future.result() if error is None else error
        if isinstance(error, self._tolerated):
            error = None
        with self._lock:
            self._left -= 1
            self._results[k] = result
            done = self._done if error is not None or self._left == 0 else None
            if done is not None:
                self._done = None
        if done is not None:
            done(self._results if error is None else error)
