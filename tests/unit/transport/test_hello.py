"""When two ends share memory, and when not."""

from pathlib import Path

import msgspec
import pytest

from asyncflow.errors import TransportError
from asyncflow.transport.frame import Frame, FrameKind, Limits, Route
from asyncflow.transport.hello import SWITCH, Hello, Introductions, Verdict, this_host
from asyncflow.transport.sharing import Sharing

LIMITS = Limits(arena_bytes=2**20)
OFF = Limits(shared_memory=False)


def test_ends_on_one_host_can_share() -> None:
    one, other = Sharing("one", LIMITS), Sharing("other", LIMITS)
    assert one.judge(other.hello).obstacle == ""
    one.settle(Verdict(""))
    assert one.usable


def test_either_end_can_switch_it_off(monkeypatch: pytest.MonkeyPatch) -> None:
    on, off = Sharing("on", LIMITS), Sharing("off", OFF)
    monkeypatch.setenv(SWITCH, "0")
    also_off = Sharing("also off", LIMITS)
    for own, peer in ((on, off), (off, on), (also_off, on), (on, also_off)):
        assert own.judge(peer.hello).obstacle == "switched off"


def test_another_host_is_not_looked_up() -> None:
    one = Sharing("one", LIMITS)
    assert one.judge(msgspec.structs.replace(one.hello, host="other")).obstacle == "another host"


def test_process_whose_memory_cannot_be_mapped_is_an_obstacle() -> None:
    hello = Sharing("one", LIMITS).hello
    assert hello.arena is not None
    own = Sharing("other", LIMITS)
    bad = [msgspec.structs.replace(hello, pid=2**22 + 1)]
    for changes in ({"fd": -1}, {"fd": 0}, {"token": b"x" * 16}, {"num_bytes": 2**21}, {"num_bytes": -1}):
        bad.append(msgspec.structs.replace(hello, arena=msgspec.structs.replace(hello.arena, **changes)))
    for peer in bad:
        assert "arena" in own.judge(peer).obstacle


def test_arena_that_the_peer_cannot_map_is_given_up() -> None:
    own = Sharing("other", LIMITS)
    own.settle(Verdict("another host"))
    assert not own.usable
    assert not own.place(Frame(FrameKind.REQUEST, route=Route.SHARED, body=b"x" * 9000, outside=True), None)
    with pytest.raises(TransportError, match="no memory is shared"):
        own.release(Frame(FrameKind.REPLY, releases=[4096]))


def test_platform_without_namespaces_uses_the_wire(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> str:
        raise FileNotFoundError("/proc/self/ns/pid")

    monkeypatch.setattr("asyncflow.transport.sharing.this_host", missing)
    assert not Sharing("other", LIMITS).usable


def test_host_is_named_by_its_boot_and_its_namespaces() -> None:
    boot, *spaces = this_host().split("/")
    assert len(boot) == 36
    assert spaces == [str(Path(f"/proc/self/ns/{kind}").stat().st_ino) for kind in ("pid", "net")]


def test_introductions_are_believed_of_the_other_end_of_this_pair_only() -> None:
    key, hello, verdict = b"of the pair", Hello("host", 1, None), Verdict("")
    client, server = Introductions(key, is_server=False), Introductions(key, is_server=True)
    assert server.open(client.seal(hello), Hello) == hello
    assert client.open(server.seal(verdict), Verdict) == verdict
    other = Introductions(b"of another", is_server=False)
    changed = client.seal(hello)[:-1] + b"\x00"
    for said in (other.seal(hello), server.seal(hello), client.seal(verdict), changed, b""):
        with pytest.raises(TransportError, match="does not know the job's secret"):
            server.open(said, Hello)
