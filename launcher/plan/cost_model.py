"""How long each task takes on a device of the catalogue: FLOPs, bytes and traffic from config.json. Pure.

    matrix products    2 FLOPs a parameter and token; attention 2 L H d n^2 for a sample of n tokens (causal)
    training           3 forwards, 4 with recomputed activations
    a decode step      the larger of: reading weights and keys and values, and computing; and a fixed overhead
    tensor parallel    2 all-reduces a layer and pass: 2 (TP - 1) / TP x D c bytes a token each; backward is one pass
    context parallel   q, k, v and the output all-to-all a layer and pass: (CP - 1) / CP x 2 (H + K) d c / TP bytes each
                       of a rank's tokens, 1 / CP of all; K is what CP divides (Ulysses, arXiv 2309.14509, section 3.2)
    pipeline           (stages - 1) / (pieces + stages - 1) of the time is the bubble; a piece is a sample or more
    FSDP2              a micro-batch lasts at least as long as gathering weights twice and reducing gradients once
    AdamW              28 bytes a parameter of a rank; Megatron also reduces gradients and gathers weights

Letters as in `workers.engines.device_memory`. Shares of peaks that are reached are `Achievable`; attention runs as fast
as matrix products, and communication of tensor and context parallelism is not hidden. docs/planner.md lists what is
assumed.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError

from asyncflow.errors import ConfigError
from asyncflow.settings import Settings
from launcher.config.load import read_yaml
from launcher.config.paths import PACKAGED
from launcher.plan.profile import COPY_IN, COPY_OUT, EXCHANGED, FORWARD, TRAIN, Profile
from launcher.plan.scenario import Latency, Times, Turns, Work, rollout_ranks, training_of, work_of_users
from workers.engines.device_memory import DTYPE_BYTES, ModelSizes
from workers.settings.engines import ActorConfig
from workers.settings.megatron import MegatronConfig
from workers.settings.run import RunConfig

# The device catalogue: `configs/devices/*.yaml`, or a file of yours. Peaks and bandwidths, each with its source.


class Achievable(Settings):
    """Shares of peaks and bandwidths that are reached. Assumptions, the same for every device: none is fitted to a
    result. A measured device has numbers of its own in its file."""

    train: float = Field(0.4, gt=0, le=1)
    """Of the peak, forward and backward of packed micro-batches."""
    forward: float = Field(0.5, gt=0, le=1)
    """Of the peak, without gradients; prefill."""
    memory: float = Field(0.7, gt=0, le=1)
    """Of the memory's bandwidth, weights and keys and values of a decode step."""
    link: float = Field(0.7, gt=0, le=1)
    """Of links, network and host transfers."""


class Peaks(Settings):
    """Dense matrix products by element type (TFLOP/s)."""

    bfloat16: float = Field(gt=0)
    float32: float = Field(gt=0)


class Device(Settings):
    """One kind of accelerator, in nodes. Bandwidths are of one device in one direction."""

    name: str
    """As `--device` has it."""
    peak_tflops: Peaks
    """What products reach at most."""
    memory_gb: float = Field(gt=0)
    """Memory (GB)."""
    memory_gb_s: float = Field(gt=0)
    """Memory bandwidth (GB/s)."""
    devices_per_node: int = Field(ge=1)
    """Devices of a node."""
    link_gb_s: float = Field(gt=0)
    """To the others of its node (GB/s)."""
    network_gb_s: float = Field(gt=0)
    """To other nodes (GB/s)."""
    host_gb_s: float = Field(gt=0)
    """To host memory (GB/s)."""
    shared_by: int = Field(0, ge=0)
    """Cores of a CPU that all ranks share: with more ranks than cores each has its share; 0: a rank has the device."""
    step_overhead_s: float = Field(0.002, ge=0)
    """Of a decode step, beside reading memory (s); assumed where no source is given."""
    hop_s: float = Field(1e-5, ge=0)
    """Of a collective of a node's devices, beside its bytes (s); assumed where no source is given."""
    achievable: Achievable = Achievable()
    sources: dict[str, str]
    """Where each number is from."""


def find_device(name: str) -> Device:
    """Return a device of the catalogue, or of a YAML file.

    Raises:
        ConfigError: there is none of that name, or the file says something else.
    """
    known = {path.name.removesuffix(".yaml"): path for path in _catalogue()}
    path = Path(name) if name.endswith((".yaml", ".yml")) else known.get(name)
    if path is None:
        raise ConfigError(f"--device {name}: is not known; give one of {' '.join(sorted(known))}, or a YAML file")
    if not path.is_file():
        raise ConfigError(f"--device {path}: is not a file; give a YAML file like configs/devices/h100.yaml, or a name")
    try:
        return Device.model_validate(read_yaml(path).values)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ConfigError(f"--device {path}: {where}: {first['msg']}; see configs/devices/h100.yaml") from error


