"""The estimate of device memory against what the engines hold."""

import pytest
import torch
from torch import Tensor
from transformers import Qwen2Config, Qwen2ForCausalLM

from asyncflow.errors import ConfigError
from launcher.checks.models import device_memory
from workers.engines.device_memory import (
    LOGITS_TILE,
    RUNTIME,
    ModelSizes,
    fsdp_memory,
    megatron_memory,
    memory_of_roles,
    state_of_roles,
)
from workers.engines.fsdp.sharding import _checkpoint_activations
from workers.engines.lora import Trained
from workers.engines.packed_attention import PACKED_ATTENTION
from workers.engines.packed_forward import PackedInputs, response_log_probs
from workers.rows.packed_rows import Sequences
from workers.settings.engines import ActorConfig
from workers.settings.run import RunConfig

QWEN_7B = ModelSizes(
    num_parameters=7_615_616_512, num_layers=28, hidden_size=3584, num_heads=28, num_kv_heads=4, head_dim=128,
    ffn_size=18944, vocab_size=152064, tied=False,
)  # fmt: skip


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("recomputed", [False, True])
def test_activations_are_what_autograd_keeps(dtype: str, recomputed: bool) -> None:
    config = Qwen2Config(
        vocab_size=64, hidden_size=128, intermediate_size=512, num_hidden_layers=6, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=True,
    )  # fmt: skip
    config._attn_implementation = PACKED_ATTENTION
    model = Qwen2ForCausalLM(config).to(getattr(torch, dtype))
    batch = Sequences.from_turns([torch.ones(8, dtype=torch.int64)], [torch.ones(249, dtype=torch.int64)])
    packed = PackedInputs.from_batch(batch, torch.device("cpu"))
    sizes = ModelSizes.from_config(config.to_dict(), sum(parameter.numel() for parameter in model.parameters()))
    assert sizes is not None
    training = ActorConfig.model_validate({"autocast": dtype, "gradient_checkpointing": recomputed})
    estimated = fsdp_memory(sizes, training, 1, len(packed.tokens_T))["activations"]
    if recomputed:
        model.train()
        _checkpoint_activations(model)
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        found, _ = response_log_probs(model, packed, 1.0)
    measured = sum(t.untyped_storage().nbytes() for place, t in kept.items() if place not in weights)
    assert found.requires_grad
    # A layer that is computed again is there in the backward pass only.
    layer = fsdp_memory(sizes, ActorConfig.model_validate({"autocast": dtype}), 1, len(packed.tokens_T))["activations"]
    held = estimated - (layer // 6 if recomputed else 0)
    last = len(packed.tokens_T) * 128 * 20  # the last norm, and what the head keeps
    assert held <= measured * 1.1 and measured <= held * 1.1 + last


def test_state_of_megatron_at_seven_billion_parameters() -> None:
    """18 bytes a parameter over 4 tensor-parallel ranks; with two replicas the optimizer's 12 are halved."""
    actor = ActorConfig.model_validate(
        {"engine": "megatron", "autocast": "bfloat16", "megatron": {"tensor_parallel": 4}}
    )
    state = ("weights", "gradients", "masters", "moments")
    one, two = (megatron_memory(QWEN_7B, actor, ranks, tokens=16384) for ranks in (4, 8))
    assert sum(one[name] for name in state) == pytest.approx(18 * QWEN_7B.num_parameters / 4, rel=1e-6)
    assert sum(two[name] for name in state) == pytest.approx(12 * QWEN_7B.num_parameters / 4, rel=1e-6)


def test_state_of_megatron_beside_an_adapter_is_the_frozen_model_and_the_adapters_own() -> None:
    megatron = {"tensor_parallel": 2, "pipeline_parallel": 2}
    actor = ActorConfig.model_validate({"engine": "megatron", "autocast": "bfloat16", "megatron": megatron})
    adapter = Trained(40 * 10**6, undivided=10 * 10**6)
    one, two = (megatron_memory(QWEN_7B, actor, ranks, tokens=16384, trained=adapter) for ranks in (4, 8))
    full = megatron_memory(QWEN_7B, actor, 4, tokens=16384)
    own = (10 + 30 // 2) * 10**6 // 2  # of two tensor-parallel ranks, and of two stages
    assert one["weights"] == full["weights"] + 4 * own
    assert (one["gradients"], one["moments"], two["moments"]) == (4 * own, 8 * own, 8 * own // 2)
    assert "masters" not in one and one["activations"] == full["activations"]


def test_tensor_parallel_ranks_divide_all_activations_and_stages_keep_pieces() -> None:
    def activations(tensor: int, stages: int = 1, longest: int = 0, **pipeline: int) -> int:
        megatron = {"tensor_parallel": tensor, "pipeline_parallel": stages, **pipeline}
        fields = {"engine": "megatron", "autocast": "bfloat16", "megatron": megatron}
        actor = ActorConfig.model_validate(fields)
        return megatron_memory(QWEN_7B, actor, tensor * stages, 16384, longest=longest)["activations"]

    gathered = 16384 * 3584 * 2
    assert activations(4) - gathered == pytest.approx(activations(1) / 4, rel=1e-6)
    assert activations(1, 2) == pytest.approx(activations(1) / 2, rel=1e-6), "half of the layers, a whole micro-batch"
    assert activations(1, 2, longest=16384) == pytest.approx(activations(1), rel=1e-6), "two samples of one piece each"
    assert activations(1, 4, pipeline_pieces=2) == pytest.approx(activations(1) / 4 * 2, rel=1e-6)
    # Five passes through half of a stage's layers each.
    interleaved = activations(1, 2, longest=16384, virtual_pipeline=2)
    assert interleaved == pytest.approx(activations(1) / 2 * 2.5, rel=1e-6)


def test_logits_do_not_grow_with_the_vocabulary_and_hardly_with_tokens() -> None:
    actor = ActorConfig.model_validate({"autocast": "bfloat16"})
    few, many = (fsdp_memory(QWEN_7B, actor, 8, tokens)["logits"] for tokens in (8192, 16384))
    assert few < 12 * LOGITS_TILE + 8192 * 3584 * 9
    assert (many - few) / 8192 <= 8 * 3584


def test_a_broadcast_takes_a_second_copy_where_its_receivers_compute() -> None:
    def parts(engine: str = "hf", interval: int = 0, **weightsync: object) -> dict[str, dict[str, int]]:
        model = {"path": "m", "dtype": "bfloat16"}
        fields = {"steps": 1, "roles": {"rollout": 1, "actor": 1, "ref": 1}, "model": model, "data": {"path": "d"}}
        fields |= {"schedule": {"rollout_batch_size": 1, "n_samples_per_prompt": 2}, "weightsync": weightsync}
        fields |= {"rollout": {"max_response_tokens": 8, "batch_size": 2, "engine": engine}}
        fields |= {"vllm": {"tensor_parallel_size": 2}}
        if interval:
            fields |= {"roles": {"rollout": 1, "actor": 1, "ref": 4}, "ref": {"engine": "fsdp", "shards": 4}}
            fields |= {"algorithm": {"ref_update_interval": interval, "kl_coef": 0.1}}
        return memory_of_roles(RunConfig.model_validate(fields), QWEN_7B)

    staged, broadcast = parts(path="staged"), parts(path="broadcast", bucket_bytes=2**20)
    more = {role: sum(broadcast[role].values()) - sum(staged[role].values()) for role in staged}
    buckets = 3 * 2**20
    assert more == {"rollout": buckets + 2 * QWEN_7B.num_parameters, "actor": buckets, "ref": buckets}
    shared = parts(path="broadcast", engine="vllm")["rollout"]["next version"]
    assert shared == QWEN_7B.num_parameters, "each of two ranks keeps half of it"
    follows = parts(path="broadcast", interval=2)["ref"]["next version"]
    assert follows == 2 * (QWEN_7B.num_parameters // 4), "each of four ranks keeps its own part"


def test_rows_of_sft_are_as_long_as_a_prompt_may_be() -> None:
    fields = {"steps": 1, "roles": {"actor": 1}, "model": {"path": "m"}, "data": {"path": "d", "max_prompt_tokens": 64}}
    fields |= {"schedule": {"rollout_batch_size": 2, "n_samples_per_prompt": 1}, "rollout": {"max_response_tokens": 64}}
    drawn, held = (
        memory_of_roles(RunConfig.model_validate({**fields, "algorithm": {"name": name}}), QWEN_7B)["actor"]
        for name in ("reinforce_plus_plus", "sft")
    )
    assert 2 * held["activations"] == drawn["activations"]


def test_colocated_roles_count_what_the_other_keeps_asleep() -> None:
    fields = {"steps": 1, "roles": {"rollout": 4, "actor": 4}, "model": {"path": "m", "dtype": "bfloat16"}}
    fields |= {"data": {"path": "d"}, "schedule": {"rollout_batch_size": 4, "n_samples_per_prompt": 2}}
    fields |= {"rollout": {"max_response_tokens": 8, "batch_size": 2}}
    separate = RunConfig.model_validate(fields)
    colocated = RunConfig.model_validate(fields | {"colocated": ("rollout", "actor")})
    apart, together = (memory_of_roles(config, QWEN_7B) for config in (separate, colocated))
    more = {role: sum(together[role].values()) - sum(apart[role].values()) for role in together}
    assert more == {"rollout": RUNTIME, "actor": RUNTIME}
    number = QWEN_7B.num_parameters
    assert state_of_roles(colocated, number, Trained(number))["actor"] == 16 * number


def test_colocated_roles_count_what_the_trainer_keeps_for_the_rollout() -> None:
    fields = {"steps": 1, "roles": {"rollout": 4, "actor": 4}, "model": {"path": "m", "dtype": "bfloat16"}}
    fields |= {"data": {"path": "d"}, "schedule": {"rollout_batch_size": 4, "n_samples_per_prompt": 2}}
    fields |= {"rollout": {"max_response_tokens": 8, "batch_size": 2}, "weightsync": {"bucket_bytes": 2**20}}
    fields |= {"colocated": ("rollout", "actor")}
    config = RunConfig.model_validate(fields)
    without, having = (memory_of_roles(config, QWEN_7B, has_ipc=has_ipc) for has_ipc in (False, True))
    more = {role: sum(having[role].values()) - sum(without[role].values()) for role in having}
    kept = 2 * QWEN_7B.num_parameters // 4
    assert more == {"rollout": kept + 6 * 2**20, "actor": kept}, (
        "a part of each of 4 ranks, and two buckets on their way"
    )
    many = config.model_copy(update={"roles": {"rollout": 2**20, "actor": 2**20}})
    assert memory_of_roles(many, QWEN_7B, has_ipc=True)["rollout"]["buckets"] == 4 * kept + 2 * 2**20, (
        "buckets of so many ranks are small: no more than all weights"
    )
    separate = RunConfig.model_validate(fields | {"colocated": ()})
    assert memory_of_roles(separate, QWEN_7B, has_ipc=True) == memory_of_roles(separate, QWEN_7B)
    rough = RunConfig.model_validate(fields | {"weightsync": {"bucket_bytes": 2**20, "dtype": "float32"}})
    assert memory_of_roles(rough, QWEN_7B, has_ipc=True)["actor"]["handed over"] == 2 * kept, "in the wire's dtype"
    of_vllm = fields | {
        "rollout": {"max_response_tokens": 8, "engine": "vllm"},
        "vllm": {"gpu_memory_utilization": 0.9},
    }
    with pytest.raises(ConfigError, match=r"a rank of rollout needs about .*handed over 3.81 GB.* beside vLLM"):
        device_memory(RunConfig.model_validate(of_vllm), QWEN_7B, 40, has_ipc=True)


def test_sizes_that_are_not_there_are_not_guessed() -> None:
    assert ModelSizes.from_config({"model_type": "gpt2", "n_embd": 768}, 124_000_000) is None
