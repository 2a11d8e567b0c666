"""The planner's simulated runs: what they must equal, and that the run's own decisions are in them."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from asyncflow.errors import ConfigError
from launcher.plan import scenario
from launcher.plan import world as instance
from launcher.plan.cost_model import Workload
from launcher.plan.scenario import Latency, Scenario, Times, Turns, Work
from launcher.plan.search import Bounds, longest_tokens
from launcher.plan.world import Simulated, simulate
from launcher.process.device_turn import DeviceTurn
from tq import policies as task_spec
from tq.policies import Fifo, Item, Offer, StepSpec, choose
from weightsync.agent.swap_turns import SwapTurns
from workers.admission.admission_state import AdmissionState
from workers.engines.sim.decode_times import Decoding
from workers.rows import micro_batches
from workers.rows.micro_batches import MiniBatchAssigner
from workers.settings.dataflow import PlacedTask, Task, place_tasks
from workers.settings.run import RunConfig
from workers.settings.schedule import ScheduleMode

FREE = Latency(0, 0, 0, 0, 0, 0, 0, 0, 0)


def config_of(**changed: Any) -> RunConfig:
    values: dict[str, Any] = {
        "steps": 8,
        "roles": {"rollout": 2, "actor": 2, "ref": 1},
        "model": {"path": "model"},
        "data": {"path": "data.jsonl", "max_prompt_tokens": 8},
        "schedule": {"mode": "async", "max_staleness": 1, "rollout_batch_size": 16, "n_samples_per_prompt": 2},
        "rollout": {"engine": "sim", "batch_size": 8, "max_response_tokens": 4000},
        "actor": {"engine": "sim", "micro_batch_size": 4},
        "ref": {"engine": "sim", "micro_batch_size": 4},
        "algorithm": {"kl_coef": 0.001},
        "sim": {"mean_tokens": 100, "decode_s_per_token": 0.01, "train_s_per_token": 0.001, "ref_s_per_token": 0.0005},
    }
    for path, value in changed.items():
        section, _, name = path.partition("__")
        if name:
            values[section] = {**values[section], name: value}
        else:
            values[section] = value
    if values["schedule"].get("mode") in ("sync", "periodic"):
        values["schedule"] = {**values["schedule"], "max_staleness": 0}
    return RunConfig.model_validate(values)


def run(config: RunConfig, latency: Latency = FREE, *, turns: Turns | None = None, **times: Any) -> Simulated:
    made = replace(Times.of_sim(config, prompt_tokens=0), latency=latency, **times)
    return simulate(Scenario.from_config(config, made, turns=turns), steps=config.steps)


def with_turns(**schedule: Any) -> RunConfig:
    """One instance of 8 places, 16 rollouts of 100 tokens a step."""
    size = {"rollout_batch_size": 8, "n_samples_per_prompt": 2, **schedule}
    rollout = {"engine": "sim", "batch_size": 8, "max_response_tokens": 4000, "function": "mine:rollout"}
    return config_of(
        roles={"rollout": 1, "actor": 2, "ref": 1}, schedule=size, rollout=rollout, sim__lengths="constant"
    )


def test_sequential_steps_last_as_long_as_generating_scoring_and_training() -> None:
    ran = run(config_of(schedule__mode="sync", sim__lengths="constant", sim__decode_s_per_token=0.01))
    # 32 responses in 16 places: two waves of 1 s; then 32 x 100 tokens on one reference and on two training ranks
    assert ran.step_s(1) == pytest.approx(2.0 + 32 * 100 * 0.0005 + 16 * 100 * 0.001)


def test_overlapped_steps_last_as_long_as_the_busiest_role() -> None:
    ran = run(config_of(sim__lengths="constant"))
    assert ran.step_s(2) == pytest.approx(2.0, rel=0.01)
    assert ran.idle(2)["rollout"] == pytest.approx(0.0, abs=0.01)
    assert ran.tokens_per_s(2) == pytest.approx(3200 / 2.0, rel=0.01)


def test_instances_that_get_nothing_are_idle() -> None:
    rollout = {"engine": "sim", "batch_size": 64, "max_response_tokens": 4000}
    ran = run(config_of(roles={"rollout": 4, "actor": 2}, rollout=rollout, schedule__mode="sync"))
    assert ran.idle(1)["rollout"] > 0.75  # the first one takes all 32


def test_what_follows_the_longest_response_is_in_the_bound() -> None:
    config = config_of(schedule__mode="periodic", sim__sigma=1.0, sim__decode_s_per_token=0.02)
    made = Times.of_sim(config, prompt_tokens=0)
    longest = longest_tokens(config.schedule, Scenario.from_config(config, made).tokens, steps=config.steps, skip=1)
    bounds = Bounds(Workload(0, 100, 100**2, Turns()), longest, scores=True)
    bound_s = bounds.step_s(config, made)
    assert bound_s == pytest.approx(longest * (0.02 + 0.001 + 0.0005), rel=0.01)
    assert bound_s <= run(config).step_s(1)


def test_responses_slow_each_other_down() -> None:
    table = {"decode_s_by_batch": {1: 0.01, 8: 0.02}, "lengths": "constant", "mean_tokens": 100}
    assert run(config_of(sim=table)).step_s(2) == pytest.approx(4.0, rel=0.01)


def test_a_task_of_a_user_takes_its_time_for_every_row() -> None:
    task = {"name": "safety", "function": "mine:keep", "output": "loss_weights", "seconds_per_row": 0.5}
    roles = {"rollout": 2, "actor": 2, "ref": 1, "safety": 2}
    ran = run(config_of(roles=roles, tasks=[task]))
    assert ran.step_s(2) == pytest.approx(32 * 0.5 / 2, rel=0.02)
    assert ran.idle(2)["safety"] == pytest.approx(0.0, abs=0.02)
    assert run(config_of(roles=roles, tasks=[task | {"concurrency": 4}])).step_s(2) < 4.0


@pytest.mark.parametrize(
    ("times", "generating_s"),
    [
        # Two turns of 0.5 s each in 8 places: four waves; 0.2 s of tools behind each turn, of which the last one shows
        ({}, 4 * 0.5 + 0.2),
        # Prompts of the second turns, what tools wrote in them, hold up what is drawn beside them
        ({"prefill": Work(token_s=0.01), "later_tokens": 1}, 4 * 0.5 + 16 * 0.01 + 0.2),
        ({"prefill": Work(row_s=0.01)}, 4 * 0.5 + 32 * 0.01 + 0.2),
        # However many enter together, they are computed in one call
        ({"prefill": Work(call_s=0.01)}, 4 * (0.5 + 0.01) + 0.2),
    ],
)
def test_tools_hold_no_place_and_what_they_write_is_read_scored_and_trained(
    times: dict[str, Any], generating_s: float
) -> None:
    turns = Turns(replies=2.0, tool_s=0.4, read_tokens=50)
    ran = run(with_turns(mode="sync"), turns=turns, **times)
    assert ran.step_s(1) == pytest.approx(generating_s + 16 * 150 * 0.0005 + 8 * 150 * 0.001)
    assert ran.tokens[-1] == 16 * 100


def test_the_session_service_passes_one_reply_on_at_a_time() -> None:
    turns = Turns(replies=2.0, tool_s=0.5, cpu_s=0.5)
    # 32 replies of 0.25 s, behind the first one's 0.5 s; nothing else takes so long
    ran = run(with_turns(mode="sync"), turns=turns, train={"actor": Work()}, tasks={})
    assert ran.step_s(1) == pytest.approx(0.5 + 32 * 0.25)


def test_mean_turns_may_be_a_fraction() -> None:
    assert [Turns(replies=1.5).num_replies(row) for row in range(6)] == [1, 2, 1, 2, 1, 2]
    assert sum(Turns(replies=2.3).num_replies(row) for row in range(1000)) == 2300


def test_turns_without_a_record_are_refused() -> None:
    with pytest.raises(ConfigError, match="--lengths RUN_DIR"):
        run(with_turns())


def test_how_many_rollouts_run_is_the_runs_own(monkeypatch: pytest.MonkeyPatch) -> None:
    turns = Turns(replies=2.0, tool_s=1.0)
    config = with_turns(mode="async", max_staleness=1)
    before = run(config, turns=turns).step_s(2)
    assert before == pytest.approx(2.0, rel=0.05)
    monkeypatch.setattr(instance, "room", lambda *, places, live, **_: places - live)
    assert run(config, turns=turns).step_s(2) > 1.5 * before


@pytest.mark.parametrize("mode", [mode for mode in ScheduleMode if not mode.interrupts_for_turns])
@pytest.mark.parametrize("policy", ["fifo", "token-balanced", "token-budget"])
def test_every_step_is_trained_whole_in_every_schedule(mode: ScheduleMode, policy: str) -> None:
    config = config_of(schedule__mode=mode, tq={"policy": policy}, actor__max_tokens_per_micro_batch=1000)
    made = Scenario.from_config(config, Times.of_sim(config, prompt_tokens=0))
    trained = simulate(made, steps=config.steps).tokens
    assert list(trained) == [sum(map(made.tokens, range(32 * k, 32 * k + 32))) for k in range(8)]


def test_a_step_of_what_is_finished_first_does_not_wait_for_the_longest() -> None:
    changed = {"mode": "async", "max_staleness": 2, "rollout_batch_size": 16, "n_samples_per_prompt": 2}
    fills = [changed | {"fill": fill} for fill in ("in_order", "first_ready")]
    in_order, first = (run(config_of(schedule=fill, sim__sigma=1.2)) for fill in fills)
    assert first.step_ends[1] < 0.5 * in_order.step_ends[1]
    assert len(first.tokens) == 8


def test_several_updates_train_every_round_in_every_pass() -> None:
    once, twice = (run(config_of(actor__ppo_epochs=n, schedule__mode="sync", sim__lengths="constant")) for n in (1, 2))
    trained_s = 16 * 100 * 0.001
    forward_s = 16 * 100 * 0.001 / 3  # of the policy that the step found
    assert twice.step_s(1) - once.step_s(1) == pytest.approx(trained_s + forward_s)


def ppo(mode: str, *, critic_s: float, whiten: bool = True) -> tuple[RunConfig, dict[str, Any]]:
    """A critic of two ranks takes 0.8 s for a step's values and `critic_s` a token to train, the actor 1.6 s."""
    config = config_of(
        roles={"rollout": 2, "actor": 2, "critic": 2}, algorithm={"name": "ppo", "whiten_advantages": whiten},
        critic={"micro_batch_size": 16}, actor={"engine": "fsdp", "micro_batch_size": 4}, schedule__mode=mode,
        sim__lengths="constant",
    )  # fmt: skip
    train, values = {"actor": Work(token_s=0.001), "critic": Work(token_s=critic_s)}, Work(token_s=0.0005)
    return config, {"train": train, "tasks": {"values": values}, "update_s": {"actor": 0.0, "critic": 0.1}}


