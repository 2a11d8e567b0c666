"""A reference that several ranks share: where its ranks go, what each has on its device, what is refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from asyncflow.errors import ConfigError
from launcher.checks.placement import Devices, place_gangs
from launcher.config.load_config import load_config
from launcher.config.paths import find_recipe
from launcher.config.rules import AT_START, check_rules
from workers.engines.device_memory import ModelSizes, memory_of_roles
from workers.settings.run import RunConfig

Configure = Callable[..., RunConfig]
MEGATRON = {"engine": "megatron", "megatron": {"tensor_parallel": 4, "pipeline_parallel": 2}}
QWEN_32B = ModelSizes(
    num_parameters=32_763_876_352, num_layers=64, hidden_size=5120, num_heads=40, num_kv_heads=8, head_dim=128,
    ffn_size=27648, vocab_size=152064, tied=False,
)  # fmt: skip


@pytest.fixture
def configure(write_config: Callable[..., Path]) -> Configure:
    def build(roles: str, *, kl_coef: float = 0.1, **sections: Any) -> RunConfig:
        return load_config(write_config(algorithm={"name": "grpo", "kl_coef": kl_coef}, **sections), roles=roles)

    return build


@pytest.mark.parametrize("devices", [Devices("cpu"), Devices("cuda", 8)])
def test_ranks_of_a_copy_are_a_gang_on_one_node(configure: Configure, devices: Devices) -> None:
    config = configure("rollout:2,actor:2,ref:8", ref={"engine": "fsdp", "shards": 4})
    copies = [gang for gang in place_gangs(config, devices, num_nodes=2) if gang.role == "ref"]
    assert [(gang.name, gang.num_ranks, len(gang.devices), len(gang.parts)) for gang in copies] == [
        ("ref-0", 4, 4, 1),
        ("ref-1", 4, 4, 1),
    ]


def test_ranks_that_make_no_whole_copies_are_refused(configure: Configure) -> None:
    with pytest.raises(
        ConfigError, match=r"ref:6 makes no whole copies of 8 ranks \(ref.shards, ref.megatron\); give a multiple of 8"
    ):
        place_gangs(configure("rollout:2,actor:2,ref:6", ref=MEGATRON), Devices("cpu"))


def test_a_teacher_that_makes_no_whole_copies_is_refused_by_its_own_setting(configure: Configure) -> None:
    config = configure("rollout:2,actor:2,teacher:3", teacher={"engine": "fsdp", "shards": 2})
    with pytest.raises(ConfigError, match=r"teacher:3 makes no whole copies of 2 ranks \(teacher.shards\); give a"):
        place_gangs(config, Devices("cpu"))


def test_a_copy_larger_than_a_node_is_refused(configure: Configure) -> None:
    config = configure("rollout:2,actor:2,ref:8", ref=MEGATRON)
    with pytest.raises(
        ConfigError, match=r"^ref.shards, ref.megatron: 8 ranks share a model on one node, but a node has 4"
    ):
        place_gangs(config, Devices("npu", 4), num_nodes=4)


@pytest.mark.parametrize(
    ("roles", "ref", "expected"),
    [
        ("rollout:1,actor:1,ref:1", {"engine": "fsdp"}, "set ref.shards to 2 or more"),
        ("rollout:1,actor:1,ref:1", {"engine": "megatron"}, "set ref.megatron.tensor_parallel to 2 or more"),
        ("rollout:1,actor:1", {"engine": "fsdp", "shards": 2}, "^ref.engine: fsdp needs role ref, whose ranks"),
    ],
)
def test_a_shared_reference_needs_ranks(configure: Configure, roles: str, ref: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        check_rules(configure(roles, ref=ref), AT_START)


def test_tri_model_needs_no_role_for_the_reference(configure: Configure) -> None:
    check_rules(configure("rollout:1,actor:1", ref=MEGATRON, actor={"tri_model": True}), AT_START)


def test_a_rank_has_its_part_of_the_weights(configure: Configure) -> None:
    def of_ref(ref: dict[str, Any]) -> dict[str, int]:
        config = configure("rollout:2,actor:2,ref:8", model={"path": "model", "dtype": "bfloat16"}, ref=ref)
        return memory_of_roles(config, QWEN_32B)["ref"]

    whole, fsdp, megatron = of_ref({}), of_ref({"engine": "fsdp", "shards": 8}), of_ref({**MEGATRON, "shards": 1})
    assert whole["weights"] == 2 * QWEN_32B.num_parameters
    assert fsdp["weights"] == pytest.approx(whole["weights"] / 8)
    root_and_two_layers = 2 * (2 * 152064 * 5120 + 2 * QWEN_32B.layer_parameters)
    assert fsdp["gathered"] == pytest.approx(root_and_two_layers, rel=1e-3)
    assert fsdp["activations"] == pytest.approx(whole["activations"] / 8)
    first_stage = 32 * QWEN_32B.layer_parameters + 152064 * 5120
    assert megatron["weights"] == pytest.approx(2 * first_stage / 4)


def test_copies_of_the_policy_are_divided_as_megatron_divides_it(configure: Configure) -> None:
    actor = {**MEGATRON, "tri_model": True, "autocast": "bfloat16"}
    parts = memory_of_roles(configure("rollout:2,actor:16", actor=actor), QWEN_32B)["actor"]
    assert parts["policy copies"] == parts["weights"], "two replicas have a copy each"


@pytest.mark.parametrize("model", ["ref", "teacher"])
def test_shards_that_no_engine_makes_are_refused(model: str) -> None:
    with pytest.raises(ConfigError, match=f"^{model}.shards: 2 .*; only engine fsdp divides a copy over ranks"):
        load_config(find_recipe("quickstart"), overrides=(f"{model}.shards=2",))
