"""A worker over vLLM's CPU build that has the order and the refusals of vllm-ascend's (v0.23.0, `worker/worker.py`).

It loads weights only between `start_weight_update` and `finish_weight_update`, begins and ends the layers' reload
itself, and starts no update while VLLM_ASCEND_ENABLE_NZ is on, as it is by default. Its sampler computes row by row
where requests have seeds (`sample/sampler.py`); here that is an error.
"""

import os
from typing import Any

from vllm.config import set_current_vllm_config
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.v1.worker.cpu_worker import CPUWorker


class NpuWorker(CPUWorker):  # type: ignore[misc]
    """See above."""

    _active = False

    def start_weight_update(self, is_checkpoint_format: bool = True) -> None:
        if self._active:
            raise RuntimeError("start_weight_update called while a weight update is already active")
        if int(os.environ.get("VLLM_ASCEND_ENABLE_NZ", "1")):
            raise ValueError("FRACTAL_NZ mode is enabled. Please set VLLM_ASCEND_ENABLE_NZ=0.")
        assert is_checkpoint_format
        with set_current_vllm_config(self.vllm_config):
            initialize_layerwise_reload(self.model_runner.model)
        self._active = True

    def update_weights(self, update_info: dict[str, Any]) -> None:
        if not self._active:
            raise RuntimeError("start_weight_update must be called before update_weights")
        info = self.weight_transfer_engine.parse_update_info(update_info)
        with set_current_vllm_config(self.vllm_config):
            self.weight_transfer_engine.receive_weights(info, load_weights=self.model_runner.model.load_weights)

    def finish_weight_update(self) -> None:
        if not self._active:
            raise RuntimeError("start_weight_update must be called before finish_weight_update")
        with set_current_vllm_config(self.vllm_config):
            finalize_layerwise_reload(self.model_runner.model, self.model_config)
        self._active = False

    def execute_model(self, scheduler_output: Any) -> Any:
        for request in scheduler_output.scheduled_new_reqs:
            if request.sampling_params.seed is not None:
                raise RuntimeError("a request has a seed of its own: a kernel for each row and token")
        return super().execute_model(scheduler_output)
