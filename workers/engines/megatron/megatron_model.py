"""Builds Megatron's model, data-parallel wrapper and distributed optimizer. Imports Megatron inside functions only.

Source: megatron-core 0.16.1.
"""

from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import silu

from asyncflow.errors import ConfigError
from workers.engines.megatron.adapter import MegatronAdapter
from workers.engines.megatron.megatron_context import MegatronPackedAttention
from workers.engines.megatron.names import MegatronGeometry
from workers.engines.npu_kernels import rms_norm
from workers.settings.engines import ActorConfig
from workers.settings.megatron import DenseModel, MegatronLayout


@dataclass(frozen=True)
class ModelChunk:
    """Neighbouring layers that one rank has, with the embedding or the head at an end of the model."""

    network: Any  # a bare GPTModel
    geometry: MegatronGeometry
    # The network in Megatron's DistributedDataParallel, whose buffers hold parameters and gradients; None if the model
    # is not trained.
    wrapped: Any = None


@dataclass(frozen=True)
class MegatronParts:
    """One rank's model and optimizer."""

    chunks: tuple[ModelChunk, ...]  # of this rank's pipeline stage, in the model's order
    layout: MegatronLayout  # of all ranks
    context: dist.ProcessGroup | None  # the ranks that share tokens with this one; None: it has all
    optimizer: Any = None  # the one DistributedOptimizer of all chunks, or None
    adapter: MegatronAdapter | None = None  # what is trained; None: all weights, or nothing

    @property
    def geometry(self) -> MegatronGeometry:
        """Sizes; `layer_offset` is that of the first chunk."""
        return self.chunks[0].geometry


def prepare_megatron(device: torch.device) -> None:
    """Import what must precede Megatron: on NPU MindSpeed, which patches it.
    Raises ConfigError if this process has no device that Megatron computes on."""
    if device.type == "npu":
        import mindspeed.megatron_adaptor  # noqa: F401 - patches Megatron when it is imported
    try:
        torch.cuda.current_device()  # Megatron calls it; torch_npu implements it, too
    except (AssertionError, RuntimeError) as error:
        raise ConfigError(
            f"actor.engine: megatron computes on CUDA and NPU, not on {device}; set actor.engine to fsdp"
        ) from error


# The ranks that share tokens with this one. Megatron, which takes them for data-parallel replicas, has no such group.
_context_group: dist.ProcessGroup | None = None


def join_groups(layout: MegatronLayout, *, timeout_s: float, seed: int) -> dist.ProcessGroup | None:
    """Create Megatron's process groups and random states; collective over the default group.

    Returns the ranks that share tokens with this one; None: it has all.
    """
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    if not parallel_state.model_parallel_is_initialized():  # an earlier engine of this process may have done it
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=layout.tensor,
            pipeline_model_parallel_size=layout.stages,
            virtual_pipeline_model_parallel_size=layout.chunks if layout.chunks > 1 else None,
            distributed_timeout_minutes=max(1, round(timeout_s / 60)),
            create_gloo_process_groups=False,
        )
        model_parallel_cuda_manual_seed(seed)
    global _context_group
    own: dist.ProcessGroup | None = None
    if layout.context == 1:
        _context_group = None
        return None
    timeout = timedelta(seconds=timeout_s)
    for ranks in layout.context_ranks():  # every rank must create every group
        group = dist.new_group(list(ranks), timeout=timeout)
        own = group if dist.get_rank() in ranks else own
    _context_group = own
    return own


def row_groups(within_stage: bool) -> tuple[dist.ProcessGroup, ...]:
    """Return Megatron's groups in the order in which a buffer passes them on its way from the first rank of a replica,
    or of a stage, to this one; `join_groups` comes first.

        pipeline   the first rank of every stage          then   context   its ranks with the first share of every layer
        then   tensor   all ranks
    """
    from megatron.core import parallel_state

    pipeline = parallel_state.get_pipeline_model_parallel_group()
    tensor = parallel_state.get_tensor_model_parallel_group()
    passed, reached = [], True  # from the last group to the first: does this rank hand the buffer on?
    for group in (tensor, _context_group, None if within_stage else pipeline):
        if group is None or dist.get_world_size(group) == 1:
            continue
        if reached:
            passed.append(group)
        reached = reached and dist.get_group_rank(group, dist.get_rank()) == 0
    return tuple(reversed(passed))


