"""How long each task takes on a device of the catalogue, from FLOPs, bytes and traffic by config.json. Pure.

    matrix products    2 FLOPs per parameter and token; attention 2 L H d n^2 for a sample of n tokens (causal)
    training           3 forwards; 4 with recomputed activations; beside an adapter one forward less of the frozen
                       products, whose weights need no gradients, and those of the adapter
    a decode step      the larger of reading (weights, keys and values) and computing, plus a fixed overhead
    tensor parallel    2 all-reduces a layer and pass: 2 (TP - 1) / TP x D c bytes per token each; backward is one pass
    context parallel   q, k, v and the output all-to-all a layer and pass: (CP - 1) / CP x 2 (H + K) d c / TP bytes for
                       each token of a rank, which has 1 / CP of all; K is what CP divides (Ulysses, arXiv 2309.14509,
                       section 3.2)
    pipeline           stages idle (S - 1) / (V m + S - 1) of the time, S stages of V chunks: m are all pieces of an
                       update in training (1F1B), those of a micro-batch without gradients, or if a loss of your own may
                       look at all its samples; a piece is at least one sample
    FSDP2              a micro-batch lasts at least as long as gathering weights twice and reducing gradients once,
                       among the ranks that share a copy, and with replicas (HSDP) also summing them over those
    AdamW              28 bytes per parameter of a rank; Megatron also reduces gradients and gathers weights
    new weights        from host to host over TCP, once a node; then to the devices, while an instance draws nothing;
                       then the keys and values of what it draws are computed again (`rollout.on_swap: recompute`)
    colocated roles    a switch moves a rank's training state (parameters, optimizer, copies that it scores with)
                       between device and host; the way back also loads the new weights, as a swap does; a generator
                       that sleeps drops its own, and keys and values, and computes those of what runs again

Letters as in `workers.engines.device_memory`. `Achievable` holds the shares of peaks that are reached. Attention runs
as fast as matrix products, and communication of tensor and context parallelism is not hidden. docs/planner.md lists all
assumptions.
"""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path

from pydantic import Field, ValidationError

from asyncflow.errors import ConfigError
from asyncflow.settings import Settings
from launcher.config.load_config import read_yaml
from launcher.config.paths import PACKAGED
from launcher.plan.profile import COPY_IN, COPY_OUT, EXCHANGED, FORWARD, TRAIN, Profile
from launcher.plan.scenario import Latency, Times, Turns, Work, training_of, work_of_users
from workers.engines.device_memory import DTYPE_BYTES, STATE, ModelSizes, memory_of_roles, version_bytes
from workers.engines.lora import Trained
from workers.settings.algorithms import OutsideConfig
from workers.settings.dataflow import roles_on_device
from workers.settings.engines import ActorConfig
from workers.settings.megatron import MegatronConfig
from workers.settings.run import RunConfig

# The device catalogue: `configs/devices/*.yaml`, or a file of the user's. Each peak and bandwidth states its source.


class Achievable(Settings):
    """Shares of peaks and bandwidths that are reached. These are assumptions, the same for every device, and not fitted
    to any result. The file of a device that was measured has its own numbers."""

    train: float = Field(0.4, gt=0, le=1)
    """Of the peak: forward and backward of packed micro-batches."""
    forward: float = Field(0.5, gt=0, le=1)
    """Of the peak: passes without gradients, and prefill."""
    memory: float = Field(0.7, gt=0, le=1)
    """Of the memory bandwidth: reading weights, keys and values in a decode step."""
    link: float = Field(0.7, gt=0, le=1)
    """Of links, the network and host transfers."""


class Peaks(Settings):
    """Peak of dense matrix products by element type (TFLOP/s)."""

    bfloat16: float = Field(gt=0)
    float32: float = Field(gt=0)


