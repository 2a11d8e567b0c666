"""Waiting for several futures without a thread that waits."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

Outcome = list[Any] | BaseException


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
