"""Slurm's short form of host names."""

import pytest

from asyncflow.errors import ConfigError
from launcher.nodes.options import first_host


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("login", "login"),
        ("n[1-4,7]", "n1"),
        ("a,b", "a"),
        ("gpu[008-011]", "gpu008"),
        ("r[1-2]n[1-2]", "r1n1"),
        ("n[1,3]-ib,login-2", "n1-ib"),
        ("n[5]", "n5"),
        ("n[1-999999999999]", "n1"),
    ],
)
def test_first_host_is_written_out(text: str, name: str) -> None:
    assert first_host(text) == name


@pytest.mark.parametrize("text", ["", "n[1-", "n1]", "n[a-b]", "n[1-4]]", "n[[1]]", "a,,b", "n[]", "n[1-2-3]", "n[²]"])
def test_what_is_no_list_is_refused_with_itself(text: str) -> None:
    with pytest.raises(ConfigError, match="node list: .* is not a list of host names"):
        first_host(text)
