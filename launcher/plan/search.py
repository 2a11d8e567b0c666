"""The search: role sizes and layouts under a number of devices. Bounds prune, simulated runs rank.

    layouts x sizes of the actor x copies of the reference --bound--> in order of the bound
        --memory--> fits --simulated--> ranked; ends once no bound is below the best simulated step

A bound is what a step takes at least: the work of the busiest role, spread evenly, with nothing else in the way.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

from asyncflow.errors import ConfigError
from launcher.checks.batch_sizes import check_batch_sizes
from launcher.checks.device_memory import device_memory
from launcher.plan.cost_model import CostModel, Workload, at_full_speed
from launcher.plan.devices import Device
from launcher.plan.profile import Profile
from launcher.plan.scenario import Latency, Scenario, Times, Turns, rollout_ranks, workers_of
from launcher.plan.simulation import Simulated, simulate
from tq.config import ScheduleMode
from workers.config import RunConfig
from workers.engines.device_memory import ModelSizes
from workers.tasks.dataflow import roles_on_device
from workers.tasks.graph import graph_of

Objective = Literal["time", "cost"]
_DIVISIONS = (1, 2, 4, 8)
_SIMULATED = ((512, 8), (4096, 4), (math.inf, 3))
"""(rows of a step, plans): so many are simulated at most where a step has at most so many rows."""
_ROWS = 4000
"""Rows of a simulated run, about."""
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
    config: RunConfig
    changes: tuple[str, ...]
    bound_s: float

    def is_like(self, other: "_Candidate") -> bool:
        """Whether layouts and the actor's size are the same."""
        return self.changes == other.changes and self.config.roles["actor"] == other.config.roles["actor"]


