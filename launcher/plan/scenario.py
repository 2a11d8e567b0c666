"""Inputs of a simulated run: tasks as the queue knows them, workers per role, durations and lengths. Pure, torch-free.

`Scenario.from_config` makes them from a run's configuration, with durations of its `sim` engines or of a cost model.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import astuple, dataclass
from functools import lru_cache

from asyncflow.errors import ConfigError
from tq.policies import TaskSpec
from workers.engines.sim.decode_times import SimLengths
from workers.settings.dataflow import OBSERVERS, PlacedTask, place_tasks
from workers.settings.engines import ActorConfig
from workers.settings.run import RunConfig
from workers.settings.schedule import ScheduleConfig
from workers.tasks.graph import graph_of, task_specs


@dataclass(frozen=True)
class Work:
    """Duration of a forward pass, or of forward and backward (s).

    It is call_s + row_s x rows + token_s x tokens + squared_s x (sum of squared lengths), and at least `floor_s`. Only
    users' tasks, and prompts that enter an engine, take time per row.
    """

    call_s: float = 0.0
    row_s: float = 0.0
    token_s: float = 0.0
    squared_s: float = 0.0
    floor_s: float = 0.0

    def call_duration_s(self, tokens: float, squares: float = 0.0, rows: int = 0) -> float:
        """Return the duration of one call (s). `squares` is the sum of the samples' squared lengths."""
        computing_s = self.call_s + self.row_s * rows + self.token_s * tokens + self.squared_s * squares
        return max(self.floor_s, computing_s)

    def scaled_by(self, number: float = 1.0, *, parts: float = 1.0) -> "Work":
        """Scale this work by `number` and split it across `parts` ranks; every rank pays the overhead of its call."""
        share = number / parts
        return Work(
            call_s=self.call_s * number, row_s=self.row_s * share, token_s=self.token_s * share,
            squared_s=self.squared_s * share, floor_s=self.floor_s * number,
        )  # fmt: skip

    def __add__(self, other: "Work") -> "Work":
        return Work(*(one + more for one, more in zip(astuple(self), astuple(other), strict=True)))


@dataclass(frozen=True)
class Latency:
    """Latencies of AsyncFlow itself, besides computing (s).

    Attributes:
        put_s: from a finished output until others can lease its rows.
        fetch_s: from the grant of a lease until its rows are in hand.
        admit_s: from a published version until the prompts that it admits can be leased.
        transfer_s: from then until instances can load the version.
        swap_s: of an instance that takes newer weights; a cost model adds the time of the copy.
        publish_s: how long publishing delays the trainer, including records and peers at the end of a step.
        round_s: of the trainer per round: Python between rounds.
        request_s: CPU time of a put, or of a lease with its reads and its acknowledgement, in all processes of the
            queue and in the client. It only counts where they share the machine with the workers.
        turn_s: colocated roles: how long neither side has the devices when a turn passes, besides sleeping and waking:
            messages, and the wait for more rows before a side gives them away.
    """

    # docs/performance.md measures six hops after a pause at 2.4 ms on two cores, and Python between micro-batches at
    # 1.5 % of steps of 4 s with eight rounds. The rest is assumed.

    put_s: float = 0.004
    fetch_s: float = 0.004
    admit_s: float = 0.01
    transfer_s: float = 0.01
    swap_s: float = 0.003
    publish_s: float = 0.015
    round_s: float = 0.0075
    request_s: float = 0.001
    turn_s: float = 0.025


@dataclass(frozen=True)
class Turns:
    """What rollouts of a user's function or agent do besides generating, as means per rollout from a run's records.

    Attributes:
        replies: turns of the policy, at least 1.
        tool_s: seconds in which no reply is generated; split evenly over the replies, after each.
        cpu_s: CPU time of the session service, its functions and the rollout's process, without the engine.
        read_tokens: tokens between the replies, from tools, environments and users.
    """

    replies: float = 1.0
    tool_s: float = 0.0
    cpu_s: float = 0.0
    read_tokens: int = 0

    def num_replies(self, row: int) -> int:
        """Return the number of replies of a row: whole numbers with this mean."""
        return int((row + 1) * self.replies) - int(row * self.replies)


