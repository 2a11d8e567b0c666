"""What is checked of a run with a reward model before it starts."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
from safetensors.numpy import load_file, save_file

from asyncflow.errors import ConfigError
from launcher.checks.placement import Devices, place_gangs
from launcher.checks.preflight import Preflight, check_run
from launcher.config.load_config import load_config
from launcher.config.paths import find_recipe
from launcher.doctor.estimate import memory_parts
from launcher.request.dry_run import describe

ROLES = "rollout:1,actor:1,reward:2"


def check(*settings: str, roles: str = ROLES) -> Preflight:
    own = ("launcher.device=cpu", *settings)
    return check_run(load_config(find_recipe("quickstart-reward-model-cpu"), overrides=own, roles=roles))


@pytest.fixture
def reward_dir(tmp_path: Path) -> Path:
    """A copy of the recipe's reward model, to be damaged."""
    model = check().config.reward.model
    assert model is not None
    return Path(shutil.copytree(model.path, tmp_path / "reward_model"))


def edit_json(file: Path, change: Callable[[dict[str, Any]], object]) -> None:
    value = json.loads(file.read_text())
    change(value)
    file.write_text(json.dumps(value))


def edit_weights(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    weights = load_file(path / "model.safetensors")
    change(weights)
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})


def test_recipe_scores_in_a_role_of_its_own() -> None:
    checked = check()
    assert [gang.name for gang in checked.gangs if gang.role == "reward"] == ["reward-0", "reward-1"]
    assert {task.role for task in checked.tasks if "rewards" in task.outputs} == {"reward"}
    assert checked.num_reward_parameters == 93_824
    text = describe(checked, source=Path("recipe.yaml"), run_dir=Path("run"))
    assert "reward_model (93,824 parameters, float32)\n" in text
    mixed = check("reward.function=digits", "reward.model.function_weight=0.5")
    assert "float32) + 0.5 x digits\n" in describe(mixed, source=Path("recipe.yaml"), run_dir=Path("run"))


def test_reward_ranks_take_a_device_only_with_a_model() -> None:
    config = check().config
    placed = {gang.name: gang.devices for gang in place_gangs(config, Devices("cuda", 4))}
    assert (placed["rollout-0"], placed["reward-0"], placed["reward-1"]) == (("cuda:1",), ("cuda:2",), ("cuda:3",))
    function_alone = config.model_copy(update={"reward": config.reward.model_copy(update={"model": None})})
    placed = {gang.name: gang.devices for gang in place_gangs(function_alone, Devices("cuda", 2))}
    assert placed["reward-0"] == ("cpu",)
    with pytest.raises(ConfigError, match="needs 4 cuda devices, but there are 3"):
        place_gangs(config, Devices("cuda", 3))


def test_memory_of_reward_models_counts() -> None:
    assert memory_parts(check())["reward models"] == 2 * 93_824 * 4
    assert memory_parts(check("reward.model.dtype=bfloat16"))["reward models"] == 2 * 93_824 * 2
    assert memory_parts(check("reward.model=null"))["reward models"] == 0


@pytest.mark.parametrize(
    ("settings", "roles", "expected"),
    [
        ((), "rollout:1,actor:1", "(--roles rollout:1,actor:1,reward:1), or remove reward.model"),
        (("reward.model.path=nowhere",), ROLES, "reward.model.path: 'nowhere' does not exist (looked at "),
        (("reward.model={weight: 2}",), ROLES, "reward.model.path: missing in "),
        (("reward.model.weight=0",), ROLES, "reward.model.weight: 0 cannot be used"),
        (("reward.model.weight=.inf",), ROLES, "reward.model.weight: inf is not finite"),
        (("reward.model.micro_batch_size=0",), ROLES, "reward.model.micro_batch_size: 0 cannot be used"),
        (("reward.model.wieght=2",), ROLES, "reward.model.wieght: unknown key"),
        (("algorithm={name: dapo}",), ROLES, "algorithm.group_filter: zero_variance cannot be used with reward.model"),
        (("data.max_prompt_tokens=13",), ROLES, "has 16 positions, but prompt and response may have 17 tokens"),
        (("reward.model.path={policy}",), ROLES, "describes a Qwen2ForCausalLM, which scores no text"),
    ],
)
def test_settings_that_cannot_be_are_refused_in_one_line(settings: tuple[str, ...], roles: str, expected: str) -> None:
    policy = check().config.model.path
    with pytest.raises(ConfigError) as caught:
        check(*(setting.replace("{policy}", policy) for setting in settings), roles=roles)
    assert expected in str(caught.value) and "\n" not in str(caught.value)