def ppo_run(mode: str, *, critic_s: float, whiten: bool = True) -> Simulated:
    config, times = ppo(mode, critic_s=critic_s, whiten=whiten)
    return run(config, **times)


def test_the_actor_waits_for_advantages_and_trains_beside_the_critic() -> None:
    assert ppo_run("sync", critic_s=0.002).step_s(1) == pytest.approx(2.0 + 0.8 + 1.6)
    # Responses of the next step find the critic at work until 0.8 + 8.0 + 0.1 s behind those of this one
    assert ppo_run("sync", critic_s=0.005).step_s(1) == pytest.approx(0.8 + 8.0 + 0.1)


def test_advantages_in_a_role_of_their_own_are_planned_as_if_the_critic_hosted_them() -> None:
    config, times = ppo("sync", critic_s=0.002)
    apart = config.model_copy(update={"roles": {**config.roles, "advantages": 1}})
    expected = ppo_run("sync", critic_s=0.002).step_s(1)
    assert run(apart, **times).step_s(1) == pytest.approx(expected)


def test_a_critic_may_limit_an_overlapped_run() -> None:
    ran = ppo_run("async", critic_s=0.005)
    assert ran.step_s(2) == pytest.approx(0.8 + 8.0 + 0.1, rel=0.01)
    assert ran.idle(2)["critic"] == pytest.approx(0.0, abs=0.05)


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("critic_s", [0.0005, 0.001, 0.002, 0.005])
def test_a_critic_trains_beside_the_actor_in_the_bound_too(mode: str, critic_s: float) -> None:
    config, times = ppo(mode, critic_s=critic_s)
    bounds = Bounds(Workload(0, 100, 100**2, Turns()), 100, scores=False)
    made = replace(Times.of_sim(config, prompt_tokens=0), **times, decode_s=lambda _: 0.01)
    made = replace(made, tasks={**made.tasks, "ref_log_probs": Work()})
    assert bounds.step_s(config, made) <= ppo_run(mode, critic_s=critic_s).step_s(1) * 1.001