class Device(Settings):
    """One kind of accelerator, in nodes. Bandwidths are those of one device in one direction."""

    name: str
    """The name that `--device` takes."""
    peak_tflops: Peaks
    """Peak of matrix products."""
    memory_gb: float = Field(gt=0)
    """Device memory (GB)."""
    memory_gb_s: float = Field(gt=0)
    """Memory bandwidth (GB/s)."""
    devices_per_node: int = Field(ge=1)
    """Number of devices per node."""
    link_gb_s: float = Field(gt=0)
    """Bandwidth to the other devices of its node (GB/s)."""
    network_gb_s: float = Field(gt=0)
    """Bandwidth to other nodes (GB/s)."""
    node_gb_s: float = Field(1.25, gt=0)
    """Bandwidth between the hosts of two nodes over TCP, which is how weights reach other nodes; the devices' own
    adapters take no part (GB/s). 10 Gb/s is assumed where no source is given."""
    host_gb_s: float = Field(gt=0)
    """Bandwidth to host memory (GB/s)."""
    shared_by: int = Field(0, ge=0)
    """Cores of a CPU that all ranks share; with more ranks than cores each has its share. 0: each rank has a device."""
    step_overhead_s: float = Field(0.002, ge=0)
    """Overhead of a decode step, besides reading memory (s); assumed where no source is given."""
    hop_s: float = Field(1e-5, ge=0)
    """Overhead of a collective inside a node, besides its bytes (s); assumed where no source is given."""
    achievable: Achievable = Achievable()
    sources: dict[str, str]
    """Source of each number."""


def find_device(name: str) -> Device:
    """Return a device from the catalogue or from a YAML file.

    Raises:
        ConfigError: no device has that name, or the file is invalid.
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
    """Return the catalogue's name for the device that a profile was measured on; None: the catalogue lacks it.

    `measured` is what the device calls itself, `named` the value of `--device`; `what` names the file in the message.

    Raises:
        ConfigError: `named` is another device of the catalogue.
    """
    known = [path.name.removesuffix(".yaml") for path in _catalogue()]
    called = measured.lower().replace("-", "")
    fitting = [name for name in known if re.search(rf"(?<![a-z0-9]){name.replace('-', '')}(?![0-9])", called)]
    if named in known and fitting and named not in fitting:
        raise ConfigError(f"{what}: was measured on {measured}, not on --device {named}; name --device {fitting[0]}")
    return named or (fitting[0] if fitting else None)


def _catalogue() -> list[Path]:
    return sorted((PACKAGED / "devices").glob("*.yaml"))


@dataclass(frozen=True)
class Workload:
    """Average tokens of a run's rows; `mean_square` is the mean of the squared response lengths."""

    prompt_tokens: int
    mean_tokens: float
    mean_square: float
    turns: Turns

    @staticmethod
    def of(tokens: Callable[[int], int], step_rows: int, prompt_tokens: int, turns: Turns) -> "Workload":
        """Average the first eight steps' rows, at most 4096; `tokens` maps a row to the length of its response."""
        drawn = [tokens(row) for row in range(min(4096, 8 * step_rows))]
        square = sum(number * number for number in drawn) / len(drawn)
        return Workload(prompt_tokens, sum(drawn) / len(drawn), square, turns)


@dataclass(frozen=True)
class _Shared:
    """How the ranks of a copy compute a model together.

    `number` is the bytes of a number, `moved_s` the ranks' traffic per token and pass, `gathered_s` the time to gather
    the weights for a pass, and `bubble` the share of the time in which a pipeline stage waits.
    """

    number: int
    ranks: int = 1
    moved_s: float = 0.0
    gathered_s: float = 0.0
    bubble: float = 0.0

    @property
    def parts(self) -> float:
        """Ranks that compute at any one time."""
        return self.ranks * (1 - self.bubble)


def devices_of(config: RunConfig) -> int:
    """Return the number of devices that the roles of a configuration occupy."""
    # Guests have the actor's devices.
    taking = {*roles_on_device(reward_model=config.reward.model is not None)} - {*config.guests}
    return sum(number for role, number in config.roles.items() if role in taking)