def build_network(
    model: DenseModel,
    actor: ActorConfig,
    layout: MegatronLayout,
    context: dist.ProcessGroup | None,
    device: torch.device,
) -> MegatronParts:
    """Return this rank's part of a model without weights or optimizer; `join_groups` comes first."""
    config = _transformer_config(model, actor, layout, device)
    chunks = (_build_chunk(model, actor, layout, config, chunk, device) for chunk in range(layout.chunks))
    return MegatronParts(tuple(chunks), layout, context)


def _build_chunk(
    model: DenseModel, actor: ActorConfig, layout: MegatronLayout, config: Any, chunk: int, device: torch.device
) -> ModelChunk:
    place = layout.place(dist.get_rank())
    network: Any = _network(model, config, layout, place.stage, chunk, device)
    if layout.tensor > 1 and network.pre_process:
        network.embedding.word_embeddings.forward = partial(_embed, network.embedding.word_embeddings)
    if actor.autocast == "bfloat16":
        network.bfloat16()  # Megatron builds norms in float32
    number = chunk * layout.stages + place.stage
    geometry = MegatronGeometry(
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        num_heads=model.num_heads,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        ffn_hidden_size=model.ffn_hidden_size,
        vocab_size=model.vocab_size,
        tp_size=layout.tensor,
        tp_rank=place.tensor,
        layer_offset=number * (model.num_layers // (layout.stages * layout.chunks)),
        tied=model.tied,
    )
    return ModelChunk(network, geometry)


def build_megatron(
    model: DenseModel,
    actor: ActorConfig,
    layout: MegatronLayout,
    context: dist.ProcessGroup | None,
    device: torch.device,
    adapter: MegatronAdapter | None = None,
) -> MegatronParts:
    """Return this rank's part of a trained model, without weights; collective. `join_groups` comes first.

    With `adapter` the model is frozen beside it, so that buffers of gradients and optimizer are the adapter's alone.
    """
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    half = actor.autocast == "bfloat16" and adapter is None  # an adapter is in float32: its own master weights
    parts = build_network(model, actor, layout, context, device)
    for chunk in parts.chunks if adapter is not None else ():
        assert adapter is not None
        adapter.attach(chunk.network, chunk.geometry, recomputes=actor.gradient_checkpointing)
    sharded = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True)
    chunks = tuple(
        replace(chunk, wrapped=DistributedDataParallel(chunk.network.config, sharded, chunk.network))
        for chunk in parts.chunks
    )
    settings = OptimizerConfig(
        optimizer="adam",
        lr=actor.lr,
        weight_decay=0.0,  # the engine does it
        adam_beta1=actor.betas[0],
        adam_beta2=actor.betas[1],
        adam_eps=actor.eps,
        bf16=half,
        params_dtype=torch.bfloat16 if half else torch.float32,
        use_distributed_optimizer=True,
        clip_grad=0.0,  # the engine does it, together with the scale
    )
    # No overrides: a single group, without weight decay.
    wrapped = [chunk.wrapped for chunk in chunks]
    chained = get_megatron_optimizer(settings, wrapped, config_overrides={}, use_gloo_process_groups=False)
    return replace(parts, chunks=chunks, optimizer=chained.chained_optimizers[0], adapter=adapter)


def _leave(weight: Tensor) -> Tensor:
    return weight