def test_advantages_that_are_whitened_are_trained_once_the_last_one_is_there() -> None:
    roles, train = {"rollout": 2, "actor": 2}, {"actor": Work(token_s=0.002)}
    streamed, whole = (
        run(
            config_of(
                roles=roles, algorithm={"name": "ppo", "whiten_advantages": whiten}, schedule__mode="periodic",
                actor={"engine": "fsdp", "micro_batch_size": 4}, sim__lengths="constant",
            ),
            train=train,
        ).step_s(1)
        for whiten in (False, True)
    )  # fmt: skip
    assert whole == pytest.approx(2.0 + 16 * 100 * 0.002)
    assert streamed == pytest.approx(1.0 + 16 * 100 * 0.002), "the first wave is trained while the second is drawn"


def test_ppo_with_sim_engines_is_refused() -> None:
    with pytest.raises(ConfigError, match="actor.engine: sim cannot be used with algorithm.name ppo"):
        run(config_of(roles={"rollout": 2, "actor": 2, "critic": 2}, algorithm={"name": "ppo"}))


def test_deterministic_runs_are_simulated_and_slower() -> None:
    free, strict = (run(config_of(schedule__mode="periodic", deterministic=value)) for value in (False, True))
    assert strict.step_s(1) > free.step_s(1)


