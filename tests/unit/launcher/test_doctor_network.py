"""What the doctor thinks of interfaces, names, groups over them, and shared memory. Most facts are made up."""

import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest

from launcher.doctor.devices import GroupFacts, judge_groups, try_groups
from launcher.doctor.disk import Mount, SharingFacts, hidepid, judge_sharing
from launcher.doctor.findings import Finding, Level, Needs
from launcher.doctor.network import Interface, NetworkFacts, chosen, find_interfaces, judge_network, try_network

ANY = Needs("/runs/one")
NODES = replace(ANY, num_nodes=2)
CUDA = replace(ANY, device="cuda")
NPU = replace(ANY, device="npu")

LO = Interface("lo", up=True, loopback=True, address="127.0.0.1")
ETH0 = Interface("eth0", up=True, loopback=False, address="10.0.0.5")
IB0 = Interface("ib0", up=True, loopback=False, address="10.1.0.5")
DOWN = Interface("eth1", up=False, loopback=False)
NET = NetworkFacts((DOWN, ETH0, IB0, LO), {}, "node5", ("10.1.0.5",), lookup_s=0.001, loopback_error="")


def with_variables(**variables: str) -> NetworkFacts:
    return replace(NET, variables=variables)


@pytest.mark.parametrize(
    ("facts", "needs", "expected", "text"),
    [
        (NET, ANY, Level.OK, "Gloo takes lo inside the node, ib0 (10.1.0.5) between nodes"),
        (with_variables(GLOO_SOCKET_IFNAME="eth0"), NODES, Level.OK, "eth0 (10.0.0.5) between nodes"),
        (NET, CUDA, Level.OK, "NCCL its own choice"),
        (with_variables(NCCL_SOCKET_IFNAME="^ib"), CUDA, Level.OK, "NCCL eth0"),
        (with_variables(HCCL_SOCKET_IFNAME="=ib0"), NPU, Level.OK, "HCCL ib0"),
        (replace(NET, interfaces=(replace(LO, up=False), ETH0)), ANY, Level.ERROR, "loopback interface is down"),
        (replace(NET, interfaces=(ETH0,)), ANY, Level.ERROR, "loopback interface is down or missing"),
        (replace(NET, loopback_error="TimeoutError"), ANY, Level.ERROR, "no connection over 127.0.0.1"),
        (replace(NET, interfaces=(LO, DOWN)), NODES, Level.ERROR, "no other node can be reached"),
        (replace(NET, interfaces=(LO, DOWN)), ANY, Level.OK, "no other is up"),
        (with_variables(GLOO_SOCKET_IFNAME="eth1"), NODES, Level.ERROR, "GLOO_SOCKET_IFNAME=eth1 names no interface"),
        (with_variables(GLOO_SOCKET_IFNAME="eth1"), ANY, Level.WARNING, "one node: unused"),
        (with_variables(NCCL_SOCKET_IFNAME="bond"), CUDA, Level.ERROR, "NCCL_SOCKET_IFNAME=bond names no interface"),
        (with_variables(NCCL_SOCKET_IFNAME="bond"), ANY, Level.OK, ""),
        (with_variables(HCCL_SOCKET_IFNAME="=ib"), NPU, Level.ERROR, "HCCL_SOCKET_IFNAME==ib names no interface"),
        (replace(NET, host_addresses=()), ANY, Level.WARNING, "node5 does not resolve"),
        (replace(NET, host_addresses=()), NODES, Level.ERROR, "node5 does not resolve"),
        (replace(NET, host_addresses=("127.0.1.1",)), ANY, Level.OK, ""),
        (replace(NET, host_addresses=("127.0.1.1", "::1")), NODES, Level.WARNING, "means 127.0.1.1"),
        (replace(NET, lookup_s=4.0), ANY, Level.WARNING, "takes 4.0 s"),
    ],
)
def test_network(facts: NetworkFacts, needs: Needs, expected: Level, text: str) -> None:
    (finding,) = judge_network(facts, needs)
    assert finding.level is expected
    assert text in finding.text


def test_the_remedy_for_a_name_is_a_line_for_the_hosts_file() -> None:
    (finding,) = judge_network(replace(NET, host_addresses=()), NODES)
    assert finding.remedy == "echo '10.0.0.5 node5' >> /etc/hosts"


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("eth", ["eth0", "eth1"]),
        ("eth1,ib", ["eth1", "ib0"]),
        ("=eth", []),
        ("=eth0,ib0", ["eth0", "ib0"]),
        ("^eth", ["ib0", "lo"]),
        ("^=eth0", ["eth1", "ib0", "lo"]),
    ],
)
def test_patterns_of_the_vendors_libraries(pattern: str, expected: list[str]) -> None:
    assert chosen(["eth0", "eth1", "ib0", "lo"], pattern) == expected


