"""Advice from a live run: which role limits it, and which split of the same devices would be faster.

    metrics.jsonl: step time, share of the time in which each role waits --> Advisor --> Advice
        --> status.json (`launcher.run.status_writer`), and a line in the launcher's log when it changes

It is measured, so it holds for any engine and needs no profile. The model: a role's work is its busy time per
step times its ranks, and any number of ranks shares it evenly. The time that even the busiest role waits stays.
"""

import logging
import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from asyncflow.errors import ConfigError
from asyncflow.job import GangSpec
from launcher.plan.plan_report import open_planner
from launcher.plan.search import with_ranks
from launcher.run.rundir import read_plan
from workers.settings.dataflow import OBSERVERS, TRAINERS, roles_on_device
from workers.settings.run import RunConfig
from workers.settings.schedule import ScheduleMode

_FIRST = 2
"""Steps after a start that do not count, since nothing is warm yet."""
_LEAST, _WINDOW = 5, 20
"""Steps that advice is based on, at least and at most."""
_LEAST_S = 10.0
"""The minimum in time: ranks report only twice a second how long they waited (s)."""
_WORTH = 0.05
"""Share of the step time that another split has to save."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RoleLoad:
    """A role's load.

    Attributes:
        busy: share of the time in which its ranks do not wait.
        sizes: possible numbers of ranks, ascending; empty: it takes no device, so it is not part of a split.
    """

    ranks: int
    busy: float
    sizes: Sequence[int] = ()


@dataclass(frozen=True)
class Advice:
    """What the newest steps of a run show.

    Attributes:
        first_step, last_step: the window.
        step_s: mean time of a step (s).
        predicted_s: the planner's step time, for `sim` engines or the plan that `--roles auto:N` chose (s); None: none.
        busy: role -> share of the time in which its ranks do not wait.
        devices: shared by the roles; 0: all compute on this host's cores, so no split makes them faster.
        free: roles that take no device.
        split: role -> ranks, for all roles, with which a step would be shorter; None: no split saves 5 %.
        split_s: step time with that split (s); without one, the measured time.
    """

    first_step: int
    last_step: int
    step_s: float
    predicted_s: float | None
    busy: Mapping[str, float]
    devices: int
    free: Sequence[str]
    split: Mapping[str, int] | None
    split_s: float

    @property
    def limits(self) -> str:
        """The role that waits least."""
        return max(self.busy, key=lambda role: self.busy[role])

    @property
    def text(self) -> str:
        predicted = "" if self.predicted_s is None else f", {self.predicted_s:.3g} s predicted"
        busy = ", ".join(
            f"{role} {100 * self.busy[role]:.0f} %" for role in sorted(self.busy, key=lambda r: -self.busy[r])
        )
        line = f"steps {self.first_step} to {self.last_step}: {self.step_s:.3g} s each{predicted}; busy: {busy}; "
        if self.limits in self.free:
            return f"{line}{self.limits} limits; give it more ranks, they take no device"
        if not self.devices:
            return f"{line}all ranks share the cores of this host, so no split makes them faster"
        if self.split is None:
            return f"{line}no split of the {self.devices} devices is better by {100 * _WORTH:.0f} %"
        roles = ",".join(f"{role}:{number}" for role, number in self.split.items())
        saved = 100 * (1 - self.split_s / self.step_s)
        return f"{line}{self.limits} limits; --roles {roles} would take about {self.split_s:.3g} s (-{saved:.0f} %)"

    def to_summary(self) -> dict[str, Any]:
        return {**asdict(self), "limits": self.limits, "text": self.text}


def better_split(
    loads: Mapping[str, RoleLoad], *, step_s: float, in_turns: bool
) -> tuple[dict[str, int] | None, float]:
    """Return the split of the same devices with the shortest step, and its time (s).

    Args:
        step_s: measured (s).
        in_turns: roles work one after the other, not at the same time.

    Returns:
        Role -> ranks of all roles that take devices; None and the measured time if no split saves 5 %.
    """
    work = {role: load.busy * step_s * load.ranks for role, load in loads.items()}
    now = {role: load.ranks for role, load in loads.items()}

    def takes(ranks: Mapping[str, int]) -> float:
        parts = [work[role] / number for role, number in ranks.items()]
        return sum(parts) if in_turns else max(parts)

    waits_s = step_s - takes(now)
    sharing = {role: load.sizes for role, load in loads.items() if load.sizes}
    devices = sum(loads[role].ranks for role in sharing)
    # Growing roles one rank at a time never affords the large jumps of a role with few sizes (the actor): try them all.
    coarse = min(sharing, key=lambda role: len(sharing[role]), default="")
    splits = [_shared_out(work, sharing | {coarse: [size]}, devices, in_turns) for size in sharing.get(coarse, ())]
    timed = [(waits_s + takes(now | split), split) for split in splits if split]
    best_s, best = min(timed, key=lambda each: each[0], default=(math.inf, {}))
    return (best, best_s) if best_s <= (1 - _WORTH) * step_s else (None, step_s)


def _shared_out(
    work: Mapping[str, float], sizes: Mapping[str, Sequence[int]], devices: int, in_turns: bool
) -> dict[str, int]:
    """Return role -> ranks: each role's minimum, then more for the one that gains most; empty: too few devices."""
    place = dict.fromkeys(sizes, 0)
    ranks = {role: own[0] for role, own in sizes.items()}
    left = devices - sum(ranks.values())

    def gain(role: str) -> float:
        more = sizes[role][place[role] + 1]
        saved_s = work[role] / ranks[role] - work[role] / more
        return saved_s / (more - ranks[role]) if in_turns else work[role] / ranks[role]

    while left >= 0:
        growing = [r for r in sizes if place[r] + 1 < len(sizes[r]) and sizes[r][place[r] + 1] - ranks[r] <= left]
        if not growing:
            return ranks
        role = max(growing, key=gain)
        place[role] += 1
        left -= sizes[role][place[role]] - ranks[role]
        ranks[role] = sizes[role][place[role]]
    return {}


