"""Admission: the only owner of prompt cursor, group ids, row indices, steps and the staleness gate. Pure.

In data order, group g belongs to step g // rollout_batch_size + 1, and its rows are g * G ... g * G + G - 1. A step is
admitted once weights exist that may start it: (s - 1) - v <= max_staleness for the newest version v.

    AdmissionState(..., version=0)  admits steps 1 .. 1 + max_staleness
    version 1 is published          admits step 2 + max_staleness

A dead-letter group, or a group filtered out because it would teach nothing, is replaced in its step by the next id;
later steps continue behind it. So ids stay contiguous, and steps and refills alone determine the place of every group:

    batch 2, group 1 of step 1 is replaced:  step 1: 0 (1) 4   step 2: 2 3   step 3: 5 6

When a run is resumed, the trained groups may not be a prefix: some were dead letters, and with `fill: first_ready` a
group's step is not always the one that trains it. So the trained groups are listed, and the others fill the following
steps in order; dead letters are tried again, filtered groups are not:

    batch 2, trained 0 4:               step 2: 1 2   step 3: 3 5   step 4: 6 7
    batch 2, trained 0 4, filtered 2:   step 2: 1 3   step 3: 5 6

If prompts are fed (`data.source: feed`), group g has row g of the feed, so a step also waits until all its groups have
rows. The first step that the ended feed cannot fill is not admitted, nor are later ones:

    batch 2, rows 0 1 2 fed:        step 1
    rows 3 4 fed, then the end:     step 2, the last one; row 4 replaces a group that leaves, or is left over
"""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Collection, Iterable, Mapping
from typing import Self

import msgspec

from asyncflow.errors import NothingToLearn, TooManyFailures
from tq.refill import UNKNOWN, AdmissionMark, Refill, RemovalCause
from workers.settings.schedule import ScheduleConfig


class AdmittedGroup(msgspec.Struct, frozen=True):
    group: int  # id, counts admissions from 0
    step: int  # The step whose batch it belongs to
    rows: tuple[int, ...]  # Its global row indices; only some of them if the others exist already


