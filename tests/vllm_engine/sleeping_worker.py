"""A worker over vLLM's CPU build, which ignores sleep, that loses its weights and cache as one on a device does.

It refuses what vLLM's own worker would do with memory that is gone: to compute, also without new weights, and to load
weights. Level 2 keeps buffers alone; level 1, for an engine with an adapter, also the base (v0.23 to v0.32,
`v1/worker/gpu_worker.py`).
"""

from typing import Any

from torch import Tensor
from vllm.v1.worker.cpu_worker import CPUWorker

_TAGS = frozenset({"weights", "kv_cache"})


class SleepingWorker(CPUWorker):  # type: ignore[misc]
    """See above."""

    _asleep: frozenset[str] = frozenset()
    _kept: dict[str, Tensor]
    _loaded = True

    def sleep(self, level: int = 1) -> None:
        wanted = 2 if self.vllm_config.lora_config is None else 1
        if level != wanted or "weights" in self._asleep:
            raise RuntimeError(f"sleep({level}) while {sorted(self._asleep)} sleep")
        model = self.model_runner.model
        self._kept = {name: tensor.clone() for name, tensor in self._kept_at(level).items()}
        for lost in (*model.parameters(), *model.buffers(), *self._caches()):
            lost.data.fill_(float("nan") if lost.is_floating_point() else 0)
        self._asleep, self._loaded = _TAGS, False

    def wake_up(self, tags: list[str] | None = None) -> None:
        if not tags or not set(tags) <= self._asleep:
            raise RuntimeError(f"wake_up({tags}) while {sorted(self._asleep)} sleep")
        for name, tensor in self._kept_at(1).items() if "weights" in tags else ():
            if name in self._kept:
                tensor.data.copy_(self._kept[name])
        for cache in self._caches() if "kv_cache" in tags else ():
            cache.zero_()  # as a device maps it; attention masks what was not written, but must not read NaN
        self._asleep -= set(tags)

    def start_weight_update(self, *args: Any, **kwargs: Any) -> None:
        if "weights" in self._asleep:
            raise RuntimeError("start_weight_update while the weights sleep")
        super().start_weight_update(*args, **kwargs)

    def finish_weight_update(self) -> None:
        super().finish_weight_update()
        self._loaded = True

    def add_lora(self, lora_request: Any) -> bool:
        if "weights" in self._asleep:
            raise RuntimeError("add_lora while the weights sleep")
        self._loaded = True
        return bool(super().add_lora(lora_request))

    def execute_model(self, scheduler_output: Any) -> Any:
        if (self._asleep or not self._loaded) and scheduler_output.total_num_scheduled_tokens:
            raise RuntimeError(f"tokens are scheduled while {sorted(self._asleep)} sleep, or without new weights")
        return super().execute_model(scheduler_output)

    def _kept_at(self, level: int) -> dict[str, Tensor]:
        model = self.model_runner.model
        return dict(model.named_buffers()) | (dict(model.named_parameters()) if level == 1 else {})

    def _caches(self) -> list[Tensor]:
        return [cache for cache in self.model_runner.kv_caches if isinstance(cache, Tensor)]
