"""The `vllm` engine with a vLLM of a few lines in this process: what is called in which order, and where weights go.

The fake's scheduler draws a token for each response per `step`; the part of the worker is the package's own. `Llm` has
the manners of vLLM 0.32, `OldLlm` those of 0.23, which vllm-ascend's are.
"""

import asyncio
import json
import random
import sys
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from asyncflow.errors import ConfigError, EngineFailed, PlanError
from asyncflow.testing.adapter import Adapter
from asyncflow.testing.generating import *  # noqa: F403
from asyncflow.testing.training import EOS
from weightsync.checksums import box_checksum, tensor_checksum
from weightsync.version import Version
from workers.engines.base import GenerateRequest, Generation
from workers.engines.stop_strings import StopTokenizer
from workers.engines.vllm import engine as vllm_engine
from workers.engines.vllm import vllm_process
from workers.engines.vllm.engine import VllmEngine, whole_checksums
from workers.settings.lora import LoraConfig
from workers.settings.rollout import RolloutConfig, SamplingConfig
from workers.settings.run import ModelConfig
from workers.settings.vllm import VllmConfig

LORA = LoraConfig(rank=4, alpha=6)
SET = threading.Event()
SET.set()


@dataclass
class CompletionOutput:
    token_ids: list[int]
    logprobs: Any
    finish_reason: str | None
    weight_versions: list[Any] | None
    sampling_mask: Any = None


@dataclass
class OldCompletionOutput:
    token_ids: list[int]
    logprobs: Any
    finish_reason: str | None


@dataclass
class LoRARequest:
    lora_name: str
    lora_int_id: int
    lora_path: str
    load_inplace: bool = False


class TransferEngine:
    """vLLM's base class of weight transfer engines."""

    init_info_cls: Any
    update_info_cls: Any

    def __init__(self, *args: Any) -> None:
        """It keeps its arguments."""

    def parse_init_info(self, info: dict[str, Any]) -> Any:
        return self.init_info_cls(**info)

    def parse_update_info(self, info: dict[str, Any]) -> Any:
        return self.update_info_cls(**info)


class EngineDeadError(Exception):
    """vLLM's process is gone."""


class Model(nn.Module):
    """What vLLM's worker loads into."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.zeros(1))
        self.loaded: list[tuple[str, Tensor]] = []

    def load_weights(self, weights: Any) -> None:
        self.loaded = [(name, weight.clone()) for name, weight in weights]
        for name, weight in self.loaded:
            if weight.dim() == 1:
                place(self, name, nn.Module(), weight)


def place(model: nn.Module, name: str, layer: nn.Module, values: Tensor) -> None:
    """Put a layer's parameter where its name says; `layer` is for a place that is empty."""
    *path, last, leaf = name.split(".")
    for part in path:
        if not hasattr(model, part):
            model.add_module(part, nn.Module())
        model = getattr(model, part)
    if not hasattr(model, last):
        model.add_module(last, layer)
    getattr(model, last).register_parameter(leaf, nn.Parameter(values, requires_grad=False))


class ColumnParallelLinear(nn.Module):
    """vLLM's layers, as far as it matters which part of a tensor they hold."""


class QKVParallelLinear(ColumnParallelLinear): ...


class MergedColumnParallelLinear(ColumnParallelLinear): ...


class RowParallelLinear(nn.Module): ...


class VocabParallelEmbedding(nn.Module): ...


def flat_log_probs(tokens: Sequence[int], number: int) -> Any:
    """Return vLLM's `FlatLogprobs`: for each place the drawn token, then the likeliest ones."""
    ids: list[int] = []
    log_probs: list[float] = []
    for place, token in enumerate(tokens):
        ids += [token, *range(number)]
        log_probs += [-float(token), *(-float(place) - one / 8 for one in range(number))]
    return SimpleNamespace(token_ids=ids, logprobs=log_probs)


