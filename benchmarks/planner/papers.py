"""The papers' cases as the planner predicts them, beside the papers' figures; docs/planner.md says what is assumed.

    AsyncFlow              arXiv 2507.01663: Ascend, 16 NPUs a node, 2,880 GB of memory a node; Qwen2.5-7B and 32B, GRPO
                           on DeepScaleR, trained by MindSpeed. Its rival is verl of April 2025, colocated, with FSDP.
                           Lengths, batch and splits are not given
    Periodic Asynchrony    arXiv 2511.18871: Ascend 910B of 64 GB, 8 a node, 196 GB/s inside a node, 100 Gb/s between
                           nodes; GRPO, 32 responses a prompt; training to inference instances 1 : 4

Every row has the paper's ratio and, where the planner has the form of both runs, its own. Nothing is fitted: devices,
shares of peaks and latencies are the planner's own.
"""

import json
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from asyncflow.errors import ConfigError
from benchmarks.planner.recipes import (
    QWEN3_8B,
    QWEN_7B,
    QWEN_32B,
    best_of_paper,
    best_step_s,
    fits_memory,
    layout_text,
)
from launcher.config.load_config import load_config
from launcher.config.paths import find_recipe
from launcher.plan.plan_report import open_planner
from launcher.plan.search import Plan, Planner, with_changes
from workers.settings.run import COLOCATED, RunConfig
from workers.settings.schedule import ScheduleMode

Say = Callable[[str], None]
_RECIPE = "qwen2.5-7b-grpo-deepscaler-npu"


@dataclass(frozen=True)
class Row:
    """A ratio of a paper. `predicted` is the planner's; None: not modelled, and `why`."""

    key: str
    paper: float
    predicted: float | None
    why: str = ""

    @property
    def error(self) -> float | None:
        return None if self.predicted is None else self.predicted / self.paper - 1


def predict(sizes: Sequence[int], directory: Path, say: Say) -> dict[str, float]:
    """Return the predictions of both papers' cases, and the mean of their errors.

    Args:
        sizes: numbers of devices of AsyncFlow's cases, ascending.
        directory: to write model directories into.
        say: takes a line for people.
    """
    figures: dict[str, float] = {}
    rows = []
    for row in (*_asyncflow(sizes, directory, say), *_periodic(directory, say)):
        rows.append(row)
        if row.predicted is None:
            say(f"papers: {row.key}: {row.paper:.3g} in the paper; not modelled: {row.why}")
        else:
            say(f"papers: {row.key}: {row.predicted:.3g} predicted, {row.paper:.3g} in the paper ({row.error:+.0%})")
            figures[row.key] = row.predicted
    errors = [abs(row.error) for row in rows if row.error is not None]
    return figures | {"paper_rows": len(errors), "paper_error_mean": statistics.fmean(errors)}


def _config(directory: Path, model: Mapping[str, Any], changes: Iterable[str]) -> RunConfig:
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(model))
    data = find_recipe("quickstart").parent / "quickstart" / "train.jsonl"
    return load_config(find_recipe(_RECIPE), overrides=[f"model.path={directory}", f"data.path={data}", *changes])


def _with(config: RunConfig, mode: ScheduleMode, roles: Mapping[str, int] | None = None) -> RunConfig:
    overlapped = mode in (ScheduleMode.ASYNC, ScheduleMode.SUBSTEP)
    schedule = {"schedule.mode": mode, "schedule.max_staleness": int(overlapped)}
    return with_changes(config, {**schedule, "roles": dict(roles or config.roles)})


# AsyncFlow. The paper's chip is not named; the catalogue's with nodes of 16 is taken.
_NODES_OF_16 = "ascend-910c"
_PROMPTS, _MEAN_TOKENS, _SIGMA = 1024, 2000, 0.8
"""Assumed, with 8 responses a prompt, at every number of devices."""
_MICRO_BATCH_TOKENS = 9216
"""The longest prompt with the longest response: the least memory with which every sample can be trained."""
_SHARDS = 8
"""Ranks that have a copy of the 32B model's reference together."""
_TABLE = 512
"""Devices of the ablation, in which tasks are separated and in turn, then streamed, then overlapped."""
_OVER_VERL = {("7B", 32): 1.334, ("7B", 256): 2.03, ("7B", 512): 1.76, ("32B", 512): 1.82}
_TIMES, _LINEARITY = 16, {"7B": 0.65, "32B": 0.88}
"""Tokens per second and device at 16 times the devices. From how many is not said: from the fewest."""


_ASYNCFLOW = {"7B": QWEN_7B, "32B": QWEN_32B}


def _asyncflow_config(directory: Path, name: str) -> RunConfig:
    lengths = [f"sim.mean_tokens={_MEAN_TOKENS}", f"sim.sigma={_SIGMA}"]
    batch = [f"schedule.rollout_batch_size={_PROMPTS}", f"actor.max_tokens_per_micro_batch={_MICRO_BATCH_TOKENS}"]
    config = _config(directory / name, _ASYNCFLOW[name], [*batch, *lengths])
    return with_changes(config, {"ref.engine": "fsdp", "ref.shards": _SHARDS}) if name == "32B" else config


