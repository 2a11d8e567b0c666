"""A run's dataflow graph: the tasks of the algorithm and of the user, placed over the launched roles.

Torch-free: launcher, queue and workers read it. The algorithm's settings declare its tasks (`PolicyConfig.tasks`).
"""

from collections.abc import Sequence
from dataclasses import replace
from difflib import get_close_matches

from asyncflow.errors import ConfigError
from asyncflow.job import Job
from tq.policies import StepSpec, TaskSpec, load_policy
from workers.settings.dataflow import (
    ACTOR_TRAIN,
    ADMITTED,
    ADVANTAGES,
    ALIASES,
    CRITIC_TRAIN,
    KEPT_COLUMNS,
    LOSS_WEIGHTS,
    PROMPT_COLUMNS,
    REWARD_PARTS,
    ROLES,
    SAMPLE_COLUMNS,
    SCALAR_COLUMNS,
    SERVICES,
    SOURCES,
    TASKS,
    TEACHER,
    TEXT_COLUMNS,
    TOKEN_COLUMNS,
    TRAINERS,
    TURN_IDS,
    TURN_REWARDS,
    NeededWeights,
    PlacedTask,
    Task,
    place_tasks,
    producers_first,
)
from workers.settings.run import RunConfig
from workers.settings.schedule import ScheduleMode
from workers.settings.tasks import UserTaskConfig


def graph_of(config: RunConfig) -> tuple[Task, ...]:
    """Return the run's tasks, producers before consumers. Raises ConfigError if a user's task does not fit into this
    graph."""
    graph = config.algorithm.tasks(old_log_probs=config.needs_old_log_probs)
    if config.rollout.keeps_mask and not config.algorithm.is_supervised:
        graph = with_sampling_masks(graph)
    if config.rollout.is_own:
        graph = with_own_rollout(graph, in_turn_order=config.algorithm.in_turn_order)
    elif config.sends_tasks:
        graph = tuple(replace(one, inputs=(*one.inputs, TASKS)) if one.name == "rewards" else one for one in graph)
    if config.has_reward_parts:
        graph = with_reward_parts(graph)
    if config.data.mixture:
        *others, train = graph
        graph = (*others, replace(train, inputs=(*train.inputs, SOURCES)))
    if config.teacher.sources:
        graph = tuple(replace(one, inputs=(*one.inputs, SOURCES)) if one.name == TEACHER else one for one in graph)
    if config.actor.tri_model:
        graph = without_models(graph)
    return with_user_tasks(graph, config.tasks)


def prompt_columns(config: RunConfig) -> tuple[str, ...]:
    """Return what admission writes; for SFT the samples, too."""
    wanted = {TASKS: config.sends_tasks, SOURCES: bool(config.data.mixture)}
    samples = SAMPLE_COLUMNS if config.algorithm.is_supervised else ()
    return (*PROMPT_COLUMNS, *samples, *(name for name, is_wanted in wanted.items() if is_wanted))


def with_own_rollout(graph: Sequence[Task], *, in_turn_order: bool = False) -> tuple[Task, ...]:
    """Return the graph of a run whose rollouts are the user's own: they get whole data rows, and say of their turns
    what a task reads. `in_turn_order`: advantages are computed along a rollout's tokens, in the order of its turns."""
    if in_turn_order:
        graph = [
            replace(task, inputs=tuple(dict.fromkeys((*task.inputs, TURN_IDS)))) if task.name == ADVANTAGES else task
            for task in graph
        ]
    read = {name for task in graph for name in task.inputs}
    written = {"actor_rollout": TURN_IDS, "rewards": TURN_REWARDS}
    graph = [
        replace(task, outputs=(*task.outputs, written[task.name])) if written.get(task.name) in read else task
        for task in graph
    ]
    inputs = ("prompts", TASKS, "ground_truth")
    return tuple(replace(task, inputs=inputs) if task.name == "actor_rollout" else task for task in graph)


def with_sampling_masks(graph: Sequence[Task]) -> tuple[Task, ...]:
    """Return the graph of a run that keeps what each token was drawn from: whatever computes log-probabilities of drawn
    tokens reads it."""
    readers = {"ref_log_probs", "actor_log_probs", ACTOR_TRAIN}
    made = (
        replace(one, outputs=(*one.outputs, *KEPT_COLUMNS)) if one.name == "actor_rollout" else one for one in graph
    )
    return tuple(replace(one, inputs=(*one.inputs, *KEPT_COLUMNS)) if one.name in readers else one for one in made)


