r"""An algorithm's dataflow graph: tasks that read and write columns, and the role that runs each. Pure and torch-free.

An algorithm declares its tasks once; `place_tasks` decides from the launched roles which process runs what. A task
whose role was not launched is fused into its host: the host reads the fused task's inputs and computes its outputs
itself, so they never travel.

    prompts -> actor_rollout -> tokens ... -> rewards (in rollout) -> rewards
                             \-> ref_log_probs -> ref_log_probs
    all of them -> compute_advantages_and_returns (in actor) -> actor_train
"""

from collections.abc import Collection
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TypeVar

from asyncflow.errors import ConfigError

ROLES = ("rollout", "actor", "ref", "teacher", "critic", "reward", "actor_fwd", "advantages", "evaluate")
ALIASES = {"reference": "ref"}
_WITH_MODELS = ("actor", "critic", "rollout", "ref", "teacher", "reward", "actor_fwd", "evaluate")
# Roles that train a model. Each is one gang, gets its rows in rounds, and keeps its leases until the gang ends.
TRAINERS = frozenset({"actor", "critic"})
# Roles without a task: they read no queue and only look at the weights, so nothing waits for them.
OBSERVERS = frozenset({"evaluate"})
# Processes without a role: the queue's, and the node's weight agent.
CONTROLLER, STORAGE, WEIGHTS = "controller", "storage", "weights"
SERVICES = frozenset({CONTROLLER, STORAGE, WEIGHTS})

# Written by admission with every group: tokens, the ground truth (text), the epoch.
PROMPT_COLUMNS = ("prompts", "ground_truth", "epochs")
# What users' tasks may read as text; `responses` is decoded from the drawn tokens.
TEXT_COLUMNS = ("prompts", "responses", "ground_truth")
# Also written by admission, for the user's rollouts and rewards: the whole data row as JSON text.
TASKS = "tasks"
# Also written by admission, for a mixture (`data.mixture`): the name of the row's source, for the metrics.
SOURCES = "sources"
# The samples that are trained; see `workers.rows.packed_rows`. Rollouts write them or, for SFT, admission.
SAMPLE_COLUMNS = ("tokens", "sample_lengths", "response_mask")
# All columns that admission may write.
ADMITTED = frozenset({*PROMPT_COLUMNS, *SAMPLE_COLUMNS, TASKS, SOURCES})
# Of rollouts of several turns, if a task reads them: the number of the turn that drew each token, from 0 in the order
# in which the turns ended; the reward of each turn, in that order.
TURN_IDS, TURN_REWARDS = "turn_ids", "turn_rewards"
# Columns of AsyncFlow's own tasks with one value per drawn token.
DRAWN_COLUMNS = (
    *("rollout_log_probs", "old_log_probs", "ref_log_probs", "teacher_log_probs", "versions", "values", "returns"),
    TURN_IDS,
)
# Columns of AsyncFlow's own tasks with K values per drawn token: the ids of a model's K most likely tokens, int32, and
# their log-probabilities: of the reference, of a teacher, and of the policy that drew (`num_top_log_probs`).
REF_TOP_COLUMNS = ("ref_top_ids", "ref_top_log_probs")
TEACHER_TOP_COLUMNS = ("teacher_top_ids", "teacher_top_log_probs")
ROLLOUT_TOP_COLUMNS = ("rollout_top_ids", "rollout_top_log_probs")
WIDE_COLUMNS = (*REF_TOP_COLUMNS, *TEACHER_TOP_COLUMNS, *ROLLOUT_TOP_COLUMNS)
# With `rollout.keep_sampling_mask`: the ids that each drawn token was drawn from, int32, and how many there are.
KEPT_COLUMNS = ("kept_ids", "kept_counts")
# Written by users' tasks: the weight of a response's loss, 0 to 1.
LOSS_WEIGHTS = "loss_weights"
# The parts of a user's reward: numbers by name, for the metrics.
REWARD_PARTS = "reward_parts"
# The task of a teacher that is not the reference.
TEACHER = "teacher_log_probs"
# The task that compares responses.
ADVANTAGES = "compute_advantages_and_returns"
# Tasks that train; the second is folded into the first if there is no role `critic`.
ACTOR_TRAIN, CRITIC_TRAIN = "actor_train", "critic_train"
# Columns of AsyncFlow's own tasks with more than one value per response.
TOKEN_COLUMNS = ("prompts", *SAMPLE_COLUMNS, *DRAWN_COLUMNS, *WIDE_COLUMNS, *KEPT_COLUMNS, TURN_REWARDS)
# Columns of AsyncFlow's own tasks with one value per response.
SCALAR_COLUMNS = ("ground_truth", "epochs", "truncated", "rewards", "correct", "advantages")


