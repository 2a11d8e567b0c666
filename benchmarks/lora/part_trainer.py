"""What an adapter costs its trainer, beside training all weights, and whether peft reads and writes the same adapter.
Random weights of SmolLM2-135M's shape, rank 16, all linear layers, on the CPU."""

import importlib.util
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.models import COMMON
from workers.engines.fsdp.sharding import FsdpEngine
from workers.engines.lora import read_adapter
from workers.engines.packed_attention import PACKED_ATTENTION
from workers.engines.packed_forward import PackedInputs, response_log_probs
from workers.rows.packed_rows import Sequences
from workers.settings.engines import ActorConfig
from workers.settings.lora import LoraConfig

_SMOLLM2 = next(config for config in COMMON if config["hidden_size"] == 576)
_LORA = LoraConfig(rank=16, alpha=32)
_PROMPT, _RESPONSE, _SAMPLES = 32, 32, 8
_CPU = torch.device("cpu")
_MODELS: Any = AutoModelForCausalLM


def run(*, rounds: int, layers: int, **_: Any) -> dict[str, float]:
    """Return the figures; `layers` of SmolLM2's 30 are there where something is timed."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with tempfile.TemporaryDirectory() as place:
            whole, timed = (_write_model(Path(place) / str(number), number) for number in (30, layers))
            return {**_states(whole), **_steps(timed, rounds), **_round_trip(timed, Path(place))}
    finally:
        dist.destroy_process_group()


def _write_model(path: Path, layers: int) -> Path:
    if not path.exists():
        config = {name: value for name, value in _SMOLLM2.items() if name != "model_type"}
        shape = AutoConfig.for_model("llama", **config | {"num_hidden_layers": layers})
        torch.manual_seed(0)
        _MODELS.from_config(shape).save_pretrained(path)
    return path


def _open(model: Path, lora: LoraConfig | None, autocast: Literal["float32", "bfloat16"] = "float32") -> FsdpEngine:
    actor = ActorConfig(lr=1e-3, autocast=autocast)
    return FsdpEngine(model, actor=actor, temperature=1.0, device=_CPU, seed=0, lora=lora)


def _batch(samples: int, response: int) -> Sequences:
    chance = torch.Generator().manual_seed(1)
    prompts, responses = (
        [torch.randint(3, 49152, (length,), generator=chance) for _ in range(samples)] for length in (_PROMPT, response)
    )
    return Sequences.from_turns(prompts, responses)


def _lose(log_probs_A: Tensor, _entropy: Tensor) -> Tensor:
    return -log_probs_A.sum()


def _states(model: Path) -> dict[str, float]:
    """Return the bytes of weights, gradients and optimizer, over those of training all weights in float32."""
    full = _state_bytes(_open(model, None))
    return {
        "lora_state_vs_full": _state_bytes(_open(model, _LORA)) / full,
        "lora_state_vs_full_bfloat16": _state_bytes(_open(model, _LORA, "bfloat16")) / full,
    }


def _state_bytes(engine: FsdpEngine) -> int:
    """Count the tensors that an engine has before an update; its own model, so nothing is left out."""
    batch = _batch(1, 2)
    for _ in range(2):  # the first update makes the moments, the second pass leaves its gradients
        engine.forward_backward(batch, _lose)
        if not engine._optimizer.state:
            engine.step(1.0)
    weights = list(engine._model.parameters())
    tensors = [*weights, *(one.grad for one in weights if one.grad is not None)]
    tensors += [value for state in engine._optimizer.state.values() for value in state.values()]
    return sum(tensor.nbytes for tensor in tensors)


def _steps(model: Path, rounds: int) -> dict[str, float]:
    """Return the time of a micro-batch with its update, in turn with that of training all weights, in float32: a CPU's
    bfloat16 products say nothing about a device's. It is processor time of one thread, which other work on the machine
    hardly changes."""
    torch.set_num_threads(1)
    batch = _batch(_SAMPLES, _RESPONSE)
    engines = {name: _open(model, lora) for name, lora in (("full", None), ("adapter", _LORA))}
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    for number in range(rounds + 1):
        for name, engine in engines.items():
            began = time.process_time()
            engine.forward_backward(batch, _lose)
            engine.step(1 / batch.num_drawn)
            if number:
                seconds[name].append(time.process_time() - began)
    of = {name: statistics.median(each) for name, each in seconds.items()}
    return {
        "lora_step_cpu_s": of["adapter"],
        "lora_step_vs_full": of["adapter"] / of["full"],
        "lora_step_floor": _floor(engines["adapter"]),
    }


def _floor(engine: FsdpEngine) -> float:
    """Return the share of matrix products that are left, without attention: those of the frozen weights in two of three
    passes, and the adapter's own."""
    named = dict(engine._model.named_parameters())
    own = sum(value.numel() for value in named.values() if value.requires_grad)
    # The tied embedding is the head.
    products = sum(value.numel() for value in named.values() if value.dim() == 2) - own
    return (4 * products + 6 * own) / (6 * products)


def _round_trip(model: Path, place: Path) -> dict[str, float]:
    """Return how far an adapter is from itself after peft has loaded and saved it, and log-probabilities so."""
    if importlib.util.find_spec("peft") is None:
        print("round trip: peft is missing: pip install --no-deps peft accelerate", file=sys.stderr)
        return {}
    from peft import PeftModel

    engine, batch = _open(model, _LORA), _batch(2, 16)
    for _ in range(2):
        engine.forward_backward(batch, _lose)
        engine.step(1 / batch.num_drawn)
    dcp.save(engine.state_dict(), checkpoint_id=place / "saved")
    engine.export_hf(place / "hf", place / "saved")
    plain: Any = AutoModelForCausalLM.from_pretrained(model, attn_implementation=PACKED_ATTENTION)
    theirs = PeftModel.from_pretrained(plain, place / "hf" / "adapter")
    theirs.save_pretrained(place / "theirs")
    own: Mapping[str, Tensor] = {shard.name: shard.values for shard in engine.shards()}
    assert engine._adapter is not None
    back = read_adapter(place / "theirs", _LORA, engine._adapter.targets)
    with torch.no_grad():
        found, _ = response_log_probs(theirs.base_model.model, PackedInputs.from_batch(batch, _CPU), 1.0)
    apart = max(float((back[name] - value).abs().max()) for name, value in own.items())
    assert back.keys() == own.keys()
    return {
        "peft_round_trip_max_abs": apart,
        "peft_log_probs_max_abs": float((found - engine.log_probs(batch)).abs().max()),
    }
