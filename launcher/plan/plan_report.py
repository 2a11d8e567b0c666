"""`asyncflow plan`: from a configuration and a number of devices to plans, in words and as JSON."""

import json
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Any

from asyncflow.errors import ConfigError
from asyncflow.json_lines import LineReader
from asyncflow.run_files import METRICS_FILE
from launcher.checks.models import REWARD_KEY
from launcher.checks.preflight import check_lengths
from launcher.plan.cost_model import CostModel, Workload, device_of, find_device
from launcher.plan.profile import Profile
from launcher.plan.scenario import Turns, prompt_tokens_of
from launcher.plan.search import Objective, Plan, Planner
from launcher.timeline.gantt_chart import GanttChart, gantt_html
from workers.data.model_files import check_trainable, count_parameters, read_model_config
from workers.engines.device_memory import ModelSizes
from workers.engines.sim.decode_times import SimLengths
from workers.settings.run import RunConfig


def open_planner(
    config: RunConfig,
    *,
    devices: int,
    device: str | None,
    objective: Objective = "time",
    lengths: Path | None = None,
    profile: Path | None = None,
) -> Planner:
    """Return a planner for a run.

    Args:
        devices: upper limit.
        device: name in the catalogue, or a YAML file; not needed for `sim`, nor if the profile's device is known.
        lengths: directory of a run that provides response lengths, and turns for rollouts of functions and agents;
            None: lengths as section `sim` says.
        profile: file of `asyncflow profile`; None: durations are estimated.

    Raises:
        ConfigError: the device or the model's sizes are unknown, or the run has no lengths.
    """
    simulated = config.rollout.engine == "sim"
    for option, given in (("--profile", profile), ("--device", device)):
        if simulated and given is not None:
            raise ConfigError(f"{option} {given}: sim engines have their times in section sim; leave the option out")
    sizes: ModelSizes | None = None
    measured: Profile | None = None
    if not simulated:
        sizes = model_sizes(config)
        if profile is not None:
            measured = Profile.read(profile, "--profile")
            measured.check(config, sizes, f"--profile {profile}")
            device = device_of(str(measured.device["name"]), device, f"--profile {profile}")
        if device is None:
            raise ConfigError("--device: is missing; name one of configs/devices, e.g. --device h100")
    own, longest, step_rows = config.rollout.is_own, config.rollout.max_response_tokens, config.schedule.step_rows
    drawn: Callable[[int], int]
    if lengths is None:
        check_lengths(config.sim)
        drawn = SimLengths(config.sim, samples_per_step=step_rows, seed=config.seed).response_length
    else:
        drawn = recorded_lengths(lengths, seed=config.seed)
    tokens = lru_cache(maxsize=None)(drawn if own else lambda row: min(longest, drawn(row)))
    turns = recorded_turns(lengths, config) if own and lengths is not None else None
    workload = Workload.of(tokens, step_rows, 0 if simulated else prompt_tokens_of(config), turns or Turns())
    costs: CostModel | None = None
    if sizes is not None and device is not None:
        reward = config.reward.model
        reward_sizes = None if reward is None else sizes_of(reward.path, REWARD_KEY)
        costs = CostModel(config, sizes, find_device(device), workload, measured, reward_sizes)
    return Planner(config, devices, tokens, workload, costs, turns, objective)


def model_sizes(config: RunConfig) -> ModelSizes:
    """Return the sizes of a run's model, whose weights may be absent.

    Raises:
        ConfigError: config.json is missing or describes another kind of model, or one that cannot be trained.
    """
    check_trainable(Path(config.model.path))
    return sizes_of(config.model.path, "model.path")


def sizes_of(path: str, key: str) -> ModelSizes:
    """Return the sizes of a model; `key` names it in errors.

    Raises:
        ConfigError: config.json is missing or describes another kind of model, or the weights are incomplete.
    """
    has_weights = any(Path(path).glob("*.safetensors"))
    sizes = ModelSizes.from_config(read_model_config(Path(path)), count_parameters(Path(path)) if has_weights else None)
    if sizes is None or not sizes.num_parameters:
        raise ConfigError(
            f"{key}: the sizes in {Path(path) / 'config.json'} are not those of a model that is known; name one of a "
            f"family in docs/models.md"
        )
    return sizes


