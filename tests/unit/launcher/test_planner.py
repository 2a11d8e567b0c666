"""The planner: memory, the search, and what `asyncflow plan` says."""

import json
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Literal

import pytest
from click.testing import CliRunner
from planned import QWEN_7B, changed, sim_run

from asyncflow.errors import ConfigError
from launcher.cli.commands import main
from launcher.config.load_config import load_config
from launcher.config.paths import find_recipe
from launcher.plan.cost_model import device_of, find_device
from launcher.plan.plan_report import auto_plan, open_planner, plan_json, plan_text, recorded_lengths
from launcher.plan.scenario import Turns
from launcher.plan.search import with_changes
from launcher.plan.world import simulate
from workers.settings.algorithms import PPOConfig
from workers.settings.run import RunConfig
from workers.settings.schedule import Fill


def test_context_parallelism_is_planned_where_nothing_else_fits_the_longest_response(
    qwen: RunConfig, tmp_path: Path
) -> None:
    # No stages divide the layers, and no more than two ranks the heads.
    narrow = {"num_hidden_layers": 27, "num_key_value_heads": 2}
    (tmp_path / "config.json").write_text(json.dumps(QWEN_7B | narrow))
    rollout = qwen.rollout.model_copy(update={"max_response_tokens": 139000})
    ref = qwen.ref.model_copy(update={"micro_batch_size": 1})
    long = qwen.model_copy(update={"rollout": rollout, "ref": ref})
    planner = open_planner(long, devices=16, device="ascend-910b")
    best = planner.find_plans()[0]
    assert best.config.actor.megatron.context_parallel > 1
    assert "actor.megatron.context_parallel=2" in best.changes
    every = [with_changes(long, layout) for layout in planner.model_layouts()]
    for config in (each for each in every if each.actor.megatron.context_parallel == 1):
        with pytest.raises(ConfigError, match="a rank of actor needs"):
            planner.headroom_gb(config.model_copy(update={"roles": best.config.roles}))


def test_a_smaller_micro_batch_is_planned_where_the_configured_one_does_not_fit(qwen: RunConfig) -> None:
    large = changed(qwen, max_tokens_per_micro_batch=2**20)
    planner = open_planner(large, devices=16, device="ascend-910b")
    best = planner.find_plans()[0]
    tokens = best.config.actor.max_tokens_per_micro_batch
    assert f"actor.max_tokens_per_micro_batch={tokens}" in best.changes
    assert tokens < 2**20
    assert best.headroom_gb is not None
    assert best.headroom_gb > 0
    with pytest.raises(ConfigError, match="a rank of actor needs"):
        planner.headroom_gb(changed(best.config, max_tokens_per_micro_batch=2 * tokens))


def test_larger_micro_batches_are_planned_where_gathering_weights_takes_long(qwen: RunConfig) -> None:
    gathered = changed(qwen, engine="fsdp", max_tokens_per_micro_batch=0, micro_batch_size=1)
    gathered = gathered.model_copy(update={"sim": qwen.sim.model_copy(update={"mean_tokens": 200})})
    planner = open_planner(gathered, devices=32, device="ascend-910b")
    best = planner.find_plans()[0]
    assert best.config.actor.micro_batch_size > 1
    assert f"actor.micro_batch_size={best.config.actor.micro_batch_size}" in best.changes
    own = changed(best.config, micro_batch_size=1)
    assert best.step_s < replace(planner, config=own).step_s()


def test_plans_use_no_more_devices_fit_memory_and_are_what_the_command_takes(qwen: RunConfig) -> None:
    plans = open_planner(qwen, devices=16, device="ascend-910b").find_plans()
    for plan in plans:
        assert plan.num_devices <= 16
        assert plan.headroom_gb is not None
        assert plan.headroom_gb > 0
        assert plan.step_s >= 0.9 * plan.bound_s
    assert [plan.step_s for plan in plans] == sorted(plan.step_s for plan in plans)
    assert plans[0].tokens_per_s == pytest.approx(128 * 1000 / plans[0].step_s, rel=0.05)


def test_ranks_that_share_a_copy_score_as_one_worker_and_are_planned_together(qwen: RunConfig) -> None:
    shared = qwen.model_copy(
        update={"ref": qwen.ref.model_copy(update={"engine": "fsdp", "shards": 4}), "roles": qwen.roles | {"ref": 8}}
    )
    hosted = qwen.model_copy(update={"roles": {"rollout": 10, "actor": 4}})  # a replica of four ranks
    alone, together, inside = (
        open_planner(config, devices=32, device="ascend-910b").make_scenario(config)
        for config in (qwen, shared, hosted)
    )
    assert (alone.workers["ref"], together.workers["ref"]) == (2, 2)
    alone_s, *others_s = (each.times.tasks["ref_log_probs"].token_s for each in (alone, together, inside))
    assert others_s == pytest.approx([alone_s / 4, alone_s])
    planner = open_planner(shared, devices=32, device="ascend-910b")
    for plan in planner.find_plans():
        shards = plan.config.ref.shards
        assert f"ref.shards={shards}" in plan.changes
        assert plan.config.roles["ref"] % shards == 0
    assert {layout["ref.shards"] for layout in planner.model_layouts()} == {2, 4, 8}


