"""What vLLM is started with: the arguments of its engine, and the environment of its process. Imports nothing of it."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from asyncflow.device import visible_alone
from asyncflow.errors import ConfigError
from asyncflow.network import GLOO_INTERFACE, LOOPBACK, LOOPBACK_INTERFACE, NCCL_INTERFACE
from workers.config import ModelConfig, SamplingConfig
from workers.engines.vllm_config import VllmConfig
from workers.engines.vllm_names import BACKEND, WORKER_EXTENSION

_GB = 10**9
_CPU_CACHE_GB = 1.0


@dataclass(frozen=True)
class LogProbPlan:
    """How vLLM comes to log-probabilities of the tempered distribution before top-p and top-k.

    Attributes:
        mode: vLLM's `logprobs_mode`: `raw_logprobs` are those before temperature and filters, `processed_logprobs`
            those after both.
        temperature: that the sampler applies.
        logits_scale: that the model applies to its logits, before either.
    """

    mode: str
    temperature: float
    logits_scale: float = 1.0


def plan_log_probs(sampling: SamplingConfig) -> LogProbPlan:
    """Choose between the sampler's temperature, and one inside the model where filters would show."""
    if sampling.temperature in (0.0, 1.0):
        return LogProbPlan("raw_logprobs", sampling.temperature)
    if sampling.top_p == 1 and sampling.top_k == 0:
        return LogProbPlan("processed_logprobs", sampling.temperature)
    return LogProbPlan("raw_logprobs", 1.0, 1.0 / sampling.temperature)


def engine_arguments(
    model_dir: Path,
    model: ModelConfig,
    config: VllmConfig,
    plan: LogProbPlan,
    *,
    max_len: int,
    num_slots: int,
    device: torch.device,
) -> dict[str, Any]:
    """Return the arguments of vLLM's `AsyncEngineArgs`."""
    on_cpu = device.type == "cpu"
    cache_gb = config.kv_cache_gb or (_CPU_CACHE_GB if on_cpu else None)
    return {
        "model": str(model_dir),
        "skip_tokenizer_init": True,
        "load_format": "dummy",  # the weights come from the trainer
        "generation_config": "vllm",  # no defaults of the model's: what is drawn is the run's to say
        "dtype": config.dtype or model.dtype,
        "max_model_len": max_len,
        "max_num_seqs": num_slots,
        "enforce_eager": on_cpu if config.enforce_eager is None else config.enforce_eager,
        "gpu_memory_utilization": config.gpu_memory_utilization,
        "kv_cache_memory_bytes": None if cache_gb is None else int(cache_gb * _GB),
        "tensor_parallel_size": config.tensor_parallel_size,
        "distributed_executor_backend": "uni" if config.tensor_parallel_size == 1 else "mp",
        "enable_prefix_caching": config.prefix_caching,
        "logprobs_mode": plan.mode,
        "worker_extension_cls": WORKER_EXTENSION,
        "weight_transfer_config": {"backend": BACKEND},
        "disable_log_stats": True,
        **config.engine_args,
    }


def process_variables(config: VllmConfig, device: torch.device, *, sockets: str) -> dict[str, str]:
    """Return the environment of vLLM's processes, whose sockets are files in a directory; `device` is their first."""
    variables = {
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # this process has threads, which a fork would break
        "VLLM_ENGINE_READY_TIMEOUT_S": str(math.ceil(config.start_timeout_s)),
        "VLLM_HOST_IP": LOOPBACK,
        "VLLM_RPC_BASE_PATH": sockets,
        "VLLM_NO_USAGE_STATS": "1",
        # Ranks that share the model are on this host.
        GLOO_INTERFACE: LOOPBACK_INTERFACE,
        NCCL_INTERFACE: LOOPBACK_INTERFACE,
        **visible_alone(device, number=config.tensor_parallel_size),
    }
    if device.type == "cpu":
        threads = str(max(1, torch.get_num_threads() // config.tensor_parallel_size))
        variables |= {
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": threads,
            # Else the ranks of log-probabilities, which nobody asks for, are compiled for a minute at the first token.
            "TORCHDYNAMO_DISABLE": str(int(config.enforce_eager is not False)),
            # Only tells the CPU platform that the model may live in the engine's process, not in a third one.
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        }
    return variables


def max_length(config: VllmConfig, sampling: SamplingConfig, max_prompt_tokens: int, positions: int | None) -> int:
    """Return the longest prompt with its answer (tokens).

    Raises:
        ConfigError: `vllm.max_model_len` leaves no room for a prompt.
    """
    if config.max_model_len is None:
        longest = max_prompt_tokens + sampling.max_response_tokens
        return longest if positions is None else min(longest, positions)
    if config.max_model_len <= sampling.max_response_tokens:
        raise ConfigError(
            f"vllm.max_model_len: {config.max_model_len} leaves no room for a prompt beside max_response_tokens "
            f"{sampling.max_response_tokens}; raise it, or leave it out"
        )
    return config.max_model_len
