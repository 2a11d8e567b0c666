"""When two ends share memory, and when not."""

from pathlib import Path

import msgspec
import pytest

from asyncflow.errors import TransportError
from asyncflow.transport.frame import Limits
from asyncflow.transport.meeting import SWITCH, Capability, ChannelEnd, Introductions, Sharing, this_host

LIMITS = Limits(arena_bytes=2**20)
OFF = Limits(shared_memory=False)


def test_ends_on_one_host_can_share() -> None:
    one, other = Sharing("one", LIMITS), Sharing("other", LIMITS)
    assert one.negotiate_sharing(other.hello).obstacle == ""
    assert one.conclude_sharing(Capability("")) is not None


def test_either_end_can_switch_it_off(monkeypatch: pytest.MonkeyPatch) -> None:
    on, off = Sharing("on", LIMITS), Sharing("off", OFF)
    monkeypatch.setenv(SWITCH, "0")
    also_off = Sharing("also off", LIMITS)
    for own, peer in ((on, off), (off, on), (also_off, on), (on, also_off)):
        assert own.negotiate_sharing(peer.hello).obstacle == "switched off"


def test_another_host_is_not_looked_up() -> None:
    one = Sharing("one", LIMITS)
    assert one.negotiate_sharing(msgspec.structs.replace(one.hello, host="other")).obstacle == "another host"


def test_process_whose_memory_cannot_be_mapped_is_an_obstacle() -> None:
    hello = Sharing("one", LIMITS).hello
    assert hello.arena is not None
    own = Sharing("other", LIMITS)
    bad = [msgspec.structs.replace(hello, pid=2**22 + 1)]
    for changes in ({"fd": -1}, {"fd": 0}, {"token": b"x" * 16}, {"num_bytes": 2**21}, {"num_bytes": -1}):
        bad.append(msgspec.structs.replace(hello, arena=msgspec.structs.replace(hello.arena, **changes)))
    for peer in bad:
        assert "arena" in own.negotiate_sharing(peer).obstacle


def test_what_only_one_end_could_open_is_not_used() -> None:
    one, other = Sharing("one", LIMITS), Sharing("other", LIMITS)
    assert one.negotiate_sharing(other.hello).obstacle == ""
    assert one.conclude_sharing(Capability("another host")) is None
    assert other.conclude_sharing(Capability("")) is None


def test_platform_without_namespaces_uses_the_wire(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> str:
        raise FileNotFoundError("/proc/self/ns/pid")

    monkeypatch.setattr("asyncflow.transport.meeting.this_host", missing)
    own = Sharing("other", LIMITS)
    assert own.hello.arena is None
    assert own.hello.pipe is None
    assert own.conclude_sharing(Capability("")) is None


def test_host_is_named_by_its_boot_and_its_namespaces() -> None:
    boot, *spaces = this_host().split("/")
    assert len(boot) == 36
    assert spaces == [str(Path(f"/proc/self/ns/{kind}").stat().st_ino) for kind in ("pid", "net")]


def test_introductions_are_believed_of_the_other_end_of_this_pair_only() -> None:
    key, hello, capability = b"of the pair", ChannelEnd("host", 1, None), Capability("")
    client, server = Introductions(key, is_server=False), Introductions(key, is_server=True)
    assert server.open(client.seal_message(hello), ChannelEnd) == hello
    assert client.open(server.seal_message(capability), Capability) == capability
    other = Introductions(b"of another", is_server=False)
    changed = client.seal_message(hello)[:-1] + b"\x00"
    for said in (other.seal_message(hello), server.seal_message(hello), client.seal_message(capability), changed, b""):
        with pytest.raises(TransportError, match="does not know the job's secret"):
            server.open(said, ChannelEnd)
