from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from asyncflow.errors import ConfigError
from launcher.checks.placement import Devices, place_gangs
from launcher.checks.preflight import check_run
from launcher.config.load_config import check_roles, load_config, parse_roles
from launcher.config.paths import find_recipe
from launcher.config.rules import AT_START, check_rules
from launcher.request.dry_run import describe


def test_roles_are_parsed_into_canonical_order() -> None:
    assert list(parse_roles("ref:2, actor:4,rollout:8").items()) == [("rollout", 8), ("actor", 4), ("ref", 2)]


def test_reference_is_an_alias_of_ref() -> None:
    assert parse_roles("rollout:1,actor:1,reference:2") == {"rollout": 1, "actor": 1, "ref": 2}


def test_roles_of_users_tasks_follow_the_others() -> None:
    text = "safety:2,actor:1,rollout:1"
    assert list(parse_roles(text, ["safety"]).items()) == [("rollout", 1), ("actor", 1), ("safety", 2)]
    with pytest.raises(ConfigError, match="'saftey' is not a role; did you mean 'safety'"):
        parse_roles("rollout:1,actor:1,saftey:1", ["safety"])
    with pytest.raises(ConfigError, match="'safety' is not a role"):
        parse_roles(text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("rolout:8,actor:4", "'rolout' is not a role; did you mean 'rollout'?"),
        ("rollout:8,actor:4,xyz:1", "'xyz' is not a role; known roles: rollout actor"),
        ("rollout:2,actor:0", "actor:0 must have at least 1 rank"),
        ("rollout:2,actor:1,evaluate:0", "evaluate:0 must have at least 1 rank"),
        ("rollout:-1,actor:4", "rollout:-1 must have at least 1 rank"),
        ("rollout:2,actor:-4", "actor:-4 must have at least 1 rank"),
        ("rollout:2.5,actor:4", "rollout:2.5 is not a whole number"),
        ("rollout:two,actor:4", "rollout:two is not a whole number"),
        ("rollout:,actor:4", "rollout: is not a whole number"),
        ("rollout,actor:4", "'rollout' is not role:ranks"),
        ("", "'' has an empty entry"),
        ("rollout:8,actor:4,", "'rollout:8,actor:4,' has an empty entry (a comma too many?)"),
        ("rollout:1e3,actor:4", "rollout:1e3 is not a whole number"),
        ("rollout:1_0,actor:4", "rollout:1_0 is not a whole number"),
        ("rollout:\u0663,actor:4", "rollout:\u0663 is not a whole number"),
        ("rollout:99999999999,actor:4", "rollout:99999999999 is not a whole number"),
        ("rollout:1,actor:1,rollout:2", "'rollout' is given twice"),
        ("rollout:1,actor:1,ref:1,reference:1", "'ref' is given twice"),
        ("rollout:8", "'actor' is missing"),
        ("rollout+actor:0", "actor:0 must have at least 1 rank"),
        ("rolout+actor:1", "'rolout' is not a role; did you mean 'rollout'?"),
        ("+actor:2", "'+actor:2' is not role:ranks"),
        (
            "rollout+ref:2,actor:2",
            "'rollout+ref' cannot share devices, only rollout+actor can, and rollout+actor+evaluate; give each",
        ),
        ("rollout+actor:2,actor:2", "'actor' is given twice"),
        ("rollout+actor+ref:2", "'rollout+actor+ref' cannot share devices"),
    ],
)
def test_bad_roles_are_refused_with_name_and_value(text: str, expected: str) -> None:
    with pytest.raises(ConfigError, match=r"^(--)?roles: ") as caught:
        parse_roles(text)
    assert expected in str(caught.value)


def test_role_that_the_algorithm_needs_is_missing() -> None:
    with pytest.raises(ConfigError, match="'rollout' is missing; add rollout:1 or more"):
        check_roles({"actor": 4})
    assert check_roles({"actor": 4}, generates=False) == parse_roles("actor:4") == {"actor": 4}
    with pytest.raises(ConfigError, match="'actor' is missing"):
        check_roles({"evaluate": 1}, generates=False)


def test_alias_beside_its_role_is_refused_in_a_file_too() -> None:
    with pytest.raises(ConfigError, match="'ref' is given twice"):
        check_roles({"rollout": 1, "actor": 1, "ref": 1, "reference": 1})


def test_roles_may_be_left_to_processes_outside() -> None:
    checked = check_run(load_config(find_recipe("quickstart"), roles="rollout:0,actor:1,reward:0"))
    assert checked.config.outside_roles == ("rollout", "reward")


