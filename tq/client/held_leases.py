"""The leases that a client holds: what it tells a controller when it joins, so that a restarted one can go on."""

import threading
from collections.abc import Collection, Iterable

from tq.messages import FetchRound, FetchRows, Granted, Held


class HeldLeases:
    """Thread-safe. A lease leaves when its last row was put, given back, or declared void."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: dict[tuple[str, int], Held] = {}

    def granted(self, fetch: FetchRows | FetchRound, answer: Granted) -> None:
        """A lease was given; the same one again changes nothing."""
        held = Held(fetch.task, answer.token, answer.partition, list(answer.rows))
        if isinstance(fetch, FetchRound):
            held.round_index, held.rank, held.num_ranks = fetch.round_index, fetch.rank, fetch.num_ranks
            held.round_rows, held.last, held.total_rows = answer.round_rows, answer.last, answer.total_rows
            held.step, held.share_rows = fetch.partition, len(answer.rows)
        elif not answer.rows:
            return
        with self._lock:
            self._held.setdefault((fetch.task, answer.token), held)
            if isinstance(fetch, FetchRound):
                self._forget_old_rounds(fetch.task, fetch.partition)

    def settled(self, task: str, token: int, rows: Iterable[int]) -> None:
        """Rows left the lease: put, acked or given back."""
        gone = set(rows)
        with self._lock:
            held = self._held.get((task, token))
            if held is not None:
                held.rows = [row for row in held.rows if row not in gone]
                if not held.rows and held.round_index < 0:  # shares of a round stay: other ranks may still want theirs
                    del self._held[task, token]

    def void(self, tasks: Collection[str], tokens: Collection[int]) -> None:
        """A controller does not count these as this client's any more."""
        with self._lock:
            for task in tasks:
                for token in tokens:
                    self._held.pop((task, token), None)

    def forget(self, task: str, token: int) -> None:
        """Another reader of the lease settles it."""
        with self._lock:
            self._held.pop((task, token), None)

    def of_tasks(self, tasks: Collection[str]) -> list[Held]:
        """Return what is held of these tasks."""
        with self._lock:
            return [held for (task, _), held in self._held.items() if task in tasks]

    def _forget_old_rounds(self, task: str, step: int) -> None:
        over = [key for key, held in self._held.items() if key[0] == task and not held.rows and held.step < step - 1]
        for key in over:
            del self._held[key]