def test_a_reference_of_megatron_is_planned_with_its_tensor_parallelism(qwen: RunConfig) -> None:
    layout = qwen.ref.megatron.model_copy(update={"tensor_parallel": 4})
    ref = qwen.ref.model_copy(update={"engine": "megatron", "megatron": layout})
    config = qwen.model_copy(update={"ref": ref, "roles": qwen.roles | {"ref": 8}})
    planner = open_planner(config, devices=32, device="ascend-910b")
    assert {each["ref.megatron.tensor_parallel"] for each in planner.model_layouts()} == {2, 4}  # of 4 heads of keys
    for plan in planner.find_plans():
        tensor = plan.config.ref.megatron.tensor_parallel
        assert f"ref.megatron.tensor_parallel={tensor}" in plan.changes
        assert plan.config.roles.get("ref", 0) % tensor == 0


@pytest.mark.parametrize("engine", ["megatron", "fsdp"])
def test_a_critic_has_a_role_of_its_own_where_the_actor_cannot_train_it_or_that_pays(
    qwen: RunConfig, engine: Literal["megatron", "fsdp"]
) -> None:
    sized = {"micro_batch_size": 8, "max_tokens_per_micro_batch": 9216}
    critic = {**sized, "gradient_checkpointing": True, "autocast": "bfloat16"}
    ppo = {"algorithm": PPOConfig(), "critic": qwen.critic.model_copy(update=critic)}
    config = changed(qwen.model_copy(update=ppo), engine=engine)
    planner = open_planner(config, devices=64, device="h100")
    critics = [candidate.config.roles.get("critic", 0) for candidate in planner._list_candidates()]
    assert max(critics) > 1
    assert (0 in critics) == (engine == "fsdp")
    best = planner.find_plans()[0]
    assert best.num_devices <= 64
    if "critic" in best.config.roles:
        assert set(best.idle) in ({"critic", "actor", "rollout"}, {"critic", "rollout+actor"})
    in_reward = PPOConfig(kl_coef=0.01, kl_placement="reward")  # needs columns that only an actor of its own computes
    charged = config.model_copy(update={"algorithm": in_reward})
    if engine == "fsdp":
        assert "critic" not in open_planner(charged, devices=64, device="h100").find_plans()[0].config.roles
    late = config.schedule.model_copy(update={"max_staleness": 2, "fill": Fill.FIRST_READY})
    if engine == "fsdp":
        late_planner = open_planner(config.model_copy(update={"schedule": late}), devices=64, device="h100")
        assert {each.config.roles.get("critic", 0) for each in late_planner._list_candidates()} == {0}


def test_what_does_not_fit_is_refused_with_the_sum(qwen: RunConfig, tmp_path: Path) -> None:
    small = tmp_path / "small.yaml"
    small.write_text(find_recipe("quickstart").parent.joinpath("devices/a100.yaml").read_text().replace("80", "10"))
    with pytest.raises(ConfigError, match=r"no plan fits; launcher.device_memory_gb: a rank of \w+ needs about .* = "):
        open_planner(qwen, devices=4, device=str(small)).find_plans()


@pytest.mark.parametrize(
    "times", [{"train_s_per_token": 0.004}, {"ref_s_per_token": 0.003}, {"decode_s_per_token": 0.05}]
)
def test_the_plan_is_as_fast_as_the_best_of_all_splits(times: dict[str, float]) -> None:
    planner = open_planner(sim_run(**times), devices=8, device=None)
    best = planner.find_plans()[0]
    every = []
    for actor, ref in product((1, 2, 3, 4, 6), range(5)):
        roles = {"rollout": 8 - actor - ref, "actor": actor} | ({"ref": ref} if ref else {})
        if roles["rollout"] > 0:
            split = planner.config.model_copy(update={"roles": roles})
            every.append(replace(planner, config=split).step_s())
    assert best.step_s <= 1.03 * min(every)


