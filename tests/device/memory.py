"""What engines take of a device's memory, against the estimate of `workers.engines.device_memory`. Mode of `ranks.py`.

Attention keeps no scores, as on the vendors' devices: the CPU's flash kernel runs in place of theirs.
"""

import gc
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from asyncflow.device import group_backends
from launcher.doctor.device_check import TOKENS, random_batch, train, write_model
from workers.engines.base import GenerateRequest
from workers.engines.base import generate as responses_of
from workers.engines.device_memory import ModelSizes, Parts, frozen_memory, hf_memory
from workers.settings.engines import RefConfig
from workers.settings.rollout import SamplingConfig
from workers.settings.run import ModelConfig


def memory(device: torch.device, rank: int, num_ranks: int, directory: Path) -> dict[str, Any]:
    """Return, for each engine's setting, the bytes that were held at most and the estimate."""
    import workers.engines.packed_attention as attention

    attention.kernel_of = lambda _: attention.cpu_attention
    products = _products_without_arithmetic(device)  # noqa: F841  it counts as long as it is kept
    path = directory / f"model-{rank}"
    sizes = write_model(path)  # before there is a group: transformers would have rank 0 alone write
    store = dist.FileStore(str(directory / "store"), num_ranks)
    limit = timedelta(seconds=120)
    dist.init_process_group(group_backends(device), store=store, rank=rank, world_size=num_ranks, timeout=limit)
    cases: dict[str, Callable[[], Parts]] = {
        f"fsdp {autocast}{' recomputed' * again}": lambda autocast=autocast, again=again: train(  # type: ignore[misc]
            path, sizes, device, num_ranks, autocast=autocast, gradient_checkpointing=again
        )
        for autocast, again in (("float32", False), ("bfloat16", False), ("bfloat16", True))
    }
    if num_ranks == 1:
        cases |= {"reference": lambda: _score(path, sizes, device), "hf": lambda: _generate(path, sizes, device)}
    said = {}
    module: Any = torch.get_device_module(device)
    for name, run in cases.items():
        gc.collect()
        before = module.memory_allocated()
        module.reset_peak_memory_stats()
        parts = run()
        said[name] = {"held": module.max_memory_allocated() - before, "estimated": sum(parts.values()), "parts": parts}
    dist.destroy_process_group()
    return said


def _products_without_arithmetic(device: torch.device) -> torch.library.Library:
    """Have products of matrices return zeros: what they hold is asked for, and some CPUs take minutes for bfloat16."""
    products = torch.library.Library("aten", "IMPL")
    if device.type != "cpu":
        products.impl("mm", lambda a, b: a.new_zeros(a.shape[0], b.shape[1]), "PrivateUse1")
        products.impl("bmm", lambda a, b: a.new_zeros(*a.shape[:2], b.shape[2]), "PrivateUse1")
    return products


def _score(path: Path, sizes: ModelSizes, device: torch.device) -> Parts:
    from workers.engines.hf.frozen import FrozenModel

    model = FrozenModel(path, ModelConfig(path=str(path), dtype="bfloat16"), temperature=1.0, device=device)
    model.log_probs(random_batch())
    return frozen_memory(sizes, 2, TOKENS, RefConfig())


def _generate(path: Path, sizes: ModelSizes, device: torch.device) -> Parts:
    from safetensors.torch import load_file

    from workers.engines.hf.engine import HfEngine

    sampling = SamplingConfig.model_validate({"max_response_tokens": 48, "batch_size": 64})
    config = ModelConfig(path=str(path), dtype="bfloat16")
    engine = HfEngine(path, config, sampling=sampling, device=device)
    engine.load_weights(load_file(path / "model.safetensors"))
    prompts = torch.randint(2, 1000, (64, 80))
    list(
        responses_of(engine, [GenerateRequest(row, prompt, seed=row, ticket=row) for row, prompt in enumerate(prompts)])
    )
    return hf_memory(sizes, 2, 64, 128, prompt_tokens=80)
