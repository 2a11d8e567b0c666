"""What an adapter costs on its way from the trainer to a generator, beside whole weights, and whether both generate the
same. Random weights of SmolLM2-135M's shape, rank 16, all linear layers, float32 on the wire, on the CPU."""

import importlib.util
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from asyncflow.timeline import NoTimeline
from benchmarks.models import COMMON
from weightsync.plan import Box, Need, match_needs, plan_transfer
from weightsync.sender import ShardCopies, ShardWriter, describe
from weightsync.slot_memory import Region, SlotMemory, map_slot
from weightsync.version import Version
from workers.engines.base import GenerateEngine, GenerateRequest, LocalShard, generate
from workers.engines.hf.engine import HfEngine
from workers.engines.hf.frozen import FrozenModel
from workers.engines.hf.model import adapter_needs, empty_causal_lm
from workers.engines.lora import PREFIX, A, B, adapted_modules, merge
from workers.rows.packed_rows import Sequences
from workers.settings.lora import LoraConfig
from workers.settings.rollout import SamplingConfig
from workers.settings.run import ModelConfig
from workers.settings.vllm import VllmConfig

_SMOLLM2 = next(config for config in COMMON if config["hidden_size"] == 576)
_LORA = LoraConfig(rank=16, alpha=32)
_SAMPLING = SamplingConfig(max_response_tokens=16, batch_size=8, temperature=1.0)
_BUCKET_BYTES = 64 * 2**20  # of `weightsync.bucket_bytes`
_CPU = torch.device("cpu")
_EQUAL_LAYERS = 4  # of the model that generates

Weights = Mapping[str, Tensor]
_MODELS: Any = AutoModelForCausalLM


def run(*, rounds: int, layers: int, **_: Any) -> dict[str, float]:
    """Return the figures; `layers` of SmolLM2's 30 are there where something is timed."""
    with tempfile.TemporaryDirectory() as place:
        figures = _costs(_write_model(Path(place) / "timed", layers), rounds)
        return figures | _differences(_write_model(Path(place) / "equal", min(layers, _EQUAL_LAYERS)))


def _write_model(path: Path, layers: int) -> Path:
    config = {name: value for name, value in _SMOLLM2.items() if name != "model_type"}
    torch.manual_seed(0)
    model = _MODELS.from_config(AutoConfig.for_model("llama", **config | {"num_hidden_layers": layers}))
    model.save_pretrained(path)
    return path


def _costs(model: Path, rounds: int) -> dict[str, float]:
    deliveries = {kind: _Delivery(_open_hf(model, lora)) for kind, lora in (("full", None), ("adapter", _LORA))}
    seconds: dict[str, list[float]] = {kind: [] for kind in deliveries}
    for _ in range(rounds + 1):  # in turn; the first round takes memory for the first time
        for kind, delivery in deliveries.items():
            seconds[kind].append(delivery.deliver_version())
    of = {kind: statistics.median(each[1:]) for kind, each in seconds.items()}
    size = {kind: delivery.num_bytes for kind, delivery in deliveries.items()}
    return {
        "lora_sync_bytes": size["adapter"],
        "lora_sync_bytes_vs_full": size["adapter"] / size["full"],
        "lora_load_publish_s": of["adapter"],
        "lora_load_publish_vs_full": of["adapter"] / of["full"],
        **_vllm_costs(model, rounds),
    }


class _Delivery:
    """A trainer rank's shards, a slot, and an engine that takes what is in the slot as a receiver gives it."""

    def __init__(self, engine: GenerateEngine) -> None:
        self._engine = engine
        self._shards = [_shard(name, need) for name, need in engine.weight_needs().items()]
        plan = plan_transfer([describe(self._shards)], bucket_bytes=_BUCKET_BYTES, dtype="float32")
        self.num_bytes = plan.region_bytes
        memory = SlotMemory(plan.region_bytes)
        self._writer = ShardWriter(plan, 0)
        self._slot, self._memory = map_slot(memory.offer, write=True), memory
        self._views = Region(self._slot, self._writer.layout).view_matched(match_needs(plan, engine.weight_needs()))
        self._number = 0

    def deliver_version(self) -> float:
        """Return the seconds in which a version is copied into the slot, hashed, and loaded from there."""
        self._number += 1
        copies = ShardCopies(self._writer, device=_CPU, timeline=NoTimeline())
        region = Region(self._slot, self._writer.layout)
        began = time.perf_counter()
        copies.start_copies(Version(0, self._number), self._writer.target(self._slot), self._shards)
        copies.wait()
        for bucket in self._writer.buckets:
            region.bucket_checksum(bucket)
        self._engine.load_weights(self._views)
        seconds = time.perf_counter() - began
        copies.close()
        return seconds