def _one_version_late(state: AdmissionState, admissible: Callable[[AdmissionState], list[int]]) -> list[int]:
    version = state._version
    state._version = max(0, version - 1)
    steps = admissible(state)
    state._version = version
    return steps


def _all_to_the_first(_: Fifo, items: Sequence[Item], assigned: Sequence[int]) -> list[list[Item]]:
    return [list(items), *([] for _ in assigned[1:])]


def test_admission_is_the_runs_own(monkeypatch: pytest.MonkeyPatch) -> None:
    before = run(config_of()).step_s(3)
    original = AdmissionState.admit_steps
    monkeypatch.setattr(AdmissionState, "admit_steps", lambda state: _one_version_late(state, original))
    assert run(config_of()).step_s(3) > 1.05 * before


def test_policies_are_the_runs_own(monkeypatch: pytest.MonkeyPatch) -> None:
    before = run(config_of(sim__train_s_per_token=0.004)).step_s(2)
    monkeypatch.setattr(Fifo, "assign", _all_to_the_first)
    assert run(config_of(sim__train_s_per_token=0.004)).step_s(2) > 1.5 * before


def test_micro_batches_are_the_runs_own(monkeypatch: pytest.MonkeyPatch) -> None:
    budget = config_of(actor__max_tokens_per_micro_batch=2000, actor__micro_batch_size=8)
    work = {"actor": Work(call_s=0.2, token_s=0.001)}
    before = run(budget, train=work).step_s(2)
    monkeypatch.setattr(micro_batches, "cut_by_tokens", lambda _, lengths, __: [[k] for k in range(len(lengths))])
    assert run(budget, train=work).step_s(2) > 1.5 * before


def test_how_responses_slow_each_other_down_is_the_runs_own(monkeypatch: pytest.MonkeyPatch) -> None:
    table = {"decode_s_by_batch": {1: 0.01, 8: 0.02}, "mean_tokens": 100}
    before = run(config_of(sim=table)).step_s(2)
    monkeypatch.setattr(Decoding, "_add_running", lambda *_: None)  # nothing slows down
    assert run(config_of(sim=table)).step_s(2) < 0.8 * before


