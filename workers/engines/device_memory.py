"""Estimates what the engines keep in a rank's memory, from model sizes and the configuration. Pure, torch-free.

The check before a start, `--dry-run`, the planner and the doctor (of the host, where ranks compute on the CPU) use this
estimate. All sizes are bytes; reward models are not included.

Letters: P parameters, A those of an adapter (`lora`), L layers, D width, H and K query and key heads, d head dimension,
F width of the MLP, V vocabulary; T tokens of a micro-batch; c bytes of a number in the computation (4, or 2 with
`autocast: bfloat16`).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from workers.engines.lora import Trained, trained_parameters
from workers.settings.engines import ActorConfig, RefConfig, TeacherConfig, TrainingConfig
from workers.settings.lora import LoraConfig
from workers.settings.megatron import MegatronConfig, MegatronLayout
from workers.settings.run import RunConfig
from workers.settings.vllm import room_for_rank

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
LOGITS_TILE = 2**25  # logits that the head holds at a time (`workers.engines.packed_forward`)
# Context, library workspaces, communicator buffers: about 0.5 GB each on CUDA (an assumption, not measured).
RUNTIME = 10**9

Parts = dict[str, int]  # what takes memory -> bytes
# Role -> the sizes of its models that are not the policy: a reference (`ref.path`), whoever has it, and teachers.
OtherModels = Mapping[str, "Sequence[ModelSizes]"]
# Parts that do not depend on rows and tokens. They follow from the number of parameters, whatever the model's sizes.
STATE = ("weights", "adapter", "lora_A", "bfloat16 copy", "gradients", "moments", "masters", "critic", "policy copies",
         "reference", "next version")  # fmt: skip


@dataclass(frozen=True)
class ModelSizes:
    """Sizes of a Llama-like decoder (RMSNorm, rotary positions, gated MLP), as in config.json."""

    num_parameters: int
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    vocab_size: int
    tied: bool

    @staticmethod
    def unknown(num_parameters: int) -> "ModelSizes":
        """Return what stands for a model of which only the number of parameters is known."""
        return ModelSizes(num_parameters, 1, 0, 0, 0, 0, 0, 0, tied=True)

    @staticmethod
    def from_config(config: Mapping[str, Any], num_parameters: int | None = None) -> "ModelSizes | None":
        """Read config.json; None: it lacks the usual sizes, so no estimate is possible.

        Without `num_parameters` they follow from the sizes, except for biases and norms of heads.
        """
        config = config.get("text_config") or config
        try:
            hidden, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
            sizes = ModelSizes(
                num_parameters=num_parameters or 0,
                num_layers=int(config["num_hidden_layers"]),
                hidden_size=hidden,
                num_heads=heads,
                num_kv_heads=int(config.get("num_key_value_heads") or heads),
                head_dim=int(config.get("head_dim") or hidden // heads),
                ffn_size=int(config["intermediate_size"]),
                vocab_size=int(config["vocab_size"]),
                tied=bool(config.get("tie_word_embeddings", False)),
            )
        except (KeyError, TypeError, ValueError, ZeroDivisionError):
            return None
        if num_parameters is not None:
            return sizes
        attention = 2 * hidden * (heads + sizes.num_kv_heads) * sizes.head_dim
        layer = attention + 3 * hidden * sizes.ffn_size + 2 * hidden
        return replace(sizes, num_parameters=sizes.num_layers * layer + hidden + sizes.embedding_and_head)

    @property
    def embedding_parameters(self) -> int:
        """Parameters of the input embedding; the head has as many."""
        return self.vocab_size * self.hidden_size

    @property
    def embedding_and_head(self) -> int:
        return self.embedding_parameters * (1 if self.tied else 2)

    @property
    def layer_parameters(self) -> int:
        return max(0, self.num_parameters - self.embedding_and_head) // self.num_layers

    @property
    def outside_parameters(self) -> int:
        """Parameters of the embeddings and the last norm."""
        return self.num_parameters - self.num_layers * self.layer_parameters

    def trained_parameters(self, lora: LoraConfig | None) -> Trained:
        """Return how many parameters are trained; those of an adapter if its targets have the usual names.
        Raises ConfigError for targets that such a model lacks."""
        if lora is None:
            return Trained(self.num_parameters)
        width, heads, keys = self.hidden_size, self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        layer = {
            "self_attn.q_proj": (heads, width),
            "self_attn.k_proj": (keys, width),
            "self_attn.v_proj": (keys, width),
            "self_attn.o_proj": (width, heads),
            "mlp.gate_proj": (self.ffn_size, width),
            "mlp.up_proj": (self.ffn_size, width),
            "mlp.down_proj": (width, self.ffn_size),
        }
        layers = range(self.num_layers)
        shapes: dict[str, tuple[int, ...]] = {
            f"model.layers.{k}.{name}.weight": shape for k in layers for name, shape in layer.items()
        }
        norms = ("input_layernorm", "post_attention_layernorm")
        shapes |= {f"model.layers.{k}.{name}.weight": (width,) for k in layers for name in norms}
        shapes |= {"model.norm.weight": (width,), "model.embed_tokens.weight": (self.vocab_size, width)}
        return trained_parameters(shapes | {"lm_head.weight": (self.vocab_size, width)}, lora)

    def cache_bytes(self, number: int, tensor: int = 1) -> int:
        """Return the bytes of a token's keys and values on one of `tensor` ranks, with `number` bytes each."""
        return 2 * self.num_layers * max(1, self.num_kv_heads // tensor) * self.head_dim * number


def memory_of_roles(
    config: RunConfig,
    model: ModelSizes,
    trained: Trained | None = None,
    others: OtherModels = MappingProxyType({}),
    *,
    has_ipc: bool = False,
) -> dict[str, Parts]:
    """Return what the fullest rank of each role has on its device; nothing for simulated and users' engines.

    Args:
        trained: None: `ModelSizes.trained_parameters`.
        others: without a role, its models are as large as the policy.
        has_ipc: processes share memory of the devices (`Vendor.has_ipc`).
    """
    trained = model.trained_parameters(config.lora) if trained is None else trained
    roles: dict[str, Parts] = {}
    copy = DTYPE_BYTES[config.model.dtype]
    longest = config.longest_sample
    references = others.get("ref", (model,))
    for role, ranks in config.roles.items():
        if role == "actor" and config.actor.engine in ("fsdp", "megatron"):
            roles[role] = _actor(config, model, ranks, longest, trained, references)
        elif role == "critic":
            roles[role] = fsdp_memory(model, config.critic, ranks, _tokens(config.critic, longest))
        elif role in ("ref", "actor_fwd") and config.ref.engine in ("hf", "fsdp", "megatron"):
            held = references if role == "ref" else (model,)
            roles[role] = _scorer(held, copy, longest, config.ref)
        elif role == "teacher":
            roles[role] = _scorer(others.get(role, (model,)), copy, longest, config.teacher)
        elif role in ("rollout", "evaluate"):
            sampling = config.rollout if role == "rollout" else config.evaluate.sampling(config.rollout)
            tokens = config.data.max_prompt_tokens + sampling.max_response_tokens
            if sampling.engine == "hf":
                prompts = config.data.max_prompt_tokens
                roles[role] = hf_memory(model, copy, sampling.batch_size, tokens, prompt_tokens=prompts)
            elif sampling.engine == "vllm":
                number = DTYPE_BYTES[config.vllm.dtype or config.model.dtype]
                roles[role] = vllm_memory(model, number, config.ranks_per_copy(role), tokens)
    if config.sends_adapter:
        follows = config.algorithm.ref_update_interval > 0
        for role in roles.keys() & {"rollout", "evaluate", "actor_fwd", *(("ref",) if follows else ())}:
            roles[role]["adapter"] = _received_adapter(config, role, trained)
    every = {"runtime": RUNTIME}
    version = version_bytes(config, model.num_parameters, trained)
    for role in config.colocated:
        # Roles that take turns never have their weights on a device at one time. Of the others there are contexts and
        # communicators, and each trainer rank's part of what it published (`weightsync.device_copies`).
        if role in roles:
            roles[role]["asleep"] = (len(config.colocated) - 1) * RUNTIME
            if has_ipc:
                roles[role]["handed over"] = version // config.roles["actor"]
    if has_ipc and config.is_colocated and "rollout" in roles:
        # A bucket of each trainer rank (together no more than the version), the one that is read, and the next one.
        bucket = config.weightsync.bucket_bytes
        roles["rollout"]["buckets"] = min(config.roles["actor"] * bucket, version) + 2 * bucket
    # Both ends of a broadcast: two buckets, and the products of the one being summed.
    if config.weightsync.path == "broadcast" and "actor" in config.roles:
        every["buckets"] = 3 * config.weightsync.bucket_bytes
        # They compute with one version while the next one arrives.
        if "rollout" in roles:
            roles["rollout"]["next version"] = version // config.ranks_per_copy("rollout")
        for role in {"actor_fwd", "ref"} & roles.keys():
            if role == "actor_fwd" or config.algorithm.ref_update_interval:
                whole = wire_bytes(config) * roles[role]["weights"] // copy
                roles[role]["next version"] = version if config.sends_adapter else whole  # ranks have all of it
    return {role: parts | every for role, parts in roles.items()}


def version_bytes(config: RunConfig, num_parameters: int, trained: Trained) -> int:
    """Return the size of one version of the weights on the wire; `trained`: of the actor."""
    return wire_bytes(config) * (trained.total if config.sends_adapter else num_parameters)


def wire_bytes(config: RunConfig) -> int:
    """Return the bytes of one number of a version."""
    return DTYPE_BYTES[config.weightsync.dtype or config.model.dtype]


def state_of_roles(
    config: RunConfig, num_parameters: int, trained: Trained, others: OtherModels = MappingProxyType({})
) -> dict[str, int]:
    """Return how much state all ranks of each role have together: in host memory where they compute on the CPU, or
    while they sleep. `trained`: of the actor; `others`: as in `memory_of_roles`."""
    found = memory_of_roles(config, ModelSizes.unknown(num_parameters), trained, others)
    return {role: config.roles[role] * _state(parts) for role, parts in found.items()}


def fsdp_memory(
    model: ModelSizes,
    training: TrainingConfig,
    ranks: int,
    tokens: int,
    *,
    trained: Trained | None = None,
    merges: bool = False,
) -> Parts:
    """Return what an FSDP2 rank has; `trained`: of an adapter, beside which the model is frozen; `merges`: versions are
    whole weights."""
    #     several ranks   weights 4P/R, gradients 4P/R, AdamW's moments 8P/R (R ranks that share a copy)
    #                     gathered: the root (embeddings), kept from forward to backward, and two layers, c each
    #                     reduced: the gradient of the largest unit as computed, c, and in float32
    #     one rank        16P; with bfloat16 a copy of the weights to compute with (`Bfloat16Twin`), 2P
    #     an adapter      weights (c P + 4A)/R, gradients 4A/R, moments 8A/R; no copy; only A's gradients are reduced
    #                     lora_A: 4 bytes a number of every A, if several ranks merge their rows
    #
    # Source: torch 2.13, `torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py`; Zhao et al. 2023, arXiv
    # 2304.11277.
    number, size = DTYPE_BYTES[training.autocast], model.num_parameters
    several, ranks = ranks > 1, training.fsdp_size or ranks
    updated = size if trained is None else trained.total
    weights = 4 * size if trained is None else number * size + 4 * trained.total
    parts = {"weights": weights // ranks, "gradients": 4 * updated // ranks, "moments": 8 * updated // ranks}
    root = model.outside_parameters
    if several:
        parts["gathered"] = number * (root + 2 * model.layer_parameters)
        largest = max(root, model.layer_parameters) if trained is None else trained.total // model.num_layers
        parts["reduced"] = (number + 4) * largest
        if trained is not None and merges:
            parts["lora_A"] = 4 * trained.all_a
    elif number == 2 and trained is None:
        parts["bfloat16 copy"] = number * size
    layers = model.num_layers
    return parts | _passes(model, number, tokens, layers=layers, recomputed=training.gradient_checkpointing)


def megatron_memory(
    model: ModelSizes, actor: ActorConfig, ranks: int, tokens: int, *, longest: int = 0, trained: Trained | None = None
) -> Parts:
    """Return what a rank of Megatron's first or last stage has, whichever is larger; `longest`: tokens of a sample,
    `trained`: of an adapter, beside which the model is frozen."""
    #     p = (P - embeddings) / (TP x PP) + embeddings / TP     weights c p, gradients 4 p (float32, `main_grad`)
    #     moments 8 p / n and, with bfloat16, masters 4 p / n    the distributed optimizer divides by n = CP x replicas
    #     an adapter: weights c p + 4 a, gradients 4 a, moments 8 a / n, no masters; a is 1 / PP of what a
    #     tensor-parallel rank has (`Trained.on_rank`)
    #
    # Source: megatron-core 0.16.1, `core/optimizer/distrib_optimizer.py`; Rajbhandari et al. 2020, arXiv 1910.02054.
    layout, number = actor.megatron.layout(ranks), DTYPE_BYTES[actor.autocast]
    size = _megatron_parameters(model, layout)
    divided = layout.context * layout.replicas
    tokens = max(tokens, _pipeline_tokens(actor.megatron, tokens, longest))
    if trained is None:
        parts = {"weights": number * size, "gradients": 4 * size, "moments": 8 * size // divided}
        if number == 2:
            parts["masters"] = 4 * size // divided
    else:
        own = trained.on_rank(layout.tensor) // layout.stages
        parts = {"weights": number * size + 4 * own, "gradients": 4 * own, "moments": 8 * own // divided}
    return parts | _passes(
        model,
        number,
        -(-tokens // layout.context),
        layers=model.num_layers // layout.stages,
        recomputed=actor.gradient_checkpointing,
        tensor=layout.tensor,
    )


def _scorer(models: Sequence[ModelSizes], number: int, longest: int, scoring: RefConfig | TeacherConfig) -> Parts:
    """Return what a rank has of models that compute one after the other: all weights, and the rest of the largest."""
    divided = scoring.shards if scoring.engine == "fsdp" else 1
    tokens = -(-scoring.micro_batch_size // divided) * longest
    whole: Parts = {}
    for model in models:
        for name, size in frozen_memory(model, number, tokens, scoring).items():
            before = whole.get(name, 0)
            whole[name] = before + size if name == "weights" else max(before, size)
    return whole


def frozen_memory(model: ModelSizes, number: int, tokens: int, ref: RefConfig | TeacherConfig) -> Parts:
    """Return what a rank has of a model that only scores `tokens`: weights, one layer's activations, head tiles."""
    size, gathered, tensor = model.num_parameters, 0, 1
    # fsdp: weights c P / ranks; gathered: the root and two layers, c each. megatron: weights c p, p as in
    # `megatron_memory`; the MLP's width / TP; tokens / CP.
    if ref.engine == "fsdp":
        gathered = number * (model.outside_parameters + 2 * model.layer_parameters)
        size = size // ref.shards
    elif isinstance(ref, RefConfig) and ref.engine == "megatron":
        layout = ref.megatron.layout(ref.megatron.ranks_per_copy)
        size, tensor, tokens = _megatron_parameters(model, layout), layout.tensor, -(-tokens // layout.context)
    parts = {
        "weights": number * size,
        "gathered": gathered,
        # What a layer's products read is gathered over tensor-parallel ranks, what lies between is divided.
        "activations": tokens * number * (model.hidden_size + (3 * model.hidden_size + 3 * model.ffn_size) // tensor),
        "logits": _tile_bytes(number),
    }
    return {name: size for name, size in parts.items() if size}


def hf_memory(model: ModelSizes, number: int, responses: int, tokens: int, *, prompt_tokens: int) -> Parts:
    """Return what the `hf` engine has with all responses at their longest."""
    return {
        "weights": number * model.num_parameters,
        "KV cache": responses * tokens * model.cache_bytes(number),
        # One layer of the step in which all prompts enter at once.
        "activations": responses * prompt_tokens * number * (4 * model.hidden_size + 3 * model.ffn_size),
        # Four float32 numbers per logit of a step.
        "logits": responses * model.vocab_size * 4 * 4,
    }


def vllm_memory(model: ModelSizes, number: int, tensor: int, tokens: int) -> Parts:
    """Return the minimum with which vLLM starts: its share of the weights, and the cache of one longest sequence."""
    # vLLM then takes `vllm.gpu_memory_utilization` of the device, so that more responses run at a time.
    return {"weights": number * model.num_parameters // tensor, "KV cache": tokens * model.cache_bytes(number, tensor)}


def _received_adapter(config: RunConfig, role: str, trained: Trained) -> int:
    """Return the bytes of the adapter on a rank that gets it as a version: beside the base, in its element type."""
    lora, size = config.lora, trained.total
    if lora is None or not config.is_vllm(role):
        return DTYPE_BYTES[config.model.dtype] * size
    # vLLM makes room for a rank that it knows, and divides A and B as Megatron does.
    number = DTYPE_BYTES[config.vllm.dtype or config.model.dtype]
    return number * trained.on_rank(config.ranks_per_copy(role)) * room_for_rank(lora.rank) // lora.rank


def _actor(
    config: RunConfig, model: ModelSizes, ranks: int, longest: int, trained: Trained, references: Sequence[ModelSizes]
) -> Parts:
    """Return what an actor rank has, including models that it hosts because they have no role of their own."""
    actor, tokens = config.actor, _tokens(config.actor, longest)
    of_adapter = None if config.lora is None else trained
    if actor.engine == "megatron":
        parts = megatron_memory(model, actor, ranks, tokens, longest=longest, trained=of_adapter)
    else:
        parts = fsdp_memory(model, actor, ranks, tokens, trained=of_adapter, merges=not config.sends_adapter)
    if config.algorithm.has_critic and "critic" not in config.roles:
        parts["critic"] = _state(fsdp_memory(model, config.critic, ranks, tokens))
    if actor.tri_model:
        own = model.num_parameters // ranks
        if actor.engine == "megatron":
            own = _megatron_parameters(model, actor.megatron.layout(ranks))
        copies = config.num_old_policies if config.reference_is_base else config.num_policy_copies
        parts["policy copies"] = copies * DTYPE_BYTES[actor.autocast] * own
    elif config.algorithm.kl_coef > 0 and "ref" not in config.roles and not config.reference_is_base:
        held = sum(reference.num_parameters for reference in references)
        parts["reference"] = DTYPE_BYTES[config.model.dtype] * held
    return {name: size for name, size in parts.items() if size}


def _state(parts: Parts) -> int:
    return sum(size for name, size in parts.items() if name in STATE)


def _megatron_parameters(model: ModelSizes, layout: MegatronLayout) -> int:
    """Return the parameters of a rank of Megatron's first or last stage, whichever has more."""
    held = model.outside_parameters if layout.stages == 1 else model.embedding_parameters
    return (model.num_layers // layout.stages * model.layer_parameters + held) // layout.tensor


def _pipeline_tokens(megatron: MegatronConfig, tokens: int, longest: int) -> int:
    """Return the tokens whose activations the first stage keeps between the passes, if pieces go back one by one."""
    # Stages keep whole pieces (`workers.engines.megatron.schedule`), each a share of a micro-batch or a sample.
    stages, chunks = megatron.pipeline_parallel, megatron.virtual_pipeline
    kept = stages if chunks == 1 else (2 * (stages - 1) + (chunks - 1) * stages + 1) / chunks
    piece = max(-(-tokens // megatron.pipeline_pieces), min(longest, tokens))
    return math.ceil(kept * piece) if stages > 1 else tokens


def _tokens(training: TrainingConfig, longest: int) -> int:
    """Return the most tokens of a micro-batch; a sample longer than the budget gets one to itself."""
    budget = training.max_tokens_per_micro_batch
    return max(budget, longest) if budget else training.micro_batch_size * longest


def _passes(
    model: ModelSizes, number: int, tokens: int, *, layers: int, recomputed: bool, tensor: int = 1
) -> dict[str, int]:
    """Return what forward and backward keep."""
    # A layer keeps, times T / TP: 2 D (4 + 2 c) for both norms (input in float32, normalized, scaled), 2 c (H + K) d
    # for q, k, v and the attention's output, and 4 c F for gate, up, activation and product. With recomputation: each
    # layer's input, T D c / TP, and a single layer. Tensor-parallel ranks divide all of it (sequence parallelism:
    # Korthikanti et al. 2022, arXiv 2205.05198, section 4.2.2); products gather their input, one at a time.
    whole = model.hidden_size * 2 * (4 + 2 * number)
    heads = number * 2 * (model.num_heads + model.num_kv_heads) * model.head_dim
    layer = tokens * (whole + heads + 4 * number * model.ffn_size) // tensor
    inputs = layers * tokens * model.hidden_size * number // tensor
    gathered = tokens * model.hidden_size * number if tensor > 1 else 0
    return {
        "activations": (inputs + layer if recomputed else layers * layer) + gathered,
        "logits": _logits_bytes(model, number, tokens=tokens),
    }


def _logits_bytes(model: ModelSizes, number: int, *, tokens: int) -> int:
    """Return what the head takes in training."""
    # A tile with its exponentials, which the entropies need, and of T tokens the hidden states and their gradient,
    # which is also summed in float32.
    return _tile_bytes(number) + 4 * LOGITS_TILE + tokens * model.hidden_size * (2 * number + 4)


def _tile_bytes(number: int) -> int:
    """Return the size of a tile: float32, and the product in bfloat16 from which it is converted."""
    return LOGITS_TILE * (4 if number == 4 else 4 + number)
