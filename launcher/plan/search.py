"""The search: role sizes, layouts and micro-batches under a number of devices. Bounds prune, simulated runs rank.

    layouts x sizes of actor, reference and critic --bound with the largest micro-batch--> in order of the bound
        --micro-batches, memory--> what fits, each at its own bound
        --simulated--> ranked; ends once no bound is below the best simulated step

A bound is what a step takes at least: the work of the busiest role, spread evenly, with nothing else in the way; or its
longest response.
"""

import itertools
import math
from bisect import insort_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

from asyncflow.errors import ConfigError
from launcher.checks.batch_sizes import check_batch_sizes
from launcher.checks.device_memory import device_memory
from launcher.plan.bounds import Bounds, longest_tokens
from launcher.plan.choices import Choice, layouts, micro_batches, schedules
from launcher.plan.cost_model import CostModel, Workload, at_full_speed
from launcher.plan.devices import Device
from launcher.plan.profile import Profile
from launcher.plan.scenario import Latency, Scenario, Times, Turns, rollout_ranks, workers_of
from launcher.plan.simulation import Simulated, simulate
from workers.config import RunConfig
from workers.engines.device_memory import ModelSizes
from workers.tasks.dataflow import place_tasks, roles_on_device
from workers.tasks.graph import graph_of

Objective = Literal["time", "cost"]
_SIMULATED = ((512, 8), (4096, 3), (math.inf, 2))
"""(rows of a step, plans): so many are simulated at most where a step has at most so many rows."""
_ROWS = 4000
"""Rows of a simulated run, about."""
_WORTH = 0.98
"""Another micro-batch is tried where it lowers the bound to this share of it."""
_OTHERS = 2
"""So many others are tried before what is like one that was."""
_STEPS, _SKIP = (3, 12), 1
"""Of a simulated run: at least and at most; the first ones, which do not count."""


@dataclass(frozen=True)
class Plan:
    """One way to use the devices, simulated.

    Attributes:
        config: with its roles and layouts.
        changes: of the configuration, beside the roles, as `--set` takes them.
        bound_s: a step takes at least so long.
        step_s, tokens_per_s: of the simulated run; tokens of responses.
        idle: role -> share of the time in which its workers do not compute.
        headroom_gb: device memory that the fullest rank leaves; None: not known.
        simulated: the run.
    """

    config: RunConfig
    changes: tuple[str, ...]
    bound_s: float
    step_s: float
    tokens_per_s: float
    idle: Mapping[str, float]
    headroom_gb: float | None
    simulated: Simulated

    @property
    def num_devices(self) -> int:
        """Devices that it takes."""
        taking = roles_on_device(reward_model=self.config.reward.model is not None)
        return sum(number for role, number in self.config.roles.items() if role in taking)

    @property
    def tokens_per_s_per_device(self) -> float:
        """Tokens of responses per second and device."""
        return self.tokens_per_s / self.num_devices

    @property
    def roles_text(self) -> str:
        """As `--roles` takes them."""
        return ",".join(f"{role}:{number}" for role, number in self.config.roles.items())


@dataclass(frozen=True)
class _Candidate:
    """`config` has its roles and layouts, `layout` says these; `micro_batch` is what is changed of the actor's, None
    while that is open and the bound is the largest one's."""

    config: RunConfig
    layout: tuple[str, ...]
    bound_s: float
    micro_batch: tuple[str, ...] | None = None
    headroom_gb: float | None = None

    def is_like(self, other: "_Candidate") -> bool:
        """Whether layouts and the actor's size are the same."""
        return self.layout == other.layout and self.config.roles["actor"] == other.config.roles["actor"]


