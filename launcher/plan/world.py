"""Clock and queue of a simulated run; processes are told what happens, and say what comes next. Pure."""

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from launcher.plan.scenario import Scenario
from launcher.plan.task_queue import TaskQueue
from launcher.timeline.run_timeline import Span
from tq.policies import Item, Want
from weightsync.agent.swap_turns import SwapTurns
from workers.admission.state import AdmissionState
from workers.settings.dataflow import ADMITTED, PlacedTask


class Follower(Protocol):
    """A process that computes with the policy's weights."""

    def weights_arrived(self, version: int) -> None:
        """A version can be loaded."""


class Trains(Protocol):
    """All replicas of a role that trains."""

    @property
    def task(self) -> PlacedTask:
        """That it serves."""

    @property
    def num_arrived(self) -> int:
        """Steps whose last round is there."""

    @property
    def num_updated(self) -> int:
        """Steps whose updates are made."""

    def begin(self) -> None:
        """Begin the next step."""

    def look(self) -> None:
        """Rows came."""

    def update(self) -> None:
        """Make the step's updates."""


@dataclass
class _Parked:
    """A fetch that waits."""

    want: int
    version: int
    granted: Callable[[int, list[Item]], None]
    outdated: Callable[[int], None]


@dataclass
class World:
    """Clock, queue and processes; these are told what happens and say what comes next."""

    scenario: Scenario
    steps: int
    further: int = 0
    now: float = 0.0
    worked: float = 0.0
    """Seconds that a worker has computed which always computes: slower than `now` while too many share a machine."""
    version: int = -1
    step_ends: list[float] = field(default_factory=list)
    tokens: dict[int, int] = field(default_factory=dict)
    """Row -> tokens behind its prompt, once it is begun."""
    partition: dict[int, int] = field(default_factory=dict)
    spans: dict[str, list[Span]] = field(default_factory=dict)
    trained: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        scenario = self.scenario
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
        self.followers: list[Follower] = []
        self.gangs: list[Trains] = []
        """The actor, then a critic in a role of its own."""

    def run(self) -> None:
        """Run until the last step is published."""
        while len(self.step_ends) <= self.steps:
            assert self._events or self._work, (
                f"step {len(self.step_ends)}: nothing happens any more at {self.now:.3f} s"
            )
            self._next()()

    def at(self, time: float, action: Callable[[], None]) -> None:
        """Schedule an action at this time (s)."""
        self._number += 1
        heapq.heappush(self._events, (max(time, self.now), self._number, action))

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        """Schedule an action in so many seconds."""
        self.at(self.now + seconds, action)

    def at_work(self, worked: float, action: Callable[[], None]) -> None:
        """Schedule an action once a worker that always computes has computed for so long (s)."""
        if not self.scenario.at_full_speed:
            self.at(worked, action)
            return
        self._number += 1
        heapq.heappush(self._work, (max(worked, self.worked), self._number, action))

    def compute(self, seconds: float, done: Callable[[], None], *, workers: int = 1) -> None:
        """Have workers compute side by side for so long, if nothing slows them down (s); then call `done`."""

        def ended() -> None:
            self.computing(-workers)
            done()

        self.computing(workers)
        self.at_work(self.worked + seconds, ended)

    def request(self, number: int = 1) -> None:
        """The queue serves so many puts or leases, beside those who asked."""
        if self.scenario.at_full_speed:
            self.compute(self.scenario.latency.request_s * number, lambda: None)

    def computing(self, more: int) -> None:
        """So many more workers compute, or fewer."""
        self._computing += more

    def _next(self) -> Callable[[], None]:
        """Let time pass until the next thing happens, and return it."""
        most = self.scenario.at_full_speed
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

    def span(self, process: str, name: str, start: float, end: float, **attributes: object) -> None:
        """Note what a process did."""
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
        """Ask for rows; answered at once or when there are some."""
        request = _Parked(want, version, granted, outdated)
        if not self._serve(task, request):
            self._parked[task].append(request)

    def put(self, task: str, rows: Sequence[int]) -> None:
        """A task's outputs of these rows are in the queue."""
        self.request()
        for reader in self._readers[task]:
            queue, needs = self.queues[reader], len(self._needs[reader])
            for row in rows:
                left = self._missing.pop((reader, row), needs) - 1
                if left:
                    self._missing[reader, row] = left
                else:
                    queue.offer(self.partition[row], row)
            self._wake(reader)

    def publish(self, version: int) -> None:
        """Weights exist: admission goes on, instances hear of them."""
        self.version = version
        self.step_ends.append(self.now)
        self.admission.published(version)
        latency = self.scenario.latency
        self.after(latency.admit_s, self._admit)
        self.after(latency.admit_s + latency.transfer_s, lambda: self._weights_arrived(version))
        for queue in self.queues.values():
            queue.forget(version - 1)

    def arrived(self, gang: Trains) -> None:
        """A gang has a step's last round: the actor updates, a critic once the actor has it, too."""
        actor = self.gangs[0]
        for each in self.gangs if gang is actor else [gang]:
            if each.num_arrived == actor.num_arrived:
                each.update()

    def updated(self, gang: Trains) -> None:
        """A gang made a step's updates: a critic goes on, the actor once both are of the same step."""
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

    def _admit(self) -> None:
        for step in self.admission.admissible():
            rows = [row for group in self.admission.groups_of(step) for row in group.rows]
            self.partition.update(dict.fromkeys(rows, step))
            for name, queue in self.queues.items():
                queue.open(step, rows)
                if not self._needs[name]:
                    for row in rows:
                        queue.offer(step, row)
            for name in self.queues:
                if not self._needs[name]:
                    self._wake(name)

    def _wake(self, task: str) -> None:
        for gang in self.gangs:
            if task == gang.task.name:
                gang.look()
                return
        waiting = self._parked[task]
        if not waiting:
            return
        self._parked[task] = []
        for place, request in enumerate(waiting):
            if not self._serve(task, request):
                self._parked[task].append(request)
                if self.queues[task].spec.max_staleness is None:
                    self._parked[task].extend(waiting[place + 1 :])
                    return

    def _serve(self, task: str, request: _Parked) -> bool:
        queue = self.queues[task]
        bound = queue.spec.max_staleness
        newest = None if bound is None else request.version + 1 + bound
        taken = queue.take(Want(request.want), newest)
        if taken is not None:
            self.request()
            request.granted(*taken)
            return True
        if bound is not None and self.version > request.version and queue.has_ready():
            request.outdated(self.version)
            return True
        return False


def _dependencies(tasks: Sequence[PlacedTask]) -> tuple[Mapping[str, set[str]], Mapping[str, list[str]]]:
    """Return whose outputs each task needs, and who needs its."""
    writers = {name: task.name for task in tasks for name in task.outputs}
    needs = {task.name: {writers[name] for name in task.inputs if name not in ADMITTED} for task in tasks}
    return needs, {task.name: [other for other in needs if task.name in needs[other]] for task in tasks}
