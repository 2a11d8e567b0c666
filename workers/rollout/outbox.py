"""Finished responses on their way to the queue: scored, then put, one group's worth of a lease at a time.

The rollout adds responses and continues generating. Scoring threads and the outbox's own thread do the rest, so that
neither a slow reward nor a slow queue delays generation.

    rollout thread   add .. add .......... add ...            close: waits for the last put
    score threads       score ... score ...... score
    outbox thread             put (G responses) .......... put (the rest of a lease)

If groups are filtered, or rewarded as a whole, the responses of a group wait for each other: all are put, or none.
"""

import queue
import threading
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from tq.client.lease import Lease
from tq.columns import Column, PackedBatch
from workers.records.samples import SampleLog
from workers.rewards.group_filter import GroupFilter
from workers.rewards.scorer import GroupReward, ScoredResponse, Scorer, turn_rewards_column
from workers.rows.finished import FinishedRollout
from workers.rows.packed_rows import TokenSets, TopTokens
from workers.settings.dataflow import KEPT_COLUMNS, ROLLOUT_TOP_COLUMNS, TURN_IDS, TURN_REWARDS

STOP_POLL_S = 0.2


@dataclass(frozen=True, eq=False)
class RolloutLease:
    """A lease of prompts with its columns `prompts`, `ground_truth` and, for user functions, `tasks`."""

    lease: Lease
    batch: PackedBatch

    @cached_property
    def position(self) -> dict[int, int]:
        """Row index -> position within the lease."""
        return {index: k for k, index in enumerate(self.batch.indices)}

    @property
    def partition(self) -> int:
        """The step that its rows were admitted for."""
        return self.lease.partition

    def group_of(self, index: int) -> int:
        return self.lease.groups[self.position[index]]

    @cached_property
    def prompts(self) -> Sequence[Tensor]:
        """Tokens, int64 [P] each."""
        return list(self.batch["prompts"].rows())

    @cached_property
    def tasks(self) -> Sequence[str]:
        """The data rows, JSON each; "{}" if no user function reads them."""
        return self.batch["tasks"].texts() if "tasks" in self.batch.columns else ["{}"] * len(self.batch)

    @cached_property
    def ground_truths(self) -> Sequence[str]:
        return self.batch["ground_truth"].texts()


