"""Admission: the only place that owns the prompt cursor, group ids, row indices, steps and the staleness gate. Pure.

In data order, group g belongs to step g // rollout_batch_size + 1, and its rows are g * G ... g * G + G - 1. A step is
admitted once weights exist that may start it: (s - 1) - v <= max_staleness for the newest version v.

    AdmissionState(..., version=0)  admits steps 1 .. 1 + max_staleness
    version 1 is published          admits step 2 + max_staleness

A group in quarantine is replaced by the next id, in its step; later steps go on behind it. So ids stay contiguous, and
steps and refills alone say where every group belongs:

    batch 2, group 1 of step 1 is replaced:  step 1: 0 (1) 4   step 2: 2 3   step 3: 5 6

When a run is resumed, the groups that were trained may be no prefix: some were in quarantine, and with `fill:
first_ready` the step that a group belongs to is not always the one that trains it. So they are named, and the others
fill the steps that follow, in order:

    batch 2, trained 0 4:  step 2: 1 2   step 3: 3 5   step 4: 6 7
"""

import heapq
from bisect import bisect_left
from collections.abc import Collection, Iterable, Mapping

import msgspec

from tq.config import ScheduleConfig
from tq.refill import UNKNOWN, QuarantineCause, Refill


class AdmittedGroup(msgspec.Struct, frozen=True):
    """One group with its place.

    Attributes:
        group: id, counts admissions from 0.
        step: whose batch it belongs to.
        rows: its global row indices; only some of them when the others exist already.
    """

    group: int
    step: int
    rows: tuple[int, ...]


class AdmissionMark(msgspec.Struct):
    """Where admission stands; durable before a group is put, and part of every checkpoint.

    Attributes:
        version: newest weights.
        next_step: the next one to admit.
        refills: in order of their ids.
    """

    version: int
    next_step: int
    refills: list[Refill] = []


class AdmissionState:
    """The prompt cursor and its gate."""

    def __init__(
        self, schedule: ScheduleConfig, *, version: int, last_step: int, trained: Collection[int] = ()
    ) -> None:
        """Args:
        schedule: batch, group size and staleness bound.
        version: step of the weights at the start; training goes on with step `version + 1`.
        last_step: steps beyond are never admitted.
        trained: groups that are in the weights with which the run, or its resumption, began: as many as their steps
            have; none: they are a prefix.
        """
        self._schedule = schedule
        self._last_step = last_step
        self._version = version
        self._next_step = version + 1
        self._refills: list[Refill] = []
        self._trained = frozenset(trained)
        self._num_trained = len(self._trained)
        self._first = next(group for group in range(self._num_trained + 1) if group not in self._trained)
        self._beyond = sorted(group for group in self._trained if group > self._first)

    @staticmethod
    def from_mark(
        mark: AdmissionMark, schedule: ScheduleConfig, *, last_step: int, trained: Collection[int] = ()
    ) -> "AdmissionState":
        """Go on where an earlier incarnation, or a checkpoint, stood; `schedule` has the same batch and group size."""
        state = AdmissionState(schedule, version=mark.version, last_step=last_step, trained=trained)
        state._next_step = mark.next_step
        state._refills = list(mark.refills)
        return state

    @property
    def admitted_groups(self) -> int:
        """High-water mark: ids below this were admitted."""
        return self._in_order((self._next_step - 1) * self._schedule.rollout_batch_size)

    @property
    def group_size(self) -> int:
        """Rows of each group."""
        return self._schedule.n_samples_per_prompt

    @property
    def quarantined(self) -> frozenset[int]:
        """Groups that were replaced."""
        return frozenset(refill.replaced for refill in self._refills)

    def mark(self) -> AdmissionMark:
        """Return where admission stands."""
        return AdmissionMark(self._version, self._next_step, list(self._refills))

    def admissible(self) -> list[int]:
        """Return the steps that may be admitted now, each once."""
        newest = min(self._version + 1 + self._schedule.gate_staleness, self._last_step)
        steps = list(range(self._next_step, newest + 1))
        self._next_step = max(self._next_step, newest + 1)
        return steps

    def untrained(self) -> range:
        """Return the admitted steps of which some groups may be in no weights yet."""
        first = self._num_trained // self._schedule.rollout_batch_size + 1
        return range(max(first, self._version + 1 - self._schedule.lateness), self._next_step)

    def published(self, version: int) -> None:
        """Weights of `version` exist."""
        self._version = max(self._version, version)

    def groups_of(self, step: int) -> list[AdmittedGroup]:
        """Return the groups of a step, in data order, without those in quarantine."""
        batch, absent = self._schedule.rollout_batch_size, self.quarantined
        groups = [self._in_order(place) for place in range((step - 1) * batch, step * batch)]
        groups += [refill.group for refill in self._refills if refill.step == step]
        return [self._group(group, step) for group in groups if group not in absent]

    def refills(self) -> list[Refill]:
        """Return which groups were replaced, in order of their replacements' ids."""
        return list(self._refills)

    def refill(self, step: int, group: int, cause: QuarantineCause = UNKNOWN) -> AdmittedGroup | None:
        """Replace a group of a step by the next one; None: it was replaced before, or is not of this step."""
        if group in self.quarantined or not self._admitted(group) or self.step_of(group) != step:
            return None
        self._refills.append(Refill(self.admitted_groups, step, group, cause))
        return self._group(self._refills[-1].group, step)

    def step_of(self, group: int) -> int:
        """Return the step of an admitted group."""
        earlier = bisect_left(self._refills, group, key=lambda refill: refill.group)
        if earlier < len(self._refills) and self._refills[earlier].group == group:
            return self._refills[earlier].step
        place = self._num_trained + group - self._first - earlier - bisect_left(self._beyond, group)
        return place // self._schedule.rollout_batch_size + 1

    def groups_of_rows(self, rows: Iterable[int]) -> list[AdmittedGroup]:
        """Return the groups that rows belong to, each with these rows only, without those in quarantine."""
        quarantined = self.quarantined
        found: dict[int, list[int]] = {}
        for row in sorted(set(rows)):
            group = row // self.group_size
            if self._admitted(group) and group not in quarantined:
                found.setdefault(group, []).append(row)
        return [AdmittedGroup(group, self.step_of(group), tuple(members)) for group, members in found.items()]

    def missing(self, present: Mapping[int, Collection[int]]) -> list[AdmittedGroup]:
        """Return what must be put again after a restart.

        Args:
            present: step -> rows that are somewhere, or finished.

        Returns:
            Groups of admitted steps that are not trained, each with the rows that are absent.
        """
        missing = []
        for step in self.untrained():
            there = set(present.get(step, ()))
            for group in self.groups_of(step):
                absent = tuple(row for row in group.rows if row not in there)
                if absent:
                    missing.append(AdmittedGroup(group.group, step, absent))
        return missing

    def _admitted(self, group: int) -> bool:
        return 0 <= group < self.admitted_groups and group not in self._trained

    def _in_order(self, place: int) -> int:
        """Return the id of the place-th group of all steps, refills aside."""
        group = self._first + place - self._num_trained
        for taken in heapq.merge(self._beyond, (refill.group for refill in self._refills)):
            if taken > group:
                break
            group += 1
        return group

    def _group(self, group: int, step: int) -> AdmittedGroup:
        size = self.group_size
        return AdmittedGroup(group, step, tuple(range(group * size, (group + 1) * size)))
