"""The papers' cases as the planner predicts them, beside the papers' figures; docs/planner.md has the assumptions.

    colocated   verl: all devices generate, then all score, then all train; `sync` with every device in both roles
    separated   AsyncFlow (arXiv 2507.01663): the plan for so many devices, `async` with staleness 1
    1 : 4       Periodic Asynchrony (arXiv 2511.18871): a fifth of the devices generates; `sync` and `periodic`

Nothing is fitted: devices, shares of peaks and latencies are the planner's own. The batch is the same at every size.
"""

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from asyncflow.errors import ConfigError
from launcher.config.load_config import load_config
from launcher.config.paths import find_recipe
from launcher.config.rules import check_batch_sizes
from launcher.plan.plan_report import open_planner
from launcher.plan.search import Plan, Planner, batch_sizes, with_changes, with_ranks
from workers.settings.run import RunConfig
from workers.settings.schedule import ScheduleMode

_RECIPE, _DEVICE = "qwen2.5-7b-grpo-deepscaler-npu", "ascend-910b"
_PROMPTS, _MEAN_TOKENS, _SIGMA = 1024, 2000, 0.8
_MICRO_BATCH_TOKENS = 9216
"""The longest prompt with the longest response: the least memory with which every sample can be trained."""
_LAYERS, _SHARDS = 28, 8
"""Of more layers than these, the 7B model's, so many ranks have a copy of the reference together."""
_TABLE = 512
"""Devices of AsyncFlow's Table 1."""
_PERIODIC = 40
"""Devices of the case 1 : 4: one node generates, four train. How many there were is not at hand."""

Say = Callable[[str], None]


def predict(
    models: Mapping[str, Mapping[str, Any]], sizes: Sequence[int], directory: Path, say: Say
) -> dict[str, float]:
    """Return the predictions of both papers' cases.

    Args:
        models: name -> config.json.
        sizes: numbers of devices, ascending.
        directory: to write model directories into.
        say: takes a line for people.
    """
    figures: dict[str, float] = {}
    speedups = []
    for name, model in models.items():
        config = _config(directory / name, model)
        rates = {}
        for devices in sizes:
            planner = open_planner(config, devices=devices, device=_DEVICE)
            try:
                plans = planner.find_plans()
            except ConfigError as error:
                say(f"papers: {name}, {devices} devices: {error}")
                continue
            colocated_s = min(filter(None, (_colocated_s(planner, plan, devices) for plan in plans)))
            best, speedup = plans[0], colocated_s / plans[0].step_s
            rates[devices] = best.tokens_per_s / devices
            speedups.append(speedup)
            figures[f"speedup_{name}_{devices}"] = speedup
            say(
                f"papers: {name}, {devices} devices: {best.step_s:.1f} s a step as {best.roles_text} "
                f"{' '.join(best.changes)}; colocated {colocated_s:.1f} s: {speedup:.2f}x"
            )
            if devices == _TABLE:
                figures |= {f"{key}_{name}": value for key, value in _ablation(planner, best).items()}
        figures[f"linearity_{name}"] = rates[max(rates)] / rates[min(rates)]
        figures |= {f"{key}_{name}": value for key, value in _one_to_four(config).items()}
    return figures | {"speedup_mean": statistics.fmean(speedups), "speedup_peak": max(speedups)}


def _config(directory: Path, model: Mapping[str, Any]) -> RunConfig:
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(model))
    data = find_recipe("quickstart").parent / "quickstart" / "train.jsonl"
    changes = [f"model.path={directory}", f"data.path={data}", f"schedule.rollout_batch_size={_PROMPTS}"]
    lengths = [f"sim.mean_tokens={_MEAN_TOKENS}", f"sim.sigma={_SIGMA}"]
    changes.append(f"actor.max_tokens_per_micro_batch={_MICRO_BATCH_TOKENS}")
    config = load_config(find_recipe(_RECIPE), overrides=[*changes, *lengths])
    if model["num_hidden_layers"] <= _LAYERS:
        return config
    return with_changes(config, {"ref.engine": "fsdp", "ref.shards": _SHARDS})


def _with(config: RunConfig, mode: ScheduleMode, roles: Mapping[str, int] | None = None) -> RunConfig:
    overlapped = mode in (ScheduleMode.ASYNC, ScheduleMode.SUBSTEP)
    schedule = {"schedule.mode": mode, "schedule.max_staleness": int(overlapped)}
    return with_changes(config, {**schedule, "roles": dict(roles or config.roles)})


def _colocated_s(planner: Planner, plan: Plan, devices: int) -> float | None:
    """Return a step's time where all devices do all tasks in turn, with this plan's layouts; None: no whole batches."""
    config = _with(_tri_model(plan.config), ScheduleMode.SYNC, {"rollout": devices, "actor": devices})
    return _best_s(planner, config) if with_ranks(config, {}) else None


def _best_s(planner: Planner, config: RunConfig) -> float:
    """Return a step's time with the best number of responses of an instance, as a plan has it."""
    config = with_changes(config, {"rollout.batch_size": planner.config.rollout.batch_size})
    return min(replace(planner, config=with_changes(config, each)).step_s() for each in batch_sizes(config))


def _tri_model(config: RunConfig) -> RunConfig:
    """Return it with a reference that is sharded as the policy is: all ranks of the actor score."""
    return with_changes(config, {"actor.tri_model": True})


def _ablation(planner: Planner, plan: Plan) -> dict[str, float]:
    """Return throughput with the plan's split, of tasks in turn: streamed inside a step, and over steps."""
    modes = (ScheduleMode.SYNC, ScheduleMode.PERIODIC, ScheduleMode.ASYNC)
    in_turn_s, streamed_s, overlapped_s = (_best_s(planner, _with(plan.config, mode)) for mode in modes)
    return {"table1_streamed": in_turn_s / streamed_s, "table1_async": in_turn_s / overlapped_s}


def _one_to_four(config: RunConfig) -> dict[str, float]:
    """Return tokens/s and device with one device that generates for every four that train, and what streaming gives."""
    generating = _PERIODIC // 5
    planner = open_planner(config, devices=_PERIODIC, device=_DEVICE)
    fits: list[tuple[float, RunConfig]] = []
    roles = {"rollout": generating, "actor": _PERIODIC - generating}
    for layout in planner.model_layouts():
        divided = _with(with_changes(_tri_model(config), layout), ScheduleMode.PERIODIC, roles)
        try:
            check_batch_sizes(divided)
            planner.headroom_gb(divided)
        except ConfigError:
            continue
        fits.append((planner.bound_s(divided), divided))
    best = min(fits, key=lambda each: each[0])[1]
    periodic_s, sync_s = _best_s(planner, best), _best_s(planner, _with(best, ScheduleMode.SYNC))
    tokens = best.schedule.step_rows * planner.workload.mean_tokens
    return {
        "tokens_per_s_device_periodic": tokens / periodic_s / _PERIODIC,
        "tokens_per_s_device_sync": tokens / sync_s / _PERIODIC,
        "periodic_over_sync": sync_s / periodic_s,
    }
