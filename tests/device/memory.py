"""What engines take of a device's memory, against the estimate of `workers.engines.device_memory`. Mode of `ranks.py`.

The model is small, but has the proportions that matter: the head's tiles are full, and activations weigh as much as the
state. Attention keeps no scores, as on the vendors' devices: the CPU's flash kernel runs in place of theirs.
"""

import json
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from asyncflow.device import group_backends
from workers.config import ActorConfig, ModelConfig
from workers.engines.base import GenerateRequest, Sequences
from workers.engines.base import generate as responses_of
from workers.engines.device_memory import ModelSizes, Parts, frozen_memory, fsdp_memory, hf_memory
from workers.rollout.config import SamplingConfig

SAMPLES, PROMPT, RESPONSE = 24, 16, 72
TOKENS = SAMPLES * (PROMPT + RESPONSE)


def memory(device: torch.device, rank: int, num_ranks: int, directory: Path) -> dict[str, Any]:
    """Return, for each engine's setting, the bytes that were held at most and the estimate."""
    import workers.engines.packed_attention as attention

    attention.kernel_of = lambda _: attention.cpu_attention
    store = dist.FileStore(str(directory / "store"), num_ranks)
    limit = timedelta(seconds=120)
    dist.init_process_group(group_backends(device), store=store, rank=rank, world_size=num_ranks, timeout=limit)
    path = directory / f"model-{rank}"
    sizes = _model(path)
    cases: dict[str, Callable[[], Parts]] = {
        f"fsdp {autocast}{' recomputed' * again}": lambda autocast=autocast, again=again: _train(  # type: ignore[misc]
            path, sizes, device, num_ranks, autocast=autocast, gradient_checkpointing=again
        )
        for autocast, again in (("float32", False), ("bfloat16", False), ("bfloat16", True))
    }
    if num_ranks == 1:
        cases |= {"reference": lambda: _score(path, sizes, device), "hf": lambda: _generate(path, sizes, device)}
    said = {}
    module: Any = torch.get_device_module(device)
    for name, run in cases.items():
        before = module.memory_allocated()
        module.reset_peak_memory_stats()
        parts = run()
        said[name] = {"held": module.max_memory_allocated() - before, "estimated": sum(parts.values()), "parts": parts}
    dist.destroy_process_group()
    return said


def _model(path: Path) -> ModelSizes:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=24576, hidden_size=256, intermediate_size=1024, num_hidden_layers=8, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=True, eos_token_id=1, max_position_embeddings=4096,
    )  # fmt: skip
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(config)
    model.save_pretrained(path)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    sizes = ModelSizes.of(json.loads((path / "config.json").read_text()), parameters)
    assert sizes is not None
    return sizes


def _batch() -> Sequences:
    tokens_NT = torch.randint(2, 1000, (SAMPLES, PROMPT + RESPONSE))
    return Sequences.of(list(tokens_NT[:, :PROMPT]), list(tokens_NT[:, PROMPT:]))


def _train(path: Path, sizes: ModelSizes, device: torch.device, num_ranks: int, **settings: Any) -> Parts:
    from workers.engines.fsdp.engine import FsdpEngine

    actor = ActorConfig.model_validate(settings)
    engine = FsdpEngine(path, actor=actor, temperature=1.0, device=device, seed=0)
    for _ in range(2):
        for _ in range(2):
            engine.forward_backward(_batch(), lambda log_probs, entropy: (log_probs - entropy).sum())
        engine.step(0.001)
    return fsdp_memory(sizes, actor, num_ranks, TOKENS)


def _score(path: Path, sizes: ModelSizes, device: torch.device) -> Parts:
    from workers.engines.hf.frozen import FrozenModel

    model = FrozenModel(path, ModelConfig(path=str(path), dtype="bfloat16"), temperature=1.0, device=device)
    model.log_probs(_batch())
    return frozen_memory(sizes, 2, TOKENS)


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
    return hf_memory(sizes, 2, 64, 128)
