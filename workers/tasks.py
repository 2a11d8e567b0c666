"""This run's tasks: the algorithm's graph placed over the roles that were launched."""

from collections.abc import Sequence

from asyncflow.job import Job
from tq.config import ScheduleConfig, ScheduleMode
from tq.policies import load_policy
from tq.task_spec import StepSpec, TaskSpec
from workers.algorithms.graph import algorithm_tasks
from workers.config import RunConfig
from workers.dataflow import SERVICES, PlacedTask, place_tasks


def task_specs(tasks: Sequence[PlacedTask], config: RunConfig) -> list[TaskSpec]:
    """Return what the controllers must know of each placed task under the run's schedule."""
    return [
        TaskSpec(
            name=task.name,
            inputs=frozenset(task.inputs),
            outputs=frozenset(task.outputs),
            whole_groups=task.whole_groups or task.role == "rollout",
            gated=task.role == "rollout",
            barrier=config.schedule.mode is ScheduleMode.SYNC and task.role != "rollout",
            in_order=config.deterministic,
            keeps_leases=task.role == "actor",
            max_deliveries=0 if task.role == "actor" else config.tq.max_deliveries,
            policy=load_policy(config.tq.policy if task.role == "actor" else "fifo"),
            steps=_steps(config.schedule) if task.role == "actor" else None,
        )
        for task in tasks
    ]


def launched_tasks(config: RunConfig, job: Job) -> tuple[PlacedTask, ...]:
    """Return the tasks of this run, placed over the roles that were launched."""
    roles = dict.fromkeys(gang.role for gang in job.gangs if gang.role not in SERVICES)
    return place_tasks(algorithm_tasks(config.algorithm), list(roles))


def _steps(schedule: ScheduleConfig) -> StepSpec | None:
    return StepSpec(schedule.step_rows, schedule.lateness) if schedule.lateness else None