class NeededWeights(StrEnum):
    """Which weights a consumer must hold before it gets rows of step s."""

    ANY = "any"
    BOUNDED = "bounded"  # As old as the schedule allows: for responses
    NEWEST = "newest"  # Those of step s - 1, on which step s trains
    REFERENCE = "reference"  # The reference of step s, if it follows the policy


def roles_on_device(*, reward_model: bool) -> tuple[str, ...]:
    """Return the roles that take a device per rank, in order; `reward` does if it computes with a model."""
    return tuple(role for role in _WITH_MODELS if reward_model or role != "reward")


@dataclass(frozen=True)
class Task:
    """One node of the graph."""

    name: str
    role: str  # The role that runs it when launched
    host: str  # The role that runs it otherwise; equal to `role` for tasks that cannot move
    # `inputs`, `outputs`: column names
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    whole_groups: bool = False  # Rows are ready only when all rows of their group are
    weights: NeededWeights = NeededWeights.ANY  # What the task's own role must hold; a host holds them anyway
    # For a training task: it puts columns that its role computes before training and that others read
    passes_on: bool = False
    # Its role serves it by itself if another role reads its outputs, because that role's own outputs come back: the
    # critic trains on what `advantages` makes of its values
    goes_ahead: bool = False


@dataclass(frozen=True)
class PlacedTask:
    """A task that a controller serves: what the queue must know, with fused tasks folded in."""

    name: str
    role: str  # The role whose processes fetch it
    inputs: tuple[str, ...]  # Columns that must be written before a row is ready; excludes what fused tasks compute
    outputs: tuple[str, ...]  # Columns that this role puts
    whole_groups: bool  # Hand out whole groups only
    fused: tuple[str, ...]  # Names of the tasks that the role computes inside this one, in order
    weights: NeededWeights = NeededWeights.ANY  # What its processes must hold


AnyTask = TypeVar("AnyTask", Task, PlacedTask)


def critic_free_tasks(
    advantage_inputs: tuple[str, ...], *, whole_groups: bool, reference: bool, old_log_probs: bool
) -> tuple[Task, ...]:
    """Return the tasks of an algorithm without a critic (arXiv 2402.03300, algorithm 1), producers before consumers.

    Args:
        whole_groups: responses are scored together with their group, so that groups can be filtered.
        reference: there is a KL penalty to the reference policy.
        old_log_probs: loss or reward need log-probabilities under the weights at the start of the step.
    """
    rollout = Task(
        name="actor_rollout",
        role="rollout",
        host="rollout",
        inputs=("prompts",),
        outputs=(*SAMPLE_COLUMNS, "rollout_log_probs", "versions", "truncated"),
        weights=NeededWeights.BOUNDED,
    )
    rewards = Task(
        name="rewards",
        role="reward",
        host="rollout",
        inputs=("prompts", *SAMPLE_COLUMNS, "ground_truth", "truncated"),
        outputs=("rewards", "correct"),
        whole_groups=whole_groups,
    )
    ref_log_probs = Task(
        name="ref_log_probs",
        role="ref",
        host="actor",
        inputs=SAMPLE_COLUMNS,
        outputs=("ref_log_probs",),
        weights=NeededWeights.REFERENCE,
    )
    old_policy = Task(
        name="actor_log_probs",
        role="actor_fwd",
        host="actor",
        inputs=SAMPLE_COLUMNS,
        outputs=("old_log_probs",),
        weights=NeededWeights.NEWEST,
    )
    advantages = Task(
        name=ADVANTAGES,
        role="advantages",
        host="actor",
        inputs=advantage_inputs,
        outputs=("advantages",),
        whole_groups=True,
    )
    optional = (*((ref_log_probs,) if reference else ()), *((old_policy,) if old_log_probs else ()))
    train = Task(
        name=ACTOR_TRAIN,
        role="actor",
        host="actor",
        inputs=(
            *("prompts", *SAMPLE_COLUMNS, "rollout_log_probs", "advantages"),
            *(name for task in optional for name in task.outputs),
            # The loss does not read these: they serve masking, the step's metrics and the ledger lines.
            *("truncated", "versions", "rewards", "correct", "epochs"),
        ),
        outputs=(),
        whole_groups=True,
    )
    return (rollout, rewards, *optional, advantages, train)


