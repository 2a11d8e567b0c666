"""The staleness bound under fire: the real rules (admission, queue, gate, swaps) in simulated time, without processes.

    admission -> queue -> 8 instances, some late with their weights, some killed -> queue -> trainer -> version ...
                 now and then everything dies, and the run goes on from an older checkpoint

Responses have heavy tails (Pareto); an instance hears of new weights after a random while and swaps when `may_swap`
says so; a killed one loses its leases, which are fenced and handed out again; after a resume the lineage's later steps
are forgotten. What a sample's first token was drawn with is noted when it starts, and checked when it is trained.
"""

import heapq
import itertools
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from tq.control.events import Answer, Event, Fenced, OrderFenceRows, OwnerGone
from tq.control.state import ControlState
from tq.messages import (
    FetchRound,
    FetchRows,
    LeaseGrant,
    NoRows,
    NoRowsReason,
    OpenPartition,
    OutputsWritten,
    PublishVersion,
    RowsCreated,
)
from tq.policies import StepSpec, TaskSpec
from workers.admission.admission_state import AdmissionState
from workers.engines.sim.decode_times import SimLengths
from workers.settings.schedule import Fill, ScheduleConfig, ScheduleMode
from workers.settings.sim import SimConfig

_INSTANCES, _SLOTS, _BATCH, _GROUP, _ROUND = 8, 8, 64, 4, 32
_UNIT, _ROLLOUT, _TRAIN = "storage-0", "actor_rollout", "actor_train"
_DECODE_S, _TRAIN_S = 0.005, 0.0001
_CHECKPOINT_STEPS = 3


@dataclass
class Fire:
    """What happened.

    Attributes:
        samples: trained, those that a resume gave up included.
        violations: samples outside 0 ... max_staleness.
        staleness: how many samples had which.
        kills, resumes: of instances; of the whole run.
        missing, twice: samples of the surviving lineage's steps that were not trained; that were more than once.
    """

    samples: int = 0
    violations: int = 0
    staleness: Counter[int] = field(default_factory=Counter)
    kills: int = 0
    resumes: int = 0
    missing: int = 0
    twice: int = 0


def under_fire(mode: ScheduleMode, max_staleness: int, *, samples: int, seed: int, fill: Fill = Fill.IN_ORDER) -> Fire:
    """Simulate a run until so many samples were trained."""
    fire, chance = Fire(), random.Random(seed)
    schedule = ScheduleConfig(
        mode=mode, max_staleness=max_staleness, fill=fill, rollout_batch_size=_BATCH, n_samples_per_prompt=_GROUP
    )
    trained: dict[int, list[int]] = {}
    version = 0
    while fire.samples < samples:
        life = _Life(schedule, fire, trained, version=version, chance=chance)
        life.run(until=min(samples, fire.samples + chance.randrange(20, 60) * _BATCH * _GROUP))
        fire.resumes += 1
        version = life.version // _CHECKPOINT_STEPS * _CHECKPOINT_STEPS
        for step in [step for step in trained if step > version]:
            del trained[step]
    counts = Counter(row for rows in trained.values() for row in rows)
    fire.missing = version * _BATCH * _GROUP - len(counts)
    fire.twice = sum(count > 1 for count in counts.values())
    return fire


@dataclass
class _Instance:
    """One rollout instance; `life` tells its incarnations apart."""

    name: str
    version: int
    newest: int
    life: int = 0
    running: dict[int, tuple[LeaseGrant, int]] = field(default_factory=dict)
    step: int = 0
    asking: bool = False
    needs: int = 0

    @property
    def owner(self) -> str:
        return f"{self.name}-{self.life}"