def plan_of_ablation(directory: Path) -> tuple[Planner, Plan]:
    """Return a planner for the paper's ablation, and its plan; `directory` gets the model's shapes."""
    planner = open_planner(_asyncflow_config(directory, "7B"), devices=_TABLE, device=_NODES_OF_16)
    planner = replace(planner, colocated=False)
    return planner, planner.find_plans()[0]


def _asyncflow(sizes: Sequence[int], directory: Path, say: Say) -> Iterator[Row]:
    speedups = []
    for name in _ASYNCFLOW:
        config = _asyncflow_config(directory, name)
        rates = {}
        for devices in sizes:
            # The paper's own form: every role has devices of its own.
            planner = replace(open_planner(config, devices=devices, device=_NODES_OF_16), colocated=False)
            try:
                best = planner.find_plans()[0]
            except ConfigError as error:
                say(f"papers: {name}, {devices} devices: {error}")
                continue
            rates[devices] = best.tokens_per_s / devices
            colocated_s = _colocated_s(planner, devices)
            speedups.append(colocated_s / best.step_s)
            say(
                f"papers: {name}, {devices} devices: {best.step_s:.1f} s a step as {best.roles_text} "
                f"{' '.join(best.changes)}; colocated {colocated_s:.1f} s: {speedups[-1]:.2f}x"
            )
            if (name, devices) in _OVER_VERL:
                yield Row(f"speedup_{name}_{devices}", _OVER_VERL[name, devices], speedups[-1])
            if (name, devices) == ("7B", _TABLE):
                yield from ablation_rows(planner, best)
        least, most = min(rates), _TIMES * min(rates)
        if most in rates:
            yield Row(f"linearity_{name}", _LINEARITY[name], rates[most] / rates[least])
    yield Row("speedup_mean", 1.59, statistics.fmean(speedups))


def _colocated_s(planner: Planner, devices: int) -> float:
    """Return a step's time where rollout and actor take turns on all devices, trained by FSDP (verl's set-up)."""
    changes = {"actor.engine": "fsdp", "actor.tri_model": True}
    config = with_changes(planner.config, changes)
    sizes = {int(str(layout["vllm.tensor_parallel_size"])) for layout in planner.model_layouts()}
    able = [with_changes(config, {"vllm.tensor_parallel_size": size}) for size in sorted(sizes)]
    planner = _of_rival(planner)
    return min(best_step_s(planner, each) for each in _in_turns(planner, able, devices))


def _of_rival(planner: Planner) -> Planner:
    """Return a planner of frameworks that gather new weights on the devices that generate."""
    assert planner.costs is not None
    return replace(planner, costs=replace(planner.costs, hands_over=True))


def _in_turns(planner: Planner, configs: Iterable[RunConfig], devices: int) -> list[RunConfig]:
    """Return those runs, colocated and `sync`, that divide and fit `devices`."""
    shared = {"colocated": COLOCATED}
    roles = dict.fromkeys(COLOCATED, devices)
    every = [with_changes(_with(config, ScheduleMode.SYNC, roles), shared) for config in configs]
    return [each for each in every if _divides(each, devices) and fits_memory(planner, each)]


def _divides(config: RunConfig, devices: int) -> bool:
    return not any(devices % config.ranks_per_copy(role) for role in COLOCATED)


def ablation_rows(planner: Planner, plan: Plan) -> Iterator[Row]:
    """Yield what streaming, and overlapping as well, gain over one task after the other."""
    modes = (ScheduleMode.SYNC, ScheduleMode.PERIODIC, ScheduleMode.ASYNC)
    in_turn_s, streamed_s, overlapped_s = (best_step_s(planner, _with(plan.config, mode)) for mode in modes)
    yield Row("ablation_streamed_7B_512", 2.01, in_turn_s / streamed_s)
    yield Row("ablation_overlapped_7B_512", 2.74, in_turn_s / overlapped_s)


# Periodic Asynchrony. Mean lengths follow from the trained tokens that the paper states. How many devices an instance
# has is not given: of all layouts with four inference instances for each training instance, the best is taken.
_NODES_OF_8 = "ascend-910b"
_GROUP = 32