def producers_first(tasks: Collection[AnyTask]) -> tuple[list[AnyTask], list[AnyTask]]:
    """Return tasks ordered after their producers, otherwise in the given order, and the tasks that wait in a circle.

    Columns that no task writes are not waited for.
    """
    ordered: list[AnyTask] = []
    waiting = list(tasks)
    unwritten = {name for task in waiting for name in task.outputs}
    while able := next((task for task in waiting if unwritten.isdisjoint(task.inputs)), None):
        waiting.remove(able)
        ordered.append(able)
        unwritten.difference_update(able.outputs)
    return ordered, waiting


def place_tasks(tasks: Collection[Task], launched: Collection[str]) -> tuple[PlacedTask, ...]:
    """Assign every task to a launched role; fold all tasks of a role, hosted ones too, into its last own task.

    A task is folded *after* that main task if it reads what the main task writes (rewards into rollout), otherwise
    before it (reference and advantages into actor_train). A host that was not launched either has a host itself. A task
    that `goes_ahead` is not folded if another role reads its outputs. Tasks come producers before consumers; observers
    are ignored.

    Raises ConfigError if a launched role has no task in this graph, a task's host was not launched, or a task would
    wait for a column that exists only inside another role's task.
    """
    useful = {task.role for task in tasks}
    launched = [role for role in launched if role not in OBSERVERS]
    for role in launched:
        if role not in useful:
            raise ConfigError(
                f"roles: {role!r} has no task in this algorithm's dataflow, whose roles are "
                f"{' '.join(sorted(useful))}; leave {role} out, or set algorithm.name to one that has it"
            )
    main = {task.role: task for task in tasks if task.role in launched}
    hosts = {task.role: task.host for task in tasks}
    fused: dict[str, list[Task]] = {role: [] for role in main}
    for task in tasks:
        role = task.role if task.role in main else task.host
        if role not in main:
            role = hosts.get(role, role)
        if role not in main:
            raise ConfigError(f"roles: {role!r} is missing; task {task.name} runs there")
        if task is not main[role]:
            fused[role].append(task)
    at = {role: [task, *fused[role]] for role, task in main.items()}
    placed: list[PlacedTask] = []
    for role, task in main.items():
        elsewhere = {name for other in at if other != role for part in at[other] for name in part.inputs}
        folded = _fold(task, fused[role], elsewhere)
        ahead = [one for one in fused[role] if one.goes_ahead and one.role == role and elsewhere & set(one.outputs)]
        # The same rounds as the main task's, so that a step's bits do not depend on who computes the rest.
        placed += [replace(_fold(one, [], ()), whole_groups=folded.whole_groups) for one in ahead]
        placed.append(_fold(task, [one for one in fused[role] if one not in ahead], elsewhere) if ahead else folded)
    _refuse_unreachable_columns(placed, tasks)
    _refuse_circles(placed)
    return tuple(placed)


def _refuse_unreachable_columns(placed: Collection[PlacedTask], tasks: Collection[Task]) -> None:
    """Refuse reading a column that another role computes for itself: it never reaches the queue."""
    reachable = {name for task in placed for name in task.outputs} | ADMITTED
    for task in placed:
        for name in task.inputs:
            if name not in reachable:
                writer = next((other.role for other in tasks if name in other.outputs), "the role that writes it")
                raise ConfigError(
                    f"roles: {task.role!r} reads column {name}, which no other launched role writes; launch {writer}, "
                    f"too, or leave {task.role} out"
                )


def _refuse_circles(placed: Collection[PlacedTask]) -> None:
    """A role computes all its tasks at once, so roles may wait for each other although no two tasks do."""
    _, circle = producers_first(placed)
    if circle:
        roles = " ".join(task.role for task in circle)
        raise ConfigError(f"roles: {roles} would wait for each other's columns; give their tasks roles of their own")


def _fold(task: Task, fused: list[Task], read_elsewhere: Collection[str]) -> PlacedTask:
    computed = set(task.outputs) | {name for other in fused for name in other.outputs}
    wanted = [name for part in (task, *fused) for name in part.inputs]
    inputs = tuple(dict.fromkeys(name for name in wanted if name not in computed))
    outputs = task.outputs
    for other in fused:
        after = bool(set(other.inputs) & set(task.outputs))
        # Most training tasks put nothing, so columns computed before them stay inside.
        puts = bool(task.outputs) or task.passes_on
        outputs += tuple(name for name in other.outputs if after or (puts and name in read_elsewhere))
    whole_groups = task.whole_groups or any(other.whole_groups for other in fused)
    names = tuple(other.name for other in fused)
    return PlacedTask(task.name, task.role, inputs, outputs, whole_groups, names, task.weights)
