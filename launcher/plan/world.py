"""A run in simulated time: the real schedule, with durations in place of computing. Pure: no clock, thread or process.

    admission --prompts--> instances --responses--> reference ... --columns--> actor --version--> admission, instances

The run's own code makes the decisions: admission (`AdmissionState`), queue policies, the choice of rounds,
micro-batches and mini-batches, when an instance swaps weights (`ScheduleMode.may_swap`) and whose turn it is
(`SwapTurns`), which of colocated roles has the devices (`DeviceTurn`, `ScheduleMode.interrupts_for_turns`), and how
responses slow each other down (`Decoding`). Only the processes that wait for each other are simulated here.
"""

import heapq
from bisect import insort
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from launcher.plan.scenario import Scenario
from launcher.process.device_turn import DeviceTurn, TurnAsked, TurnEvent, TurnGiven, TurnGranted, TurnWanted
from launcher.timeline.run_timeline import RunTimeline, Span
from tq import policies
from tq.policies import Fifo, Item, Offer, Policy, TaskSpec, Want
from weightsync.agent.swap_turns import SwapTurns
from workers.admission.admission_state import AdmissionState
from workers.engines.sim.decode_times import Decoding
from workers.rollout.room import room
from workers.rows import micro_batches
from workers.rows.micro_batches import MiniBatchAssigner
from workers.settings.dataflow import CRITIC_TRAIN, TRAINERS, PlacedTask

# One task's rows in a simulated queue: which are ready, and who gets them.
#
# A light twin of `tq.control` without leases, units or failures. The run's own policies (`tq.policies`) decide which
# rows go out together and to which rank; where steps take rows of several partitions, `tq.policies.choose` does.


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

    def offer_row(self, partition: int, row: int) -> None:
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

    def take_rows(self, want: Want, newest: int | None) -> tuple[int, list[Item]] | None:
        """Take rows of the oldest partition that has any, but none after partition `newest`; None: nothing to take."""
        for number, part in self._parts.items():
            if not part.num_ready or (self.spec.barrier and not part.rest_ready):
                continue
            # Partitions go out in order: what holds back the oldest one holds back those after it.
            if (newest is not None and number > newest) or not self._front_ready(part, want.num_rows):
                return None
            return number, self._pick_items(part, want)
        return None

    def has_ready(self) -> bool:
        """Whether some partition has rows to take, whatever its number."""
        return any(part.num_ready and not (self.spec.barrier and not part.rest_ready) for part in self._parts.values())

    def form_round(self, step: int, want: Want, now: float) -> Formed | None:
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
        slices = self._assign_slices(step, self._pick_items(part, want), want)
        return Formed(step, slices, rest and not part.num_ready, now)

    def forget_partitions(self, before: int) -> None:
        """Drop finished partitions of steps before this one."""
        for number in [number for number, part in self._parts.items() if number < before and not part.num_ready]:
            if self._parts[number].num_taken >= self._parts[number].size:
                del self._parts[number]

    def _form_first_ready(self, steps: policies.StepSpec, step: int, want: Want, now: float) -> Formed | None:
        assigned = self._in_step.get(step, 0)
        offers = [
            Offer(number, part.num_ready, part.size - part.num_taken)
            for number, part in sorted(self._parts.items())
            if part.size > part.num_taken
        ]
        chosen = policies.choose(steps, step, assigned, offers, want.num_rows)
        if chosen is None:
            return None
        picked = self._pick_items(self._parts[chosen.partition], Want(chosen.num_ready, 0, want.num_ranks))
        self._in_step[step] = assigned + sum(len(item.rows) for item in picked)
        last = self._in_step[step] >= steps.num_rows
        return Formed(chosen.partition, self._assign_slices(step, picked, want), last, now)

    def _assign_slices(self, step: int, items: Sequence[Item], want: Want) -> list[list[Item]]:
        loads = self._assigned.setdefault(step, [0] * want.num_ranks)
        slices = self.spec.policy.assign(items, loads)
        self._assigned[step] = [
            load + sum(item.tokens for item in part) for load, part in zip(loads, slices, strict=True)
        ]
        return slices

    def _pick_items(self, part: _Partition, want: Want) -> list[Item]:
        policy: Policy = Fifo() if self.spec.in_order else self.spec.policy
        chosen = policy.pick(iter(part.ready), want)
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


@dataclass
class _Parked:
    want: int
    version: int
    granted: Callable[[int, list[Item]], None]
    outdated: Callable[[int], None]


