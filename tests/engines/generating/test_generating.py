"""Every generating engine passes the suite; a further one has its adapter here."""

from asyncflow.testing.generating import *  # noqa: F403

from .hf_adapter import HfAdapter, HfFinishAdapter, HfKeepAdapter, HfLoraAdapter, HfLoraFewTargetsAdapter
from .sim_adapter import SimAdapter
from .vllm_adapter import (
    VllmAdapter,
    VllmLoraAdapter,
    VllmLoraTensorParallelAdapter,
    VllmNpuAdapter,
    VllmSleepingAdapter,
    VllmSleepingLoraAdapter,
    VllmTensorParallelAdapter,
)
from .vllm_serve_adapter import VllmServeAdapter, VllmServeLoraAdapter

ADAPTERS = [
    HfAdapter(),
    HfKeepAdapter(),
    HfFinishAdapter(),
    HfLoraAdapter(),
    HfLoraFewTargetsAdapter(),
    SimAdapter(),
    VllmAdapter(),
    VllmTensorParallelAdapter(),
    VllmLoraAdapter(),
    VllmLoraTensorParallelAdapter(),
    VllmSleepingAdapter(),
    VllmSleepingLoraAdapter(),
    VllmNpuAdapter(),
    VllmServeAdapter(),
    VllmServeLoraAdapter(),
]
