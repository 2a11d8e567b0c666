"""Every generating engine passes the suite; a further one has its adapter here."""

from asyncflow.testing.generating import *  # noqa: F403

from .hf_adapter import HfAdapter, HfFinishAdapter, HfKeepAdapter
from .sim_adapter import SimAdapter
from .vllm_adapter import VllmAdapter, VllmNpuAdapter, VllmSleepingAdapter, VllmTensorParallelAdapter
from .vllm_serve_adapter import VllmServeAdapter

ADAPTERS = [
    HfAdapter(),
    HfKeepAdapter(),
    HfFinishAdapter(),
    SimAdapter(),
    VllmAdapter(),
    VllmTensorParallelAdapter(),
    VllmSleepingAdapter(),
    VllmNpuAdapter(),
    VllmServeAdapter(),
]
