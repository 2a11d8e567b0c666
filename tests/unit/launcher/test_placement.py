from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from asyncflow.errors import ConfigError
from asyncflow.job import GangSpec
from launcher.checks.placement import Devices, place_gangs
from launcher.config.load_config import load_config
from workers.settings.run import RunConfig

Configure = Callable[..., RunConfig]


@pytest.fixture
def configure(write_config: Callable[..., Path]) -> Configure:
    def build(roles: str, **sections: Any) -> RunConfig:
        return load_config(write_config(**sections), roles=roles)

    return build


def test_services_come_first_and_every_rollout_is_its_own_gang(configure: Configure) -> None:
    gangs = place_gangs(configure("rollout:2,actor:4,ref:1"), Devices("cpu"))
    assert [(gang.name, gang.num_ranks) for gang in gangs] == [
        ("controller-0", 1),
        ("storage-0", 1),
        ("storage-1", 1),
        ("weights-0", 1),
        ("actor", 4),
        ("rollout-0", 1),
        ("rollout-1", 1),
        ("ref-0", 1),
    ]
    assert {device for gang in gangs for device in gang.devices} == {"cpu"}


def test_accelerators_go_to_actor_then_rollout_then_ref(configure: Configure) -> None:
    gangs = place_gangs(configure("rollout:2,actor:2,ref:1"), Devices("cuda", 8))
    by_name = {gang.name: gang.devices for gang in gangs}
    assert by_name["actor"] == ("cuda:0", "cuda:1")
    assert by_name["rollout-0"] == ("cuda:2",)
    assert by_name["rollout-1"] == ("cuda:3",)
    assert by_name["ref-0"] == ("cuda:4",)
    assert by_name["controller-0"] == ("cpu",)


def test_evaluators_are_instances_with_a_device_each_after_all_others(configure: Configure) -> None:
    gangs = place_gangs(configure("rollout:1,actor:2,ref:1,evaluate:2"), Devices("cuda", 6))
    assert gangs[-2:] == (
        GangSpec("evaluate-0", "evaluate", 0, 1, ("cuda:4",)),
        GangSpec("evaluate-1", "evaluate", 1, 1, ("cuda:5",)),
    )


def test_reward_and_advantages_take_no_device(configure: Configure) -> None:
    gangs = place_gangs(configure("rollout:1,actor:1,reward:2,advantages:1"), Devices("npu", 2))
    assert gangs[-3:] == (
        GangSpec("reward-0", "reward", 0, 1, ("cpu",)),
        GangSpec("reward-1", "reward", 1, 1, ("cpu",)),
        GangSpec("advantages-0", "advantages", 0, 1, ("cpu",)),
    )


def test_number_of_storage_units_is_configured(configure: Configure) -> None:
    gangs = place_gangs(configure("rollout:1,actor:1", tq={"num_storage_units": 3}), Devices("cpu"))
    assert [gang.index for gang in gangs if gang.role == "storage"] == [0, 1, 2]


def test_more_ranks_than_devices_are_refused(configure: Configure) -> None:
    with pytest.raises(ConfigError, match="rollout:2,actor:4 needs 6 npu devices, but there are 4"):
        place_gangs(configure("rollout:2,actor:4"), Devices("npu", 4))


def test_unknown_external_gang_is_refused(configure: Configure) -> None:
    config = configure("rollout:1,actor:1", launcher={"external_gangs": ["rollout-1"]})
    with pytest.raises(ConfigError, match=r"launcher.external_gangs: 'rollout-1'.*rollout-0"):
        place_gangs(config, Devices("cpu"))


def test_colocated_instances_have_the_devices_of_the_actors_ranks(configure: Configure) -> None:
    def where(gangs: tuple[GangSpec, ...]) -> dict[str, tuple[tuple[int, str], ...]]:
        return {gang.name: gang.places for gang in gangs if gang.role in ("actor", "rollout", "ref")}

    config = configure("rollout+actor:4,ref:1")
    assert where(place_gangs(config, Devices("cuda", 5))) == {
        "actor": ((0, "cuda:0"), (0, "cuda:1"), (0, "cuda:2"), (0, "cuda:3")),
        **{f"rollout-{k}": ((0, f"cuda:{k}"),) for k in range(4)},
        "ref-0": ((0, "cuda:4"),),
    }
    nodes = {name: [node for node, _ in places] for name, places in where(
        place_gangs(config, Devices("cuda", 3), num_nodes=2)
    ).items()}  # fmt: skip
    assert nodes == {"actor": [0, 0, 0, 1], "rollout-0": [0], "rollout-1": [0], "rollout-2": [0], "rollout-3": [1],
                     "ref-0": [1]}  # fmt: skip
    with pytest.raises(ConfigError, match=r"roles: rollout\+actor:4,ref:1 needs 5 cuda devices, but there are 4"):
        place_gangs(config, Devices("cuda", 4))


def test_a_colocated_instance_stays_on_one_node(configure: Configure) -> None:
    config = configure("rollout+actor:4", rollout={"engine": "vllm"}, vllm={"tensor_parallel_size": 2})
    gangs = {gang.name: gang.places for gang in place_gangs(config, Devices("cuda", 4))}
    assert gangs["rollout-1"] == ((0, "cuda:2"), (0, "cuda:3"))
    with pytest.raises(ConfigError, match="rollout-1 shares 2 devices with actor ranks on several nodes"):
        place_gangs(config, Devices("cuda", 3), num_nodes=2)


def test_on_the_cpu_colocated_ranks_are_on_the_same_node(configure: Configure) -> None:
    gangs = {gang.name: gang.nodes for gang in place_gangs(configure("rollout+actor:4"), Devices("cpu"), num_nodes=2)}
    assert gangs["actor"] == (0, 0, 1, 1)
    assert [gangs[f"rollout-{k}"] for k in range(4)] == [(0,), (0,), (1,), (1,)]