@dataclass(frozen=True)
class Training:
    """How a role trains its model.

    Attributes:
        round_tokens: token budget of a rank's round; 0: none.
        rows_per_call: rows per call of a task that the role hosts.
        whole_step: train no round before the last one has arrived.
    """

    settings: ActorConfig
    round_tokens: int
    rows_per_call: int
    whole_step: bool

    @property
    def streams(self) -> bool:
        """Whether each round is trained on arrival, so that replicas need not know each other's rows."""
        return self.settings.num_updates == 1 and not self.whole_step

    @staticmethod
    def by_role(config: RunConfig) -> "dict[str, Training]":
        """Return role -> training, for the actor and a critic in a role of its own."""
        found = {}
        for role, settings in training_of(config).items():
            rows = settings.micro_batch_size
            if settings.max_tokens_per_micro_batch:
                rows = min(rows, config.ref.micro_batch_size)
            whole_step = role == "actor" and config.algorithm.whole_step
            found[role] = Training(settings, config.round_tokens(settings), rows, whole_step)
        return found


@dataclass(frozen=True)
class Times:
    """What a configuration's work takes on its devices.

    Attributes:
        decode_s: number of responses that an instance generates -> seconds for one token of each.
        prefill: prompts that enter an instance's step together; it stalls all responses of the instance.
        first_tokens, later_tokens: tokens computed for a rollout's first prompt, and for that of a later turn.
        tasks: task -> one call on a worker of its role, or on a replica of the trainer that hosts it.
        train: role that trains -> a micro-batch on one replica.
        update_s: role that trains -> seconds of its optimizer step.
        prompt_tokens: prompt length where tasks and training compute prompts, too; `sim` engines do not.
        in_step: roles whose replicas wait for each other at every micro-batch (FSDP2's collectives).
        slots: responses that an instance generates at once.
        pause_s: time in which an instance generates nothing because it takes newer weights (s).
        recomputes: whether a swap costs the keys and values of everything that runs: they are computed again.
        at_full_speed: workers of all roles that can run at full speed side by side on a machine that all share; 0: each
            has a device of its own.
        to_actor_s, to_rollout_s: colocated roles: how long the devices' turn takes to pass to the other side (s), from
            the last thing that one side does until the other can compute.
    """

    decode_s: Callable[[int], float]
    prefill: Work
    first_tokens: float
    later_tokens: float
    tasks: Mapping[str, Work]
    train: Mapping[str, Work]
    update_s: Mapping[str, float]
    slots: int
    prompt_tokens: int = 0
    in_step: Collection[str] = ()
    latency: Latency = Latency()
    pause_s: float = 0.0
    recomputes: bool = False
    at_full_speed: float = 0.0
    to_actor_s: float = 0.0
    to_rollout_s: float = 0.0

    @staticmethod
    def of_sim(config: RunConfig, *, prompt_tokens: float) -> "Times":
        """Return durations of the run's `sim` engines; tasks that are neither simulated nor users' take no time."""
        sim = config.sim
        return Times(
            decode_s=lru_cache(maxsize=None)(sim.decode_s),
            prefill=Work(token_s=sim.prefill_s_per_token),
            first_tokens=prompt_tokens,
            later_tokens=prompt_tokens,
            tasks={
                "ref_log_probs": Work(token_s=sim.ref_s_per_token),
                "actor_log_probs": Work(token_s=sim.policy_forward_s_per_token),
                **work_of_users(config),
            },
            train=dict.fromkeys(training_of(config), Work(token_s=sim.train_s_per_token)),
            update_s=dict.fromkeys(training_of(config), sim.optimizer_s),
            slots=config.rollout.batch_size,
            to_actor_s=sim.switch_s,
            to_rollout_s=sim.switch_s,
        )