def auto_plan(text: str, config: RunConfig) -> Plan | None:
    """Return the best plan for `auto:DEVICES[@DEVICE][@PROFILE.json]` as `--roles`; None: the text is something else.

    Raises:
        ConfigError: the number or the device is invalid, or no plan fits.
    """
    word, _, rest = text.strip().partition(":")
    if word != "auto":
        return None
    number, *named = rest.split("@")
    if not number.isdecimal() or int(number) < 2:
        raise ConfigError(f"--roles {text}: give a number of devices, at least 2, e.g. --roles auto:14")
    profiles: list[str] = []
    devices: list[str] = []
    for each in filter(None, named):
        (profiles if each.endswith(".json") else devices).append(each)
    if len(profiles) > 1 or len(devices) > 1:
        raise ConfigError(f"--roles {text}: has two devices or profiles; give one, e.g. --roles auto:{number}@h100")
    if not profiles and not devices and config.rollout.engine != "sim":
        if config.launcher.device != "cpu":
            raise ConfigError(f"--roles {text}: name the kind of device, e.g. --roles auto:{number}@h100")
        devices = ["cpu"]
    device, profile = next(iter(devices), None), next(map(Path, profiles), None)
    try:
        return open_planner(config, devices=int(number), device=device, profile=profile).find_plans()[0]
    except ConfigError as error:
        raise ConfigError(f"--roles {text}: {error}") from error


def recorded_lengths(run_dir: Path, *, seed: int) -> Callable[[int], int]:
    """Return row -> length, drawn from the histograms of a run's `metrics.jsonl`.

    Raises:
        ConfigError: the run recorded no lengths.
    """
    counts: dict[int, int] = {}
    for number, step in _recorded(run_dir):
        with _damaged(run_dir, number):
            for length, count in step.get("histograms", {}).get("response_tokens", {}).items():
                counts[round(float(length))] = counts.get(round(float(length)), 0) + int(count)
    if not counts:
        raise ConfigError(f"--lengths {run_dir}: has no lengths of responses in metrics.jsonl; name a run that has")
    values, weights = [max(1, value) for value in counts], list(accumulate(counts.values()))
    return lambda row: random.Random(f"{seed}/{row}").choices(values, cum_weights=weights)[0]


def recorded_turns(run_dir: Path, config: RunConfig) -> Turns:
    """Return the turns of a run's rollouts, as means over the steps in `metrics.jsonl`. `config` is the run to plan.

    Raises:
        ConfigError: the run's rollouts have one response each.
    """
    steps = [each for each in _recorded(run_dir) if "reward/turns_mean" in each[1]]
    if not steps:
        raise ConfigError(
            f"--lengths {run_dir}: has no turns in metrics.jsonl; name a run of rollout functions or agents"
        )
    # The first two steps run with cold caches, so they do not count if there are others.
    steps = steps[2:] or steps
    names = ("reward/turns_mean", "reward/tool_s_mean", "reward/cpu_s_mean")
    totals, read = dict.fromkeys(names, 0.0), 0.0
    for number, step in steps:
        with _damaged(run_dir, number):
            for name in names:
                totals[name] += step.get(name, 0.0) / len(steps)
            # Tokens that the policy did not generate are the prompt and what came between replies.
            read += (step["train_tokens"] / step["samples"] - step["response_tokens_mean"]) / len(steps)
    replies, tool_s, cpu_s = totals.values()
    # `sim` engines take no time for tokens that they read.
    read = 0.0 if config.rollout.engine == "sim" else read - prompt_tokens_of(config)
    return Turns(max(1.0, replies), tool_s, cpu_s, max(0, round(read)))


def _recorded(run_dir: Path) -> Sequence[tuple[int, dict[str, Any]]]:
    """Return (line number, step) of a run's `metrics.jsonl`; empty if the run has none."""
    found = LineReader(run_dir / METRICS_FILE).read_lines()
    for number, what in found.wrong:
        with _damaged(run_dir, number):
            raise ValueError(what)
    return found.lines


@contextmanager
def _damaged(run_dir: Path, number: int) -> Iterator[None]:
    """Turn errors of a malformed line into a `ConfigError` that names the line."""
    try:
        yield
    except (ValueError, TypeError, KeyError, AttributeError, ArithmeticError) as error:
        raise ConfigError(f"--lengths {run_dir}: line {number} of metrics.jsonl is damaged ({error!r}); name another "
                          f"run, or remove the line") from error  # fmt: skip


