"""No schedule waits for itself: the real gates, queue and admission, and what every role does, in any order of events.

    admission -> controller <-> rollouts, column roles, trainers -> version -> admission ...

Each role is a small machine that does what its loop does (`workers.rollout.loop`, `workers.tasks.task_worker`,
`workers.trainer`). Which of those that can go on does so next is drawn. A process may die, and then its rows come back;
the run may go back to an older version. When nobody can go on before the last step is trained, the schedule is stuck.
"""

import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncflow.errors import PeerRefused
from launcher.config.load_config import load_config
from launcher.config.paths import find_recipe
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
from tq.policies import TaskSpec
from tq.refill import first_token
from workers.admission.admission_state import AdmissionState
from workers.settings.dataflow import TRAINERS, NeededWeights, PlacedTask, place_tasks
from workers.settings.run import RunConfig
from workers.settings.schedule import Fill, ScheduleMode
from workers.tasks.graph import graph_of, prompt_columns, task_specs
from workers.tasks.reference import reference_step
from workers.tasks.task_worker import is_held_back

UNIT, GROUP, BATCH, STEPS = "storage-0", 2, 3, 6
SAFETY = "tasks=[{name: safety, function: 'm:f', output: loss_weights}]"

ROLES = {
    "hosted": ("rollout", "actor"),
    "ref": ("rollout", "actor", "ref"),
    "forward": ("rollout", "actor", "actor_fwd"),
    "both": ("rollout", "actor", "ref", "actor_fwd", "reward", "advantages"),
    "users": ("rollout", "actor", "ref", "safety"),
    "critic": ("rollout", "actor", "critic", "ref", "actor_fwd", "reward"),
    "tri_model": ("rollout", "actor", "reward"),
}


@cache
def loaded(kind: str) -> RunConfig:
    recipe = find_recipe("quickstart-ppo-cpu" if kind == "critic" else "quickstart")
    own = {
        "users": [SAFETY],
        "tri_model": ["actor.tri_model=true", "actor.engine=fsdp"],
        "forward": ["actor.num_mini_batches=2"],
        "both": ["actor.num_mini_batches=2"],
        "critic": ["actor.num_mini_batches=2"],
    }
    sizes = [f"schedule.rollout_batch_size={BATCH}", f"schedule.n_samples_per_prompt={GROUP}", f"steps={STEPS}"]
    return load_config(recipe, overrides=[*sizes, "algorithm.kl_coef=0.1", *own.get(kind, [])])


def configured(kind: str, mode: ScheduleMode, staleness: int, fill: Fill, interval: int) -> RunConfig:
    config = loaded(kind)
    schedule = config.schedule.model_copy(update={"mode": mode, "max_staleness": staleness, "fill": fill})
    algorithm = config.algorithm.model_copy(update={"ref_update_interval": interval})
    return config.model_copy(update={"schedule": schedule, "algorithm": algorithm})


class Stuck(AssertionError):
    """Nobody can go on."""


@dataclass
class Process:
    """One rank that asks the queue; a request of it is answered at once or later."""

    name: str
    world: "World"
    task: PlacedTask
    version: int = 0
    life: int = 0
    asking: bool = False
    answer: LeaseGrant | NoRows | None = None
    held_back: bool = False

    @property
    def owner(self) -> str:
        return f"{self.name}-{self.life}"

    def can_act(self) -> bool:
        return not self.asking

    def ask(self, request: FetchRows | FetchRound) -> None:
        self.asking, self.answer, life = True, None, self.life

        def answered(reply: LeaseGrant | NoRows) -> None:
            if self.life == life:
                self.asking, self.answer = False, reply

        self.world.ask(request, answered)

    def fetch(self, num_rows: int, *, tell_held_back: bool = False) -> None:
        lineage = self.world.lineage
        request = FetchRows(self.task.name, self.owner, num_rows, self.version, 1e9, lineage=lineage)
        request.tell_held_back = tell_held_back
        self.ask(request)

    def act(self) -> None:
        raise NotImplementedError

    def die(self) -> None:
        self.world.tell(OwnerGone(self.owner))
        self.life += 1
        self.asking, self.answer, self.held_back = False, None, False
        self.version = self.world.first_version(self.task)