def test_other_schedules_are_planned_beside_and_say_what_they_change() -> None:
    planner = open_planner(sim_run(train_s_per_token=0.002, sigma=1.0), devices=8, device=None)
    others = planner.other_schedules()
    ways = [(plan.config.schedule.mode, plan.config.schedule.staleness_bound) for plan in others]
    assert ways == [("sync", 0), ("periodic", 0), ("async", 2), ("async", 4), ("substep", 1), ("colocate_async", 1)]
    assert others[0].changes == ("schedule.mode=sync",)
    assert others[2].changes == ("schedule.mode=async", "schedule.max_staleness=2")
    own = planner.find_plans()
    assert {plan.config.schedule for plan in own} == {planner.config.schedule}
    assert own[0].step_s < others[1].step_s < others[0].step_s
    told = json.loads(plan_json(planner, own, {}, others))
    assert [each["set"][0] for each in told["other_schedules"]][:2] == ["schedule.mode=sync", "schedule.mode=periodic"]
    assert f"--roles {others[0].roles_text} --set schedule.mode=sync" in plan_text(planner, own, {}, others)


def test_a_few_steps_that_live_on_what_was_generated_ahead_promise_no_more_than_the_long_run(qwen: RunConfig) -> None:
    changes = {"rollout_batch_size": 128, "max_staleness": 1}
    schedule = qwen.schedule.model_copy(update=changes)
    large = qwen.model_copy(update={"schedule": schedule, "roles": {"rollout": 28, "actor": 32, "ref": 4}})
    sigma = large.sim.model_copy(update={"mean_tokens": 2000, "sigma": 0.8})
    planner = open_planner(large.model_copy(update={"sim": sigma}), devices=64, device="ascend-910b")
    long = simulate(planner.make_scenario(planner.config), steps=24, further=1).step_s(4)
    assert planner.bound_s(planner.config) <= planner.step_s()
    assert planner.step_s() == pytest.approx(long, rel=0.03)


@pytest.mark.parametrize("fill", ["in_order", "first_ready"])
def test_no_step_is_shorter_than_its_bound_however_long_its_longest_response(fill: str) -> None:
    long = sim_run(sigma=1.5, train_s_per_token=0.0001)
    schedule = long.schedule.model_copy(update={"max_staleness": 2, "fill": Fill(fill)})
    planner = open_planner(long.model_copy(update={"schedule": schedule}), devices=14, device=None)
    plans = [*planner.find_plans(), *planner.other_schedules()]
    assert all(plan.bound_s <= plan.step_s for plan in plans)
    in_turn = plans[-6]
    assert in_turn.config.schedule.mode == "sync"
    assert in_turn.bound_s > 0.8 * in_turn.step_s


@pytest.mark.parametrize("devices", [4, 14])
def test_no_step_is_shorter_than_its_bound_on_a_machine_that_all_ranks_share(devices: int) -> None:
    plans = open_planner(load_config(find_recipe("quickstart")), devices=devices, device="cpu").find_plans()
    assert all(plan.bound_s <= plan.step_s for plan in plans)


def test_cost_takes_fewer_devices_where_more_do_not_pay() -> None:
    config = sim_run(decode_s_per_token=0.001, train_s_per_token=0.00001, ref_s_per_token=0.00001)
    assert open_planner(config, devices=16, device=None, objective="cost").find_plans()[0].num_devices < 8