def launched_tasks(config: RunConfig, job: Job) -> tuple[PlacedTask, ...]:
    """Return the tasks of this run, placed over the launched roles and those of processes outside."""
    launched = (gang.role for gang in job.gangs if gang.role not in SERVICES)
    return place_tasks(graph_of(config), list(dict.fromkeys((*launched, *config.outside_roles))))


def tasks_of(role: str, config: RunConfig, job: Job) -> tuple[PlacedTask, ...]:
    """Return what the role's processes fetch: its main task, the last one, and what it must put ahead of that."""
    return tuple(task for task in launched_tasks(config, job) if task.role == role)


def task_of(role: str, config: RunConfig, job: Job) -> PlacedTask:
    return tasks_of(role, config, job)[-1]


def task_specs(tasks: Sequence[PlacedTask], config: RunConfig) -> list[TaskSpec]:
    schedule, interval = config.schedule, config.algorithm.ref_update_interval
    bounds = {
        NeededWeights.ANY: None,
        NeededWeights.BOUNDED: schedule.gate_staleness,
        NeededWeights.NEWEST: 0,
        NeededWeights.REFERENCE: interval - 1 if interval else None,
    }
    steps = StepSpec(schedule.step_rows, schedule.lateness) if schedule.lateness else None
    return [
        TaskSpec(
            name=task.name,
            inputs=frozenset(task.inputs),
            outputs=frozenset(task.outputs),
            whole_groups=task.whole_groups or task.role == "rollout",
            max_staleness=bounds[task.weights],
            version_interval=max(1, interval) if task.weights is NeededWeights.REFERENCE else 1,
            barrier=_waits_for_whole_steps(task, schedule.mode),
            in_order=config.deterministic,
            keeps_leases=task.role in TRAINERS,
            # A process outside may be killed at any time, which says nothing about its rows.
            max_deliveries=0 if task.role in {*TRAINERS, *config.outside_roles} else config.tq.max_deliveries,
            policy=load_policy(config.tq.policy if task.role in TRAINERS else "fifo"),
            steps=steps if task.role in TRAINERS else None,
        )
        for task in tasks
    ]


def _waits_for_whole_steps(task: PlacedTask, mode: ScheduleMode) -> bool:
    """Whether a task's rows of a step are ready only when all are: in `sync` that separates all stages, in
    `colocate_async` a trainer's first rows mean that the devices' turn is worth passing."""
    return mode.trains_whole_steps and (task.role in TRAINERS or (mode is ScheduleMode.SYNC and task.role != "rollout"))


def with_reward_parts(graph: Sequence[Task]) -> tuple[Task, ...]:
    """Return the graph with a column of reward parts, which the training task reads for the metrics."""
    *others, train = graph
    scored = (
        replace(task, outputs=(*task.outputs, REWARD_PARTS)) if task.name == "rewards" else task for task in others
    )
    return (*scored, replace(train, inputs=(*train.inputs, REWARD_PARTS)))


def without_models(graph: Sequence[Task]) -> tuple[Task, ...]:
    """Return the graph without the tasks of old policy and reference, which `actor.tri_model` computes during training.
    Raises ConfigError if a task needs their outputs before that."""
    scored = {name for task in graph if task.name in _OF_MODELS for name in task.outputs}
    *others, train = (task for task in graph if task.name not in _OF_MODELS)
    for task in others:
        for name in sorted(scored.intersection(task.inputs)):
            raise ConfigError(
                f"actor.tri_model: task {task.name} needs column {name} before training; set tri_model to false"
            )
    inputs = tuple(name for name in train.inputs if name not in scored)
    return (*others, replace(train, inputs=inputs))


_OF_MODELS = frozenset({"ref_log_probs", "actor_log_probs"})


