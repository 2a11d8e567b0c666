import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from asyncflow.errors import ConfigError
from launcher.config.load_config import load_config
from launcher.config.paths import find_recipe, packaged_recipes
from launcher.config.rules import AT_LOADING, AT_START
from workers.settings.run import RunConfig
from workers.settings.schedule import Fill, ScheduleConfig

WriteConfig = Callable[..., Path]


def refusal(source: Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(source, overrides=overrides)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_file_is_resolved_to_absolute_paths(write_config: WriteConfig, model_dir: Path, data_file: Path) -> None:
    config = load_config(write_config())
    assert (config.model.path, config.data.path) == (str(model_dir), str(data_file))
    assert config.roles == {"rollout": 2, "actor": 2}


def test_command_line_wins_over_the_file(write_config: WriteConfig) -> None:
    overrides = ["actor.lr=1e-4", "actor.betas=[0.9, 0.95]", "data.system_prompt=", "tq.num_storage_units=4"]
    config = load_config(write_config(), overrides=overrides, roles="rollout:1,actor:4", steps=9)
    assert config.actor.lr == 1e-4
    assert config.actor.betas == (0.9, 0.95)
    assert config.tq.num_storage_units == 4
    assert config.roles == {"rollout": 1, "actor": 4}
    assert config.steps == 9


def test_resolved_file_loads_to_the_same_configuration(write_config: WriteConfig, tmp_path: Path) -> None:
    config = load_config(write_config(schedule={"mode": "sync"}))
    (tmp_path / "run").mkdir()
    config.save(tmp_path / "run")
    assert load_config(tmp_path / "run" / "config.yaml") == config == RunConfig.load(tmp_path / "run")


def test_path_beside_the_file_wins_over_the_working_directory(
    write_config: WriteConfig, data_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    other = tmp_path / "elsewhere" / data_file.name
    other.write_text(data_file.read_text())
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert load_config(write_config()).data.path == str(data_file)
    assert load_config(write_config(), overrides=[f"data.path={data_file.name}"]).data.path == str(other)


def test_sync_mode_bounds_staleness_by_zero(write_config: WriteConfig) -> None:
    assert load_config(write_config(schedule={"mode": "sync"})).schedule.max_staleness == 0
    config = load_config(write_config(schedule={"mode": "async", "max_staleness": 1}), overrides=["schedule.mode=sync"])
    assert config.schedule.max_staleness == 0


def test_staleness_asked_for_in_sync_mode_is_refused(write_config: WriteConfig) -> None:
    message = refusal(write_config(schedule={"mode": "sync", "max_staleness": 2}))
    assert re.match(r"schedule.max_staleness: 2 .*recipe.yaml:\d+\); set it to 0", message)


@pytest.mark.parametrize("mode", ["async", "substep"])
def test_deterministic_is_refused_where_timing_chooses_the_weights(write_config: WriteConfig, mode: str) -> None:
    message = refusal(write_config(schedule={"mode": mode, "max_staleness": 1}), "deterministic=true")
    assert message.startswith(f"deterministic: true cannot be used with schedule.mode {mode}")


@pytest.mark.parametrize("schedule", [{"mode": "sync"}, {"mode": "periodic"}, {"mode": "async", "max_staleness": 0}])
def test_groups_cannot_be_late_where_no_weights_may_be_older(
    write_config: WriteConfig, schedule: dict[str, object]
) -> None:
    message = refusal(write_config(schedule=schedule), "schedule.fill=first_ready")
    mode = schedule["mode"]
    assert message.startswith("schedule.fill: 'first_ready' cannot be used (from --set ")
    assert f"a step late is older than mode {mode} and max_staleness 0 allow" in message
    assert "set schedule.mode to async or substep and schedule.max_staleness to 2 or more, or schedule.fill" in message


def test_late_groups_take_their_share_of_the_staleness() -> None:
    settings = {"rollout_batch_size": 4, "n_samples_per_prompt": 2, "max_staleness": 2}
    in_order, first_ready = ScheduleConfig(**settings), ScheduleConfig(**settings, fill=Fill.FIRST_READY)
    assert (in_order.gate_staleness, in_order.lateness, in_order.live_rows) == (2, 0, 24)
    assert (first_ready.gate_staleness, first_ready.lateness, first_ready.live_rows) == (1, 1, 16)


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("actor.micro_batchsize=4", "actor.micro_batchsize: unknown key (from --set actor.micro_batchsize=4); did you"),
        (
            "actor.learning_rate=1",
            "actor.learning_rate: unknown key (from --set actor.learning_rate=1); did you mean 'lr'",
        ),
        ("learning_rate=1", "learning_rate: unknown key (from --set learning_rate=1); did you mean 'actor.lr'?"),
        ("algorithm.beta=0.1", "did you mean 'kl_coef'?"),
        ("algorithm.lambda=0.9", "did you mean 'algorithm.lam'?"),
        ("critic.max_grad_norm=1", "did you mean 'grad_clip'?"),
        ("rollout.max_tokens=9", "did you mean 'max_response_tokens'?"),
        ("rollout.n=4", "did you mean 'schedule.n_samples_per_prompt'?"),
        ("rollout.lr=1", "did you mean 'actor.lr'?"),
        ("checkpoint.save_steps=9", "did you mean 'interval'?"),
        ("rolout.top_p=1", "rolout: unknown key (from --set rolout.top_p=1); did you mean 'rollout'?"),
        ("rollout_batch_size=8", "rollout_batch_size: unknown key (from --set rollout_batch_size=8); did you mean"),
        ("actor.xyz=8", "actor.xyz: unknown key (from --set actor.xyz=8); known here: micro_batch_size "),
        ("steps=ten", "steps: 'ten' cannot be used (from --set steps=ten); give a whole number"),
        ("steps=1.5", "steps: 1.5 cannot be used (from --set steps=1.5); give a whole number"),
        ("steps=0", "steps: 0 cannot be used (from --set steps=0); it must be greater than or equal to 1"),
        ("steps=true", "steps: true is not a number (from --set steps=true)"),
        ("actor.lr=.inf", "actor.lr: inf is not finite (from --set actor.lr=.inf)"),
        ("actor.lr=.nan", "actor.lr: nan"),
        ("actor.betas=[0.9]", "actor.betas.1: missing"),
        ("algorithm=grpo", "algorithm: 'grpo' cannot be used (from --set algorithm=grpo); give a section"),
        ("algorithm.name=null", "algorithm.name: None cannot be used (from --set algorithm.name=null); it must be one"),
        ("reward.timeout_s=1e12", "reward.timeout_s: "),
        ("steps=1000000000000000000000", "steps: "),
        ("actor=3", "actor: 3 cannot be used (from --set actor=3); give a section"),
        ("name=12", "name: 12 cannot be used (from --set name=12); give text, in quotes"),
        ("data.shuffle=maybe", "data.shuffle: 'maybe' cannot be used (from --set data.shuffle=maybe); give true or"),
        ("schedule.mode=asynch", "schedule.mode: 'asynch' cannot be used (from --set schedule.mode=asynch); it must"),
        ("steps.x=1", "--set steps.x=1: steps is not a section (it is 2)"),
        ("steps", "--set steps: give key=value"),
        ("=4", "--set =4: give key=value"),
        ("actor..lr=4", "--set actor..lr=4: give key=value"),
        ("name=[a", "--set name=[a: the value '[a' is not YAML"),
        ("roles.actor=0", "roles: actor:0 must have at least 1 rank"),
        ("roles.actr=1", "roles: 'actr' is not a role; did you mean 'actor'?"),
        ("model.path=nowhere", "model.path: 'nowhere' does not exist (looked at "),
        ("data.path=nowhere.jsonl", "data.path: 'nowhere.jsonl' does not exist (looked at "),
    ],
)
def test_bad_override_is_refused_with_field_and_value(write_config: WriteConfig, override: str, expected: str) -> None:
    assert expected in refusal(write_config(), override)


