"""Which addresses and interfaces are used."""

import socket
from datetime import timedelta
from ipaddress import ip_interface
from pathlib import Path

import pytest

from asyncflow import job as network
from asyncflow.errors import ConfigError
from asyncflow.job import (
    NetworkListeners,
    OfferedNetworks,
    address_to_listen_on,
    address_towards,
    choose_interfaces,
    describe_way,
    interface_towards,
    link_speed,
    list_reached,
    reached_everywhere,
)
from asyncflow.sealed_store import connect_store, serve_store

ROUTES = """Iface Destination Gateway Flags RefCnt Use Metric Mask MTU Window IRTT
eth0 00000000 0100000A 0003 0 0 100 00000000 0 0 0
wifi 00000000 0200000A 0003 0 0 600 00000000 0 0 0
eth0 0000000A 00000000 0001 0 0 100 00FFFFFF 0 0 0
ib0 0001000A 00000000 0001 0 0 0 00FFFFFF 0 0 0
gone 0002000A 00000000 0000 0 0 0 00FFFFFF 0 0 0
no 0003000A 00000000 0201 0 0 0 00FFFFFF 0 0 0
"""
"""As the kernel writes them on a little-endian machine: 10.0.0.0/24 is 0000000A/00FFFFFF."""

_NONE = "00000000000000000000000000000000"
IPV6_ROUTES = f"""fd000000000000000000000000000000 40 {_NONE} 00 {_NONE} 00000100 00000001 00000000 00000001     eth0
fd000001000000000000000000000000 40 {_NONE} 00 {_NONE} 00000100 00000001 00000000 00000001      ib0
{_NONE} 00 {_NONE} 00 fd000000000000000000000000000001 00000400 00000002 00000000 00000003     eth0
fd000000000000000000000000000002 80 {_NONE} 00 {_NONE} 00000000 00000003 00000000 80200001       lo
{_NONE} 00 {_NONE} 00 {_NONE} ffffffff 00000001 00000000 00200200       lo
"""


@pytest.fixture
def routes(tmp_path: Path) -> Path:
    (tmp_path / "route").write_text(ROUTES)
    (tmp_path / "ipv6_route").write_text(IPV6_ROUTES)
    return tmp_path


@pytest.mark.parametrize(
    ("address", "interface"),
    [
        ("10.0.0.7", "eth0"),
        ("10.0.1.1", "ib0"),
        ("192.168.1.1", "eth0"),
        ("10.0.2.1", "eth0"),
        ("10.0.3.1", "eth0"),
        ("fd00::7", "eth0"),
        ("fd00::2", "eth0"),
        ("fd00:1::7", "ib0"),
        ("2001:db8::1", "eth0"),
    ],
)
def test_most_specific_route_that_is_up_leads_there(routes: Path, address: str, interface: str) -> None:
    assert interface_towards(address, routes) == interface


def test_host_that_no_route_leads_to_is_said(tmp_path: Path) -> None:
    (tmp_path / "route").write_text(ROUTES.splitlines()[0])
    with pytest.raises(
        ConfigError, match=r"GLOO_SOCKET_IFNAME: no interface of this host leads to 10\.0\.0\.1; set it"
    ):
        interface_towards("10.0.0.1", tmp_path)
    with pytest.raises(ConfigError, match=r"no interface of this host leads to fd00::1; set it"):
        interface_towards("fd00::1", tmp_path)


def test_one_node_stays_on_loopback_whatever_the_user_set() -> None:
    env = {"GLOO_SOCKET_IFNAME": "eth7"}
    choose_interfaces("127.0.0.1", env=env)
    assert env == {"GLOO_SOCKET_IFNAME": "lo"}