@dataclass(frozen=True)
class Planner:
    """What is planned.

    Attributes:
        config: of the run; rollout, actor, reference and critic are planned, other roles stay as they are.
        num_devices: at most so many are used.
        device: of the catalogue; None: `sim` engines, whose section says how long everything takes.
        parameters: of the model; without meaning for `sim`.
        model_config: config.json.
        prompt_tokens: mean of the prompts.
        tokens: row -> length of its response.
        objective: the fastest step, or the most tokens per second and device.
        profile: measured times of blocks, which override estimates.
        turns: of rollouts of functions and agents.
    """

    config: RunConfig
    num_devices: int
    device: Device | None
    parameters: int
    model_config: Mapping[str, Any]
    prompt_tokens: int
    tokens: Callable[[int], int]
    objective: Objective = "time"
    profile: Profile | None = None
    turns: Turns | None = None

    def plans(self) -> list[Plan]:
        """Return the best plans, the best first.

        Raises:
            ConfigError: nothing fits; with what the first one lacks.
        """
        found: list[Plan] = []
        refused: ConfigError | None = None
        candidates = self._candidates()
        most = next(number for rows, number in _SIMULATED if self.config.schedule.step_rows <= rows)
        while candidates and len(found) < most:
            candidate = candidates.pop(0)
            best_s = min((plan.step_s for plan in found), default=math.inf)
            if self.objective == "time" and candidate.bound_s >= best_s:
                continue
            if candidate.micro_batch is None:
                try:
                    fitting = self._fitting(candidate)
                except ConfigError as error:
                    refused = refused or error
                    continue
                for each in fitting:
                    insort_left(candidates, each, key=self._order)
                continue
            found.append(self._plan(candidate))
            # What differs in reference and critic alone comes behind other layouts and sizes of the actor.
            like = [each for each in candidates if each.is_like(candidate)]
            candidates = [each for each in candidates if not each.is_like(candidate)]
            candidates[_OTHERS:_OTHERS] = like
        if not found:
            problem = f"--devices {self.num_devices}: no plan fits"
            raise ConfigError(f"{problem}; {refused}" if refused else f"{problem}: every role needs at least one")
        cheap = self.objective == "cost"
        return sorted(found, key=lambda plan: -plan.tokens_per_s_per_device if cheap else plan.step_s)

    def one_more(self, plan: Plan) -> dict[str, float]:
        """Return, per role, the step time with one more worker of it (s): an instance, a copy, a replica; what the
        batch does not divide over is left out."""
        found = {}
        for role in plan.idle:
            roles = dict(plan.config.roles)
            workers = workers_of(plan.config)[role]
            size = roles[role] // workers
            for more in range(1, workers + 1):
                changed = plan.config.model_copy(update={"roles": roles | {role: roles[role] + more * size}})
                try:
                    check_batch_sizes(changed)
                except ConfigError:
                    continue
                found[f"{role}:{changed.roles[role]}"] = self._simulated(changed).step_s(_SKIP)
                break
        return found

    def step_s(self) -> float:
        """Return the step time of the run as it is configured (s)."""
        return self._simulated(self.config).step_s(_SKIP)

    def scenario(self, config: RunConfig) -> Scenario:
        """Return the run to simulate."""
        times, latency, slots = self._times(config)
        return Scenario.of(
            config, times, tokens=self.tokens, latency=latency, slots=slots, at_full_speed=self._at_full_speed,
            turns=self.turns,
        )  # fmt: skip

    def other_schedules(self) -> list[Plan]:
        """Return the best plan of each other schedule that can be planned, the strictest first."""
        found = []
        for config, told in schedules(self.config):
            try:
                best = replace(self, config=config).plans()[0]
            except ConfigError:  # e.g. versions of the policy that the actor keeps do not fit
                continue
            found.append(replace(best, changes=(*told, *best.changes)))
        return found

    def _plan(self, candidate: _Candidate) -> Plan:
        ran = self._simulated(candidate.config)
        return Plan(
            candidate.config, candidate.layout + (candidate.micro_batch or ()), candidate.bound_s, ran.step_s(_SKIP),
            ran.tokens_per_s(_SKIP), ran.idle(_SKIP), candidate.headroom_gb, ran,
        )  # fmt: skip

    def _simulated(self, config: RunConfig) -> Simulated:
        schedule = config.schedule
        # A run goes on: what it generates ahead at the end is what it had ahead after the first steps.
        further = schedule.staleness_bound + schedule.lateness
        return simulate(self.scenario(config), steps=_steps(config), further=further)

    def _candidates(self) -> list[_Candidate]:
        """Return what may be simulated, the lowest bound first."""
        found = []
        for config, changes in self.layouts():
            largest = max(self._micro_batches(config), key=_size)[0]
            known: dict[tuple[int, bool, int], tuple[Times, Latency, int]] = {}  # bounds need no latencies
            for roles in self._splits(config):
                same = (roles["actor"], "ref" in roles, roles.get("critic", 0))
                sized = largest.model_copy(update={"roles": roles})
                times, _, slots = known.get(same) or known.setdefault(same, self._times(sized))
                bound_s = self._bounds.step_s(sized, times, slots)
                found.append(_Candidate(config.model_copy(update={"roles": roles}), changes, bound_s))
        return sorted(found, key=self._order)

    def _order(self, candidate: _Candidate) -> float:
        if self.objective == "time":
            return candidate.bound_s
        house = Latency()
        house_s = house.publish_s + house.admit_s + house.transfer_s + house.swap_s  # for which all devices wait
        return (candidate.bound_s + house_s) * sum(candidate.config.roles.values())

    def layouts(self) -> Iterator[Choice]:
        """Yield the configuration with every layout that divides the model; see `launcher.plan.choices`."""
        if self.device is None or self._sizes is None:
            return iter([(self.config, ())])
        return layouts(self.config, self._sizes, self.device.devices_per_node)

    def _micro_batches(self, config: RunConfig) -> Iterator[Choice]:
        """Yield micro-batches of the actor to try; on a machine that all share, whose memory is not known, one."""
        if self._sizes is None or self._at_full_speed:
            return iter([(config, ())])
        return micro_batches(config)

    def _fitting(self, candidate: _Candidate) -> list[_Candidate]:
        """Return it with the configured micro-batch and larger ones, as long as they lower the bound; or with the
        largest smaller one that fits.

        Raises:
            ConfigError: nothing fits; what the configured micro-batch lacks.
        """
        found: list[_Candidate] = []
        refused: ConfigError | None = None
        own = _size((candidate.config, ()))
        for choice in self._micro_batches(candidate.config):
            if found and _size(choice) < own:
                break
            config, told = choice
            bound_s = self.bound_s(config)
            if found and bound_s > _WORTH * found[-1].bound_s:
                continue
            try:
                check_batch_sizes(config)
                place_tasks(graph_of(config), config.roles)
                found.append(_Candidate(config, candidate.layout, bound_s, told, self.headroom_gb(config)))
            except ConfigError as error:
                refused = refused or error
        if not found:
            assert refused is not None, "there is the configured one"
            raise refused
        return found

    def _splits(self, config: RunConfig) -> Iterator[dict[str, int]]:
        """Yield roles: all replicas of the actor over which the batch divides, and the rest shared by work."""
        replica = config.actor.megatron.ranks_per_copy if config.actor.engine == "megatron" else 1
        instance = rollout_ranks(config)
        taking = roles_on_device(reward_model=config.reward.model is not None)
        sized = ("rollout", "actor", "ref", "critic")
        fixed = {role: number for role, number in config.roles.items() if role not in sized}
        room = self.num_devices - sum(number for role, number in fixed.items() if role in taking)
        totals = [room] if self.objective == "time" else [room >> k for k in range(10) if room >> k >= 2]
        scores = self._bounds.scores
        share = self._scoring_share(config, replica) if scores else 0.0
        groups = config.schedule.rollout_batch_size
        for total, replicas in itertools.product(totals, (n for n in range(1, groups + 1) if groups % n == 0)):
            actor = replicas * replica
            for critic in _critics(config, actor):
                for ref in self._copies(config, total - actor - critic, share) if scores else (0,):
                    rollout = (total - actor - critic - ref) // instance * instance
                    if rollout > 0:
                        own = {"rollout": rollout, "actor": actor, "ref": ref, "critic": critic}
                        yield {role: number for role, number in (own | fixed).items() if number or role in fixed}

    def _scoring_share(self, config: RunConfig, replica: int) -> float:
        """Return the reference's share of what generating and scoring take."""
        instance, copy = rollout_ranks(config), config.ranks_per_copy("ref")
        sized = config.model_copy(update={"roles": {"rollout": instance, "actor": replica, "ref": copy}})
        times, _, slots = self._times(sized)
        work = self._bounds.work_s(sized, times, slots)
        scoring = work["ref"] * copy
        return scoring / max(1e-12, scoring + work["rollout"] * instance)

    def _copies(self, config: RunConfig, room: int, share: float) -> Sequence[int]:
        """Return numbers of the reference's ranks: none (the actor hosts one that is not sharded), and those around
        their share of the work."""
        copy = config.ranks_per_copy("ref")
        none = {0} if copy == 1 or config.actor.tri_model else set()
        if room < 2:
            return sorted(none)
        best = room * share / copy
        near = {math.floor(best), math.ceil(best), math.ceil(best) + 1}
        return sorted(none | {number * copy for number in near if 1 <= number * copy < room})

    def bound_s(self, config: RunConfig) -> float:
        """Return what a step takes at least (s)."""
        times, _, slots = self._times(config)
        return self._bounds.step_s(config, times, slots)

    @cached_property
    def _bounds(self) -> Bounds:
        longest = longest_tokens(self.config.schedule, self.tokens, steps=_steps(self.config), skip=_SKIP)
        scores = any(task.name == "ref_log_probs" for task in graph_of(self.config))
        return Bounds(self.workload, longest, scores, self._at_full_speed)

    @cached_property
    def _at_full_speed(self) -> float:
        """`Scenario.at_full_speed`, whatever the split."""
        if self.device is None or self._sizes is None:
            return 0.0
        return at_full_speed(self.config, self.device, self.profile)

    def _times(self, config: RunConfig) -> tuple[Times, Latency, int]:
        """Return times, latencies, and how many responses fit an instance."""
        if self.device is None or self._sizes is None:
            return Times.of_sim(config, prompt_tokens=self.prompt_tokens), Latency(), config.rollout.batch_size
        model = CostModel(config, self._sizes, self.device, self.workload, self.profile)
        times, slots = model.times(), model.slots()
        # A prefill holds up all that an instance generates: over its life a response waits for as many as run.
        slowdown = times.decode_s(slots) / times.decode_s(1)
        held = slots / slowdown
        return replace(times, prefill_s=times.prefill_s * held, later_s=times.later_s * held), model.latency(), slots

    def headroom_gb(self, config: RunConfig) -> float | None:
        """Return what the fullest rank leaves of its device.

        Raises:
            ConfigError: a role does not fit; with the sum that shows it.
        """
        if self.device is None or self._sizes is None:
            return None
        launcher = config.launcher.model_copy(update={"device_memory_gb": self.device.memory_gb})
        if self.device.shared_by:
            return None
        roles = device_memory(config.model_copy(update={"launcher": launcher}), self.parameters)
        return self.device.memory_gb - max((sum(parts.values()) / 1e9 for parts in roles.values()), default=0.0)

    @cached_property
    def workload(self) -> Workload:
        """What the first steps' responses are like."""
        drawn = [self.tokens(row) for row in range(min(4096, 8 * self.config.schedule.step_rows))]
        mean, square = sum(drawn) / len(drawn), sum(number * number for number in drawn) / len(drawn)
        return Workload(self.prompt_tokens, mean, square, self.turns or Turns())

    @cached_property
    def _sizes(self) -> ModelSizes | None:
        return None if self.device is None else ModelSizes.of(self.model_config, self.parameters)


def _critics(config: RunConfig, actor: int) -> Sequence[int]:
    """Return numbers of the critic's ranks: none (an actor of FSDP2 hosts it), and those around the actor's, whose work
    is alike, over which the batch divides."""
    if not config.algorithm.has_critic:
        return (0,)
    groups = config.schedule.rollout_batch_size
    divisors = [number for number in range(1, groups + 1) if groups % number == 0]
    own = [number for number in divisors if actor <= 2 * number <= 4 * actor]
    own = own or [max(number for number in divisors if number <= actor)]
    hosts, alone = config.actor.engine == "fsdp", not config.schedule.lateness
    return [*([0] if hosts else []), *(own if alone else [])]


def _size(choice: Choice) -> tuple[int, int]:
    """Return how large the actor's micro-batches are: tokens where those count, rows."""
    actor = choice[0].actor
    return actor.max_tokens_per_micro_batch, actor.micro_batch_size


def _steps(config: RunConfig) -> int:
    least, most = _STEPS
    return max(least, min(most, _ROWS // config.schedule.step_rows))
