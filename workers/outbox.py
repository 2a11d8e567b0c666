"""Finished answers of one lease on their way to the queue, scored, a group's worth at a time.

The rollout adds an answer as it finishes and goes on generating; scoring threads and this outbox's own thread do the
rest, so neither a slow reward nor a slow queue holds up generation.

    rollout thread   add .. add .......... add | close: waits for the last put
    score threads       score ... score ...... score
    outbox thread             put (G answers) .......... put (the rest)

It never decides what is generated or which weights are used.
"""

import logging
import queue
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import torch

from asyncflow.errors import Superseded
from tq.batch import Column, PackedBatch
from tq.client.queue_client import QueueClient
from tq.messages import Granted
from workers.engines.base import Generation
from workers.rewards.scorer import ScoredAnswer, Scorer, score_columns
from workers.samples import SampleLog

logger = logging.getLogger(__name__)

STOP_POLL_S = 0.2


@dataclass(frozen=True)
class RolloutLease:
    """What was leased, and with which weights it is answered.

    Attributes:
        granted: the lease.
        batch: columns `prompts` and `answers` of its rows.
        version: step of the weights that generate all of it.
    """

    granted: Granted
    batch: PackedBatch
    version: int


class Outbox:
    """Scores and puts the answers of one lease; one thread adds and closes."""

    def __init__(
        self, client: QueueClient, lease: RolloutLease, *, scorer: Scorer | None, samples: SampleLog, rows_per_put: int
    ) -> None:
        """Start the thread that puts.

        Args:
            client: holds the lease.
            lease: whose answers come.
            scorer: None when a role of its own computes rewards.
            samples: shows scored answers to a person.
            rows_per_put: answers that are put together, while more are to come.
        """
        self._client = client
        self._lease = lease
        self._scorer = scorer
        self._samples = samples
        self._rows_per_put = rows_per_put
        self._position = {index: k for k, index in enumerate(lease.batch.indices)}
        self._prompts = lease.batch["prompts"].rows()
        self._answers = lease.batch["answers"].texts()
        self._num_added = 0
        self._num_taken = 0
        self._done: queue.SimpleQueue[_Finished | None] = queue.SimpleQueue()
        self._closing = threading.Event()
        self._dropped = threading.Event()
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="outbox", daemon=True)
        self._thread.start()

    def add(self, generation: Generation) -> None:
        """Have an answer scored and put; returns at once.

        Raises:
            Exception: what went wrong with an earlier answer; see `close`.
        """
        if self._failure is not None:
            raise self._failure
        self._num_added += 1
        if self._scorer is None:
            self._done.put(_Finished(generation, None))
            return
        k = self._position[generation.index]
        future = self._scorer.submit(self._prompts[k], generation.response_R, self._answers[k])
        future.add_done_callback(lambda score: self._done.put(_Finished(generation, score)))

    def close(self, *, stop: threading.Event) -> None:
        """Wait until everything that was added is in the queue. Once `stop` is set, nothing more is put. Idempotent.

        Each put has the queue's deadline and each user's reward its own, so this ends.

        Raises:
            TransportError: the queue is gone.
            Exception: what a built-in reward raised; a user's reward that raises only costs its sample.
        """
        self._closing.set()
        self._done.put(None)
        while self._thread.is_alive() and not stop.is_set():
            self._thread.join(STOP_POLL_S)
        if stop.is_set():
            self._dropped.set()
            self._done.put(None)
        elif self._failure is not None:
            raise self._failure

    def _run(self) -> None:
        try:
            while finished := self._gather():
                self._put(finished)
        except Exception as error:  # noqa: BLE001 - the boundary of a thread: `close` raises it
            self._failure = error

    def _gather(self) -> "list[_Finished]":
        """Wait for a put's worth of scored answers, or for all that are left; nothing when there are none."""
        finished: list[_Finished] = []
        while len(finished) < self._rows_per_put and not self._dropped.is_set():
            if self._closing.is_set() and self._num_taken == self._num_added:
                break
            item = self._done.get()
            if item is not None:
                finished.append(item)
                self._num_taken += 1
        return [] if self._dropped.is_set() else finished

    def _put(self, finished: "Sequence[_Finished]") -> None:
        generations = [one.generation for one in finished]
        columns = _answer_columns(generations, self._lease.version)
        scores = [one.score.result() for one in finished if one.score is not None]
        if scores:
            columns |= score_columns(scores)
            self._show(generations, scores)
        try:
            self._client.put("actor_rollout", self._lease.granted, [one.index for one in generations], columns)
        except Superseded as error:
            logger.warning("dropped %d answers: %s", len(generations), error)

    def _show(self, generations: Sequence[Generation], scores: Sequence[ScoredAnswer]) -> None:
        granted = self._lease.granted
        for generation, score in zip(generations, scores, strict=True):
            group = granted.groups[self._position[generation.index]]
            self._samples.write(generation, score, step=granted.partition, group=group, version=self._lease.version)


@dataclass(frozen=True)
class _Finished:
    generation: Generation
    score: "Future[ScoredAnswer] | None"


def _answer_columns(generations: Sequence[Generation], version: int) -> dict[str, Column]:
    """Return the outputs of task `actor_rollout`; every token carries the version of the weights that drew it."""
    responses = Column.of_rows([one.response_R for one in generations])
    return {
        "responses": responses,
        "rollout_log_probs": Column.of_rows([one.log_probs_R for one in generations]),
        "versions": Column(torch.full_like(responses.values, version, dtype=torch.int32), responses.lengths),
        "truncated": Column.of_scalars(torch.tensor([one.truncated for one in generations])),
    }