def device_of(measured: str, named: str | None, what: str) -> str | None:
    """Return the name of the device that a profile was measured on.

    Args:
        measured: as the device calls itself.
        named: by `--device`; None: it is looked up in the catalogue.
        what: names the profile's file.

    Raises:
        ConfigError: the catalogue has it under another name than `named`.
    """
    known = [path.name.removesuffix(".yaml") for path in _catalogue()]
    called = measured.lower().replace("-", "")
    fitting = [name for name in known if re.search(rf"(?<![a-z0-9]){name.replace('-', '')}(?![0-9])", called)]
    if named in known and fitting and named not in fitting:
        raise ConfigError(f"{what}: was measured on {measured}, not on --device {named}; name --device {fitting[0]}")
    return named or (fitting[0] if fitting else None)


def _catalogue() -> list[Path]:
    return sorted((PACKAGED / "devices").glob("*.yaml"))


def parameters_of(config: Mapping[str, Any]) -> int:
    """Return the parameters of a decoder of Llama's kind, from config.json; 0: it names other sizes."""
    sizes = ModelSizes.of(config, 0)
    if sizes is None:
        return 0
    width = sizes.hidden_size
    attention = 2 * width * (sizes.num_heads + sizes.num_kv_heads) * sizes.head_dim
    layer = attention + 3 * width * sizes.ffn_size + 2 * width
    return sizes.num_layers * layer + width + sizes.embedding_parameters * (1 if sizes.tied else 2)


@dataclass(frozen=True)
class Workload:
    """What a run's tokens look like, on average.

    Attributes:
        prompt_tokens: of a prompt.
        mean_tokens: of a response; `mean_square`: mean of the squares.
        turns: of rollouts of functions and agents.
    """

    prompt_tokens: int
    mean_tokens: float
    mean_square: float
    turns: Turns


@dataclass(frozen=True)
class _Shared:
    """How ranks compute a model together.

    Attributes:
        number: bytes of a number that is computed with.
        ranks: that share a sample's work.
        moved_s: traffic between them of a token in one pass (s).
        gathered_s: gathering the weights of a pass (s).
        bubble: share of the time in which a stage of a pipeline waits.
    """

    number: int
    ranks: int = 1
    moved_s: float = 0.0
    gathered_s: float = 0.0
    bubble: float = 0.0

    @property
    def parts(self) -> float:
        """Ranks that compute at a time."""
        return self.ranks * (1 - self.bubble)


def at_full_speed(config: RunConfig, device: Device, profile: Profile | None) -> float:
    """Return how many ranks may compute side by side at full speed on a machine that they share; 0: each has a device.

    Args:
        config: of the run.
        device: of the catalogue.
        profile: knows the cores of the machine that was measured; None: they are the catalogue's.
    """
    cores = device.shared_by
    if cores and profile is not None:
        cores = int(profile.device["cores"])
    return max(1.0, cores / config.launcher.threads_per_worker) if cores else 0.0


