"""Our side of a measurement: a real queue on this host, one client that puts and gets, sums that prove what arrived.

Every quantity is timed as a caller sees it; a get ends in tensors that the caller owns. What was received is summed
and acked outside the timed part.
"""

import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import tq
from benchmarks.transferqueue.workload import checksum, dense_columns, micro_batches
from tq.columns import Column, column_of

COLUMNS = ("prompt", "response", "logprobs")
TASK = "train"
_FETCH_S = 60.0


class OurQueue:
    """Two storage units and a controller in processes of their own; a context manager."""

    def __init__(
        self, columns: tuple[str, ...], log_dir: Path, *, num_units: int = 2, config: tq.QueueConfig | None = None
    ) -> None:
        """Start it.

        Args:
            columns: that the one task reads.
            log_dir: where services write.
            num_units: storage units.
            config: settings.
        """
        self.queue = tq.start({TASK: columns}, num_units=num_units, config=config, log_dir=log_dir)
        self.client = self.queue.client("benchmark")
        self._columns = columns

    def put(self, columns: Mapping[str, Column]) -> float:
        """Return the seconds of one put."""
        began = time.perf_counter()
        self.client.put_rows(columns)
        return time.perf_counter() - began

    def fetch(self, num_rows: int) -> tq.Lease:
        """Lease rows that must be there or come."""
        granted = self.client.fetch(TASK, num_rows=num_rows, timeout_s=_FETCH_S)
        assert isinstance(granted, tq.Lease), f"no rows came: {granted}"
        return granted

    def get(self, granted: tq.Lease) -> tuple[float, tq.PackedBatch]:
        """Return the seconds of one get, and what came."""
        began = time.perf_counter()
        batch = granted.read(self._columns)
        return time.perf_counter() - began, batch

    def move(self, columns: Mapping[str, Column]) -> dict[str, float]:
        """Put all rows at once and get them: `put_s`, `get_s`, `fetch_s`, `checksum`."""
        put_s = self.put(columns)
        began = time.perf_counter()
        granted = self.fetch(len(columns[self._columns[0]]))
        fetch_s = time.perf_counter() - began
        get_s, batch = self.get(granted)
        total = _sum([batch])
        granted.ack()
        return {"put_s": put_s, "get_s": get_s, "fetch_s": fetch_s, "checksum": total}

    def close(self) -> None:
        """End it."""
        self.queue.close()

    def __enter__(self) -> "OurQueue":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class RowRounds:
    """Rounds of the peer's workload: all micro-batches are put, then fetched and got until all rows came."""

    def __init__(self, num_rows: int, log_dir: Path) -> None:
        self._num_rows = num_rows
        self._log_dir = log_dir
        self._queue = OurQueue(COLUMNS, log_dir)
        self._streamed = OurQueue(COLUMNS, log_dir)
        self._stream: Iterator[tq.Lease] | None = None
        self._stream_rows = 0
        self._batches: dict[int, list[dict[str, Column]]] = {}

    def round(self, micro_batch: int) -> dict[str, float]:
        """Return `put_s`, `get_s`, `ack_s`, `checksum`."""
        ours = self._queue
        began = time.perf_counter()
        for columns in self._columns(micro_batch):
            ours.client.put_rows(columns)
        put_s = time.perf_counter() - began
        received: list[tuple[tq.Lease, tq.PackedBatch]] = []
        num_received = 0
        began = time.perf_counter()
        while num_received < self._num_rows:
            granted = ours.fetch(micro_batch)
            received.append((granted, granted.read(COLUMNS)))
            num_received += len(granted.rows)
        get_s = time.perf_counter() - began
        total = _sum([batch for _, batch in received])
        began = time.perf_counter()
        for granted, _ in received:
            granted.ack()
        return {"put_s": put_s, "get_s": get_s, "ack_s": time.perf_counter() - began, "checksum": total}

    def stream_round(self, micro_batch: int) -> float:
        """Return the seconds per row of a prefetching stream that acks every lease; its first lease is not counted."""
        if self._stream is None or self._stream_rows != micro_batch:
            self._end_stream()
            self._stream_rows = micro_batch
            self._stream = iter(self._streamed.client.stream(TASK, COLUMNS, num_rows=micro_batch))
        for columns in self._columns(micro_batch):
            self._streamed.client.put_rows(columns)
        next(self._stream).ack()
        began = time.perf_counter()
        num_received = micro_batch
        while num_received < self._num_rows:
            lease = next(self._stream)
            lease.ack()
            num_received += len(lease)
        return (time.perf_counter() - began) / (self._num_rows - micro_batch)

    def close(self) -> None:
        """End both queues."""
        self._queue.close()
        self._streamed.close()

    def _end_stream(self) -> None:
        """A stream reads ahead, so another one beside it would find its rows taken: begin with a new queue."""
        if self._stream is not None:
            self._streamed.close()
            self._streamed = OurQueue(COLUMNS, self._log_dir)

    def _columns(self, micro_batch: int) -> list[dict[str, Column]]:
        if micro_batch not in self._batches:
            self._batches[micro_batch] = [
                {name: Column(values, lengths) for name, (values, lengths) in batch.columns.items()}
                for batch in micro_batches(self._num_rows, micro_batch)
            ]
        return self._batches[micro_batch]


def dense(*, rows: int, columns: int) -> dict[str, Column]:
    """Return float32 columns of 8192 values a row."""
    return {name: column_of(values) for name, values in dense_columns(rows=rows, columns=columns).items()}


def num_bytes(columns: Mapping[str, Column]) -> int:
    """Return the bytes of the values."""
    return sum(column.values.nbytes for column in columns.values())


def column_sum(columns: Mapping[str, Column]) -> float:
    """Return what `checksum` must be after these columns arrived."""
    return sum(checksum(column.values) for column in columns.values())


def _sum(batches: list[tq.PackedBatch]) -> float:
    return sum(column_sum(batch.columns) for batch in batches)
