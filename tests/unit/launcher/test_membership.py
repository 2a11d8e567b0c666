"""Which launchers take part in a run."""

from typing import Any

import msgspec
import pytest

from asyncflow.clock import HostClock
from asyncflow.job import GangSpec, Network, Node
from launcher.nodes.membership import DevicesUsed, Membership, needed_devices
from launcher.nodes.node_messages import Hello, Ready, Refuse, Welcome

CPU = {node: DevicesUsed("cpu", 0) for node in range(3)}
IDENTITY = {"AsyncFlow version": "1.0", "chat template": "a"}
READY = Ready("boot", 12.5, 0.1)


def hello(rank: int = 1, **changes: Any) -> Hello:
    said = Hello(rank, 3, f"launcher-{rank}", f"host-{rank}", f"10.0.0.{rank}", IDENTITY, "cpu", 0)
    return msgspec.structs.replace(said, **changes)


def test_run_begins_when_all_are_ready() -> None:
    members = Membership(3, CPU, IDENTITY)
    assert members.missing_nodes() == [1, 2]
    for rank in (2, 1):
        assert not members.is_complete()
        assert members.answer_hello(f"{rank}.a", hello(rank)) == Welcome()
        assert members.ready(f"{rank}.a", msgspec.structs.replace(READY, ahead_s=0.0))
    assert members.is_complete()
    assert members.ready_nodes() == [Node(k, f"host-{k}", f"10.0.0.{k}", HostClock("boot", 12.5)) for k in (1, 2)]
    assert [members.token(rank) for rank in (1, 2)] == ["1.a", "2.a"]
    assert members.clock_warnings() == []
    assert members.obstacle == ""


@pytest.mark.parametrize(
    ("changes", "obstacle"),
    [
        ({"complaint": "model.path: '/m' is not there"}, "model.path: '/m' is not there"),
        (
            {"identity": {"AsyncFlow version": "0.9", "chat template": "a"}},
            "it differs from node 0: AsyncFlow version (0.9, not 1.0); install the same versions and copy the same",
        ),
        (
            {"identity": {"AsyncFlow version": "1.0", "chat template": "b", "end tokens": "c"}},
            "it differs from node 0: chat template (b, not a); install",
        ),
        ({"count": 2}, "it was started with --nnodes 2, node 0 with 3; give all the same"),
        (
            {"device": "npu", "num_devices": 4},
            "it has 4 npu devices, but 8 npu devices are used there; set launcher.devices_per_node to what every node "
            "has",
        ),
        ({"device": "cpu"}, "it has no accelerator, but 8 npu devices are used there; "),
        ({"device": "cuda", "num_devices": 8}, "it has 8 cuda devices, but 8 npu devices are used there; "),
    ],
)
def test_node_that_cannot_take_part_ends_the_run_with_its_reason(changes: dict[str, Any], obstacle: str) -> None:
    members = Membership(3, CPU | {1: DevicesUsed("npu", 8)}, IDENTITY)
    answer = members.answer_hello("1.a", hello(1, **({"device": "npu", "num_devices": 8} | changes)))
    assert isinstance(answer, Refuse)
    assert not answer.later
    assert answer.reason.startswith(f"node 1 (host-1): {obstacle}")
    assert members.obstacle == answer.reason
    members.answer_hello("2.a", hello(2, complaint="another"))
    assert members.obstacle == answer.reason


def test_a_network_counts_if_all_nodes_reach_each_other_in_it() -> None:
    cidrs = ["10.1.0.0/16", "10.2.0.0/16", "10.3.0.0/16"]
    places = {rank: [Network(cidr, f"{cidr[:4]}.0.{rank}", 5000) for cidr in cidrs] for rank in (1, 2)}
    members = Membership(3, CPU, IDENTITY)
    assert members.answer_hello("a", hello(rank=1, networks=places[1])) == Welcome([])
    assert not members.are_in_network(cidrs[0]), "it has not tried all"
    members.ready("a", msgspec.structs.replace(READY, networks=cidrs))
    assert members.answer_hello("b", hello(rank=2, networks=places[2][:2])) == Welcome(places[1])
    members.ready("b", msgspec.structs.replace(READY, networks=cidrs[:1]))
    assert [members.are_in_network(cidr) for cidr in cidrs] == [True, False, False]


def test_node_with_more_devices_than_are_used_is_welcome() -> None:
    members = Membership(3, CPU | {1: DevicesUsed("npu", 3)}, IDENTITY)
    assert members.answer_hello("1.a", hello(1, device="npu", num_devices=8)) == Welcome()
    assert members.answer_hello("2.a", hello(2, device="npu", num_devices=8)) == Welcome()


def test_second_launcher_with_the_same_number_may_ask_later() -> None:
    members = Membership(3, CPU, IDENTITY)
    members.answer_hello("1.a", hello(1))
    answer = members.answer_hello("1.b", hello(1, launcher="other", host="host-7"))
    assert answer == Refuse("node 1 is already host-1; give every node its own number", True)
    assert members.obstacle == ""
    complaint = members.describe_missing(300, "/runs/a")
    assert complaint.startswith("nodes 1, 2 of 3: did not join within 300 s (launcher.start_timeout_s)")
    assert "host-7 was started as node 1, too" in complaint
    assert "/runs/a" in complaint


def test_another_try_of_the_same_launcher_replaces_the_first_until_it_is_ready() -> None:
    members = Membership(3, CPU, IDENTITY)
    assert members.answer_hello("1.a", hello(1)) == members.answer_hello("1.b", hello(1)) == Welcome()
    assert not members.ready("1.a", READY)
    assert members.ready("1.b", READY)
    answer = members.answer_hello("1.c", hello(1))
    assert isinstance(answer, Refuse)
    assert answer.later


@pytest.mark.parametrize(("ahead_s", "words"), [(3.2, "3.2 s ahead of node 0's"), (-61.0, "61.0 s behind node 0's")])
def test_wrong_clock_is_worth_a_warning(ahead_s: float, words: str) -> None:
    members = Membership(2, CPU, IDENTITY)
    members.answer_hello("1.a", hello(1, count=2))
    members.ready("1.a", Ready("boot", 0.0, ahead_s))
    (warning,) = members.clock_warnings()
    assert warning.startswith(f"node 1 (host-1): its clock is {words}")


def test_devices_of_a_placement_are_counted_per_node() -> None:
    gangs = [
        GangSpec("actor", "actor", 0, 3, ("npu:0", "npu:1", "npu:0"), (0, 0, 1)),
        GangSpec("rollout-0", "rollout", 0, 1, ("npu:1", "npu:2"), (1,)),
        GangSpec("ref-0", "ref", 0, 1, ("npu:4",), (1,)),
        GangSpec("rollout-1", "rollout", 1, 1, ("npu:0", "npu:1", "npu:2"), (3,)),
        GangSpec("storage-0", "storage", 0, 1, ("cpu",), (2,)),
    ]
    used = needed_devices(gangs, 4)
    assert used == {
        0: DevicesUsed("npu", 2), 1: DevicesUsed("npu", 5), 2: DevicesUsed("cpu", 0), 3: DevicesUsed("npu", 3),
    }  # fmt: skip