@dataclass(frozen=True)
class Planner:
    """What is planned.

    Attributes:
        config: of the run; its roles say which there are, not how large they are.
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
            try:
                check_batch_sizes(candidate.config)
                headroom = self.headroom_gb(candidate.config)
            except ConfigError as error:
                refused = refused or error
                continue
            found.append(self._plan(candidate, headroom))
            # What differs in the copies of the reference alone comes behind other layouts and sizes of the actor.
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

    def _plan(self, candidate: _Candidate, headroom_gb: float | None) -> Plan:
        ran = self._simulated(candidate.config)
        return Plan(
            candidate.config, candidate.changes, candidate.bound_s, ran.step_s(_SKIP), ran.tokens_per_s(_SKIP),
            ran.idle(_SKIP), headroom_gb, ran,
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
            for roles in self._splits(config):
                sized = config.model_copy(update={"roles": roles})
                found.append(_Candidate(sized, changes, self.bound_s(sized)))
        if self.objective == "cost":
            house = Latency()
            house_s = house.publish_s + house.admit_s + house.transfer_s + house.swap_s  # for which all devices wait
            return sorted(found, key=lambda each: (each.bound_s + house_s) * sum(each.config.roles.values()))
        return sorted(found, key=lambda each: each.bound_s)

    def layouts(self) -> Iterator[tuple[RunConfig, tuple[str, ...]]]:
        """Yield the configuration with every tensor and pipeline parallelism that divides the model."""
        config, sizes = self.config, self._sizes
        if sizes is None:
            yield config, ()
            return
        divides = [n for n in _DIVISIONS if sizes.num_heads % n == 0 and sizes.ffn_size % n == 0]
        inside = [n for n in divides if self.device is None or n <= self.device.devices_per_node]
        generating = inside if config.rollout.engine == "vllm" else [0]
        training: Sequence[tuple[int, int]] = [(0, 0)]
        if config.actor.engine == "megatron":
            stages = [n for n in _DIVISIONS if sizes.num_layers % n == 0]
            whole = [n for n in inside if sizes.num_kv_heads % n == 0]
            training = list(itertools.product(whole, stages))
        for size, (tensor, pipeline) in itertools.product(generating, training):
            changes: dict[str, int] = {"vllm.tensor_parallel_size": size} if size else {}
            if tensor:
                changes |= {"actor.megatron.tensor_parallel": tensor, "actor.megatron.pipeline_parallel": pipeline}
            vllm = config.vllm.model_copy(update={"tensor_parallel_size": size or 1})
            megatron = config.actor.megatron.model_copy(
                update={"tensor_parallel": tensor, "pipeline_parallel": pipeline} if tensor else {}
            )
            actor = config.actor.model_copy(update={"megatron": megatron})
            told = tuple(f"{name}={value}" for name, value in changes.items())
            yield config.model_copy(update={"vllm": vllm, "actor": actor}), told

    def _splits(self, config: RunConfig) -> Iterator[dict[str, int]]:
        """Yield roles: all replicas of the actor over which the batch divides, and the rest shared by work."""
        replica = config.actor.megatron.ranks_per_copy if config.actor.engine == "megatron" else 1
        instance = rollout_ranks(config)
        taking = roles_on_device(reward_model=config.reward.model is not None)
        fixed = {role: number for role, number in config.roles.items() if role not in ("rollout", "actor", "ref")}
        room = self.num_devices - sum(number for role, number in fixed.items() if role in taking)
        totals = [room] if self.objective == "time" else [room >> k for k in range(10) if room >> k >= 2]
        scores = any(task.name == "ref_log_probs" for task in graph_of(config))
        groups = config.schedule.rollout_batch_size
        for total, replicas in itertools.product(totals, (n for n in range(1, groups + 1) if groups % n == 0)):
            actor = replicas * replica
            for ref in self._copies(config, replica, total - actor) if scores else (0,):
                rollout = (total - actor - ref) // instance * instance
                if rollout > 0:
                    own = {"rollout": rollout, "actor": actor} | ({"ref": ref} if ref else {})
                    yield {role: (own | fixed)[role] for role in dict.fromkeys((*own, *fixed))}

    def _copies(self, config: RunConfig, replica: int, room: int) -> Sequence[int]:
        """Return numbers of the reference's ranks: none (the actor hosts one that is not sharded), and those around
        their share of the work."""
        copy = config.ranks_per_copy("ref")
        none = {0} if copy == 1 or config.actor.tri_model else set()
        if room < 2:
            return sorted(none)
        instance = rollout_ranks(config)
        work = self._work_s(
            config.model_copy(update={"roles": {"rollout": instance, "actor": replica, "ref": copy}}),
        )
        scoring = work["ref"] * copy
        best = room * scoring / max(1e-12, scoring + work["rollout"] * instance) / copy
        near = {math.floor(best), math.ceil(best), math.ceil(best) + 1}
        return sorted(none | {number * copy for number in near if 1 <= number * copy < room})

    def bound_s(self, config: RunConfig) -> float:
        """Return what a step takes at least (s)."""
        work = self._work_s(config)
        least_s = sum(work.values()) if config.schedule.mode is ScheduleMode.SYNC else max(work.values())
        if not self._at_full_speed:
            return least_s
        workers = workers_of(config)
        return max(least_s, sum(seconds * workers[role] for role, seconds in work.items()) / self._at_full_speed)

    def _work_s(self, config: RunConfig) -> dict[str, float]:
        """Return how long each role works on a step at least, all its workers alike (s)."""
        times, _, slots = self._times(config)
        workers, schedule, mean = workers_of(config), config.schedule, self.workload
        rows = schedule.step_rows
        in_flight = rows * (1 + schedule.staleness_bound)
        # On devices of their own even shares are best; a machine that all share does least with few full batches.
        together = min(slots, in_flight if self._at_full_speed else -(-in_flight // workers["rollout"]))
        fastest = min(times.decode_s(number) / number for number in {1, together})
        work = {"rollout": rows * mean.mean_tokens * fastest / workers["rollout"]}
        scored = rows * (
            times.tasks["ref_log_probs"].token_s * (mean.mean_tokens + times.prompt_tokens)
            + times.tasks["ref_log_probs"].squared_s * mean.mean_square
        )
        hosts = any(task.name == "ref_log_probs" for task in self._graph) and "ref" not in config.roles
        shared = schedule.n_samples_per_prompt if config.actor.shared_prompt else 1
        trained = rows * (
            times.train.token_s * (mean.mean_tokens + times.prompt_tokens / shared)
            + times.train.squared_s * mean.mean_square
        )
        passes = config.actor.ppo_epochs
        actor = (trained * passes + (scored if hosts else 0.0)) / workers["actor"]
        work["actor"] = actor + config.actor.num_updates * times.update_s
        if "ref" in config.roles:
            work["ref"] = scored / workers["ref"]
        return work

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
    def _graph(self) -> Sequence[Any]:
        return graph_of(self.config)

    @cached_property
    def _sizes(self) -> ModelSizes | None:
        return None if self.device is None else ModelSizes.of(self.model_config, self.parameters)


def _steps(config: RunConfig) -> int:
    least, most = _STEPS
    return max(least, min(most, _ROWS // config.schedule.step_rows))