@dataclass
class World:
    """Clock, queue and processes. The world tells processes what happened; they schedule what comes next.

    Two clocks run side by side: `now`, and `worked`, the compute seconds of a worker that never idles. `worked` falls
    behind `now` while more workers compute than the machine can run at full speed (`Times.at_full_speed`).
    """

    scenario: Scenario
    steps: int
    further: int = 0
    now: float = 0.0
    worked: float = 0.0
    version: int = -1
    step_ends: list[float] = field(default_factory=list)
    tokens: dict[int, int] = field(default_factory=dict)
    """Row -> tokens after its prompt; set when the row begins."""
    partition: dict[int, int] = field(default_factory=dict)
    spans: dict[str, list[Span]] = field(default_factory=dict)
    trained: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        scenario = self.scenario
        # Two heaps, one per clock. The running number keeps events of equal time in the order they were scheduled.
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._work: list[tuple[float, int, Callable[[], None]]] = []
        self._computing = 0
        self._number = 0
        size = scenario.schedule.n_samples_per_prompt
        self.queues = {spec.name: TaskQueue(spec, group_size=size, tokens=self.tokens) for spec in scenario.specs}
        self._parked: dict[str, list[_Parked]] = {name: [] for name in self.queues}
        self._needs, self._readers = _dependencies(scenario.tasks)
        self._missing: dict[tuple[str, int], int] = {}
        self.turns = SwapTurns(scenario.max_updating)
        self.admission = AdmissionState(scenario.schedule, version=0, last_step=self.steps + self.further)
        self.followers: list[Instance | ColumnWorker] = []
        self.gangs: list[SimulatedGang] = []
        """The actor, then a critic in a role of its own."""
        self.device_turn: SimulatedTurn | None = None
        """Of colocated roles."""

    def run_to_end(self) -> None:
        """Run until the last step is published.

        Raises:
            AssertionError: no event is left, so every process waits for another.
        """
        while len(self.step_ends) <= self.steps:
            assert self._events or self._work, (
                f"step {len(self.step_ends)}: nothing happens any more at {self.now:.3f} s"
            )
            self._next_event()()

    def schedule_at(self, time: float, action: Callable[[], None]) -> None:
        """Schedule an action at simulated time `time` (s); a time in the past means now."""
        self._number += 1
        heapq.heappush(self._events, (max(time, self.now), self._number, action))

    def schedule_after(self, seconds: float, action: Callable[[], None]) -> None:
        self.schedule_at(self.now + seconds, action)

    def at_work(self, worked: float, action: Callable[[], None]) -> None:
        """Schedule an action for when `worked` reaches this value (s)."""
        if not self.scenario.times.at_full_speed:
            self.schedule_at(worked, action)
            return
        self._number += 1
        heapq.heappush(self._work, (max(worked, self.worked), self._number, action))

    def start_computing(self, seconds: float, done: Callable[[], None], *, workers: int = 1) -> None:
        """Occupy `workers` for `seconds` of work each, longer if too many share the machine; then call `done`."""

        def ended() -> None:
            self.adjust_computing(-workers)
            done()

        self.adjust_computing(workers)
        self.at_work(self.worked + seconds, ended)

    def request(self, number: int = 1) -> None:
        """Charge the queue's CPU time for `number` requests, which only matters where processes share a machine."""
        if self.scenario.times.at_full_speed:
            self.start_computing(self.scenario.times.latency.request_s * number, lambda: None)

    def ask_for_turn(self, gang: "Instance | SimulatedGang") -> None:
        """A sleeping gang of colocated roles could work if it had the devices."""
        if self.device_turn is not None:
            self.device_turn.ask(gang)

    def at_border(self, gang: "Instance | SimulatedGang") -> None:
        """A gang may have nothing to do; where roles are colocated and the other side waits, it goes to sleep."""
        if self.device_turn is not None:
            self.device_turn.give_if_wanted(gang)

    def adjust_computing(self, more: int) -> None:
        """Change the number of workers that compute by `more`, which may be negative."""
        self._computing += more

    def _next_event(self) -> Callable[[], None]:
        """Advance both clocks to the next event and return its action."""
        most = self.scenario.times.at_full_speed
        slowdown = max(1.0, self._computing / most) if most else 1.0
        heap = self._events
        if self._work and (not heap or self.now + (self._work[0][0] - self.worked) * slowdown <= heap[0][0]):
            heap = self._work
            self.now += (heap[0][0] - self.worked) * slowdown
            self.worked = heap[0][0]
        else:
            self.worked = heap[0][0] if not most else self.worked + (heap[0][0] - self.now) / slowdown
            self.now = heap[0][0]
        return heapq.heappop(heap)[2]

    def record_span(self, process: str, name: str, start: float, end: float, **attributes: object) -> None:
        self.spans.setdefault(process, []).append(Span(name, start, end, attributes))

    # The queue

    def fetch(
        self,
        task: str,
        want: int,
        version: int,
        granted: Callable[[int, list[Item]], None],
        outdated: Callable[[int], None],
    ) -> None:
        """Ask for rows. `granted(partition, items)` or `outdated(version)` is called now or later."""
        request = _Parked(want, version, granted, outdated)
        if not self._serve_fetch(task, request):
            self._parked[task].append(request)

    def put(self, task: str, rows: Sequence[int]) -> None:
        """Add a task's outputs of these rows to the queue, and wake the tasks whose inputs are then complete."""
        self.request()
        for reader in self._readers[task]:
            queue, needs = self.queues[reader], len(self._needs[reader])
            for row in rows:
                left = self._missing.pop((reader, row), needs) - 1
                if left:
                    self._missing[reader, row] = left
                else:
                    queue.offer_row(self.partition[row], row)
            self._wake(reader)

    def publish(self, version: int) -> None:
        """Publish a weight version: admission continues, followers hear of it after the transfer."""
        self.version = version
        self.step_ends.append(self.now)
        self.admission.note_published(version)
        latency = self.scenario.times.latency
        self.schedule_after(latency.admit_s, self._admit_prompts)
        self.schedule_after(latency.admit_s + latency.transfer_s, lambda: self._weights_arrived(version))
        for queue in self.queues.values():
            queue.forget_partitions(version - 1)

    def last_round_arrived(self, gang: "SimulatedGang") -> None:
        """A gang has its step's last round: the actor updates at once; a critic updates once the actor has its, too."""
        actor = self.gangs[0]
        for each in self.gangs if gang is actor else [gang]:
            if each.num_arrived == actor.num_arrived:
                each.update()

    def step_updated(self, gang: "SimulatedGang") -> None:
        """A gang finished its step's updates: a critic continues; the actor waits until both are at the same step."""
        actor = self.gangs[0]
        if gang is not actor:
            gang.begin()
        if len({each.num_updated for each in self.gangs}) == 1:
            actor.begin()

    def _weights_arrived(self, version: int) -> None:
        for follower in self.followers:
            follower.weights_arrived(version)
        for task in self.queues:
            self._wake(task)

    def _admit_prompts(self) -> None:
        for step in self.admission.admit_steps():
            rows = [row for group in self.admission.groups_of(step) for row in group.rows]
            self.partition.update(dict.fromkeys(rows, step))
            for name, queue in self.queues.items():
                queue.open(step, rows)
                if not self._needs[name]:
                    for row in rows:
                        queue.offer_row(step, row)
            for name in self.queues:
                if not self._needs[name]:
                    self._wake(name)

    def _wake(self, task: str) -> None:
        for gang in self.gangs:
            if task == gang.task.name:
                gang.form_rounds()
                return
        waiting = self._parked[task]
        if not waiting:
            return
        self._parked[task] = []
        for place, request in enumerate(waiting):
            if not self._serve_fetch(task, request):
                self._parked[task].append(request)
                # Without a staleness bound all requests are alike: what refused one refuses those behind it.
                if self.queues[task].spec.max_staleness is None:
                    self._parked[task].extend(waiting[place + 1 :])
                    return

    def _serve_fetch(self, task: str, request: _Parked) -> bool:
        queue = self.queues[task]
        newest = queue.spec.newest_step(request.version)
        taken = queue.take_rows(Want(request.want), newest)
        if taken is not None:
            self.request()
            request.granted(*taken)
            return True
        # Rows are ready for newer weights only, and these exist: the worker has to load them first.
        if newest is not None and self.version > request.version and queue.has_ready():
            request.outdated(self.version)
            return True
        return False


