"""A stand-in for vLLM's `AsyncLLM` that refuses what would go wrong with the real one while it sleeps.

`strict_vllm` opens `workers.engines.vllm.engine.VllmEngine` on it, without vLLM. Requests draw tokens one by one, as
its scheduler would. vLLM itself mostly warns, aborts, or computes with memory that is gone (v0.23 to v0.32:
`v1/engine/core.py`, `v1/executor/abstract.py`, `v1/worker/gpu_worker.py`). `WRONG` are calls that must be refused.
"""

import asyncio
import inspect
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, make_dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch

from workers.engines.vllm.engine import VllmEngine
from workers.settings.rollout import SamplingConfig
from workers.settings.run import ModelConfig
from workers.settings.vllm import VllmConfig

TAGS = {"weights", "kv_cache"}
_LOOK_S = 0.001
TOKEN = 5
"""What every request draws."""


class Refused(Exception):
    """The real one would lose responses, or compute with memory or weights that are gone."""


@dataclass
class StrictLlm:
    """Attributes:
    tells_versions: as vLLM from 0.32 on; then running requests can be kept over a swap.
    most_tokens: a request waits once it has drawn so many.
    """

    tells_versions: bool = True
    most_tokens: int = 1000
    calls: list[str] = field(default_factory=list)
    asleep: set[str] = field(default_factory=set)
    paused: bool = False
    loaded: bool = False
    updating: bool = False
    version: str = "0"
    running: dict[str, bool] = field(default_factory=dict)  # name -> whether it was aborted
    num_aborted: int = 0
    num_drawn: int = 0  # tokens; while anything sleeps, none

    async def sleep(self, level: int = 1, mode: str = "abort") -> None:
        self._note(f"sleep {level} {mode}")
        if "weights" in self.asleep or (self.asleep and not self.tells_versions):
            raise Refused("sleep while parts sleep: vLLM warns and does nothing")
        if level != 2:
            raise Refused(f"level {level} keeps weights in host memory, or everything on the device")
        self._pause(mode)
        self.asleep, self.loaded = set(TAGS), False

    async def wake_up(self, tags: list[str] | None = None) -> None:
        self._note(f"wake {tags}")
        if not tags or not set(tags) <= self.asleep:
            raise Refused(
                f"wake_up({tags}) while {sorted(self.asleep)} sleep: vLLM warns, or wakes all with old weights"
            )
        if "kv_cache" in tags and not self.loaded and (self.tells_versions or self.is_running):
            raise Refused("the cache wakes before weights were loaded: requests would be drawn with lost ones")
        self.asleep -= set(tags)
        if not self.asleep or not self.tells_versions:  # 0.23 resumes after any part
            self.paused = False

    async def pause_generation(self, *, mode: str = "abort", clear_cache: bool = True) -> None:
        self._note(f"pause {mode}")
        if self.asleep:
            raise Refused("pause_generation() while parts sleep")
        self._pause(mode)

    async def resume_generation(self) -> None:
        self._note("resume")
        if self.asleep:
            raise Refused("resume_generation() while parts sleep: what is scheduled would have no memory")
        self.paused = False

    async def start_weight_update(self) -> None:
        self._note("start")
        if "weights" in self.asleep:
            raise Refused("a weight update while the weights sleep")
        if not self.paused and self.is_running:
            raise Refused("a weight update while requests are scheduled")
        self.updating = True

    async def update_weights(self, request: Any) -> None:
        self._note("update")
        if not self.updating:
            raise Refused("update_weights() before start_weight_update()")

    async def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._note("finish")
        if not self.updating:
            raise Refused("finish_weight_update() before start_weight_update()")
        if (weight_version is None) == self.tells_versions:
            raise Refused("weights without a version, or a version that this vLLM does not take")
        self.updating, self.loaded = False, True
        self.version = weight_version or self.version

    async def collective_rpc(self, method: str, args: Sequence[object] = ()) -> list[object]:
        return [None]

    async def init_weight_transfer_engine(self, request: Any) -> None:
        return None

    async def get_supported_tasks(self) -> tuple[str, ...]:
        return ("generate",)

    def shutdown(self, timeout: float = 0.0) -> None:
        return None

    async def generate(self, prompt: Any, parameters: Any, name: str) -> AsyncIterator[Any]:
        if self.asleep and not self.paused:
            raise Refused("a request comes to a scheduler that is not paused and has no memory")
        assert name not in self.running, "vLLM refuses a name that is in use"
        self.running[name] = False
        spans: list[list[Any]] = []
        try:
            while True:
                drawn = spans[-1][2] if spans else 0
                while (self.paused or drawn >= self.most_tokens) and not self.running[name]:
                    await asyncio.sleep(_LOOK_S)
                if self.running[name]:
                    yield self._output(spans, "abort")
                    return
                if self.asleep or not self.loaded:
                    raise Refused("a token is drawn without memory or weights")
                self.num_drawn += 1
                if spans and spans[-1][0] == self.version:
                    spans[-1][2] += 1
                else:
                    spans.append([self.version, drawn, drawn + 1])
                ended = "length" if drawn + 1 == parameters.max_tokens else None
                yield self._output(spans, ended)
                if ended:
                    return
                await asyncio.sleep(0)
        finally:
            del self.running[name]

    @property
    def is_running(self) -> bool:
        """Whether a request is scheduled; one that was aborted is there until its end was seen."""
        return not all(self.running.values())

    def _pause(self, mode: str) -> None:
        if mode == "abort":
            if self.tells_versions and self.is_running:
                raise Refused("vLLM's default mode ends all running requests, which it could keep")
            self.num_aborted += sum(not aborted for aborted in self.running.values())
            self.running = dict.fromkeys(self.running, True)
        elif mode != "keep" or not self.tells_versions:
            raise Refused(f"mode {mode}: a request that is kept would mix tokens of versions that nobody tells apart")
        self.paused = True

    def _output(self, spans: list[list[Any]], reason: str | None) -> Any:
        number = spans[-1][2] if spans else 0
        versions = [SimpleNamespace(version=version, end=end, start=start) for version, start, end in spans]
        completion = SimpleNamespace(
            token_ids=[TOKEN] * number,
            logprobs=SimpleNamespace(logprobs=[-1.0] * number),
            finish_reason=reason,
            weight_versions=versions if self.tells_versions else None,
        )
        return SimpleNamespace(outputs=[completion])

    def _note(self, call: str) -> None:
        self.calls.append(call)