@dataclass
class Llm:
    """vLLM's `AsyncLLM`, with its worker."""

    # Of its arguments: the most log-probabilities of a request, and whether masks are kept.
    max_logprobs: int = 20
    return_sampling_mask: bool = False
    loses_masks: bool = False
    aborted: set[str] = field(default_factory=set)
    calls: list[str] = field(default_factory=list)
    model: Model = field(default_factory=Model)
    ticks: int = 0
    version: str = ""
    dead: bool = False
    adapter: dict[str, Tensor] = field(default_factory=dict)
    adapter_config: dict[str, Any] = field(default_factory=dict)
    adapter_directory: Path | None = None
    asleep: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        from workers.engines.vllm.vllm_worker import AsyncFlowWorker  # registers its transfer engine

        self.transfer = registered["asyncflow"](*self.transfer_arguments())
        self.worker = AsyncFlowWorker()
        self.worker.weight_transfer_engine = self.transfer
        self.worker.vllm_config = None
        self.worker.add_lora = self.add_lora
        self.changed = asyncio.Condition()

    def transfer_arguments(self) -> tuple[Any, ...]:
        return None, SimpleNamespace(model_config=None), None, self.model

    def add_lora(self, request: Any) -> bool:
        self.calls.append("add" if request.load_inplace else "add a second")
        self.adapter = load_file(Path(request.lora_path) / "adapter_model.safetensors")
        self.adapter_config = json.loads((Path(request.lora_path) / "adapter_config.json").read_text())
        self.adapter_directory = Path(request.lora_path)
        return True

    async def update_weight_version(self, new_version: str) -> None:
        self.calls.append(f"version {new_version}")
        self.version = new_version

    async def get_supported_tasks(self) -> tuple[str, ...]:
        return ("generate",)

    async def init_weight_transfer_engine(self, request: Any) -> None:
        self.transfer.init_transfer_engine(self.transfer.init_info_cls(**plain(request.init_info)))

    async def pause_generation(self, *, mode: str, clear_cache: bool) -> None:
        self.calls.append(f"pause {mode} {clear_cache}")

    async def start_weight_update(self) -> None:
        self.calls.append("start")
        self.transfer.start_weight_update()

    async def update_weights(self, request: Any) -> None:
        self.calls.append("update")
        self.transfer.update_weights(plain(request.update_info))

    async def finish_weight_update(self, *, weight_version: str) -> None:
        self.calls.append(f"finish {weight_version}")
        self.transfer.finish_weight_update()
        self.version = weight_version

    async def resume_generation(self) -> None:
        self.calls.append("resume")

    async def sleep(self, *, level: int, mode: str) -> None:
        assert mode == "keep", "vLLM's default would end what runs"
        assert level == (1 if self.adapter else 2), "a base that no version brings must not be lost"
        self.calls.append("sleep")
        self.asleep = {"weights", "kv_cache"}

    async def wake_up(self, *, tags: list[str]) -> None:
        self.calls.append(f"wake {' '.join(tags)}")
        self.asleep -= set(tags)

    async def collective_rpc(self, method: str, *, args: Sequence[Any] = ()) -> list[Any]:
        if method == "weights_loaded":
            self.calls.append("loaded")
        return [getattr(self.worker, method)(*plain(list(args)))]

    def shutdown(self, *, timeout: float) -> None:
        self.calls.append("shutdown")
        self.transfer.shutdown()

    async def generate(
        self, prompt: dict[str, Any], parameters: Any, name: str, *, lora_request: Any = None, priority: int = 0
    ) -> AsyncIterator[Any]:
        if hasattr(parameters, "prompt_logprobs"):
            assert priority < 0, "it waits behind all responses"
            self.check(parameters)
            tokens = prompt["prompt_token_ids"]
            known = [None, *({token: SimpleNamespace(logprob=-float(token))} for token in tokens[1:])]
            yield SimpleNamespace(prompt_logprobs=known, outputs=[])
            return
        self.check(parameters)
        assert parameters.stream_interval == 8
        assert (lora_request is not None) == bool(self.adapter)
        assert lora_request is None or not lora_request.load_inplace, "it is read again in every step"
        draws, tokens, spans = random.Random(parameters.seed), [], []
        reason = None
        while reason is None:
            seen = self.ticks
            async with self.changed:
                await self.changed.wait_for(lambda seen=seen: self.ticks > seen or name in self.aborted)
            if self.dead:
                raise EngineDeadError
            if name in self.aborted:
                yield SimpleNamespace(outputs=[self.completion(parameters, tokens, "abort", spans)])
                return
            tokens.append(draws.choice([EOS, *range(2, 13)]))
            if not spans or spans[-1].version != self.version:
                spans.append(SimpleNamespace(version=self.version, start=len(tokens) - 1, end=len(tokens)))
            spans[-1].end = len(tokens)
            if tokens[-1] in parameters.stop_token_ids:
                reason = "stop"
            elif len(tokens) == parameters.max_tokens:
                reason = "length"
            yield SimpleNamespace(outputs=[self.completion(parameters, tokens, reason, spans)])

    def completion(self, parameters: Any, tokens: list[int], reason: str | None, spans: list[Any]) -> Any:
        """With cumulative outputs, masks come with the last one only."""
        mask = None
        if self.return_sampling_mask and reason and not self.loses_masks:
            mask = SimpleNamespace(token_ids=[sorted({token, 2, 3}) for token in tokens])
        found = flat_log_probs(tokens, parameters.logprobs)
        return CompletionOutput(list(tokens), found, reason, list(spans), mask)

    def check(self, parameters: Any) -> None:
        """Raise what vLLM's input processor does."""
        if (getattr(parameters, "logprobs", 0) or 0) > self.max_logprobs:
            raise ValueError(f"Requested sample logprobs of {parameters.logprobs}, which is greater than max allowed")
        if self.return_sampling_mask and getattr(parameters, "temperature", 1.0) <= 0:
            raise ValueError("sampling distribution replay requires temperature > 0")
        if self.return_sampling_mask and getattr(parameters, "top_k", 0) <= 0:
            raise ValueError("sampling distribution replay requires top_k > 0 to bound sampling mask size")

    async def abort(self, request_id: str) -> None:
        self.calls.append("abort")
        self.aborted.add(request_id)
        async with self.changed:
            self.changed.notify_all()

    async def tick(self) -> None:
        """Let every response draw a token, and its task see it."""
        assert not self.asleep
        self.ticks += 1
        async with self.changed:
            self.changed.notify_all()
        for _ in range(5):
            await asyncio.sleep(0)