@pytest.mark.parametrize(
    ("setting", "roles", "message"),
    [
        (
            "algorithm={name: dapo}",
            "rollout:1,actor:1,reward:0",
            "algorithm.group_filter: .* roles reward:0, ",
        ),
        (
            "algorithm={name: dapo}",
            "rollout:0,actor:1",
            "algorithm.group_filter: .* roles rollout:0, ",
        ),
        (
            "deterministic=true",
            "rollout:0,actor:1,reward:1",
            "deterministic: true: cannot be used with roles rollout:0",
        ),
    ],
)
def test_what_processes_outside_know_nothing_of_is_refused(setting: str, roles: str, message: str) -> None:
    overrides = (setting, "schedule.mode=sync", "schedule.max_staleness=0")
    with pytest.raises(ConfigError, match=message):
        check_run(load_config(find_recipe("quickstart"), roles=roles, overrides=overrides))


def test_rollout_and_actor_may_share_devices(write_config: Callable[..., Path]) -> None:
    assert list(parse_roles("ref:1,actor + rollout:8").items()) == [("rollout+actor", 8), ("ref", 1)]
    source = write_config()
    given = load_config(source, roles="rollout+actor:2,ref:1")
    values = yaml.safe_load(source.read_text())
    source.write_text(yaml.safe_dump({**values, "roles": {"rollout+actor": 2, "ref": 1}}))
    for config in (given, load_config(source)):
        assert config.roles == {"rollout": 2, "actor": 2, "ref": 1} and config.colocated == ("rollout", "actor")
        assert (config.roles_text, config.num_devices) == ("rollout+actor:2,ref:1", 3)


def test_a_dry_run_says_who_takes_turns_and_has_none_of_them_started_by_hand() -> None:
    source = find_recipe("quickstart")
    texts = [
        describe(check_run(load_config(source, roles=roles)), source=source, run_dir=Path("new"))
        for roles in ("rollout+actor:2", "rollout:2,actor:2")
    ]
    assert ["cpu; rollout+actor take turns" in text for text in texts] == [True, False]
    assert ["external_gangs='[rollout-0]'" in text for text in texts] == [False, True]


def test_evaluators_may_share_them_too(write_config: Callable[..., Path]) -> None:
    config = load_config(write_config(), roles="rollout+actor+evaluate:2")
    assert config.colocated == ("rollout", "actor", "evaluate") and config.num_devices == 2
    places = {gang.name: gang.devices for gang in place_gangs(config, Devices("cuda", 2))}
    assert places["evaluate-1"] == places["rollout-1"] == ("cuda:1",)
    with pytest.raises(ConfigError, match=r"roles: 'rollout\+evaluate' cannot share"):
        load_config(write_config(), roles="rollout+evaluate:2,actor:1")


def test_a_run_may_go_on_in_the_other_form(write_config: Callable[..., Path], tmp_path: Path) -> None:
    load_config(write_config(), roles="rollout+actor:2").save(tmp_path)
    assert load_config(tmp_path / "config.yaml").is_colocated
    other = load_config(tmp_path / "config.yaml", roles="rollout:1,actor:2")
    assert not other.is_colocated and other.roles_text == "rollout:1,actor:2"
    other = load_config(tmp_path / "config.yaml", overrides=["roles={rollout: 2, actor: 2}"])
    assert not other.is_colocated, "the roles were given anew, as a whole"


@pytest.mark.parametrize(
    ("roles", "overrides", "message"),
    [
        ("rollout:1,actor:1", ["schedule.mode=colocate_async"], "schedule.mode: colocate_async needs roles that take"),
        ("rollout+actor:1", ["schedule.mode=substep"], "schedule.mode: substep cannot be used .* colocate_async"),
        (
            "rollout+actor:1",
            ["schedule.mode=colocate_async", "rollout.on_swap=finish"],
            "rollout.on_swap: finish cannot be used with schedule.mode colocate_async",
        ),
        ("rollout+actor:1", ["weightsync.path=broadcast"], "weightsync.path: broadcast cannot be used"),
        ("rollout+actor:1", ["weightsync.max_updating=1"], "weightsync.max_updating: cannot be used"),
        ("rollout+actor:1", ["launcher.external_gangs=[rollout-0]"], "launcher.external_gangs: 'rollout-0' is of a"),
        (
            "rollout+actor:1",
            ["rollout.engine=openai", "openai.urls=['http://127.0.0.1:1']", "openai.weights_dir=/tmp/weights"],
            "rollout.engine: openai: cannot free its device memory",
        ),
        ("rollout+actor:2", ["roles.actor=1"], "colocated: .*rollout:2, actor:1 cannot take turns"),
        (
            "rollout+actor:1",
            ["schedule.mode=colocate_async", "schedule.fill=first_ready", "schedule.max_staleness=2"],
            "schedule.fill: .*colocate_async trains a step once all of it is ready",
        ),
    ],
)
def test_what_roles_on_the_same_devices_cannot_do_is_refused(
    write_config: Callable[..., Path], tmp_path: Path, roles: str | None, overrides: list[str], message: str
) -> None:
    source = find_recipe("quickstart")
    if overrides[0].startswith("roles."):  # of a run that is resumed
        load_config(source, roles=roles).save(tmp_path)
        source, roles = tmp_path / "config.yaml", None
    with pytest.raises(ConfigError, match=message):
        check_rules(load_config(source, roles=roles, overrides=overrides), AT_START)