@dataclass(frozen=True)
class CostModel:
    """Durations of one configuration on one kind of device."""

    config: RunConfig
    model: ModelSizes
    device: Device
    workload: Workload
    profile: Profile | None = None
    """Measured durations; what the profile lacks is estimated."""
    reward_model: ModelSizes | None = None
    """Sizes of the model in the role `reward`, if there is one; its durations are always estimated."""
    hands_over: bool = False
    """Colocated roles: new weights change hands on the devices, as in a framework with one process for both; False:
    through the host, as in a run of ours."""

    @property
    def at_full_speed(self) -> float:
        """How many ranks can compute side by side at full speed on a machine that they share; 0: no sharing."""
        # A profile knows the cores of the measured machine; without one, the catalogue's count.
        cores = self.device.shared_by
        if cores and self.profile is not None:
            cores = int(self.profile.device["cores"])
        return max(1.0, cores / self.config.launcher.threads_per_worker) if cores else 0.0

    def estimate_times(self) -> Times:
        config, number = self.config, self._rollout_number
        tensor = config.ranks_per_copy("rollout")
        peak = tensor * self._peak_flops(number) * self.device.achievable.forward
        caches = config.vllm.prefix_caching if config.rollout.engine == "vllm" else True
        # With prefix caching, the samples of a group compute their prompt once.
        shared = config.schedule.n_samples_per_prompt if caches else 1
        prompt = self.workload.prompt_tokens
        scorers = {"ref_log_probs": "ref", "actor_log_probs": "actor_fwd", "values": "critic"}
        turns = self.workload.turns
        new = turns.read_tokens / max(1.0, turns.replies - 1)
        anew = config.rollout.engine == "hf" or not caches  # earlier turns are computed again: no keys or values kept
        prefill = Work(token_s=2 * self._drawing_parameters / peak)
        if self.profile is not None:
            prefill = replace(self.profile.prefill, token_s=self.profile.prefill.token_s / tensor)
        prefill = replace(prefill, token_s=prefill.token_s + number * self._exchanged_s(tensor, 1, 1))
        to_actor_s, to_rollout_s = self._switches_s if config.is_colocated else (0.0, 0.0)
        return Times(
            decode_s=lru_cache(maxsize=None)(lambda responses: self.decode_s(responses, tensor)),
            prefill=prefill,
            first_tokens=prompt / shared,
            later_tokens=self._context + new / 2 if anew else new,
            tasks={task: self._forward_work(self._score_sharing(role)) for task, role in scorers.items()}
            | self._reward_work()
            | work_of_users(config),
            train={role: self.train(role, training) for role, training in training_of(config).items()},
            update_s={role: self._update_s(role) for role in training_of(config)},
            prompt_tokens=prompt,
            in_step=[role for role in training_of(config) if self._engine(role) == "fsdp" and config.roles[role] > 1],
            slots=self._slots(),
            latency=self._latency(),
            # An engine on a CPU adopts weights that its receiver's thread has copied.
            pause_s=0.0 if self.device.shared_by else self._load_s,
            recomputes=config.rollout.on_swap == "recompute",
            at_full_speed=self.at_full_speed,
            to_actor_s=to_actor_s,
            to_rollout_s=to_rollout_s,
        )

    @property
    def _switches_s(self) -> tuple[float, float]:
        """Return how long the turn takes from rollout to actor, and back (s)."""
        roles = memory_of_roles(self.config, self.model)
        parts = roles.get("actor", {})
        # Between two steps gradients are empty, and bfloat16 copies are made anew.
        state = sum(parts.get(name, 0) for name in STATE if name not in ("gradients", "bfloat16 copy"))
        loaded_s = self._handed_over_s if self.hands_over else self._load_s
        to_actor_s, to_rollout_s = self._copy_s(COPY_IN, state), self._copy_s(COPY_OUT, state) + loaded_s
        if self.config.sends_adapter:  # no version brings the base, so it waits in host memory
            base = sum(roles.get("rollout", {}).get(name, 0) for name in ("weights", "adapter"))
            to_actor_s += self._copy_s(COPY_OUT, base)
            to_rollout_s += self._copy_s(COPY_IN, base)
        return to_actor_s, to_rollout_s

    @property
    def _handed_over_s(self) -> float:
        """The time in which the trainer's ranks gather weights, and write them where the generator reads them (s)."""
        config, ranks = self.config, self.config.actor.fsdp_size or self.config.roles["actor"]
        if config.actor.engine == "megatron":
            layout = config.actor.megatron.layout(config.roles["actor"])
            ranks = layout.tensor * layout.stages
        written_s = self._written_s(self._weight_bytes / config.ranks_per_copy("rollout"))
        return self._exchange_s("all_gather", self._weight_bytes, ranks) + written_s

    def _written_s(self, size: float) -> float:
        """Return the time to copy `size` bytes inside a device: read once, written once (s)."""
        return 2 * size / (self.device.memory_gb_s * 1e9 * self.device.achievable.memory)

    def _latency(self) -> Latency:
        """Return AsyncFlow's own latencies, plus the time that weights spend on their way."""
        house, copied_s = Latency(), self._copy_s(COPY_OUT, self._weight_bytes / self.config.roles["actor"])
        if self.config.is_colocated and self.hands_over:
            return house
        # Trainer and receivers wait for a broadcast; agents fetch beside all that computes.
        broadcasts = self.config.weightsync.path == "broadcast"
        return replace(
            house,
            publish_s=house.publish_s + copied_s + (self._broadcast_s if broadcasts else 0.0),
            transfer_s=house.transfer_s + (0.0 if broadcasts else self._fetch_s),
            swap_s=house.swap_s + self._load_s,
        )

    @property
    def _broadcast_s(self) -> float:
        """The time in which all weights go from device to device (s)."""
        ranks = self.config.roles["actor"] + self.config.roles["rollout"]
        return self._weight_bytes / (self._bandwidth_gb_s(ranks) * 1e9 * self.device.achievable.link)

    @property
    def _fetch_s(self) -> float:
        """The time until the agents of all nodes have a version (s)."""
        # Each node fetches it once, over TCP. Nodes without a trainer share what the trainers' nodes can send: all of
        # them ask for the same buckets at the same time, so they have little to give to each other.
        devices = devices_of(self.config)
        if self._is_inside(devices):
            return 0.0
        a_node = self.device.devices_per_node
        nodes, sending = (-(-number // a_node) for number in (devices, self.config.roles["actor"]))
        share = max(1.0, (nodes - sending) / sending)
        return share * self._weight_bytes / (self.device.node_gb_s * 1e9 * self.device.achievable.link)

    @property
    def _load_s(self) -> float:
        """The time in which an instance takes a version from where it has arrived (s)."""
        size = self._weight_bytes / self.config.ranks_per_copy("rollout")
        if self.config.weightsync.path == "broadcast":  # it is on the device
            return self._written_s(size)
        return self._copy_s(COPY_IN, size)

    def decode_s(self, responses: int, tensor: int) -> float:
        """Return the duration of a decode step, which adds one token to each of `responses` (s)."""
        model, device, number, drawing = self.model, self.device, self._rollout_number, self._drawing_parameters
        reduce_s = self.reduced_s(responses, tensor)
        if self.profile is not None:
            alone_s = self.profile.decode_s(responses, self._context)
            whole_s = min(device.step_overhead_s, alone_s)  # overhead that each rank pays in full
            return whole_s + (alone_s - whole_s) / tensor + reduce_s
        read = number * drawing + responses * self._context * model.cache_bytes(number, tensor) * tensor
        memory_s = read / tensor / (device.memory_gb_s * 1e9 * device.achievable.memory * self._share)
        compute_s = 2 * drawing * responses / tensor / (self._peak_flops(number) * device.achievable.forward)
        return max(memory_s, compute_s) + reduce_s + device.step_overhead_s

    def reduced_s(self, responses: int, tensor: int) -> float:
        """Return the duration of a decode step's all-reduces (s)."""
        size = responses * self.model.hidden_size * self._rollout_number
        return 2 * self.model.num_layers * self._all_reduce_s(size, tensor)

    def _slots(self) -> int:
        """Return how many responses of mean length fit an instance at once, at most `rollout.batch_size`."""
        config = self.config
        if config.rollout.engine != "vllm":
            return config.rollout.batch_size
        a_token = self.model.cache_bytes(self._rollout_number, config.ranks_per_copy("rollout"))
        if config.vllm.kv_cache_gb is not None:
            room = config.vllm.kv_cache_gb * 1e9
        else:
            parts = memory_of_roles(config, self.model)["rollout"]
            held = parts["weights"] + parts.get("adapter", 0)
            room = config.vllm.gpu_memory_utilization * self.device.memory_gb * 1e9 - held
        return max(1, min(config.rollout.batch_size, int(room / (self._context * a_token))))

    def train(self, role: str, training: ActorConfig) -> Work:
        """Return the work of a micro-batch on one replica of a role that trains."""
        scoring, models = self._train_sharing(role, training), self._num_models(role)
        shared = self._train_sharing(role, training, micro_batches=self._micro_batches_in_a_row(role, training))
        # A backward pass costs two forwards; gradient checkpointing repeats the forward.
        forwards = 2 if training.gradient_checkpointing else 1
        passes = (forwards + 2) * models
        rate = shared.parts * self._peak_flops(shared.number) * self.device.achievable.train
        work = Work(token_s=passes * 2 * self.model.num_parameters / rate, squared_s=passes * self._attention / rate)
        if self.profile is not None:
            work = self.profile.whole_model_work(TRAIN, shared_prompt=training.shared_prompt).scaled_by(
                models, parts=shared.parts
            )
        if role == "actor" and self.config.lora is not None:
            adapted = (passes - 1) / passes + self._trained("actor").total / self.model.num_parameters
            work = replace(work, token_s=adapted * work.token_s)
        ranks = self.config.roles[role]
        # FSDP2 gathers the weights for forward and again for backward, then reduces float32 gradients. This overlaps
        # with computing, so it is a lower limit and not an addition.
        floor_s = 2 * shared.gathered_s
        if self._engine(role) == "fsdp" and ranks > 1:
            size = training.fsdp_size or ranks
            reduced = 4 * self._trained(role).total
            floor_s += self._exchange_s("reduce_scatter", reduced, size)
            own, replicas = reduced / size, ranks // size
            for part_of_all_reduce in ("reduce_scatter", "all_gather") if replicas > 1 else ():
                floor_s += self._exchange_s(part_of_all_reduce, own, replicas, spread=ranks)
        moved_s = (forwards + 1) * models * shared.moved_s / (1 - shared.bubble)
        work = replace(work, token_s=work.token_s + moved_s, floor_s=models * floor_s)
        return work + self._forward_work(scoring).scaled_by(self._copies_scored) if role == "actor" else work

    def _exchanged_s(self, tensor: int, context: int, stages: int) -> float:
        """Return the time that tensor and context parallelism take per token and pass, for one-byte numbers (s)."""
        model = self.model
        reduced_s = 2 * self._byte_s("all_reduce", tensor, tensor) * model.hidden_size
        heads = model.num_heads // tensor + math.lcm(max(1, model.num_kv_heads // tensor), context)
        shared_s = 2 * self._byte_s("all_to_all", context, tensor * context) * heads * model.head_dim
        return model.num_layers / stages * (reduced_s + shared_s) / context

    def _byte_s(self, name: str, ranks: int, spread: int) -> float:
        """Return the time of a large collective per byte of a rank, with its ranks among `spread` neighbours (s)."""
        share, size = (ranks - 1) / ranks, EXCHANGED[-1]
        measured = self.profile.exchange_s(name, size) if self.profile and self._is_inside(spread) else None
        if measured is None or self.profile is None:
            times = 2 if name == "all_reduce" else 1  # a reduce-scatter, then an all-gather
            return times * share / (self._bandwidth_gb_s(spread) * 1e9 * self.device.achievable.link)
        # The profile measured another number of ranks; (ranks - 1) / ranks of the bytes move.
        number = self.profile.num_ranks
        return measured / (size / number) * share * number / (number - 1)

    def _samples_together(self) -> float:
        """Return the approximate number of samples in a micro-batch."""
        actor, mean = self.config.actor, self.workload
        size = self.config.schedule.n_samples_per_prompt
        if not actor.max_tokens_per_micro_batch:
            return actor.micro_batch_size
        tokens = mean.mean_tokens + mean.prompt_tokens / (size if actor.shared_prompt else 1)
        fitting = actor.max_tokens_per_micro_batch / tokens
        return max(1.0, min(fitting, max(actor.micro_batch_size, size)))

    @property
    def _copies_scored(self) -> float:
        """Scoring passes over a micro-batch with `actor.tri_model`."""
        # The copies are the reference and old policies. The policy that the step started from needs no pass of its own
        # until the first update has changed the weights.
        updates, copies = self.config.actor.num_updates, self.config.num_policy_copies
        return copies - (1 / updates if copies and updates > 1 else 0.0)

    def _micro_batches_in_a_row(self, role: str, training: ActorConfig) -> float:
        """Return how many micro-batches of an update go through a replica's pipeline before it drains."""
        if self._engine(role) != "megatron" or isinstance(self.config.algorithm, OutsideConfig):
            return 1.0  # a loss of the user's may need all samples of a micro-batch (`Algorithm.per_sample`)
        rows = self.config.schedule.step_rows / training.num_mini_batches
        return max(1.0, rows / training.num_replicas(self.config.roles[role]) / self._samples_together())

    def _train_sharing(self, role: str, training: ActorConfig, *, micro_batches: float = 1.0) -> _Shared:
        """Return how ranks share a model that is trained; `micro_batches`: those in a pipeline before it drains."""
        number, ranks = DTYPE_BYTES[training.autocast], self.config.roles[role]
        if self._engine(role) == "megatron":
            samples = self._samples_together()
            return self._megatron_sharing(number, training.megatron, ranks, samples, micro_batches=micro_batches)
        size = training.fsdp_size or ranks
        return _Shared(number, gathered_s=self._exchange_s("all_gather", number * self.model.num_parameters, size))

    def _score_sharing(self, role: str) -> _Shared:
        """Return how ranks share a model that only scores."""
        config, ref = self.config, self.config.ref
        has_role = role in config.roles
        # A replica scores with the model that it trains.
        if role == "critic" or ((role == "actor_fwd" or config.reference_is_base) and not has_role):
            trained = "critic" if has_role else "actor"
            return self._train_sharing(trained, training_of(config)[trained])
        number = DTYPE_BYTES[config.model.dtype]
        # A reference that the actor hosts is whole on the lead rank of each replica.
        if not has_role or ref.engine not in ("fsdp", "megatron"):
            return _Shared(number)
        ranks = ref.ranks_per_copy
        if ref.engine == "megatron":
            return self._megatron_sharing(number, ref.megatron, ranks, ref.micro_batch_size)
        gathered_s = self._exchange_s("all_gather", number * self.model.num_parameters, ranks)
        return _Shared(number, ranks, gathered_s=gathered_s)

    def _reward_work(self) -> dict[str, Work]:
        reward, sizes = self.config.reward.model, self.reward_model
        if reward is None or sizes is None:
            return {}
        number, size = DTYPE_BYTES[reward.dtype], DTYPE_BYTES[reward.dtype] * sizes.num_parameters
        gathered_s = self._exchange_s("all_gather", size, reward.shards)
        estimated = replace(self, model=sizes, profile=None)
        return {"rewards": estimated._forward_work(_Shared(number, reward.shards, gathered_s=gathered_s))}

    def _megatron_sharing(
        self, number: int, megatron: MegatronConfig, ranks: int, samples: float, *, micro_batches: float = 1.0
    ) -> _Shared:
        layout = megatron.layout(ranks)
        tensor, context, stages = layout.tensor, layout.context, layout.stages
        pieces = micro_batches * min(megatron.pipeline_pieces, samples)
        moved_s = number * self._exchanged_s(tensor, context, stages)
        # As `workers.engines.megatron.schedule` orders them; arXiv 2104.04473, sections 2.2.1 and 2.2.2.
        bubble = (stages - 1) / (layout.chunks * pieces + stages - 1)
        return _Shared(number, tensor * context * stages, moved_s=moved_s, bubble=bubble)

    def _forward_work(self, shared: _Shared) -> Work:
        """Return the work of a forward pass without gradients."""
        rate = shared.parts * self._peak_flops(shared.number) * self.device.achievable.forward
        work = Work(token_s=2 * self.model.num_parameters / rate, squared_s=self._attention / rate)
        if self.profile is not None:
            work = self.profile.whole_model_work(FORWARD, shared_prompt=False).scaled_by(parts=shared.parts)
        moved_s = shared.moved_s / (1 - shared.bubble)
        return replace(work, token_s=work.token_s + moved_s, floor_s=shared.gathered_s)

    def _update_s(self, role: str) -> float:
        config, device, model = self.config, self.device, self.model
        ranks = config.roles[role]
        bytes_per_s = device.memory_gb_s * 1e9 * device.achievable.memory * self._share
        owned = (self._trained(role).total + (self._num_models(role) - 1) * model.num_parameters) / ranks
        exchanged_s = 0.0
        if self._engine(role) == "megatron":
            layout = config.actor.megatron.layout(ranks)
            number, own = DTYPE_BYTES[config.actor.autocast], self._trained(role).on_rank(layout.tensor) / layout.stages
            if config.lora is not None:
                number = 4
            copies = layout.replicas * layout.context
            owned = own / copies
            exchanged_s += self._exchange_s("reduce_scatter", 4 * own, copies, spread=ranks)
            exchanged_s += self._exchange_s("all_gather", number * own, copies, spread=ranks)
        update_s = 28 * owned / bytes_per_s if self.profile is None else self.profile.update_s(owned)
        return update_s + exchanged_s

    def _copy_s(self, name: str, size: float) -> float:
        """Return the time to copy `size` bytes between device and host (s)."""
        measured = self.profile.exchange_s(name, size) if self.profile is not None else None
        return size / (self.device.host_gb_s * 1e9 * self.device.achievable.link) if measured is None else measured

    def _exchange_s(self, name: str, size: float, ranks: int, *, spread: int = 0) -> float:
        """Return the time of a collective in which each rank starts or ends with `size` bytes (s)."""
        # `spread` says among how many neighbours the ranks are; 0: they are each other's neighbours.
        measured = None
        if self.profile is not None and self._is_inside(spread or ranks):
            measured = self.profile.exchange_s(name, size)
        if measured is None:
            return (
                size * (ranks - 1) / ranks / (self._bandwidth_gb_s(spread or ranks) * 1e9 * self.device.achievable.link)
            )
        # Scaled from the measured number of ranks: (ranks - 1) / ranks of the bytes move.
        number = self.profile.num_ranks if self.profile is not None else ranks
        return measured * (ranks - 1) / ranks * number / (number - 1)

    def _all_reduce_s(self, size: float, ranks: int) -> float:
        """Return the time of an all-reduce of `size` bytes inside a node (s)."""
        if ranks == 1:
            return 0.0
        measured = self.profile.exchange_s("all_reduce", size * self.profile.num_ranks) if self.profile else None
        if measured is not None:
            return measured
        moved = 2 * (ranks - 1) / ranks * size
        return self.device.hop_s + moved / (self.device.link_gb_s * 1e9 * self.device.achievable.link)

    def _num_models(self, role: str) -> int:
        """Models that a role trains: an actor without a critic role trains the critic, too."""
        return 2 if role == "actor" and self.config.algorithm.has_critic and "critic" not in self.config.roles else 1

    def _trained(self, role: str) -> Trained:
        return self._trained_by_actor if role == "actor" else Trained(self.model.num_parameters)

    @cached_property
    def _trained_by_actor(self) -> Trained:
        return self.model.trained_parameters(self.config.lora)

    def _engine(self, role: str) -> str:
        return "fsdp" if role == "critic" else self.config.actor.engine

    @property
    def _attention(self) -> float:
        return 2 * self.model.num_layers * self.model.num_heads * self.model.head_dim

    @cached_property
    def _context(self) -> float:
        """Mean number of tokens that a decoded token attends to: longer responses are decoded for longer."""
        mean = self.workload
        return mean.prompt_tokens + (mean.turns.read_tokens + mean.mean_square / mean.mean_tokens) / 2

    def _bandwidth_gb_s(self, ranks: int) -> float:
        return self.device.link_gb_s if self._is_inside(ranks) else self.device.network_gb_s

    def _is_inside(self, ranks: int) -> bool:
        """Whether `ranks` neighbours are in one node; ranks that share a machine always are."""
        return bool(self.device.shared_by) or ranks <= self.device.devices_per_node

    def _peak_flops(self, number: int) -> float:
        peaks = self.device.peak_tflops
        return (peaks.float32 if number == 4 else peaks.bfloat16) * 1e12 * self._share

    @property
    def _share(self) -> float:
        """A rank's share of the device while it computes."""
        return 1 / (self.at_full_speed or 1.0)

    @property
    def _rollout_number(self) -> int:
        return DTYPE_BYTES[self.config.vllm.dtype or self.config.model.dtype]

    @property
    def _drawing_parameters(self) -> int:
        """Parameters that a generator computes with."""
        return self.model.num_parameters + (self._trained("actor").total if self.config.sends_adapter else 0)

    @property
    def _weight_bytes(self) -> int:
        """Bytes of a version, as it travels."""
        return version_bytes(self.config, self.model.num_parameters, self._trained("actor"))
