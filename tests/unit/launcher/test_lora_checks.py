"""Runs with an adapter: what is refused before a start, and what memory, planner and estimates count."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import write_model
from planned import QWEN_7B, changed, cost_model, qwen_run
from safetensors.torch import load_file, save_file

from asyncflow.errors import ConfigError
from launcher.checks.models import check_models
from launcher.checks.preflight import check_run
from launcher.config.load_config import load_config
from launcher.config.paths import find_recipe
from launcher.config.rules import AT_START, check_rules
from launcher.doctor.estimate import memory_parts
from launcher.request.stop_time import saved_bytes
from workers.engines.device_memory import ModelSizes, fsdp_memory, memory_of_roles
from workers.engines.lora import Trained
from workers.settings.engines import ActorConfig
from workers.settings.lora import LoraConfig
from workers.settings.megatron import DenseModel, MegatronConfig, check_adapted
from workers.settings.run import COLOCATED, RunConfig

SMOLLM2 = ModelSizes(
    num_parameters=134_515_008, num_layers=30, hidden_size=576, num_heads=9, num_kv_heads=3, head_dim=64,
    ffn_size=1536, vocab_size=49152, tied=True,
)  # fmt: skip
_QWEN_SIZES = ModelSizes.from_config(QWEN_7B)
assert _QWEN_SIZES is not None
QWEN_SIZES: ModelSizes = _QWEN_SIZES
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


def test_tied_modules_are_not_trained_whole(tmp_path: Path) -> None:
    model = Path(shutil.copytree(load_config(find_recipe("quickstart")).model.path, tmp_path / "model"))
    settings = json.loads((model / "config.json").read_text()) | {"tie_word_embeddings": True}
    (model / "config.json").write_text(json.dumps(settings))
    tensors = load_file(model / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    for module in ("embed_tokens", "lm_head"):
        own = ("lora.rank=4", f"lora.modules_to_save=[{module}]", f"model.path={model}", "weightsync.lora=merged")
        with pytest.raises(ConfigError, match=f"^lora.modules_to_save: {module} is tied .*; leave the module out"):
            check_models(load_config(find_recipe("quickstart"), overrides=own), has_ipc=False)


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
    trained = SMOLLM2.trained_parameters(configure().lora).total
    assert own["gradients"] == 4 * trained and full["gradients"] == 4 * SMOLLM2.num_parameters
    assert own["moments"] == 8 * trained and "masters" not in own


def test_parameters_of_the_adapter_are_counted() -> None:
    lora = LoraConfig(rank=16)
    all_a = 30 * 16 * (6 * 576 + 1536)
    assert SMOLLM2.trained_parameters(lora) == Trained(ADAPTER_OF_SMOLLM2, all_a, undivided=30 * 16 * 7 * 576)
    assert SMOLLM2.trained_parameters(None) == Trained(SMOLLM2.num_parameters)
    of_q = SMOLLM2.trained_parameters(LoraConfig(rank=16, targets=("q_proj",)))
    assert (of_q.total, of_q.on_rank(3)) == (30 * 16 * 2 * 576, 30 * 16 * (576 + 576 // 3))
    with_norm = SMOLLM2.trained_parameters(LoraConfig(rank=16, modules_to_save=("norm",)))
    assert with_norm == replace(SMOLLM2.trained_parameters(lora), total=ADAPTER_OF_SMOLLM2 + 576)


@pytest.mark.parametrize(("autocast", "number"), [("float32", 4), ("bfloat16", 2)])
@pytest.mark.parametrize("ranks", [1, 4])
def test_state_is_the_frozen_base_and_sixteen_bytes_for_what_is_trained(autocast: str, number: int, ranks: int) -> None:
    actor = ActorConfig.model_validate({"autocast": autocast})
    parts = fsdp_memory(SMOLLM2, actor, ranks, 100, trained=Trained(ADAPTER_OF_SMOLLM2))
    state = sum(parts.get(name, 0) for name in ("weights", "gradients", "moments", "bfloat16 copy"))
    assert state == pytest.approx((number * SMOLLM2.num_parameters + 16 * ADAPTER_OF_SMOLLM2) / ranks, rel=1e-6)
    full = fsdp_memory(SMOLLM2, actor, ranks, 100)
    assert parts.get("reduced", 0) <= full.get("reduced", 0) / 50


def test_ranks_that_merge_have_every_a_whole() -> None:
    def actor_parts(roles: str, sent: str) -> dict[str, int]:
        return memory_of_roles(configure(f"weightsync.lora={sent}", roles=roles), SMOLLM2)["actor"]

    two, own = "rollout:1,actor:2", SMOLLM2.trained_parameters(configure().lora)
    assert actor_parts(two, "merged")["lora_A"] == 4 * own.all_a
    assert "lora_A" not in actor_parts(two, "adapter") | actor_parts("rollout:1,actor:1", "merged")


def test_receivers_of_an_adapter_have_it_beside_the_base() -> None:
    def adapters(*settings: str, roles: str = "rollout:4,actor:1,ref:1,evaluate:2") -> dict[str, int]:
        config = configure(*settings, roles=roles)
        roles = memory_of_roles(config, SMOLLM2)
        return {role: parts["adapter"] for role, parts in roles.items() if "adapter" in parts}

    own = SMOLLM2.trained_parameters(LoraConfig(rank=4))
    assert adapters() == {"rollout": 4 * own.total, "evaluate": 4 * own.total}
    moving = adapters("algorithm.kl_coef=0.1", "algorithm.ref_update_interval=2", "model.dtype=bfloat16")
    assert moving == dict.fromkeys(("rollout", "evaluate", "ref"), 2 * own.total)
    assert adapters("weightsync.lora=merged") == {}
    # vLLM has room for rank 8, and its ranks divide one of A and B.
    of_vllm = adapters("rollout.engine=vllm", "vllm.tensor_parallel_size=3", roles="rollout:3,actor:1,ref:1")
    assert of_vllm == {"rollout": 4 * 2 * own.on_rank(3)}


def test_reference_takes_no_memory_of_its_own() -> None:
    def parts(*settings: str) -> dict[str, int]:
        return memory_of_roles(configure("algorithm.kl_coef=0.1", *settings), SMOLLM2)["actor"]

    assert "reference" not in parts()
    for other in ("lora=null", "lora.modules_to_save=[norm]", "ref.path=" + configure().model.path):
        assert parts(other)["reference"] == 4 * SMOLLM2.num_parameters


def test_estimates_before_a_start_count_what_is_trained() -> None:
    own, full = check_run(configure("lora.rank=2")), check_run(configure("lora=null"))
    assert own.trained.total < full.trained.total == full.num_parameters
    assert saved_bytes(own) / saved_bytes(full) == pytest.approx(own.trained.total / full.trained.total)
    actors = [memory_parts(checked)["actor"] for checked in (own, full)]
    reference = 4 * full.num_parameters
    assert actors == [4 * full.num_parameters + 16 * own.trained.total, 16 * full.num_parameters + reference]


def test_planner_counts_a_pass_less_and_the_adapter_s_update(tmp_path: Path) -> None:
    qwen = qwen_run(tmp_path)
    actor = qwen.actor.model_copy(update={"engine": "fsdp", "gradient_checkpointing": False})
    full = qwen.model_copy(update={"actor": actor, "roles": {"rollout": 4, "actor": 4}})
    adapted = full.model_copy(update={"lora": LoraConfig(rank=16)})
    whole, own = (cost_model(config).estimate_times() for config in (full, adapted))
    share = QWEN_SIZES.trained_parameters(adapted.lora).total / QWEN_SIZES.num_parameters
    assert own.train["actor"].token_s == pytest.approx((2 / 3 + share) * whole.train["actor"].token_s)
    assert own.train["actor"].squared_s == whole.train["actor"].squared_s
    assert own.update_s["actor"] == pytest.approx(share * whole.update_s["actor"])
    assert own.train["actor"].floor_s < whole.train["actor"].floor_s
    assert own.pause_s == pytest.approx(share * whole.pause_s)
    # Scored by the model in training, whose weights are gathered.
    assert own.tasks["ref_log_probs"] == own.tasks["actor_log_probs"] != whole.tasks["ref_log_probs"]


def test_planner_knows_what_tensor_parallel_ranks_have_of_an_adapter(tmp_path: Path) -> None:
    qwen = qwen_run(tmp_path)
    config = qwen.model_copy(update={"lora": LoraConfig(rank=16), "roles": {"rollout": 4, "actor": 8}})
    own = QWEN_SIZES.trained_parameters(config.lora).on_rank(4)
    # Two replicas divide the update, reduce gradients and gather weights, all in float32.
    exchanged_s = 2 * 4 * own / 2 / (450e9 * 0.7)
    expected = 28 * own / 2 / (3350e9 * 0.7) + exchanged_s
    assert cost_model(config).estimate_times().update_s["actor"] == pytest.approx(expected)


def test_planner_counts_the_adapter_where_responses_are_drawn(tmp_path: Path) -> None:
    config = qwen_run(tmp_path).model_copy(update={"lora": LoraConfig(rank=256), "roles": {"rollout": 4, "actor": 4}})
    merged = config.weightsync.model_copy(update={"lora": "merged"})
    own, base = (cost_model(each) for each in (config, config.model_copy(update={"weightsync": merged})))
    trained, number = QWEN_SIZES.trained_parameters(config.lora).total, QWEN_SIZES.num_parameters
    overhead_s = own.device.step_overhead_s
    assert (own.decode_s(1, 1) - overhead_s) / (base.decode_s(1, 1) - overhead_s) == pytest.approx(
        1 + trained / number, rel=1e-3
    )
    prefills = [costs.estimate_times().prefill.token_s for costs in (own, base)]
    assert prefills[0] / prefills[1] == pytest.approx(1 + trained / number)


def test_planner_moves_the_base_of_a_generator_that_sleeps(tmp_path: Path) -> None:
    """With adapters as versions it waits in host memory, which the doctor counts; a whole version replaces it."""
    qwen = changed(qwen_run(tmp_path), engine="fsdp")
    shared = {"lora": LoraConfig(rank=16), "roles": {"rollout": 8, "actor": 8}, "colocated": COLOCATED}
    config = qwen.model_copy(update=shared)
    own, rate = QWEN_SIZES.trained_parameters(config.lora), 64e9 * 0.7
    base_s = 2 * (QWEN_SIZES.num_parameters + own.total) / rate
    state_s = (2 * QWEN_SIZES.num_parameters + 12 * own.total) / 8 / rate
    times = cost_model(config).estimate_times()
    assert times.to_actor_s == pytest.approx(state_s + base_s)
    assert times.to_rollout_s == pytest.approx(state_s + base_s + 2 * own.total / rate)
    merged = config.model_copy(update={"weightsync": config.weightsync.model_copy(update={"lora": "merged"})})
    gathered_s = 4 * own.all_a / rate
    assert cost_model(merged).estimate_times().to_actor_s == pytest.approx(state_s + gathered_s)


def test_planner_sends_versions_in_the_dtype_in_which_they_travel(tmp_path: Path) -> None:
    config = qwen_run(tmp_path)
    wide = config.model_copy(update={"weightsync": config.weightsync.model_copy(update={"dtype": "float32"})})
    assert cost_model(wide).estimate_times().pause_s == pytest.approx(2 * cost_model(config).estimate_times().pause_s)