def with_user_tasks(graph: Sequence[Task], users: Sequence[UserTaskConfig]) -> tuple[Task, ...]:
    """Return the graph with users' tasks before its training task, the last one, which reads `loss_weights` if one of
    them writes it. Raises ConfigError for names that clash, columns without a writer or a reader, and tasks that wait
    for each other."""
    *others, train = graph
    _check_names(graph, users)
    _check_columns(graph, users)
    if any(user.output == LOSS_WEIGHTS for user in users):
        train = _weighted(train)
        others = [_weighted(task) if task.name == CRITIC_TRAIN else task for task in others]
    return (*_sorted(others, users), train)


def _weighted(train: Task) -> Task:
    return replace(train, inputs=(*train.inputs, LOSS_WEIGHTS))


def _check_names(graph: Sequence[Task], users: Sequence[UserTaskConfig]) -> None:
    tasks, outputs = {task.name for task in graph}, {name for task in graph for name in task.outputs}
    for number, user in enumerate(users):
        role = user.own_role
        if user.name in tasks:
            raise ConfigError(f"tasks.{number}.name: there is a task {user.name!r} already; take another name")
        if role in SERVICES or role in ROLES or role in ALIASES:
            kind = "a service" if role in SERVICES else "a role"
            raise ConfigError(f"tasks.{number}.role: {role!r} is {kind} of AsyncFlow's own; take another name")
        if user.output in outputs or user.output in _OWN_COLUMNS:
            raise ConfigError(
                f"tasks.{number}.output: column {user.output!r} is written by another task; take another name"
            )
        tasks.add(user.name)
        outputs.add(user.output)


def _check_columns(graph: Sequence[Task], users: Sequence[UserTaskConfig]) -> None:
    written = [*PROMPT_COLUMNS, *_COLUMNS_OF, *(name for task in graph for name in task.outputs)]
    missing = {name for task in graph for name in task.inputs}.difference(written, ADMITTED)
    written += [user.output for user in users]
    for number, user in enumerate(users):
        for name in user.inputs:
            if name in (REWARD_PARTS, SOURCES):
                raise ConfigError(f"tasks.{number}.inputs: column {name!r} is for the metrics alone; leave it out")
            if name not in written:
                raise ConfigError(f"tasks.{number}.inputs: no task writes column {name!r}; {_hint(name, written)}")
            if name in TOKEN_COLUMNS and name not in TEXT_COLUMNS:
                numbers = " ".join(each for each in written if each not in (*TOKEN_COLUMNS, *TEXT_COLUMNS))
                raise ConfigError(
                    f"tasks.{number}.inputs: column {name!r} has a value per token; use texts "
                    f"({' '.join(TEXT_COLUMNS)}) and columns with one number per response ({numbers})"
                )
        read = [
            LOSS_WEIGHTS,
            *sorted(missing),
            *(name for other in users if other is not user for name in other.inputs),
        ]
        if user.output not in read:
            raise ConfigError(
                f"tasks.{number}.output: no task reads column {user.output!r}; {_hint(user.output, read)} "
                f"(training reads {LOSS_WEIGHTS}, an algorithm and users' tasks their inputs)"
            )


_OWN_COLUMNS = (*TOKEN_COLUMNS, *SCALAR_COLUMNS, *TEXT_COLUMNS, REWARD_PARTS, TASKS, SOURCES)
# Columns behind a text that is not a column itself.
_COLUMNS_OF = {"responses": ("tokens", "response_mask")}
# Former names of columns, for hints.
_RENAMED = {"answers": "ground_truth", "log_probs": "old_log_probs", "loss_masks": LOSS_WEIGHTS}


def _hint(name: str, known: Sequence[str]) -> str:
    near = [_RENAMED[name]] if _RENAMED.get(name) in known else get_close_matches(name, known, n=1)
    return f"did you mean {near[0]!r}?" if near else f"known columns: {' '.join(dict.fromkeys(known))}"


def _sorted(others: Sequence[Task], users: Sequence[UserTaskConfig]) -> list[Task]:
    nodes = [
        Task(
            user.name,
            user.own_role,
            user.host,
            tuple(dict.fromkeys(part for name in user.inputs for part in _COLUMNS_OF.get(name, (name,)))),
            (user.output,),
        )
        for user in users
    ]
    ordered, circle = producers_first([*others, *nodes])
    if circle:
        names = " ".join(task.name for task in circle)
        raise ConfigError(f"tasks: {names} wait for each other's outputs in a circle; break it")
    return ordered