@dataclass
class Rollout(Process):
    """`workers.rollout.loop` with its feeder: a swap is due, a response ends, or there is room for a group."""

    running: dict[int, LeaseGrant] = field(default_factory=dict)
    needs: int = 0
    step: int = 0

    def can_act(self) -> bool:
        return self.answer is not None or bool(self.running) or self._may_swap() or self._may_ask()

    def act(self) -> None:
        if self.answer is not None:
            self._take(self.answer)
        elif self._may_swap():
            self.version = self.world.version
        elif self._may_ask() and (not self.running or self.world.chance.random() < 0.5):
            self.fetch(GROUP)
        else:
            row = self.world.chance.choice(sorted(self.running))
            del self.running[row]
            self.world.write(self.task, [row])

    def die(self) -> None:
        super().die()
        self.running, self.needs, self.step = {}, 0, 0

    def _take(self, answer: LeaseGrant | NoRows) -> None:
        self.answer = None
        if isinstance(answer, LeaseGrant):
            age = answer.partition - 1 - self.version
            assert age <= self.world.config.schedule.gate_staleness, f"step {answer.partition} on {self.version}"
            self.running |= dict.fromkeys(answer.rows, answer)
            self.step = max(self.step, answer.partition)
        elif answer.reason is NoRowsReason.NEWER_VERSION:
            assert answer.newest_version > self.version, "it is told to take what it has"
            self.needs = answer.newest_version

    def _may_swap(self) -> bool:
        mode, boundary = self.world.config.schedule.mode, self.needs > self.version
        due = mode.may_swap(interruptible=self.world.interruptible, num_running=len(self.running), boundary=boundary)
        return self.world.version > self.version and due

    def _may_ask(self) -> bool:
        return not self.asking and self.needs <= self.version and len(self.running) <= GROUP


@dataclass
class Columns(Process):
    """`workers.tasks.task_worker`: with rows in hand it computes and puts, and waits for nothing."""

    def act(self) -> None:
        answer, self.answer = self.answer, None
        self.held_back = isinstance(answer, NoRows) and is_held_back(answer, self.held_back)
        if isinstance(answer, LeaseGrant):
            self.check_weights(answer.partition)
            self.world.write(self.task, answer.rows)
        elif answer is not None and answer.reason is NoRowsReason.NEWER_VERSION:
            self.take_weights(answer.newest_version)
        self.fetch(GROUP, tell_held_back=not self.held_back)

    def take_weights(self, step: int) -> None:
        assert self.version < step <= self.world.version, "it is told to wait for what does not exist"
        self.version = step

    def check_weights(self, step: int) -> None:
        match self.task.weights:
            case NeededWeights.NEWEST:
                assert self.version == step - 1
            case NeededWeights.REFERENCE if interval := self.world.config.algorithm.ref_update_interval:
                assert self.version == reference_step(step, interval)


@dataclass
class UngatedReference(Columns):
    """As it was: it takes any rows, and waits for their reference with them in hand."""

    has: LeaseGrant | None = None

    def can_act(self) -> bool:
        if self.has is None:
            return super().can_act()
        return reference_step(self.has.partition, self.world.config.algorithm.ref_update_interval) <= self.world.version

    def act(self) -> None:
        if self.has is not None:
            self.world.write(self.task, self.has.rows)
            self.has = None
        elif isinstance(self.answer, LeaseGrant):
            self.has, self.answer = self.answer, None
        else:
            self.fetch(GROUP)