@dataclass(frozen=True)
class _Case:
    """A line of the paper's table. `tokens` are trained tokens of all `steps`; `prompt` is the mean prompt.

    `shared` prompts are computed once for 16 responses (micro-batch 16), others for each (micro-batch 1). `rates` are
    trained tokens per second and device (TPSPD): MindSpeed-RL's, verl's, theirs in turn and overlapped.
    """

    model: Mapping[str, Any]
    context: int
    devices: int
    prompts: int
    steps: int
    tokens: float
    rates: tuple[float | None, float | None, float, float]
    prompt: int = 128
    shared: bool = False

    @property
    def row_tokens(self) -> float:
        """Mean trained tokens of a response, with its share of the prompt."""
        return self.tokens / (self.steps * self.prompts * _GROUP)

    def config(self, directory: Path) -> RunConfig:
        micro_batch = 16 if self.shared else 1
        mean = self.row_tokens - self.prompt / micro_batch
        return _config(
            directory,
            self.model,
            [
                f"schedule.rollout_batch_size={self.prompts}", f"schedule.n_samples_per_prompt={_GROUP}",
                "schedule.mode=periodic", "schedule.max_staleness=0", "actor.tri_model=true",
                f"actor.micro_batch_size={micro_batch}", "actor.max_tokens_per_micro_batch=0",
                f"actor.shared_prompt={str(self.shared).lower()}", f"data.max_prompt_tokens={2 * self.prompt}",
                f"rollout.max_response_tokens={self.context - 2 * self.prompt}", "roles={rollout: 8, actor: 8}",
                f"sim.mean_tokens={round(mean)}", f"sim.sigma={_SIGMA}",
            ],
        )  # fmt: skip


_CASES = {
    "8B_16K": _Case(QWEN3_8B, 16384, 16, 32, 100, 917.6e6, (61.6, 155.5, 100.0, 192.3)),
    "32B_16K": _Case(QWEN_32B, 16384, 48, 32, 20, 124.0e6, (6.6, None, 26.2, 33.4)),
    "32B_8K": _Case(QWEN_32B, 8192, 64, 64, 20, 188.1e6, (None, 44.0, 46.5, 77.3)),
    # The batch is not given: 32 prompts, as in the first lines. The prompt's mean follows from the trained tokens with
    # and without sharing (60.9 and 84.2 million): the difference is 15 / 16 of the prompts.
    "7B_1K": _Case(QWEN_7B, 1024, 16, 32, 116, 60.9e6, (199.1, 182.6, 218.4, 435.6), prompt=209, shared=True),
}
_NOT_SHARED = ("7B_1K", 84.2e6, 54.5)
_SCALING = ("8B_16K", {16: 188.2, 32: 171.8, 64: 163.2})
_RIVALS = (
    ("mindspeed_rl", "it is colocated, and its layout is not given"),
    ("verl", "both overlap on separate devices; what differs is code"),
)
_MINDSPEED_RL = {"32B_16K": 64}
"""Devices of that rival, where it had others than theirs."""


def _periodic(directory: Path, say: Say) -> Iterator[Row]:
    rates: dict[str, float] = {}
    for name, case in _CASES.items():
        config = case.config(directory / name)
        rates[name], sync = _tokens_per_s_device(case, config, case.devices, say, name)
        for (rival, why), rate in zip(_RIVALS, case.rates, strict=False):
            if rate is not None:
                if rival == "mindspeed_rl":
                    in_turns = _best_in_turns(case, config, _MINDSPEED_RL.get(name, case.devices))
                    why += f" (in the best one that fits, the ratio would be {rates[name] / in_turns:.2f})"
                yield Row(f"periodic_over_{rival}_{name}", case.rates[3] / rate, None, why)
        yield Row(f"periodic_over_sync_{name}", case.rates[3] / case.rates[2], rates[name] / sync)
    name, tokens, rate = _NOT_SHARED
    alone = replace(_CASES[name], tokens=tokens, shared=False)
    alone_rate, _ = _tokens_per_s_device(alone, alone.config(directory / "alone"), alone.devices, say, f"{name}, alone")
    yield Row(f"shared_prompt_{name}", _CASES[name].rates[3] / rate, rates[name] / alone_rate)
    name, scaling = _SCALING
    fewest, *more = scaling
    config = _CASES[name].config(directory / "scaling")
    for devices in more:
        scaled, _ = _tokens_per_s_device(_CASES[name], config, devices, say, name)
        yield Row(f"scaling_{name}_{devices}", scaling[devices] / scaling[fewest], scaled / rates[name])


def _best_in_turns(case: _Case, config: RunConfig, devices: int) -> float:
    """Return the trained tokens per second and device of a colocated run with the best of all layouts."""
    planner = _of_rival(open_planner(config, devices=devices, device=_NODES_OF_8))
    layouts = (with_changes(config, layout) for layout in planner.model_layouts())
    best = min(_in_turns(planner, layouts, devices), key=planner.bound_s)
    return case.tokens / case.steps / best_step_s(planner, best) / devices


def _tokens_per_s_device(case: _Case, config: RunConfig, devices: int, say: Say, name: str) -> tuple[float, float]:
    """Return trained tokens per second and device, streamed (`periodic`) and in turn (`sync`)."""
    planner = open_planner(config, devices=devices, device=_NODES_OF_8)
    best = best_of_paper(planner, config)
    seconds = best_step_s(planner, best), best_step_s(planner, _with(best, ScheduleMode.SYNC))
    step_tokens = case.tokens / case.steps
    streamed, in_turn = (step_tokens / each / devices for each in seconds)
    say(
        f"papers: {name}, {devices} devices: {streamed:.1f} trained tokens a second and device, in turn {in_turn:.1f}, "
        f"as {layout_text(best)}"
    )
    return streamed, in_turn
