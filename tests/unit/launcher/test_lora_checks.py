"""Runs with an adapter: what is refused before a start, and what memory, planner and estimates count."""

from pathlib import Path

import pytest
from conftest import write_model
from planned import QWEN_7B, cost_model, qwen_run

from asyncflow.errors import ConfigError
from launcher.checks.models import check_models
from launcher.checks.preflight import check_run
from launcher.config.load_config import load_config
from launcher.config.paths import find_recipe
from launcher.config.rules import AT_START, check_rules
from launcher.doctor.estimate import memory_parts
from launcher.request.stop_time import saved_bytes
from workers.engines.device_memory import ModelSizes, fsdp_memory, memory_of_roles
from workers.settings.engines import ActorConfig
from workers.settings.lora import LoraConfig
from workers.settings.megatron import DenseModel, MegatronConfig, check_adapted
from workers.settings.run import RunConfig

SMOLLM2 = ModelSizes(
    num_parameters=134_515_008, num_layers=30, hidden_size=576, num_heads=9, num_kv_heads=3, head_dim=64,
    ffn_size=1536, vocab_size=49152, tied=True,
)  # fmt: skip
ADAPTER_OF_SMOLLM2 = 4_884_480
"""Rank 16, all linear layers: 16 x (in + out) of each."""

MEGATRON = ("ref.engine=megatron", "ref.megatron.tensor_parallel=2")


def configure(*settings: str, roles: str = "rollout:1,actor:1") -> RunConfig:
    own = ("launcher.device=cpu", "lora={rank: 4}", *settings)
    return load_config(find_recipe("quickstart"), overrides=own, roles=roles)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            ("actor.engine=megatron", "lora.modules_to_save=[norm]", "weightsync.lora=merged"),
            "^lora.modules_to_save: cannot be used with actor.engine megatron",
        ),
        (("lora.modules_to_save=[norm]",), "^lora.modules_to_save: cannot be used with weightsync.lora adapter"),
        (
            ("lora.modules_to_save=[norm]", "weightsync.lora=merged", "actor.autocast=bfloat16"),
            "^lora.modules_to_save: cannot be used with one actor rank and actor.autocast bfloat16",
        ),
        (
            ("algorithm.kl_coef=0.1", "algorithm.ref_update_interval=2", *MEGATRON),
            "^weightsync.lora: adapter cannot be used with algorithm.ref_update_interval",
        ),
        (
            ("actor.tri_model=true", "actor.num_mini_batches=2", "algorithm.kl_coef=0.1"),
            "^actor.tri_model: cannot be used with lora here, since the actor would keep . older policies",
        ),
        (("ref.path={model}", "algorithm.kl_coef=0"), "^ref.path: has nothing to do because algorithm.kl_coef is 0"),
        (
            ("ref.path={model}", "algorithm.kl_coef=0.1", "algorithm.ref_update_interval=2"),
            "^ref.path: cannot be used with algorithm.ref_update_interval",
        ),
    ],
)
def test_what_excludes_an_adapter_is_refused(settings: tuple[str, ...], message: str) -> None:
    model = load_config(find_recipe("quickstart")).model.path
    roles = "rollout:1,actor:1,ref:2" if MEGATRON[0] in settings else "rollout:1,actor:1"
    config = configure(*(one.format(model=model) if "{model}" in one else one for one in settings), roles=roles)
    with pytest.raises(ConfigError, match=message):
        check_rules(config, AT_START)


def test_engines_of_users_train_no_adapters() -> None:
    config = configure()
    actor = config.actor.model_copy(update={"engine": "own:Engine"})
    with pytest.raises(ConfigError, match="^lora: actor.engine own:Engine trains no adapters; set it to fsdp or meg"):
        check_rules(config.model_copy(update={"actor": actor}), AT_START)


