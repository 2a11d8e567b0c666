"""How ranks and models are divided, and which are refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from asyncflow.errors import ConfigError
from launcher.checks.models import check_megatron
from launcher.config.load_config import load_config
from launcher.config.paths import find_recipe
from workers.rank.peers import ReplicaPlace
from workers.settings.engines import ActorConfig
from workers.settings.megatron import DenseModel, MegatronConfig, MegatronLayout, MegatronPlace, check_division
from workers.settings.run import RunConfig

LLAMA: dict[str, Any] = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 4, "hidden_size": 24,
    "num_attention_heads": 6, "num_key_value_heads": 2, "intermediate_size": 40, "vocab_size": 13,
    "max_position_embeddings": 64, "rms_norm_eps": 1e-6,
}  # fmt: skip


def test_every_rank_has_one_place() -> None:
    layout = MegatronLayout(tensor=2, replicas=3, stages=2)
    places = [layout.place(rank) for rank in range(12)]
    assert len(set(places)) == 12
    assert [layout.rank(place) for place in places] == list(range(12))
    assert places[3] == MegatronPlace(tensor=1, replica=1, stage=0)
    assert layout.replica_ranks(1) == (2, 3, 8, 9)


def test_ranks_that_share_tokens_hold_the_same_part_of_a_replica() -> None:
    layout = MegatronLayout(tensor=2, replicas=2, stages=2, context=2)
    places = [layout.place(rank) for rank in range(16)]
    assert len(set(places)) == 16
    assert [layout.rank(place) for place in places] == list(range(16))
    assert layout.replica_ranks(1) == (4, 5, 6, 7, 12, 13, 14, 15)
    assert layout.context_ranks()[:3] == ((0, 2), (1, 3), (4, 6))
    for ranks in layout.context_ranks():
        assert len({(p.tensor, p.replica, p.stage) for p in (places[rank] for rank in ranks)}) == 1
    assert sorted(rank for ranks in layout.context_ranks() for rank in ranks) == list(range(16))


def test_ranks_of_a_replica_have_the_same_rows_and_one_lead() -> None:
    actor = ActorConfig(engine="megatron", megatron=MegatronConfig(tensor_parallel=2))
    places = [ReplicaPlace.of_rank(actor, rank, 4) for rank in range(4)]
    assert [(place.index, place.count, place.leads) for place in places] == [
        (0, 2, True), (0, 2, False), (1, 2, True), (1, 2, False),
    ]  # fmt: skip
    fsdp = [ReplicaPlace.of_rank(ActorConfig(), rank, 2) for rank in range(2)]
    assert [(place.index, place.count, place.leads) for place in fsdp] == [(0, 2, True), (1, 2, True)]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"rope_theta": 5e5}, (5e5, 0.0)),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, (1e6, 0.0)),
        (
            {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0,
             "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}},
            (5e5, 32.0),
        ),
    ],
)  # fmt: skip
def test_rotary_settings_are_read_in_old_and_new_form(changes: dict[str, Any], expected: tuple[float, float]) -> None:
    model = DenseModel.from_config(LLAMA | changes)
    assert (model.rope_base, model.rope_factor) == expected


def test_families_differ_in_bias_and_norms() -> None:
    families = {
        family: DenseModel.from_config(LLAMA | {"model_type": family}) for family in ("llama", "qwen2", "qwen3")
    }
    assert {family: (m.qkv_bias, m.qk_norm) for family, m in families.items()} == {
        "llama": (False, False), "qwen2": (True, False), "qwen3": (False, True),
    }  # fmt: skip


@pytest.mark.parametrize(
    "changes",
    [
        {"model_type": "qwen3_moe"}, {"hidden_act": "gelu"}, {"attention_bias": True}, {"mlp_bias": True},
        {"use_sliding_window": True}, {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
        {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 2.0, "high_freq_factor": 4.0,
         "original_max_position_embeddings": 8192}},
        {"hidden_size": None}, {"num_attention_heads": 0, "num_key_value_heads": 0}, {"rope_scaling": "yarn"},
        {"rms_norm_eps": "small"},
    ],
)  # fmt: skip
def test_models_that_are_not_mapped_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"megatron cannot train .*set actor\.engine to fsdp"):
        DenseModel.from_config(LLAMA | changes)


@pytest.mark.parametrize(
    ("division", "named"),
    [
        ({"tensor_parallel": 4}, "num_attention_heads 6"),
        ({"tensor_parallel": 3}, "num_key_value_heads 2"),
        ({"pipeline_parallel": 3}, "4 layers"),
        ({"pipeline_parallel": 2, "virtual_pipeline": 3}, r"virtual_pipeline: 3 does not divide the 2 layers"),
        ({"context_parallel": 4}, "6 attention heads"),
        ({"tensor_parallel": 2, "context_parallel": 2}, "3 attention heads"),
    ],
)
def test_what_does_not_divide_is_refused(division: dict[str, int], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        check_division(DenseModel.from_config(LLAMA), MegatronConfig(**division))


@pytest.fixture
def run_config(tmp_path: Path) -> RunConfig:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    config = load_config(find_recipe(None), overrides=["actor.engine=megatron", "actor.megatron.tensor_parallel=2"])
    return config.model_copy(
        update={"model": config.model.model_copy(update={"path": str(tmp_path)}), "roles": {"rollout": 1, "actor": 4}}
    )


def test_preflight_takes_whole_replicas_only(run_config: RunConfig) -> None:
    check_megatron(run_config)
    with pytest.raises(ConfigError, match="actor:3 makes no whole replicas"):
        check_megatron(run_config.model_copy(update={"roles": {"rollout": 1, "actor": 3}}))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["actor.megatron.virtual_pipeline=2"], r"^actor\.megatron\.virtual_pipeline: 2 .*; only several stages"),
        (
            ["actor.engine=megatron", "actor.fsdp_size=2"],
            r"^actor\.fsdp_size: 2 .*; only engine fsdp shards; set it to 0",
        ),
    ],
)
def test_divisions_of_another_engine_or_without_stages_are_refused(settings: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(find_recipe(None), overrides=settings)


def test_shards_make_whole_copies() -> None:
    ActorConfig(fsdp_size=2).check_fsdp_size(4)
    with pytest.raises(ConfigError, match=r"^critic\.fsdp_size: 3 does not divide the 4 ranks of critic; choose"):
        ActorConfig(fsdp_size=3).check_fsdp_size(4, section="critic")


def test_what_megatron_does_not_compile_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^actor\.compile: True cannot be used .*; megatron's .*set it to false"):
        load_config(find_recipe(None), overrides=["actor.engine=megatron", "actor.compile=true"])