def plan_text(planner: Planner, plans: list[Plan], more: dict[str, float], others: Sequence[Plan] = ()) -> str:
    """Return plans (best first) as text: a table, the options to paste, and the reasons.

    `more` is `planner.one_more` of the best plan, and `others` are `planner.other_schedules`, if asked for.
    """
    config, best = planner.config, plans[0]
    schedule = config.schedule
    kind = "simulated devices" if planner.device is None else planner.device.name
    lines = [
        f"{config.name} on {planner.num_devices} {kind}: {schedule.rollout_batch_size} x "
        f"{schedule.n_samples_per_prompt} responses a step, {schedule.mode}, staleness {schedule.staleness_bound}, "
        f"{planner.workload.mean_tokens:.0f} tokens a response",
        f"{'step':>10} {'tokens/s':>10} {'a device':>9} {'memory left':>12}   roles (idle)",
    ]
    for plan in plans:
        left = "-" if plan.headroom_gb is None else f"{plan.headroom_gb:.1f} GB"
        roles = " ".join(
            text + (f" ({100 * plan.idle[role]:.0f} %)" if (role := text.partition(":")[0]) in plan.idle else "")
            for text in plan.roles_text.split(",")
        )
        lines.append(
            f"{plan.step_s:>8.3g} s {plan.tokens_per_s:>10.3g} {plan.tokens_per_s_per_device:>9.3g} {left:>12}   "
            + " ".join([roles, *plan.changes])
        )
    busiest = min(best.idle, key=lambda role: best.idle[role])
    lines += ["", _options(best), ""]
    lines.append(
        f"why: {busiest} is the bottleneck (idle {100 * best.idle[busiest]:.0f} %); with this layout no step on these "
        f"devices is shorter than {best.bound_s:.3g} s"
    )
    if best.config.is_colocated:
        times = planner.times(best.config)
        lines.append(
            f"  a switch takes {times.to_actor_s:.3g} s to the actor, {times.to_rollout_s:.3g} s back to the rollout"
        )
    for role, step_s in more.items():
        lines.append(f"  with {role} a step takes {step_s:.3g} s ({100 * (step_s / best.step_s - 1):+.1f} %)")
    if others:
        lines.append("other schedules, each with its own best split; they change what is trained on:")
    for plan in others:
        lines.append(f"  {plan.step_s:.3g} s ({100 * (plan.step_s / best.step_s - 1):+.1f} %)  {_options(plan)}")
    if planner.costs is not None:
        share, profile = planner.costs.device.achievable, planner.costs.profile
        if profile is not None:
            lines.append(f"measured: blocks of the model, on {profile.device['name']}; what it lacks is assumed")
        lines.append(
            f"assumed: {share.train:g} of the peak in training, {share.forward:g} without gradients, {share.memory:g} "
            f"of the memory's bandwidth, {share.link:g} of links; see docs/planner.md"
        )
    return "\n".join(lines)


def _options(plan: Plan) -> str:
    return " ".join([f"--roles {plan.roles_text}", *(f"--set {change}" for change in plan.changes)])


def plan_json(planner: Planner, plans: list[Plan], more: dict[str, float], others: Sequence[Plan] = ()) -> str:
    """Return the contents of `plan_text` as one JSON object."""
    device = None if planner.device is None else planner.device.name
    values = {"device": device, "plans": [plan.values() for plan in plans], "one_more_step_s": more}
    if others:
        values["other_schedules"] = [plan.values() for plan in others]
    return json.dumps(values, indent=1)


def write_timeline(plan: Plan, path: Path, *, title: str) -> None:
    """Draw the simulated run in the style of `asyncflow timeline`.

    Raises:
        ConfigError: the file cannot be written.
    """
    timeline = plan.simulated.timeline
    chart = GanttChart.from_timeline(timeline, timeline.account_by_role(), title=title)
    try:
        path.write_text(gantt_html(chart, width=2400))
    except OSError as error:
        raise ConfigError(f"--timeline {path}: {error.strerror}; name a file that can be written") from error