class AdmissionState:
    """The prompt cursor and its gate. Training continues with step `version + 1`.

    Args:
        trained: groups trained into the weights that the run started or resumed from, as many as their steps have;
            empty: they are a prefix.
        filtered: groups that were filtered out before the run was resumed.
        max_filtered, max_dead_letters: most groups of a step that may be filtered out or dead letters; None: any
            number.
        num_fed: rows of the feed so far; None: there is no feed, and each group has a prompt.
    """

    def __init__(
        self,
        schedule: ScheduleConfig,
        *,
        version: int,
        last_step: int,
        trained: Collection[int] = (),
        filtered: Collection[int] = (),
        max_filtered: int | None = None,
        max_dead_letters: int | None = None,
        num_fed: int | None = None,
    ) -> None:
        self._schedule = schedule
        self._last_step = last_step
        self._version = version
        self._next_step = version + 1
        self._refills: list[Refill] = []
        self._replaced: set[int] = set()
        self._by_step: dict[int, list[Refill]] = {}
        self._trained = frozenset(trained)
        self._num_trained = len(self._trained)
        self._over = self._trained.union(filtered)
        self._first = next(group for group in range(len(self._over) + 1) if group not in self._over)
        self._beyond = sorted(group for group in self._over if group > self._first)
        # Sorted ids above the first that no step has in data order: trained and filtered groups, and refills.
        self._taken = list(self._beyond)
        self._max_filtered = max_filtered
        self._max_dead_letters = max_dead_letters
        self._num_fed, self._feed_ended = num_fed, False

    def restore_mark(self, mark: AdmissionMark) -> Self:
        """Continue where an earlier incarnation or a checkpoint stood, with the same batch and group size."""
        self._version, self._next_step = mark.version, mark.next_step
        for refill in mark.refills:
            self._add_refill(refill)
        return self

    @property
    def admitted_groups(self) -> int:
        """High-water mark: ids below this were admitted."""
        return self._in_order((self._next_step - 1) * self._schedule.rollout_batch_size)

    @property
    def last_admitted_step(self) -> int:
        return self._next_step - 1

    @property
    def version(self) -> int:
        return self._version

    def required_version(self, step: int) -> int:
        """Return the version that must exist before a step is admitted."""
        return self._schedule.gate.oldest_version(step)

    @property
    def group_size(self) -> int:
        return self._schedule.n_samples_per_prompt

    @property
    def replaced(self) -> frozenset[int]:
        return frozenset(self._replaced)

    def make_mark(self) -> AdmissionMark:
        return AdmissionMark(self._version, self._next_step, list(self._refills))

    def admit_steps(self) -> list[int]:
        """Return the steps that may be admitted now; each step is returned once."""
        newest = min(self._schedule.gate.newest_step(self._version), self._last_step)
        first = self._next_step
        while self._next_step <= newest and self._is_fed(self._next_step):
            self._next_step += 1
        return list(range(first, self._next_step))

    def untrained_steps(self) -> range:
        """Return the admitted steps that may have groups in no weights yet."""
        first = self._num_trained // self._schedule.rollout_batch_size + 1
        return range(max(first, self._version + 1 - self._schedule.lateness), self._next_step)

    def note_published(self, version: int) -> None:
        self._version = max(self._version, version)

    def note_fed(self, num_rows: int, *, ended: bool) -> None:
        """Note the number of rows of the feed so far; `ended`: no more will come."""
        self._num_fed, self._feed_ended = num_rows, ended

    @property
    def ended_at(self) -> int | None:
        """The last step, if the feed ended before the run's own last step; it never changes then. Otherwise None."""
        over = self._feed_ended and self._next_step <= self._last_step and not self._is_fed(self._next_step)
        return self._next_step - 1 if over else None

    @property
    def num_left(self) -> int:
        return max(0, (self._num_fed or 0) - self.admitted_groups)

    @property
    def can_refill(self) -> bool:
        """Whether there is a prompt for one more group; a feed that ended starts over for refills."""
        return self._num_fed is None or self._feed_ended or self.num_left > 0

    def groups_of(self, step: int) -> list[AdmittedGroup]:
        """Return the groups of a step, in data order, without replaced ones."""
        batch, absent = self._schedule.rollout_batch_size, self._replaced
        groups = [self._in_order(place) for place in range((step - 1) * batch, step * batch)]
        groups += [refill.group for refill in self._by_step.get(step, ())]
        return [self._make_group(group, step) for group in groups if group not in absent]

    def list_refills(self) -> list[Refill]:
        """Return the replaced groups, ordered by their replacements' ids."""
        return list(self._refills)

    def refill_group(self, step: int, group: int, cause: RemovalCause = UNKNOWN) -> AdmittedGroup | None:
        """Replace a group of a step by the next one; None: it was replaced before, or does not belong to this step.
        Raises NothingToLearn or TooManyFailures if too many groups of the step were filtered out or are dead letters.
        """
        if group in self._replaced or not self._is_admitted(group) or self.step_of(group) != step:
            return None
        if cause.filtered:
            self._check_filtered(step)
        else:
            self._check_dead_letters(step, cause)
        self._add_refill(Refill(self.admitted_groups, step, group, cause))
        return self._make_group(self._refills[-1].group, step)

    def step_of(self, group: int) -> int:
        earlier = bisect_left(self._refills, group, key=lambda refill: refill.group)
        if earlier < len(self._refills) and self._refills[earlier].group == group:
            return self._refills[earlier].step
        place = self._num_trained + group - self._first - earlier - bisect_left(self._beyond, group)
        return place // self._schedule.rollout_batch_size + 1

    def groups_of_rows(self, rows: Iterable[int]) -> list[AdmittedGroup]:
        """Return the groups of rows, each with these rows only, without replaced groups."""
        found: dict[int, list[int]] = {}
        for row in sorted(set(rows)):
            group = row // self.group_size
            if self._is_admitted(group) and group not in self._replaced:
                found.setdefault(group, []).append(row)
        return [AdmittedGroup(group, self.step_of(group), tuple(members)) for group, members in found.items()]

    def missing_groups(self, present: Mapping[int, Collection[int]]) -> list[AdmittedGroup]:
        """Return the untrained groups to put again after a restart, each with its absent rows. `present`: step -> rows
        that exist somewhere, or are finished."""
        missing = []
        for step in self.untrained_steps():
            there = set(present.get(step, ()))
            for group in self.groups_of(step):
                absent = tuple(row for row in group.rows if row not in there)
                if absent:
                    missing.append(AdmittedGroup(group.group, step, absent))
        return missing

    def _check_filtered(self, step: int) -> None:
        number = sum(refill.cause.filtered for refill in self._by_step.get(step, ())) + 1
        if self._max_filtered is not None and number > self._max_filtered:
            batch = self._schedule.rollout_batch_size
            raise NothingToLearn(
                f"step {step}: {number} groups, {number / (number + batch):.0%} of those that were generated for it, "
                f"were refused by algorithm.group_filter or skipped by the rollout function; check in samples/ whether "
                f"the reward function is right, use prompts that are sometimes answered correctly, or raise "
                f"algorithm.max_filtered_share"
            )

    def _check_dead_letters(self, step: int, cause: RemovalCause) -> None:
        number = sum(not refill.cause.filtered for refill in self._by_step.get(step, ())) + 1
        if self._max_dead_letters is not None and number > self._max_dead_letters:
            raise TooManyFailures(
                f"step {step}: {number} of its {number + self._schedule.rollout_batch_size} groups so far became dead "
                f"letters (rollout.max_failed_share), this one after {cause.deliveries} deliveries to "
                f"{cause.task or 'a task'}"
            )

    def _is_admitted(self, group: int) -> bool:
        return 0 <= group < self.admitted_groups and group not in self._over

    def _is_fed(self, step: int) -> bool:
        last = self._in_order(step * self._schedule.rollout_batch_size - 1)
        return self._num_fed is None or last < self._num_fed

    def _in_order(self, place: int) -> int:
        """Return the id of the place-th group of all steps, refills aside."""
        group, taken = self._first + place - self._num_trained, self._taken
        # `taken[k] - k` counts the free ids below the k-th taken one.
        return group + bisect_right(range(len(taken)), group, key=lambda k: taken[k] - k)

    def _add_refill(self, refill: Refill) -> None:
        self._refills.append(refill)
        self._replaced.add(refill.replaced)
        self._by_step.setdefault(refill.step, []).append(refill)
        insort(self._taken, refill.group)

    def _make_group(self, group: int, step: int) -> AdmittedGroup:
        size = self.group_size
        return AdmittedGroup(group, step, tuple(range(group * size, (group + 1) * size)))