def test_several_nodes_use_the_way_to_the_store_unless_the_user_said_otherwise(
    routes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(network, "interface_towards", lambda address: interface_towards(address, routes))
    env = {"NCCL_SOCKET_IFNAME": "^docker0", "HCCL_SOCKET_IFNAME": ""}
    choose_interfaces("10.0.1.5", env=env)
    assert env == {"GLOO_SOCKET_IFNAME": "ib0", "NCCL_SOCKET_IFNAME": "^docker0", "HCCL_SOCKET_IFNAME": "=ib0"}
    said = dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "HCCL_SOCKET_IFNAME"), "mine")
    choose_interfaces("8.8.8.8", env=said)
    assert set(said.values()) == {"mine"}


SPEEDS = {"eth0": "10000", "ib0": "200000", "docker0": "-1", "bond0": "broken"}
SECRET = "5e" * 32


@pytest.fixture(name="interfaces")
def _interfaces(tmp_path: Path, routes: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of a host with eth0, towards the store, and ib0: loopback addresses stand for theirs."""
    for name, speed in SPEEDS.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "speed").write_text(speed)
    monkeypatch.setattr(network, "link_speed", lambda name: link_speed(name, tmp_path))
    monkeypatch.setattr(network, "interface_towards", lambda address: interface_towards(address, routes))
    own_addresses(monkeypatch, eth0="127.1.0.1", ib0="127.2.0.1", docker0="127.3.0.1")
    return tmp_path


def own_addresses(monkeypatch: pytest.MonkeyPatch, **own: str) -> None:
    found = [(name, ip_interface(f"{address}/16")) for name, address in own.items()]
    monkeypatch.setattr(network, "own_addresses", lambda: found)


def test_speed_of_a_link_is_what_the_kernel_says(interfaces: Path) -> None:
    speeds = {name: link_speed(name, interfaces) for name in (*SPEEDS, "absent")}
    assert speeds == {"eth0": 10.0, "ib0": 200.0, "docker0": 0.0, "bond0": 0.0, "absent": 0.0}
    assert describe_way("ib0", 15_200_000_000) == ("ib0, 200 Gb/s: a version of the weights (15.2 GB) takes 0.61 s")
    assert describe_way("docker0", 10) == "docker0, whose speed is not known"


def test_faster_network_counts_where_the_other_node_reaches_it(
    interfaces: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    offered = OfferedNetworks("10.0.0.1", SECRET, {})
    assert [each.cidr for each in offered.networks] == ["127.2.0.0/16"], "docker0 and eth0 are not faster than eth0"
    own_addresses(monkeypatch, eth0="127.1.0.2", ib0="127.2.0.2")
    assert list_reached(offered.networks, SECRET, {}) == ["127.2.0.0/16"]
    assert list_reached(offered.networks, "00" * 32, {}) == [], "another process answered"
    assert list_reached(offered.networks, SECRET, {"GLOO_SOCKET_IFNAME": "eth0"}) == []
    own_addresses(monkeypatch, eth0="127.1.0.2", ib0="127.2.0.1")
    assert list_reached(offered.networks, SECRET, {}) == [], "both hosts have the same address"
    own_addresses(monkeypatch, eth0="127.1.0.2")
    assert list_reached(offered.networks, SECRET, {}) == []
    own_addresses(monkeypatch, ib0="127.2.0.2")
    offered.close()
    assert list_reached(offered.networks, SECRET, {}) == []


def test_a_network_in_which_one_of_the_others_is_not_reached_is_left_out(
    interfaces: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own_addresses(monkeypatch, eth0="127.1.0.3", ib0="127.2.0.3")
    cidrs = ["127.1.0.0/16", "127.2.0.0/16"]
    earlier = [
        NetworkListeners([(cidr, f"127.{net}.0.{node}") for net, cidr in enumerate(cidrs, start=1)], SECRET)
        for node in (1, 2)
    ]
    others = [each for listeners in earlier for each in listeners.networks]
    assert reached_everywhere(cidrs, others, SECRET) == cidrs
    assert reached_everywhere(cidrs, [], SECRET) == cidrs
    gone = NetworkListeners([("127.2.0.0/16", "127.2.0.4")], SECRET)
    gone.close()
    assert reached_everywhere(cidrs, [*others, *gone.networks], SECRET) == cidrs[:1]
    for listeners in earlier:
        listeners.close()


@pytest.mark.parametrize(
    ("store_host", "env", "towards"),
    [("127.0.0.1", {}, "eth0"), ("10.0.0.1", {"GLOO_SOCKET_IFNAME": "eth0"}, "eth0"), ("10.0.0.1", {}, "docker0")],
)
def test_nothing_is_offered_on_one_node_nor_against_the_users_choice_nor_without_a_speed_to_compare(
    interfaces: Path, monkeypatch: pytest.MonkeyPatch, store_host: str, env: dict[str, str], towards: str
) -> None:
    monkeypatch.setattr(network, "interface_towards", lambda _: towards)
    assert OfferedNetworks(store_host, SECRET, env).networks == ()


def test_processes_use_the_interface_in_the_chosen_network(interfaces: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    env: dict[str, str] = {}
    choose_interfaces("10.0.0.1", "127.2.0.0/16", env)
    assert env == {"GLOO_SOCKET_IFNAME": "ib0", "NCCL_SOCKET_IFNAME": "=ib0", "HCCL_SOCKET_IFNAME": "=ib0"}


def test_fastest_of_several_interfaces_in_one_network_is_used(
    interfaces: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own_addresses(monkeypatch, docker0="127.2.0.3", eth0="127.2.0.2", ib0="127.2.0.1")
    assert network.own_interface("127.2.0.0/16") == ("ib0", "127.2.0.1")
    assert network.own_interface("127.9.0.0/16") is None


def test_own_addresses_leave_out_loopback() -> None:
    assert not [own for _, own in network.own_addresses() if own.is_loopback or own.is_link_local]


def test_named_host_must_be_this_one() -> None:
    assert address_to_listen_on("127.0.0.1") == "127.0.0.1"
    assert address_to_listen_on("localhost") == "127.0.0.1"
    with pytest.raises(ConfigError, match=r"--head: 198\.51\.100\.7 is not an address of this host, which is node 0"):
        address_to_listen_on("198.51.100.7")
    with pytest.raises(ConfigError, match=r"--head: 'nobody\.invalid' cannot be resolved"):
        address_to_listen_on("nobody.invalid")


def test_hint_counts_where_it_is_an_address_of_this_host_that_others_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "_is_own", lambda address: address in ("127.0.1.1", "10.0.0.5", "10.0.9.9"))
    monkeypatch.setattr(network, "address_towards", lambda _: "10.0.9.9")
    names = {"other": "10.0.0.4", "debian": "127.0.1.1", "mine": "10.0.0.5"}

    def resolve(host: str) -> str:
        if host not in names:
            raise socket.gaierror("unknown")
        return names[host]

    monkeypatch.setattr(network, "resolve", resolve)
    assert address_to_listen_on("", ["nobody", "other", "debian", "mine"]) == "10.0.0.5"
    assert address_to_listen_on("", ["nobody", "other", "debian"]) == "10.0.9.9"


def test_host_without_any_network_has_all_nodes_on_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "_candidates", lambda _: ["127.0.0.1"])
    assert address_to_listen_on("") == "127.0.0.1"


def test_own_address_towards_loopback_is_loopback() -> None:
    assert address_towards("127.0.0.1") == "127.0.0.1"


def test_a_store_serves_at_an_ipv6_address() -> None:
    if not Path("/proc/net/if_inet6").read_text():
        pytest.skip("this machine has no IPv6")
    assert address_to_listen_on("::1") == "::1"
    assert network.is_loopback("::1") and not network.is_loopback("fd00::1")
    server, port = serve_store("::1", timedelta(seconds=10))
    client = connect_store("::1", port, timedelta(seconds=10))
    client.set("key", b"value")
    assert server.get("key") == b"value"
