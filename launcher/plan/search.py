"""The search: role sizes, layouts and batches under a number of devices. Bounds prune, simulated runs rank.

    layouts x sizes of actor, reference and critic --bound with the largest micro-batch--> in order of the bound
        --responses of an instance, micro-batches, memory, what a start refuses--> what fits, each at its own bound
        --simulated--> ranked; ends once no bound is below the best simulated step

A bound is what a step takes at least: the work of the busiest role, spread evenly, with nothing else in the way; or its
longest response.
"""

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
from launcher.plan.choices import Choice, batch_sizes, layouts, micro_batches, schedules
from launcher.plan.cost_model import CostModel, Workload, at_full_speed
from launcher.plan.devices import Device
from launcher.plan.launchable import check_launchable
from launcher.plan.plan import Plan, devices_of
from launcher.plan.profile import Profile
from launcher.plan.scenario import Latency, Scenario, Times, Turns, prompt_tokens_of, rollout_ranks, workers_of
from launcher.plan.simulation import Simulated, simulate
from launcher.plan.splits import SIZED, splits
from workers.engines.device_memory import ModelSizes
from workers.settings.run import RunConfig
from workers.settings.schedule import ScheduleMode
from workers.tasks.graph import graph_of

Objective = Literal["time", "cost"]
_SIMULATED = ((512, 8), (4096, 3), (math.inf, 2))
"""(rows of a step, plans): so many are simulated at most where a step has at most so many rows."""
_ROWS = 8000
"""Rows of a simulated run, about."""
_WORTH = 0.98
"""Another micro-batch is tried where it lowers the bound to this share of it."""
_OTHERS = 2
"""So many others are tried before what differs from one that was in reference and critic alone."""
_COUNTED = (2, 10)
"""Steps of a simulated run that count, at least and at most."""


