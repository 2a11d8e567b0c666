"""Lets megatron-core run on the CPU, or on `late`: what it asks of CUDA is answered by that. Test code only.

`install()` before Megatron is imported, in a process that does nothing else: models of transformers must not run after
it. Megatron takes for granted: a current CUDA device, tensors that are made on "cuda" and whose `type()` says so,
`.cuda()`, streams and events, and a CUDA generator for activation checkpoints.
"""

import contextlib
import warnings
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


class _OnDevice(TorchFunctionMode):
    """Answers for the device in every call of torch's functions in this thread."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self._device = device
        kind = device.split(":")[0]
        self._prefix = "torch." if kind == "cpu" else f"torch.{kind}."

    def __torch_function__(self, function: Any, _types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        keywords = dict(keywords or {})
        if "device" in keywords and str(keywords["device"]).startswith("cuda"):
            keywords["device"] = self._device
        if function is Tensor.cuda:
            return arguments[0].to(self._device)
        result = function(*arguments, **keywords)
        if function is Tensor.type and isinstance(result, str):
            return result.replace(self._prefix, "torch.cuda.", 1)
        return result


class _Nothing:
    """A stream or an event, where everything happens in order anyway."""

    def __init__(self, *_: object, **__: object) -> None:
        """Takes whatever CUDA's would."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: None


def install(device: str = "cpu") -> None:
    """Let a device stand in for CUDA in this thread, for good."""
    cuda = torch.cuda
    cuda.current_device = lambda: device
    cuda.get_rng_state = cuda.random.get_rng_state = lambda *_, **__: torch.get_rng_state()
    cuda._lazy_call = lambda call, **_: call()
    cuda._lazy_init = lambda: None
    cuda.set_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    cuda.manual_seed = torch.manual_seed
    cuda.default_generators = {device: torch.default_generator}
    cuda.synchronize = lambda *_: None
    cuda.Stream = cuda.Event = _Nothing
    cuda.current_stream = cuda.default_stream = _Nothing
    cuda.stream = lambda _: contextlib.nullcontext()
    _OnDevice(device).__enter__()
    warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
