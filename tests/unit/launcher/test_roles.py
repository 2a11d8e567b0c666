import pytest

from asyncflow.errors import ConfigError
from launcher.checks.preflight import check_run
from launcher.config.load_config import check_roles, load_config, parse_roles
from launcher.config.paths import find_recipe


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