@dataclass
class Trainer(Process):
    """`workers.trainer`: round after round of a step, its columns, then the update, and the next step."""

    step: int = 1
    round_index: int = 0
    rows: list[int] = field(default_factory=list)
    over: bool = False

    def can_act(self) -> bool:
        return not self.asking and not self.over

    def act(self) -> None:
        if isinstance(self.answer, LeaseGrant):
            self.rows += self.answer.rows
            self.round_index += 1
            if self.task.outputs:
                self.world.tell(self.world.outputs(self.task.name, self.answer.rows, self.task.outputs))
        elif self.answer is not None:
            assert self.answer.reason is NoRowsReason.PARTITION_DONE, self.answer
            assert len(self.rows) == BATCH * GROUP, "a step has all of its rows"
            self.end_step()
            self.answer = None
            return
        request = FetchRound(self.task.name, self.owner, self.step, self.round_index, GROUP, 0, 1, 1e9)
        self.ask(request)

    def end_step(self) -> None:
        self.world.publish(self.step)
        self.world.tell(self.world.outputs(self.task.name, self.rows, []))
        self.next_step()

    def next_step(self) -> None:
        self.step, self.round_index, self.rows = self.step + 1, 0, []
        self.over = self.step > STEPS


@dataclass
class Critic(Trainer):
    """It trains a step once the actor is committed to it."""

    def can_act(self) -> bool:
        return super().can_act() and not (isinstance(self.answer, NoRows) and self.world.version < self.step)

    def end_step(self) -> None:
        self.world.tell(self.world.outputs(self.task.name, self.rows, []))
        self.next_step()


class World:
    """One life of a run, from a version on."""

    def __init__(
        self,
        config: RunConfig,
        roles: tuple[str, ...],
        chance: random.Random,
        *,
        copies: int,
        version: int = 0,
        lineage: int = 0,
        gated: bool = True,
    ) -> None:
        self.config, self.chance, self.version, self.lineage = config, chance, version, lineage
        self.start = version
        self.interruptible = chance.random() < 0.5
        placed = place_tasks(graph_of(config), roles)
        specs = [self._spec(spec, gated) for spec in task_specs(placed, config)]
        self._state = ControlState(
            specs, version=version, lineage=lineage, published=False, first_token=first_token(lineage, 1)
        )
        self._requests = itertools.count(1)
        self._replies: dict[int, Callable[[LeaseGrant | NoRows], None]] = {}
        trained = range(version * BATCH)
        self._admission = AdmissionState(config.schedule, version=version, last_step=STEPS, trained=trained)
        self.processes = list(self._processes(placed, copies, gated))
        self.tell(PublishVersion(version))
        self._admit()

    def run(self, *, until: int, deaths: int) -> None:
        """Go on until a version is published."""
        for number in itertools.count():
            if self.version >= until:
                return
            assert number < 20_000, "busy, and nothing comes of it"
            able = [process for process in self.processes if process.can_act()]
            if not able:
                waiting = ", ".join(f"{one.name} ({one.version})" for one in self.processes if one.asking)
                raise Stuck(f"step {self.version + 1}: {waiting}")
            if deaths and self.chance.random() < 0.02:
                deaths -= 1
                mortal = [one for one in self.processes if not isinstance(one, Trainer)]
                self.chance.choice(mortal).die()
            else:
                self.chance.choice(able).act()

    def ask(self, request: FetchRows | FetchRound, then: Callable[[LeaseGrant | NoRows], None]) -> None:
        number = next(self._requests)
        self._replies[number] = then
        self.tell(request, number)

    def tell(self, event: Event, request: int = 0) -> None:
        for instruction in self._state.handle(event, request):
            match instruction:
                case Answer(number, reply) if number in self._replies:
                    assert isinstance(reply, LeaseGrant | NoRows), reply
                    self._replies.pop(number)(reply)
                case OrderFenceRows(task, token):
                    self.tell(Fenced(task, token))

    def write(self, task: PlacedTask, rows: list[int]) -> None:
        self.tell(self.outputs(task.name, rows, task.outputs))

    def outputs(self, task: str, rows: list[int], columns: "tuple[str, ...] | list[str]") -> OutputsWritten:
        return OutputsWritten(UNIT, task, rows, list(columns), [1] * len(rows), 0)

    def publish(self, version: int) -> None:
        self.version = version
        self.tell(PublishVersion(version))
        self._admission.note_published(version)
        self._admit()

    def first_version(self, task: PlacedTask) -> int:
        """What a process of the task begins with: others wait for weights before they ask."""
        if task.weights is NeededWeights.REFERENCE:
            return reference_step(self.start + 1, self.config.algorithm.ref_update_interval)
        return self.version if task.weights is NeededWeights.BOUNDED else 0

    def _processes(self, placed: tuple[PlacedTask, ...], copies: int, gated: bool) -> Iterator[Process]:
        for task in placed:
            kind: type[Process] = Columns
            if task.role in TRAINERS:
                kind = Trainer if task.role == "actor" else Critic
            elif task.role == "rollout":
                kind = Rollout
            elif task.role == "ref" and not gated:
                kind = UngatedReference
            for number in range(1 if task.role in TRAINERS else copies):
                process = kind(f"{task.role}/{number}", self, task, self.first_version(task))
                if isinstance(process, Trainer):
                    process.step = self.start + 1
                yield process

    def _admit(self) -> None:
        columns = list(prompt_columns(self.config))
        for step in self._admission.admit_steps():
            groups = self._admission.groups_of(step)
            rows = [row for group in groups for row in group.rows]
            ids = [group.group for group in groups for _ in group.rows]
            self.tell(OpenPartition(step, len(rows)))
            created = RowsCreated(UNIT, step, rows, ids, columns, [1] * len(rows), 0, GROUP)
            self.tell(created, next(self._requests))

    def _spec(self, spec: TaskSpec, gated: bool) -> TaskSpec:
        spec = replace(spec, max_deliveries=0)
        return spec if gated or spec.name != "ref_log_probs" else replace(spec, max_staleness=None, version_interval=1)