def test_file_of_a_packaged_recipe_is_told_of_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    source = packaged_recipes()["qwen2.5-7b-grpo-deepscaler-cuda"]
    assert refusal(source).endswith(f", or get it as the first lines of {source} say")


def test_users_tasks_are_checked_and_their_roles_known(write_config: WriteConfig) -> None:
    task = {"name": "safety", "function": "filters:keep", "output": "loss_weights"}
    config = load_config(write_config(tasks=[task]), roles="rollout:1,actor:1,safety:3")
    assert config.roles == {"rollout": 1, "actor": 1, "safety": 3}
    assert "tasks.0.outptu: unknown key" in (message := refusal(write_config(tasks=[task | {"outptu": "x"}])))
    assert message.endswith("did you mean 'output'?")
    assert "tasks.0.name: 'Safe-ty' cannot be used" in refusal(write_config(tasks=[task | {"name": "Safe-ty"}]))
    assert "tasks: 3 cannot be used" in refusal(write_config(tasks=3))


def test_wrong_choice_names_the_nearest(write_config: WriteConfig) -> None:
    assert refusal(write_config(), "schedule.mode=asyn").endswith("did you mean 'async'?")


def test_bad_value_in_a_file_is_located(write_config: WriteConfig) -> None:
    source = write_config(actor={"lr": -1})
    line = source.read_text().splitlines().index("  lr: -1") + 1
    assert refusal(source) == f"actor.lr: -1 cannot be used ({source}:{line}); it must be greater than 0"