@dataclass
class OldLlm(Llm):
    """It wants an update begun and ended, loads into the model by itself, and does not say which weights drew what."""

    updating: bool = False
    paused: bool = False
    num_aborts: int = 0

    def transfer_arguments(self) -> tuple[Any, ...]:
        return None, SimpleNamespace(), self.model

    async def pause_generation(self, *, mode: str, clear_cache: bool) -> None:
        await super().pause_generation(mode=mode, clear_cache=clear_cache)
        self.paused = True
        self.num_aborts += mode == "abort"
        async with self.changed:
            self.changed.notify_all()
        for _ in range(5):
            await asyncio.sleep(0)

    async def start_weight_update(self) -> None:
        assert not self.updating, "start_weight_update called while a weight update is already active"
        self.calls.append("start")
        self.updating = True

    async def update_weights(self, request: Any) -> None:
        assert self.updating, "start_weight_update must be called before update_weights"
        self.calls.append("update")
        info = self.transfer.parse_update_info(plain(request.update_info))
        self.transfer.receive_weights(info, load_weights=self.model.load_weights)

    async def finish_weight_update(self) -> None:  # type: ignore[override]
        assert self.updating, "finish_weight_update called without a matching start_weight_update"
        self.calls.append("finish")
        self.updating = False

    async def resume_generation(self) -> None:
        await super().resume_generation()
        self.paused = False

    async def update_weight_version(self, new_version: str) -> None:
        raise AssertionError("0.23 has no such method")

    async def sleep(self, *, level: int, mode: str) -> None:
        assert not self.asleep, "it takes no second sleep while a part sleeps"
        await self.pause_generation(mode=mode, clear_cache=True)
        self.asleep = {"weights", "kv_cache"}

    async def wake_up(self, *, tags: list[str]) -> None:
        await super().wake_up(tags=tags)
        self.paused = False  # whatever still sleeps

    async def generate(
        self, prompt: dict[str, Any], parameters: Any, name: str, *, lora_request: Any = None
    ) -> AsyncIterator[Any]:
        assert (lora_request is not None) == bool(self.adapter)
        assert not hasattr(parameters, "stream_interval"), "SamplingParams() got an unexpected argument"
        assert not self.paused, "paused for ever, as there is work left"
        assert not self.asleep, "scheduled without a cache"
        draws, tokens = random.Random(parameters.seed), []
        reason, aborts = None, self.num_aborts
        while reason is None:
            seen = self.ticks
            async with self.changed:
                await self.changed.wait_for(lambda seen=seen: self.ticks > seen or self.num_aborts > aborts)
            if self.num_aborts > aborts:
                reason = "abort"
            else:
                tokens.append(draws.choice([EOS, *range(2, 13)]))
                if tokens[-1] in parameters.stop_token_ids:
                    reason = "stop"
                elif len(tokens) == parameters.max_tokens:
                    reason = "length"
            log_probs = flat_log_probs(tokens, parameters.logprobs) if tokens else None
            self.prompts[name] = prompt["prompt_token_ids"]
            yield SimpleNamespace(outputs=[OldCompletionOutput(list(tokens), log_probs, reason)])

    prompts: dict[str, list[int]] = field(default_factory=dict)


def old_parameters(
    *, seed: Any, temperature: Any, top_p: Any, top_k: Any, max_tokens: Any, ignore_eos: Any, stop_token_ids: Any,
    logprobs: Any, flat_logprobs: Any, detokenize: Any, output_kind: Any, skip_clone: Any,
) -> Any:  # fmt: skip
    """Return vLLM 0.23's `SamplingParams`."""
    return SimpleNamespace(**locals())


class Paced(VllmEngine):
    """Its responses get a token per step."""

    def step(self, wake: threading.Event) -> list[Generation]:
        if self.num_running:
            self._tasks.run_coroutine(self._llm.tick(), what="a token", timeout_s=60)
        return super().step(SET)


def plain(value: Any) -> Any:
    """Return what arrives in vLLM's process."""
    return json.loads(json.dumps(value))


def parameters(stream_interval: int | None = None, **named: Any) -> Any:
    """Return vLLM's `SamplingParams`."""
    return SimpleNamespace(**named, **({"stream_interval": stream_interval} if stream_interval else {}))


class Letters:
    """A tokenizer: each token is a letter."""

    def decode(self, tokens: list[int], **_: Any) -> str:
        return "".join(chr(97 + token) for token in tokens)

    def encode(self, text: str, **_: Any) -> list[int]:
        return [ord(letter) - 97 for letter in text]


registered: dict[str, Any] = {}
llms: list[type[Llm]] = [Llm]  # the last one is made


def started(arguments: dict[str, Any], *_: Any, **__: Any) -> Any:
    """Return vLLM's process; it refuses arguments that vLLM 0.32 refuses."""
    wanted = {name: arguments[name] for name in ("max_logprobs", "return_sampling_mask") if name in arguments}
    if wanted.get("return_sampling_mask") and arguments["logprobs_mode"] != "processed_logprobs":
        raise ValueError("sampling distribution replay requires logprobs_mode='processed_logprobs'")
    return SimpleNamespace(llm=llms[-1](**wanted), connected=lambda: None)


