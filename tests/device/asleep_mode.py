"""Engines that sleep: what is left on the device, and whether all bits come back. Mode of `ranks.py`."""

import gc
import statistics
import threading
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from asyncflow.device import group_backends, wait_for_device
from workers.engines.base import GenerateRequest, WakePart
from workers.rows.packed_rows import Sequences
from workers.settings.engines import ActorConfig
from workers.settings.rollout import SamplingConfig
from workers.settings.run import ModelConfig

_ROUNDS = 7


def asleep(device: torch.device, rank: int, num_ranks: int, directory: Path) -> dict[str, Any]:
    """Return, for each engine, bytes of the device awake and asleep, and whether it goes on as one that never slept."""
    import workers.engines.packed_attention as attention

    attention.kernel_of = lambda _: attention.cpu_attention
    path = directory / f"model-{rank}"
    _write_model(path)  # before there is a group: transformers would have rank 0 alone write
    store = dist.FileStore(str(directory / "store"), num_ranks)
    limit = timedelta(seconds=120)
    dist.init_process_group(group_backends(device), store=store, rank=rank, world_size=num_ranks, timeout=limit)
    said = {"fsdp float32": _train(path, device, "float32")}
    if num_ranks == 1:
        said["fsdp bfloat16"] = _train(path, device, "bfloat16")  # with its copy of the weights; slow on some CPUs
        said |= {"hf": _generate(path, device), "reference": _score(path, device)}
    dist.destroy_process_group()
    return said


def _train(path: Path, device: torch.device, autocast: str) -> dict[str, Any]:
    """Sleep with gradients of half a step, moments, and a copy of the policy."""
    from workers.engines.fsdp.sharding import FsdpEngine

    actor = ActorConfig.model_validate({"lr": 1e-3, "autocast": autocast})
    batch = _small_batch()
    results = []
    measured: dict[str, Any] = {}
    for sleeps in (True, False):
        engine = FsdpEngine(path, actor=actor, temperature=1.0, device=device, seed=0)
        reference = engine.open_copy(initial=True)

        def half_a_step(engine: FsdpEngine = engine) -> None:
            engine.forward_backward(batch, lambda log_probs, _: (log_probs + 1).square().sum())

        half_a_step()
        engine.step(0.1)
        half_a_step()
        if sleeps:
            measured = _measured(device, engine.sleep, engine.wake)
            measured |= _times(device, engine) if autocast == "float32" and device.type != "cpu" else {}
        half_a_step()
        norm = engine.step(0.1).grad_norm
        held = [shard.values.detach().cpu().clone() for shard in engine.shards()]
        results.append([norm, held, engine.log_probs(batch).cpu(), reference.log_probs(batch).cpu()])
        del engine, reference, half_a_step
    return measured | {"same": _equal(*results)}


def _generate(path: Path, device: torch.device) -> dict[str, Any]:
    from safetensors.torch import load_file

    from workers.engines.hf.engine import HfEngine

    sampling = SamplingConfig.model_validate({"max_response_tokens": 24, "batch_size": 16})
    config = ModelConfig(path=str(path))
    weights, never = load_file(path / "model.safetensors"), threading.Event()
    engine = HfEngine(path, config, sampling=sampling, device=device)
    engine.load_weights(weights)
    prompts = torch.arange(2, 2 + 16 * 20).view(16, 20)
    requests = [GenerateRequest(row, prompt, seed=row, ticket=row) for row, prompt in enumerate(prompts)]
    drawn: list[list[list[int]]] = []
    measured: dict[str, Any] = {}
    for sleeps in (True, False):
        engine.submit(requests)
        done = [response for _ in range(8) for response in engine.step(never)]

        def wake() -> None:
            engine.wake(WakePart.WEIGHTS)
            engine.load_weights(weights)
            engine.wake(WakePart.KV_CACHE)

        if sleeps:
            measured = _measured(device, engine.sleep, wake)
        while engine.num_running:
            done += engine.step(never)
        drawn.append([one.response_R.tolist() for one in sorted(done, key=lambda one: one.index)])
    engine.close()
    return measured | {"same": drawn[0] == drawn[1] and len(drawn[0]) == len(requests)}


def _score(path: Path, device: torch.device) -> dict[str, Any]:
    from workers.engines.hf.frozen import FrozenModel

    model, batch = FrozenModel(path, ModelConfig(path=str(path)), temperature=1.0, device=device), _small_batch()
    before = model.log_probs(batch).cpu()
    measured = _measured(device, model.sleep, model.wake)
    return measured | {"same": before.equal(model.log_probs(batch).cpu())}


def _write_model(path: Path) -> None:
    """Write a Hugging Face directory of 28 million parameters in 50 tensors; real ones are larger still."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=24576, hidden_size=512, intermediate_size=2048, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=4, tie_word_embeddings=True, eos_token_id=1, max_position_embeddings=4096,
    )  # fmt: skip
    torch.manual_seed(0)
    model: Any = Qwen2ForCausalLM(config)
    model.save_pretrained(path)


def _small_batch() -> Sequences:
    """Return few tokens: some CPUs compute bfloat16 slowly."""
    tokens_NT = torch.randint(2, 1000, (4, 24), generator=torch.Generator().manual_seed(0))
    return Sequences.from_turns(list(tokens_NT[:, :8]), list(tokens_NT[:, 8:]))


def _measured(device: torch.device, sleep: Callable[[], None], wake: Callable[[], None]) -> dict[str, Any]:
    """Fall asleep, and wake; return the bytes of the device before and between."""
    module: Any = torch.get_device_module(device)
    allocated = getattr(module, "memory_allocated", lambda: 0)  # the CPU's module has none
    gc.collect()
    awake = allocated()
    sleep()
    between = allocated()
    wake()
    return {"awake": awake, "asleep": between}


def _times(device: torch.device, engine: Any) -> dict[str, float]:
    """Return the time of a sleep and a wake with warm buffers, and of copying as many bytes out and in."""
    num_bytes = engine.resident_bytes
    host = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
    there = torch.zeros(num_bytes, dtype=torch.uint8, device=device)

    def copy() -> None:
        host.copy_(there, non_blocking=True)
        wait_for_device(device)
        there.untyped_storage().resize_(0)
        there.untyped_storage().resize_(num_bytes)
        there.copy_(host, non_blocking=True)
        wait_for_device(device)

    def swap() -> None:
        engine.sleep()
        engine.wake()

    times: dict[str, list[float]] = {"memcpy_s": [], "swap_s": []}
    for number in range(_ROUNDS + 1):
        for name, run in (("memcpy_s", copy), ("swap_s", swap)):
            began = time.perf_counter()
            run()
            times[name] += [time.perf_counter() - began] if number else []  # the first one touches its memory
    return {name: statistics.median(values) for name, values in times.items()}


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return one.equal(other)
    if isinstance(one, Iterable):
        return all(_equal(*pair) for pair in zip(one, other, strict=True))
    return bool(one == other)