class _Life:
    """From a start, or a resume, until everything dies."""

    def __init__(
        self,
        schedule: ScheduleConfig,
        fire: Fire,
        trained: dict[int, list[int]],
        *,
        version: int,
        chance: random.Random,
    ) -> None:
        self.version = version
        self._schedule, self._fire, self._trained, self._chance = schedule, fire, trained, chance
        sim = SimConfig(lengths="pareto", sigma=0.8, clip=30, mean_tokens=200)
        self._lengths = SimLengths(sim, samples_per_step=_BATCH * _GROUP, seed=0)
        gate, lateness = schedule.gate_staleness, schedule.lateness
        steps = StepSpec(schedule.step_rows, lateness) if lateness else None
        tasks = [
            TaskSpec(_ROLLOUT, frozenset({"prompts"}), frozenset({"responses"}), whole_groups=True, max_staleness=gate),
            TaskSpec(_TRAIN, frozenset({"responses"}), whole_groups=True, keeps_leases=True, steps=steps),
        ]
        self._state = ControlState(tasks, version=version)
        groups = {row // _GROUP for rows in trained.values() for row in rows}
        self._admission = AdmissionState(schedule, version=version, last_step=1 << 30, trained=groups)
        self._instances = [_Instance(f"rollout-{k}", version, version) for k in range(_INSTANCES)]
        self._drawn_with: dict[int, int] = {}
        self._round = 0
        self._now = 0.0
        self._order = itertools.count()
        self._agenda: list[tuple[float, int, Callable[[], None]]] = []
        self._requests = itertools.count(1)
        self._replies: dict[int, Callable[[LeaseGrant | NoRows], None]] = {}

    def run(self, *, until: int) -> None:
        """Go on until so many samples were trained."""
        self._admit()
        for instance in self._instances:
            self._fill(instance)
        self._after(self._chance.uniform(1, 10), self._kill)
        self._next_round()
        while self._fire.samples < until:
            self._now, _, action = heapq.heappop(self._agenda)
            action()

    # The queue

    def _tell(self, event: Event, request: int = 0) -> None:
        for instruction in self._state.handle(event, request):
            match instruction:
                case Answer(number, reply) if number in self._replies:
                    assert isinstance(reply, LeaseGrant | NoRows), reply
                    self._replies.pop(number)(reply)
                case OrderFenceRows(task, token):
                    self._after(self._chance.uniform(0, 0.2), partial(self._tell, Fenced(task, token)))

    def _ask(self, event: Event, then: Callable[[LeaseGrant | NoRows], None]) -> None:
        number = next(self._requests)
        self._replies[number] = then
        self._tell(event, number)

    def _admit(self) -> None:
        for step in self._admission.admit_steps():
            groups = self._admission.groups_of(step)
            rows = [row for group in groups for row in group.rows]
            ids = [group.group for group in groups for _ in group.rows]
            self._tell(OpenPartition(step, len(rows)))
            created = RowsCreated(_UNIT, step, rows, ids, ["prompts"], [1] * len(rows), 0, _GROUP)
            self._tell(created, next(self._requests))

    # An instance

    def _fill(self, instance: _Instance) -> None:
        self._swap_if_due(instance)
        free = _SLOTS - len(instance.running)
        if free < _GROUP or instance.asking or instance.needs > instance.version:
            return
        instance.asking = True
        life = instance.life
        fetch = FetchRows(_ROLLOUT, instance.owner, free, instance.version, 1e9)
        self._ask(fetch, lambda reply: self._leased(instance, life, reply))

    def _leased(self, instance: _Instance, life: int, reply: LeaseGrant | NoRows) -> None:
        if life != instance.life:
            return
        instance.asking = False
        if isinstance(reply, LeaseGrant):
            self._swap_if_due(instance, boundary=reply.partition > instance.step)
            instance.step = max(instance.step, reply.partition)
            for row in reply.rows:
                instance.running[row] = reply, instance.version
                takes_s = _DECODE_S * self._lengths.response_length(row) * self._chance.uniform(0.9, 1.1)
                self._after(takes_s, partial(self._finished, instance, life, row))
        elif reply.reason is NoRowsReason.NEWER_VERSION:
            instance.needs = reply.newest_version
        self._after(0.0, lambda: self._fill(instance))

    def _finished(self, instance: _Instance, life: int, row: int) -> None:
        if life != instance.life:
            return
        _, self._drawn_with[row] = instance.running.pop(row)
        self._tell(OutputsWritten(_UNIT, _ROLLOUT, [row], ["responses"], [1], 0))
        self._fill(instance)

    def _swap_if_due(self, instance: _Instance, *, boundary: bool = False) -> None:
        boundary = boundary or instance.needs > instance.version
        num_running = len(instance.running)
        if self._schedule.mode.may_swap(interruptible=True, num_running=num_running, boundary=boundary):
            instance.version = instance.newest

    def _arrived(self, instance: _Instance, life: int, version: int) -> None:
        if life == instance.life:
            instance.newest = max(instance.newest, version)
            self._fill(instance)

    def _kill(self) -> None:
        instance = self._chance.choice(self._instances)
        self._fire.kills += 1
        self._tell(OwnerGone(instance.owner))
        instance.life += 1
        instance.running, instance.asking, instance.needs, instance.step = {}, False, 0, 0
        instance.version = instance.newest = self.version
        self._after(self._chance.uniform(0, 2), lambda: self._fill(instance))
        self._after(self._chance.uniform(1, 10), self._kill)

    # The trainer

    def _next_round(self) -> None:
        step = self.version + 1
        fetch = FetchRound(_TRAIN, "actor/0", step, self._round, _ROUND, 0, 1, 1e9)
        self._ask(fetch, self._train)

    def _train(self, reply: LeaseGrant | NoRows) -> None:
        if isinstance(reply, NoRows):
            self._publish()
            return
        self._round += 1
        step = self.version + 1
        self._trained.setdefault(step, []).extend(reply.rows)
        for row in reply.rows:
            staleness = step - 1 - self._drawn_with.pop(row)
            self._fire.samples += 1
            self._fire.staleness[staleness] += 1
            self._fire.violations += not 0 <= staleness <= self._schedule.staleness_bound
        seconds = _TRAIN_S * sum(map(self._lengths.response_length, reply.rows))
        self._after(seconds, self._next_round)

    def _publish(self) -> None:
        self.version += 1
        self._round = 0
        self._tell(OutputsWritten(_UNIT, _TRAIN, self._trained[self.version], [], [], 0))
        self._tell(PublishVersion(self.version))
        self._admission.note_published(self.version)
        self._admit()
        for instance in self._instances:
            delay_s, life, version = self._chance.expovariate(5), instance.life, self.version
            self._after(delay_s, partial(self._arrived, instance, life, version))
        self._next_round()

    def _after(self, seconds: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._agenda, (self._now + seconds, next(self._order), action))