class Outbox:
    """Scores and puts the responses of one instance; one thread adds and closes.

    Args:
        scorer: None if a separate role computes rewards.
        rows_per_put: responses of a lease that are put together while more of it are to come.
        group_filter: decides which groups are trained on; None: all.
        group_reward: rewards the members of a group together; None: each has its own reward.
        failed: called by the outbox's thread when `check` would raise.
        outputs: columns of the rollout's task; those that not every run has are put if they are among them.
    """

    def __init__(
        self,
        *,
        scorer: Scorer | None,
        samples: SampleLog,
        rows_per_put: int,
        group_filter: GroupFilter | None = None,
        group_reward: GroupReward | None = None,
        failed: Callable[[], None] = lambda: None,
        outputs: Collection[str] = (),
    ) -> None:
        self._failed = failed
        self._outputs = frozenset(outputs)
        self._scorer = scorer
        self._samples = samples
        self._rows_per_put = rows_per_put
        self._filter = group_filter
        self._group_reward = group_reward
        self._by_group = group_filter is not None or group_reward is not None
        # Responses of an epoch before the last `abandon_unsent` count as put, but are dropped.
        self._epoch = 0
        self._dropped_epochs = 0
        self._num_added = 0
        self._num_put = 0
        self._done: queue.SimpleQueue[_Finished | _Rewarded | None] = queue.SimpleQueue()
        self._finished: dict[_Lot, list[_Finished]] = {}
        self._left: dict[_Lot, int] = {}
        # Groups that left the queue while others of their rows were running here
        self._groups_left: dict[RolloutLease, set[int]] = {}
        self._closing = threading.Event()
        self._dropped = threading.Event()
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._put_until_closed, name="outbox", daemon=True)
        self._thread.start()

    def add_rollout(self, lease: RolloutLease, rollout: FinishedRollout) -> None:
        """Score and put a rollout in the background; raises the failure of an earlier response, see `close`."""
        self.check()
        self._num_added += 1
        epoch = self._epoch
        if self._scorer is None:
            self._done.put(_Finished(lease, rollout, None, epoch))
            return
        place = lease.position[rollout.index]
        future = self._scorer.score(rollout, lease.ground_truths[place], lease.tasks[place])
        future.add_done_callback(lambda score: self._done.put(_Finished(lease, rollout, score, epoch)))

    def abandon_unsent(self) -> None:
        """Drop responses that are not put yet: their leases are void."""
        self._epoch += 1
        self._done.put(None)

    def check(self) -> None:
        """Raise the failure of an earlier response, if any; see `close`."""
        if self._failure is not None:
            raise self._failure

    def close(self, *, stop: threading.Event) -> None:
        """Wait until everything that was added is in the queue; once `stop` is set, put nothing more. Idempotent.

        Terminates, since each put has the queue's deadline and each user reward its own. Raises TransportError if the
        queue is gone, and any exception of a built-in reward (a failing user reward only costs its sample).
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

    def _put_until_closed(self) -> None:
        try:
            # Dropped responses count as put, so that this ends.
            while not (self._closing.is_set() and self._num_put == self._num_added):
                one = self._done.get()
                if self._dropped.is_set():
                    return
                self._drop_abandoned()
                if isinstance(one, _Finished):
                    self._gather_finished(one)
                elif one is not None:
                    self._put_rewarded(one)
        except Exception as error:  # noqa: BLE001 - boundary of a thread: `close` raises it
            self._failure = error
            self._failed()

    def _drop_abandoned(self) -> None:
        if self._dropped_epochs < self._epoch:
            self._dropped_epochs = self._epoch
            self._num_put += sum(map(len, self._finished.values()))
            self._finished.clear()
            self._left.clear()
            self._groups_left.clear()

    def _gather_finished(self, one: "_Finished") -> None:
        """Collect responses; put those of a lease, or group, once there are enough or all of the rest."""
        if one.epoch < self._dropped_epochs:
            self._num_put += 1
            return
        lot = _Lot(one.lease, one.lease.group_of(one.rollout.index) if self._by_group else None)
        together = self._finished.setdefault(lot, [])
        together.append(one)
        left = self._left.setdefault(lot, lot.num_rows)
        # The rest of a lot is put even if it is less than the usual number.
        if len(together) >= min(self._rows_per_put if lot.group is None else left, left):
            self._reward_and_put(one.lease, self._finished.pop(lot), one.epoch)
            self._left[lot] = left - len(together)
            if not self._left[lot]:
                del self._left[lot]
                if not any(other.lease is one.lease for other in self._left):
                    self._groups_left.pop(one.lease, None)

    def _reward_and_put(self, lease: RolloutLease, finished: "list[_Finished]", epoch: int) -> None:
        """Put responses, after rewarding them as a group if so configured."""
        if self._group_reward is None or any(one.rollout.leaves for one in finished):
            self._put_rows(lease, finished)
            self._num_put += len(finished)
            return
        finished = sorted(finished, key=lambda one: one.rollout.index)
        first = lease.position[finished[0].rollout.index]
        scores = [one.score.result() for one in finished if one.score is not None]
        rewarded = self._group_reward.reward_group(lease.tasks[first], [one.rollout for one in finished], scores)
        rewarded.add_done_callback(lambda done: self._done.put(_Rewarded(lease, finished, done, epoch)))

    def _put_rewarded(self, group: "_Rewarded") -> None:
        if group.epoch >= self._dropped_epochs:
            self._put_rows(group.lease, group.finished, group.scores.result())
        self._num_put += len(group.finished)

    def _put_rows(
        self, lease: RolloutLease, finished: "Sequence[_Finished]", rewarded: Sequence[ScoredResponse] = ()
    ) -> None:
        """Put rows; `rewarded` replaces their own scores, in which case none of them leaves."""
        leaving = [one.rollout for one in finished if one.rollout.leaves]
        # A member that leaves takes its group along: rows of it that finish later leave as well.
        left = self._groups_left.get(lease, set()) | {lease.group_of(one.index) for one in leaving}
        if left:
            self._groups_left[lease] = left
        for one in leaving:
            lease.lease.filter([one.index], failures=one.failures)
        if left:  # the queue rejects a whole put for rows that it no longer has
            late = {one.rollout.index for one in finished if lease.group_of(one.rollout.index) in left}
            lease.lease.filter([row for row in lease.lease.open_rows if row in late])
            finished = [one for one in finished if one.rollout.index not in late]
        if finished:
            rollouts = [one.rollout for one in finished]
            rows = [one.index for one in rollouts]
            columns = _columns(rollouts, self._outputs)
            scores = rewarded or [one.score.result() for one in finished if one.score is not None]
            if scores and self._scorer is not None:
                columns |= self._scorer.columns(scores)
                if TURN_REWARDS in self._outputs:
                    columns[TURN_REWARDS] = turn_rewards_column(rollouts, scores)
                self._write_samples(lease, rollouts, scores)
            if self._teaches_nothing(lease, rows, scores, columns.get(TURN_REWARDS)):
                lease.lease.filter(rows)
            else:
                lease.lease.put(columns, rows)

    def _teaches_nothing(
        self, lease: RolloutLease, rows: Sequence[int], scores: Sequence[ScoredResponse], turns: Column | None
    ) -> bool:
        """Return whether the filter refuses these rows of one group."""
        if self._filter is None:
            return False
        groups = [lease.group_of(row) for row in rows]
        apart = [] if turns is None else [own.tolist() for own in turns.rows()]
        return bool(self._filter.refused(groups, [score.reward for score in scores], apart))

    def _write_samples(
        self, lease: RolloutLease, rollouts: Sequence[FinishedRollout], scores: Sequence[ScoredResponse]
    ) -> None:
        groups = [lease.group_of(rollout.index) for rollout in rollouts]
        self._samples.write(rollouts, scores, groups, step=lease.partition)


@dataclass(frozen=True)
class _Lot:
    """Responses that are counted together: a lease or, with `group`, one of its groups."""

    lease: RolloutLease
    group: int | None

    @property
    def num_rows(self) -> int:
        groups = self.lease.lease.groups
        return len(groups) if self.group is None else groups.count(self.group)


@dataclass(frozen=True)
class _Finished:
    lease: RolloutLease
    rollout: FinishedRollout
    score: "Future[ScoredResponse] | None"
    epoch: int


@dataclass(frozen=True)
class _Rewarded:
    lease: RolloutLease
    finished: "list[_Finished]"
    scores: "Future[Sequence[ScoredResponse]]"
    epoch: int


def _turn_ids(rollout: FinishedRollout) -> Tensor:
    given = rollout.turn_ids_A
    return torch.zeros(len(rollout.log_probs_A), dtype=torch.int32) if given is None else given


# What an engine reports of a rollout without drawn tokens.
_NO_IDS = torch.zeros(0, dtype=torch.int32)
_NO_SETS, _NO_TOKENS = TokenSets(_NO_IDS, _NO_IDS), TopTokens(_NO_IDS, torch.zeros(0))


def _columns(rollouts: Sequence[FinishedRollout], outputs: Collection[str] = ()) -> dict[str, Column]:
    """Return the outputs of task `actor_rollout`, of those that not every run has `outputs`.

    Which ones these are does not depend on the rollouts: rows that lacked one would never be ready.
    """
    parts: dict[str, list[Tensor]] = {}
    if KEPT_COLUMNS[0] in outputs:
        kept = [one.kept or _NO_SETS for one in rollouts]
        parts |= zip(KEPT_COLUMNS, ([one.ids_P for one in kept], [one.counts_A for one in kept]), strict=True)
    if ROLLOUT_TOP_COLUMNS[0] in outputs:
        top = [one.top or _NO_TOKENS for one in rollouts]
        flat = [one.ids_RK.flatten() for one in top], [one.log_probs_RK.flatten() for one in top]
        parts |= zip(ROLLOUT_TOP_COLUMNS, flat, strict=True)
    if TURN_IDS in outputs:
        parts[TURN_IDS] = [_turn_ids(one) for one in rollouts]
    return {
        **{name: Column.of_rows(rows) for name, rows in parts.items()},
        "tokens": Column.of_rows([one.tokens_T for one in rollouts]),
        "sample_lengths": Column.of_rows([torch.tensor(one.sample_lengths, dtype=torch.int32) for one in rollouts]),
        "response_mask": Column.of_rows([one.response_mask_T for one in rollouts]),
        "rollout_log_probs": Column.of_rows([one.log_probs_A for one in rollouts]),
        "versions": Column.of_rows([one.versions_A for one in rollouts]),
        "truncated": Column.of_scalars(torch.tensor([one.truncated for one in rollouts])),
    }