@dataclass(frozen=True)
class CostModel:
    """Times of one configuration on one kind of device."""

    config: RunConfig
    model: ModelSizes
    device: Device
    workload: Workload
    profile: Profile | None = None
    """Measured times, where there are any; what it lacks is estimated."""
    reward_model: ModelSizes | None = None
    """Scores responses in the role `reward`, if there is one; estimated always."""

    def times(self) -> Times:
        """Return how long computing takes."""
        config, number = self.config, self._rollout_number
        tensor = rollout_ranks(config)
        peak = tensor * self._peak(number) * self.device.achievable.forward
        caches = config.vllm.prefix_caching if config.rollout.engine == "vllm" else True
        shared = config.schedule.n_samples_per_prompt if caches else 1
        prompt = self.workload.prompt_tokens
        scorers = {"ref_log_probs": "ref", "actor_log_probs": "actor_fwd", "values": "critic"}
        turns = self.workload.turns
        new = turns.read_tokens / max(1.0, turns.replies - 1)
        anew = config.rollout.engine == "hf" or not caches  # keys and values of earlier turns are not kept
        prefill = Work(token_s=2 * self.model.num_parameters / peak)
        if self.profile is not None:
            prefill = replace(self.profile.prefill, token_s=self.profile.prefill.token_s / tensor)
        prefill = replace(prefill, token_s=prefill.token_s + number * self._exchanged_s(tensor, 1, 1))
        return Times(
            decode_s=lru_cache(maxsize=None)(lambda responses: self.decode_s(responses, tensor)),
            prefill=prefill,
            first_tokens=prompt / shared,
            later_tokens=self._context + new / 2 if anew else new,
            tasks={task: self._forward(self._scoring(role)) for task, role in scorers.items()}
            | self._rewards()
            | work_of_users(config),
            train={role: self.train(role, training) for role, training in training_of(config).items()},
            update_s={role: self._update_s(role) for role in training_of(config)},
            prompt_tokens=prompt,
            in_step=[role for role in training_of(config) if self._engine(role) == "fsdp" and config.roles[role] > 1],
        )

    def latency(self) -> Latency:
        """Return the house's latencies, with what weights take on their way."""
        size, achievable = self._weight_bytes, self.device.achievable
        tensor = rollout_ranks(self.config)
        inside = self._is_inside(sum(self.config.roles.values()))
        network = self.device.network_gb_s * self.device.devices_per_node * 1e9 * achievable.link
        house = Latency()
        return replace(
            house,
            publish_s=house.publish_s + self._copy_s(COPY_OUT, size / self.config.roles["actor"]),
            transfer_s=house.transfer_s + (0.0 if inside else size / network),
            swap_s=house.swap_s + self._copy_s(COPY_IN, size / tensor),
        )

    def decode_s(self, responses: int, tensor: int) -> float:
        """Return the seconds of a decode step: a token of each of so many responses."""
        model, device, number = self.model, self.device, self._rollout_number
        reduce_s = self.reduced_s(responses, tensor)
        if self.profile is not None:
            alone_s = self.profile.decode_s(responses, self._context)
            whole_s = min(device.step_overhead_s, alone_s)  # what is no reading and no products, each rank does
            return whole_s + (alone_s - whole_s) / tensor + reduce_s
        read = number * model.num_parameters + responses * self._context * self._cache_bytes(tensor) * tensor
        memory_s = read / tensor / (device.memory_gb_s * 1e9 * device.achievable.memory * self._share)
        compute_s = 2 * model.num_parameters * responses / tensor / (self._peak(number) * device.achievable.forward)
        return max(memory_s, compute_s) + reduce_s + device.step_overhead_s

    def reduced_s(self, responses: int, tensor: int) -> float:
        """Return the seconds of a decode step's all-reduces."""
        size = responses * self.model.hidden_size * self._rollout_number
        return 2 * self.model.num_layers * self._all_reduce_s(size, tensor)

    def slots(self) -> int:
        """Return how many responses fit beside each other at their mean length, at most `rollout.batch_size`."""
        config = self.config
        if config.rollout.engine != "vllm":
            return config.rollout.batch_size
        tensor = rollout_ranks(config)
        if config.vllm.kv_cache_gb is not None:
            room = config.vllm.kv_cache_gb * 1e9
        else:
            room = config.vllm.gpu_memory_utilization * self.device.memory_gb * 1e9
            room -= self._rollout_number * self.model.num_parameters / tensor
        return max(1, min(config.rollout.batch_size, int(room / (self._context * self._cache_bytes(tensor)))))

    def train(self, role: str, training: ActorConfig) -> Work:
        """Return the work of a micro-batch on one replica of a role that trains so."""
        shared, models = self._training(role, training), self._models(role)
        forwards = 2 if training.gradient_checkpointing else 1
        passes = (forwards + 2) * models
        rate = shared.parts * self._peak(shared.number) * self.device.achievable.train
        work = Work(token_s=passes * 2 * self.model.num_parameters / rate, squared_s=passes * self._attention / rate)
        if self.profile is not None:
            work = self.profile.work(TRAIN, shared_prompt=training.shared_prompt).scaled(models, parts=shared.parts)
        ranks = self.config.roles[role]
        floor_s = 2 * shared.gathered_s
        if self._engine(role) == "fsdp" and ranks > 1:
            floor_s += self._exchange_s("reduce_scatter", 4 * self.model.num_parameters, ranks)
        moved_s = (forwards + 1) * models * shared.moved_s / (1 - shared.bubble)
        work = replace(work, token_s=work.token_s + moved_s, floor_s=models * floor_s)
        return work + self._forward(shared).scaled(self._copies_scored) if role == "actor" else work

    def _exchanged_s(self, tensor: int, context: int, stages: int) -> float:
        """Return what tensor and context parallelism move for a token in one pass, of numbers of one byte (s)."""
        model = self.model
        reduced_s = 2 * self._byte_s("all_reduce", tensor, tensor) * model.hidden_size
        heads = model.num_heads // tensor + math.lcm(max(1, model.num_kv_heads // tensor), context)
        shared_s = 2 * self._byte_s("all_to_all", context, tensor * context) * heads * model.head_dim
        return model.num_layers / stages * (reduced_s + shared_s) / context

    def _byte_s(self, name: str, ranks: int, spread: int) -> float:
        """Return the time of a large collective for each byte that a rank has (s).

        Args:
            name: of the collective.
            ranks: that exchange.
            spread: ranks among which they are.
        """
        share, size = (ranks - 1) / ranks, EXCHANGED[-1]
        measured = self.profile.exchange_s(name, size) if self.profile and self._is_inside(spread) else None
        if measured is None or self.profile is None:
            times = 2 if name == "all_reduce" else 1
            return times * share / (self._between(spread) * 1e9 * self.device.achievable.link)
        number = self.profile.num_ranks
        return measured / (size / number) * share * number / (number - 1)

    def _samples_together(self) -> float:
        """Return the samples of a micro-batch, about."""
        actor, mean = self.config.actor, self.workload
        size = self.config.schedule.n_samples_per_prompt
        if not actor.max_tokens_per_micro_batch:
            return actor.micro_batch_size
        tokens = mean.mean_tokens + mean.prompt_tokens / (size if actor.shared_prompt else 1)
        fitting = actor.max_tokens_per_micro_batch / tokens
        return max(1.0, min(fitting, max(actor.micro_batch_size, size)))

    @property
    def _copies_scored(self) -> float:
        """Passes with which `actor.tri_model` scores a micro-batch: of the reference and older policies; of the one
        that a step found, once an update made it another."""
        updates, copies = self.config.actor.num_updates, self.config.num_policy_copies
        return copies - (1 / updates if copies and updates > 1 else 0.0)

    def _training(self, role: str, training: ActorConfig) -> _Shared:
        """Return how the ranks of a replica share the model that a role trains."""
        number, ranks = DTYPE_BYTES[training.autocast], self.config.roles[role]
        if self._engine(role) == "megatron":
            return self._divided(number, training.megatron, ranks, self._samples_together())
        return _Shared(number, gathered_s=self._exchange_s("all_gather", number * self.model.num_parameters, ranks))

    def _scoring(self, role: str) -> _Shared:
        """Return how ranks share a model that only scores: those of a copy; a replica with what it trains; and its lead
        alone with the reference that the actor hosts."""
        config, ref = self.config, self.config.ref
        has_role = role in config.roles
        if role == "critic" or (role == "actor_fwd" and not has_role):
            trained = "critic" if has_role else "actor"
            return self._training(trained, training_of(config)[trained])
        number = DTYPE_BYTES[config.model.dtype]
        if not has_role or ref.engine not in ("fsdp", "megatron"):
            return _Shared(number)
        ranks = ref.ranks_per_copy
        if ref.engine == "megatron":
            return self._divided(number, ref.megatron, ranks, ref.micro_batch_size)
        gathered_s = self._exchange_s("all_gather", number * self.model.num_parameters, ranks)
        return _Shared(number, ranks, gathered_s=gathered_s)

    def _rewards(self) -> dict[str, Work]:
        reward, sizes = self.config.reward.model, self.reward_model
        if reward is None or sizes is None:
            return {}
        number, size = DTYPE_BYTES[reward.dtype], DTYPE_BYTES[reward.dtype] * sizes.num_parameters
        gathered_s = self._exchange_s("all_gather", size, reward.shards)
        estimated = replace(self, model=sizes, profile=None)
        return {"rewards": estimated._forward(_Shared(number, reward.shards, gathered_s=gathered_s))}

    def _divided(self, number: int, megatron: MegatronConfig, ranks: int, samples: float) -> _Shared:
        """Return how Megatron's ranks share a model; `samples`: of a micro-batch."""
        layout = megatron.layout(ranks)
        tensor, context, stages = layout.tensor, layout.context, layout.stages
        pieces = min(megatron.pipeline_pieces, samples)
        moved_s = number * self._exchanged_s(tensor, context, stages)
        bubble = (stages - 1) / (pieces + stages - 1)
        return _Shared(number, tensor * context * stages, moved_s=moved_s, bubble=bubble)

    def _forward(self, shared: _Shared) -> Work:
        """Return the work of a pass without gradients."""
        rate = shared.parts * self._peak(shared.number) * self.device.achievable.forward
        work = Work(token_s=2 * self.model.num_parameters / rate, squared_s=self._attention / rate)
        if self.profile is not None:
            work = self.profile.work(FORWARD, shared_prompt=False).scaled(parts=shared.parts)
        moved_s = shared.moved_s / (1 - shared.bubble)
        return replace(work, token_s=work.token_s + moved_s, floor_s=shared.gathered_s)

    def _update_s(self, role: str) -> float:
        config, device, model = self.config, self.device, self.model
        ranks = config.roles[role]
        bytes_per_s = device.memory_gb_s * 1e9 * device.achievable.memory * self._share
        owned = model.num_parameters * self._models(role) / ranks
        update_s = 28 * owned / bytes_per_s if self.profile is None else self.profile.update_s(owned)
        if self._engine(role) == "megatron":
            layout = config.actor.megatron.layout(ranks)
            number = DTYPE_BYTES[config.actor.autocast]
            own, copies = model.num_parameters / (layout.tensor * layout.stages), layout.replicas * layout.context
            update_s += self._exchange_s("reduce_scatter", 4 * own, copies, spread=ranks)
            update_s += self._exchange_s("all_gather", number * own, copies, spread=ranks)
        return update_s

    def _copy_s(self, name: str, size: float) -> float:
        """Return the time to copy so many bytes from the device, or to it (s)."""
        measured = self.profile.exchange_s(name, size) if self.profile is not None else None
        return size / (self.device.host_gb_s * 1e9 * self.device.achievable.link) if measured is None else measured

    def _exchange_s(self, name: str, size: float, ranks: int, *, spread: int = 0) -> float:
        """Return the time of a collective in which each rank ends or begins with so many bytes (s).

        Args:
            name: of the collective.
            size: bytes.
            ranks: that exchange.
            spread: ranks among which they are; 0: they are each other's neighbours.
        """
        measured = None
        if self.profile is not None and self._is_inside(spread or ranks):
            measured = self.profile.exchange_s(name, size)
        if measured is None:
            return size * (ranks - 1) / ranks / (self._between(spread or ranks) * 1e9 * self.device.achievable.link)
        number = self.profile.num_ranks if self.profile is not None else ranks
        return measured * (ranks - 1) / ranks * number / (number - 1)

    def _all_reduce_s(self, size: float, ranks: int) -> float:
        """Return the time of an all-reduce of so many bytes inside a node (s)."""
        if ranks == 1:
            return 0.0
        measured = self.profile.exchange_s("all_reduce", size * self.profile.num_ranks) if self.profile else None
        if measured is not None:
            return measured
        moved = 2 * (ranks - 1) / ranks * size
        return self.device.hop_s + moved / (self.device.link_gb_s * 1e9 * self.device.achievable.link)

    def _models(self, role: str) -> int:
        """Models that a role trains: the actor has the critic, too, where that has no role of its own."""
        return 2 if role == "actor" and self.config.algorithm.has_critic and "critic" not in self.config.roles else 1

    def _engine(self, role: str) -> str:
        """Return what trains a role's model; a critic's is FSDP2 always."""
        return "fsdp" if role == "critic" else self.config.actor.engine

    @property
    def _attention(self) -> float:
        return 2 * self.model.num_layers * self.model.num_heads * self.model.head_dim

    @cached_property
    def _context(self) -> float:
        """Mean tokens that a decoded token looks at: long responses are decoded for longer."""
        mean = self.workload
        return mean.prompt_tokens + (mean.turns.read_tokens + mean.mean_square / mean.mean_tokens) / 2

    def _cache_bytes(self, tensor: int) -> float:
        """Return bytes of keys and values of a token on one of the ranks."""
        heads = max(1.0, self.model.num_kv_heads / tensor)
        return 2 * self.model.num_layers * heads * self.model.head_dim * self._rollout_number

    def _between(self, ranks: int) -> float:
        return self.device.link_gb_s if self._is_inside(ranks) else self.device.network_gb_s

    def _is_inside(self, ranks: int) -> bool:
        """Whether so many ranks are in one node; those that share a machine are, however many."""
        return bool(self.device.shared_by) or ranks <= self.device.devices_per_node

    def _peak(self, number: int) -> float:
        peaks = self.device.peak_tflops
        return (peaks.float32 if number == 4 else peaks.bfloat16) * 1e12 * self._share

    @property
    def _share(self) -> float:
        """Share of the device that a rank has while it computes."""
        return 1 / at_full_speed(self.config, self.device, self.profile) if self.device.shared_by else 1.0

    @property
    def _rollout_number(self) -> int:
        return DTYPE_BYTES[self.config.vllm.dtype or self.config.model.dtype]

    @property
    def _weight_bytes(self) -> int:
        return self._rollout_number * self.model.num_parameters
