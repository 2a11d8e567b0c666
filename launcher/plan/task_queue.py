"""One task's rows in a simulated queue: which are ready, and who gets them. Pure.

A light twin of `tq.control` without leases, units or failures. The run's own policies (`tq.policies`) decide which rows
go out together and to which rank; where steps take rows of several partitions, `tq.policies.choose` does.
"""

from bisect import insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from tq import policies as task_spec
from tq.policies import Fifo, Item, Offer, Policy, TaskSpec, Want


@dataclass
class _Partition:
    size: int
    ready: list[Item] = field(default_factory=list)
    """Sorted by first row."""
    num_ready: int = 0
    num_tokens: int = 0
    num_taken: int = 0
    waiting: dict[int, list[int]] = field(default_factory=dict)
    """Group -> its ready rows, while the group is incomplete; for tasks that take whole groups."""
    untaken: list[int] = field(default_factory=list)
    """Rows not yet taken, in order; for tasks that take rows in order."""

    @property
    def rest_ready(self) -> bool:
        return self.num_taken + self.num_ready >= self.size


@dataclass(frozen=True)
class Formed:
    """A round: what each rank gets of a partition. `last` means that it completes the step."""

    partition: int
    slices: Sequence[Sequence[Item]]
    last: bool
    time: float


class TaskQueue:
    """The rows of one task. `tokens` (row -> its tokens so far) is shared with the world, which updates it."""

    def __init__(self, spec: TaskSpec, *, group_size: int, tokens: dict[int, int]) -> None:
        self.spec = spec
        self._group_size = group_size
        self._tokens = tokens
        self._parts: dict[int, _Partition] = {}
        self._assigned: dict[int, list[int]] = {}
        self._in_step: dict[int, int] = {}

    def open(self, partition: int, rows: Sequence[int]) -> None:
        """Announce a step with these rows."""
        part = self._parts[partition] = _Partition(len(rows))
        if self.spec.in_order:
            part.untaken = list(rows)

    def offer(self, partition: int, row: int) -> None:
        """Mark a row as ready: all its inputs are there."""
        part = self._parts[partition]
        if self.spec.whole_groups:
            group = row // self._group_size
            members = part.waiting.setdefault(group, [])
            members.append(row)
            if len(members) < self._group_size:
                return
            del part.waiting[group]
            rows = tuple(sorted(members))
            item = Item(rows, sum([self._tokens.get(number, 0) for number in rows]))
        else:
            rows = (row,)
            item = Item(rows, self._tokens.get(row, 0))
        if not part.ready or item > part.ready[-1]:
            part.ready.append(item)
        else:
            insort(part.ready, item)
        part.num_ready += len(rows)
        part.num_tokens += item.tokens

    def take(self, want: Want, newest: int | None) -> tuple[int, list[Item]] | None:
        """Take rows of the oldest partition that has any, but none after partition `newest`; None: nothing to take."""
        for number, part in self._parts.items():
            if not part.num_ready or (self.spec.barrier and not part.rest_ready):
                continue
            # Partitions go out in order: what holds back the oldest one holds back those after it.
            if (newest is not None and number > newest) or not self._front_ready(part, want.num_rows):
                return None
            return number, self._pick(part, want)
        return None

    def has_ready(self) -> bool:
        """Whether some partition has rows to take, whatever its number."""
        return any(part.num_ready and not (self.spec.barrier and not part.rest_ready) for part in self._parts.values())

    def form(self, step: int, want: Want, now: float) -> Formed | None:
        """Form the next round of a step; None: more rows must come first."""
        if self.spec.steps is not None:
            return self._form_first_ready(self.spec.steps, step, want, now)
        part = self._parts.get(step)
        if part is None or not part.num_ready:
            return None
        full = part.num_ready >= want.num_rows or 0 < want.token_budget <= part.num_tokens
        if not (part.rest_ready or (full and not self.spec.barrier)) or not self._front_ready(part, want.num_rows):
            return None
        rest = part.rest_ready
        slices = self._assign(step, self._pick(part, want), want)
        return Formed(step, slices, rest and not part.num_ready, now)

    def forget(self, before: int) -> None:
        """Drop finished partitions of steps before this one."""
        for number in [number for number, part in self._parts.items() if number < before and not part.num_ready]:
            if self._parts[number].num_taken >= self._parts[number].size:
                del self._parts[number]

    def _form_first_ready(self, steps: task_spec.StepSpec, step: int, want: Want, now: float) -> Formed | None:
        assigned = self._in_step.get(step, 0)
        offers = [
            Offer(number, part.num_ready, part.size - part.num_taken)
            for number, part in sorted(self._parts.items())
            if part.size > part.num_taken
        ]
        chosen = task_spec.choose(steps, step, assigned, offers, want.num_rows)
        if chosen is None:
            return None
        picked = self._pick(self._parts[chosen.partition], Want(chosen.num_ready, 0, want.num_ranks))
        self._in_step[step] = assigned + sum(len(item.rows) for item in picked)
        last = self._in_step[step] >= steps.num_rows
        return Formed(chosen.partition, self._assign(step, picked, want), last, now)

    def _assign(self, step: int, items: Sequence[Item], want: Want) -> list[list[Item]]:
        loads = self._assigned.setdefault(step, [0] * want.num_ranks)
        slices = self.spec.policy.assign(items, loads)
        self._assigned[step] = [
            load + sum(item.tokens for item in part) for load, part in zip(loads, slices, strict=True)
        ]
        return slices

    def _pick(self, part: _Partition, want: Want) -> list[Item]:
        policy: Policy = Fifo() if self.spec.in_order else self.spec.policy
        chosen = policy.pick(_each(part.ready), want)
        # Most policies take a prefix, which is cheap to remove.
        if part.ready[: len(chosen)] == chosen:
            del part.ready[: len(chosen)]
        else:
            names = {item.rows[0] for item in chosen}
            part.ready = [item for item in part.ready if item.rows[0] not in names]
        rows = sum(len(item.rows) for item in chosen)
        part.num_ready -= rows
        part.num_taken += rows
        part.num_tokens -= sum(item.tokens for item in chosen)
        if part.untaken:
            taken = {row for item in chosen for row in item.rows}
            part.untaken = [row for row in part.untaken if row not in taken]
        return chosen

    def _front_ready(self, part: _Partition, num_rows: int) -> bool:
        """Whether the rows that come next in order are ready."""
        if not self.spec.in_order or part.rest_ready:
            return True
        ready = {row for item in part.ready for row in item.rows}
        return part.num_ready >= num_rows and ready.issuperset(part.untaken[:num_rows])


def _each(items: Sequence[Item]) -> Iterator[Item]:
    yield from items
