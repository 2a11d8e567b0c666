"""Producers and consumers of a storm. Each runs in a process that may be killed at any moment and is started again.

They are what a careful user would write: a put whose end is unknown is put again under the same row numbers, rows that
are reported lost are put again, an ack whose end is unknown is repeated until it is confirmed or refused.
"""

import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import tq
from asyncflow.errors import LeaseFenced, PeerRefused, QueueFull, RowsExist, TransportError
from benchmarks.transferqueue.storm_ledger import Deed, LedgerFile, Record, read_ledger, unfinished_puts
from benchmarks.transferqueue.storm_rows import (
    INPUTS,
    OUTPUTS,
    SLOT,
    columns_of,
    damaged,
    partition_of,
    scored_by,
    scores_of,
)

SCORE, LOOK, TRAIN = "score", "look", "train"
_ROWS_PER_PUT = 16
_ROWS_PER_FETCH = 12
_FETCH_S = 2.0
_PATIENCE_S = 60.0
_RETRY_S = 0.1
_RELEASED_SHARE = 0.03


def produce(pipe: Any, address: str, ledger: str, slot: int, put_every_s: float) -> None:
    """Put rows until told to `finish`; put lost rows again until killed."""
    torch.set_num_threads(1)
    producer = _Producer(pipe, tq.connect(Path(address), f"producer-{slot}"), Path(ledger), slot)
    producer.run(put_every_s)


class _Producer:
    def __init__(self, pipe: Any, client: tq.QueueClient, ledger: Path, slot: int) -> None:
        self._pipe = pipe
        self._over = threading.Event()
        self._client = client
        self._slot = slot
        self._unfinished, newest = unfinished_puts(read_ledger(ledger))
        self._next = max(newest + 1, slot * SLOT)
        self._ledger = LedgerFile(ledger)

    def run(self, put_every_s: float) -> None:
        threading.Thread(target=self._restore_lost, daemon=True).start()
        for rows in self._unfinished:
            self._put(rows)
        while not self._pipe.poll(put_every_s):
            rows = list(range(self._next, self._next + _ROWS_PER_PUT))
            self._next += _ROWS_PER_PUT
            self._ledger.write(Record(Deed.PUT, rows))
            self._put(rows)
        self._pipe.recv()
        self._pipe.send("finished")
        self._pipe.recv()  # lost rows are put again until the storm is over
        self._over.set()

    def _put(self, rows: list[int]) -> None:
        """Put until it is certain that the rows are in the queue; a row may already be there from an earlier try."""
        if _until_known(lambda: self._put_or_exist(rows), self._over.wait):
            self._ledger.write(Record(Deed.PUT_DONE, rows))

    def _put_or_exist(self, rows: list[int]) -> None:
        try:
            self._client.put_rows(columns_of(rows), rows=rows, groups=rows, partition=partition_of(rows[0]))
        except RowsExist:
            if len(rows) > 1:  # some of them; those that are not there must not be forgotten
                for row in rows:
                    self._put_or_exist([row])

    def _restore_lost(self) -> None:
        after = 0
        while not self._over.is_set():
            try:
                lost = self._client.lost_rows(after, timeout_s=_FETCH_S)
            except TransportError:
                self._over.wait(_RETRY_S)
                continue
            if lost is None:
                continue
            after = lost.sequence
            mine: dict[int, list[int]] = {}
            for row in lost.rows:
                if row // SLOT == self._slot:
                    mine.setdefault(partition_of(row), []).append(row)
            for rows in mine.values():
                self._ledger.write(Record(Deed.REPUT, rows))
                _until_known(lambda rows=rows: self._put_or_exist(rows), self._over.wait)  # type: ignore[misc]


def consume(pipe: Any, address: str, ledger: str, task: str, seed: int, work_s: float) -> None:
    """Fetch, check, ack with an intent before and a confirmation after, until told to end, or killed."""
    torch.set_num_threads(1)
    consumer = _Consumer(pipe, tq.connect(Path(address), task), Path(ledger), task, seed)
    while not pipe.poll(work_s):
        consumer.step()


class _Consumer:
    def __init__(self, pipe: Any, client: tq.QueueClient, ledger: Path, task: str, seed: int) -> None:
        self._pipe = pipe
        self._client = client
        self._ledger = LedgerFile(ledger)
        self._task = task
        self._random = random.Random(seed)
        self._columns = (*INPUTS, *OUTPUTS) if task == TRAIN else INPUTS

    def step(self) -> None:
        """One lease."""
        try:
            lease = self._client.fetch(self._task, num_rows=_ROWS_PER_FETCH, timeout_s=_FETCH_S)
            if not isinstance(lease, tq.Lease):
                return
            if self._random.random() < _RELEASED_SHARE:
                lease.release()
                return
            batch = self._read(lease)
        except PeerRefused:
            raise
        except TransportError:
            self._pipe.poll(_RETRY_S)
            return
        if batch is not None:
            self._check(batch)
            for unit in dict.fromkeys(lease.units):
                rows = [row for row, home in zip(lease.rows, lease.units, strict=True) if home == unit]
                self._finish(lease, rows, unit)

    def _read(self, lease: tq.Lease) -> tq.PackedBatch | None:
        try:
            return lease.read(self._columns)
        except PeerRefused:
            raise
        except TransportError:  # rows went with their unit, or other consumers have them
            lease.release()
            return None

    def _check(self, batch: tq.PackedBatch) -> None:
        wrong = damaged(batch)
        if self._task == TRAIN:
            tokens, mixed = scored_by(batch)
            wrong += mixed
            for token in set(tokens.values()):
                rows = [row for row, wrote in tokens.items() if wrote == token]
                self._ledger.write(Record(Deed.SEEN, rows, self._task, token))
        if wrong:
            self._ledger.write(Record(Deed.CORRUPT, wrong, self._task))

    def _finish(self, lease: tq.Lease, rows: list[int], unit: str) -> None:
        """One ack, or one put of outputs, for the rows of one unit: it counts for all of them or for none."""
        token = lease.grant.token
        self._ledger.write(Record(Deed.INTENT, rows, self._task, token, unit=unit))
        mine: list[bool] = []
        if _until_known(lambda: mine.append(self._commit(lease, rows)), self._pipe.poll):
            deed = Deed.CONFIRMED if mine[-1] else Deed.FENCED
            self._ledger.write(Record(deed, rows, self._task, token, unit=unit))

    def _commit(self, lease: tq.Lease, rows: list[int]) -> bool:
        return lease.put(scores_of(rows, lease.grant.token), rows) if self._task == SCORE else lease.ack(rows)


def _until_known(attempt: Callable[[], None], told_to_end: Callable[[float], bool]) -> bool:
    """Repeat until it worked or was refused; services may be away for some seconds, and the queue full.

    Args:
        attempt: what to do.
        told_to_end: waits for so many seconds at most; returns whether everything is over.

    Returns:
        False: everything is over, and nobody knows whether it worked.
    """
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        try:
            attempt()
            return True
        except LeaseFenced:
            raise
        except QueueFull:
            if time.monotonic() > deadline:
                raise
            if told_to_end(0.0):
                return False
        except PeerRefused:
            raise
        except TransportError:
            if time.monotonic() > deadline:
                raise
            if told_to_end(_RETRY_S):
                return False
