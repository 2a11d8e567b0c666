"""What is checked of an algorithm's settings together before a run starts."""

import pytest

from asyncflow.errors import ConfigError
from launcher.checks.preflight import check_run
from launcher.config.load import load_config
from launcher.config.paths import find_recipe

GSPO = ("algorithm={name: gspo}", "algorithm.off_policy.method=none")


def check(*settings: str) -> None:
    check_run(load_config(find_recipe("quickstart"), overrides=settings, roles="rollout:1,actor:1"))


def test_gspo_is_not_clipped_by_the_gap_between_two_engines() -> None:
    with pytest.raises(ConfigError, match="^algorithm.off_policy.method: none cannot be with algorithm.name gspo"):
        check(*GSPO)


def test_gspo_takes_ratios_of_the_trainer_s_own_policies() -> None:
    check(GSPO[0])
    check(*GSPO, "actor.tri_model=true")


def test_a_call_for_tasks_may_not_take_as_long_as_a_process_that_is_stuck() -> None:
    with pytest.raises(ConfigError, match=r"^data.timeout_s: 1800 is not below launcher.operation_timeout_s 1800"):
        check("data.timeout_s=1800", "data.sampler=own:Curriculum")