def _transformer_config(model: DenseModel, actor: ActorConfig, layout: MegatronLayout, device: torch.device) -> Any:
    from megatron.core.transformer.transformer_config import TransformerConfig

    dtype = torch.bfloat16 if actor.autocast == "bfloat16" else torch.float32
    recompute: dict[str, Any] = {}
    if actor.gradient_checkpointing:
        recompute = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    return TransformerConfig(
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        num_attention_heads=model.num_heads,
        num_query_groups=model.num_kv_heads,
        kv_channels=model.head_dim,
        ffn_hidden_size=model.ffn_hidden_size,
        normalization="RMSNorm",
        layernorm_epsilon=model.norm_eps,
        activation_func=silu,
        gated_linear_unit=True,
        add_bias_linear=False,
        add_qkv_bias=model.qkv_bias,
        qk_layernorm=model.qk_norm,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.stages,
        virtual_pipeline_model_parallel_size=layout.chunks if layout.chunks > 1 else None,
        sequence_parallel=layout.tensor > 1,
        pipeline_dtype=dtype,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        # Weights are loaded later. Initialization must still run: Megatron marks tensor-parallel parameters in it.
        init_method=_leave,
        output_layer_init_method=_leave,
        embedding_init_method=_leave,
        calculate_per_token_loss=True,  # gradients are summed over replicas, not averaged
        gradient_accumulation_fusion=False,  # needs Apex
        # torch.compile's kernel on CUDA, `npu_swiglu` on Ascend, where MindSpeed replaces it.
        bias_activation_fusion=device.type in ("cuda", "npu"),
        bias_dropout_fusion=device.type in ("cuda", "npu"),
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        **recompute,
    )


class SequenceNorm(nn.RMSNorm):
    """RMSNorm of some of a micro-batch's tokens: its gradient is summed over the tensor-parallel ranks.

    Takes the place of Megatron's `WrappedTorchNorm`, which refuses sequence parallelism, and of MindSpeed's `PTNorm`.
    """

    def __init__(self, config: Any, hidden_size: int, eps: float, **_: object) -> None:
        super().__init__(hidden_size, eps=eps)
        weight: Any = self.weight
        weight.sequence_parallel = config.sequence_parallel  # read by `finalize_model_grads`


class FusedSequenceNorm(SequenceNorm):
    """The same on an NPU, by its kernel."""

    def __init__(self, config: Any, hidden_size: int, eps: float, **others: object) -> None:
        super().__init__(config, hidden_size, eps, **others)
        self._epsilon = eps

    def forward(self, hidden: Tensor) -> Tensor:
        return rms_norm(hidden, self.weight, self._epsilon)


def norm_on(device_type: str) -> type[SequenceNorm]:
    return FusedSequenceNorm if device_type == "npu" else SequenceNorm


def _embed(embedding: Any, tokens: Tensor) -> Tensor:
    """Look up [1, t] tokens, each on the rank that holds it: [t / TP, 1, W], this rank's share of the tokens."""
    # Megatron's `VocabParallelEmbedding.forward` writes through masks, for which the host waits, here and in the
    # backward pass.
    from megatron.core.tensor_parallel import reduce_scatter_to_sequence_parallel_region

    place = tokens - embedding.vocab_start_index
    outside = (place < 0) | (tokens >= embedding.vocab_end_index)
    found = nn.functional.embedding(place.masked_fill(outside, 0), embedding.weight)
    found = found.masked_fill(outside.unsqueeze(-1), 0.0)
    whole: Tensor = reduce_scatter_to_sequence_parallel_region(
        found.transpose(0, 1).contiguous(), group=embedding.tp_group
    )
    return whole


def _network(
    model: DenseModel, config: Any, layout: MegatronLayout, stage: int, chunk: int, device: torch.device
) -> nn.Module:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

    spec = get_gpt_layer_local_spec(normalization="RMSNorm", qk_layernorm=model.qk_norm)
    layer = spec.submodules
    norm = layer.input_layernorm = layer.pre_mlp_layernorm = norm_on(device.type)
    attention = layer.self_attention.submodules
    if model.qk_norm:
        attention.q_layernorm = attention.k_layernorm = norm
    # Megatron's local core attention knows no packed sequences; the layers themselves are its own on every device.
    attention.core_attention = MegatronPackedAttention
    num_parts = layout.stages * layout.chunks
    network: nn.Module = GPTModel(
        config,
        TransformerBlockSubmodules([spec] * (model.num_layers // num_parts), layer_norm=norm),
        vocab_size=-(-model.vocab_size // layout.tensor) * layout.tensor,
        max_sequence_length=model.max_positions,
        pre_process=stage + chunk == 0,
        post_process=chunk * layout.stages + stage == num_parts - 1,
        vp_stage=chunk if layout.chunks > 1 else None,
        share_embeddings_and_output_weights=model.tied,
        position_embedding_type="rope",
        rotary_base=model.rope_base,
        rope_scaling=model.rope_factor > 0,
        rope_scaling_factor=model.rope_factor or 8.0,
    )
    return network
