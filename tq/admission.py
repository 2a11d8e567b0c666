"""Admission: the only place that owns the prompt cursor, group ids, row indices, steps and the staleness gate. Pure.

In data order, group g belongs to step g // rollout_batch_size + 1, and its rows are g * G ... g * G + G - 1. A step is
admitted once weights exist that may start it: (s - 1) - v <= max_staleness for the newest version v.

    AdmissionState(..., version=0)  admits steps 1 .. 1 + max_staleness
    version 1 is published          admits step 2 + max_staleness
"""

from dataclasses import dataclass

from tq.config import ScheduleConfig


@dataclass(frozen=True)
class AdmittedGroup:
    """One group with its place.

    Attributes:
        group: id, counts admissions from 0.
        step: whose batch it belongs to.
        rows: its global row indices.
    """

    group: int
    step: int
    rows: tuple[int, ...]


class AdmissionState:
    """The prompt cursor and its gate."""

    def __init__(self, schedule: ScheduleConfig, *, version: int, last_step: int) -> None:
        """Args:
        schedule: batch, group size and staleness bound.
        version: step of the weights at the start; training goes on with step `version + 1`.
        last_step: steps beyond are never admitted.
        """
        self._schedule = schedule
        self._last_step = last_step
        self._version = version
        self._next_step = version + 1

    @property
    def admitted_groups(self) -> int:
        """High-water mark: ids below this were admitted."""
        return (self._next_step - 1) * self._schedule.rollout_batch_size

    def admissible(self) -> list[int]:
        """Return the steps that may be admitted now, each once."""
        newest = min(self._version + 1 + self._schedule.staleness_bound, self._last_step)
        steps = list(range(self._next_step, newest + 1))
        self._next_step = max(self._next_step, newest + 1)
        return steps

    def published(self, version: int) -> None:
        """Weights of `version` exist."""
        self._version = max(self._version, version)

    def groups_of(self, step: int) -> list[AdmittedGroup]:
        """Return the groups of a step, in data order."""
        batch, size = self._schedule.rollout_batch_size, self._schedule.n_samples_per_prompt
        first = (step - 1) * batch
        return [
            AdmittedGroup(group, step, tuple(range(group * size, (group + 1) * size)))
            for group in range(first, first + batch)
        ]