@settings(max_examples=60, deadline=None)
@given(
    kind=st.sampled_from(sorted(ROLES)),
    mode=st.sampled_from(ScheduleMode),
    staleness=st.integers(0, 3),
    fill=st.sampled_from(Fill),
    interval=st.integers(0, 3),
    copies=st.integers(1, 2),
    deaths=st.integers(0, 4),
    back=st.integers(0, STEPS - 1),
    seed=st.integers(0, 2**32),
)
def test_no_schedule_waits_for_itself(
    kind: str,
    mode: ScheduleMode,
    staleness: int,
    fill: Fill,
    interval: int,
    copies: int,
    deaths: int,
    back: int,
    seed: int,
) -> None:
    # What a start refuses is left out.
    if kind == "tri_model":
        interval = 0
    if mode in (ScheduleMode.SYNC, ScheduleMode.PERIODIC):
        staleness = 0
    if not staleness or mode is ScheduleMode.COLOCATE_ASYNC:
        fill = Fill.IN_ORDER
    if fill is Fill.FIRST_READY:
        interval = 0
        kind = "hosted" if "actor_fwd" in ROLES[kind] else kind
    config = configured(kind, mode, staleness, fill, interval)
    chance = random.Random(seed)
    roles = ROLES[kind]
    world = World(config, roles, chance, copies=copies)
    if back:  # the run goes on from an older version, in the next lineage
        world.run(until=back, deaths=deaths)
        world = World(config, roles, chance, copies=copies, version=chance.randrange(back), lineage=1)
    world.run(until=STEPS, deaths=deaths)


def test_rows_that_are_not_gated_by_their_reference_hang() -> None:
    """The model finds what once was so: a rank holds rows of a later step, whose reference needs rows of this one."""
    config = configured("ref", ScheduleMode.ASYNC, 1, Fill.IN_ORDER, 1)
    stuck = 0
    for seed in range(20):
        try:
            World(config, ROLES["ref"], random.Random(seed), copies=1, gated=False).run(until=STEPS, deaths=0)
        except Stuck as error:
            assert "actor/0" in str(error)
            stuck += 1
    assert stuck


@pytest.mark.parametrize("interval", [1, 3])
def test_reference_between_two_refreshes_is_refused(interval: int) -> None:
    config = configured("ref", ScheduleMode.ASYNC, 1, Fill.IN_ORDER, interval)
    world = World(config, ROLES["ref"], random.Random(0), copies=1)
    (ref,) = [one for one in world.processes if one.task.role == "ref"]
    ref.version = 4
    if interval == 1:
        ref.fetch(1)
    else:
        with pytest.raises(PeerRefused, match=r"weights of step 4; only those of every 3 steps are of use"):
            ref.fetch(1)
