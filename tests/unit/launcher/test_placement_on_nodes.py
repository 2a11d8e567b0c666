"""Where the gangs of a run on several nodes go."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncflow.errors import ConfigError
from asyncflow.job import GangSpec
from launcher.checks.placement import Devices, place_gangs
from launcher.config.load_config import load_config
from workers.settings.run import RunConfig

Configure = Callable[..., RunConfig]


@pytest.fixture
def configure(write_config: Callable[..., Path]) -> Configure:
    def build(roles: str, *, instance: int = 1, **sections: Any) -> RunConfig:
        if instance > 1:
            sections |= {"rollout": {"engine": "vllm"}, "vllm": {"tensor_parallel_size": instance}}
        return load_config(write_config(**sections), roles=roles)

    return build


def places(gangs: tuple[GangSpec, ...]) -> dict[str, tuple[tuple[int, str], ...]]:
    return {gang.name: gang.places for gang in gangs}


def test_devices_are_filled_node_after_node(configure: Configure) -> None:
    found = places(place_gangs(configure("rollout:3,actor:2,ref:1"), Devices("npu", 2), num_nodes=3))
    assert found["actor"] == ((0, "npu:0"), (0, "npu:1"))
    assert found["rollout-0"] == ((1, "npu:0"),)
    assert found["rollout-1"] == ((1, "npu:1"),)
    assert found["rollout-2"] == ((2, "npu:0"),)
    assert found["ref-0"] == ((2, "npu:1"),)


def test_actor_of_several_nodes_takes_them_in_order(configure: Configure) -> None:
    found = places(place_gangs(configure("rollout:2,actor:6"), Devices("cuda", 4), num_nodes=2))
    assert found["actor"] == (*((0, f"cuda:{k}") for k in range(4)), (1, "cuda:0"), (1, "cuda:1"))
    assert found["rollout-0"] == ((1, "cuda:2"),)


def test_instance_never_straddles_nodes_and_smaller_ones_fill_the_gap(configure: Configure) -> None:
    config = configure("rollout:8,actor:2,ref:2", instance=4)
    gangs = place_gangs(config, Devices("npu", 4), num_nodes=3)
    found = places(gangs)
    assert [gang.name for gang in gangs if gang.role == "rollout"] == ["rollout-0", "rollout-1"]
    assert [gang.num_ranks for gang in gangs if gang.role == "rollout"] == [1, 1], "one process drives four devices"
    assert found["rollout-0"] == tuple((1, f"npu:{k}") for k in range(4))
    assert found["rollout-1"] == tuple((2, f"npu:{k}") for k in range(4))
    assert found["ref-0"] == ((0, "npu:2"),)
    assert found["ref-1"] == ((0, "npu:3"),)


def test_critic_that_needs_several_nodes_begins_on_an_empty_one(configure: Configure) -> None:
    config = configure("rollout:1,actor:2").model_copy(update={"roles": {"actor": 1, "critic": 3, "rollout": 1}})
    found = places(place_gangs(config, Devices("npu", 2), num_nodes=3))
    assert found["critic"] == ((1, "npu:0"), (1, "npu:1"), (2, "npu:0"))
    assert found["rollout-0"] == ((0, "npu:1"),)


def test_what_is_missing_is_said(configure: Configure) -> None:
    with pytest.raises(
        ConfigError, match=r"needs 10 npu devices, but there are 8 \(2 nodes x 4\); launch 8 .*--nnodes"
    ):
        place_gangs(configure("rollout:6,actor:4"), Devices("npu", 4), num_nodes=2)
    one_free_each = "1 on node 0, 1 on node 1 are free; launch fewer ranks, or more nodes"
    with pytest.raises(ConfigError, match=f"rollout-1 needs 2 npu devices and stays on one node, but {one_free_each}"):
        place_gangs(configure("rollout:4,actor:2", instance=2), Devices("npu", 3), num_nodes=2)
    with pytest.raises(ConfigError, match=r"tensor_parallel_size: 8 ranks .*a node has 4 npu .*set it to 4 or less"):
        place_gangs(configure("rollout:8,actor:4", instance=8), Devices("npu", 4), num_nodes=4)
    with pytest.raises(ConfigError, match="rollout:3 makes no whole instances of 2 ranks"):
        place_gangs(configure("rollout:3,actor:1", instance=2), Devices("npu", 4))


def test_on_the_cpu_every_node_gets_an_even_share_in_order(configure: Configure) -> None:
    found = places(place_gangs(configure("rollout:4,actor:2,ref:1"), Devices("cpu"), num_nodes=3))
    assert found["actor"] == ((0, "cpu"), (0, "cpu"))
    assert [found[f"rollout-{k}"][0][0] for k in range(4)] == [0, 1, 1, 2]
    assert found["ref-0"] == ((2, "cpu"),)


def test_services_and_scorers_take_turns(configure: Configure) -> None:
    config = configure("rollout:1,actor:1,reward:3", tq={"num_storage_units": 3, "num_controllers": 2})
    found = places(place_gangs(config, Devices("npu", 4), num_nodes=2))
    assert [found[f"controller-{k}"] for k in range(2)] == [((0, "cpu"),)] * 2
    assert [found[f"storage-{k}"][0][0] for k in range(3)] == [0, 1, 0]
    assert [found[f"weights-{k}"][0][0] for k in range(2)] == [0, 1]
    assert [found[f"reward-{k}"][0][0] for k in range(3)] == [0, 1, 0]


def test_gang_of_another_node_cannot_be_started_by_hand(configure: Configure) -> None:
    config = configure("rollout:3,actor:1", launcher={"external_gangs": ["rollout-2"]})
    with pytest.raises(ConfigError, match="'rollout-2' is placed on node 1, but only gangs of node 0"):
        place_gangs(config, Devices("cpu"), num_nodes=2)


@given(
    sizes=st.fixed_dictionaries({"actor": st.integers(1, 20), "rollout": st.integers(1, 12), "ref": st.integers(1, 6)}),
    per_node=st.integers(1, 8),
    num_nodes=st.integers(1, 6),
    width=st.integers(1, 4),
)
def test_no_device_is_given_twice_and_instances_stay_together(
    sizes: dict[str, int], per_node: int, num_nodes: int, width: int
) -> None:
    config = RunConfig.model_validate(
        {
            "steps": 1,
            "roles": {**sizes, "rollout": sizes["rollout"] * width},
            "model": {"path": "none"},
            "data": {"path": "none"},
            "schedule": {"rollout_batch_size": 1, "n_samples_per_prompt": 2},
            "rollout": {"max_response_tokens": 1, "engine": "vllm"},
            "vllm": {"tensor_parallel_size": width},
        }
    )
    for devices in (Devices("npu", per_node), Devices("cpu")):
        try:
            gangs = place_gangs(config, devices, num_nodes=num_nodes)
        except ConfigError:
            assert devices.kind == "npu"
            continue
        taken = [place for place in (p for each in places(gangs).values() for p in each) if place[1] != "cpu"]
        assert len(taken) == len(set(taken))
        assert all(0 <= node < num_nodes for gang in gangs for node in gang.nodes)
        assert all(int(device.partition(":")[2]) < per_node for _, device in taken)
        assert all(len(gang.parts) == 1 for gang in gangs if gang.role != "actor")
        if devices.kind == "npu":
            (actor,) = [gang for gang in gangs if gang.role == "actor"]
            assert len(actor.parts) == -(-actor.num_ranks // per_node)