@pytest.fixture(autouse=True)
def fake_vllm() -> Iterator[None]:
    """Have imports of vLLM find what the engine and its worker use of it."""
    transfer = {name: type(name, (), {}) for name in ("WeightTransferInitInfo", "WeightTransferUpdateInfo")}
    request = {
        "WeightTransferInitRequest": lambda init_info: SimpleNamespace(init_info=init_info),
        "WeightTransferUpdateRequest": lambda update_info: SimpleNamespace(update_info=update_info),
    }
    reload = {f"{word}_layerwise_reload": lambda *_: None for word in ("initialize", "finalize")}
    contents: dict[str, dict[str, Any]] = {
        "vllm": {"SamplingParams": parameters},
        "vllm.config": {"set_current_vllm_config": nullcontext},
        "vllm.sampling_params": {"RequestOutputKind": SimpleNamespace(CUMULATIVE=0)},
        "vllm.outputs": {"CompletionOutput": CompletionOutput},
        "vllm.v1": {},
        "vllm.v1.engine": {},
        "vllm.v1.engine.exceptions": {"EngineDeadError": EngineDeadError, "EngineGenerateError": EngineDeadError},
        "vllm.distributed": {},
        "vllm.distributed.parallel_state": {"get_tp_group": lambda: SimpleNamespace(broadcast=None)},
        "vllm.distributed.weight_transfer": {
            "WeightTransferEngineFactory": SimpleNamespace(register_engine=registered.__setitem__)
        },
        "vllm.distributed.weight_transfer.base": {"WeightTransferEngine": TransferEngine, **transfer, **request},
        "vllm.lora": {},
        "vllm.lora.request": {"LoRARequest": LoRARequest},
        "vllm.model_executor": {},
        "vllm.model_executor.layers": {},
        "vllm.model_executor.layers.linear": {
            kind.__name__: kind
            for kind in (ColumnParallelLinear, QKVParallelLinear, MergedColumnParallelLinear, RowParallelLinear)
        },
        "vllm.model_executor.layers.vocab_parallel_embedding": {"VocabParallelEmbedding": VocabParallelEmbedding},
        "vllm.model_executor.model_loader": {
            "BaseModelLoader": object,
            "register_model_loader": lambda name: partial(registered.__setitem__, f"{name} loader"),
        },
        "vllm.model_executor.model_loader.reload": reload,
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, names in contents.items():
            module = ModuleType(name)
            module.__dict__.update(names)
            patch.setitem(sys.modules, name, module)
        patch.setattr(vllm_engine, "VllmProcess", started)
        yield
    sys.modules.pop("workers.engines.vllm.vllm_worker", None)


@contextmanager
def opened(
    model_dir: Path, sampling: SamplingConfig, *, lora: LoraConfig | None = None, num_top: int = 0, **settings: Any
) -> Iterator[Any]:
    engine = Paced(
        model_dir, ModelConfig(path=str(model_dir)), VllmConfig(**settings), sampling=sampling, max_prompt_tokens=64,
        device=torch.device("cpu"), lora=lora, num_top_log_probs=num_top,
    )  # fmt: skip
    yield engine
    engine.close()
    engine.close()


class FakeVllm(Adapter):
    """It draws random tokens."""

    name = "fake vllm"
    families = ()
    sampling = {"temperature": 1.0}  # noqa: RUF012 - else its model would have to scale logits

    @contextmanager
    def open(self, model_dir: Path, sampling: SamplingConfig) -> Iterator[VllmEngine]:
        with opened(model_dir, sampling, lora=self.lora) as engine:
            yield engine


class FakeVllmLora(FakeVllm):
    """Versions are adapters."""

    name = "fake vllm lora"
    lora = LORA


@contextmanager
def old_vllm() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys.modules["vllm.outputs"], "CompletionOutput", OldCompletionOutput)
        patch.setattr(sys.modules["vllm"], "SamplingParams", old_parameters)
        llms.append(OldLlm)
        yield
        llms.pop()


class FakeOldVllm(FakeVllm):
    """It draws random tokens, too."""

    name = "fake vllm 0.23"

    @contextmanager
    def open(self, model_dir: Path, sampling: SamplingConfig) -> Iterator[VllmEngine]:
        with ExitStack() as stack:
            with old_vllm():
                engine = stack.enter_context(opened(model_dir, sampling, lora=self.lora))
                assert not engine._tells_versions and not engine._has_stream_interval
            yield engine


class FakeOldVllmLora(FakeOldVllm):
    """Versions are adapters."""

    name = "fake vllm 0.23 lora"
    lora = LORA


ADAPTERS = [FakeVllm(), FakeOldVllm(), FakeVllmLora(), FakeOldVllmLora()]


def layer(kind: type[nn.Module], *, method: str = "UnquantizedLinearMethod", **attributes: Any) -> nn.Module:
    made = kind()
    for name, value in attributes.items():
        setattr(made, name, value)
    made.quant_method = type(method, (), {})()  # type: ignore[assignment]
    return made