@dataclass(frozen=True)
class _Candidate:
    """What may be simulated.

    Attributes:
        config: with roles and layout applied.
        layout: the same, as `--set` takes it.
        bound_s: a step takes at least so long.
        batches: changes of batch sizes; None: not chosen yet, and the bound is that of the largest ones.
        headroom_gb: see `Plan`.
    """

    config: RunConfig
    layout: tuple[str, ...]
    bound_s: float
    batches: tuple[str, ...] | None = None
    headroom_gb: float | None = None

    @property
    def instance(self) -> int:
        """Ranks of an instance of the rollout."""
        return rollout_ranks(self.config)

    def is_like(self, other: "_Candidate") -> bool:
        """Whether layouts, but for the reference's, and the actor's size are the same."""
        mine, others = ([each for each in one.layout if not each.startswith("ref.")] for one in (self, other))
        return mine == others and self.config.roles["actor"] == other.config.roles["actor"]


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
        reward_model: its sizes, if there is one.
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
    reward_model: ModelSizes | None = None

    def plans(self) -> list[Plan]:
        """Return the best plans, the best first.

        Raises:
            ConfigError: nothing fits; with what the first one lacks.
        """
        found: list[Plan] = []
        refused: ConfigError | None = None
        candidates, simulated = self._candidates(), list[_Candidate]()
        left = next(number for rows, number in _SIMULATED if self.config.schedule.step_rows <= rows)
        while (place := _next(candidates, simulated, only_new=not left)) is not None:
            candidate = candidates.pop(place)
            if candidate.batches is None:
                try:
                    fitting = self._fitting(candidate)
                except ConfigError as error:
                    refused = refused or error
                    continue
                for each in fitting:
                    insort_left(candidates, each, key=self._order)
                continue
            found.append(self._plan(candidate))
            left -= not simulated or candidate.instance in {each.instance for each in simulated}
            simulated.append(candidate)
            if self.objective == "time":
                best_s = min(plan.step_s for plan in found)
                candidates = [each for each in candidates if each.bound_s < best_s]
        if not found:
            problem = f"--devices {self.num_devices}: no plan fits"
            raise ConfigError(f"{problem}; {refused}" if refused else f"{problem}: every role needs at least one")
        cheap = self.objective == "cost"
        return sorted(found, key=lambda plan: -plan.tokens_per_s_per_device if cheap else plan.step_s)

    def one_more(self, plan: Plan) -> dict[str, float]:
        """Return, per role, the step time with one more worker of it (s): an instance, a copy, a replica; what the
        batch does not divide over is left out."""
        found = {}
        roles, at_work = plan.config.roles, workers_of(plan.config)
        hosted = ["ref"] if self._bounds.scores and "ref" not in roles else []
        for role in [*plan.idle, *hosted]:
            workers = at_work.get(role, 1)
            size = roles[role] // workers if role in roles else plan.config.ranks_per_copy(role)
            for more in range(1, workers + 1):
                changed = plan.config.model_copy(update={"roles": roles | {role: roles.get(role, 0) + more * size}})
                try:
                    check_batch_sizes(changed)
                except ConfigError:
                    continue
                found[f"{role}:{changed.roles[role]}"] = self._step_s(changed)
                break
        return found

    def step_s(self) -> float:
        """Return the step time of the run as it is configured (s)."""
        return self._step_s(self.config)

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
        ran, (_, skip) = self._simulated(candidate.config), _window(candidate.config)
        # A few steps may live on what was generated ahead; in the long run none is shorter than its bound.
        step_s = max(candidate.bound_s, ran.step_s(skip))
        return Plan(
            candidate.config, candidate.layout + (candidate.batches or ()), candidate.bound_s, step_s,
            ran.tokens_per_s(skip) * ran.step_s(skip) / step_s, ran.idle(skip), candidate.headroom_gb, ran,
        )  # fmt: skip

    def _step_s(self, config: RunConfig) -> float:
        return max(self.bound_s(config), self._simulated(config).step_s(_window(config)[1]))

    def _simulated(self, config: RunConfig) -> Simulated:
        schedule = config.schedule
        # A run goes on: what it generates ahead at the end is what it had ahead after the first steps.
        further = schedule.staleness_bound + schedule.lateness
        return simulate(self.scenario(config), steps=_window(config)[0], further=further)

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
        return (candidate.bound_s + house_s) * devices_of(candidate.config)

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

    def _batch_sizes(self, config: RunConfig) -> Iterator[Choice]:
        """Yield responses of an instance to try; a machine that all share does least with few full batches."""
        return iter([(config, ())]) if self._at_full_speed else batch_sizes(config)

    def _fitting(self, candidate: _Candidate) -> list[_Candidate]:
        """Return it with batches that fit.

        Raises:
            ConfigError: nothing fits; what the configured micro-batch lacks.
        """
        found: list[_Candidate] = []
        refused: ConfigError | None = None
        for config, told in self._batch_sizes(candidate.config):
            for each in self._with_micro_batches(replace(candidate, config=config, batches=told)):
                if isinstance(each, ConfigError):
                    refused = refused or each
                else:
                    found.append(each)
        if not found:
            assert refused is not None, "there is the configured one"
            raise refused
        return found

    def _with_micro_batches(self, candidate: _Candidate) -> Iterator[_Candidate | ConfigError]:
        """Yield it with the configured micro-batch and larger ones, as long as they lower the bound, or with the
        largest smaller one that fits; and the error of each that does not."""
        last: _Candidate | None = None
        own = _size((candidate.config, ()))
        for choice in self._micro_batches(candidate.config):
            if last is not None and _size(choice) < own:
                return
            config, told = choice
            bound_s = self.bound_s(config)
            if last is not None and bound_s > _WORTH * last.bound_s:
                continue
            try:
                check_launchable(config, self.device, self.num_devices)
                batches = (candidate.batches or ()) + told
                last = _Candidate(config, candidate.layout, bound_s, batches, self.headroom_gb(config))
            except ConfigError as error:
                yield error
            else:
                yield last

    def _splits(self, config: RunConfig) -> Iterator[dict[str, int]]:
        """Yield roles; for the cost, of fewer devices, too."""
        fixed = devices_of(config) - sum(config.roles.get(role, 0) for role in SIZED)
        room = self.num_devices - fixed
        totals = [room] if self.objective == "time" else [room >> k for k in range(10) if room >> k >= 2]
        return splits(config, totals, self._scoring_share(config) if self._bounds.scores else None)

    def _scoring_share(self, config: RunConfig) -> float:
        """Return the reference's share of the devices that generate and score, with which both take least."""
        instance, copy = rollout_ranks(config), config.ranks_per_copy("ref")
        actor = config.actor.megatron.ranks_per_copy if config.actor.engine == "megatron" else 1
        sized = config.model_copy(update={"roles": {"rollout": instance, "actor": actor, "ref": copy}})
        times, _, slots = self._times(sized)
        work = self._bounds.work_s(sized, times, slots)
        scoring, generating = work["ref"] * copy, work["rollout"] * instance
        if config.schedule.mode is ScheduleMode.SYNC:  # a / n + b / (1 - n) is least where shares are as square roots
            scoring, generating = math.sqrt(scoring), math.sqrt(generating)
        return scoring / max(1e-12, scoring + generating)

    def bound_s(self, config: RunConfig) -> float:
        """Return what a step takes at least (s)."""
        times, _, slots = self._times(config)
        return self._bounds.step_s(config, times, slots)

    @cached_property
    def _bounds(self) -> Bounds:
        steps, skip = _window(self.config)
        longest = longest_tokens(self.config.schedule, self.tokens, steps=steps, skip=skip)
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
            times = Times.of_sim(config, prompt_tokens=prompt_tokens_of(config))
            return times, Latency(), config.rollout.batch_size
        model = CostModel(config, self._sizes, self.device, self.workload, self.profile, self.reward_model)
        return model.times(), model.latency(), model.slots()

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


def _next(candidates: Sequence[_Candidate], simulated: Sequence[_Candidate], *, only_new: bool) -> int | None:
    """Return which candidate comes next, of those in the order of their bounds; None: none.

    A bound says little of the longest responses, which larger instances of the rollout shorten: the first one of each
    size comes, whatever its bound. Then what is like one of the last comes behind all others.

    Args:
        candidates: in order.
        simulated: before.
        only_new: only other sizes of instances may come.
    """
    sizes, last = {each.instance for each in simulated}, simulated[-_OTHERS:]
    for place, each in enumerate(candidates):
        if each.instance not in sizes:
            return place
    if only_new:
        return None
    others = (place for place, each in enumerate(candidates) if not any(map(each.is_like, last)))
    return next(others, 0 if candidates else None)


def _size(choice: Choice) -> tuple[int, int]:
    """Return how large the actor's micro-batches are: tokens where those count, rows."""
    actor = choice[0].actor
    return actor.max_tokens_per_micro_batch, actor.micro_batch_size


def _window(config: RunConfig) -> tuple[int, int]:
    """Return how many steps are simulated, and how many of them do not count: those that end on what was admitted at
    once at the start. As many count as make whole turns of the steps that are generated together."""
    rows, together = config.schedule.step_rows, 1 + config.schedule.staleness_bound
    counted = max(_COUNTED[0], min(_COUNTED[1], _ROWS // rows - together))
    return together + max(1, counted // together) * together, together
