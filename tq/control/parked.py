"""Fetches that wait, found by whatever may end their wait. Pure."""

from typing import TypeVar

from tq.messages import FetchRound, FetchRows

Fetch = FetchRows | FetchRound
K = TypeVar("K")
V = TypeVar("V")


class ParkedFetches:
    """Requests by number, in their order."""

    def __init__(self) -> None:
        self._all: dict[int, Fetch] = {}
        self._rows: dict[str, dict[int, FetchRows]] = {}
        self._rounds: dict[tuple[str, int], dict[int, FetchRound]] = {}
        self._owners: dict[str, dict[int, None]] = {}
        self._counts: dict[str, int] = {}

    def add(self, request: int, fetch: Fetch) -> None:
        """A fetch waits."""
        self._all[request] = fetch
        if isinstance(fetch, FetchRound):
            self._rounds.setdefault((fetch.task, fetch.partition), {})[request] = fetch
        else:
            self._rows.setdefault(fetch.task, {})[request] = fetch
        self._owners.setdefault(fetch.owner, {})[request] = None
        self._counts[fetch.task] = self.count(fetch.task) + 1

    def pop(self, request: int) -> Fetch | None:
        """A fetch does not wait any more; None: it did not."""
        fetch = self._all.pop(request, None)
        if fetch is None:
            return None
        if isinstance(fetch, FetchRound):
            _drop(self._rounds, (fetch.task, fetch.partition), request)
        else:
            _drop(self._rows, fetch.task, request)
        _drop(self._owners, fetch.owner, request)
        self._counts[fetch.task] -= 1
        return fetch

    def waits(self, request: int) -> bool:
        """Whether a request is parked."""
        return request in self._all

    def of(self, owner: str) -> list[int]:
        """Return the requests of a consumer."""
        return list(self._owners.get(owner, ()))

    def rows(self, task: str) -> list[tuple[int, FetchRows]]:
        """Return what waits for rows of a task."""
        return list(self._rows.get(task, {}).items())

    def rounds(self, task: str, partition: int) -> list[tuple[int, FetchRound]]:
        """Return what waits for rounds of a partition."""
        return list(self._rounds.get((task, partition), {}).items())

    def partitions(self, task: str) -> list[int]:
        """Return the partitions of whose rounds some wait."""
        return [partition for name, partition in self._rounds if name == task]

    def twins(self, fetch: FetchRows) -> list[int]:
        """Return the requests of other readers for the lease that `fetch` asks for."""
        if not fetch.replica:
            return []
        key = (fetch.replica, fetch.sequence)
        return [number for number, other in self.rows(fetch.task) if (other.replica, other.sequence) == key]

    def all(self) -> list[int]:
        """Return all requests."""
        return list(self._all)

    def count(self, task: str) -> int:
        """Return how many wait for a task."""
        return self._counts.get(task, 0)


def _drop(index: "dict[K, dict[int, V]]", key: K, request: int) -> None:
    requests = index[key]
    del requests[request]
    if not requests:
        del index[key]