def _dependencies(tasks: Sequence[PlacedTask]) -> tuple[Mapping[str, set[str]], Mapping[str, list[str]]]:
    """Return, per task, the tasks whose outputs it reads, and the tasks that read its outputs."""
    writers = {name: task.name for task in tasks for name in task.outputs}
    needs = {task.name: {writers[name] for name in task.inputs if name in writers} for task in tasks}
    return needs, {task.name: [other for other in needs if task.name in needs[other]] for task in tasks}


# Workers of roles that only compute columns: `workers.tasks.task_worker` in simulated time.
class ColumnWorker:
    """One worker that fetches rows, computes columns and puts them back, forever."""

    def __init__(self, world: World, task: PlacedTask, number: int) -> None:
        self._name = f"{task.role}-{number}-0"
        self._world = world
        self._task = task
        self._version = 0
        self._ready = 0
        self._needed = 0

    def start(self) -> None:
        """Send the first fetch."""
        self._fetch_rows()

    def weights_arrived(self, version: int) -> None:
        self._ready = version
        if self._needed > self._version and version >= self._needed:
            self._version = version
            self._fetch_rows()

    def _fetch_rows(self) -> None:
        want = self._world.scenario.rows_per_fetch[self._task.role]
        self._world.fetch(self._task.name, want, self._version, self._handle_grant, self._handle_outdated)

    def _handle_outdated(self, version: int) -> None:
        self._needed = version
        if self._ready >= version:
            self._version = self._ready
            self._world.schedule_after(0.0, self._fetch_rows)

    def _handle_grant(self, partition: int, items: list[Item]) -> None:
        world = self._world
        rows = [row for item in items for row in item.rows]
        start = world.now + world.scenario.times.latency.fetch_s
        seconds = sum(work_s(world, name, rows) for name in (*self._task.fused, self._task.name))

        def computed() -> None:
            world.record_span(self._name, self._task.name, start, world.now, step=partition, rows=len(rows))
            world.schedule_after(world.scenario.times.latency.put_s, done)

        def done() -> None:
            world.put(self._task.name, rows)
            self._fetch_rows()

        world.schedule_at(start, lambda: world.start_computing(seconds, computed))


def work_s(world: World, task: str, rows: list[int]) -> float:
    """Return the duration of one call of a task on these rows (s); 0 for a task without a known cost."""
    times = world.scenario.times
    work = times.tasks.get(task)
    if work is None or not rows:
        return 0.0
    lengths = [world.tokens[row] + times.prompt_tokens for row in rows]
    return work.call_duration_s(sum(lengths), sum(length * length for length in lengths), len(rows))


