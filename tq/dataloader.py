"""`StreamingDataLoader`: a training rank's rows as an iterable, fetched ahead, one partition (step) after another.

    loader = StreamingDataLoader(client, "actor_train", columns, first_partition=1, last_partition=60, ...)
    while loader.next_partition():
        for batch, indices in loader:      # packed, as soon as rows are ready; may be empty in a round
            ...
        loader.ack()                       # after the optimizer update

Rank 0 of a data-parallel replica fetches and broadcasts one packed buffer to the other ranks of its replica.
"""

import contextlib
import queue
import threading
from collections.abc import Iterator, Sequence

from tq.batch import PackedBatch
from tq.client import QueueClient
from tq.messages import FetchRound, Granted, NoRows, NoRowsReason
from tq.replica import Replica

_EMPTY = PackedBatch((), {})


class StreamingDataLoader:
    """Iterates over one rank's micro-batches of one partition at a time.

    A thread of its own leases and reads ahead, over the partition's end too; everything else, collectives included,
    happens in the caller's thread.
    """

    def __init__(
        self,
        client: QueueClient | None,
        task: str,
        columns: Sequence[str],
        *,
        first_partition: int,
        last_partition: int,
        rows_per_round: int,
        rank: int = 0,
        num_ranks: int = 1,
        replica: Replica | None = None,
        prefetch: int = 1,
        timeout_s: float = 60.0,
    ) -> None:
        """Start reading ahead.

        Args:
            client: this rank's access to the queue; None on ranks of a replica that do not fetch.
            task: the training task.
            columns: to read.
            first_partition, last_partition: the steps, inclusive.
            rows_per_round: rows per rank in a full round.
            rank, num_ranks: data-parallel rank and their number.
            replica: the ranks that share this rank's rows; None: this rank alone.
            prefetch: micro-batches read ahead.
            timeout_s: a fetch is asked again after so long; it does not end the iteration.
        """
        assert (client is None) == (replica is not None and not replica.fetches)
        self.round_rows = 0
        """Most rows of any rank in the current round."""
        self.stopped = False
        """The queue was stopped before the partition's end."""
        self._client = client
        self._task = task
        self._columns = tuple(columns)
        self._first = first_partition
        self._last = last_partition
        self._partition = first_partition - 1
        self._rows_per_round = rows_per_round
        self._rank = rank
        self._num_ranks = num_ranks
        self._replica = replica
        self._timeout_s = timeout_s
        self._held: list[Granted] = []
        self._failure: Exception | None = None
        self._closing = threading.Event()
        self._ahead: queue.Queue[tuple[Granted, PackedBatch] | NoRowsReason | Exception]
        self._ahead = queue.Queue(max(1, prefetch))
        self._thread = threading.Thread(target=self._prefetch, name=f"prefetch-{task}", daemon=True)
        if client is not None:
            self._thread.start()

    def next_partition(self) -> int:
        """Move on to the next step; returns its number, or 0 when the run's last one is over or the queue stopped."""
        if self.stopped or self._partition >= self._last:
            return 0
        self._partition += 1
        return self._partition

    def __iter__(self) -> Iterator[tuple[PackedBatch, tuple[int, ...]]]:
        """Yield (packed batch, indices) of this rank's rounds until the partition ends or the queue stops.

        Raises:
            TransportError: the queue is gone.
        """
        while True:
            item = self._next()
            if isinstance(item, NoRowsReason):
                self.stopped = item is NoRowsReason.STOP
                return
            granted, batch = item
            self.round_rows = granted.round_rows
            self._held.append(granted)
            yield batch, batch.indices

    def ack(self) -> None:
        """The rows yielded since the last ack are in the weights; one ack per replica."""
        held, self._held = self._held, []
        if self._client is None:
            return
        for granted in held:
            if granted.rows:
                self._client.put(self._task, granted, granted.rows, {})

    def close(self) -> None:
        """Stop reading ahead and end an iteration in progress; idempotent. Does not wait for a parked fetch."""
        self._closing.set()
        while True:
            try:
                self._ahead.put_nowait(NoRowsReason.STOP)
            except queue.Full:
                with contextlib.suppress(queue.Empty):
                    self._ahead.get_nowait()
                continue
            return

    def _next(self) -> tuple[Granted, PackedBatch] | NoRowsReason:
        if self._client is None:
            assert self._replica is not None
            return self._replica.broadcast(None)
        if self._failure is not None:
            raise self._failure
        item = self._ahead.get()
        if isinstance(item, Exception):
            self._failure = item
            raise item
        return item if self._replica is None else self._replica.broadcast(item)

    def _prefetch(self) -> None:
        try:
            for partition in range(self._first, self._last + 1):
                if not self._prefetch_partition(partition):
                    return
        except Exception as error:  # noqa: BLE001 - the boundary of a thread: the iteration raises it
            self._offer(error)

    def _prefetch_partition(self, partition: int) -> bool:
        assert self._client is not None
        round_index = 0
        while not self._closing.is_set():
            answer = self._client.fetch_round(self._request(partition, round_index))
            if isinstance(answer, NoRows):
                if answer.reason is NoRowsReason.DEADLINE:
                    continue
                return self._offer(answer.reason) and answer.reason is NoRowsReason.PARTITION_DONE
            batch = self._client.get(answer, self._columns) if answer.rows else _EMPTY
            if not self._offer((answer, batch)):
                return False
            round_index += 1
        return False

    def _request(self, partition: int, round_index: int) -> FetchRound:
        return FetchRound(
            task=self._task,
            owner="",
            partition=partition,
            round_index=round_index,
            num_rows=self._rows_per_round,
            rank=self._rank,
            num_ranks=self._num_ranks,
            timeout_s=self._timeout_s,
        )

    def _offer(self, item: tuple[Granted, PackedBatch] | NoRowsReason | Exception) -> bool:
        while not self._closing.is_set():
            try:
                self._ahead.put(item, timeout=0.5)
            except queue.Full:
                continue
            return True
        return False
