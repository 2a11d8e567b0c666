"""What is checked of a run with a critic before it starts."""

from pathlib import Path

import pytest

from asyncflow.errors import ConfigError
from launcher.checks.preflight import Preflight, check_run
from launcher.config.load_config import load_config
from launcher.config.paths import find_recipe


def check(*settings: str, roles: str = "rollout:1,actor:1,critic:1,ref:1") -> Preflight:
    return check_run(load_config(find_recipe("quickstart-ppo-cpu"), overrides=settings, roles=roles))


def test_recipe_is_accepted_with_the_critic_in_its_role_and_in_the_actor() -> None:
    own, inside = check(), check(roles="rollout:1,actor:2")
    assert {gang.name for gang in own.gangs} >= {"actor", "critic", "rollout-0", "ref-0"}
    assert "critic_train" in {task.name for task in own.tasks}
    assert "critic_train" not in {task.name for task in inside.tasks}


def test_a_penalty_in_the_reward_takes_a_role_for_the_policys_log_probs() -> None:
    own = check("algorithm.kl_placement=reward", roles="rollout:1,actor:1,critic:1,ref:1,actor_fwd:1")
    assert {"actor_log_probs", "critic_train"} <= {task.name for task in own.tasks}


def test_ranks_of_a_critic_are_one_gang() -> None:
    (critic,) = (gang for gang in check(roles="rollout:1,actor:1,critic:4,ref:1").gangs if gang.role == "critic")
    assert critic.num_ranks == 4


@pytest.mark.parametrize(
    ("settings", "roles", "expected"),
    [
        ((), "rollout:1,actor:1,critic:3,ref:1", "64 groups (schedule.rollout_batch_size) do not divide over critic:3"),
        (
            ("algorithm.kl_placement=reward",),
            "rollout:1,actor:1,critic:1,ref:1",
            "roles: 'critic' reads column old_log_probs, which no other launched role writes; launch actor_fwd, too",
        ),
        ((), "rollout:1,actor:1,critic:1,ref:1,actor_fwd:1", "roles: 'actor_fwd' has nothing to do"),
        (("critic.micro_batch_size=96",), "", "critic.micro_batch_size: 96 does not divide a rank's 256 samples"),
        (("critic.path=nowhere",), "", "critic.path: 'nowhere' does not exist (looked at "),
        (("critic.learning_rate=1",), "", "critic.learning_rate: unknown key"),
        (("algorithm.lam=1.5",), "", "algorithm.lam: 1.5 cannot be used"),
        (
            ("schedule.fill=first_ready", "schedule.max_staleness=2"),
            "",
            "schedule.fill: first_ready cannot be used with role critic",
        ),
        (
            ("actor.engine=sim", "rollout.engine=sim", "ref.engine=sim"),
            "",
            "actor.engine: sim cannot be used with algorithm.name",
        ),
        (("algorithm={name: grpo}",), "rollout:1,actor:1,critic:1", "roles: 'critic' has no task in this algorithm's"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(settings: tuple[str, ...], roles: str, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check(*settings, **({"roles": roles} if roles else {}))
    assert expected in str(caught.value) and "\n" not in str(caught.value)


def test_a_critics_directory_without_a_model_is_named_as_the_critics(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^critic\.path: cannot read .*config\.json"):
        check(f"critic.path={tmp_path}")


def test_a_buffer_for_long_responses_is_no_longer_than_a_response() -> None:
    def load(tokens: int) -> Preflight:
        dapo = ("algorithm.name=dapo", f"algorithm.overlong_buffer_tokens={tokens}")
        return check_run(load_config(find_recipe("quickstart"), overrides=dapo))

    load(4)
    with pytest.raises(ConfigError, match=r"overlong_buffer_tokens: 5 are more than the longest response .* 4\)"):
        load(5)


def test_a_price_of_long_rollouts_needs_a_limit_of_all_their_replies() -> None:
    def load(*settings: str) -> Preflight:
        dapo = ("algorithm={name: dapo, overlong_buffer_tokens: 12}", *settings)
        return check_run(load_config(find_recipe("quickstart-tools"), overrides=dapo))

    load("rollout.max_drawn_tokens=12")
    with pytest.raises(ConfigError, match="overlong_buffer_tokens: 12 penalizes .*max_drawn_tokens 0 sets them no"):
        load()
    with pytest.raises(ConfigError, match=r"12 are more than the longest response \(rollout.max_drawn_tokens 11\)"):
        load("rollout.max_drawn_tokens=11")


def test_critic_may_begin_with_a_model_of_its_own(tmp_path: Path) -> None:
    model = Path(check().config.model.path)
    (tmp_path / "empty").mkdir()
    assert check(f"critic.path={model}").config.critic.path == str(model)
    with pytest.raises(ConfigError, match=r"config\.json"):
        check(f"critic.path={tmp_path / 'empty'}")
