"""Advice from a live run: who limits it, and which split would be better."""

import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from asyncflow.job import GangSpec
from launcher.plan.scenario import Scenario, Times
from launcher.plan.world import Simulated, simulate
from launcher.run.advice import Advice, Advisor, RoleLoad, better_split
from launcher.run.rundir import write_plan
from workers.settings.run import RunConfig

EVERY = range(1, 25)
DIVISORS = (1, 2, 3, 4, 6, 8, 12, 24)


def loads(rollout: tuple[int, float], actor: tuple[int, float], ref: tuple[int, float]) -> dict[str, RoleLoad]:
    """Ranks and busy shares; 24 groups a step."""
    return {"rollout": RoleLoad(*rollout, EVERY), "actor": RoleLoad(*actor, DIVISORS), "ref": RoleLoad(*ref, EVERY)}


@pytest.mark.parametrize(
    ("busy", "split", "split_s"),
    [
        (loads((4, 1.0), (6, 0.3), (2, 0.2)), {"rollout": 7, "actor": 4, "ref": 1}, 40 / 7),
        (loads((9, 0.3), (2, 1.0), (1, 0.5)), {"rollout": 6, "actor": 4, "ref": 2}, 5.0),
        (loads((6, 0.3), (4, 0.2), (2, 1.0)), {"rollout": 5, "actor": 2, "ref": 5}, 4.0),
    ],
    ids=["rollout-bound", "trainer-bound", "reference-bound"],
)
def test_ranks_go_where_the_work_is(busy: Mapping[str, RoleLoad], split: dict[str, int], split_s: float) -> None:
    found, found_s = better_split(busy, step_s=10.0, in_turns=False)
    assert found is not None
    assert sum(found.values()) == 12 and found["actor"] in DIVISORS
    assert found_s == pytest.approx(split_s)
    assert found == split


@pytest.mark.parametrize(
    "busy",
    [
        loads((8, 0.97), (3, 0.95), (1, 0.94)),
        loads((8, 0.90), (3, 0.99), (1, 0.40)),  # the actor's next size is 4, and then the rollout limits as much
        {"rollout": RoleLoad(8, 0.97, (8, 16)), "actor": RoleLoad(4, 0.5, (4, 8))},  # an instance is eight ranks
    ],
)
def test_no_split_is_better_where_all_are_busy_or_none_can_grow(busy: Mapping[str, RoleLoad]) -> None:
    assert better_split(busy, step_s=10.0, in_turns=False) == (None, 10.0)


def test_what_the_busiest_role_waits_is_not_saved() -> None:
    # 2 s of 10 belong to nobody: admission, transfers, the long tail
    split, split_s = better_split(loads((4, 0.8), (6, 0.2), (2, 0.1)), step_s=10.0, in_turns=False)
    assert split == {"rollout": 8, "actor": 3, "ref": 1}
    assert split_s == pytest.approx(2.0 + 4.0)


def test_roles_that_take_turns_share_a_step() -> None:
    split, split_s = better_split(
        {"rollout": RoleLoad(6, 0.2, EVERY), "actor": RoleLoad(2, 0.8, DIVISORS)}, step_s=10.0, in_turns=True
    )
    assert split == {"rollout": 4, "actor": 4}
    assert split_s == pytest.approx(10.0 * 0.2 * 6 / 4 + 10.0 * 0.8 * 2 / 4)


NOWHERE = Path("nowhere")


def config_of(**changed: Any) -> RunConfig:
    values: dict[str, Any] = {
        "steps": 10,
        "roles": {"rollout": 4, "actor": 6, "ref": 2},
        "model": {"path": "model"},
        "data": {"path": "data.jsonl", "max_prompt_tokens": 8},
        "schedule": {"max_staleness": 1, "rollout_batch_size": 24, "n_samples_per_prompt": 4},
        "rollout": {"engine": "sim", "batch_size": 8, "max_response_tokens": 4000},
        "actor": {"engine": "sim", "micro_batch_size": 4},
        "ref": {"engine": "sim", "micro_batch_size": 4},
        "algorithm": {"kl_coef": 0.001},
        "sim": {
            "mean_tokens": 100,
            "sigma": 0.3,
            "decode_s_per_token": 0.02,
            "train_s_per_token": 0.0005,
            "ref_s_per_token": 0.0002,
        },
    }
    return RunConfig.model_validate(values | changed)


def ran(config: RunConfig) -> Simulated:
    return simulate(Scenario.from_config(config, Times.of_sim(config, prompt_tokens=0)), steps=config.steps)


def lines_of(idle: Mapping[str, float], *, step_s: float = 5.0, first: int = 1, last: int = 10) -> list[dict[str, Any]]:
    """Lines of metrics.jsonl; the first step has nobody's idle time yet."""
    return [
        {"step": step, "step_time_s": step_s, "idle_fraction": {} if step == 1 else dict(idle)}
        for step in range(first, last + 1)
    ]


def advice_of(config: RunConfig, idle: Mapping[str, float], **changed: Any) -> Advice:
    advice = Advisor(config, (), NOWHERE).update_advice(lines_of(idle, **changed))
    assert advice is not None
    return advice


def test_a_run_with_the_split_takes_as_long_as_the_advice_says() -> None:
    config = config_of()
    measured = ran(config)
    advice = advice_of(config, measured.idle(2), step_s=measured.step_s(2))
    assert (advice.first_step, advice.last_step, advice.limits) == (3, 10, "rollout")
    assert advice.predicted_s == pytest.approx(advice.step_s, rel=0.05)
    assert advice.split is not None and sum(advice.split.values()) == 12
    again = ran(config_of(roles=dict(advice.split))).step_s(2)
    assert advice.split_s < 0.75 * advice.step_s
    assert again == pytest.approx(advice.split_s, rel=0.1)


