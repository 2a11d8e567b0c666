"""The search: role sizes, layouts and batches under a number of devices. Bounds prune, simulated runs rank.

    layouts x sizes of actor, reference and critic --bound with the largest micro-batch--> in order of the bound
        --responses of an instance, micro-batches, memory, what a start refuses--> what fits, each at its own bound
        --simulated--> ranked; ends once no bound is below the best simulated step

A bound is the least that a step can take: the work of the busiest role, spread evenly, with nothing else in the way; or
its longest responses, each followed by what has to come after it, one after the other.
"""

import itertools
import math
from bisect import insort_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

from asyncflow.errors import ConfigError
from asyncflow.settings import SettingsT
from launcher.checks.models import device_memory
from launcher.checks.placement import Devices, place_gangs
from launcher.config.rules import AT_START, check_batch_sizes, check_rules, divisors
from launcher.plan.cost_model import CostModel, Device, Workload, devices_of
from launcher.plan.scenario import (
    Latency,
    Scenario,
    Times,
    Turns,
    Work,
    prompt_tokens_of,
    training_of,
    workers_of,
)
from launcher.plan.world import Simulated, simulate
from workers.engines.device_memory import ModelSizes
from workers.settings.dataflow import place_tasks
from workers.settings.engines import ActorConfig
from workers.settings.run import COLOCATED, RunConfig
from workers.settings.schedule import Fill, ScheduleConfig, ScheduleMode
from workers.tasks.graph import graph_of

# Bounds, which prune candidates before anything is simulated.


def longest_tokens(schedule: ScheduleConfig, tokens: Callable[[int], int], *, steps: int, skip: int) -> float:
    """Return the tokens of the longest response that a step waits for, as a mean over the steps that count.

    A response may take 1 + staleness steps. So in a simulated run of `steps`, the longest responses of steps that far
    apart follow each other. The first `skip` steps do not count.
    """
    rows, late, apart = schedule.step_rows, schedule.lateness, schedule.staleness.steps_in_flight
    ends = [(step - late) * rows for step in range(steps, skip + apart - 1, -apart)]
    return sum(max(map(tokens, range(end - rows, end))) for end in ends) / (steps - skip)