def rank_of_model(whole: dict[str, Tensor], rank: int, ranks: int, *, method: str) -> nn.Module:
    """Return what a rank of a model of one layer, 4 heads and 2 key heads of size 3 holds, as vLLM's loaders cut it."""
    model, replicas = Model(), max(1, ranks // 2)
    model.packed_modules_mapping = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate", "up"]}  # type: ignore[assignment]

    def rows(name: str, number: int, count: int) -> Tensor:
        return whole[f"l.{name}"].chunk(count)[number]

    heads = {"num_heads": 4 // ranks, "num_kv_heads": max(1, 2 // ranks), "head_size": 3, "v_head_size": 3}
    for leaf in ("weight", "bias"):
        parts = [rows(f"q_proj.{leaf}", rank, ranks)]
        parts += [rows(f"{name}.{leaf}", rank // replicas, min(2, ranks)) for name in ("k_proj", "v_proj")]
        qkv = layer(QKVParallelLinear, method=method, tp_rank=rank, num_kv_head_replicas=replicas, **heads)
        place(model, f"l.qkv_proj.{leaf}", qkv, torch.cat(parts))
    merged = layer(MergedColumnParallelLinear, method=method, tp_rank=rank, tp_size=ranks, output_sizes=[8, 8])
    place(model, "l.gate_up_proj.weight", merged, torch.cat([rows(f"{n}.weight", rank, ranks) for n in ("gate", "up")]))
    column = layer(ColumnParallelLinear, method=method, tp_rank=rank)
    place(model, "l.column.weight", column, rows("column.weight", rank, ranks))
    down = layer(RowParallelLinear, method=method, tp_rank=rank, input_size_per_partition=8 // ranks)
    place(model, "l.down.weight", down, whole["l.down.weight"].chunk(ranks, dim=1)[rank])
    place(model, "l.norm.weight", nn.Module(), whole["l.norm.weight"])
    size = 12 // ranks  # 10 tokens, padded to 12
    start, end = min(10, rank * size), min(10, rank * size + size)
    indices = SimpleNamespace(org_vocab_start_index=start, org_vocab_end_index=end)
    embedding = layer(VocabParallelEmbedding, method="UnquantizedEmbeddingMethod", tp_rank=rank, shard_indices=indices)
    padded = torch.cat([whole["l.embed.weight"], torch.full((2, 6), 9.0)])
    place(model, "l.embed.weight", embedding, padded[rank * size : rank * size + size])
    return model


def test_a_prompt_is_scored_ahead_of_responses_unless_the_sampler_has_the_temperature(
    model_dir: Path, sampling: SamplingConfig
) -> None:
    prompt = torch.tensor([3, 5, 7])
    with opened(model_dir, sampling) as engine:
        engine.load_weights(weights_of(model_dir))
        found = engine.prompt_log_probs(prompt)
        assert found is not None and found.tolist() == [[-5.0, -7.0]]
    with opened(model_dir, sampling.model_copy(update={"temperature": 0.5})) as engine:
        assert engine.prompt_log_probs(prompt) is None


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("method", ["UnquantizedLinearMethod", "Fp8LinearMethod"])
def test_fused_and_sharded_layouts_give_the_checksums_of_the_whole_tensors(ranks: int, method: str) -> None:
    from workers.engines.vllm.vllm_worker import held_boxes

    shapes = {
        "q_proj": (12, 6), "k_proj": (6, 6), "v_proj": (6, 6), "gate": (8, 6), "up": (8, 6), "column": (4, 6),
        "down": (6, 8), "embed": (10, 6), "norm": (6,),
    }  # fmt: skip
    biases = {
        f"l.{name}.bias": (rows,) for name, (rows, *_) in shapes.items() if name in ("q_proj", "k_proj", "v_proj")
    }
    named = {f"l.{name}.weight": shape for name, shape in shapes.items()} | biases
    chance = torch.Generator().manual_seed(ranks)
    whole = {name: torch.randn(shape, generator=chance) for name, shape in named.items()}
    parts: list[Any] = []
    for rank in range(ranks):
        for name, box, values in held_boxes(rank_of_model(whole, rank, ranks, method=method), named):
            share = int(box_checksum(values, box, named[name]))
            parts.append((name, list(box.offset), list(box.size), "float32", share))
    found = {name: one.checksum for name, one in whole_checksums(parts, named).items()}
    expected = {name: int(tensor_checksum(values)) % 2**64 for name, values in whole.items()}
    if method != "UnquantizedLinearMethod":  # it may keep them in another layout
        expected = {name: expected[name] for name in ("l.embed.weight", "l.norm.weight")}
    assert found == expected


@pytest.fixture
def sampling() -> SamplingConfig:
    return SamplingConfig(max_response_tokens=24, batch_size=4)


def weights_of(model_dir: Path) -> dict[str, Tensor]:
    return load_file(model_dir / "model.safetensors")


@pytest.mark.parametrize("on_swap", ["recompute", "keep"])
def test_weights_are_loaded_in_place_of_the_old_ones_while_vllm_is_paused(
    model_dir: Path, sampling: SamplingConfig, on_swap: str
) -> None:
    weights = weights_of(model_dir)
    with opened(model_dir, sampling.model_copy(update={"on_swap": on_swap})) as engine:
        llm = engine._llm
        for number in (1, 2):
            llm.calls.clear()
            engine.load_weights({name: weight + number for name, weight in weights.items()})
            paused = f"pause keep {on_swap != 'keep'}"
            assert llm.calls == [paused, "start", "update", f"finish {number}", "loaded", "resume"]
            assert [name for name, _ in llm.model.loaded] == list(engine.weight_needs())
            assert all(loaded.equal(weights[name] + number) for name, loaded in llm.model.loaded)
        with pytest.raises(PlanError, match="missing"):
            engine.load_weights({})
    assert llm.calls[-1:] == ["shutdown"]


def test_ranks_load_what_they_hold_and_let_it_go(model_dir: Path, sampling: SamplingConfig) -> None:
    weights, said = weights_of(model_dir), []
    with opened(model_dir, sampling) as engine:
        engine._llm.transfer._receiver = SimpleNamespace(
            hold=lambda version: said.append(version) or version.step == 2,
            held=lambda share: weights.items(),
            let_go=lambda: said.append("let go"),
            close=lambda: said.append("close"),
        )
        assert not engine.hold(Version(0, 1)) and engine.hold(Version(0, 2))
        assert engine._llm.calls == []
        engine.load_held()
        assert engine._llm.calls == ["pause keep True", "start", "update", "finish 1", "loaded", "resume"]
        assert said == [Version(0, 1), Version(0, 2), "let go"]
        assert [name for name, _ in engine._llm.model.loaded] == list(weights)
        engine.submit([GenerateRequest(0, torch.tensor([3, 4]), seed=1)])
    assert said[-1] == "close"


@pytest.mark.parametrize("on_swap", ["recompute", "keep"])
def test_adapters_replace_each_other_while_vllm_is_paused_and_leave_no_files(
    model_dir: Path, sampling: SamplingConfig, on_swap: str
) -> None:
    with opened(model_dir, sampling.model_copy(update={"on_swap": on_swap}), lora=LORA) as engine:
        llm, needs = engine._llm, engine.weight_needs()
        for number in (1, 2):
            llm.calls.clear()
            engine.load_weights({name: torch.full(need.shape, float(number)) for name, need in needs.items()})
            assert llm.calls == [f"pause keep {on_swap != 'keep'}", "add", f"version {number}", "resume"]
            assert llm.adapter.keys() == needs.keys() and llm.model.loaded == []
            assert all(bool((tensor == number).all()) for tensor in llm.adapter.values())
            config = llm.adapter_config
            assert (config["r"], config["lora_alpha"]) == (4, 6)
            assert config["target_modules"] == sorted(
                f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down")
            )
            assert not llm.adapter_directory.exists()
        with pytest.raises(PlanError, match="missing"):
            engine.load_weights({})


def test_ranks_put_the_adapter_that_they_hold_in_place_and_let_it_go(model_dir: Path, sampling: SamplingConfig) -> None:
    said: list[str] = []
    with old_vllm(), opened(model_dir, sampling, lora=LORA) as engine:
        held = {name: torch.ones(need.shape) for name, need in engine.weight_needs().items()}
        engine._llm.transfer._receiver = SimpleNamespace(
            hold=lambda version: True,
            held=lambda share: held.items(),
            let_go=lambda: said.append("let go"),
            close=lambda: None,
        )
        assert engine.hold(Version(0, 2))
        engine.load_held()
        assert engine._llm.calls == ["pause abort True", "add", "resume"] and said == ["let go"]
        assert engine._llm.adapter.keys() == held.keys()


def test_base_of_an_adapter_is_read_from_the_models_files_alone(model_dir: Path, sampling: SamplingConfig) -> None:
    with opened(model_dir, sampling, lora=LORA):
        loader = registered["asyncflow loader"]()
    model = Model()
    save_file({"old": torch.zeros(1)}, model_dir / "backup.safetensors")  # vLLM's own loader would read it
    loader.load_weights(model, SimpleNamespace(model=str(model_dir)))
    assert {name for name, _ in model.loaded} == set(weights_of(model_dir))


@pytest.mark.parametrize("adapter", ADAPTERS[:2], ids=lambda each: each.name)
def test_ranks_receive_a_broadcast_in_a_pause_after_which_responses_go_on_as_they_were(
    model_dir: Path, sampling: SamplingConfig, adapter: FakeVllm
) -> None:
    def draw(*, pauses: bool) -> list[list[int]]:
        with adapter.open(model_dir, sampling) as engine:
            llm = engine._llm
            engine.load_weights(weights_of(model_dir))
            receiver = SimpleNamespace(receive_while_paused=llm.calls.append, close=lambda: None)
            llm.transfer._receiver = receiver
            engine.submit([GenerateRequest(row, torch.tensor([3, 4]), seed=row, ticket=row) for row in range(4)])
            finished = engine.step(SET)
            if pauses:
                llm.calls.clear()
                engine.receive_while_paused(Version(0, 7), timeout_s=30)
                assert llm.calls == ["pause keep False", Version(0, 7), "resume"]
            while engine.num_running:
                finished += engine.step(SET)
        return [each.response_R.tolist() for each in sorted(finished, key=lambda each: each.index)]

    assert draw(pauses=True) == draw(pauses=False)


def test_a_broadcast_that_fails_in_a_rank_leaves_no_pause(model_dir: Path, sampling: SamplingConfig) -> None:
    def fail(_: Version) -> None:
        raise RuntimeError("a rank is gone")

    with opened(model_dir, sampling) as engine:
        engine.load_weights(weights_of(model_dir))
        engine._llm.transfer._receiver = SimpleNamespace(receive_while_paused=fail, close=lambda: None)
        with pytest.raises(EngineFailed, match=r"could not pause for weights \(a rank is gone\)"):
            engine.receive_while_paused(Version(0, 7), timeout_s=30)
        assert engine._llm.calls[-1] == "resume"
        engine.submit([GenerateRequest(0, torch.tensor([3, 4]), seed=1)])
        while engine.num_running:
            engine.step(SET)


def test_weights_are_cast_to_the_type_in_which_vllm_computes(model_dir: Path, sampling: SamplingConfig) -> None:
    weights = weights_of(model_dir)
    with opened(model_dir, sampling, dtype="bfloat16") as engine:
        engine.load_weights(weights)
        assert all(loaded.equal(weights[name].bfloat16()) for name, loaded in engine._llm.model.loaded)


def test_a_vllm_that_reports_no_versions_ends_what_runs_and_it_goes_on_with_the_new_weights(
    model_dir: Path, sampling: SamplingConfig, caplog: pytest.LogCaptureFixture
) -> None:
    with old_vllm(), opened(model_dir, sampling.model_copy(update={"on_swap": "keep"})) as engine:
        assert engine.interruptible and "they are recomputed" in caplog.text
        llm = engine._llm
        engine.load_weights(weights_of(model_dir))
        assert llm.calls == ["pause abort False", "start", "update", "finish", "loaded", "resume"]
        engine.version = 5
        engine.submit([GenerateRequest(row, torch.tensor([3, 4]), seed=1000 + row, ticket=row) for row in range(4)])
        finished = engine.step(SET) + engine.step(SET)
        engine.load_weights(weights_of(model_dir))
        engine.version = 6
        while engine.num_running:
            finished += engine.step(SET)
    assert len(finished) == 4
    continued = [each for each in finished if set(each.versions_R.tolist()) == {5, 6}]
    assert continued, "another seed"
    for each in continued:
        old = each.response_R[each.versions_R == 5].tolist()
        assert each.versions_R.tolist() == sorted(each.versions_R.tolist())
        assert llm.prompts[f"2-{each.index}-{each.ticket}"] == [3, 4, *old]
        assert each.log_probs_R.tolist() == [-float(token) for token in each.response_R]
        assert each.response_R[len(old) :].tolist()[: len(old)] != old, "a seed that begins again"


def test_a_vllm_without_weight_updates_is_refused_before_it_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["vllm"], "AsyncEngineArgs", dict, raising=False)
    monkeypatch.setitem(sys.modules, "vllm.v1.engine.async_llm", SimpleNamespace(AsyncLLM=object))  # type: ignore[misc]
    with pytest.raises(ConfigError, match=r"takes no new weights while it runs; pip install 'vllm"):
        vllm_process._started({})


@pytest.mark.parametrize("problem", ["first runner", "0.23"])
def test_a_vllm_that_keeps_no_masks_is_refused_before_it_starts(monkeypatch: pytest.MonkeyPatch, problem: str) -> None:
    class Arguments:
        def __init__(self, model: str, return_sampling_mask: bool = False) -> None:
            self.masks = return_sampling_mask

        def create_engine_config(self) -> Any:
            raise ValueError("sampling distribution\n replay requires Model Runner V2")

    def old_arguments(model: str) -> Any:
        raise AssertionError("it is asked by name first")

    given = Arguments if problem == "first runner" else old_arguments
    monkeypatch.setattr(sys.modules["vllm"], "AsyncEngineArgs", given, raising=False)
    llm = SimpleNamespace(AsyncLLM=SimpleNamespace(start_weight_update=None))
    monkeypatch.setitem(sys.modules, "vllm.v1.engine.async_llm", llm)  # type: ignore[arg-type]
    monkeypatch.setattr(vllm_process, "version", lambda _: "0.23.0")
    with pytest.raises(ConfigError, match=r"^rollout.keep_sampling_mask: ") as caught:
        vllm_process._started({"model": "m", "return_sampling_mask": True})
    lines = {
        "first runner": "refused by vLLM: sampling distribution replay requires Model Runner V2; only vLLM's second",
        "0.23": "vLLM 0.23.0 does not say which tokens it kept; install 0.32 or a newer one",
    }
    assert lines[problem] in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("number", [3, 99])
def test_responses_come_with_the_likeliest_tokens_also_over_a_swap_that_ends_requests(
    model_dir: Path, sampling: SamplingConfig, number: int
) -> None:
    """As many as the model has, if more are asked for."""
    expected = min(number, 13)
    for version in (nullcontext, old_vllm):
        with version(), opened(model_dir, sampling, num_top=number) as engine:
            engine.load_weights(weights_of(model_dir))
            engine.submit([GenerateRequest(row, torch.tensor([3, 4]), seed=1000 + row, ticket=row) for row in range(4)])
            finished = engine.step(SET) + engine.step(SET)
            engine.load_weights(weights_of(model_dir))
            engine.version = 1
            while engine.num_running:
                finished += engine.step(SET)
        assert len(finished) == 4 and any(len(set(one.versions_R.tolist())) == 2 for one in finished)
        for one in finished:
            number_drawn = len(one.response_R)
            assert one.log_probs_R.tolist() == [-float(token) for token in one.response_R]
            assert one.top.ids_RK.tolist() == [list(range(expected))] * number_drawn
            assert one.top.ids_RK.dtype == torch.int32 and one.kept is None
            places = one.top.log_probs_RK[:, 0].neg().tolist()
            begins = places.index(0.0, 1) if 0.0 in places[1:] else number_drawn  # vLLM counts anew after a swap
            assert places == [*range(begins), *range(number_drawn - begins)]
            torch.testing.assert_close(one.top.log_probs_RK, one.top.log_probs_RK[:, :1] - torch.arange(expected) / 8)


MASKED: dict[str, Any] = {
    "max_response_tokens": 12,
    "batch_size": 8,
    "top_k": 4,
    "keep_sampling_mask": True,
    "engine": "vllm",
}


@pytest.mark.parametrize("stops", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_masks_come_with_a_response_also_if_a_stop_string_ends_it(
    model_dir: Path, stops: bool, temperature: float
) -> None:
    sampling = RolloutConfig(**MASKED, temperature=temperature)
    with opened(model_dir, sampling) as engine:
        llm = engine._llm
        assert llm.return_sampling_mask
        engine.load_weights(weights_of(model_dir))
        found = engine.prompt_log_probs(torch.tensor([3, 5, 7]))
        assert (found is None) == (temperature != 1.0)
        stop = StopTokenizer(Letters).make_stop_strings([chr(97 + token) for token in range(2, 13)]) if stops else None
        requests = [GenerateRequest(row, torch.tensor([3, 4]), seed=row, ticket=row, stop=stop) for row in range(6)]
        engine.submit(requests)
        finished = []
        while engine.num_running:
            finished += engine.step(SET)
        assert ("abort" in llm.calls) == stops
    assert len(finished) == 6
    for whole in finished:
        one, _ = whole.until(stop)
        assert len(one.response_R) == 1 or not stops or int(one.response_R[0]) == EOS
        assert one.kept.counts_A.tolist() == [len({token, 2, 3}) for token in one.response_R.tolist()]
        assert bool(one.kept.contains(one.response_R).all()) and one.kept.ids_P.dtype == torch.int32


def test_a_response_whose_masks_are_missing_fails(model_dir: Path) -> None:
    with opened(model_dir, RolloutConfig(**MASKED)) as engine:
        engine._llm.loses_masks = True
        engine.load_weights(weights_of(model_dir))
        engine.submit([GenerateRequest(0, torch.tensor([3, 4]), seed=1)])
        with pytest.raises(EngineFailed, match=r"vLLM gave 0 sampling masks for \d+ tokens; set rollout.keep_sampling"):
            while engine.num_running:
                engine.step(SET)


@pytest.mark.parametrize(
    ("masks", "parameters"),
    [
        (True, {"temperature": 0.0, "top_k": 4}), (True, {"temperature": 1.0, "top_k": 0}),
        (False, {"temperature": 1.0, "top_k": 0, "logprobs": 21}),
    ],
)  # fmt: skip
def test_the_stand_in_refuses_requests_that_vllm_refuses(masks: bool, parameters: dict[str, Any]) -> None:
    llm = Llm(return_sampling_mask=masks)
    with pytest.raises(ValueError, match=r"requires|greater than max allowed"):
        llm.check(SimpleNamespace(**parameters))


def test_a_process_that_ended_fails_the_response(model_dir: Path, sampling: SamplingConfig) -> None:
    with opened(model_dir, sampling) as engine:
        engine.load_weights(weights_of(model_dir))
        engine.submit([GenerateRequest(0, torch.tensor([3, 4]), seed=1)])
        engine._llm.dead = True
        with pytest.raises(EngineFailed, match=r"engine ended \(EngineDeadError\)"):
            while True:
                engine.step(SET)


def test_a_stop_string_ends_a_response(model_dir: Path, sampling: SamplingConfig) -> None:
    with opened(model_dir, sampling) as engine:
        engine.load_weights(weights_of(model_dir))
        request = GenerateRequest(0, torch.tensor([3, 4]), seed=3)
        responses = []
        for stop in (None, StopTokenizer(Letters)):
            strings = stop and stop.make_stop_strings([chr(97 + int(responses[0].response_R[1]))])
            engine.submit([GenerateRequest(request.index, request.prompt_P, request.seed, stop=strings)])
            while not (found := engine.step(SET)):
                pass
            responses += found
        whole, cut = responses
        assert len(whole.response_R) > 2, "another seed"
        assert len(cut.response_R) < len(whole.response_R)
        assert cut.response_R.equal(whole.response_R[: len(cut.response_R)]) and not cut.truncated