def test_dapo_without_a_filter_may_have_a_reward_model() -> None:
    assert check("algorithm={name: dapo, group_filter: null}").config.algorithm.name == "dapo"


def swap_two_tokens(tokenizer: dict[str, Any]) -> None:
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["+"], vocabulary["-"] = vocabulary["-"], vocabulary["+"]


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (
            lambda path: edit_weights(path, lambda weights: weights.pop("score.weight")),
            "has no weight score.weight, the head that gives a response its score",
        ),
        (
            lambda path: edit_weights(
                path, lambda weights: weights.update({"score.weight": numpy.zeros((2, 64), "f")})
            ),
            "has 2 labels; a reward model has 1",
        ),
        (lambda path: edit_json(path / "tokenizer.json", swap_two_tokens), "has other tokens than the policy: '+' is"),
        (
            lambda path: edit_json(path / "tokenizer.json", lambda value: value["model"]["vocab"].pop("9")),
            "'9' is number 15 in ",
        ),
        (lambda path: edit_json(path / "config.json", lambda value: value.update(vocab_size=15)), "of 15 tokens, but"),
        (lambda path: (path / "config.json").write_text("{"), "config.json is malformed JSON"),
        (lambda path: (path / "model.safetensors").write_bytes(b""), "header too small"),
    ],
)
def test_directories_that_hold_no_reward_model_of_the_policy_are_refused(
    reward_dir: Path, damage: Callable[[Path], object], expected: str
) -> None:
    damage(reward_dir)
    with pytest.raises(ConfigError, match=r"^reward\.model\.path: ") as caught:
        check(f"reward.model.path={reward_dir}")
    assert expected in str(caught.value) and "\n" not in str(caught.value)


def test_reward_model_without_tokenizer_json_cannot_be_compared(reward_dir: Path) -> None:
    (reward_dir / "tokenizer.json").rename(reward_dir / "tokenizer.model")
    with pytest.raises(ConfigError, match=r"^reward\.model\.path: .* has no tokenizer\.json"):
        check(f"reward.model.path={reward_dir}")


def test_tokens_that_the_policy_has_not_are_the_reward_model_s_own_business(reward_dir: Path) -> None:
    edit_json(reward_dir / "tokenizer.json", lambda value: value["model"]["vocab"].update({"[PAD]": 16}))
    edit_json(reward_dir / "config.json", lambda value: value.update(vocab_size=17))
    assert check(f"reward.model.path={reward_dir}").num_reward_parameters == 93_824


def test_path_of_an_option_is_relative_to_the_working_directory(
    reward_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(reward_dir.parent)
    for option in ("reward.model.path=reward_model", "reward.model={path: reward_model}"):
        model = check(option).config.reward.model
        assert model is not None and model.path == str(reward_dir)


def test_critic_may_begin_with_a_reward_model(reward_dir: Path) -> None:
    ppo = find_recipe("quickstart-ppo-cpu")
    assert check_run(load_config(ppo, overrides=[f"critic.path={reward_dir}"])).config.critic.path == str(reward_dir)
    (reward_dir / "config.json").unlink()
    with pytest.raises(ConfigError, match=r"^critic\.path: cannot read .*config\.json"):
        check_run(load_config(ppo, overrides=[f"critic.path={reward_dir}"]))