@dataclass(frozen=True)
class Bounds:
    """Lower bounds on the step time of one run, for any layout and split."""

    workload: Workload
    longest_tokens: float
    scores: bool

    def step_s(self, config: RunConfig, times: Times) -> float:
        """Return the least that a step can take (s)."""
        work, workers = self.work_s(config, times), workers_of(config)
        computing_s = sum(seconds * workers[role] for role, seconds in work.items())
        longest_s = self.longest_tokens * times.decode_s(1)
        critic_s = work.pop("critic", 0.0)  # the critic trains beside the actor, and beside the next rollout
        # Synchronous phases follow each other. Otherwise roles overlap, and the busiest one sets the pace.
        if config.is_colocated:
            # Generating, training and two switches follow each other, at best for all steps that may be in flight.
            switches_s = (times.to_actor_s + times.to_rollout_s) / config.schedule.staleness.steps_in_flight
            generating_s, training_s = max(work.pop("rollout"), longest_s), work.pop("actor")
            others = work.values()
            least_s = generating_s + switches_s + training_s
            in_turn = config.schedule.mode is ScheduleMode.SYNC
            least_s = least_s + sum(others) if in_turn else max(least_s, *others, 0.0)
        elif config.schedule.mode is ScheduleMode.SYNC:
            least_s = sum(work.values()) + max(0.0, longest_s - work["rollout"])
        else:
            least_s = max(*work.values(), longest_s + self._behind_s(config, times))
        least_s = max(least_s, critic_s)
        # The work of all roles must also fit the cores of a machine that they share.
        return max(least_s, computing_s / times.at_full_speed) if times.at_full_speed else least_s

    def _behind_s(self, config: RunConfig, times: Times) -> float:
        """Return the least time per step that follows a longest response, before the next may begin (s)."""
        # The next response that waits for this one belongs to a step 1 + staleness later, so its cost is spread over
        # that many steps, like `longest_tokens`.
        apart = config.schedule.staleness.steps_in_flight
        tokens = times.prompt_tokens + self.longest_tokens * apart
        works = [times.train["actor"], *([times.tasks["ref_log_probs"]] if self.scores else [])]
        behind_s = sum(work.call_duration_s(round(tokens), tokens * tokens) for work in works)
        return (behind_s + config.actor.num_updates * times.update_s["actor"]) / apart

    def work_s(self, config: RunConfig, times: Times) -> dict[str, float]:
        """Return the least time that each role works on a step, with its work spread evenly over its workers (s)."""
        workers, schedule, mean = workers_of(config), config.schedule, self.workload
        rows = schedule.step_rows
        in_flight = rows * schedule.staleness.steps_in_flight
        # With devices of their own, even shares are best. A machine that all share does least with few full batches.
        together = min(times.slots, in_flight if times.at_full_speed else -(-in_flight // workers["rollout"]))
        fastest = min(times.decode_s(number) / number for number in {1, together})
        work = {"rollout": rows * mean.mean_tokens * fastest / workers["rollout"]}
        scored = rows * (
            times.tasks["ref_log_probs"].token_s * (mean.mean_tokens + times.prompt_tokens)
            + times.tasks["ref_log_probs"].squared_s * mean.mean_square
        )
        for role, training in training_of(config).items():
            pass_s = self._train_s(config, training, times, times.train[role], rows / workers[role])
            work[role] = training.ppo_epochs * pass_s + training.num_updates * times.update_s[role]
        if "ref" in config.roles:
            work["ref"] = scored / workers["ref"]
        elif self.scores:
            work["actor"] += scored / workers["actor"]
        return work

    def _train_s(self, config: RunConfig, training: ActorConfig, times: Times, work: Work, rows: float) -> float:
        """Return the least time of one pass over a replica's rows, in as few micro-batches as possible (s)."""
        mean, group_size = self.workload, config.schedule.n_samples_per_prompt
        tokens = rows * (mean.mean_tokens + times.prompt_tokens / (group_size if training.shared_prompt else 1))
        number = rows / training.micro_batch_size
        if training.max_tokens_per_micro_batch:
            # A sample longer than the budget gets a micro-batch of its own; no micro-batch exceeds a round.
            most = max(training.max_tokens_per_micro_batch, times.prompt_tokens + config.rollout.max_response_tokens)
            number = max(rows / max(training.micro_batch_size, group_size), tokens / most)
        computing_s = number * work.call_s + work.token_s * tokens + work.squared_s * rows * mean.mean_square
        return max(computing_s, number * work.floor_s)


# What a plan may change: layouts, batch sizes, micro-batches, the schedule; and how many ranks each role gets.

Changes = Mapping[str, object]
"""Values of settings by their names, as `--set` takes them."""
_DIVISIONS = (1, 2, 4, 8)
_FACTORS = (1, 2, 4, 8, 1 / 2, 1 / 4, 1 / 8)
_SCHEDULES = (
    (ScheduleMode.SYNC, 0),
    (ScheduleMode.PERIODIC, 0),
    (ScheduleMode.ASYNC, 1),
    (ScheduleMode.ASYNC, 2),
    (ScheduleMode.ASYNC, 4),
    (ScheduleMode.SUBSTEP, 1),
    (ScheduleMode.COLOCATE_ASYNC, 1),
)
_LEAST_OF_FIRST_READY = 2
"""Staleness that `fill: first_ready` needs."""


def with_changes(section: SettingsT, changes: Changes) -> SettingsT:
    """Return settings with other values. Nothing is validated: what is chosen here has its checks below."""
    for name, value in changes.items():
        first, _, inner = name.partition(".")
        value = with_changes(getattr(section, first), {inner: value}) if inner else value
        section = section.model_copy(update={first: value})
    return section


def with_ranks(config: RunConfig, roles: Mapping[str, int]) -> RunConfig | None:
    """Return the run with other numbers of ranks of these roles; None: its batch does not divide over them."""
    config = with_changes(config, {"roles": {**config.roles, **roles}})
    try:
        check_batch_sizes(config)
    except ConfigError:
        return None
    return config


def layouts(config: RunConfig, model: ModelSizes, devices_per_node: int) -> Iterator[Changes]:
    """Yield every layout that divides the model.

    These are vLLM's tensor parallelism; the tensor, context and pipeline parallelism of an actor on Megatron; and for a
    sharded reference the ranks that share a copy (FSDP) or its tensor parallelism (Megatron).
    """
    divides = [n for n in _DIVISIONS if model.num_heads % n == 0 and model.ffn_size % n == 0]
    # Tensor parallelism and copies of the reference stay inside a node.
    inside = [n for n in divides if n <= devices_per_node]
    generating, training, scoring = list[Changes]([{}]), list[Changes]([{}]), list[Changes]([{}])
    if config.rollout.engine == "vllm":
        # vLLM replicates KV heads where there are more ranks than heads.
        able = [n for n in inside if model.num_kv_heads % n == 0 or n % model.num_kv_heads == 0]
        generating = [{"vllm.tensor_parallel_size": n} for n in able]
    if config.actor.engine == "megatron":
        names = [f"actor.megatron.{name}_parallel" for name in ("tensor", "context", "pipeline")]
        shares = sorted({*_DIVISIONS, config.actor.megatron.context_parallel})
        training = [
            dict(zip(names, (tensor, context, stages), strict=True))
            for tensor, context, stages in itertools.product(inside, shares, _DIVISIONS)
            if model.num_kv_heads % tensor == model.num_heads // tensor % context == model.num_layers % stages == 0
        ]
    ref = config.ref
    scores = config.algorithm.kl_coef > 0 and not config.actor.tri_model
    if scores and ref.engine == "fsdp":
        shards = sorted({*(n for n in _DIVISIONS if 1 < n <= devices_per_node), ref.shards})
        scoring = [{"ref.shards": n} for n in shards]
    if scores and ref.engine == "megatron":
        own = ref.megatron
        others = own.context_parallel * own.pipeline_parallel
        able = [
            n for n in inside
            if model.num_kv_heads % n == model.num_heads // n % own.context_parallel == 0
            and 1 < n * others <= devices_per_node
        ]  # fmt: skip
        scoring = [{"ref.megatron.tensor_parallel": n} for n in able or [own.tensor_parallel]]
    for generated, trained, scored in itertools.product(generating, training, scoring):
        yield {**generated, **trained, **scored}


def batch_sizes(config: RunConfig) -> Iterator[Changes]:
    """Yield limits on the responses that an instance generates at once, never above the configured one."""
    schedule, own = config.schedule, config.rollout.batch_size
    instances = config.roles["rollout"] // config.ranks_per_copy("rollout")
    # An instance's share of all responses that may be in flight, then of one step, in whole groups. With a larger limit
    # an instance would take all there is and leave nothing to the others.
    groups = [-(-schedule.rollout_batch_size * steps // instances) for steps in (schedule.staleness.steps_in_flight, 1)]
    for size in dict.fromkeys(min(own, number * schedule.n_samples_per_prompt) for number in groups):
        yield {"rollout.batch_size": size} if size != own else {}


def micro_batches(config: RunConfig) -> Iterator[Changes]:
    """Yield the actor's micro-batch as configured, then up to eight times as large, then down to an eighth."""
    rows, budget = config.actor.micro_batch_size, config.actor.max_tokens_per_micro_batch
    for factor in _FACTORS:
        # A larger budget only fills if a rank also gets more rows at a time.
        sized = int(budget * factor), int(rows * (max(1, factor) if budget else factor))
        if sized[1] < 1 or (budget and sized[0] < 1):
            return
        names = ("actor.max_tokens_per_micro_batch", "actor.micro_batch_size")
        yield {name: new for name, new, old in zip(names, sized, (budget, rows), strict=True) if new != old}


def schedules(config: RunConfig) -> Iterator[Changes]:
    """Yield the other schedules, strictest first. They change which data a step trains on."""
    own = config.schedule
    for mode, staleness in _SCHEDULES:
        changes: dict[str, object] = {"schedule.mode": mode}
        if staleness:
            changes["schedule.max_staleness"] = staleness
        if own.lateness and staleness < _LEAST_OF_FIRST_READY:
            changes["schedule.fill"] = Fill.IN_ORDER
        other = with_changes(config, changes).schedule
        same = (other.mode, other.staleness_bound, other.fill) == (own.mode, own.staleness_bound, own.fill)
        if not same and not (config.deterministic and staleness):  # deterministic: weights must not depend on timing
            yield changes


_LARGEST = 2
"""Sizes that are tried of colocated roles: the largest ones that fit."""
SIZED = ("rollout", "actor", "ref", "critic")
"""Roles that a plan sizes; all others keep their configured size."""


def colocated_splits(config: RunConfig, totals: Sequence[int], share: float | None) -> Iterator[dict[str, int]]:
    """Yield the ranks of each role where rollout and actor take turns on as many devices as divide the batch, with the
    evaluators if they do in `config`.

    The arguments are those of `splits`.
    """
    instance, replica = config.ranks_per_copy("rollout"), config.ranks_per_copy("actor")
    if config.schedule.mode is ScheduleMode.SUBSTEP or config.rollout.engine == "openai":
        return
    joint = config.colocated or COLOCATED
    fixed = {role: number for role, number in config.roles.items() if role not in (*SIZED, *joint)}
    sizes = [number * replica for number in divisors(config.schedule.rollout_batch_size)]
    sizes = [number for number in sizes if number % instance == 0]
    for total in totals:
        for critic in {each for number in sizes for each in _critics(config, number)}:
            for ref in (0,) if share is None else _copies(config, total - critic, share / 2):
                fitting = [number for number in sizes if number <= total - critic - ref]
                for number in fitting[-_LARGEST:]:
                    own = dict.fromkeys(joint, number) | {"ref": ref, "critic": critic}
                    yield {role: number for role, number in (own | fixed).items() if number or role in fixed}


def splits(config: RunConfig, totals: Sequence[int], share: float | None) -> Iterator[dict[str, int]]:
    """Yield the ranks of each role: actor replicas that divide the batch, and the rest shared out by work.

    Args:
        totals: numbers of devices for the sized roles together.
        share: the reference's share of the devices of rollout and reference together; None: no reference.
    """
    instance, replica = config.ranks_per_copy("rollout"), config.ranks_per_copy("actor")
    fixed = {role: number for role, number in config.roles.items() if role not in SIZED}
    for total, replicas in itertools.product(totals, divisors(config.schedule.rollout_batch_size)):
        actor = replicas * replica
        for critic in _critics(config, actor):
            for ref in (0,) if share is None else _copies(config, total - actor - critic, share):
                rollout = (total - actor - critic - ref) // instance * instance
                if config.rollout.engine == "openai":  # one instance feeds all servers
                    rollout = min(rollout, 1)
                if rollout > 0:
                    own = {"rollout": rollout, "actor": actor, "ref": ref, "critic": critic}
                    yield {role: number for role, number in (own | fixed).items() if number or role in fixed}


def _copies(config: RunConfig, room: int, share: float) -> Sequence[int]:
    """Return numbers of ranks for the reference: those near its share, and 0 if the actor can host it."""
    copy = config.ranks_per_copy("ref")
    # The actor hosts only a reference that is not sharded, or that it has anyway.
    none = {0} if copy == 1 or config.actor.tri_model or config.reference_is_base else set()
    if room < 2:
        return sorted(none)
    best = room * share / copy
    near = {math.floor(best), math.ceil(best), math.ceil(best) + 1}
    return sorted(none | {number * copy for number in near if 1 <= number * copy < room})


def _critics(config: RunConfig, actor: int) -> Sequence[int]:
    """Return numbers of ranks for the critic: divisors of the batch, and 0 if the actor can host it."""
    if not config.algorithm.has_critic:
        return (0,)
    sizes = divisors(config.schedule.rollout_batch_size)
    # A critic's work is similar to the actor's, so half to twice the actor's ranks are tried.
    own = [number for number in sizes if actor <= 2 * number <= 4 * actor]
    own = own or [max(number for number in sizes if number <= actor)]
    # Only an FSDP2 actor can host the critic.
    hosts, alone = config.actor.engine == "fsdp", not config.schedule.lateness
    return [*([0] if hosts else []), *(own if alone else [])]


# Whether the launcher would accept a plan: those checks of a start that depend on what a plan changes.


def check_launchable(config: RunConfig, device: Device | None, num_devices: int) -> None:
    """Refuse what a start would refuse.

    Args:
        device: catalogue entry that sets the devices per node; None: ranks share the machine.
        num_devices: of the cluster; the last node may have fewer than the others.

    Raises:
        ConfigError: as at a start.
    """
    check_rules(config, AT_START)
    check_batch_sizes(config)
    place_tasks(graph_of(config), config.roles)
    devices, num_nodes = Devices("cpu"), 1
    if device is not None and not device.shared_by:
        a_node = min(num_devices, device.devices_per_node)
        devices, num_nodes = Devices("accelerator", a_node), -(-num_devices // a_node)
    place_gangs(config, devices, num_nodes=num_nodes)


Objective = Literal["time", "cost"]
_SIMULATED = ((512, 8), (4096, 3), (math.inf, 2))
"""(rows of a step, plans): at most `find_plans` are simulated where a step has at most `rows`."""
_ROWS = 8000
"""Approximate number of rows in a simulated run."""
_WORTH = 0.98
"""Try another micro-batch only if it lowers the bound to this share of the last one."""
_OTHERS = 2
"""A candidate that differs from one of the last `_OTHERS` in reference and critic alone is deferred."""
_COUNTED = (2, 10)
"""Minimum and maximum number of steps that count in a simulated run."""


@dataclass(frozen=True)
class Candidate:
    """A configuration that may be simulated.

    Attributes:
        settings: changes besides the roles.
        bound_s: the least that a step can take (s); until batches are chosen, with the largest micro-batches.
        headroom_gb: device memory left on the fullest rank; None: unknown.
    """

    config: RunConfig
    settings: Changes
    bound_s: float
    has_batches: bool = True
    headroom_gb: float | None = None

    @property
    def kind(self) -> int:
        """Ranks per rollout instance; 0: rollout and actor are colocated."""
        return 0 if self.config.is_colocated else self.instance

    @property
    def instance(self) -> int:
        return self.config.ranks_per_copy("rollout")

    def is_like(self, other: "Candidate") -> bool:
        """Return whether the form, the actor's size and the layouts, other than the reference's, are the same."""
        one, two = self.config, other.config
        same_layout = (one.colocated, self.instance, one.actor.megatron) == (
            two.colocated,
            other.instance,
            two.actor.megatron,
        )
        return same_layout and one.roles["actor"] == two.roles["actor"]


@dataclass(frozen=True, kw_only=True)
class Plan(Candidate):
    """One way to use the devices, with its simulated run."""

    simulated: Simulated

    @property
    def changes(self) -> tuple[str, ...]:
        """Changes besides the roles, in the form that `--set` takes."""
        return tuple(f"{name}={value}" for name, value in self.settings.items())

    @property
    def step_s(self) -> float:
        # A few simulated steps may live on rows generated ahead; in the long run no step is shorter than its bound.
        return max(self.bound_s, self.simulated.step_s(_window(self.config)[1]))

    @property
    def tokens_per_s(self) -> float:
        """Response tokens per second."""
        ran, (_, skip) = self.simulated, _window(self.config)
        return ran.tokens_per_s(skip) * ran.step_s(skip) / self.step_s

    @cached_property
    def idle(self) -> Mapping[str, float]:
        """Role -> share of the time in which its workers do not compute."""
        return self.simulated.idle(_window(self.config)[1])

    @property
    def num_devices(self) -> int:
        return devices_of(self.config)

    @property
    def tokens_per_s_per_device(self) -> float:
        """Response tokens per second and device."""
        return self.tokens_per_s / self.num_devices

    def values(self) -> dict[str, Any]:
        """Return the plan in the form of `--json` and plan.json."""
        return {
            "roles": self.config.roles,
            "colocated": list(self.config.colocated),
            "set": list(self.changes),
            "devices": self.num_devices,
            "step_s": self.step_s,
            "bound_s": self.bound_s,
            "tokens_per_s": self.tokens_per_s,
            "tokens_per_s_per_device": self.tokens_per_s_per_device,
            "idle_fraction": dict(self.idle),
            "memory_headroom_gb": self.headroom_gb,
        }

    @property
    def roles_text(self) -> str:
        """The roles in the form that `--roles` takes."""
        return self.config.roles_text


@dataclass(frozen=True)
class Planner:
    """A search for plans.

    Attributes:
        config: rollout, actor, reference and critic are planned; other roles keep their sizes.
        num_devices: upper limit.
        tokens: row -> length of its response.
        costs: of the model on the device; None: `sim` engines, whose section says how long everything takes.
        turns: for rollouts of functions and agents.
        objective: minimize the step time, or maximize the tokens per second and device.
        colocated: whether rollout and actor take turns on the same devices; None: whichever is better.
    """

    config: RunConfig
    num_devices: int
    tokens: Callable[[int], int]
    workload: Workload
    costs: CostModel | None = None
    turns: Turns | None = None
    objective: Objective = "time"
    colocated: bool | None = None

    @property
    def device(self) -> Device | None:
        return None if self.costs is None else self.costs.device

    def find_plans(self) -> list[Plan]:
        """Return the best plans, best first.

        Raises:
            ConfigError: nothing fits; the message says what the first refused candidate lacks.
        """
        candidates, found, refused = self._list_candidates(), list[Plan](), list[ConfigError]()
        left = next(number for rows, number in _SIMULATED if self.config.schedule.step_rows <= rows)
        while (place := _next(candidates, found, only_new=not left)) is not None:
            candidate = candidates.pop(place)
            # A candidate without batches has the bound of the largest ones. Once it comes up, its fitting variants
            # go back into the list, each at its own bound.
            if not candidate.has_batches:
                for each in self._fit_batches(candidate):
                    if isinstance(each, ConfigError):
                        refused.append(each)
                    else:
                        insort_left(candidates, each, key=self._sort_key)
                continue
            # The first candidate of each further kind does not count towards the limit.
            left -= not found or candidate.kind in {plan.kind for plan in found}
            found.append(self._simulate_config(candidate))
            if self.objective == "time":
                best_s = min(plan.step_s for plan in found)
                candidates = [each for each in candidates if each.bound_s < best_s]
        if not found:
            raise ConfigError(
                f"--devices {self.num_devices}: no plan fits"
                + (f"; {refused[0]}" if refused else ": every role needs at least one")
            )
        cheap = self.objective == "cost"
        return sorted(found, key=lambda plan: -plan.tokens_per_s_per_device if cheap else plan.step_s)

    def one_more(self, plan: Plan) -> dict[str, float]:
        """Return, per role, the step time with one more worker of it: an instance, a copy or a replica (s)."""
        found = {}
        roles, at_work = plan.config.roles, workers_of(plan.config)
        hosted = ["ref"] if self._bounds.scores and "ref" not in roles else []
        for role in [*plan.idle, *hosted]:
            together = role.split("+")  # colocated roles grow together
            workers = max(at_work.get(each, 1) for each in together)
            size = math.lcm(*map(plan.config.ranks_per_copy, together))
            sizes = [roles.get(together[-1], 0) + more * size for more in range(1, workers + 1)]
            # Not every size divides the batch.
            every = (with_ranks(plan.config, dict.fromkeys(together, number)) for number in sizes)
            larger = next(filter(None, every), None)
            if larger is not None:
                found[f"{role}:{larger.roles[together[-1]]}"] = self.step_s(larger)
        return found

    def step_s(self, config: RunConfig | None = None) -> float:
        """Return the step time of a configuration, by default of the run as configured (s)."""
        config = config or self.config
        return self._simulate_config(Candidate(config, {}, self.bound_s(config))).step_s

    def bound_s(self, config: RunConfig) -> float:
        """Return the least that a step can take (s)."""
        return self._bounds.step_s(config, self.times(config))

    def make_scenario(self, config: RunConfig) -> Scenario:
        return Scenario.from_config(config, self.times(config), tokens=self.tokens, turns=self.turns)

    def times(self, config: RunConfig) -> Times:
        if self.costs is None:
            return Times.of_sim(config, prompt_tokens=prompt_tokens_of(config))
        return replace(self.costs, config=config).estimate_times()

    def other_schedules(self) -> list[Plan]:
        """Return the best plan of each other schedule that can be planned, strictest schedule first."""
        found = []
        for changes in schedules(self.config):
            try:
                best = replace(self, config=with_changes(self.config, changes)).find_plans()[0]
            except ConfigError:  # e.g. the policy versions that the actor keeps do not fit
                continue
            found.append(replace(best, settings={**changes, **best.settings}))
        return found

    def _simulate_config(self, candidate: Candidate) -> Plan:
        config, schedule = candidate.config, candidate.config.schedule
        # A real run continues, so at its end it generates as much ahead as it had ahead after its first steps.
        further = schedule.staleness_bound + schedule.lateness
        ran = simulate(self.make_scenario(config), steps=_window(config)[0], further=further)
        return Plan(**vars(candidate), simulated=ran)

    def _list_candidates(self) -> list[Candidate]:
        """Return all candidates, lowest bound first, without their batches."""
        found = []
        for layout in self.model_layouts():
            config = with_changes(self.config, layout)
            largest = max((with_changes(config, each) for each in self._micro_batches(config)), key=_micro_batch)
            known: dict[tuple[object, ...], Times] = {}
            for split in self._role_splits(config):
                roles, colocated = split["roles"], split["colocated"]
                same = (roles["actor"], "ref" in roles, roles.get("critic", 0), colocated)
                sized = largest.model_copy(update=split)
                times = known.get(same) or known.setdefault(same, self.times(sized))
                bound_s = self._bounds.step_s(sized, times)
                found.append(Candidate(config.model_copy(update=split), layout, bound_s, has_batches=False))
        return sorted(found, key=self._sort_key)

    def _sort_key(self, candidate: Candidate) -> float:
        if self.objective == "time":
            return candidate.bound_s
        house = Latency()
        # All devices wait for these, so their cost grows with the number of devices.
        house_s = house.publish_s + house.admit_s + house.transfer_s + house.swap_s
        return (candidate.bound_s + house_s) * devices_of(candidate.config)

    def model_layouts(self) -> Iterator[Changes]:
        """Yield every layout that divides the model; `sim` engines have just one."""
        costs = self.costs
        return iter([{}]) if costs is None else layouts(self.config, costs.model, costs.device.devices_per_node)

    def _micro_batches(self, config: RunConfig) -> Iterator[Changes]:
        # The memory of a machine that all share is unknown, so there is just the configured micro-batch.
        return iter([{}]) if self.costs is None or self.costs.device.shared_by else micro_batches(config)

    def _fit_batches(self, candidate: Candidate) -> Iterator[Candidate | ConfigError]:
        """Yield the candidate's variants with batches worth trying, and the error of each that does not fit."""
        device = self.device
        # A machine that all share does least with few full batches.
        sizes: Iterable[Changes] = [{}] if device and device.shared_by else batch_sizes(candidate.config)
        for sized in sizes:
            base, best_s = with_changes(candidate.config, sized), math.inf
            # The configured one, and larger ones while they lower the bound; else the largest smaller one that fits.
            for cut in self._micro_batches(base):
                config = with_changes(base, cut)
                if best_s < math.inf and _micro_batch(config) < _micro_batch(base):
                    break
                bound_s = self.bound_s(config)
                if bound_s > _WORTH * best_s:
                    continue
                try:
                    check_launchable(config, device, self.num_devices)
                    headroom_gb = self.headroom_gb(config)
                except ConfigError as error:
                    yield error
                else:
                    best_s = bound_s
                    settings = {**candidate.settings, **sized, **cut}
                    yield Candidate(config, settings, bound_s, headroom_gb=headroom_gb)

    def _role_splits(self, config: RunConfig) -> Iterator[dict[str, Any]]:
        """Yield values of `roles` and `colocated`; to minimize the cost, also for fewer devices."""
        fixed = with_changes(config, {"roles": {r: n for r, n in config.roles.items() if r not in SIZED}})
        share = self._scoring_share(config) if self._bounds.scores else None
        only_turns = config.schedule.mode.interrupts_for_turns
        if not (self.colocated or only_turns):
            apart = self._totals(devices_of(with_changes(fixed, {"colocated": ()})))
            yield from ({"roles": roles, "colocated": ()} for roles in splits(config, apart, share))
        # Ranks that share a machine share its memory, too, so they gain nothing from turns.
        gains = only_turns or self.device is None or not self.device.shared_by
        if self.colocated or (self.colocated is None and gains):
            joint, totals = config.colocated or COLOCATED, self._totals(devices_of(fixed))
            yield from ({"roles": roles, "colocated": joint} for roles in colocated_splits(config, totals, share))

    def _totals(self, fixed: int) -> list[int]:
        """Return the numbers of devices to try for the sized roles together; `fixed`: those of the others."""
        room = self.num_devices - fixed
        return [room] if self.objective == "time" else [room >> k for k in range(10) if room >> k >= 2]

    def _scoring_share(self, config: RunConfig) -> float:
        """Return the reference's share of the devices that generate and score which takes them the least time."""
        roles = {role: config.ranks_per_copy(role) for role in ("rollout", "actor", "ref")}
        sized = with_changes(config, {"roles": roles})
        work = self._bounds.work_s(sized, self.times(sized))
        scoring, generating = work["ref"] * roles["ref"], work["rollout"] * roles["rollout"]
        if config.schedule.mode is ScheduleMode.SYNC:  # a / n + b / (1 - n) is least at shares like square roots
            scoring, generating = math.sqrt(scoring), math.sqrt(generating)
        return scoring / max(1e-12, scoring + generating)

    @cached_property
    def _bounds(self) -> Bounds:
        steps, skip = _window(self.config)
        longest = longest_tokens(self.config.schedule, self.tokens, steps=steps, skip=skip)
        scores = any(task.name == "ref_log_probs" for task in graph_of(self.config))
        return Bounds(self.workload, longest, scores)

    def headroom_gb(self, config: RunConfig) -> float | None:
        """Return the device memory left on the fullest rank (GB); None: unknown.

        Raises:
            ConfigError: a role does not fit; the message shows the sum.
        """
        if self.costs is None or self.costs.device.shared_by:
            return None
        limit_gb = self.costs.device.memory_gb
        # The catalogue has accelerators of vendors whose processes share device memory; one process needs no copy.
        roles = device_memory(config, self.costs.model, limit_gb, has_ipc=not self.costs.hands_over)
        return limit_gb - max((sum(parts.values()) / 1e9 for parts in roles.values()), default=0.0)


def _next(candidates: Sequence[Candidate], simulated: Sequence[Candidate], *, only_new: bool) -> int | None:
    """Return the index of the candidate to simulate next. `only_new`: only kinds not simulated yet."""
    kinds, last = {each.kind for each in simulated}, simulated[-_OTHERS:]
    # A bound says little about the longest responses, which larger instances shorten; and that of roles that overlap is
    # farther from what they reach than that of colocated ones. So the first candidate of each kind comes up, whatever
    # its bound.
    for place, each in enumerate(candidates):
        if each.kind not in kinds:
            return place
    if only_new:
        return None
    # Candidates similar to one of the last come after all others.
    others = (place for place, each in enumerate(candidates) if not any(map(each.is_like, last)))
    return next(others, 0 if candidates else None)


def _micro_batch(config: RunConfig) -> tuple[int, int]:
    """Return (token budget, rows) of the actor's micro-batches; the budget comes first where it counts."""
    return config.actor.max_tokens_per_micro_batch, config.actor.micro_batch_size


def _window(config: RunConfig) -> tuple[int, int]:
    """Return (simulated steps, steps of those that do not count)."""
    # The first steps end on rows admitted all at once at the start. Those that count make whole turns of the steps that
    # are generated together.
    rows, together = config.schedule.step_rows, config.schedule.staleness.steps_in_flight
    counted = max(_COUNTED[0], min(_COUNTED[1], _ROWS // rows - together))
    return together + max(1, counted // together) * together, together