def _shard(name: str, need: Need) -> LocalShard:
    return LocalShard(name, need.shape, Box.from_shape(need.shape), torch.randn(need.shape) * 0.02)


def _vllm_costs(model: Path, rounds: int) -> dict[str, float]:
    """Return the same of `load` alone with vLLM, where it is installed."""
    if importlib.util.find_spec("vllm") is None:
        return {}
    seconds = {}
    for kind, lora in (("full", None), ("adapter", _LORA)):
        engine = _open_vllm(model, lora)
        weights = {name: torch.randn(need.shape) * 0.02 for name, need in engine.weight_needs().items()}
        taken = []
        for _ in range(rounds + 1):
            began = time.perf_counter()
            engine.load_weights(weights)
            taken.append(time.perf_counter() - began)
        engine.close()
        seconds[kind] = statistics.median(taken[1:])
    return {
        "lora_load_s_vllm": seconds["adapter"],
        "lora_load_vs_full_vllm": seconds["adapter"] / seconds["full"],
    }


def _differences(model: Path) -> dict[str, float]:
    """Return the largest difference of a log-probability between an adapter and the same merged into the weights."""
    opened: dict[str, Callable[[Path, LoraConfig | None], GenerateEngine]] = {"hf": _open_hf}
    if importlib.util.find_spec("vllm") is not None:
        opened["vllm"] = _open_vllm
    needs = adapter_needs(empty_causal_lm(model, dtype=torch.float32, attention="eager"), _LORA)
    random = torch.Generator().manual_seed(1)
    adapter = {name: torch.randn(need.shape, generator=random) * 0.05 for name, need in needs.items()}
    reference = FrozenModel(_merged(model, adapter), ModelConfig(path=str(model)), temperature=1.0, device=_CPU)
    apart = {name: _apart(each(model, _LORA), adapter, reference) for name, each in opened.items()}
    return {
        **{f"lora_merged_equal_max_abs_{name}": value for name, value in apart.items()},
        "lora_merged_equal_max_abs": max(apart.values()),
    }


def _merged(model: Path, adapter: Weights) -> Path:
    """Return a copy of a model with an adapter merged into it."""
    target = model.with_name(f"{model.name}-merged")
    shutil.copytree(model, target)
    weights = load_file(model / "model.safetensors")
    for module in adapted_modules(adapter):
        a, b = (adapter[PREFIX + module + end] for end in (A, B))
        weights[f"{module}.weight"] = merge(weights[f"{module}.weight"].double(), a, b, _LORA.scaling).float()
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    return target


def _apart(engine: GenerateEngine, adapter: Weights, reference: FrozenModel) -> float:
    engine.load_weights(adapter)
    prompts = [torch.arange(5, 9 + row) for row in range(16)]
    requests = [GenerateRequest(row, prompt, seed=row, ticket=row) for row, prompt in enumerate(prompts)]
    drawn = sorted(generate(engine, requests), key=lambda each: each.index)
    engine.close()
    expected = reference.log_probs(Sequences.from_turns(prompts, [each.response_R for each in drawn]))
    return float((torch.cat([each.log_probs_R for each in drawn]) - expected).abs().max())


def _open_hf(model: Path, lora: LoraConfig | None) -> GenerateEngine:
    return HfEngine(model, ModelConfig(path=str(model)), sampling=_SAMPLING, device=_CPU, lora=lora)


def _open_vllm(model: Path, lora: LoraConfig | None) -> GenerateEngine:
    from workers.engines.vllm.engine import VllmEngine

    config = VllmConfig(max_model_len=64, kv_cache_gb=0.2)
    return VllmEngine(
        model, ModelConfig(path=str(model)), config,
        sampling=_SAMPLING, max_prompt_tokens=40, device=_CPU, lora=lora,
    )  # fmt: skip