@dataclass(frozen=True)
class Scenario:
    """One run to simulate.

    Attributes:
        specs: the tasks as the queue knows them.
        workers: role -> consumers that work side by side: instances, copies, replicas of the actor.
        rows_per_fetch: role that only computes columns -> rows that a worker takes at a time.
        interruptible: whether engines load newer weights while responses run.
        max_updating: instances that may swap at once; None: all.
        rows_per_put: responses of a lease that an instance puts together.
        tokens: row -> length of its response.
        most_live: limit on an instance's concurrent rollouts of functions and agents; 0: one response per prompt.
        colocated: roles that take turns on the same devices: none, or rollout, actor and maybe evaluators, whose
            evaluations are not simulated.
    """

    schedule: ScheduleConfig
    training: Mapping[str, Training]
    tasks: Sequence[PlacedTask]
    specs: Sequence[TaskSpec]
    workers: Mapping[str, int]
    rows_per_fetch: Mapping[str, int]
    interruptible: bool
    max_updating: int | None
    rows_per_put: int
    deterministic: bool
    seed: int
    tokens: Callable[[int], int]
    times: Times
    turns: Turns = Turns()
    most_live: int = 0
    colocated: Sequence[str] = ()

    @staticmethod
    def from_config(
        config: RunConfig, times: Times, *, tokens: Callable[[int], int] | None = None, turns: Turns | None = None
    ) -> "Scenario":
        """Return the scenario of a checked configuration, with workers as its roles say.

        `tokens` maps a row to the length of its response; None: drawn as `sim` draws them.

        Raises:
            ConfigError: the run uses what cannot be simulated, or has turns without a record of them.
        """
        _check(config, turns)
        # What a role `advantages` makes of a critic's values takes no time here, so the critic may as well host it.
        idle = {"advantages"} if "critic" in config.roles else set()
        roles = [role for role in config.roles if role not in OBSERVERS | idle]
        tasks = place_tasks(graph_of(config), roles)
        schedule = config.schedule
        longest = config.rollout.max_response_tokens
        drawn = SimLengths(config.sim, samples_per_step=schedule.step_rows, seed=config.seed).response_length
        size = schedule.n_samples_per_prompt
        rows_per_fetch = {
            "ref": config.ref.micro_batch_size, "actor_fwd": config.ref.micro_batch_size, "advantages": 8 * size,
        }  # fmt: skip
        return Scenario(
            schedule=schedule,
            training=Training.by_role(config),
            tasks=tasks,
            specs=task_specs(tasks, config),
            workers=workers_of(config),
            rows_per_fetch={task.role: rows_per_fetch.get(task.role, size) for task in tasks},
            interruptible=config.rollout.engine != "openai" and config.rollout.on_swap != "finish",
            max_updating=config.weightsync.max_updating,
            rows_per_put=config.rollout.batch_size if config.deterministic else size,
            deterministic=config.deterministic,
            seed=config.seed,
            tokens=tokens or (lambda row: min(longest, drawn(row))),
            times=times,
            turns=turns or Turns(),
            most_live=schedule.step_rows * schedule.staleness.steps_in_flight if config.rollout.is_own else 0,
            colocated=config.colocated,
        )


def training_of(config: RunConfig) -> dict[str, ActorConfig]:
    """Return role -> settings of the roles that train: the actor, and a critic in a role of its own."""
    own = {"critic": config.critic.training(config.actor)} if "critic" in config.roles else {}
    return {"actor": config.actor, **own}


def prompt_tokens_of(config: RunConfig) -> int:
    """Return the assumed prompt length: half of the maximum."""
    return config.data.max_prompt_tokens // 2


def workers_of(config: RunConfig) -> dict[str, int]:
    """Return role -> number of consumers that work side by side: instances, copies of a sharded model, replicas."""
    return {role: n // config.ranks_per_copy(role) for role, n in config.roles.items() if role not in OBSERVERS}


def work_of_users(config: RunConfig) -> dict[str, Work]:
    """Return the work of users' tasks, whose calls overlap up to their `concurrency`."""
    return {task.name: Work(row_s=task.seconds_per_row / task.concurrency) for task in config.tasks}


def _check(config: RunConfig, turns: Turns | None) -> None:
    if config.actor.engine == "sim" and config.algorithm.has_critic:
        name = config.algorithm.name
        raise ConfigError(
            f"actor.engine: sim cannot be used with algorithm.name {name}, whose critic is trained; use fsdp"
        )
    if config.outside_roles:
        role = config.outside_roles[0]
        raise ConfigError(
            f"roles: {role}:0 cannot be planned, since the speed of processes outside is not known; plan with {role}:1"
        )
    if "teacher" in config.roles:
        raise ConfigError(
            "roles: teacher cannot be planned, since how long its models take is not estimated; launch as many as a "
            "short run needs (`asyncflow timeline`)"
        )
    if config.rollout.is_own and turns is None:
        raise ConfigError(
            "rollout.function and agents are planned from what a run recorded of their turns and tools; make a short "
            "run (--steps 3), and give its directory to `asyncflow plan`: --lengths RUN_DIR"
        )