@pytest.mark.parametrize("init", ["pissa", "pissa_niter_4", "olora", "LoftQ"])
def test_initializations_that_rewrite_the_base_are_refused_by_name(init: str) -> None:
    with pytest.raises(ConfigError, match=f"^lora.init: '{init}' cannot be used .*; {init} rewrites the base"):
        configure(f"lora.init={init}")


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        ("q_proj", "'q_proj' cannot be used .*; give all-linear, or ends of"),
        ("[all-linear]", "all-linear stands alone"),
    ],
)
def test_targets_are_a_list_of_names_or_all(targets: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^lora.targets: .*{message}") as refused:
        configure(f"lora.targets={targets}")
    assert "\n" not in str(refused.value) and " more)" not in str(refused.value)


@pytest.mark.parametrize(
    ("key", "message"),
    [("use_dora", "it is not supported; remove it"), ("r", "it is called rank here; rename it")],
)
def test_names_of_peft_are_answered_and_told_where_they_were_given(key: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^lora.{key}: 8 cannot be used .from --set lora.{key}=8.; {message}$"):
        configure(f"lora.{key}=8")


def test_scaling_is_peft_s() -> None:
    assert LoraConfig(rank=8).scaling == 1
    assert LoraConfig(rank=16, alpha=32).scaling == 2
    assert LoraConfig(rank=16, alpha=32, use_rslora=True).scaling == 8


def test_the_actor_has_the_reference_without_a_copy_only_while_it_is_its_base() -> None:
    assert configure().reference_is_base
    other = ("lora.modules_to_save=[norm]", "algorithm.ref_update_interval=1", "ref.path=" + configure().model.path)
    for setting in other:
        assert not configure(setting).reference_is_base, setting
    assert not load_config(find_recipe("quickstart")).reference_is_base


def test_targets_and_tokens_are_checked_against_the_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^lora.targets: 'q': the model has no such module; it has down_proj "):
        check_models(configure("lora.targets=[q]"))
    reference = write_model(tmp_path / "ref", fill=0.0)
    with pytest.raises(ConfigError, match=r"^ref.path: .*ref has other tokens than the policy"):
        check_models(configure(f"ref.path={reference}", "algorithm.kl_coef=0.1"))
    with pytest.raises(ConfigError, match=r"^lora.path: .* cannot be read as an adapter"):
        check_models(configure(f"lora.path={reference}"))
    with pytest.raises(ConfigError, match=r"^lora.path: 'nowhere' does not exist"):
        configure("lora.path=nowhere")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (("lora.rank=65",), "^lora.rank: 65 is more than 64, the smaller side of the lar.*; set it to 64 or less$"),
        (
            ("algorithm={name: dppo, divergence_top_k: 17}",),
            "^algorithm.divergence_top_k: 17 is more than the 16 tokens of model.path .*; set it to 16 or less$",
        ),
        (
            ("rollout.keep_sampling_mask=true", "rollout.top_k=17"),
            "^rollout.top_k: 17 is more than the 16 tokens of model.path .*; set it to 16 or less$",
        ),
    ],
)
def test_what_is_more_than_the_model_has_is_refused(settings: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_models(configure(*settings))


def test_parts_of_megatrons_pipeline_without_an_adapted_module_are_refused() -> None:
    model = DenseModel.from_config(QWEN_7B)
    targets = [f"model.layers.{layer}.self_attn.q_proj" for layer in range(28)]
    stages = MegatronConfig(pipeline_parallel=2, virtual_pipeline=2)
    check_adapted(targets, model, stages)
    check_adapted(targets[:7], model, MegatronConfig())
    with pytest.raises(ConfigError, match=r"^lora.targets: no module of layers 14 to 20 is adapted.*; name some in"):
        check_adapted(targets[:14] + targets[21:], model, stages)


def test_estimates_count_the_adapter_of_megatron_alone() -> None:
    settings = ("actor.engine=megatron", "actor.autocast=bfloat16")
    own, full = (memory_of_roles(configure(*settings, *more), SMOLLM2)["actor"] for more in ((), ("lora=null",)))
    trained = SMOLLM2.trained_parameters(configure().lora)
    assert own["gradients"] == 4 * trained and full["gradients"] == 4 * SMOLLM2.num_parameters
    assert own["moments"] == 8 * trained and "masters" not in own


def test_parameters_of_the_adapter_are_counted() -> None:
    lora = LoraConfig(rank=16)
    assert SMOLLM2.trained_parameters(lora) == ADAPTER_OF_SMOLLM2
    assert SMOLLM2.trained_parameters(None) == SMOLLM2.num_parameters
    assert SMOLLM2.trained_parameters(LoraConfig(rank=16, targets=("q_proj",))) == 30 * 16 * 2 * 576
    assert SMOLLM2.trained_parameters(LoraConfig(rank=16, modules_to_save=("norm",))) == ADAPTER_OF_SMOLLM2 + 576


@pytest.mark.parametrize(("autocast", "number"), [("float32", 4), ("bfloat16", 2)])
@pytest.mark.parametrize("ranks", [1, 4])
def test_state_is_the_frozen_base_and_sixteen_bytes_for_what_is_trained(autocast: str, number: int, ranks: int) -> None:
    actor = ActorConfig.model_validate({"autocast": autocast})
    parts = fsdp_memory(SMOLLM2, actor, ranks, 100, trained=ADAPTER_OF_SMOLLM2)
    state = sum(parts.get(name, 0) for name in ("weights", "gradients", "moments", "bfloat16 copy"))
    assert state == pytest.approx((number * SMOLLM2.num_parameters + 16 * ADAPTER_OF_SMOLLM2) / ranks, rel=1e-6)
    full = fsdp_memory(SMOLLM2, actor, ranks, 100)
    assert parts.get("reduced", 0) <= full.get("reduced", 0) / 50


def test_reference_takes_no_memory_of_its_own() -> None:
    def parts(*settings: str) -> dict[str, int]:
        return memory_of_roles(configure("algorithm.kl_coef=0.1", *settings), SMOLLM2)["actor"]

    assert "reference" not in parts()
    for other in ("lora=null", "lora.modules_to_save=[norm]", "ref.path=" + configure().model.path):
        assert parts(other)["reference"] == 4 * SMOLLM2.num_parameters


def test_estimates_before_a_start_count_what_is_trained() -> None:
    own, full = check_run(configure("lora.rank=2")), check_run(configure("lora=null"))
    assert own.num_trained < full.num_trained == full.num_parameters
    assert saved_bytes(own) / saved_bytes(full) == pytest.approx(own.num_trained / full.num_trained)
    actors = [memory_parts(checked)["actor"] for checked in (own, full)]
    reference = 4 * full.num_parameters
    assert actors == [4 * full.num_parameters + 16 * own.num_trained, 16 * full.num_parameters + reference]


def test_planner_counts_a_pass_less_and_the_adapter_s_update(tmp_path: Path) -> None:
    qwen = qwen_run(tmp_path)
    actor = qwen.actor.model_copy(update={"engine": "fsdp", "gradient_checkpointing": False})
    full = qwen.model_copy(update={"actor": actor, "roles": {"rollout": 4, "actor": 4}})
    adapted = full.model_copy(update={"lora": LoraConfig(rank=16)})
    whole, own = (cost_model(config).estimate_times() for config in (full, adapted))
    sizes = ModelSizes.from_config(QWEN_7B)
    assert sizes is not None
    share = sizes.trained_parameters(adapted.lora) / sizes.num_parameters
    assert own.train["actor"].token_s == pytest.approx((2 / 3 + share) * whole.train["actor"].token_s)
    assert own.train["actor"].squared_s == whole.train["actor"].squared_s
    assert own.update_s["actor"] == pytest.approx(share * whole.update_s["actor"])
    assert own.train["actor"].floor_s < whole.train["actor"].floor_s
    assert own.pause_s == pytest.approx(share * whole.pause_s)
    # Scored by the model in training, whose weights are gathered.
    assert own.tasks["ref_log_probs"] == own.tasks["actor_log_probs"] != whole.tasks["ref_log_probs"]