# Roles that train: rounds, micro-batches and mini-batches of `workers.trainer` in simulated time.
#
# ask for rounds (two ahead of the one in work) -> columns, micro-batches -> the last round -> updates -> publish
#
# A critic in a role of its own puts advantages after a round's columns, updates once the actor's last round is there,
# and publishes nothing. The actor begins its next step when both are done with this one.

_AHEAD = 2
"""Rounds that a rank asks for beyond those it took: one being read, one waiting (`ReadAhead`)."""


class SimulatedGang:
    """All replicas of the actor or of a critic. Replicas that wait for each other at every micro-batch move as one."""

    def __init__(self, world: World, task: PlacedTask) -> None:
        self.task = task
        self._world = world
        scenario = world.scenario
        self._role = task.role
        self._replicas = scenario.workers[task.role]
        self._training = scenario.training[task.role]
        settings = self._training.settings
        self._together = task.role in scenario.times.in_step or not self._training.streams
        self._fused = [name for name in task.fused if name != CRITIC_TRAIN]
        # The size of a rank's round, as `workers.trainer` asks for it.
        rows = max(settings.micro_batch_size, scenario.schedule.n_samples_per_prompt)
        self._want = Want(rows * self._replicas, self._training.round_tokens * self._replicas, self._replicas)
        self._formed: list[Formed] = []
        self._asking_for = 1
        # A walker is a set of replicas that move through rounds in step: all of them, or each on its own.
        num_walkers = 1 if self._together else self._replicas
        self._walkers = [list(range(self._replicas))] if self._together else [[rank] for rank in range(self._replicas)]
        self._taken = [0] * num_walkers
        self._idle = [False] * num_walkers
        self._at_end = 0
        self._step = 0
        self.num_arrived = 0
        self.num_updated = 0
        self._arriving = self._make_assigner(0)
        self._kept: list[tuple[Formed, int]] = []
        self._held: list[int] = []
        """Walkers that have a round, but not the devices."""
        self.name, self.asleep = task.role, False

    @property
    def has_work(self) -> bool:
        """Whether it computes, or will although nothing else happens."""
        waiting = len(self._walkers) if self.num_updated == self._step else sum(self._idle) + len(self._held)
        return waiting < len(self._walkers)

    def sleep(self) -> None:
        self.asleep = True

    def wake(self) -> None:
        self.asleep = False
        held, self._held = self._held, []
        for walker in held:
            self._compute_round(walker)

    def form_rounds(self) -> None:
        """Form the rounds asked for, as far as rows have arrived."""
        world = self._world
        queue = world.queues[self.task.name]
        while self._asking_for <= world.steps and len(self._formed) < max(self._taken) + _AHEAD:
            formed = queue.form_round(self._asking_for, self._want, world.now)
            if formed is None:
                return
            self._formed.append(formed)
            world.request(self._replicas)
            if formed.last:
                self._asking_for += 1
            for walker, idle in enumerate(self._idle):
                if idle and self._taken[walker] == len(self._formed) - 1:
                    self._idle[walker] = False
                    world.schedule_after(world.scenario.times.latency.fetch_s, partial(self._compute_round, walker))

    def begin(self) -> None:
        self._step += 1
        if self._step > self._world.steps:
            return
        self._at_end = 0
        self._kept = []
        self._arriving = self._make_assigner(0)
        for walker in range(len(self._walkers)):
            self._next_round(walker)

    def _next_round(self, walker: int) -> None:
        if self._taken[walker] < len(self._formed):
            formed = self._formed[self._taken[walker]]
            ready = formed.time + self._world.scenario.times.latency.fetch_s
            self._world.schedule_at(ready, lambda: self._compute_round(walker))
        else:
            self._idle[walker] = True
            self._world.at_border(self)

    def _compute_round(self, walker: int) -> None:
        world = self._world
        if self.asleep:
            self._held.append(walker)
            world.ask_for_turn(self)
            return
        formed = self._formed[self._taken[walker]]
        self._taken[walker] += 1
        # The round taken makes room for another one ahead.
        self.form_rounds()
        ranks = self._walkers[walker]
        slices = [_rows(formed.slices[rank]) for rank in ranks]
        columns_s = max(sum(self._column_s(name, rows) for name in self._fused) for rows in slices)
        train_s = 0.0
        if self._trains_now(walker, formed):
            train_s = self._train_s(slices)

        def columns() -> None:
            self._compute_on_ranks(ranks, self._fused[0] if self._fused else "", columns_s, train)

        def train() -> None:
            # A critic's outputs go out before it trains, so that the actor need not wait for that.
            for rows in slices if self.task.outputs else ():
                world.schedule_after(world.scenario.times.latency.put_s, partial(world.put, self.task.name, rows))
            self._compute_on_ranks(ranks, "forward_backward", train_s, lambda: self._after_round(walker, formed.last))

        # Python between rounds first, then columns, then the micro-batches.
        world.start_computing(world.scenario.times.latency.round_s, columns, workers=len(ranks))

    def _compute_on_ranks(self, ranks: Sequence[int], name: str, seconds: float, done: Callable[[], None]) -> None:
        world, begin = self._world, self._world.now
        if not seconds:
            done()
            return

        def ended() -> None:
            for rank in ranks:
                world.record_span(f"{self._role}-{rank}", name, begin, world.now, step=self._step)
            done()

        world.start_computing(seconds, ended, workers=len(ranks))

    def _trains_now(self, walker: int, formed: Formed) -> bool:
        """Return whether a round trains on arrival; others are kept for `update`. Only the first mini-batch can."""
        if self._training.streams:
            return True
        total = sum(len(item.rows) for part in formed.slices for item in part)
        self._kept.append((formed, total))
        return self._arriving.assign_round(total) == 0 and not self._training.whole_step

    def _after_round(self, walker: int, last: bool) -> None:
        if not last:
            self._next_round(walker)
            return
        self._at_end += 1
        if self._at_end == len(self._walkers):
            self.num_arrived = self._step
            self._world.last_round_arrived(self)

    def update(self) -> None:
        """Train what was kept, with one optimizer update per mini-batch; a replica that streams trained on arrival."""
        settings = self._training.settings
        num_mini_batches = settings.num_mini_batches
        total_s = 0.0
        for number in range(settings.ppo_epochs if self._kept else 1):
            assigner = self._make_assigner(number)
            seconds = [0.0] * num_mini_batches
            for formed, total in self._kept:
                place = assigner.assign_round(total)
                # The first mini-batch of the first pass trained as it arrived.
                if (number, place) != (0, 0) or self._training.whole_step:
                    seconds[place] += self._train_s([_rows(part) for part in formed.slices])
            total_s += sum(seconds) + num_mini_batches * self._world.scenario.times.update_s[self._role]
        done = self._publish_weights if self._role == "actor" else self._finish_step
        self._compute_on_ranks(range(self._replicas), "optimizer", total_s, done)

    def _publish_weights(self) -> None:
        world = self._world
        published = world.now + world.scenario.times.latency.publish_s
        world.record_span("actor-0", "publish weights", world.now, published, step=self._step)
        world.schedule_at(published, self._finish_publish)

    def _finish_publish(self) -> None:
        world = self._world
        rows = [row for formed in self._formed[: self._taken[0]] for part in formed.slices for row in _rows(part)]
        world.trained.append(sum(world.tokens[row] - world.scenario.turns.read_tokens for row in rows))
        world.publish(self._step)
        self._finish_step()

    def _finish_step(self) -> None:
        self._formed = self._formed[self._taken[0] :]
        self._taken = [0] * len(self._taken)
        self.num_updated = self._step
        self._world.step_updated(self)
        self._world.at_border(self)

    def _column_s(self, task: str, rows: list[int]) -> float:
        size = self._training.rows_per_call
        return sum(work_s(self._world, task, rows[start : start + size]) for start in range(0, len(rows), size))

    def _train_s(self, slices: Sequence[list[int]]) -> float:
        """Return the duration of a round's micro-batches (s): replicas meet at each, so the slowest one counts."""
        cuts = [self._micro_batches(rows) for rows in slices]
        return sum(
            max((part[number] for part in cuts if number < len(part)), default=0.0)
            for number in range(max(map(len, cuts)))
        )

    def _micro_batches(self, rows: list[int]) -> list[float]:
        """Return the duration of each micro-batch of one replica (s)."""
        world = self._world
        training, times = self._training.settings, world.scenario.times
        size, prompt = world.scenario.schedule.n_samples_per_prompt, times.prompt_tokens
        if not training.max_tokens_per_micro_batch:
            cuts = micro_batches.cut_by_rows(range(len(rows)), len(rows), training.micro_batch_size) if rows else []
        else:
            shared = training.shared_prompt
            prompts = [row // size if shared else row for row in rows]
            lengths = [(max(1, prompt), world.tokens[row]) for row in rows]
            cuts = list(micro_batches.cut_by_tokens(prompts, lengths, training.max_tokens_per_micro_batch))
        seconds = []
        for cut in cuts:
            lengths = [(prompt, world.tokens[rows[position]]) for position in cut]
            groups = {rows[position] // size for position in cut} if training.shared_prompt else cut
            tokens = prompt * len(groups) + sum(length for _, length in lengths)
            squares = sum((prompt + length) ** 2 for _, length in lengths)
            seconds.append(times.train[self._role].call_duration_s(tokens, squares))
        return seconds

    def _make_assigner(self, pass_number: int) -> MiniBatchAssigner:
        scenario = self._world.scenario
        number = self._training.settings.num_mini_batches
        seed = f"{scenario.seed}/{self._step}/{pass_number}"
        return MiniBatchAssigner(num_mini_batches=number, size=scenario.schedule.step_rows // number, seed=seed)


def _rows(items: Sequence[Item]) -> list[int]:
    return [row for item in items for row in item.rows]


# Generating instances: `workers.rollout.loop` in simulated time.
_RETRY_S = 0.05
"""Wait after a refused turn to swap (s), as in `workers.rollout.loop`."""


@dataclass
class _Lease:
    """Rows fetched together. Their responses are put `rows_per_put` at a time; `left` are not yet put."""

    partition: int
    left: int
    finished: list[int]


class Instance:
    """A simulated rollout instance."""

    def __init__(self, world: World, task: str, number: int) -> None:
        self.name = f"rollout-{number}-0"
        self._world = world
        self._task = task
        times = world.scenario.times
        self._decoding = Decoding(times.decode_s)
        self._alone_s = times.decode_s(1)
        self._waiting: deque[tuple[_Lease, int]] = deque()
        self._running: dict[int, _Lease] = {}
        self._turns: dict[int, list[tuple[float, float]]] = {}
        """Row -> its remaining turns, last one first: (prompt tokens, seconds of decoding when alone)."""
        self._drawing: dict[int, tuple[float, float]] = {}
        """Row that is drawn -> tokens whose keys and values it had when its turn began, and the clock of then."""
        self._cached: dict[int, float] = {}
        """Row between two turns -> tokens that it has keys and values of."""
        self._calls: list[int] = []
        """Rows whose next turn waits for a slot, as a heap: rows that began earlier go first."""
        self._replied: deque[int] = deque()
        """Rows whose replies the session service has yet to pass on."""
        self._num_drawing = 0
        self._entered_until = 0.0
        """End of the engine step that the last prompts entered (on the clock `worked`)."""
        self._ready = self._version = -1
        self._needed = -1
        self._step = 0
        self._asked = self._draining = self._swapping = False
        self._looks = 0
        self._busy_since: float | None = None
        self._computing = False
        self._coming = 0
        """Leases granted whose rows are on their way."""
        self.asleep = False

    @property
    def has_work(self) -> bool:
        """Whether it draws, or would if it had the devices. Rollouts in their tools are none."""
        draws = self._num_drawing or self._calls or self._waiting
        loads = self._ready >= max(0, self._needed) > self._version
        return bool(draws or self._coming or self._swapping or loads)

    def sleep(self) -> None:
        """Stop where it is: responses keep their tokens, not their keys and values."""
        self.asleep = True
        self._decoding.pause(self._world.worked)
        if self._computing:
            self._computing = False
            self._world.adjust_computing(-1)
        self.note_idle()

    def wake(self) -> None:
        """Go on with the newest weights, after computing keys and values of what runs again."""
        self.asleep = False
        self._version = self._ready
        self._decoding.resume(self._world.worked)
        if self._drawing:
            self._busy_since = self._world.now
            self._compute_again()
        self.advance_rollouts()

    def weights_arrived(self, version: int) -> None:
        self._ready = max(self._ready, version)
        self.advance_rollouts()

    def advance_rollouts(self) -> None:
        """Advance: collect finished turns, swap weights if due, fill free slots."""
        world = self._world
        if self.asleep and self.has_work and not self._coming:
            world.ask_for_turn(self)
        if self._swapping or self.asleep:
            return
        ended = self._decoding.take_ended(world.worked)
        for row in ended:
            self._end_turn(row)
        self._swap_if_due()
        if self._swapping:
            return
        self._fill()
        if ended and not self._running:
            self.note_idle()
        if self._computing != bool(self._num_drawing):
            self._computing = bool(self._num_drawing)
            world.adjust_computing(1 if self._computing else -1)
        # Each look schedules the next one, so only the newest scheduled look counts.
        self._looks += 1
        end, number = self._decoding.next_end, self._looks
        if end is not None:
            world.at_work(end, lambda: self._look_again(number))
        world.at_border(self)

    def _look_again(self, number: int) -> None:
        if number == self._looks:  # otherwise the next end has changed since
            self.advance_rollouts()

    def note_idle(self) -> None:
        """End the timeline's current `generate` span, if there is one."""
        if self._busy_since is not None:
            if self._world.now > self._busy_since:
                self._world.record_span(self.name, "generate", self._busy_since, self._world.now, step=self._step)
            self._busy_since = None

    def _end_turn(self, row: int) -> None:
        """A turn ended; the session service and tools follow, then the next turn."""
        self._num_drawing -= 1
        before, begun = self._drawing.pop(row)
        self._cached[row] = before + (self._decoding.clock_at(self._world.worked) - begun) / self._alone_s
        if not self._world.scenario.most_live:
            self._end_rollout(row)
            return
        self._replied.append(row)
        if len(self._replied) == 1:
            self._serve_reply()

    def _serve_reply(self) -> None:
        """Pass on the first reply, then the next: the session service handles one at a time."""
        world, turns = self._world, self._world.scenario.turns

        def served() -> None:
            row = self._replied.popleft()
            world.schedule_after(max(0.0, turns.tool_s - turns.cpu_s) / turns.replies, lambda: self._go_on(row))
            if self._replied:
                self._serve_reply()

        world.start_computing(turns.cpu_s / turns.replies, served)

    def _go_on(self, row: int) -> None:
        if self._turns[row]:
            heapq.heappush(self._calls, row)
        else:
            self._end_rollout(row)
            if not self._running:
                self.note_idle()
        self.advance_rollouts()

    def _end_rollout(self, row: int) -> None:
        world = self._world
        lease = self._running.pop(row)
        del self._turns[row], self._cached[row]
        lease.finished.append(row)
        if len(lease.finished) >= min(world.scenario.rows_per_put, lease.left):
            rows, lease.finished = lease.finished, []
            lease.left -= len(rows)
            world.schedule_after(world.scenario.times.latency.put_s, lambda: world.put(self._task, rows))

    def _swap_if_due(self) -> None:
        self._draining = False
        if self._ready <= self._version:
            return
        world = self._world
        scenario = world.scenario
        newest = self._waiting[-1][0].partition if self._waiting else 0
        boundary = newest > self._step or self._needed > self._version
        mode, running = scenario.schedule.mode, self._num_drawing
        # As in a run, a boundary is the first row of a later step, or rows that need newer weights.
        due = mode.may_swap(interruptible=scenario.interruptible, num_running=running, boundary=boundary)
        # Draining: a swap would be due if the engine could be interrupted, so start nothing until it has run empty.
        self._draining = not due and mode.may_swap(interruptible=True, num_running=running, boundary=boundary)
        if not due:
            return
        if world.turns.ask(self, self, None):
            self._swapping = True
            self._decoding.stall_responses(scenario.times.pause_s, world.worked)
            world.schedule_after(scenario.times.latency.swap_s, self._finish_swap)
        else:
            world.schedule_after(_RETRY_S, self.advance_rollouts)

    def _finish_swap(self) -> None:
        self._swapping = False
        self._version = self._ready
        self._world.turns.end(self)
        if self._world.scenario.times.recomputes and self._drawing:
            self._compute_again()
        self.advance_rollouts()

    def _compute_again(self) -> None:
        """Compute keys and values of everything that is drawn by the new weights."""
        times, now = self._world.scenario.times, self._world.worked
        clock = self._decoding.clock_at(now)
        tokens = sum(before + (clock - begun) / self._alone_s for before, begun in self._drawing.values())
        self._decoding.stall_responses(times.prefill.call_duration_s(tokens, rows=len(self._drawing)), now)

    def _fill(self) -> None:
        world = self._world
        scenario = world.scenario
        turns, times, waiting = scenario.turns, scenario.times, self._waiting
        begun = min(self._free_places(), len(waiting)) if waiting else 0
        for _ in range(begun):
            lease, row = waiting.popleft()
            self._running[row] = lease
            if lease.partition > self._step:
                self.note_idle()
                self._step = lease.partition
            tokens, number = scenario.tokens(row), turns.num_replies(row)
            world.tokens[row] = tokens + turns.read_tokens
            # The response's tokens are spread evenly over its turns.
            share_s = self._alone_s * tokens / number
            self._turns[row] = [(times.later_tokens, share_s)] * (number - 1) + [(times.first_tokens, share_s)]
            heapq.heappush(self._calls, row)
        if begun and self._busy_since is None:
            self._busy_since = world.now
        self._begin_turns()
        if self._asked or self._version < max(0, self._needed):
            return
        want = self._free_places() - len(waiting)
        if want > 0:
            self._asked = True
            world.fetch(self._task, want, self._version, self._handle_grant, self._handle_outdated)

    def _begin_turns(self) -> None:
        """Begin waiting turns in free slots."""
        scenario, now = self._world.scenario, self._world.worked
        begun: list[tuple[int, float, float]] = []
        while self._calls and self._num_drawing < scenario.times.slots and not self._draining:
            row = heapq.heappop(self._calls)
            begun.append((row, *self._turns[row].pop()))
            self._num_drawing += 1
        if not begun:
            return
        prefill = scenario.times.prefill
        seconds = prefill.call_duration_s(sum(tokens for _, tokens, _ in begun), rows=len(begun))
        # Prompts that join an engine step which others entered pay for their tokens only: the call is paid for.
        if now < self._entered_until:
            seconds -= prefill.call_s
            self._entered_until += seconds
        else:
            self._entered_until = now + seconds + scenario.times.decode_s(self._num_drawing)
        self._decoding.stall_responses(seconds, now)
        read = scenario.turns.read_tokens / max(1.0, scenario.turns.replies - 1)
        for row, _, drawing_s in begun:
            before = self._cached.pop(row) + read if row in self._cached else scenario.times.first_tokens
            self._drawing[row] = before, self._decoding.begin(row, drawing_s, now)

    def _free_places(self) -> int:
        scenario, live = self._world.scenario, len(self._running)
        slots = scenario.times.slots
        # A deterministic run generates batches of fixed size, so nothing joins while one is at work.
        if live and (scenario.deterministic or self._draining):
            return 0
        if not (most := scenario.most_live):
            return slots - live
        return room(places=slots, drawing=self._num_drawing, calls=len(self._calls), live=live, most=most)

    def _handle_grant(self, partition: int, items: list[Item]) -> None:
        rows = [row for item in items for row in item.rows]
        lease = _Lease(partition, len(rows), [])
        self._coming += 1

        def came() -> None:
            self._coming -= 1
            self._asked = False
            self._waiting.extend((lease, row) for row in rows)
            self.advance_rollouts()

        self._world.schedule_after(self._world.scenario.times.latency.fetch_s, came)

    def _handle_outdated(self, version: int) -> None:
        self._asked = False
        self._needed = version
        self._world.schedule_after(0.0, self.advance_rollouts)


# Colocated roles: who has the devices.


class SimulatedTurn:
    """The turn of instances and actor on the same devices: the run's own `DeviceTurn`, with switches that take time.

    All sleep at first. A gang asks when it could work. One that has the devices and hears that the other side wants
    them gives them away at its border: once it has nothing to do, or, an instance in `colocate_async`, at once.
    """

    def __init__(self, world: World, instances: Sequence[Instance], actor: SimulatedGang) -> None:
        self._world = world
        self._actor = actor
        gangs: list[Instance | SimulatedGang] = [*instances, actor]
        self._gangs = {gang.name: gang for gang in gangs}
        self._stops = world.scenario.schedule.mode.interrupts_for_turns
        sides = {gang.name: "actor" if gang is actor else "rollout" for gang in gangs}
        self._turn = DeviceTurn(sides, interrupts=self._stops)
        self._asked: set[str] = set()
        self._wanted: set[str] = set()
        for gang in gangs:
            gang.sleep()

    def ask(self, gang: "Instance | SimulatedGang") -> None:
        if gang.name not in self._asked:
            self._asked.add(gang.name)
            self._follow(TurnAsked(gang.name))

    def give_if_wanted(self, gang: "Instance | SimulatedGang") -> None:
        stops = self._stops and gang is not self._actor
        if gang.name in self._wanted and not gang.asleep and (stops or not gang.has_work):
            gang.sleep()
            self._wanted.discard(gang.name)
            self._follow(TurnGiven(gang.name))
            # An instance that was interrupted wants them back.
            if gang is not self._actor and gang.has_work:
                self.ask(gang)

    def _follow(self, event: TurnEvent) -> None:
        world, times = self._world, self._world.scenario.times
        for said in self._turn.handle(event):
            gang = self._gangs[said.gang]
            match said:
                case TurnGranted():
                    self._asked.discard(said.gang)
                    switch_s = times.to_actor_s if gang is self._actor else times.to_rollout_s
                    world.schedule_after(switch_s + times.latency.turn_s, partial(self._wake, gang))
                case TurnWanted():
                    self._wanted.add(said.gang)
                    world.schedule_after(0.0, partial(self.give_if_wanted, gang))

    def _wake(self, gang: "Instance | SimulatedGang") -> None:
        gang.wake()
        self.give_if_wanted(gang)


@dataclass(frozen=True)
class Simulated:
    """Results of a simulated run.

    Attributes:
        step_ends: when each version was published, from version 0 (s).
        tokens: response tokens that each step trained.
        timeline: spans of all processes, as a real run records them.
        workers: role -> number of workers.
        colocated: roles that share devices.
    """

    step_ends: Sequence[float]
    tokens: Sequence[int]
    timeline: RunTimeline
    workers: Mapping[str, int]
    colocated: Sequence[str] = ()

    def step_s(self, skip: int) -> float:
        """Return the mean step time after the first `skip` steps (s)."""
        return (self.step_ends[-1] - self.step_ends[skip]) / (len(self.step_ends) - 1 - skip)

    def tokens_per_s(self, skip: int) -> float:
        """Return the response tokens trained per second after the first `skip` steps."""
        return sum(self.tokens[skip:]) / (self.step_ends[-1] - self.step_ends[skip])

    def idle(self, skip: int) -> dict[str, float]:
        """Return, per role, the share of the time after the first `skip` steps in which its workers do not compute.

        Colocated roles have one share, of their devices, under the name `rollout+actor`.
        """
        start, end = self.step_ends[skip], self.step_ends[-1]
        busy: dict[str, list[float]] = defaultdict(list)
        for process, spans in self.timeline.spans.items():
            inside = (max(0.0, min(end, span.end) - max(start, span.start)) for span in spans)
            busy[process.partition("-")[0]].append(sum(inside) / (end - start))
        used = {role: sum(shares) / self.workers[role] for role, shares in busy.items()}
        if self.colocated:
            used = {"+".join(self.colocated): sum(used.pop(role, 0.0) for role in self.colocated)} | used
        return {role: 1 - share for role, share in used.items()}


def simulate(scenario: Scenario, *, steps: int, further: int = 0) -> Simulated:
    """Simulate a run of `steps` trained steps.

    Args:
        further: steps admitted beyond those, as in a run that continues.

    Raises:
        AssertionError: a deadlock: every process waits for another.
    """
    world = World(scenario, steps, further)
    by_role = {task.role: task for task in scenario.tasks}
    instances = [Instance(world, by_role["rollout"].name, number) for number in range(scenario.workers["rollout"])]
    columns = [
        ColumnWorker(world, task, number)
        for role, task in by_role.items()
        if role != "rollout" and role not in TRAINERS
        for number in range(scenario.workers[role])
    ]
    gangs = [SimulatedGang(world, by_role[role]) for role in scenario.training]
    world.followers += [*instances, *columns]
    world.gangs += gangs
    if scenario.colocated:
        world.device_turn = SimulatedTurn(world, instances, gangs[0])
    world.publish(0)
    for worker in columns:
        worker.start()
    for gang in gangs:
        gang.begin()
    world.run_to_end()
    for instance in instances:
        instance.note_idle()
    timeline = RunTimeline(world.spans, dict(enumerate(world.step_ends)), {})
    return Simulated(world.step_ends, world.trained, timeline, scenario.workers, scenario.colocated)
