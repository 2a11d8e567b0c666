"""A loop of one's own refuses settings that only a whole run has, before it starts anything."""

from typing import Any

import pytest

import asyncflow
from asyncflow.errors import ConfigError


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"algorithm": {"name": "ppo"}}, "ppo has tasks critic_train values"),
        ({"actor.num_mini_batches": 2}, "more than one update a step"),
        ({"algorithm": {"name": "dapo", "group_filter": "zero_variance"}}, "groups that are replaced"),
        ({"actor.tri_model": True}, "copies of the policy"),
        ({"rollout.function": "my_tools:rollout"}, "a function or an agent of your own"),
        ({"algorithm.ref_update_interval": 2}, "a reference that follows"),
    ],
)
def test_what_a_loop_by_hand_has_not_is_refused(given: dict[str, Any], says: str) -> None:
    config = asyncflow.Trainer("quickstart", overrides=given).config
    with pytest.raises(ConfigError, match=says) as caught:
        asyncflow.LocalEngines(config)
    assert "use fit()" in str(caught.value)
