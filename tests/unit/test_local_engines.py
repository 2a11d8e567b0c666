"""A loop of one's own refuses settings that only a whole run has, before it starts anything."""

from typing import Any

import pytest

import asyncflow
from asyncflow.errors import ConfigError, LeaseFenced
from tq.client.lease import Lease
from tq.messages import LeaseGrant


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


class Void:
    """A data plane whose leases are others' by now."""

    def put(self, *_: Any) -> None:
        raise LeaseFenced("the lease is void")

    ack = put


def lease(task: str) -> Lease:
    return Lease(Void(), LeaseGrant(task, 1, 1, [4], [2], ["storage-0"]))  # type: ignore[arg-type]  # no others


@pytest.mark.parametrize("columns", [None, {"rewards": [1.0]}])
def test_work_on_a_lease_that_is_void_is_not_dropped_without_a_word(columns: Any) -> None:
    engines = object.__new__(asyncflow.LocalEngines)
    with pytest.raises(LeaseFenced, match="task rewards: the lease is void, .* nothing was put; get rows again"):
        engines.put_experience_data(lease("rewards"), columns)


def test_lease_of_another_task_is_not_trained_on() -> None:
    with pytest.raises(ConfigError, match="update: the lease is of task rewards; get another one"):
        object.__new__(asyncflow.LocalEngines).update(lease("rewards"))
