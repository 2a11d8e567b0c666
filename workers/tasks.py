"""This run's tasks: the algorithm's graph placed over the roles that were launched."""

from collections.abc import Sequence

from asyncflow.job import Job
from tq.config import ScheduleConfig, ScheduleMode
from tq.policies import load_policy
from tq.task_spec import StepSpec, TaskSpec
from workers.config import RunConfig
from workers.dataflow import SERVICES, TRAINERS, NeededWeights, PlacedTask, place_tasks
from workers.graph import graph_of


def task_specs(tasks: Sequence[PlacedTask], config: RunConfig) -> list[TaskSpec]:
    """Return what the controllers must know of each placed task under the run's schedule."""
    return [
        TaskSpec(
            name=task.name,
            inputs=frozenset(task.inputs),
            outputs=frozenset(task.outputs),
            whole_groups=task.whole_groups or task.role == "rollout",
            max_staleness=_max_staleness(task, config),
            barrier=config.schedule.mode is ScheduleMode.SYNC and task.role != "rollout",
            in_order=config.deterministic,
            keeps_leases=task.role in TRAINERS,
            max_deliveries=0 if task.role in TRAINERS else config.tq.max_deliveries,
            policy=load_policy(config.tq.policy if task.role in TRAINERS else "fifo"),
            steps=_steps(config.schedule) if task.role in TRAINERS else None,
        )
        for task in tasks
    ]


def _max_staleness(task: PlacedTask, config: RunConfig) -> int | None:
    bounds = {NeededWeights.ANY: None, NeededWeights.BOUNDED: config.schedule.gate_staleness, NeededWeights.NEWEST: 0}
    return bounds[task.weights]


def launched_tasks(config: RunConfig, job: Job) -> tuple[PlacedTask, ...]:
    """Return the tasks of this run, placed over the roles that were launched."""
    roles = dict.fromkeys(gang.role for gang in job.gangs if gang.role not in SERVICES)
    return place_tasks(graph_of(config), list(roles))


def task_of(role: str, config: RunConfig, job: Job) -> PlacedTask:
    """Return the task that a launched role's processes fetch."""
    return next(task for task in launched_tasks(config, job) if task.role == role)


def _steps(schedule: ScheduleConfig) -> StepSpec | None:
    return StepSpec(schedule.step_rows, schedule.lateness) if schedule.lateness else None