def test_the_network_of_this_host_can_be_read() -> None:
    loopback = next(each for each in find_interfaces() if each.loopback)
    assert loopback == Interface("lo", up=True, loopback=True, address="127.0.0.1")
    facts = try_network(ANY, {"NCCL_SOCKET_IFNAME": "eth", "HCCL_SOCKET_IFNAME": ""})
    assert facts.loopback_error == ""
    assert facts.variables == {"NCCL_SOCKET_IFNAME": "eth"}


def test_groups_that_fail_are_named_with_the_interface() -> None:
    facts = [GroupFacts("gloo", "lo"), GroupFacts("gloo", "eth0", "RuntimeError: no"), GroupFacts("nccl", "2 x cuda")]
    (finding,) = judge_groups(facts, CUDA)
    assert finding.level is Level.ERROR
    assert finding.text == "no group over gloo on eth0 (RuntimeError: no)"
    assert "GLOO_SOCKET_IFNAME" in finding.remedy
    (finding,) = judge_groups([GroupFacts("nccl", "2 x cuda", "RuntimeError: no")], CUDA)
    assert "NCCL_DEBUG=INFO" in finding.remedy
    assert judge_groups([GroupFacts("gloo", "lo")], ANY) == [
        Finding.ok("groups", "all-reduce between two ranks works (gloo on lo)")
    ]


def test_two_ranks_meet_over_loopback_and_the_environment_stays() -> None:
    before = os.environ.get("GLOO_SOCKET_IFNAME")
    assert try_groups(ANY) == [GroupFacts("gloo", "lo")]
    assert os.environ.get("GLOO_SOCKET_IFNAME") == before


GIB = 2**30
SHARED = SharingFacts(arena_bytes=8 * GIB, shm_free=16 * GIB, shm_total=16 * GIB)


@pytest.mark.parametrize(
    ("facts", "needs", "expected", "text"),
    [
        (SHARED, ANY, Level.OK, "another process mapped memory"),
        (replace(SHARED, shm_free=0, shm_total=0), ANY, Level.OK, "/dev/shm is missing"),
        (replace(SHARED, own_error="OSError: no"), ANY, Level.ERROR, "no shared memory can be made"),
        (replace(SHARED, own_error="OSError: no", file_limit=1), ANY, Level.ERROR, "no shared memory can be made"),
        (replace(SHARED, peer_error="no"), ANY, Level.ERROR, "weights do not reach their readers"),
        (replace(SHARED, address_limit=160 * GIB), replace(ANY, channels=10), Level.OK, ""),
        (replace(SHARED, address_limit=159 * GIB), replace(ANY, channels=10), Level.WARNING, "addresses are limited"),
        (replace(SHARED, file_limit=8 * GIB), ANY, Level.OK, ""),
        (replace(SHARED, file_limit=GIB), ANY, Level.WARNING, "the largest has 8.59 GB"),
        (replace(SHARED, file_limit=9 * GIB), replace(ANY, checkpoint_bytes=10 * GIB), Level.WARNING, "10.7 GB"),
        (replace(SHARED, shm_free=64 * 2**20), CUDA, Level.WARNING, "/dev/shm has 67.1 MB free"),
        (replace(SHARED, shm_free=64 * 2**20), ANY, Level.OK, ""),
        (replace(SHARED, wanted=False), ANY, Level.WARNING, "ASYNCFLOW_SHARED_MEMORY=0"),
        (replace(SHARED, wanted=False), replace(ANY, shared_memory=False), Level.OK, ""),
    ],
)
def test_shared_memory(facts: SharingFacts, needs: Needs, expected: Level, text: str) -> None:
    (finding,) = judge_sharing(facts, needs)
    assert finding.level is expected
    assert text in finding.text


def test_a_proc_that_hides_processes_is_the_remedy() -> None:
    (finding,) = judge_sharing(replace(SHARED, peer_error="no", hides_processes="hidepid=2"), ANY)
    assert "remount,hidepid=0 /proc (now hidepid=2)" in finding.remedy


@pytest.mark.parametrize(
    ("options", "expected"),
    [("rw", ""), ("rw,hidepid=0", ""), ("rw,hidepid=off", ""), ("rw,hidepid=invisible", "hidepid=invisible")],
)
def test_how_proc_is_mounted(options: str, expected: str) -> None:
    assert hidepid([Mount("/", "ext4", "rw"), Mount("/proc", "proc", options)]) == expected


def test_another_process_maps_memory_of_this_one() -> None:
    """In a process with one thread, as the doctor's is: what forks with several may hang."""
    script = (
        "import json; from launcher.doctor.disk import try_sharing; from launcher.doctor.findings import Needs;"
        "facts = try_sharing(Needs('/runs'));"
        "print(json.dumps([facts.own_error, facts.peer_error, facts.arena_bytes > 0]))"
    )
    said = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True)
    assert json.loads(said.stdout) == ["", "", True]