def test_which_rounds_make_a_mini_batch_is_the_runs_own(monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of(actor__num_mini_batches=2, schedule__mode="periodic", sim__train_s_per_token=0.004)
    before = run(config).step_s(1)
    monkeypatch.setattr(MiniBatchAssigner, "assign_round", lambda *_: 1)  # all are kept until the last one is there
    assert run(config).step_s(1) > 1.04 * before


def test_who_needs_whose_columns_is_the_runs_own(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = config_of(schedule__mode="sync", sim__ref_s_per_token=0.004)
    before = run(slow).step_s(1)
    monkeypatch.setattr(scenario, "place_tasks", _nothing_scored)
    assert run(slow).step_s(1) < 0.8 * before


def _nothing_scored(graph: Sequence[Task], roles: Sequence[str]) -> tuple[PlacedTask, ...]:
    """Training reads nothing of the reference."""
    placed = place_tasks(graph, roles)
    return tuple(replace(task, inputs=tuple(n for n in task.inputs if n != "ref_log_probs")) for task in placed)


def test_which_rows_are_trained_late_is_the_runs_own(monkeypatch: pytest.MonkeyPatch) -> None:
    late = {"mode": "async", "max_staleness": 2, "rollout_batch_size": 16, "n_samples_per_prompt": 2}
    config = config_of(schedule=late | {"fill": "first_ready"}, sim__sigma=1.2)
    before = run(config).step_ends[1]

    def oldest(spec: StepSpec, step: int, assigned: int, offers: Sequence[Offer], full: int) -> Offer | None:
        return choose(spec, step, assigned, offers[:1], full)

    monkeypatch.setattr(task_spec, "choose", oldest)
    assert run(config).step_ends[1] > 1.05 * before


def test_turns_to_swap_are_the_runs_own(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = replace(FREE, swap_s=0.5)
    config = config_of(
        schedule__mode="substep", weightsync={"max_updating": 1}, roles={"rollout": 4, "actor": 2, "ref": 1}
    )
    before = run(config, slow).step_s(2)
    monkeypatch.setattr(SwapTurns, "ask", lambda *_: True)
    assert run(config, slow).step_s(2) != pytest.approx(before, rel=1e-3)


def test_when_an_instance_may_swap_is_the_runs_own(monkeypatch: pytest.MonkeyPatch) -> None:
    before = run(config_of()).step_s(2)
    monkeypatch.setattr(ScheduleMode, "may_swap", lambda *_, num_running, **__: num_running == 0)
    assert run(config_of()).step_s(2) > 1.01 * before


@pytest.mark.parametrize(
    ("times", "step_s"),
    [
        ({}, 1.0),
        ({"pause_s": 0.25}, 1.25),
        # The trainer publishes 0.5 s after the last wave, when each of 8 responses has 50 of its 100 tokens
        ({"recomputes": True, "prefill": Work(token_s=0.001)}, 1.0 + 8 * 50 * 0.001),
        # With prompts, which take 0.2 s of these 0.5 s
        ({"recomputes": True, "prefill": Work(token_s=0.001), "first_tokens": 25}, 1.2 + 8 * (25 + 30) * 0.001),
    ],
)
def test_a_swap_pauses_what_is_drawn_and_may_cost_its_keys_and_values(times: dict[str, Any], step_s: float) -> None:
    config = config_of(
        roles={"rollout": 1, "actor": 2, "ref": 1}, sim__lengths="constant", sim__train_s_per_token=0.00125,
        schedule={"mode": "substep", "max_staleness": 1, "rollout_batch_size": 4, "n_samples_per_prompt": 2},
        sim__ref_s_per_token=0,
    )  # fmt: skip
    assert run(config, **times).step_s(2) == pytest.approx(step_s, rel=0.02)


def test_tokens_of_earlier_turns_are_computed_again_too() -> None:
    config = with_turns(mode="substep", max_staleness=1)
    turns = Turns(replies=2.0, tool_s=0.4, read_tokens=50)
    kept, again, longer = (
        run(config, turns=replace(turns, read_tokens=read), recomputes=recomputes, prefill=Work(token_s=0.0001))
        for recomputes, read in ((False, 50), (True, 50), (True, 400))
    )
    assert kept.step_s(2) < again.step_s(2) < longer.step_s(2)


def colocated(mode: str, **changed: Any) -> RunConfig:
    """Two instances of 8 places and two ranks of the actor on two devices; 32 responses a step."""
    return config_of(roles={"rollout": 2, "actor": 2}, colocated=("rollout", "actor"), schedule__mode=mode, **changed)


@pytest.mark.parametrize(
    ("mode", "step_s"),
    [
        # Two waves of 1 s; 32 x 100 tokens scored and trained on two ranks; two switches
        ("sync", 2.0 + 0.8 + 1.6 + 2 * 0.5),
        ("periodic", 2.0 + 0.8 + 1.6 + 2 * 0.5),
        ("colocate_async", 2.0 + 0.8 + 1.6 + 2 * 0.5),
        # Staleness 1 allows two steps in a turn
        ("async", 2.0 + 0.8 + 1.6 + 0.5),
    ],
)
def test_colocated_roles_take_turns_and_each_switch_takes_its_time(mode: str, step_s: float) -> None:
    ran = run(colocated(mode, sim__lengths="constant", sim__switch_s=0.5))
    assert ran.step_s(2) == pytest.approx(step_s)
    assert ran.idle(2) == {"rollout+actor": pytest.approx(1 - 4.4 / step_s)}


@pytest.mark.parametrize("mode", [mode for mode in ScheduleMode if mode is not ScheduleMode.SUBSTEP])
def test_every_step_of_colocated_roles_is_trained_whole(mode: ScheduleMode) -> None:
    config = colocated(mode, sim__switch_s=0.5, sim__sigma=1.2)
    made = Scenario.from_config(config, Times.of_sim(config, prompt_tokens=0))
    trained = simulate(made, steps=config.steps).tokens
    assert list(trained) == [sum(map(made.tokens, range(32 * k, 32 * k + 32))) for k in range(8)]


def test_a_reference_with_devices_of_its_own_scores_while_colocated_roles_take_turns() -> None:
    roles = {"rollout": 2, "actor": 2, "ref": 1}
    hosted, own = (run(colocated("async", sim__sigma=1.0).model_copy(update=more)) for more in ({}, {"roles": roles}))
    assert own.step_s(2) < hosted.step_s(2)
    assert set(own.idle(2)) == {"rollout+actor", "ref"}


def test_responses_that_a_turn_interrupts_go_on_and_compute_their_keys_and_values_again() -> None:
    prefill = {"prefill": Work(token_s=0.001)}
    long = {"sim__sigma": 1.2, "sim__switch_s": 0.1}
    plain, again = (run(colocated("colocate_async", **long), **more) for more in ({}, prefill))
    assert plain.step_s(2) < run(colocated("sync", **long)).step_s(2)
    assert again.step_s(2) > 1.01 * plain.step_s(2)
    # Nothing runs when any other schedule switches.
    assert run(colocated("async", **long), **prefill).step_s(2) == run(colocated("async", **long)).step_s(2)


def test_a_rollout_whose_tools_run_gives_its_turn_away() -> None:
    turns = Turns(replies=2.0, tool_s=8.0)
    alone = with_turns(mode="async", max_staleness=1)
    shared = alone.model_copy(update={"roles": {"rollout": 2, "actor": 2}, "colocated": ("rollout", "actor")})
    # Both steps' rollouts draw 0.5 s, then wait 4 s for their tools, twice. The first step is complete then, and the
    # actor trains it at once, while the second one's last tools run.
    assert run(shared, turns=turns).step_ends[1] == pytest.approx(
        2 * (0.5 + 4.0) + 8 * 100 * (0.0005 + 0.001), rel=0.01
    )


def test_whose_turn_it_is_is_the_runs_own(monkeypatch: pytest.MonkeyPatch) -> None:
    long = colocated("colocate_async", sim__sigma=1.2)
    before = run(long).step_s(2)
    monkeypatch.setattr(ScheduleMode, "interrupts_for_turns", False)
    assert run(long).step_s(2) > 1.02 * before
    monkeypatch.setattr(DeviceTurn, "handle", lambda *_: [])  # nobody gets it
    with pytest.raises(AssertionError, match="nothing happens any more"):
        run(long)


def test_workers_that_share_a_machine_slow_each_other_down() -> None:
    config = config_of(sim__lengths="constant")
    times = replace(Times.of_sim(config, prompt_tokens=0), latency=FREE)
    steps_s = [
        simulate(Scenario.from_config(config, replace(times, at_full_speed=number)), steps=8, further=1).step_s(2)
        for number in (0.0, 5.0, 1.0)
    ]
    assert steps_s[1] == pytest.approx(steps_s[0])  # five workers at five places
    # One place for two instances of 2 s, 32 x 100 tokens of the reference, and of the trainer
    assert steps_s[2] == pytest.approx(2 * 2.0 + 32 * 100 * 0.0005 + 32 * 100 * 0.001, rel=0.02)


def test_what_the_queue_computes_slows_a_shared_machine_alone() -> None:
    config = config_of(sim__lengths="constant")
    times = Times.of_sim(config, prompt_tokens=0)

    def step_s(at_full_speed: float, request_s: float) -> float:
        slower = replace(times, latency=replace(FREE, request_s=request_s), at_full_speed=at_full_speed)
        return simulate(Scenario.from_config(config, slower), steps=8).step_s(2)

    assert step_s(0.0, 0.1) == step_s(0.0, 0.0)
    # 16 groups are put, and leased for some 5 waves; 8 leases and puts of the reference, 4 rounds of 2 replicas
    assert step_s(1.0, 0.1) - step_s(1.0, 0.0) == pytest.approx((16 + 5 + 8 + 8 + 8) * 0.1, rel=0.05)
