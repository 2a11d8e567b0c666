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
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
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
from workers.settings.rollout import SamplingConfig
from workers.settings.run import ModelConfig
from workers.settings.vllm import VllmConfig

SET = threading.Event()
SET.set()


@dataclass
class CompletionOutput:
    token_ids: list[int]
    logprobs: Any
    finish_reason: str | None
    weight_versions: list[Any] | None


@dataclass
class OldCompletionOutput:
    token_ids: list[int]
    logprobs: Any
    finish_reason: str | None


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


@dataclass
class Llm:
    """vLLM's `AsyncLLM`, with its worker."""

    calls: list[str] = field(default_factory=list)
    model: Model = field(default_factory=Model)
    ticks: int = 0
    version: str = ""
    dead: bool = False

    def __post_init__(self) -> None:
        from workers.engines.vllm.vllm_worker import AsyncFlowWorker  # registers its transfer engine

        self.transfer = registered["asyncflow"](*self.transfer_arguments())
        self.worker = AsyncFlowWorker()
        self.worker.weight_transfer_engine = self.transfer
        self.worker.vllm_config = None
        self.changed = asyncio.Condition()

    def transfer_arguments(self) -> tuple[Any, ...]:
        return None, SimpleNamespace(model_config=None), None, self.model

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

    async def collective_rpc(self, method: str, *, args: Sequence[Any] = ()) -> list[Any]:
        if method == "weights_loaded":
            self.calls.append("loaded")
        return [getattr(self.worker, method)(*plain(list(args)))]

    def shutdown(self, *, timeout: float) -> None:
        self.calls.append("shutdown")
        self.transfer.shutdown()

    async def generate(
        self, prompt: dict[str, Any], parameters: Any, name: str, *, priority: int = 0
    ) -> AsyncIterator[Any]:
        if hasattr(parameters, "prompt_logprobs"):
            assert priority < 0, "it waits behind all responses"
            tokens = prompt["prompt_token_ids"]
            known = [None, *({token: SimpleNamespace(logprob=-float(token))} for token in tokens[1:])]
            yield SimpleNamespace(prompt_logprobs=known, outputs=[])
            return
        assert parameters.stream_interval == 8
        draws, tokens, spans = random.Random(parameters.seed), [], []
        reason = None
        while reason is None:
            seen = self.ticks
            async with self.changed:
                await self.changed.wait_for(lambda seen=seen: self.ticks > seen)
            if self.dead:
                raise EngineDeadError
            tokens.append(draws.choice([EOS, *range(2, 13)]))
            if not spans or spans[-1].version != self.version:
                spans.append(SimpleNamespace(version=self.version, start=len(tokens) - 1, end=len(tokens)))
            spans[-1].end = len(tokens)
            if tokens[-1] in parameters.stop_token_ids:
                reason = "stop"
            elif len(tokens) == parameters.max_tokens:
                reason = "length"
            log_probs = SimpleNamespace(logprobs=[-float(token) for token in tokens])
            yield SimpleNamespace(outputs=[CompletionOutput(list(tokens), log_probs, reason, list(spans))])

    async def tick(self) -> None:
        """Let every response draw a token, and its task see it."""
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

    async def generate(self, prompt: dict[str, Any], parameters: Any, name: str) -> AsyncIterator[Any]:
        assert not hasattr(parameters, "stream_interval"), "SamplingParams() got an unexpected argument"
        assert not self.paused, "paused for ever, as there is work left"
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
            log_probs = SimpleNamespace(logprobs=[-float(token) for token in tokens]) if tokens else None
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


registered: dict[str, Any] = {}
llms: list[type[Llm]] = [Llm]  # the last one is made


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
        "vllm.model_executor": {},
        "vllm.model_executor.layers": {},
        "vllm.model_executor.layers.linear": {
            kind.__name__: kind
            for kind in (ColumnParallelLinear, QKVParallelLinear, MergedColumnParallelLinear, RowParallelLinear)
        },
        "vllm.model_executor.layers.vocab_parallel_embedding": {"VocabParallelEmbedding": VocabParallelEmbedding},
        "vllm.model_executor.model_loader": {},
        "vllm.model_executor.model_loader.reload": reload,
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, names in contents.items():
            module = ModuleType(name)
            module.__dict__.update(names)
            patch.setitem(sys.modules, name, module)
        patch.setattr(
            vllm_engine, "VllmProcess", lambda *_, **__: SimpleNamespace(llm=llms[-1](), connected=lambda: None)
        )
        yield
    sys.modules.pop("workers.engines.vllm.vllm_worker", None)


@contextmanager
def opened(model_dir: Path, sampling: SamplingConfig, **settings: Any) -> Iterator[Any]:
    engine = Paced(
        model_dir, ModelConfig(path=str(model_dir)), VllmConfig(**settings), sampling=sampling, max_prompt_tokens=64,
        device=torch.device("cpu"),
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
        with opened(model_dir, sampling) as engine:
            yield engine


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
                engine = stack.enter_context(opened(model_dir, sampling))
                assert not engine._tells_versions and not engine._has_stream_interval
            yield engine


ADAPTERS = [FakeVllm(), FakeOldVllm()]


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


@pytest.mark.parametrize("adapter", ADAPTERS, ids=lambda each: each.name)
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


def test_a_process_that_ended_fails_the_response(model_dir: Path, sampling: SamplingConfig) -> None:
    with opened(model_dir, sampling) as engine:
        engine.load_weights(weights_of(model_dir))
        engine.submit([GenerateRequest(0, torch.tensor([3, 4]), seed=1)])
        engine._llm.dead = True
        with pytest.raises(EngineFailed, match=r"engine ended \(EngineDeadError\)"):
            while True:
                engine.step(SET)


def test_a_stop_string_ends_a_response(model_dir: Path, sampling: SamplingConfig) -> None:
    class Letters:
        def decode(self, tokens: list[int], **_: Any) -> str:
            return "".join(chr(97 + token) for token in tokens)

        def encode(self, text: str, **_: Any) -> list[int]:
            return [ord(letter) - 97 for letter in text]

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
