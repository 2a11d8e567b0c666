"""`stream`: a task's work as an iterable of leases, for tasks without rounds (reference, reward, anything of your own).

for lease in stream(client, "ref_log_probs", ["prompts", "responses"], num_rows=32):
    lease.put({"ref_log_probs": log_probs(lease.batch)})

                      .-> put(columns) / ack()    the task is done with the rows
fetched ahead -> lease -> keep()                  somebody settles it later, in another thread, say
                      '-> nothing                 the loop moved on or failed: the rows go back, others get them
"""

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import TracebackType

from asyncflow.errors import AsyncFlowError, Superseded
from tq.batch import Column, PackedBatch
from tq.client.lease_reader import read_lease
from tq.client.patience import Patience
from tq.client.queue_client import QueueClient
from tq.client.read_ahead import ReadAhead
from tq.messages import Granted, NoRows, NoRowsReason

logger = logging.getLogger(__name__)

_RETRY_S = 1.0
_JOIN_S = 5.0


class Lease:
    """Rows in hand; a context manager that gives back what was not settled inside. One thread at a time."""

    def __init__(self, client: QueueClient, task: str, granted: Granted, batch: PackedBatch) -> None:
        self.batch = batch
        """The columns asked for, packed."""
        self.granted = granted
        """The queue's own description: partition, groups, tokens."""
        self.kept = False
        """Whether moving on leaves this lease alone."""
        self._client = client
        self._task = task
        self._open = dict.fromkeys(granted.rows)

    def __len__(self) -> int:
        return len(self.batch)

    def __enter__(self) -> "Lease":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.give_back()

    @property
    def indices(self) -> tuple[int, ...]:
        """Global indices of the rows."""
        return self.batch.indices

    @property
    def unsettled(self) -> list[int]:
        """Rows that were neither put nor acked nor given back yet."""
        return list(self._open)

    def put(self, columns: Mapping[str, Column], rows: Sequence[int] | None = None) -> bool:
        """Write all output columns of `rows` (default: of all unsettled ones); the task is then done with them.

        Returns:
            False when the rows belong to somebody else by now: the work is dropped, which does no harm.
        """
        return self._settle(rows, lambda part: self._client.put(self._task, self.granted, part, columns))

    def ack(self, rows: Sequence[int] | None = None) -> bool:
        """Like `put`, for a task without outputs."""
        return self._settle(rows, lambda part: self._client.ack(self._task, self.granted, part))

    def give_back(self) -> None:
        """Return the unsettled rows; somebody else gets them. Idempotent."""
        self._settle(None, lambda part: self._client.give_back(self._task, self.granted, part))

    def keep(self) -> "Lease":
        """Let the loop move on without giving these rows back; whoever calls this settles them."""
        self.kept = True
        return self

    def _settle(self, rows: Sequence[int] | None, settle: Callable[[list[int]], None]) -> bool:
        part = list(self._open if rows is None else rows)
        if not part:
            return True
        mine = True
        try:
            settle(part)
        except Superseded as error:
            logger.info("%s: dropped %d rows: %s", self._task, len(part), error)
            mine = False
        for row in part:
            self._open.pop(row, None)
        return mine