def test_misspelt_key_is_named_before_the_key_that_it_leaves_missing(tmp_path: Path) -> None:
    source = tmp_path / "recipe.yaml"
    source.write_text("stpes: 3\n")
    message = refusal(source)
    assert message.startswith(f"stpes: unknown key ({source}:1); did you mean 'steps'? (and ")


def test_missing_key_is_named_with_its_meaning(write_config: WriteConfig, settings: dict[str, Any]) -> None:
    del settings["steps"]
    source = write_config()
    assert refusal(source) == f"steps: missing in {source}; set it (Number of the last step)"


def test_all_missing_keys_are_named_at_once(write_config: WriteConfig, settings: dict[str, Any]) -> None:
    del settings["steps"], settings["data"]
    source = write_config()
    assert refusal(source) == f"steps, data: missing in {source}; set steps (Number of the last step), data"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("steps: 3\nroles: {a: 1\n", ":3: YAML syntax: "),
        ("steps: 3\n\troles: 1\n", ":2: YAML syntax: "),
        ("steps: 3\nsteps: 4\n", ":2: steps: given twice (first in line 1); keep one"),
        ("actor: {lr: 1, lr: 2}\n", ":1: lr: given twice (first in line 1); keep one"),
        ("- steps\n", ":1: the top is a list; it must be a mapping"),
        ("steps\n", ":1: the top is a str; it must be a mapping"),
        ("", " is empty; start from a recipe"),
        ("# nothing\n", " is empty; start from a recipe"),
        ("a: 1\n---\nb: 2\n", ":2: YAML syntax: "),
        ("a: !!python/object:os.system {}\n", ":1: YAML syntax: "),
        ("a: 2020-13-45\n", ": YAML syntax: "),
        ("a: \x01\n", ": YAML syntax: "),
    ],
)
def test_bad_yaml_is_refused_with_file_and_line(tmp_path: Path, text: str, expected: str) -> None:
    source = tmp_path / "recipe.yaml"
    source.write_text(text)
    assert f"{source}{expected}" in refusal(source)


def test_merge_keys_are_no_duplicates(write_config: WriteConfig, tmp_path: Path) -> None:
    source = write_config()
    source.write_text(source.read_text().replace("actor:\n  micro", "actor: &a\n  lr: 0.1\n  micro", 1))
    merged = tmp_path / "merged.yaml"
    merged.write_text(source.read_text() + "ref:\n  micro_batch_size: 2\n")
    assert load_config(merged).ref.micro_batch_size == 2
    merged.write_text(source.read_text() + "ref:\n  <<: *a\n  micro_batch_size: 2\n")
    assert "ref.lr: unknown key" in refusal(merged)


def test_file_that_is_not_text_is_refused(tmp_path: Path) -> None:
    source = tmp_path / "recipe.yaml"
    source.write_bytes(b"\xff\xfe\x00")
    assert refusal(source).startswith(f"CONFIG: {source} is not UTF-8 text")


def test_directory_is_refused_as_a_file(tmp_path: Path) -> None:
    assert refusal(tmp_path) == f"CONFIG: cannot read {tmp_path}: Is a directory; give a readable YAML file"


def test_recipe_is_found_by_name_from_any_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    quickstart = packaged_recipes()["quickstart"]
    for name in (None, "quickstart", "quickstart.yaml", "configs/quickstart.yaml"):
        assert find_recipe(name) == quickstart


def test_file_in_the_working_directory_wins_over_a_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("quickstart.yaml").write_text("steps: 1\n")
    assert find_recipe("quickstart.yaml") == tmp_path / "quickstart.yaml"


def test_missing_file_names_the_nearest_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"CONFIG: 'configs/quikstart.yaml' does not exist; did you mean quickstart"):
        find_recipe("configs/quikstart.yaml")


@pytest.mark.parametrize(
    ("what", "words"),
    [
        (("deterministic=true", "schedule.mode=sync"), "deterministic: true"),
        (("roles={rollout: 1, actor: 1, reward: 1}",), "roles: 'reward'"),
    ],
)
def test_rewards_of_whole_groups_are_refused_where_a_group_is_not_together(
    write_config: WriteConfig, what: tuple[str, ...], words: str
) -> None:
    message = refusal(write_config(), "reward.group_function=my_ranks:rank", *what)
    assert message.startswith(f"{words} cannot be used with reward.group_function")


def test_every_rule_names_settings_that_there_are(write_config: WriteConfig) -> None:
    config = load_config(write_config(), roles="rollout:1,actor:1,evaluate:1")
    for message in (*AT_LOADING, *AT_START):
        told = message.format(found=("a.b", "c", "d"), **dict(config))
        assert "\n" not in told and re.search(r"; |\. Lower", told), f"says what is wrong and what to do: {told}"
