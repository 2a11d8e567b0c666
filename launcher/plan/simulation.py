"""A run in simulated time: the real schedule, with computing replaced by times. Pure: no clock, thread or process.

    admission --prompts--> instances --responses--> reference ... --columns--> actor --version--> admission, instances

What decides is the run's own code: admission (`AdmissionState`), policies, the choice of rounds, micro-batches and
mini-batches, when an instance swaps (`ScheduleMode.may_swap`) and whose turn it is (`SwapTurns`), and how responses
slow each other down (`Decoding`). What is simulated here are processes that wait for each other.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from launcher.plan.columns import ColumnWorker
from launcher.plan.gang import Gang
from launcher.plan.instance import Instance
from launcher.plan.scenario import Scenario
from launcher.plan.world import World
from launcher.timeline.run_timeline import RunTimeline
from workers.settings.dataflow import TRAINERS


@dataclass(frozen=True)
class Simulated:
    """What a simulated run showed.

    Attributes:
        step_ends: when each version was published, from version 0 (s).
        tokens: response tokens of each step that was trained.
        timeline: spans of all processes, as a real run records them.
        workers: of each role.
    """

    step_ends: Sequence[float]
    tokens: Sequence[int]
    timeline: RunTimeline
    workers: Mapping[str, int]

    def step_s(self, skip: int) -> float:
        """Return the mean time of a step after the first ones (s)."""
        return (self.step_ends[-1] - self.step_ends[skip]) / (len(self.step_ends) - 1 - skip)

    def tokens_per_s(self, skip: int) -> float:
        """Return the response tokens that are trained per second after the first steps."""
        return sum(self.tokens[skip:]) / (self.step_ends[-1] - self.step_ends[skip])

    def idle(self, skip: int) -> dict[str, float]:
        """Return, per role, the share of that time in which its workers do not compute."""
        start, end = self.step_ends[skip], self.step_ends[-1]
        busy: dict[str, list[float]] = defaultdict(list)
        for process, spans in self.timeline.spans.items():
            inside = (max(0.0, min(end, span.end) - max(start, span.start)) for span in spans)
            busy[process.partition("-")[0]].append(sum(inside) / (end - start))
        return {role: 1 - sum(shares) / self.workers[role] for role, shares in busy.items()}


def simulate(scenario: Scenario, *, steps: int, further: int = 0) -> Simulated:
    """Run so many steps.

    Args:
        scenario: what is run.
        steps: that are trained.
        further: steps that are admitted beyond them, as in a run that goes on.

    Raises:
        AssertionError: everybody waits for each other.
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
    gangs = [Gang(world, by_role[role]) for role in scenario.training]
    world.followers += [*instances, *columns]
    world.gangs += gangs
    world.publish(0)
    for worker in columns:
        worker.start()
    for gang in gangs:
        gang.begin()
    world.run()
    for instance in instances:
        instance.note_idle()
    timeline = RunTimeline(world.spans, dict(enumerate(world.step_ends)), {})
    return Simulated(world.step_ends, world.trained, timeline, scenario.workers)
