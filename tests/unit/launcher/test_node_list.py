"""Slurm's short form of host names."""

import pytest

from asyncflow.errors import ConfigError
from launcher.nodes.options import expand_nodelist


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("login", ["login"]),
        ("n[1-4,7]", ["n1", "n2", "n3", "n4", "n7"]),
        ("a,b", ["a", "b"]),
        ("gpu[008-011]", ["gpu008", "gpu009", "gpu010", "gpu011"]),
        ("r[1-2]n[1-2]", ["r1n1", "r1n2", "r2n1", "r2n2"]),
        ("n[1,3]-ib,login-2", ["n1-ib", "n3-ib", "login-2"]),
        ("n[5]", ["n5"]),
    ],
)
def test_names_are_written_out_in_order(text: str, names: list[str]) -> None:
    assert list(expand_nodelist(text)) == names


@pytest.mark.parametrize("text", ["", "n[1-", "n1]", "n[a-b]", "n[1-4]]", "n[[1]]", "a,,b", "n[]", "n[1-2-3]", "n[²]"])
def test_what_is_no_list_is_refused_with_itself(text: str) -> None:
    with pytest.raises(ConfigError, match="node list: .* is no list of host names"):
        expand_nodelist(text)


def test_endless_list_is_refused() -> None:
    with pytest.raises(ConfigError, match="more than 65536 hosts"):
        expand_nodelist("n[1-999999999999]")