def test_the_line_names_the_step_who_limits_and_what_to_type() -> None:
    advice = replace(advice_of(config_of(), {"rollout": 0.0, "actor": 0.7, "ref": 0.8}), predicted_s=4.8)
    assert advice.text == (
        "steps 3 to 10: 5 s each, 4.8 s predicted; busy: rollout 100 %, actor 30 %, ref 20 %; rollout limits; "
        "--roles rollout:7,actor:4,ref:1 would take about 2.86 s (-43 %)"
    )
    balanced = advice_of(config_of(), {"rollout": 0.03, "actor": 0.05, "ref": 0.05})
    assert balanced.text.endswith("no split of the 12 devices is better by 5 %")
    assert balanced.to_summary()["split"] is None and balanced.to_summary()["limits"] == "rollout"


def test_roles_without_a_device_are_no_part_of_a_split_and_stay_in_the_line() -> None:
    config = config_of(roles={"rollout": 4, "actor": 6, "ref": 2, "advantages": 3})
    idle = {"rollout": 0.0, "actor": 0.7, "ref": 0.8, "advantages": 0.9}
    assert advice_of(config, idle).split == {"rollout": 7, "actor": 4, "ref": 1, "advantages": 3}
    idle = {"rollout": 0.6, "actor": 0.7, "ref": 0.8, "advantages": 0.0}
    assert "advantages limits; give it more ranks, they take no device" in advice_of(config, idle).text


def test_engines_that_share_the_cores_of_a_host_get_no_split() -> None:
    config = config_of(
        rollout={"engine": "hf", "max_response_tokens": 64}, actor={"engine": "fsdp", "micro_batch_size": 4},
        ref={"engine": "fsdp"},
    )  # fmt: skip
    gangs = (GangSpec("actor", "actor", 0, 6, ("cpu",) * 6),)
    advice = Advisor(config, gangs, NOWHERE).update_advice(lines_of({"rollout": 0.0, "actor": 0.7, "ref": 0.8}))
    assert advice is not None and advice.split is None and advice.predicted_s is None
    assert "rollout limits" not in advice.text and "share the cores" in advice.text


def test_what_was_planned_is_compared_with_what_is_measured_whatever_the_engines(tmp_path: Path) -> None:
    config = config_of(
        rollout={"engine": "hf", "max_response_tokens": 64}, actor={"engine": "fsdp", "micro_batch_size": 4},
        ref={"engine": "fsdp"},
    )  # fmt: skip
    lines = lines_of({"rollout": 0.0, "actor": 0.7, "ref": 0.8})
    write_plan(tmp_path, {"roles": config.roles, "step_s": 4.0})
    advice = Advisor(config, (), tmp_path).update_advice(lines)
    assert advice is not None and "5 s each, 4 s predicted" in advice.text
    others: list[dict[str, Any]] = [{"roles": {"rollout": 1}, "step_s": 4.0}, {}, {"roles": config.roles}]
    for other in others:
        write_plan(tmp_path, other)
        advice = Advisor(config, (), tmp_path).update_advice(lines)
        assert advice is not None and advice.predicted_s is None


def test_a_copy_of_several_ranks_grows_as_a_whole() -> None:
    config = config_of(
        roles={"rollout": 8, "actor": 6, "ref": 2}, rollout={"engine": "vllm", "max_response_tokens": 64},
        vllm={"tensor_parallel_size": 4}, ref={"engine": "fsdp", "shards": 2},
        actor={"engine": "fsdp", "micro_batch_size": 4},
    )  # fmt: skip
    gangs = (GangSpec("actor", "actor", 0, 1, ("cuda:0",)), GangSpec("controller-0", "controller", 0, 1, ("cpu",)))
    advice = Advisor(config, gangs, NOWHERE).update_advice(lines_of({"rollout": 0.0, "actor": 0.8, "ref": 0.9}))
    assert advice is not None and advice.split == {"rollout": 12, "actor": 2, "ref": 2}


def test_advice_waits_for_steps_and_begins_anew_after_a_restore() -> None:
    idle = {"rollout": 0.0, "actor": 0.7, "ref": 0.8}
    advisor = Advisor(config_of(), (), NOWHERE)
    assert advisor.update_advice(lines_of(idle, last=6)) is None
    first = advisor.update_advice(lines_of(idle, first=7, last=7))
    assert first is not None and first.first_step == 3
    assert advisor.update_advice([]) is first
    again = advisor.update_advice(lines_of({"rollout": 0.5, "actor": 0.0, "ref": 0.8}, first=4, last=12))
    assert again is not None and (again.first_step, again.limits) == (6, "actor")
    assert Advisor(config_of(), (), NOWHERE).update_advice(lines_of(idle, step_s=1.0)) is None  # eight seconds


def test_the_log_has_a_line_when_the_advice_changes_and_at_most_one_in_twenty_steps(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "launcher.run.advice")
    advisor = Advisor(config_of(), (), NOWHERE)
    for step in range(1, 61):
        limits = "actor" if step >= 30 else "rollout"
        idle = {"rollout": 0.6, "actor": 0.6, "ref": 0.8} | {limits: 0.0}
        advisor.update_advice(lines_of(idle, first=step, last=step))
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 3  # rollout; while both are in the window; actor
    assert said[0].startswith("advice: steps 3 to 7") and "rollout limits" in said[0]
    assert "actor limits" in said[-1]