@contextmanager
def strict_vllm(model_dir: Path, llm: StrictLlm, *, num_slots: int = 16, max_tokens: int = 40) -> Iterator[VllmEngine]:
    """Open the engine on a stand-in; its requests draw `max_tokens` tokens."""
    process = SimpleNamespace(llm=llm, connected=lambda: None)
    sampling = SamplingConfig(max_response_tokens=max_tokens, batch_size=num_slots)
    with (
        mock.patch.dict(sys.modules, _modules(tells_versions=llm.tells_versions)),
        mock.patch("workers.engines.vllm.engine.VllmProcess", lambda *_, **__: process),
    ):
        engine = VllmEngine(
            model_dir,
            ModelConfig(path=str(model_dir)),
            VllmConfig(),
            sampling=sampling,
            max_prompt_tokens=8,
            device=torch.device("cpu"),
            sleeps=True,
        )
        yield engine
        engine.close()


_REQUESTS = ("WeightTransferInitRequest", "WeightTransferUpdateRequest")


def _modules(*, tells_versions: bool) -> dict[str, ModuleType]:
    """Return what the engine imports of vLLM."""

    class Parameters(SimpleNamespace):
        pass

    Parameters.__signature__ = inspect.signature(lambda *, stream_interval=1, **others: None)  # type: ignore[attr-defined]
    fields = ["token_ids", "weight_versions"] if tells_versions else ["token_ids"]
    contents: dict[str, dict[str, Any]] = {
        "vllm": {"SamplingParams": Parameters},
        "vllm.outputs": {"CompletionOutput": make_dataclass("CompletionOutput", fields)},
        "vllm.sampling_params": {"RequestOutputKind": SimpleNamespace(CUMULATIVE="cumulative")},
        "vllm.v1.engine.exceptions": {
            name: type(name, (Exception,), {}) for name in ("EngineDeadError", "EngineGenerateError")
        },
        "vllm.distributed.weight_transfer.base": dict.fromkeys(_REQUESTS, SimpleNamespace),
    }
    modules = {}
    for name, members in contents.items():
        for part in range(1, len(name.split(".")) + 1):
            above = ".".join(name.split(".")[:part])
            modules.setdefault(above, ModuleType(above))
        vars(modules[name]).update(members)
    return modules


