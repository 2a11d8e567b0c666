"""What a plan may change beside the sizes of roles: layouts, the actor's micro-batch, the schedule. Pure."""

import itertools
from collections.abc import Iterator, Mapping

from launcher.plan.scenario import rollout_ranks
from workers.engines.device_memory import ModelSizes
from workers.settings.engines import RefConfig
from workers.settings.run import RunConfig
from workers.settings.schedule import Fill, ScheduleConfig, ScheduleMode

Choice = tuple[RunConfig, tuple[str, ...]]
"""A configuration, and what is changed in it, as `--set` takes that."""
_DIVISIONS = (1, 2, 4, 8)
_FACTORS = (1, 2, 4, 8, 1 / 2, 1 / 4, 1 / 8)
_SCHEDULES = (
    (ScheduleMode.SYNC, 0),
    (ScheduleMode.PERIODIC, 0),
    (ScheduleMode.ASYNC, 1),
    (ScheduleMode.ASYNC, 2),
    (ScheduleMode.ASYNC, 4),
    (ScheduleMode.SUBSTEP, 1),
)
_LEAST_OF_FIRST_READY = 2
"""Staleness that `fill: first_ready` needs."""


def layouts(config: RunConfig, model: ModelSizes, devices_per_node: int) -> Iterator[Choice]:
    """Yield every layout that divides the model: tensor parallelism of vLLM; tensor, context and pipeline parallelism
    of the actor's Megatron; where the reference is sharded, the ranks that share a copy, or its Megatron's tensor
    parallelism. Tensor parallelism and copies stay inside a node."""
    divides = [n for n in _DIVISIONS if model.num_heads % n == 0 and model.ffn_size % n == 0]
    inside = [n for n in divides if n <= devices_per_node]
    # vLLM repeats heads of keys and values where ranks are more.
    generating = [n for n in inside if model.num_kv_heads % n == 0 or n % model.num_kv_heads == 0]
    if config.rollout.engine != "vllm":
        generating = [0]
    training: list[dict[str, int]] = [{}]
    if config.actor.engine == "megatron":
        shares = sorted({*_DIVISIONS, config.actor.megatron.context_parallel})
        training = [
            {"tensor_parallel": tensor, "context_parallel": context, "pipeline_parallel": stages}
            for tensor, context, stages in itertools.product(inside, shares, _DIVISIONS)
            if model.num_kv_heads % tensor == model.num_heads // tensor % context == model.num_layers % stages == 0
        ]
    ref = config.ref
    scoring: list[tuple[RefConfig, dict[str, int]]] = [(ref, {})]
    scores = config.algorithm.kl_coef > 0 and not config.actor.tri_model
    if scores and ref.engine == "fsdp":
        shards = sorted({*(n for n in _DIVISIONS if 1 < n <= devices_per_node), ref.shards})
        scoring = [(ref.model_copy(update={"shards": number}), {"ref.shards": number}) for number in shards]
    if scores and ref.engine == "megatron":
        own = ref.megatron
        others = own.context_parallel * own.pipeline_parallel
        able = [
            n for n in inside
            if model.num_kv_heads % n == model.num_heads // n % own.context_parallel == 0
            and 1 < n * others <= devices_per_node
        ]  # fmt: skip
        scoring = [
            (
                ref.model_copy(update={"megatron": own.model_copy(update={"tensor_parallel": tensor})}),
                {"ref.megatron.tensor_parallel": tensor},
            )
            for tensor in able or [own.tensor_parallel]
        ]
    for size, divided, (sharing, shared) in itertools.product(generating, training, scoring):
        vllm = config.vllm.model_copy(update={"tensor_parallel_size": size or 1})
        actor = config.actor.model_copy(update={"megatron": config.actor.megatron.model_copy(update=divided)})
        told = {"vllm.tensor_parallel_size": size} if size else {}
        told |= {f"actor.megatron.{name}": number for name, number in divided.items()}
        yield config.model_copy(update={"vllm": vllm, "actor": actor, "ref": sharing}), _told(told | shared)


def batch_sizes(config: RunConfig) -> Iterator[Choice]:
    """Yield how many responses an instance generates at most: each one's part of all that may be in flight, then of a
    step, in whole groups, and never more than configured. Instances that may take more take all there is, and leave
    nothing to the others."""
    schedule, own = config.schedule, config.rollout.batch_size
    instances = config.roles["rollout"] // rollout_ranks(config)
    groups = [-(-schedule.rollout_batch_size * steps // instances) for steps in (1 + schedule.staleness_bound, 1)]
    for size in dict.fromkeys(min(own, number * schedule.n_samples_per_prompt) for number in groups):
        rollout = config.rollout.model_copy(update={"batch_size": size})
        changed = _told({"rollout.batch_size": size}) if size != own else ()
        yield config.model_copy(update={"rollout": rollout}), changed


def micro_batches(config: RunConfig) -> Iterator[Choice]:
    """Yield the actor's micro-batch as it is, then up to eight times as large, then down to an eighth. With a token
    budget a rank gets more rows at a time, too, so that larger ones can fill."""
    actor = config.actor
    for factor in _FACTORS:
        sized = {"micro_batch_size": int(actor.micro_batch_size * factor)}
        if actor.max_tokens_per_micro_batch:
            budget = int(actor.max_tokens_per_micro_batch * factor)
            rows = int(actor.micro_batch_size * max(1, factor))
            sized = {"max_tokens_per_micro_batch": budget, "micro_batch_size": rows}
        if min(sized.values()) < 1:
            return
        changed = {f"actor.{name}": value for name, value in sized.items() if value != getattr(actor, name)}
        yield config.model_copy(update={"actor": actor.model_copy(update=sized)}), _told(changed)


def schedules(config: RunConfig) -> Iterator[Choice]:
    """Yield the configuration with other schedules, the strictest first; they change what is trained on."""
    own = config.schedule
    for mode, staleness in _SCHEDULES:
        schedule = own.model_copy(update={"mode": mode, "max_staleness": staleness})
        changed = {"schedule.mode": mode.value} | ({"schedule.max_staleness": staleness} if staleness else {})
        if schedule.lateness and schedule.staleness_bound < _LEAST_OF_FIRST_READY:
            schedule = schedule.model_copy(update={"fill": Fill.IN_ORDER})
            changed["schedule.fill"] = Fill.IN_ORDER.value
        allowed = not (config.deterministic and staleness)  # whose weights must not depend on timing
        if allowed and _ways(schedule) != _ways(own):
            yield config.model_copy(update={"schedule": schedule}), _told(changed)


def _ways(schedule: ScheduleConfig) -> tuple[ScheduleMode, int, Fill]:
    return schedule.mode, schedule.staleness_bound, schedule.fill


def _told(changes: Mapping[str, object]) -> tuple[str, ...]:
    return tuple(f"{name}={value}" for name, value in changes.items())