def test_lengths_may_be_those_of_a_run(tmp_path: Path) -> None:
    line = {"histograms": {"response_tokens": {"10": 3, "400": 1}}}
    (tmp_path / "metrics.jsonl").write_text(f"{json.dumps(line)}\n{json.dumps(line)}\n")
    lengths = recorded_lengths(tmp_path, seed=0)
    drawn = [lengths(row) for row in range(400)]
    assert set(drawn) == {10, 400}
    assert drawn.count(10) == pytest.approx(300, abs=40)
    assert drawn == [lengths(row) for row in range(400)]
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"histograms": {"resp\n')
    with pytest.raises(ConfigError, match=r"--lengths .*: line 3 of metrics.jsonl is damaged"):
        recorded_lengths(tmp_path, seed=0)
    for damaged in (b"\xff\xfe\n", b'{"histograms": null}', b'{"histograms": {"response_tokens": {"long": 1}}}'):
        (tmp_path / "metrics.jsonl").write_bytes(damaged)
        with pytest.raises(ConfigError, match=r"--lengths .*: line 1 of metrics.jsonl is damaged"):
            recorded_lengths(tmp_path, seed=0)
    absent = sim_run(lengths="file", lengths_file=str(tmp_path / "absent.txt"))
    with pytest.raises(ConfigError, match=r"sim.lengths_file: .*absent.txt cannot be read"):
        open_planner(absent, devices=8, device=None)
    (tmp_path / "lengths.txt").write_text("12\n0\n")
    with pytest.raises(ConfigError, match=r"sim.lengths_file: .*lengths.txt has 0.0; give one number above 0 a line"):
        open_planner(sim_run(lengths="file", lengths_file=str(tmp_path / "lengths.txt")), devices=8, device=None)
    with pytest.raises(ConfigError, match="--lengths .*: has no lengths"):
        recorded_lengths(tmp_path / "absent", seed=0)


def test_a_teacher_is_not_planned_as_if_it_took_no_time(tmp_path: Path) -> None:
    given = ("algorithm={name: distill, teacher_coef: 1.0}", f"teacher.path={tmp_path}")
    config = load_config(find_recipe("quickstart"), overrides=given, roles="rollout:1,actor:1,teacher:1")
    with pytest.raises(ConfigError, match="roles: teacher cannot be planned, since how long"):
        open_planner(config, devices=3, device="cpu").find_plans()


def test_turns_and_tools_are_those_of_a_run(tmp_path: Path) -> None:
    config = load_config(find_recipe("quickstart-tools"))
    with pytest.raises(ConfigError, match="--lengths RUN_DIR"):
        open_planner(config, devices=2, device="cpu").find_plans()
    step = {"histograms": {"response_tokens": {"5": 1, "12": 3}}, "response_tokens_mean": 11.0, "samples": 512}
    file = tmp_path / "metrics.jsonl"
    file.write_text(json.dumps(step) + "\n")
    with pytest.raises(ConfigError, match=r"--lengths .*: has no turns"):
        open_planner(config, devices=2, device="cpu", lengths=tmp_path)
    step |= {"train_tokens": 512 * 24, "reward/turns_mean": 1.5, "reward/tool_s_mean": 0.25,
             "reward/cpu_s_mean": 0.01}  # fmt: skip
    later = step | {"reward/turns_mean": 2.0, "reward/tool_s_mean": 0.75}
    file.write_text(f"{json.dumps(step)}\n{json.dumps(later)}\n")
    planner = open_planner(config, devices=2, device="cpu", lengths=tmp_path)
    # 24 tokens of which 11 were drawn; a prompt counts as 4
    assert planner.turns == Turns(replies=1.75, tool_s=0.5, cpu_s=0.01, read_tokens=9)
    assert {planner.tokens(row) for row in range(100)} == {5, 12}  # of all replies; a reply has at most 8
    assert planner.find_plans()[0].step_s > 0


def test_roles_may_be_planned_by_the_launcher() -> None:
    found = auto_plan("auto:8", sim_run())
    assert found is not None
    assert sum(int(pair.partition(":")[2]) for pair in found.roles_text.split(",")) <= 8
    assert auto_plan("rollout:1,actor:1", sim_run()) is None
    with pytest.raises(ConfigError, match="--roles auto:x: give a number of devices"):
        auto_plan("auto:x", sim_run())
    with pytest.raises(ConfigError, match="--roles auto:4@h100: --device h100: sim engines have their times"):
        auto_plan("auto:4@h100", sim_run())
    with pytest.raises(ConfigError, match="--roles auto:4@h100@a100: has two devices"):
        auto_plan("auto:4@h100@a100", sim_run())


def test_devices_are_known_by_their_whole_names() -> None:
    assert device_of("NVIDIA H100 80GB HBM3", None, "x") == "h100"
    assert device_of("NVIDIA RTX A1000", None, "x") is None
    assert device_of("NVIDIA GH200 480GB", None, "x") is None
    with pytest.raises(ConfigError, match=r"--device nosuch.yaml: is not a file"):
        find_device("nosuch.yaml")


def test_command_prints_the_line_to_paste_why_and_a_timeline(qwen: RunConfig, tmp_path: Path) -> None:
    options = ["--devices", "16", "--device", "h100", "--timeline", str(tmp_path / "plan.html")]
    overrides = [f"model.path={tmp_path}", f"data.path={qwen.data.path}", "schedule.rollout_batch_size=16"]
    command = ["plan", "qwen2.5-7b-grpo-deepscaler-npu", *options, *(w for o in overrides for w in ("--set", o))]
    text = CliRunner().invoke(main, command, catch_exceptions=False).output
    assert "\n--roles rollout" in text
    assert "why: " in text
    assert "step takes" in text
    assert "forward_backward" in (tmp_path / "plan.html").read_text()
    told = json.loads(CliRunner().invoke(main, [*command, "--json", "--schedules"], catch_exceptions=False).output)
    assert "schedule.mode=periodic" in told["other_schedules"][1]["set"]
    assert told["plans"][0]["roles"]["rollout"] > 0
    refused = CliRunner().invoke(main, ["plan", "qwen2.5-7b-grpo-deepscaler-npu", "--devices", "16", *command[-6:]])
    assert (refused.exit_code, "--device: is missing" in refused.output) == (2, True)