class Advisor:
    """Keeps the newest steps of a run and says what they show. Not thread-safe."""

    def __init__(self, config: RunConfig, gangs: Sequence[GangSpec], run_dir: Path) -> None:
        self._config = config
        self._run_dir = run_dir
        # Ranks that all compute on the CPU share its cores, so a split would change nothing.
        shared = config.rollout.engine != "sim" and {device for gang in gangs for device in gang.devices} <= {"cpu"}
        self._sizes = {} if shared or config.is_colocated else _sizes(config)
        self._free = set(config.roles) - set(roles_on_device(reward_model=config.reward.model is not None))
        self._steps: deque[Mapping[str, Any]] = deque(maxlen=_WINDOW)
        self._latest: Advice | None = None
        self._first = _FIRST
        self._said: tuple[str, Mapping[str, int] | None] | None = None
        self._said_at = -_WINDOW

    def update_advice(self, finished_steps: Sequence[Mapping[str, Any]]) -> Advice | None:
        """Take in the newest steps; return what they show, or None: too few steps, or no role reported its waits.

        `finished_steps` are lines of `metrics.jsonl`, each step once, in order; after a restore some come again.
        """
        for metrics in finished_steps:
            if self._steps and metrics["step"] <= self._steps[-1]["step"]:
                # A restore: steps come again, and the restarted ranks are cold.
                self._steps.clear()
                self._first = _FIRST
            if self._first:
                self._first -= 1
            else:
                self._steps.append(metrics)
        time_s = sum(metrics["step_time_s"] for metrics in self._steps)
        if finished_steps and len(self._steps) >= _LEAST and time_s >= _LEAST_S and (busy := self._busy(time_s)):
            self._latest = self._make_advice(busy, time_s / len(self._steps))
            self._log_advice(self._latest)
        return self._latest

    def _busy(self, time_s: float) -> dict[str, float]:
        waited: dict[str, float] = {}
        for metrics in self._steps:
            for role, share in metrics["idle_fraction"].items():
                waited[role] = waited.get(role, 0.0) + share * metrics["step_time_s"]
        everywhere = set.intersection(*(set(metrics["idle_fraction"]) for metrics in self._steps))
        return {role: 1 - waited[role] / time_s for role in self._config.roles if role in everywhere - OBSERVERS}

    def _make_advice(self, busy: Mapping[str, float], step_s: float) -> Advice:
        roles = self._config.roles
        loads = {role: RoleLoad(roles[role], share, self._sizes.get(role, ())) for role, share in busy.items()}
        in_turns = self._config.schedule.mode is ScheduleMode.SYNC
        split, split_s = better_split(loads, step_s=step_s, in_turns=in_turns)
        return Advice(
            self._steps[0]["step"], self._steps[-1]["step"], step_s, self._predicted_s, busy,
            sum(load.ranks for load in loads.values() if load.sizes),
            tuple(role for role in busy if role in self._free), split and roles | split, split_s,
        )  # fmt: skip

    @cached_property
    def _predicted_s(self) -> float | None:
        return predicted_step_s(self._config, self._run_dir)

    def _log_advice(self, advice: Advice) -> None:
        """Log new advice, at most one line per window of steps."""
        said = (advice.limits if advice.split else "", advice.split)
        if said != self._said and abs(advice.last_step - self._said_at) >= _WINDOW:
            self._said, self._said_at = said, advice.last_step
            logger.info("advice: %s", advice.text)


def predicted_step_s(config: RunConfig, run_dir: Path) -> float | None:
    """Return the predicted step time (s): the planner's for `sim` engines, otherwise the plan's; None: unknown."""
    if {config.rollout.engine, config.actor.engine} != {"sim"}:
        step_s = read_plan(run_dir, config.roles, config.colocated).get("step_s")
        return float(step_s) if isinstance(step_s, int | float) else None
    try:
        return open_planner(config, devices=config.num_devices, device=None).step_s()
    except ConfigError:
        return None


def _sizes(config: RunConfig) -> dict[str, Sequence[int]]:
    """Return, per role that takes devices, the possible numbers of ranks."""
    taking = set(roles_on_device(reward_model=config.reward.model is not None)) - OBSERVERS
    roles = {role: number for role, number in config.roles.items() if role in taking and number}
    devices = sum(roles.values())
    found: dict[str, Sequence[int]] = {}
    for role in roles:
        unit = config.ranks_per_copy(role)
        sizes = range(unit, devices + 1, unit)
        # A trainer's ranks must form whole replicas, over which the batch divides.
        found[role] = [size for size in sizes if role not in TRAINERS or with_ranks(config, {role: size})]
    return found
