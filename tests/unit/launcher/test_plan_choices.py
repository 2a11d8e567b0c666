"""What the planner chooses among: splits, layouts, batches and schedules; never what a start would refuse."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from planned import QWEN_7B, changed, changed_vllm, sim_run

from asyncflow.errors import ConfigError
from launcher.config.load_config import load_config
from launcher.config.paths import find_recipe
from launcher.plan.cost_model import find_device
from launcher.plan.plan_report import model_sizes, open_planner, plan_text
from launcher.plan.search import (
    Candidate,
    Planner,
    _next,
    batch_sizes,
    check_launchable,
    layouts,
    schedules,
    splits,
    with_changes,
)
from workers.settings.algorithms import PPOConfig
from workers.settings.run import RunConfig
from workers.settings.schedule import ScheduleMode


def with_roles(config: RunConfig, **roles: int) -> RunConfig:
    return config.model_copy(update={"roles": roles})


def with_schedule(config: RunConfig, **settings: object) -> RunConfig:
    return config.model_copy(update={"schedule": config.schedule.model_copy(update=settings)})


def candidate(config: RunConfig, *, bound_s: float, tensor: int, actor: int = 2) -> Candidate:
    layout = {"vllm.tensor_parallel_size": tensor}
    return Candidate(with_changes(with_roles(config, rollout=8, actor=actor), layout), layout, bound_s)


def test_the_first_of_each_size_of_instances_is_simulated_and_then_what_is_unlike(qwen: RunConfig) -> None:
    small, alike, unlike, large = (
        candidate(qwen, bound_s=bound_s, tensor=tensor, actor=actor)
        for bound_s, tensor, actor in ((1.0, 2, 8), (1.1, 2, 8), (1.2, 2, 16), (1.5, 4, 8))
    )
    assert _next([small, alike, unlike, large], [], only_new=False) == 0
    assert _next([alike, unlike, large], [small], only_new=True) == 2
    assert _next([alike, unlike], [small, large], only_new=False) == 1
    assert _next([alike], [small, large], only_new=False) == 0
    assert _next([alike, unlike], [small, large], only_new=True) is None


def test_an_instance_takes_no_more_than_its_part_of_what_is_in_flight() -> None:
    config = with_schedule(with_roles(sim_run(), rollout=8, actor=2), max_staleness=1, rollout_batch_size=16)
    large = config.model_copy(update={"rollout": config.rollout.model_copy(update={"batch_size": 64})})
    assert list(batch_sizes(large)) == [{"rollout.batch_size": 16}, {"rollout.batch_size": 8}]
    assert list(batch_sizes(config)) == [{}]  # eight already


def test_no_instance_is_planned_that_leaves_nothing_to_the_others() -> None:
    slow = sim_run(decode_s_by_batch={1: 0.01, 64: 0.1}, train_s_per_token=1e-5, ref_s_per_token=1e-5)
    config = with_schedule(slow, mode=ScheduleMode.PERIODIC, max_staleness=0, rollout_batch_size=16)
    large = config.model_copy(update={"rollout": config.rollout.model_copy(update={"batch_size": 64})})
    best = open_planner(large, devices=10, device=None).find_plans()[0]
    assert "rollout.batch_size=8" in best.changes
    shared = with_roles(config, rollout=8, actor=2)
    assert best.step_s <= 1.02 * open_planner(shared, devices=10, device=None).step_s()


def test_vllm_divides_or_repeats_heads_of_keys_and_values(qwen: RunConfig, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN_7B | {"num_attention_heads": 40, "num_key_value_heads": 10}))
    sizes = model_sizes(qwen)
    assert {layout["vllm.tensor_parallel_size"] for layout in layouts(qwen, sizes, 8)} == {1, 2}
    (tmp_path / "config.json").write_text(json.dumps(QWEN_7B | {"num_attention_heads": 32, "num_key_value_heads": 4}))
    sizes = model_sizes(qwen)
    assert {layout["vllm.tensor_parallel_size"] for layout in layouts(qwen, sizes, 8)} == {1, 2, 4, 8}


def test_one_rank_feeds_servers(qwen: RunConfig, tmp_path: Path) -> None:
    openai = qwen.openai.model_copy(update={"urls": ["http://127.0.0.1:1"], "weights_dir": str(tmp_path)})
    rollout = qwen.rollout.model_copy(update={"engine": "openai"})
    config = qwen.model_copy(update={"openai": openai, "rollout": rollout})
    assert {roles["rollout"] for roles in splits(config, [16], 0.2)} == {1}
    assert open_planner(config, devices=16, device="h100").find_plans()[0].config.roles["rollout"] == 1
    with pytest.raises(ConfigError, match="rollout:2 cannot be used with rollout.engine openai"):
        check_launchable(with_roles(config, rollout=2, actor=4), None, 16)


def test_a_mixture_of_experts_is_refused(qwen: RunConfig, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN_7B | {"num_experts": 8}))
    with pytest.raises(ConfigError, match="is a mixture of experts"):
        open_planner(qwen, devices=16, device="h100")


def test_every_plan_can_be_placed_on_nodes(qwen: RunConfig) -> None:
    device = find_device("h100")
    config = changed(with_schedule(qwen, rollout_batch_size=24), engine="fsdp", max_tokens_per_micro_batch=0)
    critic = qwen.critic.model_copy(update={"micro_batch_size": 8})
    config = changed(changed_vllm(config, tensor_parallel_size=8), micro_batch_size=8)
    ppo = config.model_copy(update={"algorithm": PPOConfig(), "critic": critic})
    check_launchable(with_roles(ppo, actor=4, critic=4, rollout=16), device, 24)
    with pytest.raises(ConfigError, match="roles: rollout-0 needs 8 accelerator devices and stays on one node"):
        check_launchable(with_roles(ppo, actor=4, critic=12, rollout=8), device, 24)
    with pytest.raises(ConfigError, match="roles: evaluate:1 makes no whole instances of 8 ranks"):
        evaluate = config.evaluate.model_copy(update={"engine": "vllm", "path": "held_out.jsonl"})
        evaluated = config.model_copy(update={"evaluate": evaluate})
        check_launchable(with_roles(evaluated, actor=8, rollout=8, evaluate=1), device, 24)


def test_broadcasts_are_planned_to_vllm_of_several_ranks_too(qwen: RunConfig) -> None:
    config = qwen.model_copy(update={"weightsync": qwen.weightsync.model_copy(update={"path": "broadcast"})})
    plans = open_planner(config, devices=16, device="h100").find_plans()
    assert max(plan.config.vllm.tensor_parallel_size for plan in plans) > 1


def test_no_more_processes_are_planned_than_the_queue_takes(qwen: RunConfig) -> None:
    few = qwen.model_copy(update={"tq": qwen.tq.model_copy(update={"max_clients": 12})})
    best = open_planner(few, devices=16, device="h100").find_plans()[0].config
    at_work = sum(best.roles.values()) - best.roles["rollout"] + best.roles["rollout"] // best.vllm.tensor_parallel_size
    assert at_work + few.tq.num_storage_units + few.tq.num_controllers <= 12


def test_deterministic_runs_are_offered_no_schedule_that_depends_on_timing() -> None:
    same_bits = sim_run().model_copy(update={"deterministic": True})
    strict = with_schedule(same_bits, mode=ScheduleMode.PERIODIC, max_staleness=0)
    assert list(schedules(strict)) == [{"schedule.mode": "sync"}]


def test_roles_that_work_in_turn_share_devices_as_the_square_roots_of_their_work() -> None:
    planner = open_planner(sim_run(ref_s_per_token=0.003), devices=16, device=None)
    in_turn = replace(planner, config=with_schedule(planner.config, mode=ScheduleMode.SYNC, max_staleness=0))
    streamed = replace(planner, config=with_schedule(planner.config, mode=ScheduleMode.PERIODIC, max_staleness=0))
    work, root = (share / (1 - share) for each in (streamed, in_turn) for share in [each._scoring_share(each.config)])
    assert root**2 == pytest.approx(work)


def test_what_takes_no_device_costs_none() -> None:
    planner = open_planner(sim_run(), devices=8, device=None, objective="cost")
    few, many = (
        Candidate(with_roles(planner.config, rollout=4, actor=2, ref=1, advantages=number), {}, 1.0)
        for number in (1, 9)
    )
    assert planner._sort_key(few) == planner._sort_key(many)


def test_a_hosted_reference_may_get_a_rank_of_its_own() -> None:
    planner = open_planner(sim_run(train_s_per_token=0.002, ref_s_per_token=0.001), devices=8, device=None)
    plan = planner._simulate_config(Candidate(with_roles(planner.config, rollout=5, actor=3), {}, 0.0))
    more: dict[str, Any] = planner.one_more(plan)
    assert set(more) == {"rollout:6", "actor:4", "ref:1"}
    assert more["ref:1"] < plan.step_s


def test_rollout_and_actor_share_devices_where_turns_are_faster() -> None:
    def planner(switch_s: float) -> Planner:
        run = sim_run(lengths="constant", train_s_per_token=0.002, switch_s=switch_s)
        return open_planner(with_schedule(run, mode=ScheduleMode.SYNC, max_staleness=0), devices=8, device=None)

    best = planner(0.0).find_plans()[0]
    assert re.fullmatch(r"rollout\+actor:6(,ref:\d)?", best.roles_text)
    assert best.num_devices <= 8
    assert best.values()["colocated"] == ["rollout", "actor"]
    apart = replace(planner(0.0), colocated=False).find_plans()[0]
    assert not apart.config.is_colocated
    assert best.step_s < apart.step_s
    assert planner(60.0).find_plans()[0].roles_text == apart.roles_text


def test_the_plan_of_colocated_roles_says_which_share_devices() -> None:
    config = with_schedule(sim_run(train_s_per_token=0.002, switch_s=0.25), mode=ScheduleMode.COLOCATE_ASYNC)
    planner = open_planner(config, devices=8, device=None)
    plans = planner.find_plans()
    assert all(plan.config.is_colocated for plan in plans)  # the schedule has no other form
    more = planner.one_more(plans[0])
    text = plan_text(planner, plans, more)
    assert f"--roles {plans[0].roles_text}" in text
    assert "a switch takes 0.25 s to the actor, 0.25 s back to the rollout" in text
    assert re.search(r"rollout\+actor:6 \(\d+ %\)", text)
    assert any(role.startswith("rollout+actor:") for role in more)


def test_turns_are_planned_for_schedules_and_devices_that_have_them() -> None:
    def forms(planner: Planner) -> set[bool]:
        return {candidate.config.is_colocated for candidate in planner._list_candidates()}

    config = sim_run()
    of_modes = {
        mode: forms(open_planner(with_schedule(config, mode=mode), devices=8, device=None)) for mode in ScheduleMode
    }
    assert of_modes[ScheduleMode.SUBSTEP] == {False}
    assert of_modes[ScheduleMode.COLOCATE_ASYNC] == {True}
    assert of_modes[ScheduleMode.ASYNC] == of_modes[ScheduleMode.SYNC] == {False, True}
    # On a machine whose memory and cores all ranks share there is nothing to take turns for.
    assert forms(open_planner(load_config(find_recipe("quickstart")), devices=8, device="cpu")) == {False}
    # A plan for a run that is colocated now may be one in which it is not.
    shared = config.model_copy(update={"roles": {"rollout": 2, "actor": 2}, "colocated": ("rollout", "actor")})
    assert forms(open_planner(shared, devices=8, device=None)) == {False, True}


def test_evaluators_that_take_turns_are_as_many_as_the_roles_that_they_share_with() -> None:
    roles = {"rollout": 2, "actor": 2, "evaluate": 2}
    config = with_changes(sim_run(train_s_per_token=0.002), {"roles": roles, "colocated": (*roles,)})
    config = with_changes(config, {"evaluate.engine": "sim", "evaluate.path": "held_out.jsonl", "evaluate.interval": 1})
    planner = open_planner(config, devices=8, device=None)
    plans = planner.find_plans()
    best = next(plan for plan in plans if plan.config.is_colocated)
    count = best.config.roles["actor"]
    assert count > 2 and best.roles_text.startswith(f"rollout+actor+evaluate:{count}")
    assert {plan.config.roles["evaluate"] for plan in plans if not plan.config.is_colocated} == {2}
    assert all(plan.num_devices <= 8 for plan in plans), "evaluators with devices of their own need room"
    more = planner.one_more(best)
    assert any(role.startswith("rollout+actor+evaluate:") for role in more)
    assert re.search(rf"rollout\+actor\+evaluate:{count} \(\d+ %\)", plan_text(planner, [best], more))
