"""Settings of the `vllm` engine. Torch-free, and read by every command."""

from typing import Literal, Self

from pydantic import Field, JsonValue, model_validator

from asyncflow.settings import Settings

# vLLM's engine arguments that this engine sets itself, or that have a field here.
OWN_ARGUMENTS = frozenset({
    "model", "tokenizer", "skip_tokenizer_init", "load_format", "seed", "logprobs_mode", "worker_extension_cls",
    "weight_transfer_config", "generation_config", "dtype", "max_model_len", "max_num_seqs", "enforce_eager",
    "gpu_memory_utilization", "kv_cache_memory_bytes", "tensor_parallel_size", "pipeline_parallel_size",
    "data_parallel_size", "enable_prefix_caching", "disable_log_stats", "enable_log_requests",
    "distributed_executor_backend", "enable_sleep_mode", "enable_lora", "max_loras", "max_lora_rank", "max_cpu_loras",
    "lora_dtype", "lora_target_modules", "return_sampling_mask",
})  # fmt: skip
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # for which vLLM makes room (its MaxLoRARanks)


def room_for_rank(rank: int) -> int:
    """Return the rank for which vLLM makes room where an adapter has `rank`."""
    return next((each for each in LORA_RANKS if each >= rank), rank)


class VllmConfig(Settings):
    """vLLM's engine inside the rollout (`rollout.engine: vllm`, `evaluate.engine: vllm`)."""

    max_model_len: int | None = Field(None, ge=2)
    """Longest prompt with its response (tokens); null: `data.max_prompt_tokens` plus the role's longest response."""
    gpu_memory_utilization: float = Field(0.8, gt=0, le=1)
    """Share of the device's memory for weights and cache; no effect if `kv_cache_gb` is set."""
    kv_cache_gb: float | None = Field(None, gt=0)
    """Cache of keys and values on each device (GB); null: on an accelerator, what `gpu_memory_utilization` leaves; on
    the CPU, 1."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Element type of weights and computation; null: `model.dtype`."""
    enforce_eager: bool | None = None
    """Neither compile nor capture graphs; null: true on the CPU, where both would take minutes at the start, otherwise
    false."""
    tensor_parallel_size: int = Field(1, ge=1)
    """Ranks, each with a device of the same node, that share one copy of the model: with 4, `rollout:8` is two copies.
    """
    request_seeds: bool | None = None
    """Give every response its own seed, so that its draws do not depend on what else runs; null: true, but false on
    Ascend, whose sampler then computes response by response. Without, a run's draws do not repeat."""
    prefix_caching: bool = True
    """Compute the common part of prompts once; never shared between two versions of the weights."""
    start_timeout_s: float = Field(600.0, gt=0)
    """Deadline for loading vLLM and building the model (s)."""
    swap_timeout_s: float = Field(300.0, gt=0)
    """Deadline for taking new weights (s)."""
    engine_args: dict[str, JsonValue] = Field(default_factory=dict)
    """Further arguments of vLLM's `AsyncEngineArgs`, by their Python names, e.g. `{max_num_batched_tokens: 16384}`,
    which is 8192 on an accelerator."""

    @model_validator(mode="after")
    def _can_be_run(self) -> Self:
        taken = sorted(OWN_ARGUMENTS & self.engine_args.keys())
        if taken:
            raise ValueError(f"engine_args: {', '.join(taken)} cannot be set there; see the fields of this section")
        return self
