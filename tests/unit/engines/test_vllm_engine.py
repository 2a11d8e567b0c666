"""The `vllm` engine with a vLLM of a few lines in this process: what is called in which order, and where weights go.

The fake's scheduler draws a token for each response per `step`; the part of the worker is the package's own.
"""

import asyncio
import json
import random
import sys
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from asyncflow.errors import EngineFailed, PlanError
from asyncflow.testing.adapter import Adapter
from asyncflow.testing.generating import *  # noqa: F403
from asyncflow.testing.training import EOS
from weightsync.version import Version
from workers.engines.base import GenerateRequest, Generation
from workers.engines.stop_strings import StopTokenizer
from workers.engines.vllm import engine as vllm_engine
from workers.engines.vllm.engine import VllmEngine
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

        self.transfer = registered["asyncflow"](None, SimpleNamespace(model_config=None), None, self.model)
        self.worker = AsyncFlowWorker()
        self.worker.weight_transfer_engine = self.transfer
        self.changed = asyncio.Condition()

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

    async def collective_rpc(self, method: str, *, args: Sequence[Any]) -> list[Any]:
        return [getattr(self.worker, method)(*plain(list(args)))]

    def shutdown(self, *, timeout: float) -> None:
        self.calls.append("shutdown")
        self.transfer.shutdown()

    async def generate(self, prompt: dict[str, Any], parameters: Any, name: str) -> AsyncIterator[Any]:
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
            kind = sys.modules["vllm.outputs"].CompletionOutput
            known = (list(spans),) if kind is CompletionOutput else ()
            yield SimpleNamespace(outputs=[kind(list(tokens), log_probs, reason, *known)])

    async def tick(self) -> None:
        """Let every response draw a token, and its task see it."""
        self.ticks += 1
        async with self.changed:
            self.changed.notify_all()
        for _ in range(5):
            await asyncio.sleep(0)


class Paced(VllmEngine):
    """Its responses get a token per step."""

    def step(self, wake: threading.Event) -> list[Generation]:
        if self.num_running:
            self._tasks.run_coroutine(self._llm.tick(), what="a token", timeout_s=60)
        return super().step(SET)


def plain(value: Any) -> Any:
    """Return what arrives in vLLM's process."""
    return json.loads(json.dumps(value))


registered: dict[str, Any] = {}


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
        "vllm": {"SamplingParams": SimpleNamespace},
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
        "vllm.model_executor.model_loader": {},
        "vllm.model_executor.model_loader.reload": reload,
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, names in contents.items():
            module = ModuleType(name)
            module.__dict__.update(names)
            patch.setitem(sys.modules, name, module)
        patch.setattr(vllm_engine, "VllmProcess", lambda *_, **__: SimpleNamespace(llm=Llm(), connected=lambda: None))
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


ADAPTERS = [FakeVllm()]


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
            assert llm.calls == [paused, "start", "update", f"finish {number}", "resume"]
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
        assert engine._llm.calls == ["pause keep True", "start", "update", "finish 1", "resume"]
        assert said == [Version(0, 1), Version(0, 2), "let go"]
        assert [name for name, _ in engine._llm.model.loaded] == list(weights)
        engine.submit([GenerateRequest(0, torch.tensor([3, 4]), seed=1)])
    assert said[-1] == "close"


def test_weights_are_cast_to_the_type_in_which_vllm_computes(model_dir: Path, sampling: SamplingConfig) -> None:
    weights = weights_of(model_dir)
    with opened(model_dir, sampling, dtype="bfloat16") as engine:
        engine.load_weights(weights)
        assert all(loaded.equal(weights[name].bfloat16()) for name, loaded in engine._llm.model.loaded)


def test_an_older_vllm_begins_and_ends_updates_itself_and_is_not_interrupted(
    model_dir: Path, sampling: SamplingConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules["vllm.outputs"], "CompletionOutput", OldCompletionOutput)
    with opened(model_dir, sampling) as engine:
        engine.load_weights(weights_of(model_dir))
        assert engine._llm.calls == ["pause keep True", "update", "resume"]
        assert not engine.interruptible and not engine.can_follow
        engine.version = 5
        engine.submit([GenerateRequest(0, torch.tensor([3, 4]), seed=1)])
        while not (found := engine.step(SET)):
            pass
        assert set(found[0].versions_R.tolist()) == {5}


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