class LeaseStream(Iterable[Lease]):
    """What `stream` returns. Iterate once; leaving the loop, however, closes it."""

    def __init__(
        self,
        client: QueueClient,
        task: str,
        columns: Sequence[str],
        *,
        num_rows: int,
        token_budget: int,
        version: int | Callable[[], int],
        prefetch: int,
        timeout_s: float,
        producers_timeout_s: float,
    ) -> None:
        self.ended_by: NoRowsReason | None = None
        """Why the queue has no more leases for this stream: a stop, or weights newer than `version`."""
        self._client = client
        self._task = task
        self._columns = tuple(columns)
        self._num_rows = num_rows
        self._token_budget = token_budget
        self._version = version
        self._timeout_s = timeout_s
        self._patience = Patience(producers_timeout_s=producers_timeout_s)
        self._closing = threading.Event()
        self._asking = False
        self._prefetch = prefetch
        self._ahead: ReadAhead[Lease] | None = None

    def __iter__(self) -> Iterator[Lease]:
        """Yield leases until the queue stops; see `stream`."""
        lease: Lease | None = None
        try:
            for lease in self._leases():
                yield lease
                self._move_on(lease)
                lease = None
        finally:
            if lease is not None:
                self._move_on(lease)
            self.close()

    def close(self) -> None:
        """End the iteration; what was fetched ahead goes back. Idempotent; does not wait for a parked fetch."""
        self._closing.set()
        if self._ahead is not None:
            self._ahead.close()
            if not self._asking:
                self._ahead.join(_JOIN_S)

    def _leases(self) -> Iterator[Lease]:
        source = self._fetched()
        if not self._prefetch:
            return source
        name = f"prefetch-{self._task}"
        self._ahead = ReadAhead(source, depth=self._prefetch, name=name, closing=self._closing, discard=_return_quietly)
        return self._ahead

    def _move_on(self, lease: Lease) -> None:
        if lease.unsettled and not lease.kept:
            number = len(lease.unsettled)
            logger.warning("%s: %d rows were neither put nor acked, giving them back", self._task, number)
            _return_quietly(lease)

    def _fetched(self) -> Iterator[Lease]:
        while not self._closing.is_set():
            answer = self._ask()
            if isinstance(answer, Granted):
                batch = read_lease(self._client, answer, self._columns, patience=self._patience, closing=self._closing)
                if batch is not None:
                    yield Lease(self._client, self._task, answer, batch)
            elif answer.reason is NoRowsReason.DEADLINE:
                self._patience.waited(answer)
            else:
                self.ended_by = answer.reason
                return

    def _ask(self) -> Granted | NoRows:
        self._asking = True
        try:
            return self._client.fetch(
                self._task,
                num_rows=self._num_rows,
                version=self._version() if callable(self._version) else self._version,
                timeout_s=self._patience.ask(self._task, self._timeout_s),
                token_budget=self._token_budget,
            )
        finally:
            self._asking = False


def stream(
    client: QueueClient,
    task: str,
    columns: Sequence[str],
    *,
    num_rows: int = 64,
    token_budget: int = 0,
    version: int | Callable[[], int] = 0,
    prefetch: int = 1,
    timeout_s: float = 60.0,
    producers_timeout_s: float = 0.0,
) -> LeaseStream:
    """Iterate over a task's rows as they become ready, until the queue stops.

    The next lease is fetched and read while the loop works on this one. A lease that the loop leaves unsettled is
    given back when the loop moves on or ends, also by an error; `max_deliveries` of the queue keeps poisonous rows
    from coming back for ever.

    Args:
        client: access to the queue.
        task: whose inputs must be complete.
        columns: to read.
        num_rows: at most so many rows per lease.
        token_budget: at most so many tokens per lease; 0: no budget.
        version: newest weights that this consumer holds, for version-gated tasks; newer ones end the stream
            (`ended_by`), so that the consumer loads them and starts another one.
        prefetch: leases fetched ahead; 0: none, and no thread.
        timeout_s: a fetch is asked again after so long at the latest; it does not end the iteration.
        producers_timeout_s: raise `ProducersGone` when nobody who writes the inputs is connected for so long (s); 0:
            wait for them for ever.
    """
    return LeaseStream(
        client,
        task,
        columns,
        num_rows=num_rows,
        token_budget=token_budget,
        version=version,
        prefetch=prefetch,
        timeout_s=timeout_s,
        producers_timeout_s=producers_timeout_s,
    )


def _return_quietly(lease: Lease) -> None:
    try:
        lease.give_back()
    except AsyncFlowError as error:  # the rows come back anyway when this consumer's heartbeats end
        logger.warning("%d rows could not be given back: %s", len(lease), error)
