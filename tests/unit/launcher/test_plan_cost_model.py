"""What computing takes on a device, by FLOPs, bytes and traffic; and the catalogue of devices."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
from planned import QWEN_7B, changed, changed_vllm, cost_model, train_work

from asyncflow.errors import ConfigError
from launcher.config.load_config import load_config
from launcher.config.paths import find_recipe
from launcher.plan.cost_model import find_device
from launcher.plan.plan_report import open_planner
from launcher.plan.scenario import Latency
from workers.engines.device_memory import ModelSizes
from workers.settings.algorithms import OutsideConfig, PPOConfig
from workers.settings.rewards import RewardModelConfig
from workers.settings.run import COLOCATED, RunConfig
from workers.settings.schedule import ScheduleMode

DEVICES = ("ascend-910b", "ascend-910c", "a100", "h100", "h200", "cpu")


def parameters_of(config: dict[str, Any]) -> int:
    sizes = ModelSizes.from_config(config)
    assert sizes is not None
    return sizes.num_parameters


def forward_s(*, ranks: int) -> float:
    return 2 * parameters_of(QWEN_7B) / (ranks * 989e12 * 0.5)


@pytest.mark.parametrize("name", DEVICES)
def test_every_number_of_a_device_says_where_it_is_from(name: str) -> None:
    device = find_device(name)
    numbers = (device.model_fields_set | {"achievable"}) - {"name", "sources"}
    assert device.name == name
    assert numbers == device.sources.keys()


def test_an_unknown_device_and_a_wrong_file_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--device h1000: is not known; give one of a100"):
        find_device("h1000")
    (tmp_path / "mine.yaml").write_text("name: mine\n")
    with pytest.raises(ConfigError, match=r"mine.yaml: peak_tflops: Field required"):
        find_device(str(tmp_path / "mine.yaml"))
    (tmp_path / "mine.yaml").write_text("name: mine\npeak_tflops: {bfloat16: 100}\n")
    with pytest.raises(ConfigError, match=r"mine.yaml: peak_tflops.float32: Field required"):
        find_device(str(tmp_path / "mine.yaml"))
    (tmp_path / "mine.yaml").write_text("name: mine\npeak_tflops: {bfloat16: 100, float32: 0}\n")
    with pytest.raises(ConfigError, match=r"mine.yaml: peak_tflops.float32: Input should be greater than 0"):
        find_device(str(tmp_path / "mine.yaml"))


def test_parameters_follow_from_the_models_sizes() -> None:
    assert parameters_of(QWEN_7B) == pytest.approx(7.615e9, rel=0.002)


def test_decoding_is_bound_by_memory_with_few_responses_and_by_products_with_many(qwen: RunConfig) -> None:
    times = open_planner(qwen, devices=16, device="h100").times(qwen)
    read_s = 2 * parameters_of(QWEN_7B) / (3.35e12 * 0.7)
    assert times.decode_s(1) == pytest.approx(read_s + 0.002, rel=0.02)
    assert times.decode_s(4000) > 2 * parameters_of(QWEN_7B) * 4000 / (989e12 * 0.5)


def test_training_takes_the_flops_of_four_passes_and_adamw_its_bytes(qwen: RunConfig) -> None:
    roles = qwen.roles | {"actor": 4}
    times = open_planner(qwen, devices=16, device="h100").times(qwen.model_copy(update={"roles": roles}))
    least_s = 4 * 2 * parameters_of(QWEN_7B) / (4 * 989e12 * 0.4)  # recomputed activations, four tensor-parallel ranks
    assert least_s < times.train["actor"].token_s < 2.5 * least_s
    assert times.update_s["actor"] == pytest.approx(28 * parameters_of(QWEN_7B) / 4 / (3.35e12 * 0.7))


def test_context_parallelism_divides_tokens_and_exchanges_heads(qwen: RunConfig) -> None:
    planner = open_planner(qwen, devices=16, device="h100")
    alone, shared = (
        planner.times(changed(qwen, megatron={"context_parallel": number, "tensor_parallel": 1})).train["actor"]
        for number in (1, 2)
    )
    a_pass = 28 * 2 * (28 + 4) * 128 * 2 / 2  # q, k, v and output of each layer; half of them goes to the other rank
    exchanged_s = 3 * a_pass / 2 / (planner.device.link_gb_s * 1e9 * 0.7) if planner.device else 0.0
    assert shared.token_s == pytest.approx(alone.token_s / 2 + exchanged_s)
    assert shared.squared_s == pytest.approx(alone.squared_s / 2)


def test_ranks_that_share_a_machine_are_in_one_node() -> None:
    quickstart = load_config(find_recipe("quickstart")).model_copy(update={"roles": {"rollout": 1, "actor": 1}})
    more = quickstart.model_copy(update={"roles": {"rollout": 4, "actor": 4}})
    planner = open_planner(quickstart, devices=8, device="cpu")
    transfers_s = [planner.times(each).latency.transfer_s for each in (quickstart, more)]
    assert transfers_s == [Latency().transfer_s] * 2
    floors = [planner.times(quickstart.model_copy(update={"roles": {"rollout": 1, "actor": n}})) for n in (2, 4)]
    two, four = (times.train["actor"].floor_s for times in floors)
    assert four / two == pytest.approx((3 / 4) / (1 / 2))  # over the same link


def test_weights_reach_other_nodes_over_tcp_between_the_hosts(qwen: RunConfig) -> None:
    roles = [
        {"rollout": 4, "actor": 4},
        {"rollout": 8, "actor": 8},
        {"rollout": 24, "actor": 8},
        {"rollout": 16, "actor": 16},
    ]
    latencies = [cost_model(qwen.model_copy(update={"roles": each})).estimate_times().latency for each in roles]
    once_s = 2 * parameters_of(QWEN_7B) / (1.25e9 * 0.7)
    # One node; one sends to one; one to three, which share what it can send; two to two
    assert [each.transfer_s - Latency().transfer_s for each in latencies] == pytest.approx(
        [0, once_s, 3 * once_s, once_s]
    )


def test_a_broadcast_holds_up_the_trainer_and_instances_read_it_from_their_own_memory(qwen: RunConfig) -> None:
    two_nodes = qwen.model_copy(update={"roles": {"rollout": 8, "actor": 8}})
    weightsync = qwen.weightsync.model_copy(update={"path": "broadcast"})
    staged, sent = (
        cost_model(each).estimate_times()
        for each in (two_nodes, two_nodes.model_copy(update={"weightsync": weightsync}))
    )
    size = 2 * parameters_of(QWEN_7B)
    assert staged.pause_s == pytest.approx(size / (64e9 * 0.7))
    assert sent.pause_s == pytest.approx(2 * size / (3350e9 * 0.7))
    assert sent.latency.publish_s - staged.latency.publish_s == pytest.approx(size / (50e9 * 0.7))
    assert sent.latency.transfer_s == Latency().transfer_s


def test_a_switch_of_colocated_roles_moves_the_trainers_state_and_loads_new_weights(qwen: RunConfig) -> None:
    shared = changed(
        qwen.model_copy(update={"roles": {"rollout": 8, "actor": 8}, "colocated": COLOCATED}), engine="fsdp"
    )
    costs, number = cost_model(shared), parameters_of(QWEN_7B)
    times = costs.estimate_times()
    # A rank's weights and moments in float32, and the reference, which it hosts whole; two bytes for each new weight
    state_s, loaded_s = (12 / 8 + 2) * number / (64e9 * 0.7), 2 * number / (64e9 * 0.7)
    assert times.to_actor_s == pytest.approx(state_s)
    assert times.to_rollout_s == pytest.approx(state_s + loaded_s)
    assert times.latency.publish_s == pytest.approx(Latency().publish_s + loaded_s / 8)
    apart = cost_model(shared.model_copy(update={"colocated": ()})).estimate_times()
    assert (apart.to_actor_s, apart.to_rollout_s) == (0.0, 0.0)
    rival = replace(costs, hands_over=True).estimate_times()
    gathered_s, written_s = 2 * number * 7 / 8 / (450e9 * 0.7), 2 * 2 * number / (3350e9 * 0.7)
    assert rival.to_rollout_s == pytest.approx(state_s + gathered_s + written_s)
    assert rival.latency == Latency()  # nothing goes through the host, or to other nodes


def test_what_runs_is_computed_again_at_a_swap_unless_it_keeps_its_keys_and_values(qwen: RunConfig) -> None:
    keeping = qwen.model_copy(update={"rollout": qwen.rollout.model_copy(update={"on_swap": "keep"})})
    assert [cost_model(each).estimate_times().recomputes for each in (qwen, keeping)] == [True, False]
    planners = [open_planner(each, devices=16, device="h100") for each in (qwen, keeping)]
    again_s, kept_s = (planner.step_s() for planner in planners)
    assert kept_s < again_s


@pytest.mark.parametrize(
    ("kl_coef", "num_mini_batches", "passes"),
    [
        (0.0, 1, 0.0),
        (0.001, 1, 1.0),  # the reference
        (0.001, 2, 1.5),  # and the policy that the step found, after the first of two updates
    ],
)
def test_tri_model_scores_what_it_trains(qwen: RunConfig, kl_coef: float, num_mini_batches: int, passes: float) -> None:
    algorithm = qwen.algorithm.model_copy(update={"kl_coef": kl_coef})
    alone = changed(qwen, engine="fsdp", num_mini_batches=num_mini_batches).model_copy(
        update={"roles": {"rollout": 8, "actor": 8}, "algorithm": algorithm}
    )
    unified = changed(alone, tri_model=True)
    more_s = train_work(unified).token_s - train_work(alone).token_s
    assert more_s == pytest.approx(passes * forward_s(ranks=1))
    gathered_s = 2 * parameters_of(QWEN_7B) * 7 / 8 / (450e9 * 0.7)
    assert train_work(unified).floor_s - train_work(alone).floor_s == pytest.approx(passes * gathered_s)


def test_tri_model_scores_with_the_policies_that_drew_where_nothing_weighs_tokens(qwen: RunConfig) -> None:
    off_policy = qwen.algorithm.off_policy.model_copy(update={"method": "none"})
    algorithm = qwen.algorithm.model_copy(update={"kl_coef": 0.0, "off_policy": off_policy})
    schedule = qwen.schedule.model_copy(update={"mode": ScheduleMode.ASYNC, "max_staleness": 2})
    alone = changed(qwen, engine="fsdp").model_copy(update={"algorithm": algorithm, "schedule": schedule})
    more_s = train_work(changed(alone, tri_model=True)).token_s - train_work(alone).token_s
    assert more_s == pytest.approx(2 * forward_s(ranks=1))


def test_what_the_actor_hosts_is_computed_by_all_ranks_of_a_replica_as_it_trains(qwen: RunConfig) -> None:
    float32 = qwen.model_copy(update={"model": qwen.model.model_copy(update={"dtype": "float32"})})
    times = open_planner(float32, devices=64, device="h100").times(changed(float32, autocast="bfloat16"))
    exchanged_s = times.tasks["actor_log_probs"].token_s - forward_s(ranks=4)
    assert 0 < exchanged_s < forward_s(ranks=4)  # four tensor-parallel ranks, in bfloat16
    assert times.tasks["ref_log_probs"].token_s > 10 * forward_s(ranks=1)  # frozen: float32


@pytest.mark.parametrize("engine", ["megatron", "fsdp"])
def test_ranks_that_share_a_reference_exchange_activations_or_gather_weights(
    qwen: RunConfig, engine: Literal["megatron", "fsdp"]
) -> None:
    layout = qwen.ref.megatron.model_copy(update={"tensor_parallel": 4})
    ref = qwen.ref.model_copy(update={"engine": engine, "shards": 4, "megatron": layout})
    shared = qwen.model_copy(update={"ref": ref, "roles": qwen.roles | {"ref": 4}})
    work = open_planner(shared, devices=64, device="h100").times(shared).tasks["ref_log_probs"]
    size, link = parameters_of(QWEN_7B), 450e9 * 0.7
    if engine == "megatron":
        exchanged_s = 2 * 4 * (3 / 4) * 28 * 3584 / link
        assert work.token_s == pytest.approx(forward_s(ranks=4) + exchanged_s)
        assert work.floor_s == 0
    else:
        assert work.token_s == pytest.approx(forward_s(ranks=4))
        assert work.floor_s == pytest.approx(2 * size * 3 / 4 / link)


def test_tensor_parallel_instances_exchange_what_they_prefill(qwen: RunConfig) -> None:
    alone, shared = (cost_model(changed_vllm(qwen, tensor_parallel_size=n)).estimate_times() for n in (1, 2))
    exchanged_s = 2 * 4 * (1 / 2) * 28 * 3584 / (450e9 * 0.7)
    assert shared.prefill.token_s == pytest.approx(alone.prefill.token_s / 2 + exchanged_s)
    assert shared.first_tokens == qwen.data.max_prompt_tokens // 2 / qwen.schedule.n_samples_per_prompt


def test_keys_and_values_may_have_memory_of_their_own(qwen: RunConfig) -> None:
    large = qwen.model_copy(update={"rollout": qwen.rollout.model_copy(update={"batch_size": 100000})})
    token = 2 * 28 * 4 * 128 * 2  # of 28 layers, four heads
    context = large.data.max_prompt_tokens // 2 + 1000 / 2
    slots = cost_model(changed_vllm(large, tensor_parallel_size=1, kv_cache_gb=4)).estimate_times().slots
    assert slots == pytest.approx(4e9 / (token * context), rel=0.5)
    twice = cost_model(changed_vllm(large, tensor_parallel_size=1, kv_cache_gb=8)).estimate_times().slots
    assert twice == pytest.approx(2 * slots, abs=2)


def test_a_reward_model_takes_the_time_of_its_own_size(qwen: RunConfig, tmp_path: Path) -> None:
    small = tmp_path / "reward"
    small.mkdir()
    (small / "config.json").write_text(json.dumps(QWEN_7B | {"num_hidden_layers": 14}))
    model = RewardModelConfig(path=str(small), dtype="bfloat16", shards=2)
    scored = qwen.model_copy(
        update={"reward": qwen.reward.model_copy(update={"model": model}), "roles": qwen.roles | {"reward": 2}}
    )
    times = open_planner(scored, devices=64, device="h100").times(scored)
    size = parameters_of(QWEN_7B | {"num_hidden_layers": 14})
    assert times.tasks["rewards"].token_s == pytest.approx(2 * size / (2 * 989e12 * 0.5))
    assert times.tasks["rewards"].floor_s == pytest.approx(2 * size / 2 / (450e9 * 0.7))
    (small / "config.json").write_text(json.dumps({"architectures": ["Other"]}))
    with pytest.raises(ConfigError, match=r"reward.model.path: the sizes in .* are not those of a model that is known"):
        open_planner(scored, devices=64, device="h100")


@pytest.mark.parametrize("chunks", [1, 2])
def test_a_pipeline_drains_once_an_update_and_its_traffic_waits_in_the_bubble_too(qwen: RunConfig, chunks: int) -> None:
    size = {"tensor_parallel": 4, "context_parallel": 1}
    eight = qwen.model_copy(update={"roles": qwen.roles | {"actor": 8}})
    row_counted = changed(eight, max_tokens_per_micro_batch=0, micro_batch_size=4, num_mini_batches=2, tri_model=False)
    flat = changed(row_counted, megatron={**size, "pipeline_parallel": 1})
    stages = {"pipeline_parallel": 2, "virtual_pipeline": chunks, "pipeline_pieces": 4}
    staged = changed(row_counted, megatron={**size, **stages})
    together = qwen.schedule.step_rows // 2
    expected = train_work(flat).token_s / 2 * (1 + 1 / (chunks * together))
    assert train_work(staged).token_s == pytest.approx(expected), "all pieces of an update, one sample each"
    own = OutsideConfig(name="mine:Algorithm", dataflow=qwen.algorithm.tasks())
    another = staged.model_copy(update={"algorithm": own})
    expected = train_work(flat).token_s / 2 * (1 + 1 / (chunks * 4))
    assert train_work(another).token_s == pytest.approx(expected), "a loss that may look at a whole micro-batch"
    forward_s = (cost_model(each).estimate_times().tasks["actor_log_probs"].token_s for each in (flat, staged))
    assert next(forward_s) / 2 * (1 + 1 / (chunks * 4)) == pytest.approx(next(forward_s)), (
        "nothing follows a micro-batch"
    )


def test_replicas_gather_weights_among_fewer_ranks_and_sum_gradients_over_the_others(qwen: RunConfig) -> None:
    whole = changed(qwen, engine="fsdp").model_copy(update={"roles": {"rollout": 8, "actor": 16}})
    floors = {size: train_work(changed(whole, fsdp_size=size)).floor_s for size in (0, 8, 16)}
    size = parameters_of(QWEN_7B)
    inside, outside = 450e9 * 0.7, 50e9 * 0.7
    assert floors[0] == floors[16] == pytest.approx((2 * 2 + 4) * size * 15 / 16 / outside)
    assert floors[8] == pytest.approx((2 * 2 + 4) * size * 7 / 8 / inside + 2 * 4 * size / 8 / 2 / outside)


def test_a_hosted_critic_gathers_weights_of_its_own(qwen: RunConfig) -> None:
    alone = changed(qwen, engine="fsdp").model_copy(update={"roles": {"rollout": 8, "actor": 8}})
    hosting = alone.model_copy(update={"algorithm": PPOConfig()})
    assert train_work(hosting).floor_s == pytest.approx(2 * train_work(alone).floor_s)