Wrong = Callable[[StrictLlm], Coroutine[Any, Any, object]]


async def _asleep(llm: StrictLlm, *awake: str) -> None:
    await llm.sleep(level=2, mode="keep")
    for tag in awake:
        await llm.wake_up([tag])


async def _begin(llm: StrictLlm) -> AsyncIterator[Any]:
    """Start a request that draws a token."""
    llm.loaded = True
    request = llm.generate({}, SimpleNamespace(max_tokens=9), "request")
    await anext(request)
    return request


async def _default_mode(llm: StrictLlm) -> None:
    request = await _begin(llm)  # noqa: F841  it runs as long as it is kept
    await llm.sleep(level=2)


async def _other_level(llm: StrictLlm) -> None:
    await llm.sleep(level=1, mode="keep")


async def _only_stops(llm: StrictLlm) -> None:
    await llm.sleep(level=0, mode="keep")


async def _unknown_mode(llm: StrictLlm) -> None:
    await llm.sleep(level=2, mode="wait")


async def _twice(llm: StrictLlm) -> None:
    await _asleep(llm)
    await llm.sleep(level=2, mode="keep")


async def _all_at_once(llm: StrictLlm) -> None:
    await _asleep(llm)
    await llm.wake_up()


async def _cache_first(llm: StrictLlm) -> None:
    await _asleep(llm)
    await llm.wake_up(["kv_cache"])


async def _cache_before_weights_are_loaded(llm: StrictLlm) -> None:
    await _asleep(llm, "weights")
    await llm.wake_up(["kv_cache"])


async def _unknown_tag(llm: StrictLlm) -> None:
    await _asleep(llm)
    await llm.wake_up(["cache"])


async def _weights_twice(llm: StrictLlm) -> None:
    await _asleep(llm, "weights")
    await llm.wake_up(["weights"])


async def _wake_the_awake(llm: StrictLlm) -> None:
    await llm.wake_up(["weights"])


async def _load_asleep(llm: StrictLlm) -> None:
    await _asleep(llm)
    await llm.start_weight_update()


async def _load_without_start(llm: StrictLlm) -> None:
    await _asleep(llm, "weights")
    await llm.update_weights(None)


async def _pause_asleep(llm: StrictLlm) -> None:
    await _asleep(llm, "weights")
    await llm.pause_generation(mode="keep")


async def _resume_asleep(llm: StrictLlm) -> None:
    await _asleep(llm, "weights")
    await llm.resume_generation()


async def _load_while_requests_run(llm: StrictLlm) -> None:
    request = await _begin(llm)  # noqa: F841  it runs as long as it is kept
    await llm.start_weight_update()


async def _request_to_an_old_one(llm: StrictLlm) -> None:
    llm.tells_versions = False
    await llm.sleep(level=2, mode="abort")
    await llm.wake_up(["weights"])
    await anext(llm.generate({}, SimpleNamespace(max_tokens=9), "request"))


WRONG: tuple[Wrong, ...] = (
    _default_mode, _other_level, _only_stops, _unknown_mode, _twice, _all_at_once, _cache_first,
    _cache_before_weights_are_loaded, _unknown_tag, _weights_twice, _wake_the_awake, _load_asleep, _load_without_start,
    _pause_asleep, _resume_asleep, _load_while_requests_run, _request_to_an_old_one,
)  # fmt: skip


def refuses(wrong: Wrong) -> bool:
    """Return whether the stand-in refuses it."""
    try:
        asyncio.run(wrong(StrictLlm()))
    except Refused:
        return True
    return False
